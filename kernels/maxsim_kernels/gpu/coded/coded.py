"""Kernels for tokens in few bits (`BitTokens`, `ResidualTokens`): codes are unpacked in registers and never written decoded.

A program holds a block of query rows and walks over documents. It unpacks a tile of tokens at a time, multiplies, and then
applies the one number that a token has: its scale or, for a residual token, one over its length. Query rows follow each other,
whichever query they belong to, so that tokens are unpacked once for many queries; their maxima go through `combine`. Pairs, whose
rows meet one document only, are summed by the kernel. For residual tokens and many query rows there is another kernel
(`once.py`).

What is multiplied: levels against INT8 query codes (exact integers) or float queries (exact in every dtype); of a residual token
`centroid + weight`, added in FP32 and rounded to the queries' dtype. Products are accumulated in FP32.

Source: Santhanam et al. 2022, ColBERTv2, section 3.3; paper Alg. 1 for the maximum.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.coded import BitTokens, CodedTokens, ResidualTokens
from maxsim_kernels.gpu.coded.choice import HELD_BYTES, choose
from maxsim_kernels.gpu.coded.once import maxima_once
from maxsim_kernels.gpu.coded.unpacking import centroids_of, extent, per_length, unpack
from maxsim_kernels.gpu.forward.combine import combine, row_maxima
from maxsim_kernels.gpu.forward.dispatch import with_plain_rows
from maxsim_kernels.gpu.forward.query_codes import query_codes
from maxsim_kernels.gpu.forward.tuning import Config
from maxsim_kernels.gpu.geometry import allows_tf32, byte_mask, flat_queries, hardware, padded
from maxsim_kernels.gpu.launch import empty, launch, unrecorded
from maxsim_kernels.gpu.plans import ensure_context
from maxsim_kernels.gpu.tile_ops import FLOAT, best_along, load_rows, merge_best, nothing, slots, valid_rows

_EXACT_SLICE = 32
_FP32 = "ieee"  # products with FP32 queries, as in the general kernel


@triton.jit
def _product(rows, tokens, PRECISION: tl.constexpr):
    """Products `[ROWS, TOKENS]`, int32 of INT8 codes, else float32."""
    if rows.dtype == tl.int8:
        cells = tl.dot(rows, tokens.T, out_dtype=tl.int32)
    else:
        cells = tl.dot(rows, tokens.T, input_precision=PRECISION)
    return cells


@triton.jit
def _best_of(
    rows, query_ptr, row, valid, byte_ptr, scale_ptr, id_ptr, centroid_ptr, weight_ptr, start, length, centroids, bytes, width,
    stride_qt, stride_qd, stride_t, stride_b,
    BITS: tl.constexpr, RESIDUAL: tl.constexpr, UNIT: tl.constexpr, HELD: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest product of each query row `[ROWS]` with the tokens of a document, NaN kept; -inf where it has none."""
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    INTEGER: tl.constexpr = tl.int8 == DTYPE
    AHEAD: tl.constexpr = 1 if RESIDUAL else None  # stages of the loop over slices; None: as the compiler likes
    best = nothing(ROWS, TOKENS, FLOAT)
    for first in tl.range(0, length, TOKENS, num_stages=STAGES):
        place = first + tl.arange(0, TOKENS)
        inside = place < length
        token = start + place
        factor = tl.full([TOKENS], 1.0, tl.float32)
        centroid = token  # never read unless residual
        if RESIDUAL:
            centroid, factor = centroids_of(id_ptr, token, inside, centroid_ptr, centroids, width)
        else:
            factor = tl.load(scale_ptr + token, mask=inside, other=0.0).to(tl.float32)
        if HELD:
            tokens, squares = unpack(
                byte_ptr, token, inside, 0, centroid, weight_ptr, bytes, width, stride_t, stride_b,
                DTYPE, BITS, RESIDUAL, UNIT, TOKENS, WIDTH,
            )  # fmt: skip
            products = _product(rows, tokens, PRECISION)
        else:
            squares = tl.zeros([TOKENS], tl.float32)
            products = tl.zeros([ROWS, TOKENS], tl.int32 if INTEGER else tl.float32)
            for slice in tl.range(0, width, WIDTH, num_stages=AHEAD):
                part = load_rows(
                    query_ptr + (tl.full([], 0, tl.int64) + slice) * stride_qd, row * 0, row, valid, width - slice,
                    0, stride_qt, stride_qd, WIDTH,
                )  # fmt: skip
                tokens, more = unpack(
                    byte_ptr, token, inside, slice, centroid, weight_ptr, bytes, width, stride_t, stride_b,
                    DTYPE, BITS, RESIDUAL, UNIT, TOKENS, WIDTH,
                )  # fmt: skip
                squares += more
                products += _product(part, tokens, PRECISION)
        if RESIDUAL and UNIT:
            factor = per_length(factor, squares)
        cells = products.to(tl.float32) * factor[None, :]
        cells = tl.where(inside[None, :], cells, float("-inf"))
        best = merge_best(best, best_along(slots(cells), 2, FLOAT), FLOAT)
    return best_along(best, 1, FLOAT)


