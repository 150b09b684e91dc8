"""The bounds of `search/bounds.py` on a GPU, in FP64: the queries' part, leads, and the lists of pairs that can still win.

A document's list holds the queries that ask for its exact score. It is made by one program for a few documents, which walks over all
queries, so nothing has to be compacted and the host waits for nothing. Leads are about the k best of each query by scores over codes;
the k-th of these scores is a guess of the threshold, and every pair that could reach the guess is marked first. Exact scores of the
leads give the threshold itself; late marks are the pairs that reach it and were not marked before: most often none.

A search is some twenty launches, which the host queues while the codes are scanned: what a kernel holds anyhow (groups, sums, the
highest bound) it writes too, since each of torch's small operators takes the host as long as a launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.gpu.forward.unaligned import aligned
from maxsim_kernels.gpu.launch import launch

_QUERIES, _DOCUMENTS, _PAIRS = 128, 32, 2048  # of a tile of marks, at most; more documents would take registers
# Of a tile of leads: 8 cells a thread, as of marks, or FP64 takes more registers.
_LEAD_QUERIES, _LEAD_DOCUMENTS = 8, 128
_VALUES = 1024  # of a query that a program looks at, at once, for the k-th best
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
        """From numbers that FP32 need not hold: each is rounded up."""
        near = [(value, np.float32(value)) for value in values]
        return cls(*(float(one if float(one) >= value else np.nextafter(one, np.float32(np.inf))) for value, one in near))


@dataclass(frozen=True)
class Tallied:
    """What marks of a piece add up to, on the device: the host reads it once, after everything is queued.

    `sums` `[8]` int64: of the first marks pairs, their documents' tokens (once a pair) and documents, the same three of the late
    marks, whether a NaN is among the best, and a spare. `tally` `[Nq]` int64: pairs by query. `highest` `[Nq]` float64: the best
    upper bound of a pair that was not marked.
    """

    sums: Tensor
    tally: Tensor
    highest: Tensor

    @classmethod
    def of(cls, queries: int, device: torch.device) -> Tallied:
        """Zeros: nothing is marked yet."""
        counts = torch.zeros(8 + queries, dtype=torch.int64, device=device)
        highest = torch.full((queries,), -torch.inf, dtype=torch.float64, device=device)
        return cls(counts[:8], counts[8:], highest)

    @property
    def lost(self) -> Tensor:
        """`[]` int64, not 0 where a NaN is among the best."""
        return self.sums[6]

    def read(self) -> tuple[int, int, bool]:
        """Pairs, tokens, and whether a NaN is among the best; waits for the GPU."""
        leads, tokens, _, late, more, _, lost, _ = self.sums.tolist()
        return leads + late, tokens + more, bool(lost)


@dataclass(frozen=True)
class Leads:
    """Documents by which a threshold is found: the best of the groups of neighbours `chosen` `[Nq, k]` int64.

    `places` `[Nq, groups]` int32: the best document of each group. `guess` `[Nq]` FP32: of the threshold. `scores` `[Nq, n]`
    FP32: exact scores are written there; until then -inf (0 for queries without tokens).
    """

    guess: Tensor
    chosen: Tensor
    places: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Marks:
    """Pairs to be scored exactly: `lists` `[n, Nq]` int32, of which the first `counts` `[n]` count.

    `listed` `[n]` int32: documents whose list holds something, in no order; the first `documents` `[]` int64 count. `total` `[]` int64:
    pairs.
    """

    lists: Tensor
    counts: Tensor
    listed: Tensor
    documents: Tensor
    total: Tensor


@triton.jit(do_not_specialize=["queries", "width"])
def _terms_kernel(
    value_ptr, code_ptr, scale_ptr, start_ptr, length_ptr, out_ptr, queries, width, stride, exact, coded, tiny, shift,
    CODED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A query's factors of `error_n` and `norm_n`, the rest of a width, its size, and the shift: rows of `out` `[5, Nq]` FP64."""
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
    # NaN compares as false, so that such a query's terms are inf, and nothing is pruned for it.
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
    """The terms `[5, Nq]` FP64 (`_terms_kernel`) of packed queries `values` `[T, d]` of up to `longest` tokens.

    `codes`, `scales`: what the scan multiplies; None: the queries as they are.
    """
    count, width = starts.numel(), values.shape[1]
    out = torch.empty(5, count, dtype=torch.float64, device=values.device)
    held = min(128, max(16, triton.next_power_of_2(width)))
    long, wide_loads = longest > 64, aligned(values)
    if count:
        launch(
            _terms_kernel, count,
            values, codes if codes is not None else values, scales if scales is not None else out, starts, lengths, out, count,
            width, values.stride(0), rounding.exact, rounding.coded, rounding.tiny, rounding.shift,
            CODED=codes is not None, ROWS=64 if long and wide_loads else 16, WIDTH=held,
            warps=4 if wide_loads and not long else 8,
        )  # fmt: skip
    return out


