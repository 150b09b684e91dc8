"""The fused Chamfer distance as torch sees it on a GPU: opcheck, `torch.compile`, memory, second derivatives."""

from __future__ import annotations

import pytest
import torch

from inputs import on_gpu as make
from maxsim_kernels import chamfer_distance
from maxsim_kernels.chamfer import chamfer

POISON = False  # memory and tracing are the subject
SINGLE = torch.float32


def clouds(N=600, M=500, d=3):
    return make.gauss(N, d, dtype=SINGLE).requires_grad_(), make.gauss(M, d, dtype=SINGLE, seed=1).requires_grad_()


def test_opcheck():
    p, q = clouds(60, 50)
    torch.library.opcheck(torch.ops.maxsim_kernels.chamfer.default, (p, q))
    nearest = torch.ops.maxsim_kernels.chamfer(p.detach(), q.detach())[1]
    grad = torch.ones((), device="cuda")
    torch.library.opcheck(
        torch.ops.maxsim_kernels.chamfer_backward.default, (grad, p.detach(), q.detach(), nearest, True, True)
    )
    torch.library.opcheck(
        torch.ops.maxsim_kernels.chamfer_backward.default, (grad, p.detach(), q.detach(), nearest, False, True)
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend):
    torch._dynamo.reset()
    p, q = clouds()
    need = torch.autograd.grad(chamfer_distance(p, q), (p, q))
    run = torch.compile(chamfer_distance, fullgraph=True, backend=backend)
    got = torch.autograd.grad(run(p, q), (p, q))
    assert all(torch.equal(one, other) for one, other in zip(got, need, strict=True))
    assert torch.equal(run(p.detach(), q.detach()), chamfer_distance(p.detach(), q.detach()))


def test_second_derivative():
    p, q = clouds(60, 50)

    def once(one, other):
        grads = torch.autograd.grad(chamfer_distance(one, other), (one, other), create_graph=True)
        return sum((grad * weight).sum() for grad, weight in zip(grads, weights, strict=True))

    weights = [make.gauss(*one.shape, dtype=SINGLE, seed=5) for one in (p, q)]
    got = torch.autograd.grad(once(p, q), (p, q))
    left, right = p.detach().cpu().double().requires_grad_(), q.detach().cpu().double().requires_grad_()
    weights = [weight.cpu().double() for weight in weights]
    for one, other in zip(got, torch.autograd.grad(once(left, right), (left, right)), strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=0.0, atol=1e-5 * float(other.abs().max()))


def test_eager_training_leaves_the_custom_ops_out(monkeypatch):
    """Their dispatch takes the host longer than the kernels take; the bits are the ops'."""
    p, q = clouds()
    for turn in range(3):  # recorded, then replayed
        need = torch.autograd.grad(torch.ops.maxsim_kernels.chamfer(p, q)[0], (p, q))
        with monkeypatch.context() as patch:
            for name in ("_chamfer", "_chamfer_backward"):
                patch.setattr(chamfer, name, None)
            got = torch.autograd.grad(chamfer_distance(p, q), (p, q))
        assert all(torch.equal(one, other) for one, other in zip(got, need, strict=True)), turn


@pytest.mark.parametrize("d", [3, 128])
def test_memory_is_linear(d):
    """100K points each: the table of distances would be 40 GB."""
    p, q = clouds(100_000, 100_000, d)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chamfer_distance(p, q).backward()
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    assert used <= 3 * (p.numel() + q.numel()) * 4 + (160 << 20), f"{used / 2**20:.0f} MiB"
