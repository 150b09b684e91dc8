"""The operator's front: `maxsim`, `maxsim_pairs`, `explain`, `warmup`. Validates, chooses an implementation, says why.

Source: paper Eq. 1 and section 'Fused Forward'; the contract's table is in docs/kernels.md and tested by tests/kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maxsim_kernels import fallback, ops
from maxsim_kernels.checks import BACKWARDS, IMPLS, Call, Documents, Layout, check_choice, is_plain, validate
from maxsim_kernels.gpu.backward.path_choice import backward_path
from maxsim_kernels.reference import maxsim_reference
from maxsim_kernels.tokens import Fp8Tokens, Int8Tokens, Packed

_LEAN_TOKENS = 0xFFFF  # documents from this length on have winners that 16 bits cannot tell from "none"


@dataclass(frozen=True)
class _Choice:
    implementation: str  # "cpu", "triton" or "reference"
    reason: str


def maxsim(
    queries: Tensor | Packed,
    documents: Documents,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    document_lengths: Tensor | None = None,
    return_argmax: bool = False,
    quantize_queries: bool = True,
    backward: str = "auto",
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact MaxSim scores, `score(Q, D) = sum_i max_j <Q_i, D_j>`, without the similarity tensor.

    Args:
        queries: `[Lq, d]`, `[Nq, Lq, d]` or `Packed`; fp16, bf16 or fp32.
        documents: `[B, Ld, d]` or `Packed` (shared by all queries), `[Nq, B, Ld, d]` (candidates of each query), of the
            queries' dtype; or `Int8Tokens` / `Fp8Tokens`, dense or packed.
        query_mask, document_mask: True or 1 where a token counts: `[Nq, Lq]` (`[Lq]`), `[B, Ld]` or `[Nq, B, Ld]`.
        query_lengths, document_lengths: int32 or int64 `[Nq]` (`[]`), `[B]` or `[Nq, B]`; with a mask, both must hold.
        return_argmax: also return the winning document token of each query token.
        quantize_queries: with INT8 / FP8 documents, quantise queries on the fly (one scale a token); False multiplies float
            queries with the codes.
        backward: gradient path, "auto", "unified", "atomic" or "csr"; never changes a result beyond summation order (of finite
            tokens: docs/training.md).
        impl: "auto", "triton", "cpu" or "reference".

    Returns:
        float32 scores, `[B]` for one query `[Lq, d]`, else `[Nq, B]`; accumulated in FP32 whatever the input dtype. A document
        without valid tokens scores -inf, a query without valid tokens 0. With `return_argmax`, also int32 indices of the scores'
        shape plus `[Lq]`, -1 where the query token is masked or the document empty, the first index among ties.

    Raises:
        ValueError: names the argument, what it got and what it needs.
    """
    return _run(
        queries,
        documents,
        pairs=False,
        query_mask=query_mask,
        document_mask=document_mask,
        query_lengths=query_lengths,
        document_lengths=document_lengths,
        return_argmax=return_argmax,
        quantize_queries=quantize_queries,
        backward=backward,
        impl=impl,
    )