@triton.jit
def _interval(
    score_ptr, term_ptr, query_length_ptr, error_ptr, norm_ptr, length_ptr, query, document, queries, documents, stride
):  # fmt: skip
    """Scores and how far off they may be, FP64 `[Q, D]`: 0 and inf where there is no bound; -inf and 0 of pairs without tokens."""
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
    score = tl.where(known, float("-inf"), tl.where(sound, score, 0.0))
    return score, tl.where(known, 0.0, tl.where(sound, width, float("inf")))


@triton.jit(do_not_specialize=["queries", "documents", "groups", "stride"])
def _leads_kernel(
    score_ptr, term_ptr, query_length_ptr, error_ptr, norm_ptr, length_ptr, exact_ptr, best_ptr, place_ptr,
    queries, documents, groups, stride, QUERIES: tl.constexpr, DOCUMENTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The best score of every `SIZE` neighbours that have bounds, and whose it is, `[Nq, groups]`; initialises exact scores."""
    blocks = tl.cdiv(documents, DOCUMENTS)
    query = (tl.program_id(0) // blocks) * QUERIES + tl.arange(0, QUERIES)
    block = tl.program_id(0) % blocks
    document = block * DOCUMENTS + tl.arange(0, DOCUMENTS)
    score, width = _interval(
        score_ptr, term_ptr, query_length_ptr, error_ptr, norm_ptr, length_ptr, query, document, queries, documents, stride
    )
    asked = query < queries
    inside = asked[:, None] & (document < documents)[None, :]
    at = query.to(tl.int64)[:, None] * documents + document.to(tl.int64)[None, :]
    empty = tl.load(query_length_ptr + query, mask=asked, other=0) <= 0
    tl.store(exact_ptr + at, tl.where(empty[:, None] & inside, 0.0, float("-inf")), mask=inside)
    EACH: tl.constexpr = DOCUMENTS // SIZE
    found = tl.where(width < float("inf"), score, float("-inf")).to(tl.float32)
    best, place = tl.max(tl.reshape(found, [QUERIES, EACH, SIZE]), 2, return_indices=True)
    group = block * EACH + tl.arange(0, EACH)
    to = query.to(tl.int64)[:, None] * groups + group.to(tl.int64)[None, :]
    there = asked[:, None] & (group < groups)[None, :]
    tl.store(best_ptr + to, best, mask=there)
    tl.store(place_ptr + to, group[None, :] * SIZE + place, mask=there)


@triton.jit(do_not_specialize=["queries", "documents", "stride"])
def _mark_kernel(
    score_ptr, term_ptr, query_length_ptr, error_ptr, norm_ptr, length_ptr, guess_ptr, least_ptr, list_ptr, count_ptr,
    listed_ptr, sum_ptr, tally_ptr, highest_ptr, queries, documents, stride, guessed,
    LATE: tl.constexpr, QUERIES: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    document = block * DOCUMENTS + tl.arange(0, DOCUMENTS)
    there = document < documents
    found = tl.zeros([DOCUMENTS], tl.int32)
    for first in range(0, queries, QUERIES):
        query = first + tl.arange(0, QUERIES)
        asked = query < queries
        score, width = _interval(
            score_ptr, term_ptr, query_length_ptr, error_ptr, norm_ptr, length_ptr, query, document, queries, documents, stride
        )  # fmt: skip
        guess = tl.load(guess_ptr + query, mask=asked, other=float("inf")).to(tl.float64)
        counts = score > float("-inf")
        marked = counts & (score + (1.0 + guessed) * width >= guess[:, None])
        if LATE:
            least = tl.load(least_ptr + query, mask=asked, other=float("inf")).to(tl.float64)
            late = counts & (score + width >= least[:, None]) & (marked == 0)
            left = tl.where(late | marked, float("-inf"), score + width)
            best = tl.max(left, 1)
            before = tl.load(highest_ptr + query, mask=asked, other=float("inf"))  # maybe an older one, which is lower
            tl.atomic_max(highest_ptr + query, best, mask=best > before)
            marked = late
        ones = marked.to(tl.int32)
        place = found[None, :] + tl.cumsum(ones, 0) - 1
        row = list_ptr + document.to(tl.int64)[None, :] * queries + place
        tl.store(row, query[:, None] + tl.zeros_like(place), mask=marked)
        pairs = tl.sum(ones, 1)
        tl.atomic_add(tally_ptr + query, pairs.to(tl.int64), mask=pairs > 0)
        found += tl.sum(ones, 0)
    tl.store(count_ptr + document, found, mask=there)
    length = tl.load(length_ptr + document, mask=there, other=0).to(tl.int64)
    some = (found > 0).to(tl.int32)
    pairs = tl.sum(found, 0).to(tl.int64)
    if pairs > 0:
        tl.atomic_add(sum_ptr, pairs)
        tl.atomic_add(sum_ptr + 1, tl.sum(found * length, 0))
        before = tl.atomic_add(sum_ptr + 2, tl.sum(some, 0).to(tl.int64))
        tl.store(listed_ptr + before + tl.cumsum(some, 0) - 1, document, mask=some > 0)


@dataclass(frozen=True)
class Bounded:
    """What bounds some documents' scores: scores over codes `[Nq, n]`, and the parts of the widths.

    `guessed`: the share of a width by which the threshold is taken to be lower than scores over codes say.
    """

    scores: Tensor
    terms: Tensor
    query_lengths: Tensor
    errors: Tensor
    norms: Tensor
    lengths: Tensor
    guessed: float

    def _arguments(self) -> tuple[Tensor, ...]:
        held = (self.query_lengths, self.errors, self.norms, self.lengths)
        return self.scores, self.terms, *(one.contiguous() for one in held)

    def leads(self, k: int, size: int, known: Tensor | None) -> Leads:
        """The best documents of the k best groups of up to `size` neighbours (a power of two): almost the k best of all.

        `known` `[Nq, m]` FP32: exact scores of other documents.
        """
        (queries, documents), device = self.scores.shape, self.scores.device
        size = min(size, _LEAD_DOCUMENTS)
        groups = triton.cdiv(documents, size)
        scores = torch.empty(queries, documents, dtype=torch.float32, device=device)
        best = torch.empty(queries, groups, dtype=torch.float32, device=device)
        places = torch.empty(queries, groups, dtype=torch.int32, device=device)
        launch(
            _leads_kernel, triton.cdiv(queries, _LEAD_QUERIES) * triton.cdiv(documents, _LEAD_DOCUMENTS),
            *self._arguments(), scores, best, places, queries, documents, groups, self.scores.stride(0),
            QUERIES=_LEAD_QUERIES, DOCUMENTS=_LEAD_DOCUMENTS, SIZE=size, warps=4,
        )  # fmt: skip
        values, chosen = best.topk(min(k, groups), dim=1, sorted=False)
        if known is None and k <= groups:
            return Leads(values.amin(1), chosen, places, scores)
        return Leads(kth_best(values if known is None else torch.cat([known, values], 1), k), chosen, places, scores)

    def marks(self, leads: Leads, least: Tensor | None, tallied: Tallied) -> Marks:
        """Pairs that could reach the guess; with `least` `[Nq]` FP32 the late ones instead, which reach that, not the guess."""
        queries, documents = self.scores.shape
        late, device = least is not None, self.scores.device
        lists = torch.empty(documents, queries, dtype=torch.int32, device=device)
        counts, listed = (torch.empty(documents, dtype=torch.int32, device=device) for _ in range(2))
        sums = tallied.sums[3:] if late else tallied.sums
        tall = min(_QUERIES, triton.next_power_of_2(queries))
        broad = min(_DOCUMENTS, _PAIRS // tall)
        launch(
            _mark_kernel, triton.cdiv(documents, broad), *self._arguments(), leads.guess,
            least if least is not None else leads.guess, lists, counts, listed, sums, tallied.tally, tallied.highest,
            queries, documents, self.scores.stride(0), self.guessed,
            LATE=late, QUERIES=tall, DOCUMENTS=broad, warps=4,
        )  # fmt: skip
        return Marks(lists, counts, listed, sums[2], sums[0])

    def left(self, least: Tensor) -> Tensor:
        """`[1]` int64: pairs whose upper bound reaches `least` `[Nq]` FP32."""
        queries, documents = self.scores.shape
        count = torch.zeros(1, dtype=torch.int64, device=self.scores.device)
        launch(
            _left_kernel, triton.cdiv(queries, _LEAD_QUERIES) * triton.cdiv(documents, _LEAD_DOCUMENTS),
            *self._arguments(), least.contiguous(), count, queries, documents, self.scores.stride(0),
            QUERIES=_LEAD_QUERIES, DOCUMENTS=_LEAD_DOCUMENTS, warps=4,
        )  # fmt: skip
        return count


@triton.jit
def _in_order(values):
    """FP32 numbers as int64 of 0 to 2^32 - 1 that compare as they do; NaN as -inf, the lowest."""
    values = tl.where(values >= float("-inf"), values, float("-inf"))
    bits = tl.where(values == 0.0, 0, values.to(tl.int32, bitcast=True))
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _looked_at(
    known_ptr, score_ptr, chosen_ptr, place_ptr, at, query, known, leads, groups, stride, LEADS: tl.constexpr
):  # fmt: skip
    """A query's values at places `at`, as `_in_order` has them: its known scores first, then the exact scores of its leads."""
    values = tl.load(known_ptr + query * known + at, mask=at < known, other=float("-inf"))
    if LEADS:
        lead = (at >= known) & (at < known + leads)
        group = tl.load(chosen_ptr + query * leads + at - known, mask=lead, other=0)
        place = tl.load(place_ptr + query * groups + group, mask=lead, other=0)
        scores = tl.load(score_ptr + query * stride + place, mask=lead, other=float("-inf"))
        values = tl.where(lead, scores, values)
    return _in_order(values)


@triton.jit(do_not_specialize=["known", "leads", "groups", "stride", "k"])
def _kth_kernel(
    known_ptr, score_ptr, chosen_ptr, place_ptr, out_ptr, known, leads, groups, stride, k,
    LEADS: tl.constexpr, ONCE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """The k-th best of a query's `known` values and its leads' scores, made bit by bit from the highest; -inf if there are fewer.

    `ONCE`: a tile holds all of them.
    """
    query = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, VALUES)
    values = _looked_at(
        known_ptr, score_ptr, chosen_ptr, place_ptr, column, query, known, leads, groups, stride, LEADS
    )  # fmt: skip
    found = tl.zeros([], tl.int64)
    for step in range(32):
        bound = found + (tl.full([], 1, tl.int64) << (31 - step))
        reached = tl.sum((values >= bound).to(tl.int32), 0)
        if not ONCE:
            for first in range(VALUES, known + leads, VALUES):
                more = _looked_at(
                    known_ptr, score_ptr, chosen_ptr, place_ptr, first + column, query, known, leads, groups, stride, LEADS
                )  # fmt: skip
                reached += tl.sum((more >= bound).to(tl.int32), 0)
        found = tl.where(reached >= k, bound, found)
    bits = (found - 2147483648).to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(out_ptr + query, tl.where(found > 8388607, value, float("-inf")))  # up to there: -inf, and what NaN would be


def kth_best(known: Tensor | None, k: int, leads: Leads | None = None) -> Tensor:
    """`[Nq]` FP32: the k-th best of `known` `[Nq, m]` and the exact scores of leads; NaN counts as -inf, as does what is missing."""
    some = known if known is not None else leads.scores  # type: ignore[union-attr]
    queries = len(some)
    out = torch.empty(queries, dtype=torch.float32, device=some.device)
    held = known.contiguous() if known is not None else out
    scores, chosen, places = (leads.scores, leads.chosen, leads.places) if leads is not None else (out, out, out)
    few, more = held.shape[1] if known is not None else 0, chosen.shape[1] if leads is not None else 0
    tile = min(_VALUES, max(16, triton.next_power_of_2(few + more)))
    launch(
        _kth_kernel, queries, held, scores, chosen, places, out, few, more, places.shape[-1], scores.stride(0), k,
        LEADS=leads is not None, ONCE=few + more <= tile, VALUES=tile, warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["queries", "documents", "stride"])
def _left_kernel(
    score_ptr, term_ptr, query_length_ptr, error_ptr, norm_ptr, length_ptr, least_ptr, out_ptr, queries, documents, stride,
    QUERIES: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Count pairs whose upper bound reaches the threshold."""
    blocks = tl.cdiv(documents, DOCUMENTS)
    query = (tl.program_id(0) // blocks) * QUERIES + tl.arange(0, QUERIES)
    document = (tl.program_id(0) % blocks) * DOCUMENTS + tl.arange(0, DOCUMENTS)
    score, width = _interval(
        score_ptr, term_ptr, query_length_ptr, error_ptr, norm_ptr, length_ptr, query, document, queries, documents, stride
    )
    asked = query < queries
    least = tl.load(least_ptr + query, mask=asked, other=float("inf")).to(tl.float64)
    left = (score + width >= least[:, None]) & asked[:, None] & (document < documents)[None, :]
    tl.atomic_add(out_ptr, tl.sum(tl.sum(left.to(tl.int64), 1), 0))
