"""The custom ops: schemas of tensors and scalars only, with fake and autograd registrations, so that `torch.compile` sees one node.

`maxsim_kernels::forward` scores every layout; `maxsim_kernels::backward` turns saved winners into gradients. Checks of tensor
*values* happen inside. The quantised layouts pass codes as `documents` and have no gradient.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from maxsim_kernels.checks import Call, Layout
from maxsim_kernels.cpu import backward as cpu_backward
from maxsim_kernels.cpu import forward as cpu
from maxsim_kernels.cpu import pairs
from maxsim_kernels.modes import check_tensors, unusual


@torch.library.custom_op("maxsim_kernels::forward", mutates_args=())
def forward(
    queries: Tensor,
    query_starts: Tensor | None,
    query_lengths: Tensor | None,
    query_mask: Tensor | None,
    documents: Tensor,
    document_starts: Tensor | None,
    document_lengths: Tensor | None,
    document_mask: Tensor | None,
    scales: Tensor | None,
    offset: Tensor | None,
    layout: str,
    granularity: str,
    quantize_queries: bool,
    return_argmax: bool,
    backward_path: str,
    end_to_end: bool = False,
    queries_end_to_end: bool = False,
    lean: bool = False,
    fp32: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores `[Nq, N]` (pairs: `[N]`) float32; argmax int32, the same plus `[max Lq]`, or empty. `lean` (GPU only): int16, the low
    16 bits of the same."""
    call = Call(
        layout=cast(Layout, layout),
        queries=queries.detach(),
        query_starts=query_starts,
        query_lengths=query_lengths,
        query_mask=query_mask,
        documents=documents.detach(),
        document_starts=document_starts,
        document_lengths=document_lengths,
        document_mask=document_mask,
        scales=scales,
        offset=offset,
        granularity=granularity,
        quantize_queries=quantize_queries,
        winners=return_argmax,
        lean=lean,
        single_query=False,
        end_to_end=end_to_end,
        queries_end_to_end=queries_end_to_end,
        fp32=fp32,
    )
    return run(call)


def traced(call: Call, path: str) -> tuple[Tensor, Tensor]:
    """`run` as one node of a graph, with a gradient by `path`: the schema takes the call's fields one by one."""
    scores, argmax = forward(
        call.queries,
        call.query_starts,
        call.query_lengths,
        call.query_mask,
        call.documents,
        call.document_starts,
        call.document_lengths,
        call.document_mask,
        call.scales,
        call.offset,
        call.layout,
        call.granularity,
        call.quantize_queries,
        call.winners,
        path,
        call.end_to_end,
        call.queries_end_to_end,
        call.lean,
        call.fp32,
    )
    return finished(scores, call), argmax


def finished(scores: Tensor, call: Call) -> Tensor:
    """Scores that plain torch has made, or a node of a graph, as the call wants them: `out`, `empty_score`."""
    if call.empty_score is not None and call.document_mask is not None:
        valid = call.document_mask != 0
        if call.document_lengths is not None:
            valid = valid & (torch.arange(valid.shape[-1], device=valid.device) < call.document_lengths.unsqueeze(-1))
        scores = scores.masked_fill(~valid.any(dim=-1), call.empty_score)
    elif call.empty_score is not None and call.document_lengths is not None:
        scores = scores.masked_fill(call.document_lengths <= 0, call.empty_score)
    return scores.to(call.out)


def run(call: Call) -> tuple[Tensor, Tensor]:
    """What the op runs: the tiled paths on CPU tensors, the Triton kernels on CUDA tensors (`api` only sends what they take)."""
    if call.queries.device.type == "cuda":
        from maxsim_kernels.gpu.forward import dispatch

        return dispatch.forward(call)
    scores, argmax = pairs.forward_pairs(call) if call.layout == "pairs" else cpu.forward(call)
    return finished(scores, call), argmax


