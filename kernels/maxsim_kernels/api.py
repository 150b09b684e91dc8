"""The operator's front: `maxsim`, `maxsim_pairs`. Validates, chooses an implementation, runs it; `explaining.py` says which and why.

Source: paper Eq. 1 and section 'Fused Forward'; the contract's table is in docs/kernels.md and tested by tests/kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maxsim_kernels import fallback, ops, reference
from maxsim_kernels.autograd import Node, Route, differentiable
from maxsim_kernels.checks import (
    TENSORS,
    Call,
    Documents,
    Layout,
    Options,
    check_rows,
    is_plain,
    tensors_of,
    validate,
    validate_coded,
)
from maxsim_kernels.coded import BitTokens, CodedTokens, ResidualTokens, coded_blocks, plain_of
from maxsim_kernels.gpu.backward.path_choice import backward_path
from maxsim_kernels.modes import under_autocast
from maxsim_kernels.tokens import Fp8Tokens, Int8Tokens, Packed, held_of

CODED_TOKENS = 1 << 16  # decoded at once
_SHORT_WINNERS = 0xFFFF  # documents must be shorter for winners of 16 bits, in which this number is -1: "none"


@dataclass(frozen=True)
class Implementation:
    """What runs a call, and why."""

    name: str  # "cpu", "triton" or "reference"
    reason: str


def maxsim(
    queries: Tensor | Packed,
    documents: Documents | CodedTokens,
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
            queries' dtype; or `Int8Tokens` / `Fp8Tokens`, dense or packed; or `BitTokens` / `ResidualTokens`.
        query_mask, document_mask: True or 1 where a token counts: `[Nq, Lq]` (`[Lq]`), `[B, Ld]` or `[Nq, B, Ld]`.
        query_lengths, document_lengths: int32 or int64 `[Nq]` (`[]`), `[B]` or `[Nq, B]`; with a mask, both must hold.
        return_argmax: also return the winning document token of each query token.
        quantize_queries: with INT8 / FP8 documents and `BitTokens`, quantise queries on the fly (one scale a token); False multiplies
            float queries with the codes. With `ResidualTokens` queries always stay float.
        backward: gradient path, "auto", "unified", "atomic" or "csr"; for finite tokens it changes nothing but the order of
            summation (docs/training.md).
        impl: "auto", "triton", "cpu" or "reference".

    Returns:
        float32 scores, `[B]` for one query `[Lq, d]`, else `[Nq, B]`; accumulated in FP32 whatever the input dtype. A document
        without valid tokens scores -inf, a query without valid tokens 0. With `return_argmax`, also int32 indices of the scores'
        shape plus `[Lq]`, -1 where the query token is masked or the document empty, the first index among ties, the first NaN.

    Under autocast tokens of two dtypes are cast to autocast's, as `torch.matmul` casts its operands. Tokens of one dtype are left as
    they are, with one warning where `torch.matmul` would cast them. Scores stay float32.

    A second derivative is refused, except with `impl="reference"`. A call can be captured in a CUDA graph once its kernels are
    compiled: after one call like it, or `warmup`.

    Raises:
        ValueError: names the argument, what it got and what it needs; a subclass of Tensor is refused (fake tensors are not).
        RuntimeError: under a transform of `torch.func` (vmap, grad, jvp), with forward-mode tangents, in a second derivative, or when
            the capture of a CUDA graph would have to compile.
    """
    options = Options(
        query_mask, document_mask, query_lengths, document_lengths, return_argmax, quantize_queries, backward, impl, pairs=False
    )
    return run(queries, documents, options)


