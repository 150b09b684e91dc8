"""Run under TRITON_INTERPRET=1 in a process of its own (the variable counts before Triton is first imported).

    TRITON_INTERPRET=1 python interpreted_search.py GROUP

The search on a GPU with its kernels interpreted on CPU tensors. Numbers lie on a grid, so every sum is exact and scores have brute
force's bits in any order of addition; what the kernels may not do is lose a pair, a document or a bound.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import quick_interpreter  # noqa: F401 - kernels run under it
import torch

from maxsim_kernels import Packed, maxsim, pack, quantize_fp8, quantize_int8, stream_topk
from maxsim_kernels.checks import Options
from maxsim_kernels.gpu.geometry import Hardware
from maxsim_kernels.gpu.search import survivors
from maxsim_kernels.gpu.search.bounds import Bounded, Rounding, Tallied, kth_best, query_terms
from maxsim_kernels.gpu.search.fetching import fetched
from maxsim_kernels.search import Residuals, StreamedCodes, ahead, device, fetching, residuals_of, scanning
from maxsim_kernels.search import bounds as host
from maxsim_kernels.search.queries import Queries
from maxsim_kernels.search.trust import Trust
from search_cases import Held, coded

CHECKED: list[str] = []


def grid(count: int, d: int, draw: np.random.Generator, levels: int = 8) -> torch.Tensor:
    return torch.from_numpy(draw.integers(-levels, levels + 1, (count, d)) / 8).half()


def corpus(count: int, d: int, draw: np.random.Generator, longest: int = 9, topics: int = 6) -> Packed:
    """Documents about a few topics, empty ones and duplicates among them."""
    centres = draw.integers(-8, 9, (topics, d))
    parts = []
    for number in range(count):
        size = int(draw.integers(0, longest))
        noise = draw.integers(-1, 2, (size, d))
        parts.append(torch.from_numpy((centres[number % topics] + noise) / 8).half())
        if number % 11 == 10:
            parts[-1] = parts[number // 2]
    return pack(parts)


def trusting(pairs: bool) -> None:
    device.looked_at = lambda form, alone: Trust("", pairs)


def search(
    queries: Any, documents: Any, k: int, codes: Any, residuals: Any, blocks: int = 1, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    made = {name: options.pop(name, None) for name in ("mask", "lengths")}
    found = device.DeviceSearch(Queries(queries, made["mask"], made["lengths"]), k, **options)
    step = -(-len(documents) // blocks)
    for first in range(0, len(documents), step):
        stop = min(first + step, len(documents))
        part = fetching.cut(documents, first, stop)
        found.add(part, scanning.cut_codes(codes, first, stop, 0), residuals[first:stop])
    return found.best.scores, found.best.indices, found.stats()


def check(queries: Any, documents: Packed, k: int, kind: str, pairs: bool, **options: Any) -> Any:
    trusting(pairs)
    codes = coded(documents, kind)
    residuals = residuals_of(documents, codes)
    given = {f"query_{name}": options[name] for name in ("mask", "lengths") if options.get(name) is not None}
    lifted = queries.unsqueeze(0) if isinstance(queries, torch.Tensor) and queries.dim() == 2 else queries
    expected = stream_topk(lifted, [documents], k, **given)
    for held in (documents, Held(documents)):  # of what is read by number, marked pairs alone or all pairs are scored too
        scores, indices, stats = search(queries, held, k, codes, residuals, **options)
        assert torch.equal(scores, expected[0]), (kind, scores, expected[0])
        assert torch.equal(indices, expected[1]), (kind, indices, expected[1])
        assert stats.certificate.holds
        CHECKED.append(kind)
    return stats


def check_search() -> None:
    draw = np.random.default_rng(0)
    kinds = [f"{kind} {scale}" for kind in ("int8", "affine") for scale in ("token", "document", "corpus")]
    for number, kind in enumerate((*kinds, "fp8 document")):
        d = (16, 24, 5)[number % 3]
        documents = corpus(60, d, draw)
        queries = grid(6 * 5, d, draw).view(6, 5, d)
        for pairs in (True, False):
            stats = check(queries, documents, 3, kind, pairs, most_rescored=1.0, blocks=1 + number % 2)
            assert not stats.fell_back
        check(queries, documents, 3, kind, True, quantize_queries=False, most_rescored=1.0)
        check(queries, documents, 80, kind, True, most_rescored=1.0)
        check(queries, documents, 2, kind, False, most_rescored=0.3, blocks=3)
    check(queries, documents, 2, "int8 token", True, most_rescored=0.0)


def check_queries() -> None:
    draw = np.random.default_rng(1)
    documents = corpus(40, 16, draw, longest=70)
    packed = pack([grid(size, 16, draw) for size in (3, 0, 150, 1, 17, 30)])
    dense = grid(6 * 20, 16, draw).view(6, 20, 16)
    lengths, mask = torch.tensor([20, 0, 3, 7, 1, 12]), torch.from_numpy(draw.random((6, 20)) < 0.5)
    for pairs in (True, False):
        check(packed, documents, 4, "int8 document", pairs, most_rescored=1.0)
        check(dense, documents, 4, "int8 document", pairs, most_rescored=1.0)
        check(dense, documents, 4, "int8 document", pairs, most_rescored=1.0, lengths=lengths)
        check(dense, documents, 4, "int8 document", pairs, most_rescored=1.0, mask=mask, lengths=lengths)
        check(dense[0], documents, 4, "int8 document", pairs, most_rescored=1.0)
    apart = Packed(torch.cat([documents.values, documents.values], 1)[:, :16], documents.offsets)
    assert not fetching.in_one_piece(apart)
    with mock.patch.object(device, "score_marked", side_effect=AssertionError("brute force takes another kernel")):
        trusting(True)
        found = search(
            dense, apart, 4, coded(documents, "int8 document"), residuals_of(documents, coded(documents, "int8 document"))
        )
    assert torch.equal(found[0], stream_topk(dense, [documents], 4)[0])
    even = Packed(grid(32 * 8, 16, draw), torch.arange(0, 257, 8))
    stats = check(dense, even, 2, "int8 document", True, most_rescored=1.0)
    assert scanning.even(even) == 8
    assert stats.scanned == 32
    for granularity in ("document", "token", "corpus"):
        codes = coded(even, f"int8 {granularity}")
        scan, expected = scanning.Scan(codes, even.device, fetching.Room()), maxsim(dense, codes)
        scan.here = False  # as beside a GPU: they are streamed, in the dense form too
        with mock.patch.object(scanning, "slice_of", side_effect=AssertionError("the ragged form")):
            for first, stop in ((0, 32), (5, 21)):
                assert torch.equal(scan.scores(Queries(dense), first, stop, True), expected[:, first:stop])
        CHECKED.append("streamed")


def check_sample() -> None:
    """Pieces begin with a sample; where bounds would leave most, brute force follows and says so."""
    device._SAMPLED, device._SAMPLE, device._LITTLE = 32, 8, 0
    draw = np.random.default_rng(2)
    queries = grid(6 * 5, 16, draw).view(6, 5, 16)
    documents = corpus(96, 16, draw, topics=30)
    check(queries, documents, 2, "int8 document", True, most_rescored=0.5)
    for lengths in (torch.tensor([5, 0, 5, 2, 1, 0]), torch.tensor([5, 0, 0, 0, 0, 0])):
        check(queries, documents, 2, "int8 document", True, most_rescored=0.5, lengths=lengths)
        check(queries, documents, 30, "int8 document", False, most_rescored=0.9, lengths=lengths)
    same = pack([torch.ones(3, 16).half()] * 64)
    stats = check(queries, same, 2, "int8 document", True)
    assert "sample of 8 documents" in stats.fell_back, stats.fell_back
    check_brute_force_first(queries, same, documents, "sample of 8")
    device._LITTLE = 1 << 41
    check_brute_force_first(queries, same, documents, "first search of so few")
    check_blocks(queries, documents)
    device._SAMPLED = 1 << 30
    stats = check(queries, same, 2, "int8 document", True)
    assert "more than 25% of the pairs" in stats.fell_back, stats.fell_back  # of `Held`; 20% where the documents are at hand
    stats = check(queries, same, 2, "int8 document", False)
    assert stats.fell_back, stats.fell_back


def check_brute_force_first(queries: torch.Tensor, same: Packed, documents: Packed, begins: str) -> None:
    """Where bounds did not prune last time nothing is scanned, until scores say that they would prune."""
    hopeless, good = coded(same, "int8 document"), coded(documents, "int8 document")
    if not device._LITTLE:
        ahead.pruned_before[good] = False
    # Of `same` nothing is ever scanned; of `documents` the second search is a scan.
    for held, codes, first in ((same, hopeless, begins), (documents, good, begins if device._LITTLE else "last time")):
        residuals, expected = residuals_of(held, codes), stream_topk(queries, [held], 2)
        for asked in (first, "last time" if held is same else ""):
            made = device.DeviceSearch(Queries(queries), 2, most_rescored=0.5)
            made.add(held, codes, residuals)
            found = made.best.scores, made.best.indices, made.stats()
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])
            assert asked in found[2].fell_back if asked else not found[2].fell_back, found[2].fell_back
            assert found[2].survivors.tolist() == [len(held)] * 6 or not asked
            assert found[2].scanned == (0 if asked else len(held))
            assert found[2].rescored_bytes == len(held.values) * 16 * 2 * 6 or not asked
            assert found[2].certificate.holds
            CHECKED.append("brute force first")


def check_ahead() -> None:
    """A search that comes again begins with its scan, and gives the same; any other is not begun, and codes are not kept."""
    draw = np.random.default_rng(7)
    documents, queries = corpus(40, 16, draw), grid(6 * 5, 16, draw).view(6, 5, 16)
    trusting(True)
    for held in (documents, Packed(grid(40 * 4, 16, draw), torch.arange(0, 161, 4))):
        codes = coded(held, "int8 document")
        residuals, expected = residuals_of(held, codes), stream_topk(queries, [held], 3)

        def begun(
            asked: Any = queries, k: int = 3, most: float = 1.0, codes: Any = codes, held: Packed = held, **given: Any
        ) -> Any:
            return ahead.scores_ahead(asked, held, codes, Options(**given), k, most)

        def searched(before: Any, codes: Any = codes, held: Packed = held, residuals: Residuals = residuals) -> Any:
            made = device.DeviceSearch(Queries(queries), 3, most_rescored=1.0)
            made.ahead = before
            made.add(held, codes, residuals)
            assert made.ahead is None
            return made

        assert begun() is None
        first = searched(None)
        scores = begun()
        assert torch.equal(scores, maxsim(queries, codes))
        with mock.patch.object(scanning, "cut_codes", side_effect=AssertionError("scanned again")):
            again = searched(scores)
        for found in (first, again):
            assert torch.equal(found.best.scores, expected[0])
            assert torch.equal(found.best.indices, expected[1])
            assert found.scanned == 40
            assert not found.stats().fell_back
        assert torch.equal(begun(queries + 0.125), maxsim(queries + 0.125, codes))
        others = (
            begun(queries[:5]), begun(queries.float()), begun(k=2), begun(most=0.5), begun(quantize_queries=False),
            begun(held=documents.select(range(40))), begun(query_mask=torch.ones(6, 9, dtype=torch.bool)),
        )  # fmt: skip
        assert others == (None,) * len(others)
        ahead.pruned_before[codes] = False
        assert begun() is None
        kept = len(ahead._last)
        del codes, begun, searched, first, again, found
        gc.collect()
        assert len(ahead._last) == kept - 1
        CHECKED.append("ahead")


def check_blocks(queries: torch.Tensor, documents: Packed) -> None:
    """Of blocks whose codes are all new, the first alone is scored by brute force."""
    found, half = device.DeviceSearch(Queries(queries), 2, most_rescored=0.5), len(documents) // 2
    for part in (documents.select(range(half)).compact(), documents.select(range(half, 2 * half)).compact()):
        codes = coded(part, "int8 document")
        found.add(part, codes, residuals_of(part, codes))
    expected = stream_topk(queries, [documents], 2)
    assert torch.equal(found.best.scores, expected[0])
    assert torch.equal(found.best.indices, expected[1])
    assert (found.brute, found.pieces, found.scanned) == (1, 2, half), found.stats().fell_back
    CHECKED.append("blocks")


def check_marks(bounded: Bounded, documents: Packed, exact: torch.Tensor, known: torch.Tensor | None) -> None:
    """Leads, a guess, the threshold, and late ones: together they hold what can be among the two best."""
    tallied = Tallied.of(len(exact), exact.device)
    leads = bounded.leads(2, 4, known)
    sure = (documents.lengths > 0) & torch.isfinite(bounded.errors)
    over = torch.where(sure & (bounded.query_lengths > 0)[:, None], bounded.scores, -torch.inf)
    groups = over.split(4, dim=1)
    assert torch.equal(leads.places.long(), torch.stack([4 * n + one.argmax(1) for n, one in enumerate(groups)], 1))
    best = torch.stack([one.amax(1) for one in groups], 1).topk(2, dim=1).values
    assert torch.equal(leads.guess, (best if known is None else torch.cat([best, known], 1)).topk(2, dim=1).values[:, -1])
    assert torch.equal(leads.scores, torch.where(bounded.query_lengths == 0, 0.0, -torch.inf)[:, None].expand_as(exact))
    first = bounded.marks(leads, None, tallied)
    for document, (row, count) in enumerate(zip(first.lists, first.counts, strict=True)):
        leads.scores[row[:count].long(), document] = exact[row[:count].long(), document]
    least = kth_best(known, 2, leads)
    chosen = leads.scores.gather(1, leads.places.gather(1, leads.chosen).long())
    assert torch.equal(least, (chosen if known is None else torch.cat([known, chosen], 1)).topk(2, dim=1).values[:, -1])
    late = bounded.marks(leads, least, tallied)
    for query in (0, 2, 3):
        marked = [
            document
            for marks in (first, late)
            for document in range(37)
            if query in marks.lists[document, : marks.counts[document]].tolist()
        ]
        assert set((exact[query] >= least[query]).nonzero()[:, 0].tolist()) <= set(marked)
        assert 3 in marked or documents.lengths[3] == 0, "no bound: scored always"
        assert len(marked) == len(set(marked)) == int(tallied.tally[query])
    assert int(tallied.tally[1]) == 0, "a query without tokens"
    tokens = 0
    for marks in (first, late):
        assert int(marks.total) == int(marks.counts.sum())
        tokens += int((marks.counts * documents.lengths).sum())
        listed = marks.listed[: int(marks.documents)].tolist()
        assert sorted(listed) == marks.counts.nonzero()[:, 0].tolist(), "each document with a list, once"
    assert tallied.read() == (int(tallied.tally.sum()), tokens, False)
    assert (tallied.highest < least.double())[[0, 2, 3]].all()


def check_left(bounded: Bounded, exact: torch.Tensor) -> None:
    """The count of pairs that reach a threshold grows as it falls, to all that need a look at tokens."""
    counts = [int(bounded.left(torch.full((len(exact),), least))) for least in (1e30, 0.0, -1e30)]
    asked = int((bounded.lengths > 0).sum()) * int((bounded.query_lengths > 0).sum())
    unbounded = int((bounded.query_lengths > 0).sum()) * int(bounded.lengths[3] > 0)
    assert unbounded == counts[0] <= counts[1] <= counts[2] == asked, counts
    for document in (bounded.lengths > 0).nonzero()[:, 0].tolist():  # no exact score lies above its bound
        place = slice(document, document + 1)
        sides = (side[place] for side in (bounded.errors, bounded.norms, bounded.lengths))
        alone = Bounded(bounded.scores[:, place], bounded.terms, bounded.query_lengths, *sides, bounded.guessed)
        assert int(alone.left(exact[:, document])) == int((bounded.query_lengths > 0).sum())


def check_kth() -> None:
    """Any k of any values, those of several looks included: as torch's."""
    draw = np.random.default_rng(5)
    for count, k in ((1, 1), (5, 3), (5, 9), (70, 70), (2500, 1), (2500, 1111)):
        values = grid(3 * count, 1, draw).view(3, count).float()
        values[0, count // 2 :] = float("nan")
        values[1, ::2] = torch.inf
        values[1, 1::3] = -0.0
        values[2, : count // 3] = -torch.inf
        found = kth_best(values, k)
        expected = values.nan_to_num(-torch.inf, torch.inf, -torch.inf)
        need = expected.topk(k, dim=1).values[:, -1] if k <= count else torch.full((3,), -torch.inf)
        assert torch.equal(found, need), (count, k, found, need)
        CHECKED.append("kth")


def check_parts() -> None:
    draw = np.random.default_rng(3)
    documents = corpus(37, 24, draw)
    starts, lengths = documents.starts[5:31:3], documents.lengths[5:31:3]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    found = fetched(documents.values, starts, offsets, int(offsets[-1]))
    assert torch.equal(found.values, documents.select(range(5, 31, 3)).compact().values)
    fetching._ROOM = 24 * 2 * 20
    chosen = torch.tensor([1, 2, 7, 20, 21, 36])
    for held in (documents, Held(documents)):
        pieces = list(fetching.some(held, chosen, fetching.Room()))
        assert torch.equal(torch.cat([numbers for numbers, _ in pieces]), chosen)
        assert torch.equal(torch.cat([one.values for _, one in pieces]), documents.select(chosen).compact().values)
    queries = Queries(pack([grid(size, 24, draw) for size in (5, 0, 40, 1)]))
    for kind, quantised in (("int8 token", True), ("affine document", True), ("fp8 document", True), ("int8 token", False)):
        codes = coded(documents, kind)
        gamma, shift = host.gamma_of(24), host.shift_of(codes)
        rounding = Rounding.up(gamma, gamma, host.tiny_of(24), shift)
        given = pack(
            [queries.values[s : s + n] for s, n in zip(queries.starts.tolist(), queries.lengths.tolist(), strict=True)]
        )
        expected = host.query_terms(given, codes, quantised)
        held = (None, None)
        if quantised:
            made = quantize_fp8(queries.values, "token") if "fp8" in kind else quantize_int8(queries.values)
            held = (made.codes, made.scales.float())
        terms = query_terms(queries.values, queries.starts, queries.lengths, queries.longest, *held, rounding)
        for found, need in zip(terms[:4], (expected.error, expected.norm, expected.rest, expected.size), strict=True):
            torch.testing.assert_close(found, need, rtol=1e-6, atol=1e-12)
        scores = maxsim(given, codes, quantize_queries=quantised)
        residuals = residuals_of(documents, codes)
        residuals = Residuals(residuals.errors.index_fill(0, torch.tensor([3]), torch.inf), residuals.norms)
        bounded = Bounded(scores, terms, queries.lengths, residuals.errors, residuals.norms, documents.lengths, device._GUESSED)
        exact = maxsim(given, documents)
        for known in (None, exact.topk(2, dim=1).values - 0.1):
            check_marks(bounded, documents, exact, known)
        check_left(bounded, exact)
        CHECKED.append(kind)
    check_alone(queries, documents)
    long = Queries(pack([grid(size, 24, draw) for size in (3, 130, 600)]))
    check_alone(long, documents)
    with mock.patch.object(survivors, "hardware", return_value=Hardware(survivors._LARGE, 1)):
        check_alone(long, documents)


def check_alone(queries: Queries, documents: Packed) -> None:
    """Pairs scored alone have brute force's bits, by one program for each document and by few, in one tile a document and in several."""
    assert survivors.takes(queries.values, documents)
    exact = queries.scores(documents)
    first = documents.values[documents.starts[documents.lengths > 0].long()]
    assert (queries.values.float() @ first.float().T < 0).any()  # documents of one token leave rows of negative products
    assert (documents.lengths == 1).any()
    for programs, short in ((survivors.PROGRAMS, survivors.SHORT), (3, survivors.SHORT), (3, 4)):
        with mock.patch.object(survivors, "PROGRAMS", programs), mock.patch.object(survivors, "SHORT", short):
            for numbers, alone in device.score_alone(queries.values, queries.starts, queries.lengths, documents):
                filled = documents.lengths[numbers] > 0
                assert filled.sum() > 5
                assert torch.equal(alone[:, filled], exact[:, numbers[filled]])


class Streamed(StreamedCodes):
    """Codes in memory, read in blocks of five documents."""

    def __init__(self, codes: Any) -> None:
        super().__init__(codes.codes.lengths.long(), codes.token_values.dtype)
        self.codes, self.asked = codes, list[tuple[int, int]]()

    def read(self, start: int, stop: int) -> Iterator[Any]:
        self.asked.append((start, stop))
        for first in range(start, stop, 5):
            yield scanning.cut_codes(self.codes, first, min(first + 5, stop), 0)


def refused(match: str, call: Any) -> None:
    with pytest.raises(ValueError, match=match):
        call()
    CHECKED.append(match)


def check_streams() -> None:
    """Codes that are read when they are scanned, parts of a corpus in any order, taken keys, memory budgets, lost scores."""
    draw = np.random.default_rng(4)
    documents, queries = corpus(90, 16, draw), Queries(pack([grid(size, 16, draw) for size in (5, 0, 3)]))
    expected = stream_topk(queries.given, [documents], 4)
    rows = Held(documents)
    for kind in ("int8 document", "int8 token", "fp8 document"):
        trusting(kind == "int8 token")
        codes = coded(documents, kind)
        residuals = residuals_of(documents, codes)
        for budget, order in ((None, [0]), (1 << 30, [0]), (None, [60, 0, 30])):
            device._LEAST_DOCUMENTS, device._CELLS = (16, 64) if budget is None else (4096, 1 << 27)
            found = device.DeviceSearch(queries, 4, True, 0.5, budget, watched=True)
            step = 90 // len(order)
            for first in order:
                span = slice(first, first + step)
                streamed = Streamed(scanning.cut_codes(codes, first, first + step, 0))
                found.add(fetching.cut(rows, first, first + step), streamed, residuals[span], first=first)
                assert len(streamed.asked) >= (1 if budget else step // 16), streamed.asked
            assert torch.equal(found.best.scores, expected[0]), kind
            assert torch.equal(found.best.indices, expected[1]), kind
            assert found.lost is None
            assert found.stats().certificate.holds
            CHECKED.append(kind)
    codes, counts = coded(documents, "int8 document"), []
    residuals = residuals_of(documents, codes)
    for known in (False, True):  # the best of the first half prune the second
        found = device.DeviceSearch(queries, 4, True, 1.0, watched=True)
        if known:
            before = device.TopK(3, 4)
            before.add(maxsim(queries.given, documents.select(range(45))))
            found.take(before.keys)
        found.add(fetching.cut(rows, 45, 90), Streamed(scanning.cut_codes(codes, 45, 90, 0)), residuals[45:], first=45)
        counts.append(int(found.survivors.sum()))
    assert torch.equal(found.best.indices, expected[1])
    assert counts[1] < counts[0], counts
    CHECKED.append("taken")
    check_lost(queries, documents)
    short = Streamed(codes)
    short.lengths = torch.cat([short.lengths, short.lengths[:1]])
    whole = Held(pack([documents[n] for n in (*range(90), 0)]))
    more = Residuals(*(torch.cat([one, one[:1]]) for one in (residuals.errors, residuals.norms)))
    short.read = lambda start, stop: Streamed.read(short, start, min(stop, 90))  # type: ignore[method-assign]
    refused("codes: read gave", lambda: device.DeviceSearch(queries, 4, most_rescored=1.0).add(whole, short, more))
    affine = Streamed(coded(documents, "affine document"))
    refused("without offsets", lambda: device.DeviceSearch(queries, 4, most_rescored=1.0).add(rows, affine, residuals))
    refused("memory_budget: got 1000 bytes, need at least", lambda: device.DeviceSearch(queries, 4, memory_budget=1000))


def check_lost(queries: Queries, documents: Packed) -> None:
    """A document that loses its score to -inf is named, where that is asked for."""
    large = pack([documents[n].bfloat16() if n != 7 else torch.full((2, 16), -3e38).bfloat16() for n in range(90)])
    asked = Queries(Packed(queries.values.abs().bfloat16() * 1e30, queries.given.offsets))
    for watched in (False, True):
        found = device.DeviceSearch(asked, 4, watched=watched)
        codes = quantize_int8(documents, "document")
        found.add(Held(large), Streamed(codes), Residuals(large_errors(large), large_errors(large)))
        assert found.lost == ((0, 7) if watched else None)
        assert found.brute == found.pieces or not watched
        CHECKED.append("lost")


def large_errors(documents: Packed) -> torch.Tensor:
    return torch.tensor(
        [float(documents[n].double().norm(dim=1).amax()) if len(documents[n]) else 0.0 for n in range(90)]
    ).float()


GROUPS = {
    "search": check_search,
    "queries": check_queries,
    "sample": check_sample,
    "ahead": check_ahead,
    "kth": check_kth,
    "parts": check_parts,
    "streams": check_streams,
}
if __name__ == "__main__":
    GROUPS[sys.argv[1]]()
    sys.stdout.write(f"{len(CHECKED)} checked\n")
