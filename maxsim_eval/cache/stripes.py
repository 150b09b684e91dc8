"""Stored rows proven while they are read: files hold the running CRC-32 of their rows at the end of every stripe of so many.

What is read is widened to whole stripes, and checked as soon as it is there: no value that changed on its disk is handed out. The CRC
of any run of stripes follows from the running ones at its ends, by arithmetic alone. Calls are few and long: they go on beside Python,
but each of them waits for its turn when it ends, which costs a stream more than what the processor's cache would save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from zlib_ng import zlib_ng

from maxsim_eval.cache.hdf5 import damaged

BYTES = (
    16 << 10
)  # of a stripe, at least: what a single document makes the disk read beside it; with 4 bytes for each, 0.02% of a file
_ROWS = 128  # of a stripe, at least: each is a call, and a thread waits 0.1 ms for its next one while another runs a model
_SMALL_BYTES = 2 << 20  # are read with what lies around them by one call, then copied
_VERIFY_BYTES = 16 << 20
Fetch = Callable[[Iterable[tuple[int, memoryview]]], None]  # fills every buffer from its row on, in order, one after the other
_Runs = list[tuple[int, memoryview]]  # first row of each, and its buffer


def stripe_rows(row_bytes: int) -> int:
    """Rows of a stripe."""
    return max(_ROWS, BYTES // row_bytes)


def add_crcs(crcs: np.ndarray, rows: np.ndarray, first: int, stripe: int) -> None:
    """Enter the running CRCs `[S]` at rows `[n, row bytes]` (uint8, contiguous), which lie from row `first` on, the next to come."""
    done = 0
    while done < len(rows):
        number, within = divmod(first + done, stripe)
        count = min(len(rows) - done, stripe - within)
        before = int(crcs[number - (within == 0)]) if first + done else 0
        crcs[number] = zlib_ng.crc32(rows[done : done + count].data, before)
        done += count


def running(crcs: np.ndarray, stripe_bytes: int, last_bytes: int) -> np.ndarray:
    """Running CRCs `[S]` of those of single stripes, as files of before have them; the last one has `last_bytes`."""
    found, crc = np.zeros_like(crcs), 0
    for number, one in enumerate(crcs.tolist()):
        crc = zlib_ng.crc32_combine(crc, one, stripe_bytes if number + 1 < len(crcs) else last_bytes)
        found[number] = crc
    return found


@dataclass(frozen=True)
class Stripes:
    """A column of a file: a row of `row_bytes` bytes for each of `rows` tokens, and their running CRC-32 every `stripe` rows."""

    path: Path
    rows: int
    row_bytes: int
    stripe: int
    crcs: np.ndarray = field(repr=False)  # [S] uint32, running
    fetch: Fetch = field(repr=False)
    advice: str = field(repr=False)

    def read(self, firsts: Sequence[int], counts: Sequence[int], out: memoryview, *, checked: bool = True) -> None:
        """Fill `out` (bytes) with runs of rows, one behind the other: `counts[r]` rows from `firsts[r]` on.

        Raises:
            CacheError: rows that do not have their CRC-32, by the first stripe of them; what `fetch` raises.
        """
        bad: list[tuple[int, int]] = []
        self.fetch(self._parts(firsts, counts, out, checked, bad))
        for begin, end in bad:
            self._blame(begin, end)

    def verify(self) -> Iterator[int]:
        """Read and check everything: yields the rows of each part that is right, else raises `CacheError`."""
        step = max(1, _VERIFY_BYTES // self.row_bytes // self.stripe) * self.stripe
        buffer = memoryview(bytearray(min(step, self.rows) * self.row_bytes))
        for first in range(0, self.rows, step):
            count = min(step, self.rows - first)
            self.read([first], [count], buffer[: count * self.row_bytes])
            yield count

    def _parts(
        self, firsts: Sequence[int], counts: Sequence[int], out: memoryview, checked: bool, bad: list[tuple[int, int]]
    ) -> Iterator[tuple[int, memoryview]]:
        """What to read, in order; a generator that goes on knows that what it gave last is filled."""
        if not checked:
            yield from self._cut(firsts, counts, out)
            return
        scratch = memoryview(b"")
        for begin, end, runs in self._groups(firsts, counts, out):
            size, crc = self._bytes(begin, end), 0
            if size <= _SMALL_BYTES and size > sum(len(target) for _, target in runs):  # small: read at once, then copied
                if len(scratch) < size:
                    scratch = memoryview(bytearray(size))
                yield begin * self.stripe, scratch[:size]
                crc = zlib_ng.crc32(scratch[:size])
                for first, target in runs:
                    place = (first - begin * self.stripe) * self.row_bytes
                    target[:] = scratch[place : place + len(target)]
            else:
                held = self._whole(begin, end, runs)
                yield from held
                for _, part in held:
                    crc = zlib_ng.crc32(part, crc)
            if crc != self._crc_of(begin, end):
                bad.append((begin, end))

    def _cut(self, firsts: Sequence[int], counts: Sequence[int], out: memoryview) -> Iterator[tuple[int, memoryview]]:
        for first, count in zip(firsts, counts, strict=True):
            yield first, out[: count * self.row_bytes]
            out = out[count * self.row_bytes :]

    def _groups(self, firsts: Sequence[int], counts: Sequence[int], out: memoryview) -> Iterator[tuple[int, int, _Runs]]:
        """Runs that share stripes, and the stripes `begin` to `end` that these are."""
        begin = end = here = 0
        runs: _Runs = []
        for first, target in self._cut(firsts, counts, out):
            if not target:
                continue
            if runs and (first < here or first // self.stripe >= end):
                yield begin, end, runs
                runs = []
            if not runs:
                begin = first // self.stripe
            runs.append((first, target))
            here = first + len(target) // self.row_bytes
            end = -(-here // self.stripe)
        if runs:
            yield begin, end, runs

    def _whole(self, begin: int, end: int, runs: _Runs) -> _Runs:
        """Stripes `begin` to `end`: the runs, and the gaps before, between and behind them."""
        held: _Runs = []
        here = begin * self.stripe
        for first, target in [*runs, (min(end * self.stripe, self.rows), memoryview(b""))]:
            if here < first:
                held.append((here, memoryview(bytearray((first - here) * self.row_bytes))))
            if target:
                held.append((first, target))
            here = first + len(target) // self.row_bytes
        return held

    def _crc_of(self, begin: int, end: int) -> int:
        """CRC-32 of stripes `begin` to `end` as they were written."""
        before = int(self.crcs[begin - 1]) if begin else 0
        return zlib_ng.crc32_combine(before, int(self.crcs[end - 1]), self._bytes(begin, end))

    def _bytes(self, begin: int, end: int) -> int:
        return (min(end * self.stripe, self.rows) - begin * self.stripe) * self.row_bytes

    def _blame(self, begin: int, end: int) -> None:
        """Name the first damaged stripe of some that are damaged."""
        buffer = memoryview(bytearray(self.stripe * self.row_bytes))
        for number in range(begin, end):
            first, size = number * self.stripe, self._bytes(number, number + 1)
            self.fetch([(first, buffer[:size])])
            if zlib_ng.crc32(buffer[:size]) != self._crc_of(number, number + 1):
                last = first + size // self.row_bytes - 1
                reason = f"tokens {first} to {last} do not have the CRC-32 they were written with"
                raise damaged(self.path, reason, self.advice)
        first, last = begin * self.stripe, min(end * self.stripe, self.rows) - 1
        raise damaged(
            self.path,
            f"tokens {first} to {last} had another CRC-32 than they were written with when they were read first, and the right "
            "one when they were read again: the disk, its cable or the memory is at fault",
            "Check the machine.",
        )
