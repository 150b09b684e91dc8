"""Documents of a cache as blocks that are read when their turn comes: how a corpus larger than memory is scored.

A block is made of runs: tokens that follow each other in one shard. Blocks are cut by bytes alone, across shards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.cache.shards import DTYPES, Shard
from maxsim_eval.cache.stripes import Claim, Claims
from maxsim_eval.errors import UsageError
from maxsim_kernels import LazyBlock, Packed

Made = TypeVar("Made")


@dataclass(frozen=True)
class Span:
    """Documents of one shard, in order: its documents `rows`, whose tokens are `starts[n]` to `stops[n]` (`[m]` int64 each)."""

    shard: Shard
    rows: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    @classmethod
    def of(cls, shard: Shard, rows: np.ndarray) -> Span:
        """Documents of a shard by their numbers in it, ascending."""
        return cls(shard, rows, shard.offsets[rows], shard.offsets[rows + 1])

    def __getitem__(self, documents: slice) -> Span:
        return Span(self.shard, self.rows[documents], self.starts[documents], self.stops[documents])

    @property
    def lengths(self) -> np.ndarray:
        """`[m]` int64: tokens of every document."""
        return self.stops - self.starts


class Stored(Protocol):
    """What is read by runs of tokens: a shard's values, or a column of its copy."""

    def read_runs(self, firsts: Sequence[int], counts: Sequence[int], out: Tensor, *, proven: bool = False) -> None:
        """Fill `out` with `counts[r]` rows from `firsts[r]` on, one run behind the other; `proven`: without a check."""

    @property
    def least_claimed(self) -> int:
        """Rows of the shortest run that is claimed."""

    def claim(self, column: str, place: int, first: int, count: int) -> Claim:
        """The claim on `count` rows from `first` on, at a place of a stream."""


@dataclass(frozen=True)
class Runs:
    """Runs of a shard's tokens in a block: run r is the block's tokens `places[r]` to `places[r + 1]`, the shard's from `firsts[r]`."""

    shard: Stored
    places: np.ndarray  # [R + 1] int64
    firsts: np.ndarray  # [R] int64
    claimed: np.ndarray | None = None  # [R] bool: whether somebody else proves them; None: nobody

    @classmethod
    def of(cls, span: Span, place: int) -> Runs:
        """The runs of a span that begins at token `place` of its block."""
        filled = span.stops > span.starts
        starts, stops = span.starts[filled], span.stops[filled]
        begins = np.flatnonzero(np.concatenate([np.ones(min(len(starts), 1), bool), starts[1:] != stops[:-1]]))
        counts = np.add.reduceat(stops - starts, begins) if len(begins) else np.zeros(0, np.int64)
        return cls(span.shard, np.concatenate([[place], place + np.cumsum(counts)]).astype(np.int64), starts[begins])

    def left_to(self, claims: Claims | None, column: str, base: int) -> Runs:
        """These runs, the long ones added to `claims` (None: none is); their block begins at place `base` of the stream."""
        if claims is None:
            return self
        counts = np.diff(self.places)
        claimed = counts >= self.shard.least_claimed
        for run in np.flatnonzero(claimed).tolist():
            place = base + int(self.places[run])
            claims.add(self.shard.claim(column, place, int(self.firsts[run]), int(counts[run])))
        return replace(self, claimed=claimed)

    def read(self, first: int, stop: int, out: Tensor) -> None:
        """Fill `out` with tokens `first` to `stop` of the block, which must lie within these runs."""
        one = int(self.places.searchsorted(first, side="right")) - 1
        other = int(self.places.searchsorted(stop, side="left"))
        places, firsts = self.places[one : other + 1].tolist(), self.firsts[one:other].tolist()
        firsts[0] += first - places[0]  # the first and the last run may be read in part
        places[0], places[-1] = first, stop
        claimed = [False] if self.claimed is None else self.claimed[one:other].tolist()
        if not any(claimed):
            self.shard.read_runs(firsts, [after - before for before, after in pairwise(places)], out)
            return
        number = 0
        for proven, some in groupby(claimed):
            end = number + sum(1 for _ in some)
            counts = [after - before for before, after in pairwise(places[number : end + 1])]
            here = out[places[number] - first : places[end] - first]
            self.shard.read_runs(firsts[number:end], counts, here, proven=proven)
            number = end


