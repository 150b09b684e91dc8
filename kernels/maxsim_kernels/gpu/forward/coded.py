"""The kernel for tokens in few bits (`BitTokens`, `ResidualTokens`): codes are unpacked in registers and never written decoded.

A program holds a block of query rows and walks over documents; of each it unpacks a tile of tokens, multiplies, and applies what is one
number a token after the product: a scale, or one over the length of a residual token. Query rows lie one behind the other, whichever
query they are of, so that tokens are unpacked once for many queries; their maxima go through `combine`. Pairs, whose rows meet one
document only, are summed at once.

What is multiplied: levels against INT8 query codes (exact integers) or float queries (exact in every dtype); of residuals
`centroid + weight`, added in FP32 and rounded to the queries' dtype. Products are accumulated in FP32.

Source: Santhanam et al. 2022, ColBERTv2, section 3.3; paper Alg. 1 for the maximum.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.coded import BitTokens, CodedTokens
from maxsim_kernels.gpu.forward.combine import combine, row_maxima
from maxsim_kernels.gpu.forward.dispatch import with_plain_rows
from maxsim_kernels.gpu.forward.query_codes import query_codes
from maxsim_kernels.gpu.forward.tuning import Config
from maxsim_kernels.gpu.geometry import allows_tf32, byte_mask, flat_queries, hardware, padded, shared_bytes
from maxsim_kernels.gpu.launch import empty, ensure_context, launch, unrecorded
from maxsim_kernels.gpu.tile_ops import FLOAT, best_along, keep_nan, load_rows, merge_best, nothing, slots, valid_rows

# By query rows that meet a document; more rows share the work of unpacking. Registers and shared memory as compiled for sm_90.
MOST = Config(256, 64, 8, 2, 4, "untuned", "whole numbers: two programs of 256 rows fit")
MANY = Config(128, 64, 8, 2, 4, "untuned", "two programs fit")
FEW = Config(64, 32, 4, 2, 24, "untuned", "four programs and more hide each other's waits for centroids")
EXACT = Config(32, 32, 4, 1, 8, "untuned", "FP32 products without matrix units: small tiles keep registers")
_HELD_BYTES = 256  # of a query row; wider ones come in slices
_EXACT_SLICE = 32
_CENTROIDS_BYTES = (
    112 << 10
)  # of shared memory that `MANY` takes with residual tokens, whose centroids are loaded ahead in FP32
# Residual tokens decoded once for all query rows (`_once_kernel`) in these configurations, many rows and few: not measured yet, so
# no call takes them (`benchmarks/alone/residual.py` times candidates). `ONCE_SELECTED`: weights by selections, not by lookups.
ONCE: Config | None = None
ONCE_FEW: Config | None = None
ONCE_SELECTED = True
SELECTED = False  # the same where tokens are decoded for every block of query rows
_FP32 = "ieee"  # products of FP32 queries with residual tokens, as in the general kernel


@triton.jit
def _extent(start_ptr, length_ptr, number, total):
    """First token and length of row `number`, inside the buffer whatever the offsets say."""
    start = tl.maximum(tl.load(start_ptr + number).to(tl.int64), 0)
    length = tl.load(length_ptr + number).to(tl.int64)
    return start, tl.maximum(tl.minimum(length, total - start), 0).to(tl.int32)


@triton.jit
def _weights(codes, weight_ptr, BITS: tl.constexpr, SELECTED: tl.constexpr):
    """What each code adds: looked up, or selected among all the weights, which then lie in registers."""
    if SELECTED:
        found = tl.zeros(codes.shape, tl.float32) + tl.load(weight_ptr)
        for code in tl.static_range(1, 2**BITS):
            found = tl.where(codes == code, tl.load(weight_ptr + code), found)
    else:
        found = tl.load(weight_ptr + codes)
    return found


@triton.jit
def _unpack(
    byte_ptr, token, inside, slice, centroid, weight_ptr, bytes, width, stride_t, stride_b,
    DTYPE: tl.constexpr, BITS: tl.constexpr, RESIDUAL: tl.constexpr, UNIT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    SELECTED: tl.constexpr,
):  # fmt: skip
    """Tokens `[TOKENS, WIDTH]` of `DTYPE` as they are multiplied, and their sums of squares (0 unless `UNIT`).

    `centroid`: pointers `[TOKENS]` to the centroids' rows. Of bits beyond d anything may come back: the queries are zero there.
    """
    EACH: tl.constexpr = 8 // BITS
    byte = slice // EACH + tl.arange(0, WIDTH // EACH)
    source = byte_ptr + token[:, None] * stride_t + byte.to(tl.int64)[None, :] * stride_b
    packed = tl.load(source, mask=inside[:, None] & (byte < bytes)[None, :], other=0).to(tl.int32)
    shift = (EACH - 1 - tl.arange(0, EACH)) * BITS
    codes = tl.reshape((packed[:, :, None] >> shift[None, None, :]) & (2**BITS - 1), [TOKENS, WIDTH])
    squares = tl.zeros([TOKENS], tl.float32)
    if RESIDUAL:
        inner = slice + tl.arange(0, WIDTH)
        counted = (inner < width)[None, :]
        values = tl.load(centroid[:, None] + inner[None, :], mask=inside[:, None] & counted, other=0.0).to(tl.float32)
        values = tl.where(counted, values + _weights(codes, weight_ptr, BITS, SELECTED), 0.0)
        if UNIT:
            squares = tl.sum(values * values, 1)
        tokens = values.to(DTYPE)
    else:
        tokens = (2 * codes - (2**BITS - 1)).to(DTYPE)
    return tokens, squares


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
    BITS: tl.constexpr, RESIDUAL: tl.constexpr, UNIT: tl.constexpr, SELECTED: tl.constexpr, HELD: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest product of each query row `[ROWS]` with the tokens of a document, NaN kept; -inf where it has none."""
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    INTEGER: tl.constexpr = tl.int8 == DTYPE
    best = nothing(ROWS, TOKENS, FLOAT)
    for first in tl.range(0, length, TOKENS, num_stages=STAGES):
        place = first + tl.arange(0, TOKENS)
        inside = place < length
        token = start + place
        factor = tl.full([TOKENS], 1.0, tl.float32)
        centroid = token  # never read unless residual
        if RESIDUAL:
            number = tl.load(id_ptr + token, mask=inside, other=0).to(tl.int64)
            known = (number >= 0) & (number < centroids)
            factor = tl.where(known, 1.0, float("nan"))
            centroid = centroid_ptr + tl.where(known, number, 0) * width
        else:
            factor = tl.load(scale_ptr + token, mask=inside, other=0.0).to(tl.float32)
        if HELD:
            tokens, squares = _unpack(
                byte_ptr, token, inside, 0, centroid, weight_ptr, bytes, width, stride_t, stride_b,
                DTYPE, BITS, RESIDUAL, UNIT, TOKENS, WIDTH, SELECTED,
            )  # fmt: skip
            products = _product(rows, tokens, PRECISION)
        else:
            squares = tl.zeros([TOKENS], tl.float32)
            products = tl.zeros([ROWS, TOKENS], tl.int32 if INTEGER else tl.float32)
            for slice in range(0, width, WIDTH):
                part = load_rows(
                    query_ptr + (tl.full([], 0, tl.int64) + slice) * stride_qd, row * 0, row, valid, width - slice,
                    0, stride_qt, stride_qd, WIDTH,
                )  # fmt: skip
                tokens, more = _unpack(
                    byte_ptr, token, inside, slice, centroid, weight_ptr, bytes, width, stride_t, stride_b,
                    DTYPE, BITS, RESIDUAL, UNIT, TOKENS, WIDTH, SELECTED,
                )  # fmt: skip
                squares += more
                products += _product(part, tokens, PRECISION)
        if RESIDUAL and UNIT:
            factor = factor / tl.maximum(tl.sqrt_rn(squares), 1e-12)
        cells = products.to(tl.float32) * factor[None, :]
        cells = tl.where(inside[None, :], cells, float("-inf"))
        best = merge_best(best, best_along(slots(cells), 2, FLOAT), FLOAT)
    return best_along(best, 1, FLOAT)