@triton.jit
def _rescaled(best, query_scale_ptr, row, valid):
    """Maxima times the query tokens' scales; -inf (no token seen) stays, also for a query token whose scale is NaN."""
    scaled = best * tl.load(query_scale_ptr + row, mask=valid, other=1.0)
    return tl.where(best == float("-inf"), best, scaled)


@triton.jit(do_not_specialize=["query_total", "documents", "token_total", "centroids", "blocks", "workers"])
def _coded_kernel(
    query_ptr, query_scale_ptr, byte_ptr, start_ptr, length_ptr, scale_ptr, id_ptr, centroid_ptr, weight_ptr, out_ptr,
    query_total, documents, token_total, centroids, bytes, width, blocks, workers, out_stride,
    stride_qt, stride_qd, stride_t, stride_b,
    QUERY_SCALED: tl.constexpr, BITS: tl.constexpr, RESIDUAL: tl.constexpr, UNIT: tl.constexpr, HELD: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Maxima `[documents, query_total]` of every query row in every document; neighbouring programs share documents in L2."""
    row = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    valid = row < query_total
    rows = tl.zeros([ROWS], tl.float32)  # never read unless held
    if HELD:
        rows = load_rows(query_ptr, row * 0, row, valid, width, 0, stride_qt, stride_qd, WIDTH)
    for document in range(tl.program_id(0) // blocks, documents, workers):
        start, length = extent(start_ptr, length_ptr, document, token_total)
        best = _best_of(
            rows, query_ptr, row, valid, byte_ptr, scale_ptr, id_ptr, centroid_ptr, weight_ptr, start, length, centroids, bytes, width,
            stride_qt, stride_qd, stride_t, stride_b, BITS, RESIDUAL, UNIT, HELD, ROWS, TOKENS, WIDTH, STAGES, PRECISION,
        )  # fmt: skip
        if QUERY_SCALED:
            best = _rescaled(best, query_scale_ptr, row, valid)
        tl.store(out_ptr + (tl.full([], 0, tl.int64) + document) * out_stride + row, best, mask=valid)


@triton.jit(do_not_specialize=["query_size", "query_total", "token_total", "centroids"])
def _coded_pairs_kernel(
    query_ptr, query_scale_ptr, query_start_ptr, query_length_ptr, query_mask_ptr, byte_ptr, start_ptr, length_ptr, scale_ptr, id_ptr,
    centroid_ptr, weight_ptr, out_ptr,
    query_size, query_total, token_total, centroids, bytes, width, stride_qn, stride_qt, stride_qd, stride_t, stride_b,
    PACKED_QUERIES: tl.constexpr, HAS_QUERY_LENGTHS: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, QUERY_SCALED: tl.constexpr,
    BITS: tl.constexpr, RESIDUAL: tl.constexpr, UNIT: tl.constexpr, HELD: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The score of one pair: its query's rows, a block at a time, with its document."""
    pair = tl.program_id(0)
    origin = (tl.full([], 0, tl.int64) + pair) * query_size  # of the query's scales
    base = query_ptr + (tl.full([], 0, tl.int64) + pair) * stride_qn
    size = query_size
    if PACKED_QUERIES:
        origin, size = extent(query_start_ptr, query_length_ptr, pair, query_total)
        base = query_ptr + origin * stride_qt
    start, length = extent(start_ptr, length_ptr, pair, token_total)
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, size, ROWS):
        row = first + tl.arange(0, ROWS)
        valid = valid_rows(
            row < size, pair + row * 0, row, query_length_ptr, query_mask_ptr, query_size, HAS_QUERY_LENGTHS, HAS_QUERY_MASK
        )
        rows = tl.zeros([ROWS], tl.float32)  # never read unless held
        if HELD:
            rows = load_rows(base, row * 0, row, valid, width, 0, stride_qt, stride_qd, WIDTH)
        best = _best_of(
            rows, base, row, valid, byte_ptr, scale_ptr, id_ptr, centroid_ptr, weight_ptr, start, length, centroids, bytes, width,
            stride_qt, stride_qd, stride_t, stride_b, BITS, RESIDUAL, UNIT, HELD, ROWS, TOKENS, WIDTH, STAGES, PRECISION,
        )  # fmt: skip
        if QUERY_SCALED:
            best = _rescaled(best, query_scale_ptr + origin, row, valid)
        total += tl.sum(tl.where(valid, best, 0.0).to(tl.float64), 0)
    tl.store(out_ptr + pair, total.to(tl.float32))


def forward(call: Call, documents: CodedTokens) -> Tensor:
    """Scores `[Nq, N]` (pairs: `[N]`) float32 of a call that `checks.validate_coded` made."""
    pairs = call.layout == "pairs"
    count, device = call.query_count, call.queries.device
    scores = empty((count,) if pairs else (count, call.document_count), torch.float32, device)
    if not scores.numel():
        return scores
    if call.queries.numel() == 0:
        unrecorded()
        return scores.zero_()
    if device.type == "cuda":
        ensure_context(device.index or 0)
    # Triton launches on the current device, which need not be the tensors' one.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _score(with_plain_rows(call), documents, scores)
    return scores


