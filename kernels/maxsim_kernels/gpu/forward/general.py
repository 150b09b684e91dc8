"""The kernel for every layout: any strides, masks, lengths, widths, packed or padded on either side, quantised or not, with winners.

The faster kernels (`dense.py`, `wide.py`) take what they can describe; this one takes all the rest, and it is also the kernel for few
query rows, where a call is bound by reading documents. A program holds a block of query rows and takes one document (documents of
each query's own, pairs, and most calls of few query rows) or walks over several; loads are masked by the document's length, addresses
have 64 bits. Wide embeddings are added up over slices of d. Few long documents are split along their tokens (the paper's split-K):
programs then leave row maxima, which `_combine_kernel` merges and sums.

Shapes: queries `[Nq, Lq, d]` or `[T, d]` with starts; documents `[B, Ld, d]`, `[Nq, B, Ld, d]` or `[T, d]` with starts (paper Alg. 1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.forward.combine import RowMaxima, combine
from maxsim_kernels.gpu.forward.tuning import Config
from maxsim_kernels.gpu.geometry import (
    EIGHT_BITS,
    SCALES,
    allows_tf32,
    byte_mask,
    hardware,
    many_short,
    padded,
    pieces_a_document,
)
from maxsim_kernels.gpu.launch import by_counts, empty, launch
from maxsim_kernels.gpu.plans import ByCounts
from maxsim_kernels.gpu.tile_ops import better, keep_nan, load_rows, query_rows, valid_rows, wins

_MOST_PROGRAMS = 2**31 - 1  # of a launch
MASK_BLOCK = tl.constexpr(256)  # cells of a mask that a program reads at once


@triton.jit
def _load_tokens(base, place, inner, inside, width, stride_t, stride_d):
    """Document tokens `[WIDTH, TOKENS]`, zero outside the document and beyond d."""
    source = base + place.to(tl.int64)[None, :] * stride_t + inner.to(tl.int64)[:, None] * stride_d
    return tl.load(source, mask=inside[None, :] & (inner < width)[:, None], other=0.0)


@triton.jit
def _product(rows, tokens, FLOAT_QUERIES: tl.constexpr, PRECISION: tl.constexpr):
    """float32 products; INT8 codes meet codes in integers, or are widened to the queries' dtype, which holds them exactly."""
    if rows.dtype == tl.int8:
        cells = tl.dot(rows, tokens, out_dtype=tl.int32).to(tl.float32)
    elif FLOAT_QUERIES:
        cells = tl.dot(rows, tokens.to(rows.dtype), input_precision=PRECISION)
    else:
        cells = tl.dot(rows, tokens, input_precision=PRECISION)
    return cells


