"""Candidate: documents with holes by an index of the tokens that count, so that no cell has to be hidden and no such token is multiplied.

`compact_kernel` writes for every document the rows of its tokens that count; `gather_kernel` is the tile kernel with loads by those rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maxsim_kernels.gpu.forward.tile_walk import document_start, tile_entry
from maxsim_kernels.gpu.tile_ops import best_along, half_rows, load_rows, merge_best, nothing, slots


@triton.jit(do_not_specialize=["documents", "document_size", "pitch"])
def compact_kernel(mask_ptr, index_ptr, count_ptr, documents, document_size, pitch, BLOCK: tl.constexpr, EACH: tl.constexpr):
    """`[N, Ld]` rows of the flat token matrix that count, first to last, and how many `[N]`; a program for `EACH` documents."""
    document = tl.program_id(0).to(tl.int64) * EACH + tl.arange(0, EACH)
    inside = document < documents
    count = tl.zeros([EACH], tl.int32)
    for first in range(0, document_size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        there = inside[:, None] & (place < document_size)[None, :]
        valid = tl.load(mask_ptr + document[:, None] * document_size + place[None, :], mask=there, other=0) != 0
        order = count[:, None] + tl.cumsum(valid.to(tl.int32), 1) - 1
        row = (document[:, None] * pitch + place[None, :]).to(tl.int32)
        tl.store(index_ptr + document[:, None] * document_size + order, row, mask=valid)
        count += tl.sum(valid.to(tl.int32), 1)
    tl.store(count_ptr + document, count, mask=inside)


@triton.jit(do_not_specialize=["query_count", "query_size", "documents", "document_size", "groups", "chunks", "room", "out_stride"])
def gather_kernel(
    query_ptr, document_ptr, index_ptr, table_ptr, bound_ptr, out_ptr,
    query_count, query_size, documents, document_size, width, groups, chunks, out_stride, room,
    stride_qn, stride_qt, stride_t,
    LARGE: tl.constexpr, STORE_ROWS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) % groups
    chunk = tl.program_id(0) // groups
    query0, token0, valid0 = half_rows(group, query_count, query_size, 0, PADDED, ROWS)
    query1, token1, valid1 = half_rows(group, query_count, query_size, 1, PADDED, ROWS)
    rows0 = load_rows(query_ptr, query0, token0, valid0, width, stride_qn, stride_qt, 1, WIDTH)
    rows1 = load_rows(query_ptr, query1, token1, valid1, width, stride_qn, stride_qt, 1, WIDTH)
    place = tl.arange(0, TOKENS)
    inner = tl.arange(0, WIDTH)
    HALF: tl.constexpr = 1 if STORE_ROWS else PADDED // 2
    owner = group * (ROWS // HALF) + tl.arange(0, ROWS // HALF)
    claimed = tl.load(bound_ptr + documents)
    share = tl.cdiv(tl.minimum(claimed, room), chunks)
    begin = document_start(chunk * share, table_ptr, bound_ptr, documents, room)
    end = document_start((chunk + 1) * share, table_ptr, bound_ptr, documents, room)
    best0 = nothing(ROWS, TOKENS, 0)
    best1 = nothing(ROWS, TOKENS, 0)
    for step in tl.range(begin, end, num_stages=STAGES):
        row, owner_and_last = tile_entry(step, end, 0, 0, table_ptr, document_size, document_size, 1, True, TOKENS)
        index = tl.load(index_ptr + row + place)
        if LARGE:
            at = index.to(tl.int64)[:, None] * stride_t + inner[None, :]
        else:
            at = index[:, None] * stride_t + inner[None, :]
        tokens = tl.load(document_ptr + at, mask=(inner < width)[None, :], other=0.0)
        here0 = best_along(slots(tl.dot(rows0, tokens.T)), 2, 0)
        here1 = best_along(slots(tl.dot(rows1, tokens.T)), 2, 0)
        best0 = merge_best(best0, here0, 0)
        best1 = merge_best(best1, here1, 0)
        if owner_and_last % 2 == 1:
            column = tl.full([], 0, tl.int64) + owner_and_last // 2
            sum0 = tl.where(valid0, best_along(best0, 1, 0), 0.0)
            sum1 = tl.where(valid1, best_along(best1, 1, 0), 0.0)
            if STORE_ROWS:
                tl.store(out_ptr + column * out_stride + token0, sum0, mask=token0 < query_size)
                tl.store(out_ptr + column * out_stride + token1, sum1, mask=token1 < query_size)
            else:
                both = sum0.to(tl.float64) + sum1.to(tl.float64)
                sums = tl.sum(tl.reshape(both, [ROWS // HALF, HALF]), 1).to(tl.float32)
                tl.store(out_ptr + owner.to(tl.int64) * out_stride + column, sums, mask=owner < query_count)
            best0 = nothing(ROWS, TOKENS, 0)
            best1 = nothing(ROWS, TOKENS, 0)
