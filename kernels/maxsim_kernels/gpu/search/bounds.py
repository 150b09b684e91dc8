"""The bounds of `search/bounds.py` on a GPU, in FP64: the queries' part, lower bounds, and the lists of pairs that can still win.

A document's list holds the queries that ask for its exact score. It is made by one program for a few documents, which walks over all
queries, so nothing has to be compacted and the host waits for nothing. Leads are about k pairs of each query, whose lower
bounds are the highest; late ones are all others whose upper bound reaches the threshold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import max_pool1d

from maxsim_kernels.gpu.launch import launch

_QUERIES, _DOCUMENTS = 64, 16  # of a tile of marks
# Of a tile of lower bounds: 8 cells a thread, as of marks, or FP64 takes more registers.
_LOWER_QUERIES, _LOWER_DOCUMENTS = 8, 128
_SLACK = tl.constexpr(1.0 + 2.0**-20)  # far more than FP64 rounds; a number that FP32 holds
_LARGEST = tl.constexpr(2.0**100)  # magnitudes beyond which some step could overflow FP32: no bound there


@dataclass(frozen=True)
class Rounding:
    """What rounding adds: relative errors of an inner product on the exact path and over codes, underflow, `2 sqrt(d) max|offset|`.

    Each a number that FP32 holds, rounded up.
    """

    exact: float
    coded: float
    tiny: float
    shift: float

    @classmethod
    def up(cls, *values: float) -> Rounding:
        """Of numbers that FP32 need not hold."""
        near = [(value, np.float32(value)) for value in values]
        return cls(*(float(one if float(one) >= value else np.nextafter(one, np.float32(np.inf))) for value, one in near))


@dataclass(frozen=True)
class Marks:
    """Pairs to be scored exactly: `lists` `[n, Nq]` int32, of which the first `counts` `[n]` count.

    `listed` `[n]` int32: documents whose list holds something, in no order; the first `documents` `[]` int64 count. `tally` `[Nq]`
    int64: pairs by query, `total` `[]` int64 of all; `tokens` `[]` int64: of their documents. `highest` `[Nq]` float64: the best upper
    bound that is not marked (of late marks alone).
    """

    lists: Tensor
    counts: Tensor
    listed: Tensor
    documents: Tensor
    tally: Tensor
    total: Tensor
    tokens: Tensor
    highest: Tensor


@triton.jit(do_not_specialize=["queries", "width"])
def _terms_kernel(
    value_ptr, code_ptr, scale_ptr, start_ptr, length_ptr, out_ptr, queries, width, stride, exact, coded, tiny, shift,
    CODED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A query's factors of `error_n`, of `norm_n`, what is left, its size, and the shift: rows of `out` `[5, Nq]` FP64."""
    query = tl.program_id(0)
    start = tl.load(start_ptr + query).to(tl.int64)
    length = tl.load(length_ptr + query).to(tl.int32)
    own = tl.zeros([ROWS], tl.float64)
    meant = tl.zeros([ROWS], tl.float64)
    apart = tl.zeros([ROWS], tl.float64)
    for first in range(0, length, ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < length
        at = start + row
        scale = tl.zeros([ROWS], tl.float64)
        if CODED:
            scale = tl.load(scale_ptr + at, mask=valid, other=0.0).to(tl.float64)
        squares = tl.zeros([ROWS], tl.float64)
        meant_squares = tl.zeros([ROWS], tl.float64)
        apart_squares = tl.zeros([ROWS], tl.float64)
        for slice in range(0, width, WIDTH):
            column = slice + tl.arange(0, WIDTH)
            held = valid[:, None] & (column < width)[None, :]
            tokens = tl.load(value_ptr + at[:, None] * stride + column[None, :], mask=held, other=0.0).to(tl.float64)
            squares += tl.sum(tokens * tokens, 1)
            if CODED:
                codes = tl.load(code_ptr + at[:, None] * width + column[None, :], mask=held, other=0.0).to(tl.float32)
                as_codes = codes.to(tl.float64) * scale[:, None]
                meant_squares += tl.sum(as_codes * as_codes, 1)
                apart_squares += tl.sum((tokens - as_codes) * (tokens - as_codes), 1)
        own += tl.sqrt(squares)
        meant += tl.sqrt(meant_squares if CODED else squares)
        apart += tl.sqrt(apart_squares)
    one = tl.zeros([], tl.float64)
    norm = one + tl.sum(own, 0)
    codes_norm = one + tl.sum(meant, 0)
    between = one + tl.sum(apart, 0)
    gamma = one + exact
    codes_gamma = one + coded
    least = one + tiny
    moved = one + shift
    count = one + length
    size = norm + codes_norm
    out = out_ptr + query
    of_error = codes_norm * (1.0 + codes_gamma) + count * least
    of_norm = between + gamma * norm + codes_gamma * codes_norm + count * least
    rest = codes_gamma * moved * codes_norm + least * (count * (1.0 + moved) + size)
    # NaN is no number to compare: such a query's size is inf, and nothing is pruned for it.
    tl.store(out, tl.where(of_error < float("inf"), of_error, float("inf")))
    tl.store(out + queries, tl.where(of_norm < float("inf"), of_norm, float("inf")))
    tl.store(out + 2 * queries, tl.where(rest < float("inf"), rest, float("inf")))
    tl.store(out + 3 * queries, tl.where(size < float("inf"), size, float("inf")))
    tl.store(out + 4 * queries, moved)


def query_terms(
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    codes: Tensor | None,
    scales: Tensor | None,
    rounding: Rounding,
) -> Tensor:
    """`[5, Nq]` FP64 of packed queries `values` `[T, d]`, of up to `longest` tokens; `codes`, `scales`: as the scan multiplies them.

    None: as they are.
    """
    count, width = starts.numel(), values.shape[1]
    out = torch.empty(5, count, dtype=torch.float64, device=values.device)
    held = min(128, max(16, triton.next_power_of_2(width)))
    if count:
        launch(
            _terms_kernel, count,
            values, codes if codes is not None else values, scales if scales is not None else out, starts, lengths, out, count,
            width, values.stride(0), rounding.exact, rounding.coded, rounding.tiny, rounding.shift,
            CODED=codes is not None, ROWS=64 if longest > 64 else 16, WIDTH=held, warps=8 if longest > 64 else 4,
        )  # fmt: skip
    return out


@triton.jit
def _interval(
    score_ptr, term_ptr, query_length_ptr, error_ptr, norm_ptr, length_ptr, query, document, queries, documents, stride
):  # fmt: skip
    """Lower and upper bounds FP64 `[Q, D]`; -inf for pairs whose score needs no look at the tokens, and beyond the edges."""
    asked = query < queries
    there = document < documents
    at = query.to(tl.int64)[:, None] * stride + document.to(tl.int64)[None, :]
    score = tl.load(score_ptr + at, mask=asked[:, None] & there[None, :], other=float("-inf")).to(tl.float64)
    of_error = tl.load(term_ptr + query, mask=asked, other=0.0)
    of_norm = tl.load(term_ptr + queries + query, mask=asked, other=0.0)
    rest = tl.load(term_ptr + 2 * queries + query, mask=asked, other=0.0)
    size = tl.load(term_ptr + 3 * queries + query, mask=asked, other=0.0)
    shift = tl.load(term_ptr + 4 * queries)
    error = tl.load(error_ptr + document, mask=there, other=0.0).to(tl.float64)
    norm = tl.load(norm_ptr + document, mask=there, other=0.0).to(tl.float64)
    width = (of_error[:, None] * error[None, :] + of_norm[:, None] * norm[None, :] + rest[:, None]) * _SLACK
    reach = error + norm + shift
    sound = (size[:, None] * reach[None, :] <= _LARGEST) & (size <= _LARGEST)[:, None] & (reach <= _LARGEST)[None, :]
    sound = sound & (width < float("inf")) & (tl.abs(score) < float("inf"))
    known = (tl.load(length_ptr + document, mask=there, other=0) <= 0)[None, :]
    known = known | (tl.load(query_length_ptr + query, mask=asked, other=0) <= 0)[:, None]
    upper = tl.where(sound, score + width, float("inf"))
    lower = tl.where(sound, score - width, float("-inf"))
    return tl.where(known, float("-inf"), lower), tl.where(known, float("-inf"), upper)


@triton.jit(do_not_specialize=["queries", "documents", "stride"])
def _lower_kernel(
    score_ptr, term_ptr, query_length_ptr, error_ptr, norm_ptr, length_ptr, held_ptr, out_ptr, queries, documents, stride,
    QUERIES: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Lower bounds FP32 `[Nq, n]` (to choose leads by: not rounded with care), -inf where the upper one is below what is held."""
    blocks = tl.cdiv(documents, DOCUMENTS)
    query = (tl.program_id(0) // blocks) * QUERIES + tl.arange(0, QUERIES)
    document = (tl.program_id(0) % blocks) * DOCUMENTS + tl.arange(0, DOCUMENTS)
    lower, upper = _interval(
        score_ptr, term_ptr, query_length_ptr, error_ptr, norm_ptr, length_ptr, query, document, queries, documents, stride
    )
    held = tl.load(held_ptr + query, mask=query < queries, other=float("inf")).to(tl.float64)
    found = tl.where(upper >= held[:, None], lower, float("-inf")).to(tl.float32)
    at = query.to(tl.int64)[:, None] * documents + document.to(tl.int64)[None, :]
    tl.store(out_ptr + at, found, mask=(query < queries)[:, None] & (document < documents)[None, :])


@triton.jit(do_not_specialize=["queries", "documents", "stride"])
def _mark_kernel(
    score_ptr, term_ptr, query_length_ptr, error_ptr, norm_ptr, length_ptr, lower_ptr, floor_ptr, least_ptr, list_ptr, count_ptr,
    listed_ptr, sum_ptr, tally_ptr, highest_ptr, queries, documents, stride,
    LATE: tl.constexpr, QUERIES: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    document = block * DOCUMENTS + tl.arange(0, DOCUMENTS)
    there = document < documents
    found = tl.zeros([DOCUMENTS], tl.int32)
    for first in range(0, queries, QUERIES):
        query = first + tl.arange(0, QUERIES)
        asked = query < queries
        inside = asked[:, None] & there[None, :]
        at = query.to(tl.int64)[:, None] * documents + document.to(tl.int64)[None, :]
        lower = tl.load(lower_ptr + at, mask=inside, other=float("-inf"))
        floor = tl.load(floor_ptr + query, mask=asked, other=float("inf"))
        marked = (lower >= floor[:, None]) & (lower > float("-inf"))
        to = block.to(tl.int64) * queries + query
        if LATE:
            _, upper = _interval(
                score_ptr,
                term_ptr,
                query_length_ptr,
                error_ptr,
                norm_ptr,
                length_ptr,
                query,
                document,
                queries,
                documents,
                stride,
            )
            least = tl.load(least_ptr + query, mask=asked, other=float("inf")).to(tl.float64)
            late = (upper >= least[:, None]) & (upper > float("-inf")) & inside & (marked == 0)
            left = tl.where(late | marked | (inside == 0), float("-inf"), upper)
            tl.store(highest_ptr + to, tl.max(left, 1), mask=asked)
            marked = late
        ones = marked.to(tl.int32)
        place = found[None, :] + tl.cumsum(ones, 0) - 1
        row = list_ptr + document.to(tl.int64)[None, :] * queries + place
        tl.store(row, query[:, None] + tl.zeros_like(place), mask=marked)
        tl.store(tally_ptr + to, tl.sum(ones, 1), mask=asked)
        found += tl.sum(ones, 0)
    tl.store(count_ptr + document, found, mask=there)
    length = tl.load(length_ptr + document, mask=there, other=0).to(tl.int64)
    some = (found > 0).to(tl.int32)
    tl.atomic_add(sum_ptr, tl.sum(found, 0).to(tl.int64))
    tl.atomic_add(sum_ptr + 1, tl.sum(found * length, 0))
    before = tl.atomic_add(sum_ptr + 2, tl.sum(some, 0).to(tl.int64))
    tl.store(listed_ptr + before + tl.cumsum(some, 0) - 1, document, mask=some > 0)


@dataclass(frozen=True)
class Bounded:
    """What bounds some documents' scores: scores over codes `[Nq, n]`, and the parts of the widths."""

    scores: Tensor
    terms: Tensor
    query_lengths: Tensor
    errors: Tensor
    norms: Tensor
    lengths: Tensor

    def _arguments(self) -> tuple[Tensor, ...]:
        held = (self.query_lengths, self.errors, self.norms, self.lengths)
        return self.scores, self.terms, *(one.contiguous() for one in held)

    def lower(self, held: Tensor) -> Tensor:
        """Lower bounds FP32 `[Nq, n]`, -inf where the upper one is below `held` `[Nq]` FP32."""
        queries, documents = self.scores.shape
        out = torch.empty(queries, documents, device=self.scores.device)
        grid = triton.cdiv(queries, _LOWER_QUERIES) * triton.cdiv(documents, _LOWER_DOCUMENTS)
        launch(
            _lower_kernel, grid, *self._arguments(), held.contiguous(), out, queries, documents, self.scores.stride(0),
            QUERIES=_LOWER_QUERIES, DOCUMENTS=_LOWER_DOCUMENTS, warps=4,
        )  # fmt: skip
        return out

    def marks(self, lower: Tensor, floor: Tensor, least: Tensor | None) -> Marks:
        """Leads: pairs with `lower >= floor` `[Nq]`; with `least` `[Nq]` FP32 the late ones instead, `upper >= least` and no lead."""
        floor = floor.contiguous()
        least = None if least is None else least.contiguous()
        queries, documents = self.scores.shape
        blocks, device = triton.cdiv(documents, _DOCUMENTS), self.scores.device
        lists = torch.empty(documents, queries, dtype=torch.int32, device=device)
        counts = torch.empty(documents, dtype=torch.int32, device=device)
        tally = torch.empty(blocks, queries, dtype=torch.int32, device=device)
        listed, sums = torch.empty_like(counts), torch.zeros(3, dtype=torch.int64, device=device)
        highest = torch.empty(blocks, queries, dtype=torch.float64, device=device) if least is not None else self.terms
        launch(
            _mark_kernel, blocks, *self._arguments(), lower, floor, least if least is not None else floor, lists, counts, listed, sums,
            tally, highest, queries, documents, self.scores.stride(0),
            LATE=least is not None, QUERIES=_QUERIES, DOCUMENTS=_DOCUMENTS, warps=4,
        )  # fmt: skip
        best = highest[0] if least is None else highest.amax(0)
        return Marks(lists, counts, listed, sums[2], tally.sum(0), sums[0], sums[1], best)


def leads_of(lower: Tensor, k: int, size: int) -> tuple[Tensor, Tensor]:
    """Of lower bounds `[Nq, n]`: a floor `[Nq]` that k documents reach, and numbers `[Nq, k]` of such.

    The best of groups of `size` neighbours, k groups at least: almost the best of all, and far fewer to choose from.
    """
    best, numbers = max_pool1d(lower[:, None], size, size, ceil_mode=True, return_indices=True)
    leads = best[:, 0].topk(k, dim=1, sorted=False)
    return leads.values.amin(1), numbers[:, 0].gather(1, leads.indices)
