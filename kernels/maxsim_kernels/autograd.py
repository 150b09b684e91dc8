"""Autograd of eager calls on a GPU: the same kernels as the custom ops of `ops.py`, without what a custom op costs the host.

A training step at ColBERT's sizes takes the GPU 0.2 ms; torch's dispatch of two custom ops takes the host longer. Compiled and traced
calls go through the ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
        route: Route = ctx.route
        need_queries, need_documents = ctx.needs_input_grad[:2]
        one = query_starts is None and queries.dim() == 2
        # Compiled autograd traces this, and `is_grads_batched` gives gradients without a pointer: the op takes both.
        run = ops.backward if torch.compiler.is_compiling() or not torch._C._has_storage(grad) else backward
        query_grad, document_grad = ops.first_only(
            run,
            grad[None] if one else grad,
            argmax[None] if one else argmax,
            queries[None] if one else queries,
            query_starts,
            documents,
            document_starts,
            route.layout,
            need_queries,
            need_documents,
            route.path,
            route.queries_end_to_end,
            route.documents_end_to_end,
        )
        if need_queries and one:
            query_grad = query_grad[0]
        return query_grad if need_queries else None, document_grad if need_documents else None, None, None, None, None


def differentiable(
    queries: Tensor,
    documents: Tensor,
    query_starts: Tensor | None,
    document_starts: Tensor | None,
    route: Route,
    score: Callable[[], Any],
) -> tuple[Tensor, Tensor]:
    """What `score()` returns, `(scores, argmax)`, with scores differentiable in queries and documents (values of packed ones)."""
    return _Scores.apply(queries, documents, query_starts, document_starts, route, score)