@triton.jit
def _rescaled(best, query_scale_ptr, row, valid):
    """Maxima times the query tokens' scales; nothing seen stays -inf, also for a query token whose scale is NaN."""
    scaled = best * tl.load(query_scale_ptr + row, mask=valid, other=1.0)
    return tl.where(best == float("-inf"), best, scaled)


@triton.jit(do_not_specialize=["query_total", "documents", "token_total", "centroids", "blocks", "workers"])
def _coded_kernel(
    query_ptr, query_scale_ptr, byte_ptr, start_ptr, length_ptr, scale_ptr, id_ptr, centroid_ptr, weight_ptr, out_ptr,
    query_total, documents, token_total, centroids, bytes, width, blocks, workers, out_stride,
    stride_qt, stride_qd, stride_t, stride_b,
    QUERY_SCALED: tl.constexpr, BITS: tl.constexpr, RESIDUAL: tl.constexpr, UNIT: tl.constexpr,
    SELECTED: tl.constexpr, HELD: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Maxima `[documents, query_total]` of every query row in every document; neighbouring programs share documents in L2."""
    row = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    valid = row < query_total
    rows = tl.zeros([ROWS], tl.float32)  # never read unless held
    if HELD:
        rows = load_rows(query_ptr, row * 0, row, valid, width, 0, stride_qt, stride_qd, WIDTH)
    for document in range(tl.program_id(0) // blocks, documents, workers):
        start, length = _extent(start_ptr, length_ptr, document, token_total)
        best = _best_of(
            rows, query_ptr, row, valid, byte_ptr, scale_ptr, id_ptr, centroid_ptr, weight_ptr, start, length, centroids, bytes, width,
            stride_qt, stride_qd, stride_t, stride_b, BITS, RESIDUAL, UNIT, SELECTED, HELD, ROWS, TOKENS, WIDTH, STAGES, PRECISION,
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
    BITS: tl.constexpr, RESIDUAL: tl.constexpr, UNIT: tl.constexpr, SELECTED: tl.constexpr, HELD: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The score of one pair: its query's rows, a block at a time, with its document."""
    pair = tl.program_id(0)
    origin = (tl.full([], 0, tl.int64) + pair) * query_size  # of the query's scales
    base = query_ptr + (tl.full([], 0, tl.int64) + pair) * stride_qn
    size = query_size
    if PACKED_QUERIES:
        origin, size = _extent(query_start_ptr, query_length_ptr, pair, query_total)
        base = query_ptr + origin * stride_qt
    start, length = _extent(start_ptr, length_ptr, pair, token_total)
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
            stride_qt, stride_qd, stride_t, stride_b, BITS, RESIDUAL, UNIT, SELECTED, HELD, ROWS, TOKENS, WIDTH, STAGES, PRECISION,
        )  # fmt: skip
        if QUERY_SCALED:
            best = _rescaled(best, query_scale_ptr + origin, row, valid)
        total += tl.sum(tl.where(valid, best, 0.0).to(tl.float64), 0)
    tl.store(out_ptr + pair, total.to(tl.float32))


