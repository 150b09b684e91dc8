"""The contrastive loss as one node, and what its step launches on a GPU: against the CPU, the same bits whoever begins the lists."""

from __future__ import annotations

import pytest
import torch
import triton

from inputs import on_gpu as make
from maxsim_kernels import Packed, maxsim
from maxsim_kernels.gpu import launch
from maxsim_kernels.gpu.backward import gradients, inverse_grid
from maxsim_kernels.gpu.backward.kernels import _sum_kernel
from maxsim_kernels.training import contrastive_loss

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32


def step(queries, documents, above=1.0, **options):
    """Loss and both gradients."""
    q, d = (one.detach().clone().requires_grad_() for one in (queries, documents))
    loss = contrastive_loss(q, d, **options)
    return [loss.detach(), *torch.autograd.grad(loss, (q, d), torch.full_like(loss, above))]


def alike(results, others, rtol=1e-4):
    for got, need in (tuple(one.detach().cpu() for one in both) for both in zip(results, others, strict=True)):
        assert got.dtype == need.dtype
        assert got.isfinite().all()
        assert (got.float() - need.float()).abs().max() <= rtol * need.float().abs().max() + 1e-7


def on_cpu(options):
    return {name: one.cpu() if isinstance(one, torch.Tensor) else one for name, one in options.items()}


@pytest.mark.parametrize("path", ["auto", "unified", "atomic"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_as_on_the_cpu(path, masked, named):
    """Integer tokens: both find the same winners, and only the softmax differs by rounding. Four calls: the later ones are replays."""
    options = {"positives": torch.arange(9, device=make.device).flip(0) + 2} if named else {}
    if masked:
        options |= {"query_mask": make.mask(9, 31), "document_lengths": make.lengths(12, high=63)}
    for seed in range(4):
        q, d = make.grid(9, 31, 16, dtype=SINGLE, seed=2 * seed), make.grid(12, 63, 16, dtype=SINGLE, seed=2 * seed + 1)
        need = step(q.cpu(), d.cpu(), temperature=200.0, **on_cpu(options))
        alike(step(q, d, temperature=200.0, backward=path, **options), need)


@pytest.mark.parametrize(("batch", "count"), [(1, 1), (3, 1023), (3, 1025), (1025, 1100)])
def test_counts_around_a_block(batch, count):
    q, d = make.grid(batch, 2, 16, dtype=SINGLE), make.grid(count, 3, 16, dtype=SINGLE, seed=1)
    alike(step(q, d, temperature=20.0), step(q.cpu(), d.cpu(), temperature=20.0))


def test_one_node_and_torchs_loss_agree():
    """A temperature that is a tensor takes torch's operators on the same scores."""
    for dtype, rtol in ((SINGLE, 1e-5), (HALF, 2e-3), (BFLOAT, 2e-2)):
        q, d = make.gauss(128, 32, 128, dtype=dtype), make.gauss(128, 180, 128, dtype=dtype, seed=1)
        for above in (1.0, 1024.0):
            one = step(q, d, above, temperature=30.0)
            alike(one, step(q, d, above, temperature=torch.tensor(30.0, device=make.device)), rtol)


def test_packed_tokens_as_on_the_cpu():
    asked, held = (
        make.packed([4, 1, 31, 20], 16, dtype=SINGLE, make=make.grid),
        make.packed([3, 40, 31, 1, 7, 0], 16, dtype=SINGLE),
    )
    values = make.grid(*held.values.shape, dtype=SINGLE, seed=1)
    found = []
    for device in (make.device, "cpu"):
        q, d = (one.detach().to(device).requires_grad_() for one in (asked.values, values))
        loss = contrastive_loss(Packed(q, asked.offsets.to(device)), Packed(d, held.offsets.to(device)), temperature=100.0)
        found.append([loss, *torch.autograd.grad(loss, (q, d))])
    alike(*found)


def test_positives_that_are_no_documents_are_nan():
    q, d = make.gauss(3, 8, 16, dtype=SINGLE), make.gauss(5, 9, 16, dtype=SINGLE, seed=1)
    loss, dq, _ = step(q, d, positives=torch.tensor([0, 5, 2], device=make.device))
    assert loss.isnan()
    assert dq[1].isnan().any()
    assert dq[[0, 2]].isfinite().all()


def test_no_second_derivative_and_gradients_in_batches():
    q, d = make.gauss(3, 8, 16, dtype=SINGLE).requires_grad_(), make.gauss(5, 9, 16, dtype=SINGLE, seed=1)
    (dq,) = torch.autograd.grad(contrastive_loss(q, d), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()
    above = torch.tensor([1.0, -2.0], device=make.device)
    (both,) = torch.autograd.grad(contrastive_loss(q, d), q, above, is_grads_batched=True)
    alike([both], [above.view(2, 1, 1, 1) * dq])


def test_a_captured_step():
    q, d = make.gauss(32, 32, 128).requires_grad_(), make.gauss(32, 180, 128, seed=1).requires_grad_()
    need = step(q, d, temperature=30.0)
    q.grad = d.grad = None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            contrastive_loss(q, d, temperature=30.0).backward()
    torch.cuda.current_stream().wait_stream(side)
    q.grad = d.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = contrastive_loss(q, d, temperature=30.0)
        loss.backward()
    graph.replay()
    assert torch.equal(loss.detach(), need[0])
    assert torch.equal(q.grad, need[1])
    assert torch.equal(d.grad, need[2])


SHAPES = [(8, 32, 8, 180), (32, 32, 32, 1030), (63, 32, 20, 2047), (64, 32, 65, 77), (128, 32, 128, 180), (255, 32, 40, 255)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("hot", [False, True])
def test_whoever_begins_the_lists_gradients_have_the_same_bits(monkeypatch, shape, dtype, hot):
    """One program a document, or counts by atomics and a cumulative sum; `hot`: one token of every document is everybody's."""
    nq, lq, n, ld = shape
    q, d = make.gauss(nq, lq, 128, dtype=dtype), make.gauss(n, ld, 128, dtype=dtype, seed=1)
    if hot:
        q, d = q.abs(), d.clone()
        d[:, ld // 2] = 8.0
    asked, lengths = make.mask(nq, lq), torch.arange(n, device=make.device) * ld // n + 1
    lengths[n // 2] = 0
    upstream = make.gauss(nq, n, dtype=SINGLE, seed=2)

    def made():
        leaves = [one.detach().clone().requires_grad_() for one in (q, d)]
        scores = maxsim(*leaves, query_mask=asked, document_lengths=lengths)
        return torch.autograd.grad(torch.where(scores > -torch.inf, scores, 0.0), leaves, upstream)

    launch.forget()
    found = [made() for _ in range(3)]
    monkeypatch.setattr(inverse_grid, "_TABLE_WINNERS", 0)
    launch.forget()
    need = made()
    launch.forget()
    for one in found:
        assert all(map(torch.equal, one, need))


@pytest.mark.parametrize("dtype", [SINGLE, HALF, BFLOAT])
@pytest.mark.parametrize("parts", range(2, gradients._FEW_PARTS + 1))
def test_parts_are_added_in_the_order_of_torchs_sum(dtype, parts):
    held = make.gauss(parts, 33, 31, dtype=SINGLE)
    out = torch.empty(33, 31, dtype=dtype, device=make.device)
    launch.launch(_sum_kernel, triton.cdiv(out.numel(), 1024), held, out, out.numel(), parts, BLOCK=1024, warps=4)
    assert torch.equal(out, torch.empty_like(out).copy_(held.sum(0)))
