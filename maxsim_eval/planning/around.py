"""What an evaluation does before it scores and after it: each timed on a sample of the real thing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from maxsim_eval.cache.sides import announce, chunk_of
from maxsim_eval.comparison.assessing import assess
from maxsim_eval.comparison.metrics import DEFAULT_METRICS
from maxsim_eval.comparison.ranks import DEVICE_MEMORY, ranking_on
from maxsim_eval.comparison.scores import compare_scores
from maxsim_eval.data.trec import write_trec_run
from maxsim_eval.errors import DataError, MissingPackageError
from maxsim_eval.planning.costs import Encoding, Rate, Sizes
from maxsim_eval.planning.rates import SECONDS, steady, timed
from maxsim_eval.planning.sizes import FoundSizes, offline
from maxsim_eval.processes.turns import each_turn
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.job import Outcome
from maxsim_eval.scoring.own_functions import find_paths
from maxsim_eval.types import Encoder, Result, Role, Run
from maxsim_kernels import Packed

_PREPARED = 256  # documents on which `prepare` is timed
Kept = TypeVar("Kept")
_AGAIN = 0.2  # seconds of items that are encoded a second time
_TURNS = 3  # spans for each of several threads
_QUERIES = 200  # of the made-up evaluation that is compared and written
_ROWS, _COLUMNS = 4, 200_000  # of score rows that are compared


def encoding(found: FoundSizes) -> tuple[FoundSizes, Encoding | None]:
    """Time encoding on a sample: the sizes, now by its tokens, and what encoding takes.

    None where nothing has to be encoded, or the encoder or the texts are not on this machine.
    """
    encoder, kept, sizes = found.encoder, found.kept, found.sizes
    if encoder is None or kept is None or not sizes.documents or not sizes.queries:
        return found, None
    start, seconds, lengths, started = 0.0, 0.0, found.lengths, time.perf_counter()
    try:
        with offline():
            if found.entry is None:
                start, seconds, tried = _encoding(
                    encoder, kept.documents, "document", lambda piece: (piece.lengths.cpu(), piece.dtype)
                )
                lengths, form = torch.cat([one for one, _ in tried]).numpy(), str(tried[0][1]).removeprefix("torch.")
                sizes = replace(sizes, document_tokens=round(lengths.mean() * sizes.documents), form=form, source="sample")
            sample = [kept.documents[place] for place in range(min(_PREPARED, sizes.documents))]
            prepared = min(timed(lambda: encoder.prepare(sample)) for _ in range(2))  # `_rest` counts new words
            start += prepared * sizes.documents / len(sample)
            first, others, pieces = _encoding(encoder, kept.queries, "query", lambda piece: piece)
    except (DataError, MissingPackageError) as error:
        return replace(found, notes=(*found.notes, str(error))), None
    asked = _joined(pieces)
    sizes = replace(sizes, query_tokens=round(len(asked.values) / len(asked) * sizes.queries), dim=encoder.dim)
    note = f"ESTIMATE: not in the cache; seconds and tokens are those of a sample, encoded in {time.perf_counter() - started:.1f} s"
    # Without the encoder: its model's memory is for scoring now.
    found = replace(found, sizes=sizes, lengths=lengths, notes=(note, *found.notes[1:]), kept=None, encoder=None, queries=asked)
    return found, Encoding(Rate(sizes.documents / max(seconds, 1e-9)), start + first + others)


def _encoding(
    encoder: Encoder, items: Sequence[Any], role: Role, keep: Callable[[Packed], Kept]
) -> tuple[float, float, list[Kept]]:
    """Encode growing samples: seconds of the first call (which loads the model), of all others, and `keep` of each result.

    Of the others, those made count as measured, the rest by the pace of the last one (`_rest`). Where a cache is filled by
    several calls at once (on a GPU), and one of full size is soon over, several are tried at once.
    """
    places = np.random.default_rng(0).permutation(len(items)).tolist()
    chunk, at_once = chunk_of(encoder, items), getattr(encoder, "at_once", 1)
    announce(encoder, len(items))

    def encoded(span: tuple[int, int]) -> Kept:
        return keep(encoder.encode([items[place] for place in places[slice(*span)]], role))

    def span_from(begin: int, count: int) -> tuple[int, int]:
        return begin, min(begin + count, len(items))

    span, made, took = span_from(0, 4), list[Kept](), list[float]()
    while True:
        started = time.perf_counter()
        made.append(encoded(span))
        took.append(time.perf_counter() - started)
        (begin, tried), seconds = span, sum(took[1:])
        if seconds > SECONDS or tried == len(items):
            return took[0], seconds + _rest(begin, tried, len(items), took[-1], encoded), made
        if tried - begin == chunk and at_once > 1:
            spans = [span_from(begin, chunk) for begin in range(tried, len(items), chunk)][: _TURNS * at_once]
            more, pace, found = _several(spans, encoded, at_once)
            return took[0], seconds + more + (len(items) - spans[-1][1]) * pace, [*made, *found]
        span = span_from(tried, min(2 * (tried - begin), chunk))


def _rest(begin: int, tried: int, count: int, took: float, encoded: Callable[[tuple[int, int]], Kept]) -> float:
    """Estimated seconds of items `tried` to `count`; `took`: seconds of the last sample, items `begin` to `tried`.

    A part of that sample is encoded again: without new words, that is the pace that stays. What the first time took beyond it
    falls, as new words become rare, as one over the square root of the items so far (Heaps' law).
    """
    if tried == count:
        return 0.0
    pace = took / (tried - begin)
    again = min(tried - begin, max(1, int(_AGAIN / pace)))
    known = min(pace, timed(lambda: encoded((begin, begin + again))) / again)
    middle = (begin + tried) / 2  # where the pace was measured
    falling = 2 * middle**0.5 * (count**0.5 - tried**0.5)
    return (count - tried) * known + (pace - known) * falling


def _several(
    spans: Sequence[tuple[int, int]], encoded: Callable[[tuple[int, int]], Kept], at_once: int
) -> tuple[float, float, list[Kept]]:
    """Encode spans of items, `at_once` at a time: seconds in all, seconds an item while all threads work, and the results.

    The latter are measured from the end of span number `at_once` to the end of the last; 0 without spans after that one.
    """
    ends: list[tuple[float, int]] = []  # when each span ended, and its items
    made: list[Kept] = []

    def one(start: int, stop: int) -> Kept:
        found = encoded((start, stop))
        ends.append((time.perf_counter(), stop - start))
        return found

    def keep(_: None, pieces: Iterable[Kept]) -> None:
        made.extend(pieces)

    only: list[None] = [None]  # one turn, which has all spans
    started = time.perf_counter()
    each_turn(only, lambda _: spans, one, keep, at_once)
    later = sum(items for _, items in ends[at_once:])
    pace = (ends[-1][0] - ends[at_once - 1][0]) / later if later else 0.0
    return ends[-1][0] - started, pace, made


def _joined(parts: Sequence[Packed]) -> Packed:
    """All parts as one `Packed`, on the CPU."""
    lengths = torch.cat([part.lengths.cpu() for part in parts])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Packed(torch.cat([part.compact().values.cpu() for part in parts]), offsets)


def compare_rate(documents: int, device: str, budget: int | None = None) -> Rate:
    """Pairs a second of comparing two paths' full score rows, ranked on the device."""
    ranking = ranking_on(device, budget or DEVICE_MEMORY)
    rows = np.random.default_rng(0).random((_ROWS, min(documents, _COLUMNS)), np.float32)
    other = rows + np.float32(1e-3) * rows[::-1]  # nearly the same order, as another path's scores are
    ((seconds, spread),) = steady(lambda: timed(lambda: compare_scores(rows, other, None, None, ranking)))
    return Rate(rows.size / seconds, f"{_ROWS} rows of {rows.shape[1]:,} scores", spread)


def finish_rate(sizes: Sizes, names: Sequence[str], k: int, report: Callable[[Result, Path], None]) -> Rate | None:
    """Rankings (a query by a path) a second that become metrics, statistics, run files and a report; None where there is nothing.

    Args:
        report: writes a Result into a folder.
    """
    count, depth = min(sizes.queries, _QUERIES), min(k, sizes.documents)
    if not count or not depth:
        return None
    asked = Asked([f"q{n}" for n in range(count)], (), depth, np.zeros(0, np.int64), np.zeros(0, np.int64))
    qrels = {query: {f"d{n % depth}": 1} for n, query in enumerate(asked.query_ids)}
    random = np.random.default_rng(0)

    def outcome(name: str) -> Outcome:
        orders = np.argsort(np.arange(depth) + 2 * random.random((count, depth)), axis=1)  # neighbours change places
        rows = ([(f"d{place}", float(-rank)) for rank, place in enumerate(row)] for row in orders.tolist())
        return Outcome(Run(name, dict(zip(asked.query_ids, rows, strict=True))), {"total": 1.0}, None)

    outcomes, paths = [outcome(name) for name in names], find_paths(names)

    def finish() -> None:
        results, runs = assess(outcomes, asked, paths, (), qrels, torch.float32, DEFAULT_METRICS)
        with tempfile.TemporaryDirectory() as folder:
            for number, run in enumerate(runs.values()):
                write_trec_run(Path(folder) / str(number), run)
            task = {"source": "", "dataset": "", "split": "", "queries": count, "documents": sizes.documents, "warnings": []}
            report(Result(task, {"name": ""}, depth, results, {}, [], reference=next(iter(results))), Path(folder))

    first = timed(finish)
    ((seconds, spread),) = steady(lambda: timed(finish))
    rankings = sizes.queries * len(names)
    whole = rankings * seconds / (count * len(names)) + max(0.0, first - seconds)  # the first one imports what it needs
    return Rate(rankings / whole, f"{count} queries x {len(names)} paths, k = {depth}", spread)