@forward.register_fake
def _(
    queries: Tensor,
    query_starts: Tensor | None,
    query_lengths: Tensor | None,
    query_mask: Tensor | None,
    documents: Tensor,
    document_starts: Tensor | None,
    document_lengths: Tensor | None,
    document_mask: Tensor | None,
    scales: Tensor | None,
    offset: Tensor | None,
    layout: str,
    granularity: str,
    quantize_queries: bool,
    return_argmax: bool,
    backward_path: str,
    end_to_end: bool = False,
    queries_end_to_end: bool = False,
    lean: bool = False,
    fp32: str | None = None,
) -> tuple[Tensor, Tensor]:
    count = queries.shape[0] if query_starts is None else query_starts.shape[0]
    shape: list[Any] = [count]
    if layout != "pairs":
        if document_starts is not None:
            shape.append(document_starts.shape[0])
        else:
            shape.append(documents.shape[1] if layout == "per_query" else documents.shape[0])
    scores = queries.new_empty(shape, dtype=torch.float32)
    kind = torch.int16 if lean else torch.int32
    if not return_argmax:
        return scores, queries.new_empty(0, dtype=kind)
    # The longest packed query is a value, not a shape: unknown until the op runs.
    width = queries.shape[1] if query_starts is None else torch.library.get_ctx().new_dynamic_size()
    return scores, queries.new_empty([*shape, width], dtype=kind)


@torch.library.custom_op("maxsim_kernels::backward", mutates_args=())
def backward(
    grad: Tensor,
    argmax: Tensor,
    queries: Tensor,
    query_starts: Tensor | None,
    documents: Tensor,
    document_starts: Tensor | None,
    layout: str,
    need_queries: bool,
    need_documents: bool,
    backward_path: str,
    queries_end_to_end: bool = False,
    documents_end_to_end: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and documents in their dtypes (empty where not needed)."""
    if queries.is_cuda:
        from maxsim_kernels.gpu.backward import gradients as gpu_backward

        return gpu_backward.backward(
            grad,
            argmax,
            queries.detach(),
            query_starts,
            documents.detach(),
            document_starts,
            cast(Layout, layout),
            need_queries,
            need_documents,
            backward_path,
            queries_end_to_end,
            documents_end_to_end,
        )
    return cpu_backward.backward(
        grad,
        argmax,
        queries,
        query_starts,
        documents,
        document_starts,
        cast(Layout, layout),
        need_queries,
        need_documents,
    )


@backward.register_fake
def _(
    grad: Tensor,
    argmax: Tensor,
    queries: Tensor,
    query_starts: Tensor | None,
    documents: Tensor,
    document_starts: Tensor | None,
    layout: str,
    need_queries: bool,
    need_documents: bool,
    backward_path: str,
    queries_end_to_end: bool = False,
    documents_end_to_end: bool = False,
) -> tuple[Tensor, Tensor]:
    query_grad = queries.new_empty(queries.shape if need_queries else (0,))
    document_grad = documents.new_empty(documents.shape if need_documents else (0,))
    return query_grad, document_grad


class _FirstOnly(torch.autograd.Function):
    """Gradients that cannot be differentiated again, for who keeps their graph (`create_graph=True`): using it is refused."""

    @staticmethod
    def forward(ctx: Any, run: Any, *arguments: Any) -> Any:
        return run(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError('maxsim: there is no second derivative (double backward); impl="reference" has one')


def first_only(run: Any, grad: Tensor, *arguments: Any) -> Any:
    """`run(grad, *arguments)`: gradients, of an upstream gradient that is an ordinary tensor."""
    if torch.compiler.is_compiling():
        return run(grad, *arguments)
    if unusual((grad, grad)):
        check_tensors("maxsim's gradient", (("upstream gradient", grad),))
    return _FirstOnly.apply(run, grad, *arguments) if torch.is_grad_enabled() else run(grad, *arguments)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    queries, query_starts, _, _, documents, document_starts = inputs[:6]
    ctx.save_for_backward(queries, query_starts, documents, document_starts, output[1])
    ctx.layout, ctx.return_argmax, ctx.backward_path = inputs[10], inputs[13], inputs[14]
    ctx.documents_end_to_end, ctx.queries_end_to_end = inputs[15], inputs[16]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # or autograd makes zeros of the winners' size


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    grads: list[Tensor | None] = [None] * 19  # one an input of `forward`
    if grad is None:
        return tuple(grads)
    queries, query_starts, documents, document_starts, argmax = ctx.saved_tensors
    if not ctx.return_argmax:
        raise RuntimeError("maxsim_kernels::forward needs return_argmax=True to have a gradient")
    need_queries, need_documents = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
    query_grad, document_grad = first_only(
        backward,
        grad.contiguous(),
        argmax,
        queries,
        query_starts,
        documents,
        document_starts,
        ctx.layout,
        need_queries,
        need_documents,
        ctx.backward_path,
        ctx.queries_end_to_end,
        ctx.documents_end_to_end,
    )
    grads[0] = query_grad if need_queries else None
    grads[4] = document_grad if need_documents else None
    return tuple(grads)


forward.register_autograd(_backward, setup_context=_setup_context)
