"""Run under TRITON_INTERPRET=1 in a process of its own (the variable counts before Triton is first imported).

    TRITON_INTERPRET=1 python interpreted_chamfer.py GROUP

Every Chamfer kernel, with small tiles so that small clouds cross tile edges, against FP64 brute force; scratch memory is poisoned.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import quick_interpreter  # noqa: F401 - kernels run under it
import torch

from chamfer_cases import require_filter_bound
from maxsim_kernels import chamfer_distance
from maxsim_kernels.chamfer import chamfer, nearest
from maxsim_kernels.gpu.forward.tuning import Config

CHECKED: list[int] = []
plain = torch.empty
DESCRIPTORS, POINTERS = (9, 0), (8, 0)


def poisoned(*size: Any, **options: Any) -> torch.Tensor:
    """Memory nobody has written shows as NaN or as an index nothing has: a missed store fails loudly."""
    tensor = plain(*size, **options)
    return tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 2**31 - 1)


def set_up(capability: tuple[int, int] = DESCRIPTORS, maxima: int = 1 << 20) -> None:
    nearest.hardware = lambda device: (capability, 2)
    nearest.MAXIMA_BYTES = {True: maxima, False: maxima}
    for key in nearest.FILTERS:
        nearest.FILTERS[key] = Config(32, 32, 4, 1, 2, "interpreter", "small tiles", short=16 if key[0] else 8)
    nearest.REFINE_LOOKS = 1
    nearest.REFINES = {True: (8, 4, 128), False: (16, 4, 512)}


def run(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.empty = poisoned
    try:
        distance, chosen = nearest.forward(p, q, True)
    finally:
        torch.empty = plain
    assert chosen is not None
    assert (distance.shape, distance.dtype, chosen.dtype) == ((), torch.float32, torch.int32)
    return distance, chosen


def split_up(chosen: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest points of p and of q, each in the other cloud's own numbering."""
    return chosen[: len(p)].long() - len(p), chosen[len(p) :].long()


def check(p: torch.Tensor, q: torch.Tensor, exact: bool = True, work: torch.dtype = torch.float64) -> None:
    """`exact`: distances are far enough apart, or exactly equal, so that the first of the smallest is known."""
    distance, chosen = run(p, q)
    between = (p.to(work)[:, None] - q.to(work)[None]).square().sum(-1)
    of_p, of_q = split_up(chosen, p)
    for table, index in ((between, of_p), (between.T, of_q)):
        assert int(index.min()) >= 0
        assert int(index.max()) < table.shape[1]
        if exact:
            assert torch.equal(index, table.argmin(1)), (index, table.argmin(1))
        least = table.min(1).values
        torch.testing.assert_close(table.gather(1, index[:, None])[:, 0], least, rtol=1e-5, atol=0.0, equal_nan=True)
    need = between.min(1).values.mean() + between.min(0).values.mean()
    torch.testing.assert_close(distance.to(work), need, rtol=1e-6, atol=0.0, equal_nan=True)
    CHECKED.append(1)


def check_gradient(p: torch.Tensor, q: torch.Tensor, chosen: torch.Tensor | None = None) -> None:
    """Against FP64 with the same nearest points, every choice of gradients; the same bits each time."""
    chosen = run(p, q)[1] if chosen is None else chosen
    of_p, of_q = split_up(chosen, p)
    grad = torch.tensor(-1.5)
    left, right = p.double().requires_grad_(), q.double().requires_grad_()
    loss = (left - right[of_p]).square().sum(1).mean() + (right - left[of_q]).square().sum(1).mean()
    need = torch.autograd.grad(grad.double() * loss, (left, right))
    held: dict[int, torch.Tensor] = {}
    for need_p, need_q in ((True, True), (True, False), (False, True)):
        torch.empty = poisoned
        try:
            got = nearest.backward(grad, p, q, chosen, need_p, need_q)
        finally:
            torch.empty = plain
        for number, wanted in enumerate((need_p, need_q)):
            assert got[number].dtype == p.dtype
            if not wanted:
                assert got[number].numel() == 0
                continue
            scale = float(need[number].abs().max())
            slack = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[p.dtype] * scale
            torch.testing.assert_close(got[number].double(), need[number], rtol=0.0, atol=slack + 2.0**-24)
            assert torch.equal(got[number], held.setdefault(number, got[number]))
    CHECKED.append(1)


