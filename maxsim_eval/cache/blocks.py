"""Documents of a cache as blocks that are read when their turn comes: how a corpus larger than memory is scored.

A block is made of runs: tokens that follow each other in one shard. Blocks are cut by bytes alone, across shards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.cache.shards import DTYPES, Shard
from maxsim_eval.cache.stripes import Claims, Note
from maxsim_eval.errors import UsageError
from maxsim_kernels import LazyBlock, Packed


@dataclass(frozen=True)
class Span:
    """Documents of one shard, in order: document n is the shard's tokens `starts[n]` to `stops[n]` (`[m]` int64 each)."""

    shard: Shard
    starts: np.ndarray
    stops: np.ndarray

    def __getitem__(self, documents: slice) -> Span:
        return Span(self.shard, self.starts[documents], self.stops[documents])

    @property
    def lengths(self) -> np.ndarray:
        """`[m]` int64: tokens of every document."""
        return self.stops - self.starts


@dataclass(frozen=True)
class _Runs:
    """Runs of a shard's tokens in a block: run r is the block's tokens `places[r]` to `places[r + 1]`, the shard's from `firsts[r]`."""

    shard: Shard
    places: np.ndarray  # [R + 1] int64
    firsts: np.ndarray  # [R] int64

    @classmethod
    def of(cls, span: Span, place: int) -> _Runs:
        """The runs of a span that begins at token `place` of its block."""
        filled = span.stops > span.starts
        starts, stops = span.starts[filled], span.stops[filled]
        begins = np.flatnonzero(np.concatenate([np.ones(min(len(starts), 1), bool), starts[1:] != stops[:-1]]))
        counts = np.add.reduceat(stops - starts, begins) if len(begins) else np.zeros(0, np.int64)
        return cls(span.shard, np.concatenate([[place], place + np.cumsum(counts)]).astype(np.int64), starts[begins])

    def read(self, first: int, stop: int, out: Tensor, note: Note | None) -> None:
        """Fill `out` with tokens `first` to `stop` of the block, which must lie within these runs."""
        one = int(self.places.searchsorted(first, side="right")) - 1
        other = int(self.places.searchsorted(stop, side="left"))
        places, firsts = self.places[one : other + 1].tolist(), self.firsts[one:other].tolist()
        firsts[0] += first - places[0]  # the first and the last run may be read in part
        places[0], places[-1] = first, stop
        self.shard.read_runs(firsts, [after - before for before, after in pairwise(places)], out, note)


def lazy_blocks(
    spans: Callable[[int, int], Iterable[Span]],
    max_bytes: int,
    start: int,
    stop: int | None,
    documents: int,
    claims: Claims | None = None,
) -> Iterator[LazyBlock]:
    """Blocks of whole documents `start` to `stop` with at most `max_bytes` of values each, but of at least one document.

    `spans(start, stop)` gives these documents, in order. Long runs of tokens are left to whoever takes `claims`, as column "values".

    Raises:
        UsageError: `max_bytes` below 1, or a range that does not lie within `documents`; at once.
    """
    stop = documents if stop is None else stop
    if max_bytes < 1:
        raise UsageError(f"max_bytes: got {max_bytes}, need at least 1")
    if not 0 <= start <= stop <= documents:
        raise UsageError(f"documents: got {start} to {stop}, need a range within 0 to {documents}")
    return _cut(spans(start, stop), max_bytes, claims)


def loaded(blocks: Iterable[LazyBlock]) -> Iterator[Packed]:
    """Blocks read one by one, each into memory of its own."""
    for block in blocks:
        values = torch.empty(int(block.offsets[-1]), block.dim, dtype=block.dtype)
        block.read(0, values)
        yield Packed(values, block.offsets)


def _cut(spans: Iterable[Span], max_bytes: int, claims: Claims | None) -> Iterator[LazyBlock]:
    held: list[Span] = []
    room = 0
    for span in spans:
        most = max_bytes // span.shard.spec.row_bytes
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(span.lengths)])
        begin, documents = 0, len(span.lengths)
        while begin < documents:
            room = room if held else most
            end = int(np.searchsorted(offsets, offsets[begin] + room, side="right")) - 1
            end = max(end, begin if held else begin + 1)  # a document larger than a block leaves less than no room
            if begin < end:
                held.append(span[begin:end])
                room -= int(offsets[end] - offsets[begin])
            if end < documents:  # the next one does not fit
                yield _block(held, claims)
                held = []
            begin = end
    if held:
        yield _block(held, claims)


def _block(spans: Sequence[Span], claims: Claims | None) -> LazyBlock:
    lengths = np.concatenate([span.lengths for span in spans])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    runs, place = [], 0
    for span in spans:
        runs.append(_Runs.of(span, place))
        place = int(runs[-1].places[-1])
    spec, ends = spans[0].shard.spec, [int(part.places[-1]) for part in runs]
    base = 0 if claims is None else claims.room(place)

    def read(first: int, out: Tensor) -> None:
        """Fill `out` `[m, d]` (contiguous, CPU) with tokens `first` to `first + m` of the block; safe in several threads at once."""
        stop = first + out.shape[0]
        if not 0 <= first <= stop <= place:
            raise ValueError(f"tokens: got {first} to {stop}, need some of the block's 0 to {place}")
        begin = first
        for number in range(bisect_right(ends, first), len(runs)):
            if begin == stop:
                return
            end = min(stop, ends[number])
            if begin < end:
                note = None if claims is None else claims.note("values", base + begin)
                runs[number].read(begin, end, out[begin - first : end - first], note)
                begin = end

    return LazyBlock(torch.from_numpy(offsets), spec.dim, DTYPES[spec.dtype], read)
