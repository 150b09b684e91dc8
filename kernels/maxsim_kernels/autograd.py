"""Autograd of eager calls on a GPU, one node each: scores alone (`_Scores`), or the contrastive loss and its scores (`_Contrast`).

The same kernels as the custom ops of `ops.py`, without what a custom op costs the host.

A training step at ColBERT's sizes takes the GPU 0.2 ms; torch's dispatch of two custom ops takes the host longer. Compiled and traced
calls go through the ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maxsim_kernels import ops
from maxsim_kernels.checks import Layout


@dataclass(frozen=True)
class Route:
    """What the backward must know besides tensors."""

    layout: Layout
    path: str
    queries_end_to_end: bool
    documents_end_to_end: bool


class Node(NamedTuple):
    """A call: its tokens' values, the starts of packed ones, and `score`, which returns `(scores, argmax)`."""

    queries: Tensor
    documents: Tensor
    query_starts: Tensor | None
    document_starts: Tensor | None
    route: Route
    score: Callable[[], Any]


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        documents: Tensor,
        query_starts: Tensor | None,
        document_starts: Tensor | None,
        route: Route,
        score: Callable[[], Any],
    ) -> tuple[Tensor, Tensor]:
        # A view made here (one query's row, pairs) could not be modified in place by the caller.
        scores, argmax = (one.detach() if one._is_view() else one for one in score())
        ctx.save_for_backward(queries, query_starts, documents, document_starts, argmax)
        ctx.route = route
        ctx.mark_non_differentiable(argmax)
        ctx.set_materialize_grads(False)  # or autograd makes zeros of the winners' size
        return scores, argmax

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        from maxsim_kernels.gpu.backward.gradients import backward

        if grad is None:
            return (None,) * 6
        queries, query_starts, documents, document_starts, argmax = ctx.saved_tensors
        one = query_starts is None and queries.dim() == 2
        run = ops.backward if _traced(grad) else backward
        if not one:
            return *_token_gradients(ctx, run, grad, argmax, queries, query_starts, documents, document_starts), *(None,) * 4
        query_grad, document_grad = _token_gradients(
            ctx, run, grad[None], argmax[None], queries[None], query_starts, documents, document_starts
        )
        return None if query_grad is None else query_grad[0], document_grad, *(None,) * 4


def _traced(grad: Tensor) -> bool:
    """Whether compiled autograd traces this, or `is_grads_batched` gives gradients without a pointer: the op takes both."""
    return torch.compiler.is_compiling() or not torch._C._has_storage(grad)


def _token_gradients(ctx: Any, run: Callable[..., Any], *saved: Any) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries and documents, None where not needed. `saved`: the first arguments of `run`, the scores' gradient first."""
    route: Route = ctx.route
    need_queries, need_documents = ctx.needs_input_grad[:2]
    whole = route.queries_end_to_end, route.documents_end_to_end
    query_grad, document_grad = ops.first_only(run, *saved, route.layout, need_queries, need_documents, route.path, *whole)
    return query_grad if need_queries else None, document_grad if need_documents else None


class _Contrast(torch.autograd.Function):
    """The contrastive loss with its scores. The backward multiplies its slopes by the gradient above (a loss scale) in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        documents: Tensor,
        query_starts: Tensor | None,
        document_starts: Tensor | None,
        route: Route,
        score: Callable[[], Any],
        positives: Tensor | None,
        temperature: float,
    ) -> Tensor:
        from maxsim_kernels.gpu.backward.contrast import loss

        scores, argmax = score()
        mean, states = loss(scores, positives, temperature)
        ctx.save_for_backward(queries, query_starts, documents, document_starts, argmax, scores, positives, states)
        ctx.route, ctx.temperature = route, temperature
        return mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from maxsim_kernels.gpu.backward.contrast import Contrast
        from maxsim_kernels.gpu.backward.gradients import backward

        queries, query_starts, documents, document_starts, argmax, scores, positives, states = ctx.saved_tensors
        made = Contrast(scores, positives, states, ctx.temperature)
        run: Any = partial(backward, contrast=made)
        if _traced(grad):
            run, grad = ops.backward, grad * _slopes(made)
        return *_token_gradients(ctx, run, grad, argmax, queries, query_starts, documents, document_starts), *(None,) * 6


def _slopes(made: Any) -> Tensor:
    """The loss's gradient with respect to the scores, by torch."""
    scores, positives, states, temperature = made
    most, rest, counts, _ = states.unsqueeze(1).unbind(2)
    targets = torch.arange(len(scores), device=scores.device) if positives is None else positives
    chances = torch.exp(scores / temperature - most - rest)
    own = torch.arange(scores.shape[1], device=scores.device) == targets.unsqueeze(1)
    return ((chances - own.to(chances.dtype)) * (counts / len(scores) / temperature)).masked_fill(scores == -math.inf, 0)


def differentiable(node: Node) -> tuple[Tensor, Tensor]:
    """What `node.score()` returns, `(scores, argmax)`, with scores differentiable in queries and documents (values of packed ones)."""
    return _Scores.apply(*node)


def contrastive(node: Node, positives: Tensor | None, temperature: float) -> Tensor:
    """The loss of `training.contrastive_loss`, differentiable as `differentiable`'s scores are."""
    return _Contrast.apply(*node, positives, temperature)