def check_values() -> None:
    for n, m, d in (
        (1, 1, 3), (1, 257, 3), (63, 7, 3), (257, 63, 3), (100, 7, 1), (7, 100, 16), (31, 100, 20), (40, 63, 21), (63, 100, 128),
        (7, 63, 200),
    ):  # fmt: skip
        p, q = torch.randn(n, d), torch.randn(m, d)
        set_up(POINTERS if d in (1, 21) else DESCRIPTORS, maxima=20_000 if n == 257 else 1 << 20)
        check(p, q)
        if n + m < 180:
            distance, nothing = nearest.forward(p, q, False)
            assert nothing is None
            assert torch.equal(distance, run(p, q)[0])
        if d in (3, 20, 200):
            check(100 * p.half(), 100 * q.half(), exact=d > 3)
            check(p.bfloat16(), q.bfloat16(), exact=d > 3)


def check_edges() -> None:
    set_up()
    p, q = torch.randn(35, 3), torch.randn(63, 3)
    for shift in (1000.0, -1000.0):
        check(p + shift, q + shift, exact=False)
    check(torch.randn(20, 128) + 1000, torch.randn(40, 128) + 1000, exact=False)
    for d in (24, 128):  # targets so close together that rounding to FP16 reorders them
        check(torch.randn(20, d), torch.randn(1, d) + 1e-3 * torch.randn(63, d))
    lattice = torch.randint(-2, 3, (80, 3)) / 4  # equal distances and duplicates abound
    check(lattice[:30], lattice[30:])
    check(torch.ones(20, 3), torch.ones(40, 3))  # one point, again and again
    check(p, p.flip(0))
    assert float(run(p, p.flip(0))[0]) == 0.0
    far = p.clone()
    far[11] = 1e6  # what remains of the scale lies within the filter's error: everything is scanned
    check(far, q)
    check(q, far)
    check(p.T.contiguous().T, torch.randn(40, 6)[:, ::2])
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = p.clone()
        broken[13, 1] = broken[34, 2] = bad
        check(broken, q)
        check(q, broken)
        check(broken, broken)
    check(torch.full((5, 3), torch.nan), q[:20])
    wide, others = torch.randn(20, 128), torch.randn(70, 128)
    wide[13, 100] = torch.nan
    others[50, 7] = torch.inf
    check(wide, others)
    check(others, wide)
    # Squares of differences overflow, or vanish, in FP32: all distances are equal, and so is the outcome of a plain FP32 scan.
    for factor in (1e30, 1e-30):
        check(p[:20] * factor, q[:40] * factor, work=torch.float32)