def maxsim_pairs(
    queries: Tensor | Packed,
    documents: Documents | CodedTokens,
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

    Args: as `maxsim`, with queries `[N, Lq, d]` or `Packed` and documents `[N, Ld, d]`, `Packed`, quantised or coded, N of each.

    Returns:
        float32 `[N]`, and with `return_argmax` int32 `[N, Lq]`.
    """
    options = Options(
        query_mask, document_mask, query_lengths, document_lengths, return_argmax, quantize_queries, backward, impl, pairs=True
    )
    return run(queries, documents, options)


def run(queries: Tensor | Packed, documents: Documents | CodedTokens, options: Options) -> Tensor | tuple[Tensor, Tensor]:
    """Do what `maxsim` and `maxsim_pairs` do, by `Options`: replay a recorded call (`gpu/launch.py`), or check and run it."""
    if isinstance(documents, BitTokens | ResidualTokens):
        return _run_coded(queries, documents, options)
    queries, tokens = under_autocast(queries, documents)
    inputs = _cuda_inputs(queries, tokens, options)
    if inputs is None:
        return _run_checked(queries, tokens, options)
    if not _wanted(inputs):
        return _replayed(queries, tokens, inputs, options)
    if options.impl == "reference" or isinstance(tokens, Int8Tokens | Fp8Tokens):
        return _run_checked(queries, tokens, options)
    scores, argmax = differentiable(_node(queries, tokens, inputs, options))
    return (scores, argmax) if options.return_argmax else scores


def node_of(queries: Tensor | Packed, documents: Tensor | Packed, options: Options) -> Node | None:
    """The `Node` of an eager GPU call that needs gradients, for a loss that is computed from its scores; None for other calls."""
    queries, tokens = under_autocast(queries, documents)
    inputs = _cuda_inputs(queries, tokens, options)
    if inputs is None or options.impl == "reference" or not _wanted(inputs):
        return None
    return _node(queries, tokens, inputs, options)


def _wanted(inputs: tuple[Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in inputs)


def _replayed(
    queries: Tensor | Packed, documents: Documents, inputs: tuple[Tensor | None, ...], options: Options
) -> Tensor | tuple[Tensor, Tensor]:
    from maxsim_kernels.gpu import launch
    from maxsim_kernels.gpu.forward import counted

    held = (type(queries), type(documents), getattr(documents, "granularity", None), _end_to_end(documents))
    flags = (options[TENSORS:], held, _precision(inputs, options))
    device = inputs[0].device  # type: ignore[union-attr]
    sizes = counted.sizes_of(queries, documents, inputs, options)
    shared = None if sizes is None else counted.class_of(inputs, sizes, flags)
    if sizes is not None:
        found = counted.find(shared, sizes)
        if found is not None:
            return found.run(inputs, sizes, device)
    key = launch.signature(inputs, *flags)
    plan = launch.planned(key)
    if plan is not None:
        return plan.run(inputs, device)
    again = launch.repeated(key)
    if sizes is not None and counted.wanted(shared):
        again = launch.repeated(shared) or again
    if not again:
        return _run_checked(queries, documents, options)
    result = launch.record(key, inputs, device, partial(_run_checked, queries, documents, options))
    if sizes is not None:
        counted.learn(shared, key, sizes)
    return result


def _node(queries: Tensor | Packed, documents: Documents, inputs: tuple[Tensor | None, ...], options: Options) -> Node:
    """The `Node` of a call. It is scored with winners, which the backward needs (`autograd.py`)."""
    values, starts, whole = _parts(queries)
    tokens, document_starts, documents_whole = _parts(documents)
    layout: Layout = "pairs" if options.pairs else "per_query" if tokens.dim() == 4 else "shared"
    route = Route(layout, backward_path(options.backward)[0], whole, documents_whole)
    lean = not options.return_argmax and _fit_16_bits(tokens)
    score = partial(_replayed, queries, documents, inputs, options._replace(return_argmax=True, lean=lean))
    return Node(values, tokens, starts, document_starts, route, score)


def _parts(side: Any) -> tuple[Tensor, Tensor | None, bool]:
    """Of float tokens: the values, the starts (None: dense), and whether packed rows lie end to end."""
    return (side.values, side.starts, side.offsets is not None) if isinstance(side, Packed) else (side, None, False)


def _cuda_inputs(queries: object, documents: object, options: Options) -> tuple[Tensor | None, ...] | None:
    """All tensors of a call, in a fixed order, if it may be replayed (`gpu/launch.py`): eager, on a GPU; else None."""
    if torch.compiler.is_compiling() or not fallback.HAS_TRITON:
        return None
    values = queries.values if isinstance(queries, Packed) else queries
    if not isinstance(values, Tensor) or not values.is_cuda:
        return None
    held = held_of(documents)
    tokens = held.values if isinstance(held, Packed) else held
    if not isinstance(tokens, Tensor) or values.is_neg() or tokens.is_neg():
        return None
    parts = tensors_of(queries, documents, held, options)  # type: ignore[arg-type]
    return tuple(parts) if is_plain(*parts) else None


def _end_to_end(documents: object) -> bool:
    held = held_of(documents)
    return isinstance(held, Packed) and held.offsets is not None


def _precision(inputs: tuple[Tensor | None, ...], options: Options) -> object:
    """torch's settings for FP32 products where they decide; None for other dtypes, or if the call decides (`Options.fp32`)."""
    if options.fp32 is not None or inputs[0] is None or inputs[0].dtype != torch.float32:
        return None
    return torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]


def _run_checked(queries: Tensor | Packed, documents: Documents, options: Options) -> Tensor | tuple[Tensor, Tensor]:
    call = validate(queries, documents, options)
    differentiable = needs_gradient(call)
    found = implementation(call, options.impl)
    if found.name == "reference":
        if options.impl == "auto":
            fallback.say_once(found.reason)
        result = reference.score(queries, documents, options)
        return (ops.finished(result[0], call), result[1]) if isinstance(result, tuple) else ops.finished(result, call)
    path = backward_path(options.backward)[0] if differentiable else ""
    if not differentiable and is_plain(call.queries, call.documents, call.query_mask, call.document_mask, call.scales):
        scores, argmax = ops.run(call)
    else:
        if differentiable:
            # Winners that only the backward will see take 16 bits on a GPU where documents are short enough.
            lean = not call.winners and call.queries.is_cuda and _fit_16_bits(call.documents)
            call = replace(call, winners=True, lean=lean)
        scores, argmax = ops.traced(call, path)
    if call.single_query:
        scores = scores[0]
        argmax = argmax[0] if options.return_argmax else argmax
    return (scores, argmax) if options.return_argmax else scores


