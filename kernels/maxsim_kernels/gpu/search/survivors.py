"""Exact scores of the marked pairs alone: a program takes one document and the queries of its list, four queries of 32 tokens at once.

A cell is one `tl.dot` over all of d, as in the kernels that brute force takes (`forward/dense.py`), so its products meet the matrix
units in the same steps; the maximum is exact, and a query's maxima are added in FP64. Whether that gives brute force's bits on this GPU
is looked at before it is believed (`search/trust.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.gpu.geometry import padded
from maxsim_kernels.gpu.launch import launch
from maxsim_kernels.gpu.search.bounds import Marks
from maxsim_kernels.gpu.tile_ops import keep_nan
from maxsim_kernels.tokens import Packed

WIDEST = 256  # dimensions of a token that a tile holds whole
_ROWS, _TOKENS = 128, 64
_SHARES = 2  # programs a document: the list of one that many queries ask for is shared


@triton.jit(do_not_specialize=["queries", "documents", "limit", "shares", "tokens_total", "out_stride"])
def _survivors_kernel(
    query_ptr, query_start_ptr, query_length_ptr, document_ptr, start_ptr, length_ptr, list_ptr, count_ptr, total_ptr, out_ptr,
    queries, documents, limit, shares, tokens_total, out_stride, width, stride_query, stride_document,
    PARTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = ROWS // PADDED
    document = tl.program_id(0) // shares
    share = tl.program_id(0) % shares
    count = tl.load(count_ptr + document)
    if tl.load(total_ptr) > limit:
        count = 0  # brute force is cheaper; the host will see the same number
    start = tl.maximum(tl.load(start_ptr + document).to(tl.int64), 0)
    length = tl.load(length_ptr + document).to(tl.int64)
    length = tl.maximum(tl.minimum(length, tokens_total - start), 0).to(tl.int32)
    base = document_ptr + start * stride_document
    inner = tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)
    asked = list_ptr + document.to(tl.int64) * queries
    for first in range(share * EACH, count, shares * EACH):
        slot = first + row // PADDED
        query = tl.load(asked + slot, mask=slot < count, other=0).to(tl.int64)
        begin = tl.load(query_start_ptr + query).to(tl.int64)
        size = tl.load(query_length_ptr + query).to(tl.int32)
        size = tl.where(slot < count, size, 0)
        total = tl.zeros([EACH], tl.float64)
        parts = 1
        if PARTS:
            parts = tl.cdiv(tl.max(size, 0), ROWS)
        for part in range(parts):
            token = part * ROWS + row % PADDED
            valid = token < size
            from_row = (begin + token) * stride_query
            rows = tl.load(
                query_ptr + from_row[:, None] + inner[None, :], mask=valid[:, None] & (inner < width)[None, :], other=0.0
            )
            best = tl.full([ROWS], float("-inf"), tl.float32)
            for tile in tl.range(0, length, TOKENS, num_stages=STAGES):
                place = tile + tl.arange(0, TOKENS)
                inside = place < length
                source = base + place.to(tl.int64)[None, :] * stride_document + inner[:, None]
                tokens = tl.load(source, mask=inside[None, :] & (inner < width)[:, None], other=0.0)
                cells = tl.where(inside[None, :], tl.dot(rows, tokens), float("-inf"))
                best = keep_nan(best, tl.reduce(cells, 1, keep_nan))
            kept = tl.where(valid, best, 0.0).to(tl.float64)
            total += tl.sum(tl.reshape(kept, [EACH, PADDED]), 1)
        where = first + tl.arange(0, EACH)
        to = tl.load(asked + where, mask=where < count, other=0).to(tl.int64)
        tl.store(out_ptr + to * out_stride + document, total.to(tl.float32), mask=where < count)


def takes(values: Tensor, documents: Packed) -> bool:
    """Whether the kernel can score these queries' tokens with these documents: half precision, whole tokens, rows in one piece."""
    held = documents.values
    plain = held.stride(-1) == 1 and values.stride(-1) == 1
    return held.dtype in (torch.float16, torch.bfloat16) and held.shape[1] <= WIDEST and plain and held.device == values.device


def score_marked(
    values: Tensor, starts: Tensor, lengths: Tensor, longest: int, documents: Packed, marks: Marks, limit: int, scores: Tensor
) -> None:
    """Write the scores of the marked pairs into `scores` `[Nq, n]`; of more than `limit` pairs, none.

    Args:
        values, starts, lengths: the queries' tokens `[T, d]` and where each query lies; `longest`: of them.
    """
    lanes = min(_ROWS, padded(longest))
    held = documents.values
    document_starts, document_lengths = documents.starts.contiguous(), documents.lengths.contiguous()
    launch(
        _survivors_kernel, len(documents) * _SHARES,
        values, starts, lengths, held, document_starts, document_lengths, marks.lists, marks.counts, marks.total, scores,
        starts.numel(), len(documents), limit, _SHARES, held.shape[0], scores.stride(0), held.shape[1], values.stride(0),
        held.stride(0),
        PARTS=longest > _ROWS, PADDED=lanes, ROWS=_ROWS, TOKENS=_TOKENS, WIDTH=padded(held.shape[1]), STAGES=2, warps=8,
    )  # fmt: skip
