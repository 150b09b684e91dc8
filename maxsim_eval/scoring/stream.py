"""One path over many units of documents, in one stream: while a unit is scored, the blocks of the next are on their way.

A unit's results (its top-k keys, the kept rows of its scores, where its time went) leave the device at its end, on a stream of
their own, and are handed out when they have arrived: the host never waits for a GPU in the middle.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.cache.corpus import Corpus, largest_of, within_memory
from maxsim_eval.crc.devices import can_prove
from maxsim_eval.errors import MaxsimEvalError, UsageError
from maxsim_eval.scoring import finite
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.candidates import pair_scores
from maxsim_eval.scoring.paths import check_range
from maxsim_eval.scoring.proving import Launch, Proofs, settle
from maxsim_eval.scoring.sources import source_of
from maxsim_kernels import Packed
from maxsim_kernels.streaming import device_blocks, least_budget
from maxsim_kernels.topk import TopK

PHASES = ("read", "prepare", "score", "topk")
_IN_FLIGHT = 2  # units whose results are on their way while a further one is scored
_BUFFERS = 4  # pieces that fill a memory budget (`device_blocks`): on their way, in use, and as much for scores


@dataclass(frozen=True)
class UnitScores:
    """What a path gave for documents `start` to `stop`: keys `[Nq, k]` int64, kept rows `[rows, stop - start]` float32 or None.

    `cost` is seconds by phase and in `total`, and of a certified path what it read.
    """

    start: int
    stop: int
    keys: np.ndarray
    scores: np.ndarray | None
    cost: Mapping[str, float]


def score_units(
    name: str,
    queries: Packed,
    corpus: Corpus,
    asked: Asked,
    units: Sequence[tuple[int, int]],
    *,
    keep: bool,
    tick: Callable[[int, int], None] = lambda documents, size: None,
) -> Iterator[UnitScores]:
    """Score units (ascending ranges of documents) by one path; yields them in order, each as soon as its results are on the host.

    Args:
        queries: the queries' tokens, as stored.
        keep: whether the scores of `asked.kept_rows` are wanted.
        tick: called after each block with its number of documents and the bytes of their tokens.

    Raises:
        DataError: a score that is NaN or infinite, named by query and document, or tokens that do not fit the path's format; every
            unit before that one was yielded, and nothing of it or of any after it. CacheError: a file that cannot be read or is
            damaged, likewise. UsageError: a memory budget that is too small, or large.
    """
    path = asked.paths[name]
    if path.may_exceed(queries):
        check_range(float(largest_of(queries.values)))
    waiting: deque[_Unit] = deque()
    with within_memory(f"path {name}"):
        stream = _Stream(name, queries, corpus, asked, keep)
        try:
            for start, stop in units:
                try:
                    waiting.append(stream.score(start, stop, units, tick))
                except MaxsimEvalError:  # the units before it are whole
                    while waiting:
                        yield waiting.popleft().result()
                    raise
                while waiting and (waiting[0].arrived() or len(waiting) > _IN_FLIGHT):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except MaxsimEvalError:  # if damaged values led to it, `prove` raises that instead
            for unit in waiting:
                unit.prove()
            stream.prove()
            raise
        finally:
            stream.close()


class _Stream:
    """The blocks of all units, one after the other, and what is done with each."""

    def __init__(self, name: str, queries: Packed, corpus: Corpus, asked: Asked, keep: bool) -> None:
        self.name, self.path, self.stored, self.corpus, self.asked = name, asked.paths[name], queries, corpus, asked
        self.device = torch.device(corpus.device)
        self.queries = self.path.queries(queries).to(corpus.device)
        self.rows: Tensor | None = None
        if keep:
            self.rows = torch.from_numpy(asked.kept_rows.astype(np.int64)).to(self.device)
            self.all_rows = len(asked.kept_rows) == len(asked.query_ids)
        self.excluded = torch.from_numpy(asked.excluded).to(self.device)
        self.clock: _Clock = _DeviceClock(self.device) if self.device.type == "cuda" else _Clock()
        self.aside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.blocks: Iterator[Any] | None = None
        self.source = source_of(name, self.path, corpus)
        self.proofs = Proofs(self.device) if corpus.entry.checked and can_prove(self.device) else None

    def score(self, start: int, stop: int, units: Sequence[tuple[int, int]], tick: Callable[[int, int], None]) -> _Unit:
        """Queue the next unit's work."""
        if self.blocks is None:
            self.blocks = self._begin(units)
        unit = _Unit(self, start, stop)
        while (first := start + unit.best.seen) < stop:
            block = next(self.blocks)
            if self.proofs is not None:
                self.proofs.launch(block)
            self.clock.lap("read")
            unit.note_range(block)
            documents = self.source.prepare(block, first)
            self.clock.lap("prepare")
            scores = self._scores(documents, first)
            assert isinstance(scores, Tensor)
            if not self.path.own:
                unit.note_lost(block, scores, first)
            self.clock.lap("score")
            self._exclude(scores, first)
            unit.add(scores, first)
            self.clock.lap("topk")
            tick(len(block), self.source.size(block))
            del block, documents, scores  # freed before the next piece comes
        unit.leave()
        return unit

    def _begin(self, units: Sequence[tuple[int, int]]) -> Iterator[Any]:
        claims = None if self.proofs is None else self.proofs.claims
        stored, budget = self.source.blocks(units, claims), self.corpus.memory_budget
        if budget is not None:  # what kept rows and preparing leave of it for pieces
            rows = 0 if self.rows is None else len(self.asked.kept_rows)
            kept = max(((stop - start) * rows * 4 for start, stop in units), default=0) * (_IN_FLIGHT + 1)
            copies = self.source.copies
            least = least_budget(self.device, len(self.queries))
            need = kept + math.ceil(least * (_BUFFERS + copies) / _BUFFERS)
            if budget < need:
                raise UsageError(
                    f"memory budget: got {budget} bytes, need at least {need} for path {self.name} and {len(self.queries)} queries"
                )
            budget = max(least, int((budget - kept) * _BUFFERS / (_BUFFERS + copies)))
        return device_blocks(stored, self.device, queries=len(self.queries), memory_budget=budget, readers=self.corpus.readers)

    def _scores(self, documents: Any, first: int) -> object:
        if self.asked.candidates is None:
            return self.path.score(self.queries, documents)
        return pair_scores(self.path.score, self.queries, documents, self.asked.candidates, first)

    def _exclude(self, scores: Tensor, first: int) -> None:
        """-inf for documents that their query must not retrieve; found by index on the device, nothing waits."""
        count = scores.shape[1]
        if not ((self.asked.excluded >= first) & (self.asked.excluded < first + count)).any():
            return
        columns = self.excluded - first
        inside = (columns >= 0) & (columns < count)
        columns = columns.clamp(0, count - 1)[:, None]
        scores.scatter_(1, columns, torch.where(inside[:, None], -torch.inf, scores.gather(1, columns)))

    def prove(self) -> None:
        """Compare the CRCs of the unit that is being scored, so far; waits for them."""
        settle(() if self.proofs is None else self.proofs.pending())

    def close(self) -> None:
        """End the threads that read ahead."""
        close = getattr(self.blocks, "close", None)
        if close is not None:
            close()