def _run_coded(queries: Tensor | Packed, documents: CodedTokens, options: Options) -> Tensor:
    """Score coded tokens: by their kernel on a GPU, elsewhere decoded a block of documents at a time (blocks change no bit)."""
    inputs = _cuda_inputs(queries, documents.codes, options)
    beside = tuple(tensor for _, tensor in documents.tensors()[1:])
    run = partial(_coded_checked, queries, documents, options)
    if inputs is None or not is_plain(*beside) or any(one is not None and one.requires_grad for one in (*inputs, *beside)):
        return run()
    from maxsim_kernels.gpu import launch

    about = (type(queries), type(documents), documents.bits, documents.dim, getattr(documents, "unit", None))
    inputs = (*inputs, *beside)
    key = launch.signature(inputs, options[TENSORS:], about, _end_to_end(queries), _precision(inputs, options))
    plan = launch.planned(key)
    if plan is None:
        return launch.record(key, inputs, documents.device, run)
    scores: Tensor = plan.run(inputs, documents.device)
    return scores


def _coded_checked(queries: Tensor | Packed, documents: CodedTokens, options: Options) -> Tensor:
    call = validate_coded(queries, documents, options)
    if implementation(call, options.impl).name == "triton":
        from maxsim_kernels.gpu.coded import coded

        if isinstance(queries, Packed) and queries.offsets is None and not options.pairs:
            queries = queries.compact()  # else all rows of the buffer would be scored; waits for the GPU
            call = validate_coded(queries, documents, options)
        scores = coded.forward(call, documents)
        return scores[0] if call.single_query else scores
    check_rows("document", documents.codes.starts, documents.codes.lengths, documents.codes.values.shape[0])
    if isinstance(documents, ResidualTokens):
        queries = queries.to(torch.float32)  # as the decoded tokens are
    parts, first = [], 0
    for block in coded_blocks(documents, CODED_TOKENS):
        asked, held = _pairs_of(queries, options, first, first + len(block)) if options.pairs else (queries, options)
        parts.append(_run_checked(asked, plain_of(block), held))
        first += len(block)
    return torch.cat(parts, -1)  # type: ignore[arg-type]


def _pairs_of(queries: Tensor | Packed, options: Options, first: int, last: int) -> tuple[Tensor | Packed, Options]:
    """Queries `first` to `last` of pairs, and the options with their masks and lengths."""
    if isinstance(queries, Packed):
        return Packed.view(queries.values, queries.starts[first:last], queries.lengths[first:last]), options
    mask, lengths = (None if one is None else one[first:last] for one in (options.query_mask, options.query_lengths))
    return queries[first:last], options._replace(query_mask=mask, query_lengths=lengths)


def _fit_16_bits(documents: Tensor) -> bool:
    """Whether 16 bits hold every winner and "none" besides; packed documents may be as long as their buffer."""
    return documents.dim() >= 2 and documents.shape[-2] < _SHORT_WINNERS


def needs_gradient(call: Call) -> bool:
    """Whether a call wants gradients, which are refused where documents are quantised."""
    wanted = call.queries.requires_grad or call.documents.requires_grad
    of_codes = call.scales is not None and (
        call.scales.requires_grad or (call.offset is not None and call.offset.requires_grad)
    )
    if call.scales is not None and (wanted or of_codes) and torch.is_grad_enabled():
        raise ValueError("queries, documents: got requires_grad with quantised documents, which have no gradient; detach them")
    return wanted and torch.is_grad_enabled()


def implementation(call: Call, impl: str) -> Implementation:
    """What runs a call. Decided here alone: by device, by `impl`, and by what the kernels can take."""
    kind = call.queries.device.type
    if impl == "reference":
        return Implementation("reference", "asked for: plain chunked torch in FP32")
    if impl == "cpu" and kind != "cpu":
        raise ValueError(f"impl: got 'cpu' with tensors on {kind}, need CPU tensors")
    if kind == "cpu" and impl != "triton":
        return Implementation("cpu", "CPU tensors: tiled matrix products, running maximum (cpu/forward.py)")
    missing = _no_triton(call)
    if not missing:
        return Implementation("triton", "CUDA tensors: fused Triton kernels")
    if impl == "triton":
        raise ValueError(f"impl: got 'triton', need 'auto': {missing}")
    return Implementation("reference", f"{missing}: plain chunked torch in FP32 (slower)")


def _no_triton(call: Call) -> str:
    """Why the Triton kernels cannot take a call; empty when they can."""
    if call.queries.device.type != "cuda":
        return f"no fused kernel for {call.queries.device.type} tensors"
    return "" if fallback.HAS_TRITON else "Triton is not installed"