def _score(call: Call, documents: CodedTokens, scores: Tensor) -> None:
    capability, processors = hardware(scores.device)
    kernel, config = choose(call, documents, capability)
    integer = isinstance(documents, BitTokens) and call.quantize_queries
    queries, scales = query_codes(call.queries, torch.int8) if integer else (call.queries, None)
    starts, lengths = call.document_starts, call.document_lengths
    assert starts is not None
    assert lengths is not None
    tables = _tables(documents, scores)
    if call.layout == "pairs":
        _score_pairs(call, documents, queries, scales, tables, config, scores)
        return
    flat = flat_queries(queries)
    query_size = 0 if call.query_starts is not None else call.queries.shape[1]
    maxima = row_maxima(flat.shape[0], call.document_count, 1, query_size, scores.device, False)
    for first in range(0, call.document_count, maxima.documents):
        count = min(maxima.documents, call.document_count - first)
        some = starts[first : first + count], lengths[first : first + count]
        if kernel == "coded once" and isinstance(documents, ResidualTokens):
            maxima_once(flat, documents, tables[1:], *some, maxima.best, config, processors)
        else:
            constants = _constants(call, documents, flat, config)
            _maxima(flat, scales, documents, tables, some, maxima.best, config, processors, constants)
        combine(call, maxima, first, count, scores, None)


def _tables(documents: CodedTokens, unused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales, ids, centroids and weights as kernels read them; `unused` where there are none."""
    if isinstance(documents, BitTokens):
        return documents.scales.contiguous(), unused, unused, unused
    return unused, documents.ids.contiguous(), documents.centroids.contiguous(), documents.weights.contiguous()


def _constants(call: Call, documents: CodedTokens, queries: Tensor, config: Config) -> dict[str, Any]:
    """What both kernels of this file are compiled for."""
    integer = queries.dtype == torch.int8
    whole = padded(documents.dim, 32 if integer else 16)
    most = _EXACT_SLICE if queries.dtype == torch.float32 else HELD_BYTES // queries.element_size()
    residual = isinstance(documents, ResidualTokens)
    return {
        "QUERY_SCALED": integer, "BITS": documents.bits, "RESIDUAL": residual,
        "UNIT": isinstance(documents, ResidualTokens) and documents.unit, "HELD": whole <= most,
        "ROWS": config.rows, "TOKENS": config.tokens, "WIDTH": min(whole, most), "STAGES": config.stages,
        "PRECISION": "tf32" if allows_tf32(call) else _FP32, "warps": config.warps,
    }  # fmt: skip


def _sizes(documents: CodedTokens) -> tuple[int, int, int, int]:
    """Tokens, centroids, bytes a token, d."""
    codes = documents.codes.values
    return (
        codes.shape[0],
        len(documents.centroids) if isinstance(documents, ResidualTokens) else 0,
        codes.shape[1],
        documents.dim,
    )


def _maxima(
    queries: Tensor, scales: Tensor | None, documents: CodedTokens, tables: tuple[Tensor, ...], some: tuple[Tensor, Tensor],
    best: Tensor, config: Config, processors: int, constants: dict[str, Any],
) -> None:  # fmt: skip
    """Write the maxima of the query rows `[R, d]` in the documents whose starts and lengths are `some`."""
    rows, count, codes = queries.shape[0], len(some[0]), documents.codes.values
    blocks = triton.cdiv(rows, config.rows)
    workers = min(count, max(1, triton.cdiv(processors * config.programs, blocks)))
    launch(
        _coded_kernel, blocks * workers,
        queries, scales if scales is not None else best, codes, *some, *tables, best,
        rows, count, *_sizes(documents), blocks, workers, best.stride(0),
        queries.stride(0), queries.stride(1), codes.stride(0), codes.stride(1), **constants,
    )  # fmt: skip


def _score_pairs(
    call: Call, documents: CodedTokens, queries: Tensor, scales: Tensor | None, tables: tuple[Tensor, ...], config: Config,
    scores: Tensor,
) -> None:  # fmt: skip
    """Write the score of every pair."""
    packed, codes = call.query_starts is not None, documents.codes.values
    launch(
        _coded_pairs_kernel, call.query_count,
        queries, scales if scales is not None else scores, call.query_starts if packed else scores,
        call.query_lengths if call.query_lengths is not None else scores, byte_mask(call.query_mask, scores),
        codes, call.document_starts, call.document_lengths, *tables, scores,
        0 if packed else queries.shape[1], queries.shape[0] if packed else 0, *_sizes(documents),
        0 if packed else queries.stride(0), queries.stride(-2), queries.stride(-1), codes.stride(0), codes.stride(1),
        PACKED_QUERIES=packed, HAS_QUERY_LENGTHS=not packed and call.query_lengths is not None,
        HAS_QUERY_MASK=call.query_mask is not None, **_constants(call, documents, queries, config),
    )  # fmt: skip
