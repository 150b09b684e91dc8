"""Exact scores of the marked pairs alone: a program takes one document and the queries of its list, two queries of 32 tokens at once.

A cell is one `tl.dot` over all of d, as in the kernels that brute force takes (`forward/dense.py`), so its products meet the matrix
units in the same steps; the maximum is exact, and a query's maxima are added in FP64. Whether that gives brute force's bits on this GPU
is tried before it is relied on (`search/trust.py`). Floats are compared by their bits where documents take several tiles, as
`forward/dense.py` says.

A document that fits in a tile is read once, for all its queries. A query that does not is scored in parts: by a program each
where there is room for the sums of all parts (few documents would else leave the GPU idle), and a second kernel adds those sums
in the order in which one program would. Programs share the documents that have a list; how many those are is known on the GPU
alone, and most have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.gpu.geometry import hardware, padded
from maxsim_kernels.gpu.launch import launch
from maxsim_kernels.gpu.search.bounds import Marks
from maxsim_kernels.gpu.tile_ops import EMPTY, keep_nan, larger
from maxsim_kernels.tokens import Packed

WIDEST = 256  # dimensions of a token that a tile holds whole
SHORT = 128  # tokens of a document that is one tile
_SUMS = 1 << 22  # sums of parts that are kept, at most: 8 bytes each
_SLOTS = 32  # pairs of a document whose parts are added at once
_LARGE = (9, 0)  # whose shared memory and registers hold 512 rows
PROGRAMS = 4096  # at most: several for each multiprocessor


@dataclass(frozen=True)
class _Shape:
    """Query rows and document tokens of a tile, warps, and tiles in flight; `whole`: every document is one tile."""

    rows: int
    tokens: int
    warps: int
    stages: int
    whole: bool

    @classmethod
    def of(cls, longest: int, longest_document: int, width: int, capability: tuple[int, int]) -> _Shape:
        """The shape for queries and documents of up to so many tokens."""
        if longest > 384 and width <= 128 and capability == _LARGE:
            return cls(512, 64, 16, 3, False)  # the fewer programs, the fewer times a document comes out of the L2 cache
        if longest > 64 or width > 128:
            return cls(128, 64, 8, 3 if width <= 128 else 2, False)
        return cls(64, SHORT, 4, 1, True) if longest_document <= SHORT else cls(64, 64, 4, 2, False)


@triton.jit
def _cells(rows, base, at, length, inner, width, stride_document):
    """Products of query rows with a document's tokens `at`; -inf beyond its length."""
    inside = at < length
    source = base + at.to(tl.int64)[None, :] * stride_document + inner[:, None]
    tokens = tl.load(source, mask=inside[None, :] & (inner < width)[:, None], other=0.0)
    return tl.where(inside[None, :], tl.dot(rows, tokens), float("-inf"))