def check_gradients() -> None:
    set_up()
    for n, m, d in ((1, 1, 3), (1, 63, 3), (63, 35, 3), (35, 7, 20), (20, 30, 128), (5, 100, 2)):
        p, q = torch.randn(n, d), torch.randn(m, d)
        check_gradient(p, q)
        check_gradient(p + 1000, q + 1000)
        if n == 63:
            check_gradient(p.half(), q.half())
            check_gradient(p.bfloat16(), q.bfloat16())
            check_gradient(p.T.contiguous().T, q.T.contiguous().T)
    for n, m, d in ((20, 1200, 3), (5, 100, 128)):  # one point is everybody's nearest: lists longer than a tile of them
        p, q = torch.randn(n, d), torch.randn(m, d)
        chosen = torch.cat([torch.full((n,), n + m - 1), torch.full((m,), n // 2)]).int()
        check_gradient(p, q, chosen)


def check_lists() -> None:
    """Atomics may give a list any order: the bits stay. Infinite and NaN differences give what their sum is in any order."""
    set_up()
    original = nearest.launch

    def reversed_lists(kernel: Any, grid: int, *arguments: Any, **constants: Any) -> None:
        if kernel is nearest.gradient_kernel:
            counts, begin, members = arguments[4:7]
            for first, size in zip(begin.tolist(), counts[:-1].tolist(), strict=False):
                members[first : first + size] = members[first : first + size].flip(0)
        original(kernel, grid, *arguments, **constants)

    for d in (3, 128):
        p, q = torch.randn(12, d) * torch.logspace(-3, 3, 12)[:, None], torch.randn(150, d) + 1
        p[5] += 1
        chosen = run(p, q)[1]
        assert int(chosen[len(p) :].bincount().max()) > nearest.LIST_SHORT
        for bad in (0.0, torch.inf, -torch.inf, torch.nan):
            q[17, 1] += bad
            q[18, 2] -= bad
            need = nearest.backward(torch.tensor(0.5), p, q, chosen, True, True)
            nearest.launch = reversed_lists
            try:
                got = nearest.backward(torch.tensor(0.5), p, q, chosen, True, True)
            finally:
                nearest.launch = original
            of_p, of_q = split_up(chosen, p)
            left, right = p.double().requires_grad_(), q.double().requires_grad_()
            loss = (left - right[of_p]).square().sum(1).mean() + (right - left[of_q]).square().sum(1).mean()
            for one, other, true in zip(got, need, torch.autograd.grad(0.5 * loss, (left, right)), strict=True):
                assert torch.equal(one.view(torch.int32), other.view(torch.int32)), (d, bad)
                torch.testing.assert_close(one.double(), true, rtol=1e-6, atol=1e-6, equal_nan=True)
            CHECKED.append(1)


def check_autograd() -> None:
    """Eager calls leave the custom op out, except where the gradient is differentiated again."""
    set_up()
    calls: list[int] = []
    through = chamfer._chamfer_backward

    def fail(*_: Any) -> Any:
        raise AssertionError("went through the custom op")

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return through(*arguments)

    p, q = torch.randn(20, 3).requires_grad_(), torch.randn(33, 3).requires_grad_()
    with mock.patch.multiple(chamfer, _not_fused=lambda p, q: "", _chamfer=fail, _chamfer_backward=fail):
        distance = chamfer_distance(p, q)
        need_distance, chosen = run(p.detach(), q.detach())
        assert torch.equal(distance.detach(), need_distance)
        need = nearest.backward(torch.tensor(3.0), p.detach(), q.detach(), chosen, True, True)
        both = torch.autograd.grad(3 * distance, (p, q))
        only_p = torch.autograd.grad(3 * chamfer_distance(p, q.detach()), p)
        only_q = torch.autograd.grad(3 * chamfer_distance(p.detach(), q), q)
        for got in (both, (*only_p, *only_q)):
            assert all(torch.equal(one, other) for one, other in zip(got, need, strict=True))
        assert torch.equal(chamfer_distance(p.detach(), q.detach()), need_distance)
    CHECKED.append(1)

    weights = torch.randn(20, 3), torch.randn(33, 3)
    of_p, of_q = split_up(chosen, p)

    def twice(p: torch.Tensor, q: torch.Tensor, distance: torch.Tensor) -> tuple[torch.Tensor, ...]:
        of_p, of_q = torch.autograd.grad(distance, (p, q), create_graph=True)
        return torch.autograd.grad((of_p * weights[0]).sum() + (of_q * weights[1]).sum(), (p, q))

    with mock.patch.multiple(chamfer, _not_fused=lambda p, q: "", _chamfer=fail, _chamfer_backward=counted):
        again = twice(p, q, chamfer_distance(p, q))
    assert calls
    left, right = p.detach().double().requires_grad_(), q.detach().double().requires_grad_()
    slow = (left - right[of_p]).square().sum(1).mean() + (right - left[of_q]).square().sum(1).mean()
    for one, other in zip(again, twice(left, right, slow), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    CHECKED.append(1)


def check_bound() -> None:
    """Maxima of the filters against FP64 scores of the centred, scaled inputs: within the error that `refine` relies on."""
    for n, m, d, shift in ((63, 100, 3, 0.0), (63, 100, 3, 1000.0), (100, 40, 16, 0.0), (40, 100, 20, 3.0), (40, 60, 128, 0.0)):
        set_up()
        p, q = torch.randn(n, d) + shift, torch.randn(m, d) * 0.3 + shift
        p[0] *= 1e-4
        require_filter_bound(p, q)
        CHECKED.append(1)


torch.manual_seed(0)
GROUPS = {
    "values": check_values,
    "edges": check_edges,
    "gradients": check_gradients,
    "lists": check_lists,
    "bound": check_bound,
    "autograd": check_autograd,
}
GROUPS[sys.argv[1]]()
sys.stdout.write(f"{len(CHECKED)} checked\n")
