"""Training on a GPU: the losses against the CPU, gradient accumulation, autocast and a scaled mixed-precision step."""

from __future__ import annotations

import contextlib

import pytest
import torch

import gradient_truth as gradients
from inputs import on_gpu as make
from maxsim_kernels import Packed, maxsim, maxsim_pairs
from maxsim_kernels.training import contrastive_loss, distillation_loss

D = 128
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
PATHS = ["unified", "atomic", "csr"]


def on_both(loss, *tensors):
    """Loss and gradients of the floating tensors, on the GPU and on the CPU."""
    results = []
    for device in ("cuda", "cpu"):
        made = [x.detach().to(device).requires_grad_(x.is_floating_point()) for x in tensors]
        value = loss(*made)
        leaves = [x for x in made if x.requires_grad]
        results.append(
            [value.detach().cpu(), *(x.cpu() for x in torch.autograd.grad(value, leaves, allow_unused=True) if x is not None)]
        )
    return results


def alike(results, rtol=1e-4):
    for got, need in zip(*results, strict=True):
        assert got.dtype == need.dtype
        assert got.isfinite().all()
        assert (got - need).abs().max() <= rtol * need.abs().max() + 1e-7


@pytest.mark.parametrize("path", ["auto", *PATHS])
@pytest.mark.parametrize("masked", [False, True])
def test_contrastive_loss_as_on_the_cpu(path, masked):
    """Integer tokens: both find the same winners, and only the softmax differs by rounding."""
    tensors = [make.grid(9, 31, 16, dtype=SINGLE), make.grid(12, 63, 16, dtype=SINGLE, seed=1), torch.tensor(200.0)]
    tensors += [make.mask(9, 31), make.lengths(12, high=63)]

    def loss(q, d, temperature, mask, lengths):
        options = {"query_mask": mask, "document_lengths": lengths} if masked else {}
        return contrastive_loss(q, d, temperature=temperature, backward=path, **options)

    alike(on_both(loss, *tensors))


@pytest.mark.parametrize("path", ["auto", *PATHS])
def test_contrastive_loss_of_packed_tokens_as_on_the_cpu(path):
    asked, held = (
        make.packed([4, 1, 31, 20], 16, dtype=SINGLE, make=make.grid),
        make.packed([3, 40, 31, 1, 7, 0], 16, dtype=SINGLE),
    )

    def loss(q, q_offsets, d, d_offsets):
        return contrastive_loss(Packed(q, q_offsets), Packed(d, d_offsets), temperature=100.0, backward=path)

    values = make.grid(*held.values.shape, dtype=SINGLE, seed=1)
    alike(on_both(loss, asked.values, asked.offsets, values, held.offsets))


@pytest.mark.parametrize("path", ["auto", *PATHS])
def test_distillation_loss_as_on_the_cpu(path):
    tensors = [
        make.grid(9, 31, 16, dtype=SINGLE),
        make.grid(9, 5, 63, 16, dtype=SINGLE, seed=1),
        make.mask(9, 5),
        make.mask(9, 5, 63),
    ]
    teacher = make.gauss(9, 5, dtype=SINGLE)

    def loss(q, d, candidates, mask):
        return distillation_loss(
            q, d, teacher.to(q.device), candidate_mask=candidates, document_mask=mask, temperature=100.0, backward=path
        )

    alike(on_both(loss, *tensors))


@pytest.mark.parametrize("path", PATHS)
def test_gradient_accumulation(path):
    """Micro-batches of queries against the same documents add up to the whole batch."""
    queries, documents = make.grid(8, 31, 16, dtype=SINGLE), make.grid(9, 63, 16, dtype=SINGLE, seed=1)
    upstream, found = make.grid(8, 9, dtype=SINGLE, seed=2), []
    for parts in (1, 4):
        q, d = queries.clone().requires_grad_(), documents.clone().requires_grad_()
        for some, weight in zip(q.chunk(parts), upstream.chunk(parts), strict=True):
            (maxsim(some, d, backward=path) * weight).sum().backward()
        found.append((q.grad, d.grad))
    for whole, pieces in zip(*found, strict=True):
        assert torch.equal(whole, pieces)


@pytest.mark.filterwarnings("ignore:maxsim_kernels. autocast")
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("path", ["auto", *PATHS])
def test_autocast_leaves_dtypes_alone(path, dtype):
    for tokens in (SINGLE, HALF):
        for kind in ("few", "packed", "per query", "pairs"):
            queries, documents, pairs = gradients.case(kind, make.grid, tokens, d=16)
            need = gradients.step(queries, documents, gradients.integers(), pairs=pairs, backward=path)
            with torch.autocast("cuda", dtype=dtype):
                got = gradients.step(queries, documents, need.upstream, pairs=pairs, backward=path)
            assert make.same_bits(got.scores, need.scores)
            assert all(torch.equal(one, other) for one, other in zip(got.grads, need.grads, strict=True))
            assert {grad.dtype for grad in got.grads} == {tokens}


@pytest.mark.parametrize("path", ["auto", "csr"])
def test_mixed_precision_step(path):
    """Encoder under autocast, loss scaled: FP32 weights get the gradient that plain torch gives for the same FP16 tokens."""
    encoder = torch.nn.Linear(24, 64, device=make.device)
    inputs, others = make.gauss(9, 31, 24, dtype=SINGLE), make.gauss(9, 63, 24, dtype=SINGLE, seed=1)
    found = []
    for impl in ("triton", "reference"):
        encoder.zero_grad()
        with torch.autocast("cuda", dtype=HALF):
            queries, documents = encoder(inputs), encoder(others)
            assert queries.dtype == HALF
            loss = contrastive_loss(queries, documents, temperature=50.0, backward=path, impl=impl)
        torch.amp.GradScaler("cuda", init_scale=128.0).scale(loss).backward()
        found.append([loss.detach(), encoder.weight.grad, encoder.bias.grad])
    for got, need in zip(*found, strict=True):
        assert got.dtype == SINGLE
        assert (got - need).abs().max() <= 1e-2 * need.abs().max()


def test_a_loss_that_needs_no_gradient():
    queries, documents = make.gauss(7, 31, D).requires_grad_(), make.gauss(9, 63, D, seed=1).requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode(), contextlib.nullcontext()):
        with context:
            assert maxsim(queries, documents).requires_grad == torch.is_grad_enabled()


@pytest.mark.parametrize("layout", ["one query", "few", "pairs", "packed queries"])
def test_scores_may_be_modified_in_place(layout):
    """On the first call of a signature, on the second, which is recorded, and on later ones, which are replayed."""
    documents = make.gauss(6, 63, D, seed=1)
    few = make.gauss(6, 31, D)
    asked: torch.Tensor | Packed = {"one query": few[0].clone(), "packed queries": make.packed([4, 0, 31, 1, 7, 9], D)}.get(
        layout, few
    )
    for _ in range(2):
        leaf = (asked.values if isinstance(asked, Packed) else asked).detach().requires_grad_()
        queries = asked.with_values(leaf) if isinstance(asked, Packed) else leaf
        scores = (maxsim_pairs if layout == "pairs" else maxsim)(queries, documents)
        scores *= 2
        scores.sum().backward()
        first = leaf.grad.clone()
        leaf.grad = None
        (maxsim_pairs if layout == "pairs" else maxsim)(queries, documents).sum().backward()
        assert torch.equal(first, 2 * leaf.grad)


def test_wrong_ranks_are_named_where_gradients_are_needed():
    queries = make.gauss(3, 31, D).requires_grad_()
    with pytest.raises(ValueError, match="documents: got"):
        maxsim(queries, make.gauss(16))