def lazy_blocks(
    spans: Callable[[int, int], Iterable[Span]],
    max_bytes: int,
    start: int,
    stop: int | None,
    documents: int,
    claims: Claims | None = None,
) -> Iterator[LazyBlock]:
    """Blocks of whole documents `start` to `stop` with at most `max_bytes` of values each, but of at least one document.

    `spans(start, stop)` gives these documents, in order. With `claims`, long runs of tokens are read unchecked, and claimed as
    column "values".

    Raises:
        UsageError: `max_bytes` below 1, or a range that does not lie within `documents`; at once.
    """
    stop = documents if stop is None else stop
    if max_bytes < 1:
        raise UsageError(f"max_bytes: got {max_bytes}, need at least 1")
    if not 0 <= start <= stop <= documents:
        raise UsageError(f"documents: got {start} to {stop}, need a range within 0 to {documents}")
    return cut(spans(start, stop), lambda shard: max_bytes // shard.spec.row_bytes, partial(_block, claims=claims))


def loaded(blocks: Iterable[LazyBlock]) -> Iterator[Packed]:
    """Blocks read one by one, each into memory of its own."""
    return (block.load() for block in blocks)


def cut(spans: Iterable[Span], most: Callable[[Shard], int], make: Callable[[Sequence[Span]], Made]) -> Iterator[Made]:
    """What `make` makes of each block: whole documents of at most `most(shard)` tokens, but at least one document."""
    held: list[Span] = []
    room = 0
    for span in spans:
        offsets = ends_of(span.lengths)
        begin, documents = 0, len(span.lengths)
        while begin < documents:
            room = room if held else most(span.shard)
            end = int(np.searchsorted(offsets, offsets[begin] + room, side="right")) - 1
            end = max(end, begin if held else begin + 1)  # a document larger than a block leaves a negative room
            if begin < end:
                held.append(span[begin:end])
                room -= int(offsets[end] - offsets[begin])
            if end < documents:  # the next one does not fit
                yield make(held)
                held = []
            begin = end
    if held:
        yield make(held)


def ends_of(lengths: np.ndarray) -> np.ndarray:
    """Offsets of documents of these lengths that lie end to end, the end of the last one included: `[n + 1]` int64."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def runs_of(spans: Sequence[Span]) -> list[Runs]:
    """The runs of a block that is made of these documents."""
    found, place = list[Runs](), 0
    for span in spans:
        found.append(Runs.of(span, place))
        place = int(found[-1].places[-1])
    return found


def reader(runs: Sequence[Runs]) -> Callable[[int, Tensor], None]:
    """`read(first, out)`: fills `out` `[m, ...]` (contiguous, CPU) with rows `first` to `first + m` of a block, in any thread."""
    ends = [int(part.places[-1]) for part in runs]

    def read(first: int, out: Tensor) -> None:
        stop = first + out.shape[0]
        if not 0 <= first <= stop <= ends[-1]:
            raise ValueError(f"tokens: got {first} to {stop}, need some of the block's 0 to {ends[-1]}")
        begin = first
        for number in range(bisect_right(ends, first), len(runs)):
            if begin == stop:
                return
            end = min(stop, ends[number])
            if begin < end:
                runs[number].read(begin, end, out[begin - first : end - first])
                begin = end

    return read


def _block(spans: Sequence[Span], claims: Claims | None) -> LazyBlock:
    offsets, runs, spec = ends_of(np.concatenate([span.lengths for span in spans])), runs_of(spans), spans[0].shard.spec
    base = 0 if claims is None else claims.room(int(offsets[-1]))
    read = reader([part.left_to(claims, "values", base) for part in runs])
    return LazyBlock(torch.from_numpy(offsets), spec.dim, DTYPES[spec.dtype], read)