class _Unit:
    """A unit while it is scored, and its results on their way to the host."""

    def __init__(self, stream: _Stream, start: int, stop: int) -> None:
        self.stream, self.start, self.stop = stream, start, stop
        asked, device = stream.asked, stream.device
        self.best = TopK(len(asked.query_ids), asked.k, device, first=start)
        self.kept = None if stream.rows is None else torch.empty(len(asked.kept_rows), stop - start, device=device)
        self.largest: Tensor | None = None
        self.lost: Tensor | None = None
        self.launches: list[Launch] = []
        self.event: Any = None
        self.time: Callable[[], dict[str, float]] = dict

    def note_range(self, block: Packed) -> None:
        """Remember the largest magnitude where the path's format may not hold it; a CPU refuses it at once."""
        if not self.stream.source.may_exceed(block):
            return
        here = largest_of(block.values)
        self.largest = here if self.largest is None else torch.maximum(self.largest, here)
        if self.stream.device.type == "cpu":
            check_range(float(self.largest))

    def note_lost(self, block: Any, scores: Tensor, first: int) -> None:
        """Remember a pair whose score is -inf though its document has tokens."""
        tokens, candidates = block if isinstance(block, Packed) else block.codes, self.stream.asked.candidates
        pairs = None if candidates is None else candidates.block_on(first, first + scores.shape[1], scores.device)
        here = finite.first_lost(scores, tokens.lengths, pairs, first)
        self.lost = here if self.lost is None else torch.where(self.lost >= 0, self.lost, here)

    def add(self, scores: Tensor, first: int) -> None:
        """Take in the scores of the documents from `first` on."""
        if self.kept is not None:
            assert self.stream.rows is not None
            chosen = scores if self.stream.all_rows else scores.index_select(0, self.stream.rows)
            self.kept[:, first - self.start : first - self.start + scores.shape[1]] = chosen
        try:
            self.best.add(scores)
        except ValueError:
            self._refuse(self.best.pending)  # names the pair by its ids
            raise

    def leave(self) -> None:
        """Begin to copy the results to the host, beside the work that follows."""
        self.time = self.stream.clock.take()
        self.keys = self.best.pending
        self.launches = [] if self.stream.proofs is None else self.stream.proofs.take()
        aside = self.stream.aside
        if aside is None:
            return
        aside.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(aside):
            self.keys, self.kept = _to_host(self.keys, aside), _to_host(self.kept, aside)
            self.largest, self.lost = _to_host(self.largest, aside), _to_host(self.lost, aside)
            for launch in self.launches:
                launch.words = _to_host(launch.words, aside)
            self.event = torch.cuda.Event()
            self.event.record(aside)

    def arrived(self) -> bool:
        """Whether the results are on the host."""
        return self.event is None or self.event.query()

    def result(self) -> UnitScores:
        """The results, checked; waits until they are there."""
        self.prove()
        if self.largest is not None:
            check_range(float(self.largest))
        self._refuse(self.keys)
        scores = None if self.kept is None else self.kept.numpy()
        return UnitScores(self.start, self.stop, self.keys.numpy(), scores, self.time())

    def prove(self) -> None:
        """Wait for the results, and refuse those of stored values that were damaged (CRC-32)."""
        if self.event is not None:
            self.event.synchronize()
        settle(self.launches)

    def _refuse(self, keys: Tensor) -> None:
        """Refuse scores that are no finite numbers."""
        stream = self.stream
        finite.refuse(stream.name, keys, self.lost, stream.stored, stream.corpus, stream.asked)