@triton.jit
def _best_of(
    rows, row_sums, query_ptr, query, token, valid, base, mask_row_ptr, scale_row_ptr, offset_row_ptr, begin, end, width,
    stride_qn, stride_qt, stride_qd, stride_t, stride_d,
    HAS_MASK: tl.constexpr, HELD: tl.constexpr, SCALE: tl.constexpr, AFFINE: tl.constexpr, FLOAT_QUERIES: tl.constexpr,
    ARGMAX: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Maximum and (when asked for) its first position for each query row over the document's tokens `begin..end`.

    `APART`: a maximum is kept for each pair of tokens until the document ends: a tile then needs no exchange between threads.
    """
    best = tl.full([ROWS, TOKENS // 2] if APART else [ROWS], float("-inf"), tl.float32)
    index = tl.full([ROWS], -1, tl.int32)
    inner = tl.arange(0, WIDTH)
    for first in tl.range(begin, end, TOKENS, num_stages=STAGES):
        place = first + tl.arange(0, TOKENS)
        inside = place < end
        there = inside
        if HAS_MASK:
            inside = inside & (tl.load(mask_row_ptr + place, mask=inside, other=0) != 0)
            if not HELD:  # whole tokens are loaded without waiting for the mask
                there = inside
        if HELD:
            cells = _product(rows, _load_tokens(base, place, inner, there, width, stride_t, stride_d), FLOAT_QUERIES, PRECISION)
        else:
            cells = tl.zeros([ROWS, TOKENS], tl.float32)
            for slice in range(0, width, WIDTH):
                part = load_rows(
                    query_ptr + (tl.full([], 0, tl.int64) + slice) * stride_qd,
                    query,
                    token,
                    valid,
                    width - slice,
                    stride_qn,
                    stride_qt,
                    stride_qd,
                    WIDTH,
                )
                source = base + (tl.full([], 0, tl.int64) + slice) * stride_d
                tokens = _load_tokens(source, place, inner, there, width - slice, stride_t, stride_d)
                cells += _product(part, tokens, FLOAT_QUERIES, PRECISION)
        # Affine: FMAs are written out. Of two products that it adds, a compiler may round either, another in each variant.
        if SCALE == 1:
            cells = cells * tl.load(scale_row_ptr + place, mask=there, other=0.0).to(tl.float32)[None, :]
            if AFFINE:
                offset = tl.load(offset_row_ptr + place, mask=there, other=0.0).to(tl.float32)
                cells = tl.fma(row_sums[:, None], offset[None, :], cells)
        elif SCALE > 1:
            scale = tl.load(scale_row_ptr).to(tl.float32)
            if AFFINE:
                cells = tl.fma(cells, scale, (row_sums * tl.load(offset_row_ptr).to(tl.float32))[:, None])
            else:
                cells = cells * scale
        cells = tl.where(inside[None, :], cells, float("-inf"))
        if APART:
            here = tl.reduce(tl.reshape(cells, [ROWS, TOKENS // 2, 2]), 2, keep_nan)
        else:
            here = tl.reduce(cells, 1, keep_nan)
        if ARGMAX:
            # A tile without a valid token leaves no winner, even before there is one.
            any_inside = tl.max(inside.to(tl.int32), 0) > 0
            where = tl.min(tl.where(wins(cells, here[:, None]) & inside[None, :], place[None, :], 2147483647), 1)
            win = (better(here, best, 0) | (index < 0)) & any_inside
            index = tl.where(win, tl.minimum(where, end - 1), index)
        best = keep_nan(best, here)
    if APART:
        best = tl.reduce(best, 1, keep_nan)
    return best, index


@triton.jit
def _counted_end(mask_row_ptr, length, BLOCK: tl.constexpr):
    """Where the last token that counts ends, so that padding is not read."""
    end = length * 0
    for first in range(0, length, BLOCK):
        place = first + tl.arange(0, BLOCK)
        counts = tl.load(mask_row_ptr + place, mask=place < length, other=0) != 0
        end = tl.maximum(end, tl.max(tl.where(counts, place + 1, 0), 0))
    return end


@triton.jit
def _row_sums(
    query_ptr, query, token, valid, width, stride_qn, stride_qt, stride_qd, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Sum of each query row over d, in float32: what an affine offset is multiplied with."""
    sums = tl.zeros([ROWS], tl.float32)
    for slice in range(0, width, WIDTH):
        part = load_rows(
            query_ptr + (tl.full([], 0, tl.int64) + slice) * stride_qd,
            query,
            token,
            valid,
            width - slice,
            stride_qn,
            stride_qt,
            stride_qd,
            WIDTH,
        )
        sums += tl.sum(part.to(tl.float32), 1)
    return sums


@triton.jit
def _extent(start_ptr, length_ptr, number, size, total, RAGGED: tl.constexpr, HAS_LENGTHS: tl.constexpr):
    """First token (of a document's scales) and length of document `number`, inside the buffer whatever the offsets say."""
    if RAGGED:
        start = tl.maximum(tl.load(start_ptr + number).to(tl.int64), 0)
        length = tl.load(length_ptr + number).to(tl.int64)
        length = tl.maximum(tl.minimum(length, total - start), 0).to(tl.int32)
    else:
        start = number * size
        length = size
        if HAS_LENGTHS:
            length = tl.load(length_ptr + number).to(tl.int64)
            length = tl.minimum(tl.maximum(length, 0), size).to(tl.int32)
    return start, length


@triton.jit(
    do_not_specialize=[
        "query_count", "query_size", "query_total", "documents", "document_size", "document_total", "blocks", "workers", "splits",
        "argmax_size",
    ]
)  # fmt: skip
def _general_kernel(
    query_ptr, query_start_ptr, query_length_ptr, query_mask_ptr, query_scale_ptr, document_ptr, start_ptr, length_ptr, mask_ptr,
    scale_ptr, offset_ptr, out_ptr, argmax_ptr,
    query_count, query_size, query_total, documents, document_size, document_total, width, blocks, workers, splits,
    argmax_size, stride_qn, stride_qt, stride_qd, stride_m, stride_n, stride_t, stride_d,
    LAYOUT: tl.constexpr, RAGGED: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_MASK: tl.constexpr,
    PACKED_QUERIES: tl.constexpr, HAS_QUERY_LENGTHS: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, QUERY_SCALED: tl.constexpr,
    FLOAT_QUERIES: tl.constexpr, SCALE: tl.constexpr, AFFINE: tl.constexpr, ARGMAX: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, ALONE: tl.constexpr, HELD: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % blocks  # neighbours share documents in L2
    worker = tl.program_id(0) // blocks
    query_length = query_size
    query_base = query_ptr
    if PACKED_QUERIES:
        origin = tl.maximum(tl.load(query_start_ptr + block).to(tl.int64), 0)
        query_length = tl.load(query_length_ptr + block).to(tl.int64)
        query_length = tl.maximum(tl.minimum(query_length, query_total - origin), 0).to(tl.int32)
        query_base = query_ptr + origin * stride_qt
    parts = 1
    if PARTS:
        parts = tl.cdiv(tl.maximum(query_length, argmax_size) if ARGMAX else query_length, ROWS)
    query, token, valid = query_rows(block, query_count, query_length, 1, PADDED, ROWS)
    if not PARTS:
        valid = valid_rows(valid, query, token, query_length_ptr, query_mask_ptr, query_size, HAS_QUERY_LENGTHS, HAS_QUERY_MASK)
    first = worker
    step = workers
    split = 0
    if SPLIT:
        first = worker // splits
        step = workers // splits
        split = worker % splits
    owner = tl.full([], 0, tl.int64)
    if LAYOUT == 1:
        owner += block
    own = owner * documents
    if ALONE:  # asked for before the query's rows: nothing else waits on both
        start, length = _extent(start_ptr, length_ptr, own + first, document_size, document_total, RAGGED, HAS_LENGTHS)
    row_sums = tl.zeros([ROWS], tl.float32)
    rows = row_sums  # never read unless held
    if HELD and not PARTS:
        rows = load_rows(query_ptr, query, token, valid, width, stride_qn, stride_qt, stride_qd, WIDTH)
    if AFFINE and not PARTS:
        row_sums = _row_sums(query_ptr, query, token, valid, width, stride_qn, stride_qt, stride_qd, WIDTH, ROWS)
    for document in range(first, first + 1 if ALONE else documents, 1 if ALONE else step):
        number = own + document
        if not ALONE:
            start, length = _extent(start_ptr, length_ptr, number, document_size, document_total, RAGGED, HAS_LENGTHS)
        base = document_ptr + owner * stride_m + (tl.full([], 0, tl.int64) + document) * stride_n
        if RAGGED:
            base = document_ptr + start * stride_t
        scale_row_ptr = scale_ptr
        offset_row_ptr = offset_ptr
        if SCALE == 1:
            scale_row_ptr = scale_ptr + start
            offset_row_ptr = offset_ptr + start
        elif SCALE == 2:
            scale_row_ptr = scale_ptr + number
            offset_row_ptr = offset_ptr + number
        begin = 0
        if HAS_MASK and HELD:
            length = _counted_end(mask_ptr + number * document_size, length, MASK_BLOCK)
        end = length
        if SPLIT:
            share = tl.cdiv(tl.cdiv(length, splits), TOKENS) * TOKENS
            begin = split * share
            end = tl.minimum(length, begin + share)
        total = tl.full([], 0.0, tl.float64)
        for part in range(parts):
            if PARTS:
                query = block + tl.arange(0, ROWS) * 0
                token = part * ROWS + tl.arange(0, ROWS)
                valid = valid_rows(
                    token < query_length,
                    query,
                    token,
                    query_length_ptr,
                    query_mask_ptr,
                    query_size,
                    HAS_QUERY_LENGTHS,
                    HAS_QUERY_MASK,
                )
                from_row = query
                if PACKED_QUERIES:
                    from_row = query * 0
                part_sums = tl.zeros([ROWS], tl.float32)
                part_rows = part_sums
                if HELD:
                    part_rows = load_rows(query_base, from_row, token, valid, width, stride_qn, stride_qt, stride_qd, WIDTH)
                if AFFINE:
                    part_sums = _row_sums(
                        query_base, from_row, token, valid, width, stride_qn, stride_qt, stride_qd, WIDTH, ROWS
                    )
                best, index = _best_of(
                    part_rows, part_sums, query_base, from_row, token, valid, base, mask_ptr + number * document_size, scale_row_ptr,
                    offset_row_ptr, begin, end, width, stride_qn, stride_qt, stride_qd, stride_t, stride_d,
                    HAS_MASK, HELD, SCALE, AFFINE, FLOAT_QUERIES, ARGMAX, ALONE and not ARGMAX, ROWS, TOKENS, WIDTH, STAGES, PRECISION,
                )  # fmt: skip
            else:
                best, index = _best_of(
                    rows, row_sums, query_ptr, query, token, valid, base, mask_ptr + number * document_size, scale_row_ptr,
                    offset_row_ptr, begin, end, width, stride_qn, stride_qt, stride_qd, stride_t, stride_d,
                    HAS_MASK, HELD, SCALE, AFFINE, FLOAT_QUERIES, ARGMAX, ALONE and not ARGMAX, ROWS, TOKENS, WIDTH, STAGES, PRECISION,
                )  # fmt: skip
            if QUERY_SCALED:
                at = query.to(tl.int64) * query_size + token
                if PACKED_QUERIES:
                    at = origin + token
                # Nothing seen stays -inf, also for a query token whose scale is NaN.
                scaled = best * tl.load(query_scale_ptr + at, mask=valid, other=1.0)
                best = tl.where(best == float("-inf"), best, scaled)
            kept = tl.where(valid, best, 0.0)
            # Pairs and per-query documents count (query, document) in `number` already.
            cell = number + tl.zeros([ROWS], tl.int64)
            if LAYOUT == 0:
                cell = query.to(tl.int64) * documents + document
            if SPLIT:
                cell += split.to(tl.int64) * query_count * documents
            exists = (token < argmax_size) & (query < query_count)
            if ARGMAX:
                winner = tl.where(valid, index, -1)
                tl.store(argmax_ptr + cell * argmax_size + token, winner, mask=exists)
            if SPLIT:
                tl.store(out_ptr + cell * argmax_size + token, kept, mask=exists)
            elif PARTS:
                total += tl.sum(kept.to(tl.float64), 0)
            else:
                to = tl.full([], 0, tl.int64) + block
                if ROWS == PADDED:
                    tl.store(out_ptr + to * documents + document, tl.sum(kept.to(tl.float64), 0).to(tl.float32))
                else:
                    sums = tl.sum(tl.reshape(kept.to(tl.float64), [ROWS // PADDED, PADDED]), 1).to(tl.float32)
                    asked = to * (ROWS // PADDED) + tl.arange(0, ROWS // PADDED)
                    tl.store(out_ptr + asked * documents + document, sums, mask=asked < query_count)
        if PARTS and not SPLIT:
            to = tl.full([], 0, tl.int64) + block
            tl.store(out_ptr + to * documents + document, total.to(tl.float32))


ARGUMENTS = tuple(_general_kernel.arg_names)


def workers_of(documents: int, most: int) -> int:
    """Programs a block of query rows: one for every document, or as many as `most`."""
    return max(1, min(documents, most)) if most else documents


def _query_rows(count: int, size: int, packed: bool, own: bool, most: int) -> tuple[int, int]:
    """Query rows of a block, `most` at most, and the rows that one query's tokens are padded to."""
    if packed:
        rows = min(32, most)
        return rows, 2 * rows
    lanes = padded(size)
    return (min(most, lanes) if own else max(16, min(most, lanes * padded(count, 1)))), lanes


def _columns(queries: Tensor, documents: Tensor, stream: bool) -> tuple[int, bool]:
    """Columns that a program holds at once, and whether these are all."""
    item = max(queries.element_size(), documents.element_size())
    held = padded(queries.shape[-1], 32 if queries.dtype in EIGHT_BITS else 16)
    whole = held * item <= (512 if stream else 256)
    return (held if whole else 256 // item if item < 4 else 32), whole


def launch_general(
    call: Call, queries: Tensor, scales: Tensor | None, config: Config, scores: Tensor, argmax: Tensor | None, stream: bool
) -> None:
    """Score any call; `stream` says that all query rows fit one block and reading documents is the bound."""
    processors = hardware(scores.device)[1]
    documents = call.documents
    ragged = call.document_starts is not None
    packed = call.query_starts is not None
    own = call.layout != "shared"  # documents of each query's own
    per_query = 1 if call.layout == "pairs" else call.document_count
    size = call.queries.shape[1] if not packed else 0
    count = call.query_count
    width = queries.shape[-1]
    rows, lanes = _query_rows(count, size, packed, own, config.rows)
    parts = packed or lanes > rows
    blocks = count if parts or own else triton.cdiv(count, rows // lanes)
    held, whole = _columns(queries, documents, stream)
    programs = blocks * per_query
    splits = 1 if packed else pieces_a_document(call, config.tokens, programs)
    dealt = many_short(programs, documents.shape[-2], processors) or programs > _MOST_PROGRAMS
    alone = call.layout == "pairs" or (not dealt if own else not config.programs)
    most = 0 if alone else triton.cdiv(processors * config.programs, blocks)
    workers = workers_of(per_query, most) * splits
    if stream and splits == 1 and argmax is None and call.document_mask is None:
        by_counts(ByCounts(most, blocks, config.tokens))
    buffer = winners = None
    if splits > 1:
        buffer = empty((splits, count, per_query, size), torch.float32, scores.device)
        winners = empty(tuple(buffer.shape), torch.int32, buffer.device) if argmax is not None else None
    unused = scores
    mask = byte_mask(call.document_mask, unused)
    query_mask = byte_mask(call.query_mask, unused)
    stride_m = documents.stride(0) if own and not ragged else 0
    stride_n = 0 if ragged or call.layout == "pairs" else documents.stride(-3)
    won = winners if winners is not None else argmax
    launch(
        _general_kernel, workers * blocks,
        queries, call.query_starts if packed else unused, call.query_lengths if call.query_lengths is not None else unused,
        query_mask, scales if scales is not None else unused, documents,
        call.document_starts if ragged else unused, call.document_lengths if call.document_lengths is not None else unused, mask,
        call.scales.contiguous() if call.scales is not None else unused,
        call.offset.contiguous() if call.offset is not None else unused,
        buffer if buffer is not None else scores, won if won is not None else unused,
        count, size, queries.shape[0] if packed else 0, per_query, 0 if ragged else documents.shape[-2],
        documents.shape[0] if ragged else 0, width, blocks, workers, splits,
        argmax.shape[-1] if argmax is not None else size,
        0 if packed else queries.stride(0), queries.stride(-2), queries.stride(-1), stride_m, stride_n,
        documents.stride(-2), documents.stride(-1),
        LAYOUT=int(own), RAGGED=ragged, HAS_LENGTHS=not ragged and call.document_lengths is not None,
        HAS_MASK=call.document_mask is not None, PACKED_QUERIES=packed,
        HAS_QUERY_LENGTHS=not packed and call.query_lengths is not None, HAS_QUERY_MASK=call.query_mask is not None,
        QUERY_SCALED=scales is not None, FLOAT_QUERIES=call.granularity != "none" and scales is None,
        SCALE=SCALES[call.granularity], AFFINE=call.offset is not None, ARGMAX=argmax is not None, SPLIT=splits > 1,
        PARTS=parts, ALONE=alone, HELD=whole, PADDED=lanes, ROWS=rows, TOKENS=config.tokens, WIDTH=held, STAGES=config.stages,
        PRECISION="tf32" if allows_tf32(call) else "ieee", warps=config.warps,
    )  # fmt: skip
    if buffer is not None:
        maxima = RowMaxima(buffer, winners, per_query, splits, buffer.stride(0), buffer.stride(1), buffer.stride(2))
        combine(call, maxima, 0, per_query, scores, argmax)