@triton.jit(do_not_specialize=["query_total", "documents", "token_total", "centroids", "parts", "workers"])
def _once_kernel(
    query_ptr, byte_ptr, start_ptr, length_ptr, id_ptr, centroid_ptr, weight_ptr, out_ptr,
    query_total, documents, token_total, centroids, bytes, width, parts, workers, out_stride,
    stride_qt, stride_qd, stride_t, stride_b,
    BITS: tl.constexpr, UNIT: tl.constexpr, SELECTED: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Maxima of residual tokens, each decoded once: a tile of tokens stays, and all the query rows pass it from L2."""
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    part = tl.program_id(0) % parts
    for document in range(tl.program_id(0) // parts, documents, workers):
        start, length = _extent(start_ptr, length_ptr, document, token_total)
        for first in range(0, tl.maximum(length, 1), TOKENS):  # no token: -inf is written all the same
            place = first + tl.arange(0, TOKENS)
            inside = place < length
            token = start + place
            number = tl.load(id_ptr + token, mask=inside, other=0).to(tl.int64)
            known = (number >= 0) & (number < centroids)
            factor = tl.where(known, 1.0, float("nan"))
            centroid = centroid_ptr + tl.where(known, number, 0) * width
            tokens, squares = _unpack(
                byte_ptr, token, inside, 0, centroid, weight_ptr, bytes, width, stride_t, stride_b,
                DTYPE, BITS, True, UNIT, TOKENS, WIDTH, SELECTED,
            )  # fmt: skip
            if UNIT:
                factor = factor / tl.maximum(tl.sqrt_rn(squares), 1e-12)
            for block in tl.range(part * ROWS, query_total, parts * ROWS, num_stages=STAGES):
                row = block + tl.arange(0, ROWS)
                valid = row < query_total
                rows = load_rows(query_ptr, row * 0, row, valid, width, 0, stride_qt, stride_qd, WIDTH)
                cells = tl.dot(rows, tokens.T) * factor[None, :]
                best = best_along(tl.where(inside[None, :], cells, float("-inf")), 1, FLOAT)
                target = out_ptr + (tl.full([], 0, tl.int64) + document) * out_stride + row
                if first > 0:
                    best = keep_nan(best, tl.load(target, mask=valid, other=0.0))
                tl.store(target, best, mask=valid)
            tl.debug_barrier()  # what this tile has written is read by other threads at the next one


def configuration(call: Call, documents: CodedTokens, capability: tuple[int, int]) -> Config:
    """The tiles of a call, from shapes, dtypes and the shared memory of the GPU."""
    integer = isinstance(documents, BitTokens) and call.quantize_queries
    if call.queries.dtype == torch.float32 and not integer:
        return EXACT
    packed = call.query_starts is not None
    size = call.queries.shape[0] if packed else call.queries.shape[1] * (1 if call.layout == "pairs" else call.query_count)
    if packed and call.layout == "pairs":
        size = EXACT.rows  # how long a query is, is not known here
    if size <= FEW.rows:
        return replace(FEW, rows=padded(size))
    if not isinstance(documents, BitTokens) and shared_bytes(capability) < _CENTROIDS_BYTES:
        return FEW
    narrow = documents.dim * (1 if integer else 2) <= _HELD_BYTES
    return MOST if size > MANY.rows and isinstance(documents, BitTokens) and narrow else MANY


def _once(config: Config) -> Config | None:
    """The configuration that decodes residual tokens once, in place of `config`, by query rows alone: bits follow from nothing else."""
    if config is MANY or ONCE_FEW is None:
        return ONCE if config is MANY else None
    return replace(ONCE_FEW, rows=config.rows)


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
    config = configuration(call, documents, capability)
    bits = isinstance(documents, BitTokens)
    integer = bits and call.quantize_queries
    queries, scales = query_codes(call.queries, torch.int8) if integer else (call.queries, None)
    width = documents.dim
    whole = padded(width, 32 if integer else 16)
    most = _EXACT_SLICE if config is EXACT else _HELD_BYTES // queries.element_size()
    codes, unused = documents.codes.values, scores
    beside: tuple[Tensor, ...]
    if isinstance(documents, BitTokens):
        beside, centroids, unit = (documents.scales.contiguous(), unused, unused, unused), 0, False
    else:
        tables = documents.ids.contiguous(), documents.centroids.contiguous(), documents.weights.contiguous()
        beside, centroids, unit = (unused, *tables), len(documents.centroids), documents.unit
    constants: dict[str, Any] = {
        "QUERY_SCALED": integer, "BITS": documents.bits, "RESIDUAL": not bits, "UNIT": unit, "SELECTED": not bits and SELECTED,
        "HELD": whole <= most,
        "ROWS": config.rows, "TOKENS": config.tokens, "WIDTH": min(whole, most), "STAGES": config.stages,
        "PRECISION": "tf32" if allows_tf32(call) else _FP32, "warps": config.warps,
    }  # fmt: skip
    about = (codes.shape[0], centroids, codes.shape[1], width)
    starts, lengths = call.document_starts, call.document_lengths
    assert starts is not None
    assert lengths is not None
    if call.layout == "pairs":
        packed = call.query_starts is not None
        launch(
            _coded_pairs_kernel, call.query_count,
            queries, scales if scales is not None else unused, call.query_starts if packed else unused,
            call.query_lengths if call.query_lengths is not None else unused, byte_mask(call.query_mask, unused),
            codes, starts, lengths, *beside, scores, 0 if packed else queries.shape[1], queries.shape[0] if packed else 0, *about,
            0 if packed else queries.stride(0), queries.stride(-2), queries.stride(-1), codes.stride(0), codes.stride(1),
            PACKED_QUERIES=packed, HAS_QUERY_LENGTHS=not packed and call.query_lengths is not None,
            HAS_QUERY_MASK=call.query_mask is not None, **constants,
        )  # fmt: skip
        return
    flat = flat_queries(queries)
    blocks = triton.cdiv(flat.shape[0], config.rows)
    query_size = 0 if call.query_starts is not None else call.queries.shape[1]
    maxima = row_maxima(flat.shape[0], call.document_count, 1, query_size, scores.device, False)
    once = None if bits or config is EXACT or whole > most else _once(config)
    for first in range(0, call.document_count, maxima.documents):
        count = min(maxima.documents, call.document_count - first)
        if once is not None:
            parts = min(triton.cdiv(flat.shape[0], once.rows), triton.cdiv(processors * once.programs, count))
            workers = min(count, triton.cdiv(processors * once.programs, parts))
            launch(
                _once_kernel, parts * workers, flat, codes, starts[first:], lengths[first:], *beside[1:], maxima.best,
                flat.shape[0], count, *about, parts, workers, maxima.best.stride(0),
                flat.stride(0), flat.stride(1), codes.stride(0), codes.stride(1),
                BITS=documents.bits, UNIT=unit, SELECTED=ONCE_SELECTED,
                ROWS=once.rows, TOKENS=once.tokens, WIDTH=whole, STAGES=once.stages, warps=once.warps,
            )  # fmt: skip
            combine(call, maxima, first, count, scores, None)
            continue
        workers = min(count, max(1, triton.cdiv(processors * config.programs, blocks)))
        launch(
            _coded_kernel, blocks * workers,
            flat, scales if scales is not None else unused, codes, starts[first:], lengths[first:], *beside, maxima.best,
            flat.shape[0], count, *about, blocks, workers, maxima.best.stride(0),
            flat.stride(0), flat.stride(1), codes.stride(0), codes.stride(1), **constants,
        )  # fmt: skip
        combine(call, maxima, first, count, scores, None)
