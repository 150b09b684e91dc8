"""In-batch-negatives cross-entropy of scores, its mean, and its gradient with respect to the scores, in three launches.

Source: paper section 'Training Step'; which queries and documents count: `training.contrastive_loss`. Plain torch takes some
twenty-five kernels for the same, which take the host longer than a small step takes the GPU.

- `_terms_kernel`: a program a query. Its largest logit, the logarithm of its sum of exponentials, and its term of the mean.
- `_mean_kernel`: one program adds the terms, in order: the same bits every time.
- `_slopes_kernel`: a program a query, in the backward: (softmax - 1 at the positive) times the gradient of the loss.

A positive that is no document makes the loss, and its query's gradients, NaN.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.gpu.geometry import padded
from maxsim_kernels.gpu.launch import empty, launch, planned, record, repeated, signature

_BLOCK = 1024  # documents, or terms, that a program reads at once
# Numbers kept of each query: largest logit, logarithm of the sum, whether it counts (NaN: its positive is no document), its term
# of the mean.
_STATES = tl.constexpr(4)


@triton.jit
def _logits(score_ptr, query, first, documents, temperature, usable, BLOCK: tl.constexpr):
    """A query's scores / temperature from document `first` on, and which documents have scores.

    Documents without one (empty) are at -inf, or at 0 where the query does not count because its positive is empty.
    """
    at = first + tl.arange(0, BLOCK)
    inside = at < documents
    score = tl.load(score_ptr + query.to(tl.int64) * documents + at, mask=inside, other=-float("inf"))
    empty = score == -float("inf")
    nothing = tl.where(inside, tl.where(usable == 0.0, 0.0, -float("inf")), -float("inf"))
    return tl.where(empty, nothing, tl.div_rn(score, tl.full([BLOCK], temperature, tl.float32))), inside & (empty == 0)


@triton.jit
def _positive(target_ptr, query, HAS_TARGETS: tl.constexpr):
    if HAS_TARGETS:
        target = tl.load(target_ptr + query)
    else:
        target = query.to(tl.int64)
    return target


@triton.jit(do_not_specialize=["documents", "temperature"])
def _terms_kernel(
    score_ptr, target_ptr, state_ptr, documents, temperature, HAS_TARGETS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    query = tl.program_id(0)
    target = _positive(target_ptr, query, HAS_TARGETS)
    there = (target >= 0) & (target < documents)
    own = tl.load(score_ptr + query.to(tl.int64) * documents + target, mask=there, other=float("nan"))
    usable = tl.where(own == -float("inf"), 0.0, 1.0)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, documents, BLOCK):
        logits, _ = _logits(score_ptr, query, first, documents, temperature, usable, BLOCK)
        best = tl.maximum(best, logits)
    most = tl.max(best, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, documents, BLOCK):
        logits, _ = _logits(score_ptr, query, first, documents, temperature, usable, BLOCK)
        total += tl.exp(logits - most)
    rest = tl.log(tl.sum(total, 0))
    logit = tl.where(usable == 0.0, 0.0, tl.div_rn(own, tl.full([], temperature, tl.float32)))
    counts = tl.where(there, usable, float("nan"))
    state = state_ptr + query * _STATES
    tl.store(state, most)
    tl.store(state + 1, rest)
    tl.store(state + 2, counts)
    tl.store(state + 3, (rest - (logit - most)) * counts)


@triton.jit(do_not_specialize=["queries"])
def _mean_kernel(state_ptr, out_ptr, queries, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, queries, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(state_ptr + at * _STATES + 3, mask=at < queries, other=0.0)
    tl.store(out_ptr, tl.sum(total, 0) / queries)


@triton.jit(do_not_specialize=["queries", "documents", "temperature"])
def _slopes_kernel(
    above_ptr, score_ptr, target_ptr, state_ptr, out_ptr, queries, documents, temperature, HAS_TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    target = _positive(target_ptr, query, HAS_TARGETS)
    state = state_ptr + query * _STATES
    most = tl.load(state)
    rest = tl.load(state + 1)
    counts = tl.load(state + 2)
    weight = tl.load(above_ptr).to(tl.float32) / queries * counts / temperature
    for first in range(0, documents, BLOCK):
        logits, there = _logits(score_ptr, query, first, documents, temperature, counts, BLOCK)
        at = first + tl.arange(0, BLOCK)
        slope = (tl.exp(logits - most - rest) - tl.where(at == target, 1.0, 0.0)) * weight
        place = out_ptr + query.to(tl.int64) * documents + at
        tl.store(place, tl.where(there, slope, 0.0), mask=at < documents)


class Contrast(NamedTuple):
    """What a loss was made of, and what its gradient needs, all contiguous: scores `[B, N]` float32, positives `[B]` int64 (None:
    document i is query i's), and the numbers of each query (`_STATES`)."""

    scores: Tensor
    positives: Tensor | None
    states: Tensor
    temperature: float


def loss(scores: Tensor, positives: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy, and the states that `Contrast` keeps."""
    inputs = (scores, positives)
    key = signature(inputs, "contrast", temperature)
    run = partial(_loss, scores, positives, temperature)
    if not scores.is_cuda:
        return run()
    plan = planned(key)
    if plan is not None:
        return plan.run(inputs, scores.device)
    with torch.cuda.device(scores.device):
        return record(key, inputs, scores.device, run) if repeated(key) else run()


def _loss(scores: Tensor, positives: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    batch, documents = scores.shape
    mean, states = empty((), scores.dtype, scores.device), empty((batch, _STATES.value), scores.dtype, scores.device)
    targets = positives if positives is not None else scores
    launch(
        _terms_kernel, batch, scores, targets, states, documents, float(temperature),
        HAS_TARGETS=positives is not None, BLOCK=min(_BLOCK, padded(documents)), warps=4,
    )  # fmt: skip
    launch(_mean_kernel, 1, states, mean, batch, BLOCK=min(_BLOCK, padded(batch)), warps=4)
    return mean, states


def slopes(above: Tensor, made: Contrast, out: Tensor) -> None:
    """The loss's gradient with respect to the scores, times `above` (one number), into `out`, of the scores' shape."""
    scores, positives, states, temperature = made
    batch, documents = scores.shape
    launch(
        _slopes_kernel, batch, above, scores, positives if positives is not None else scores, states, out, batch, documents,
        float(temperature), HAS_TARGETS=positives is not None, BLOCK=min(_BLOCK, padded(documents)), warps=4,
    )  # fmt: skip
