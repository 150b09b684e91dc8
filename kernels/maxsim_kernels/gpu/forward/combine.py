"""Merging row maxima into scores: for queries packed end to end, wide embeddings, and documents that were split over programs.

A kernel in rows mode leaves `[splits, N, rows]` (or `[splits, Nq, N, Lq]`) float32 maxima; `_combine_kernel` takes the maximum over the
splits and the sum over each query's rows, in FP64, so that the same maxima give the same score whichever kernel left them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.geometry import byte_mask
from maxsim_kernels.gpu.launch import empty, launch
from maxsim_kernels.gpu.tile_ops import better, keep_nan, valid_rows

ROWS_BYTES = 40 << 20  # row maxima held at once; more documents take several launches


@triton.jit(
    do_not_specialize=[
        "query_size",
        "query_total",
        "documents",
        "splits",
        "stride_s",
        "stride_q",
        "stride_n",
        "out_stride",
        "argmax_documents",
        "argmax_size",
    ]
)
def _combine_kernel(
    best_ptr, winner_ptr, query_start_ptr, query_length_ptr, query_mask_ptr, out_ptr, argmax_ptr,
    query_size, query_total, documents, splits, stride_s, stride_q, stride_n, out_stride, argmax_documents, argmax_size,
    PACKED_QUERIES: tl.constexpr, HAS_QUERY_LENGTHS: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, ARGMAX: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(documents, COLUMNS)
    number = tl.program_id(0) // blocks
    query = tl.full([], 0, tl.int64) + number
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < documents
    origin = query * stride_q
    size = query_size
    if PACKED_QUERIES:
        begin = tl.maximum(tl.load(query_start_ptr + query).to(tl.int64), 0)
        origin = begin
        size = tl.load(query_length_ptr + query).to(tl.int64)
        size = tl.maximum(tl.minimum(size, query_total - begin), 0).to(tl.int32)
    total = tl.zeros([COLUMNS], tl.float64)
    for first in range(0, tl.maximum(size, argmax_size), ROWS):
        row = first + tl.arange(0, ROWS)
        valid = valid_rows(
            row < size, number + row * 0, row, query_length_ptr, query_mask_ptr, query_size, HAS_QUERY_LENGTHS, HAS_QUERY_MASK
        )
        inside = there[:, None] & valid[None, :]
        at = origin + column.to(tl.int64)[:, None] * stride_n + row.to(tl.int64)[None, :]
        best = tl.load(best_ptr + at, mask=inside, other=0.0)
        winner = tl.full([COLUMNS, ROWS], -1, tl.int32)
        if ARGMAX:
            winner = tl.load(winner_ptr + at, mask=inside, other=-1)
        for split in range(1, splits):
            more = at + (tl.full([], 0, tl.int64) + split) * stride_s
            here = tl.load(best_ptr + more, mask=inside, other=0.0)
            if ARGMAX:
                candidate = tl.load(winner_ptr + more, mask=inside, other=-1)
                win = (better(here, best, 0) | (winner < 0)) & (candidate >= 0)
                winner = tl.where(win, candidate, winner)
            best = keep_nan(best, here)
        if ARGMAX:
            to = (query * argmax_documents + column.to(tl.int64)[:, None]) * argmax_size + row[None, :]
            tl.store(argmax_ptr + to, winner, mask=there[:, None] & (row < argmax_size)[None, :])
        total += tl.sum(best.to(tl.float64), 1)
    tl.store(out_ptr + query * out_stride + column, total.to(tl.float32), mask=there)


@dataclass(frozen=True)
class RowMaxima:
    """Row maxima of some documents: `[splits, N, rows]` by strides, and their winners where asked for."""

    best: Tensor
    winner: Tensor | None
    documents: int  # (pieces of) documents it holds at once
    splits: int
    stride_split: int
    stride_query: int
    stride_document: int


def row_maxima(
    rows: int, pieces: int, splits: int, query_size: int, device: torch.device, winners: bool, room: int | None = None
) -> RowMaxima:
    """Room for the maxima `[N, rows]` of as many whole documents (their pieces) as `room` bytes hold (None: `ROWS_BYTES`)."""
    fit = (room or ROWS_BYTES) // (rows * (8 if winners else 4)) // splits  # documents
    # A multiple of four where so many fit: every launch's results then begin at a multiple of 16 bytes, as the first one's, so
    # that none needs another kernel.
    each = min(max(1, fit // 4 * 4 if fit >= 4 else fit) * splits, pieces)
    best = empty((each, rows), torch.float32, device)
    winner = empty((each, rows), torch.int32, device) if winners else None
    return RowMaxima(best, winner, each, splits, rows, query_size, splits * rows)


def combine(call: Call, rows: RowMaxima, first: int, count: int, scores: Tensor, argmax: Tensor | None) -> None:
    """Write scores (and winners) of documents `first .. first + count` of every query."""
    packed = call.query_starts is not None
    query_count = call.query_count
    size = 0 if packed else call.queries.shape[1]
    mask = byte_mask(call.query_mask, call.queries)
    wide = argmax.shape[-1] if argmax is not None else 0
    columns = 8 if count >= 8 else 1
    launch(
        _combine_kernel, query_count * triton.cdiv(count, columns),
        rows.best, rows.winner if rows.winner is not None else rows.best,
        call.query_starts if packed else call.queries,
        call.query_lengths if call.query_lengths is not None else call.queries,
        mask, scores[:, first:] if scores.numel() else scores, scores if argmax is None else argmax[:, first:],
        size, call.queries.shape[0] if packed else 0, count, rows.splits,
        rows.stride_split, rows.stride_query, rows.stride_document, scores.stride(0),
        scores.shape[1], wide,
        PACKED_QUERIES=packed, HAS_QUERY_LENGTHS=call.query_lengths is not None and not packed,
        HAS_QUERY_MASK=call.query_mask is not None, ARGMAX=argmax is not None, ROWS=64, COLUMNS=columns, warps=4,
    )  # fmt: skip