def maxsim_pairs(
    queries: Tensor | Packed,
    documents: Documents,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    document_lengths: Tensor | None = None,
    return_argmax: bool = False,
    quantize_queries: bool = True,
    backward: str = "auto",
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """MaxSim of N independent pairs: query n against document n.

    Args: as `maxsim`, with queries `[N, Lq, d]` or `Packed` and documents `[N, Ld, d]`, `Packed` or quantised, N of each.

    Returns:
        float32 `[N]`, and with `return_argmax` int32 `[N, Lq]`.
    """
    return _run(
        queries,
        documents,
        pairs=True,
        query_mask=query_mask,
        document_mask=document_mask,
        query_lengths=query_lengths,
        document_lengths=document_lengths,
        return_argmax=return_argmax,
        quantize_queries=quantize_queries,
        backward=backward,
        impl=impl,
    )


def _run(queries: Tensor | Packed, documents: Documents, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Replay a call that is known (`launch.py`), or check and run it; `options` are those of `_run_checked`."""
    inputs = _cuda_inputs(queries, documents, *(options[name] for name in _TENSOR_OPTIONS))
    if inputs is None:
        return _run_checked(queries, documents, **options)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in inputs):
        if options["impl"] == "reference" or isinstance(documents, Int8Tokens | Fp8Tokens):
            return _run_checked(queries, documents, **options)
        return _differentiable(queries, documents, inputs, options)
    return _replayed(queries, documents, inputs, options)


def _replayed(
    queries: Tensor | Packed, documents: Documents, inputs: tuple[Tensor | None, ...], options: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    from maxsim_kernels.gpu import launch

    flags = (value for name, value in options.items() if name not in _TENSOR_OPTIONS)
    held = (type(queries), type(documents), getattr(documents, "granularity", None), _end_to_end(documents))
    key = launch.signature(inputs, *flags, held, _precision(inputs))
    plan = launch.planned(key)
    device = inputs[0].device  # type: ignore[union-attr]
    if plan is not None:
        return plan.run(inputs, device)
    return launch.record(key, inputs, device, partial(_run_checked, queries, documents, **options))


def _differentiable(
    queries: Tensor | Packed, documents: Documents, inputs: tuple[Tensor | None, ...], options: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """An eager call on a GPU whose inputs need gradients: the same call with winners, which the backward will use (`autograd.py`)."""
    from maxsim_kernels import autograd

    asked = options["return_argmax"]
    values, starts, whole = _parts(queries)
    tokens, document_starts, documents_whole = _parts(documents)
    layout: Layout = "pairs" if options["pairs"] else "per_query" if tokens.dim() == 4 else "shared"
    route = autograd.Route(layout, backward_path(options["backward"])[0], whole, documents_whole)
    options = {**options, "return_argmax": True, "lean": not asked and _lean(tokens)}
    score = partial(_replayed, queries, documents, inputs, options)
    scores, argmax = autograd.differentiable(values, tokens, starts, document_starts, route, score)
    return (scores, argmax) if asked else scores


def _parts(side: Any) -> tuple[Tensor, Tensor | None, bool]:
    """Values, starts and whether rows follow each other, of float tokens."""
    return (side.values, side.starts, side.offsets is not None) if isinstance(side, Packed) else (side, None, False)


_TENSOR_OPTIONS = ("query_mask", "document_mask", "query_lengths", "document_lengths")


def _cuda_inputs(queries: object, documents: object, *others: Tensor | None) -> tuple[Tensor | None, ...] | None:
    """Every tensor of a call that may be replayed (`launch.py`), in a fixed order: eager, on a GPU; else None."""
    values = queries.values if isinstance(queries, Packed) else queries
    if not isinstance(values, Tensor) or not values.is_cuda or not is_plain() or not fallback.HAS_TRITON:
        return None
    held = documents.codes if isinstance(documents, Int8Tokens | Fp8Tokens) else documents
    tokens = held.values if isinstance(held, Packed) else held
    if not isinstance(tokens, Tensor):
        return None
    parts: list[Tensor | None] = [values, tokens, *others]
    for packed in (queries, held):
        parts += [packed.starts, packed.lengths] if isinstance(packed, Packed) else []
    if isinstance(documents, Int8Tokens | Fp8Tokens):
        parts += [documents.scales, documents.offset if isinstance(documents, Int8Tokens) else None]
    return tuple(parts)


def _end_to_end(documents: object) -> bool:
    held = documents.codes if isinstance(documents, Int8Tokens | Fp8Tokens) else documents
    return isinstance(held, Packed) and held.offsets is not None


def _precision(inputs: tuple[Tensor | None, ...]) -> object:
    """What decides whether FP32 products may use TF32; nothing for other dtypes."""
    if inputs[0] is None or inputs[0].dtype != torch.float32:
        return None
    return torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]


def _run_checked(
    queries: Tensor | Packed,
    documents: Documents,
    *,
    pairs: bool,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    query_lengths: Tensor | None,
    document_lengths: Tensor | None,
    return_argmax: bool,
    quantize_queries: bool,
    backward: str,
    impl: str,
    lean: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    check_choice("backward", backward, BACKWARDS)
    check_choice("impl", impl, IMPLS)
    call = validate(
        queries,
        documents,
        pairs=pairs,
        query_mask=query_mask,
        document_mask=document_mask,
        query_lengths=query_lengths,
        document_lengths=document_lengths,
        quantize_queries=quantize_queries,
    )
    differentiable = _needs_gradient(call)
    path = backward_path(backward)[0] if differentiable else ""
    choice = _choose(call, impl)
    if choice.implementation == "reference":
        if impl == "auto":
            fallback.say_once(choice.reason)
        return maxsim_reference(
            queries,
            documents,
            query_mask=query_mask,
            document_mask=document_mask,
            query_lengths=query_lengths,
            document_lengths=document_lengths,
            return_argmax=return_argmax,
            quantize_queries=quantize_queries,
            pairs=pairs,
        )
    if not differentiable and is_plain(call.queries, call.documents, call.query_mask, call.document_mask, call.scales):
        scores, argmax = ops.run(call, return_argmax, lean)
    else:
        scores, argmax = _through_op(call, return_argmax, differentiable, path)
    if call.single_query:
        scores = scores[0]
        argmax = argmax[0] if return_argmax else argmax
    return (scores, argmax) if return_argmax else scores


def _through_op(call: Call, return_argmax: bool, differentiable: bool, path: str) -> tuple[Tensor, Tensor]:
    # Winners that only the backward will see take 16 bits on a GPU where documents are short enough.
    lean = differentiable and not return_argmax and call.queries.is_cuda and _lean(call.documents)
    return ops.forward(
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
        return_argmax or differentiable,
        path,
        call.end_to_end,
        call.queries_end_to_end,
        lean,
    )


def _lean(documents: Tensor) -> bool:
    """Whether 16 bits hold every winner and "none" besides; packed documents may be as long as their buffer."""
    return documents.dim() >= 2 and documents.shape[-2] < _LEAN_TOKENS


def _needs_gradient(call: Call) -> bool:
    wanted = call.queries.requires_grad or call.documents.requires_grad
    if call.scales is not None and (wanted or call.scales.requires_grad) and torch.is_grad_enabled():
        raise ValueError("queries, documents: got requires_grad with quantised documents, which have no gradient; detach them")
    return wanted and torch.is_grad_enabled()


def _choose(call: Call, impl: str) -> _Choice:
    """The one place that decides: by device, by what was asked, and by what the kernels can take."""
    kind = call.queries.device.type
    if impl == "reference":
        return _Choice("reference", "asked for: plain chunked torch in FP32")
    if impl == "cpu" and kind != "cpu":
        raise ValueError(f"impl: got 'cpu' with tensors on {kind}, need CPU tensors")
    if kind == "cpu" and impl != "triton":
        return _Choice("cpu", "CPU tensors: tiled matrix products, running maximum (cpu.py)")
    missing = _no_triton(call)
    if not missing:
        return _Choice("triton", "CUDA tensors: fused Triton kernels")
    if impl == "triton":
        raise ValueError(f"impl: got 'triton', need 'auto': {missing}")
    return _Choice("reference", f"{missing}: plain chunked torch in FP32 (slower)")


def _no_triton(call: Call) -> str:
    """Why the Triton kernels cannot take a call; empty when they can."""
    if call.queries.device.type != "cuda":
        return f"no fused kernel for {call.queries.device.type} tensors"
    return "" if fallback.HAS_TRITON else "Triton is not installed"


def _launch_reason(call: Call) -> str:
    """Which kernel and configuration, and whether that row of the table was measured."""
    from maxsim_kernels.gpu import geometry
    from maxsim_kernels.gpu.forward import dispatch

    winners = call.granularity == "none" and _needs_gradient(call)
    name, config = dispatch.variant(call, geometry.hardware(call.queries.device)[0], winners)
    tuned = "untuned" if config.measured == "untuned" else f"measured on {config.measured}"
    return f"{name} kernel, tiles of {config.rows} query rows x {config.tokens} document tokens, {tuned}: {config.reason}"


def explain(
    queries: Tensor | Packed,
    documents: Documents,
    *,
    pairs: bool = False,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    document_lengths: Tensor | None = None,
    quantize_queries: bool = True,
    backward: str = "auto",
    impl: str = "auto",
) -> str:
    """Which implementation a call would run, on what, and why. Takes the arguments of `maxsim` (`pairs=True`: `maxsim_pairs`)."""
    check_choice("backward", backward, BACKWARDS)
    check_choice("impl", impl, IMPLS)
    call = validate(
        queries,
        documents,
        pairs=pairs,
        query_mask=query_mask,
        document_mask=document_mask,
        query_lengths=query_lengths,
        document_lengths=document_lengths,
        quantize_queries=quantize_queries,
    )
    choice = _choose(call, impl)
    if choice.implementation == "triton":
        choice = _Choice("triton", _launch_reason(call))
    held = "packed" if call.document_starts is not None else "dense"
    if call.granularity != "none":
        kind = "FP8" if isinstance(documents, Fp8Tokens) else "INT8"
        queries_as = f"{kind} queries (one scale a token)" if quantize_queries else "float queries"
        products = f"{kind} codes, one scale a {call.granularity}, {queries_as}, scale after the product"
    else:
        products = f"{str(call.queries.dtype).removeprefix('torch.')} inputs, FP32 accumulation"
    lines = "gradients: none (quantised documents)"
    if call.granularity == "none":
        path, why = backward_path(backward)
        where = {"triton": "", "cpu": ", the same bits for every path on CPU tensors"}.get(
            choice.implementation, ", through plain torch"
        )
        lines = f"gradients: {path} ({why}{where})"
    return (
        f"{choice.implementation}: {choice.reason}\n"
        f"layout: {call.layout}, {call.query_count} queries x {call.document_count} documents ({held}), d = {call.queries.shape[-1]}\n"
        f"products: {products}\n"
        f"{lines}"
    )