@triton.jit(do_not_specialize=["queries", "limit", "shares", "tokens_total", "out_stride"])
def _survivors_kernel(
    query_ptr, query_start_ptr, query_length_ptr, document_ptr, start_ptr, length_ptr, list_ptr, count_ptr, listed_ptr, documents_ptr,
    total_ptr, sum_ptr, out_ptr, queries, limit, shares, tokens_total, out_stride, width, stride_query, stride_document,
    PARTS: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = ROWS // PADDED
    inner = tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, TOKENS)
    items = tl.load(documents_ptr).to(tl.int32) * shares
    if tl.load(total_ptr) > limit:
        items = 0  # brute force is cheaper; the host will see the same number
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        document = tl.load(listed_ptr + item // shares).to(tl.int64)
        share = item % shares  # the part of every query that this program takes
        count = tl.load(count_ptr + document)
        start = tl.maximum(tl.load(start_ptr + document).to(tl.int64), 0)
        length = tl.load(length_ptr + document).to(tl.int64)
        length = tl.maximum(tl.minimum(length, tokens_total - start), 0).to(tl.int32)
        base = document_ptr + start * stride_document
        asked = list_ptr + document * queries
        if WHOLE:
            there = column < length
            place = base + column.to(tl.int64)[None, :] * stride_document + inner[:, None]
            tokens = tl.load(place, mask=there[None, :] & (inner < width)[:, None], other=0.0)
        # What does not change within these loops is made again: kept, it takes registers that other programs need.
        for first in tl.range(0, count, EACH, disable_licm=WHOLE):
            slot = first + row // PADDED
            query = tl.load(asked + slot, mask=slot < count, other=0).to(tl.int64)
            begin = tl.load(query_start_ptr + query).to(tl.int64)
            size = tl.load(query_length_ptr + query).to(tl.int32)
            size = tl.where(slot < count, size, 0)
            total = tl.zeros([EACH], tl.float64)
            parts = share + 1
            if PARTS and not SPLIT:
                parts = tl.cdiv(tl.max(size, 0), ROWS)
            for part in tl.range(share, parts, num_stages=1, disable_licm=True):
                token = part * ROWS + row % PADDED
                valid = token < size
                from_row = (begin + token) * stride_query
                rows = tl.load(
                    query_ptr + from_row[:, None] + inner[None, :], mask=valid[:, None] & (inner < width)[None, :], other=0.0
                )
                if WHOLE:
                    best = tl.reduce(tl.where(there[None, :], tl.dot(rows, tokens), float("-inf")), 1, keep_nan)
                else:
                    reach = tl.where(part * ROWS < tl.max(size, 0), length, 0)
                    most = tl.full([ROWS], EMPTY, tl.int32)
                    for tile in tl.range(0, reach, TOKENS, num_stages=STAGES):
                        cells = _cells(rows, base, tile + column, length, inner, width, stride_document)
                        most = tl.maximum(most, tl.reduce(cells.to(tl.int32, bitcast=True), 1, larger))
                    best = most.to(tl.float32, bitcast=True)
                    if tl.min(most) < 0:  # a row of negative products, whose bits have the opposite order: once more, as floats
                        best = tl.full([ROWS], float("-inf"), tl.float32)
                        for tile in tl.range(0, reach, TOKENS, num_stages=STAGES):
                            cells = _cells(rows, base, tile + column, length, inner, width, stride_document)
                            best = keep_nan(best, tl.reduce(cells, 1, keep_nan))
                kept = tl.where(valid, best, 0.0).to(tl.float64)
                total += tl.sum(tl.reshape(kept, [EACH, PADDED]), 1)
            where = first + tl.arange(0, EACH)
            if SPLIT:
                tl.store(sum_ptr + (document * queries + where) * shares + share, total, mask=where < count)
            else:
                to = tl.load(asked + where, mask=where < count, other=0).to(tl.int64)
                tl.store(out_ptr + to * out_stride + document, total.to(tl.float32), mask=where < count)


@triton.jit(do_not_specialize=["queries", "limit", "shares", "out_stride"])
def _add_parts_kernel(
    sum_ptr, list_ptr, count_ptr, listed_ptr, documents_ptr, total_ptr, out_ptr, queries, limit, shares, out_stride,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Scores of documents from the sums of their queries' parts."""
    items = tl.load(documents_ptr).to(tl.int32)
    if tl.load(total_ptr) > limit:
        items = 0
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        document = tl.load(listed_ptr + item).to(tl.int64)
        count = tl.load(count_ptr + document)
        for first in range(0, count, SLOTS):
            slot = first + tl.arange(0, SLOTS)
            total = tl.zeros([SLOTS], tl.float64)
            for part in range(shares):
                total += tl.load(sum_ptr + (document * queries + slot) * shares + part, mask=slot < count, other=0.0)
            to = tl.load(list_ptr + document * queries + slot, mask=slot < count, other=0).to(tl.int64)
            tl.store(out_ptr + to * out_stride + document, total.to(tl.float32), mask=slot < count)


def takes(values: Tensor, documents: Packed) -> bool:
    """Whether the kernel can score these queries' tokens with these documents: half precision, whole tokens, rows in one piece."""
    held = documents.values
    plain = held.stride(-1) == 1 and values.stride(-1) == 1
    return held.dtype in (torch.float16, torch.bfloat16) and held.shape[1] <= WIDEST and plain and held.device == values.device


def score_marked(
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    documents: Packed,
    longest_document: int,
    marks: Marks,
    limit: int,
    scores: Tensor,
) -> None:
    """Write the scores of the marked pairs into `scores` `[Nq, n]`; none where there are more than `limit`.

    Args:
        values, starts, lengths: the queries' tokens `[T, d]` and where each query lies; `longest`: tokens of the longest.
        longest_document: at least the tokens of any document.
    """
    queries, count, held = starts.numel(), len(documents), documents.values
    shape = _Shape.of(longest, longest_document, held.shape[1], hardware(held.device).capability)
    parts = triton.cdiv(longest, shape.rows)
    split = parts > 1 and queries * count * parts <= _SUMS
    shares = parts if split else 1
    sums = torch.empty(queries * count * parts, dtype=torch.float64, device=scores.device) if split else scores
    document_starts, document_lengths = documents.starts.contiguous(), documents.lengths.contiguous()
    listed = marks.lists, marks.counts, marks.listed, marks.documents, marks.total
    launch(
        _survivors_kernel, min(PROGRAMS, count * shares),
        values, starts, lengths, held, document_starts, document_lengths, *listed, sums, scores,
        queries, limit, shares, held.shape[0], scores.stride(0), held.shape[1], values.stride(0), held.stride(0),
        PARTS=parts > 1, SPLIT=split, WHOLE=shape.whole, PADDED=min(shape.rows, padded(longest)), ROWS=shape.rows,
        TOKENS=shape.tokens, WIDTH=padded(held.shape[1]), STAGES=shape.stages, warps=shape.warps,
    )  # fmt: skip
    if split:
        launch(
            _add_parts_kernel, min(PROGRAMS, count), sums, *listed, scores, queries, limit, shares, scores.stride(0), SLOTS=_SLOTS,
            warps=1,
        )  # fmt: skip


def score_alone(values: Tensor, starts: Tensor, lengths: Tensor, documents: Packed) -> Iterator[tuple[Tensor, Tensor]]:
    """Score all pairs as if they were marked, by every form of the kernel, to compare them with brute force (`search/trust.py`).

    Yields numbers of documents, and their scores `[Nq, n]`; nothing where the kernel cannot score them.
    """
    if takes(values, documents):
        short = (documents.lengths <= SHORT).nonzero()[:, 0]
        for numbers in (torch.arange(len(documents), device=values.device), short):
            yield numbers, _all_marked(values, starts, lengths, documents.select(numbers))


def _all_marked(values: Tensor, starts: Tensor, lengths: Tensor, documents: Packed) -> Tensor:
    count, device = starts.numel(), values.device
    lists = torch.arange(count, dtype=torch.int32, device=device).expand(len(documents), count).contiguous()
    total, every = torch.tensor([lists.numel(), len(documents)], device=device)
    counts = torch.full((len(documents),), count, dtype=torch.int32, device=device)
    listed = torch.arange(len(documents), dtype=torch.int32, device=device)
    marks = Marks(lists, counts, listed, every, total)
    scores = torch.empty(count, len(documents), dtype=torch.float32, device=device)
    longest = int(lengths.max()), int(documents.lengths.max())
    score_marked(values, starts, lengths, longest[0], documents, longest[1], marks, lists.numel(), scores)
    return scores
