"""The fused Chamfer distance on a GPU: nearest points and values against FP64 brute force, the filter's error bound, gradients."""

from __future__ import annotations

import pytest
import torch

from chamfer_cases import require_filter_bound
from inputs import on_gpu as make
from maxsim_kernels import chamfer_distance

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
SHAPES = [(1, 1), (1, 257), (63, 7), (100, 1000), (1000, 999), (5000, 300), (4097, 6000)]


def nearest_of(points, targets, work=torch.float64):
    """Squared distance to the nearest target and its first index, by brute force."""
    found = []
    for block in points.to(work).split(max(1, (1 << 26) // (targets.shape[0] * targets.shape[1]))):
        table = (block[:, None] - targets.to(work)[None]).square().sum(-1)
        first = table.argmin(1)
        found.append((table.gather(1, first[:, None])[:, 0], first))
    return torch.cat([one for one, _ in found]), torch.cat([one for _, one in found])


def distances_to(points, targets, index):
    return (points.double() - targets.double()[index]).square().sum(-1)


def chosen(p, q):
    """The kernels' own nearest points, of p and of q, and the distance."""
    from maxsim_kernels.chamfer import nearest

    distance, both = nearest.forward(p, q, True)
    return both[: len(p)].long() - len(p), both[len(p) :].long(), distance


def agree(p, q, exact=False):
    """Values within 1e-5, nearest points as near as FP32 can tell; `exact`: ties are exact, so indices are the first."""
    need = 0.0
    of_p, of_q, distance = chosen(p, q)
    for points, targets, index in ((p, q, of_p), (q, p, of_q)):
        least, first = nearest_of(points, targets)
        assert 0 <= int(index.min()) <= int(index.max()) < len(targets)
        torch.testing.assert_close(distances_to(points, targets, index), least, rtol=1e-5, atol=0.0, equal_nan=True)
        if exact:
            assert torch.equal(index, first)
        need = need + least.mean()
    torch.testing.assert_close(distance.double(), need, rtol=1e-5, atol=0.0, equal_nan=True)
    again = chamfer_distance(p, q)
    assert torch.equal(again, distance) or (again.isnan() and distance.isnan())


def slow_gradients(p, q, of_p, of_q, grad):
    left, right = p.double().requires_grad_(), q.double().requires_grad_()
    loss = (left - right[of_p]).square().sum(1).mean() + (right - left[of_q]).square().sum(1).mean()
    return torch.autograd.grad(grad * loss, (left, right))


@pytest.mark.parametrize(("N", "M"), SHAPES)
@pytest.mark.parametrize("d", [1, 3, 4, 16, 20, 21, 64, 128, 256])
def test_value(N, M, d):
    agree(make.gauss(N, d, dtype=SINGLE), make.gauss(M, d, dtype=SINGLE, seed=1))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("d", [3, 128])
def test_half_precision_points(dtype, d):
    agree(make.gauss(1000, d, dtype=dtype), make.gauss(777, d, dtype=dtype, seed=1))


@pytest.mark.parametrize(("N", "M", "d"), [(100_000, 1000, 3), (999, 70_000, 3), (30_000, 30_000, 3), (3000, 20_000, 128)])
def test_large_clouds(N, M, d):
    """Several slices of the chunk maxima, and programs of very different shares."""
    agree(make.gauss(N, d, dtype=SINGLE), make.gauss(M, d, dtype=SINGLE, seed=1))


@pytest.mark.parametrize("d", [3, 128])
@pytest.mark.parametrize("shift", [1000.0, -1000.0])
def test_translation(d, shift):
    agree(make.gauss(2000, d, dtype=SINGLE) + shift, make.gauss(3000, d, dtype=SINGLE, seed=1) + shift)


@pytest.mark.parametrize("d", [1, 3, 16])
def test_ties_go_to_the_first_index(d):
    p, q = make.grid(1000, d, dtype=SINGLE), make.grid(1500, d, dtype=SINGLE, seed=1)
    agree(p, q, exact=True)
    same = torch.ones(700, d, device="cuda")
    agree(same, same[:400].clone(), exact=True)


def test_identical_clouds_are_at_zero():
    for d in (3, 128):
        p = make.gauss(3000, d, dtype=SINGLE) + 1000
        assert float(chamfer_distance(p, p.flip(0))) == 0.0
        assert float(chamfer_distance(p, p)) == 0.0


def test_close_clusters_of_wide_points():
    """Targets so close together that rounding to FP16 reorders them."""
    agree(
        make.gauss(500, 128, dtype=SINGLE),
        make.gauss(1, 128, dtype=SINGLE, seed=1) + 1e-3 * make.gauss(3000, 128, dtype=SINGLE, seed=2),
    )


def test_a_far_outlier():
    p, q = make.gauss(2000, 3, dtype=SINGLE), make.gauss(1500, 3, dtype=SINGLE, seed=1)
    p[11] = 1e6
    agree(p, q)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("d", [3, 128])
def test_numbers_that_are_none(bad, d):
    p, q = make.gauss(500, d, dtype=SINGLE), make.gauss(700, d, dtype=SINGLE, seed=1)
    p[77, d - 1] = bad
    agree(p, q)
    agree(q, p)
    of_p, _, distance = chosen(p, q)
    assert distance.isnan() if bad != bad else distance == float("inf")
    _, first = nearest_of(p, q)
    assert torch.equal(of_p[77:78], first[77:78])


@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_squares_that_overflow_or_vanish(factor):
    """All distances are equal in FP32: the outcome is that of a plain FP32 scan."""
    p, q = make.gauss(300, 3, dtype=SINGLE) * factor, make.gauss(400, 3, dtype=SINGLE, seed=1) * factor
    of_p, of_q, distance = chosen(p, q)
    assert not of_p.any()
    assert not of_q.any()
    assert float(distance) == (float("inf") if factor > 1 else 0.0)


def test_strides():
    p, q = make.gauss(3, 500, dtype=SINGLE).T, make.gauss(700, 6, dtype=SINGLE, seed=1)[:, ::2]
    agree(p, q)


@pytest.mark.parametrize(("d", "shift"), [(3, 0.0), (3, 1000.0), (16, 0.0), (20, 3.0), (64, 0.0), (128, 0.0), (256, 0.0)])
def test_the_filter_keeps_its_bound(d, shift):
    """Maxima as the matrix units give them."""
    p = make.gauss(1000, d, dtype=SINGLE) + shift
    q = 0.3 * make.gauss(3000, d, dtype=SINGLE, seed=1) + shift
    p[0] *= 1e-4
    require_filter_bound(p, q)


@pytest.mark.parametrize(
    ("N", "M", "d"), [(1, 1, 3), (1, 700, 3), (1000, 1500, 3), (999, 500, 20), (600, 777, 128), (300, 200, 256)]
)
@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_gradient(N, M, d, shift):
    p, q = make.gauss(N, d, dtype=SINGLE) + shift, make.gauss(M, d, dtype=SINGLE, seed=1) + shift
    of_p, of_q, _ = chosen(p, q)
    need = slow_gradients(p, q, of_p, of_q, -1.5)
    left, right = p.clone().requires_grad_(), q.clone().requires_grad_()
    both = torch.autograd.grad(-1.5 * chamfer_distance(left, right), (left, right))
    only_p = torch.autograd.grad(-1.5 * chamfer_distance(left, q), left)
    only_q = torch.autograd.grad(-1.5 * chamfer_distance(p, right), right)
    for got, truth in zip(both, need, strict=True):
        scale = float(truth.abs().max())
        torch.testing.assert_close(got.double(), truth, rtol=0.0, atol=1e-5 * scale + 1e-30)
    assert torch.equal(only_p[0], both[0])
    assert torch.equal(only_q[0], both[1])


@pytest.mark.parametrize(("dtype", "unit"), [(HALF, 2.0**-10), (BFLOAT, 2.0**-7)])
def test_gradient_of_half_precision_points(dtype, unit):
    p, q = make.gauss(600, 3, dtype=dtype), make.gauss(500, 3, dtype=dtype, seed=1)
    of_p, of_q, _ = chosen(p, q)
    need = slow_gradients(p, q, of_p, of_q, 1.0)
    left, right = p.clone().requires_grad_(), q.clone().requires_grad_()
    for got, truth in zip(torch.autograd.grad(chamfer_distance(left, right), (left, right)), need, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), truth, rtol=unit, atol=2.0**-24)


@pytest.mark.parametrize("d", [3, 128])
def test_one_point_that_is_everybodys_nearest(d):
    p, q = make.gauss(2000, d, dtype=SINGLE), make.gauss(30_000, d, dtype=SINGLE, seed=1) + 100
    p[7] += 50
    of_p, of_q, _ = chosen(p, q)
    assert bool((of_q == 7).all())
    need = slow_gradients(p, q, of_p, of_q, 1.0)
    left, right = p.clone().requires_grad_(), q.clone().requires_grad_()
    for got, truth in zip(torch.autograd.grad(chamfer_distance(left, right), (left, right)), need, strict=True):
        torch.testing.assert_close(got.double(), truth, rtol=0.0, atol=1e-5 * float(truth.abs().max()))


def test_the_same_bits_every_time():
    """Replayed launches, other data between them, and clouds of the same shapes on another stream."""
    p, q = make.gauss(5000, 3, dtype=SINGLE).requires_grad_(), make.gauss(4000, 3, dtype=SINGLE, seed=1).requires_grad_()
    first = torch.autograd.grad(chamfer_distance(p, q), (p, q))
    value = chamfer_distance(p.detach(), q.detach())
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for turn in range(20):
        chamfer_distance(make.gauss(5000, 3, dtype=SINGLE, seed=turn + 2), q.detach())
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            again = torch.autograd.grad(chamfer_distance(p, q), (p, q))
            assert torch.equal(chamfer_distance(p.detach(), q.detach()), value)
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(again, first, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_waits_for_nothing():
    """Neither forward nor backward reads a value back."""
    p, q = make.gauss(3000, 3, dtype=SINGLE).requires_grad_(), make.gauss(2000, 3, dtype=SINGLE, seed=1).requires_grad_()
    chamfer_distance(p, q).backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        chamfer_distance(p.detach(), q.detach())
        chamfer_distance(p, q).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_is_not_fused_is_said():
    for d, dtype in ((300, SINGLE), (3, torch.float64)):
        p, q = make.gauss(50, d, dtype=dtype), make.gauss(40, d, dtype=dtype, seed=1)
        with pytest.warns(UserWarning, match="no fused Chamfer kernel"):
            got = chamfer_distance(p, q)
        need = nearest_of(p, q)[0].mean() + nearest_of(q, p)[0].mean()
        torch.testing.assert_close(got.double(), need, rtol=1e-5, atol=0.0)