def _to_host(tensor: Tensor | None, aside: Any) -> Any:
    if tensor is None:
        return None
    tensor.record_stream(aside)  # made on the stream that scores: its memory is not to be reused before the copy is done
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class _Clock:
    """Where a unit's time goes: each lap adds the time since the one before to a phase."""

    def __init__(self) -> None:
        self.last: Any = self._now()
        self.laps: list[tuple[str, Any, Any]] = []

    def lap(self, phase: str) -> None:
        """End a phase: the time since the last lap is its."""
        now = self._now()
        self.laps.append((phase, self.last, now))
        self.last = now

    def take(self) -> Callable[[], dict[str, float]]:
        """The laps since the last call: a function that gives seconds by phase and in `total`, to be called when they are over."""
        laps, self.laps = self.laps, []

        def seconds() -> dict[str, float]:
            found = dict.fromkeys(PHASES, 0.0)
            for phase, begin, end in laps:
                found[phase] += self._between(begin, end)
            return {**found, "total": sum(found.values())}

        return seconds

    def _now(self) -> Any:
        return time.perf_counter()

    @staticmethod
    def _between(begin: Any, end: Any) -> float:
        return float(end - begin)


class _DeviceClock(_Clock):
    """The same on the GPU's own time line: `read` is what the scoring stream waits for the next block."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        super().__init__()

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @staticmethod
    def _between(begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3
