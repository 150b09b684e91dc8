"""Stored rows proven while they are read: a file holds the running CRC-32 of its rows at the end of every stripe of rows.

Reads are widened to whole stripes and checked as soon as they are done: no value that changed on its disk is handed out. The CRC
of any run of stripes follows from the running ones at its ends, by arithmetic alone. Calls of zlib are few and long: they run
without Python's lock, and each waits to get it back, which costs a stream more than short calls would save, whose data stays in
the processor's cache.

Long runs of a stream to a GPU are proven there, from the bytes that are scored: `claim` says which CRC-32 they must have
(`Claims`), however many reads they take, and the reads themselves check nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from zlib_ng import zlib_ng

from maxsim_eval.cache.hdf5 import damaged
from maxsim_eval.crc.remainders import moved, without_tail

# Bytes of a stripe, at least: about as much is read beside a single document. 4 bytes of CRC for each are 0.02% of a file.
BYTES = 16 << 10
_ROWS = 128  # of a stripe, at least: each stripe is a call, and calls of a thread are 0.1 ms apart while another runs a model
_SMALL_BYTES = 2 << 20  # stripes up to this size are read whole by one call, and the rows asked for copied out of them
_VERIFY_BYTES = 16 << 20
# Up to `_HELD_BYTES` go through zlib in slices so short that it keeps Python's lock: to get it back takes 0.1 ms.
_HELD_BYTES, _SLICE_BYTES = 64 << 10, 4 << 10
# For each (first row, buffers): reads rows from that one on into the buffers, one behind the other.
Fetch = Callable[[Iterable[tuple[int, Sequence[memoryview]]]], None]
_Runs = list[tuple[int, memoryview]]  # first row of each, and its buffer


def stripe_rows(row_bytes: int) -> int:
    """Rows of a stripe, for rows of `row_bytes`."""
    return max(_ROWS, BYTES // row_bytes)


def add_crcs(crcs: np.ndarray, rows: np.ndarray, first: int, stripe: int) -> None:
    """Enter in `crcs` `[S]` the running CRCs of the next rows, `[n, row bytes]` (uint8, contiguous), from row `first` on."""
    done = 0
    while done < len(rows):
        number, within = divmod(first + done, stripe)
        count = min(len(rows) - done, stripe - within)
        before = int(crcs[number - (within == 0)]) if first + done else 0
        crcs[number] = zlib_ng.crc32(rows[done : done + count].data, before)
        done += count


def _crc32(data: memoryview, crc: int = 0) -> int:
    """zlib's CRC-32, for few bytes without letting go of Python's lock: a stream's threads would wait to get it back."""
    if len(data) > _HELD_BYTES:
        return zlib_ng.crc32(data, crc)
    for first in range(0, len(data), _SLICE_BYTES):
        crc = zlib_ng.crc32(data[first : first + _SLICE_BYTES], crc)
    return crc


def running(crcs: np.ndarray, stripe_bytes: int, last_bytes: int) -> np.ndarray:
    """Running CRCs `[S]` from those of single stripes, which earlier files hold; the last stripe has `last_bytes`."""
    found, crc = np.zeros_like(crcs), 0
    for number, one in enumerate(crcs.tolist()):
        crc = zlib_ng.crc32_combine(crc, one, stripe_bytes if number + 1 < len(crcs) else last_bytes)
        found[number] = crc
    return found


@dataclass(frozen=True)
class Claim:
    """The CRC-32 that rows `first` to `stop` of a stream must have, for whoever gets them to prove; `blame` names the damage."""

    column: str
    first: int
    stop: int
    crc: int
    blame: Callable[[], None]


class Claims:
    """Claims on the rows that a stream hands out unproven, by their place among all rows of the stream; for one thread."""

    def __init__(self) -> None:
        self._held, self._rows = list[Claim](), 0

    def room(self, rows: int) -> int:
        """The place of the next `rows` rows of the stream; called in their order."""
        self._rows += rows
        return self._rows - rows

    def add(self, claim: Claim) -> None:
        """Add a claim on rows that are read unproven; call it before they go by."""
        self._held.append(claim)

    def take(self, stop: int) -> list[Claim]:
        """The claims that begin before place `stop` and were not taken yet, sorted by column and place."""
        taken = [claim for claim in self._held if claim.first < stop]
        if taken:
            self._held = [claim for claim in self._held if claim.first >= stop]
        return sorted(taken, key=lambda claim: (claim.column, claim.first))


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
            CacheError: rows that do not have their CRC-32 (names those of the first such stripe); what `fetch` raises.
        """
        if not checked:
            self.fetch((first, [target]) for first, target in self._cut(firsts, counts, out))
            return
        bad: list[tuple[int, int]] = []
        self.fetch(self._parts(firsts, counts, out, bad))
        for begin, end in bad:
            self._blame(begin, end)

    @property
    def least_claimed(self) -> int:
        """Rows of the shortest run that is worth a claim: shorter ones are proven when they are read."""
        return _SMALL_BYTES // self.row_bytes + 1

    def claim(self, column: str, place: int, first: int, count: int) -> Claim:
        """The claim on rows `first` to `first + count`, at a place of a stream; the rest of their outer stripes is read here."""
        begin, end, stop = first // self.stripe, -(-(first + count) // self.stripe), first + count
        before, behind = ((begin * self.stripe, first), (stop, min(end * self.stripe, self.rows)))
        gaps = [(row, memoryview(bytearray((last - row) * self.row_bytes))) for row, last in (before, behind)]
        self.fetch((row, [part]) for row, part in gaps if part)
        head, tail = (part for _, part in gaps)
        crc = self._crc_of(begin, end) ^ moved(_crc32(head), count * self.row_bytes + len(tail)) ^ _crc32(tail)
        return Claim(column, place, place + count, without_tail(crc, len(tail)), partial(self._blame, begin, end))

    def verify(self) -> Iterator[int]:
        """Read and check everything: yields how many rows each part had that is right, else raises `CacheError`."""
        step = max(1, _VERIFY_BYTES // self.row_bytes // self.stripe) * self.stripe
        buffer = memoryview(bytearray(min(step, self.rows) * self.row_bytes))
        for first in range(0, self.rows, step):
            count = min(step, self.rows - first)
            self.read([first], [count], buffer[: count * self.row_bytes])
            yield count

    def _parts(
        self, firsts: Sequence[int], counts: Sequence[int], out: memoryview, bad: list[tuple[int, int]]
    ) -> Iterator[tuple[int, Sequence[memoryview]]]:
        """What to read, in order. When the generator goes on, its last buffers are full, and checked; damage goes to `bad`."""
        scratch = memoryview(b"")
        for begin, end, runs in self._groups(firsts, counts, out):
            size, wanted, crc = self._bytes(begin, end), sum(len(target) for _, target in runs), 0
            if size <= _SMALL_BYTES and size > wanted:  # small: read at once, then copied
                if len(scratch) < size:
                    scratch = memoryview(bytearray(size))
                yield begin * self.stripe, [scratch[:size]]
                crc = _crc32(scratch[:size])
                for first, target in runs:
                    start = (first - begin * self.stripe) * self.row_bytes
                    target[:] = scratch[start : start + len(target)]
            else:
                held = self._whole(begin, end, runs)
                yield begin * self.stripe, held
                for part in held:
                    crc = _crc32(part, crc)
            if crc != self._crc_of(begin, end):
                bad.append((begin, end))

    def _cut(self, firsts: Sequence[int], counts: Sequence[int], out: memoryview) -> Iterator[tuple[int, memoryview]]:
        for first, count in zip(firsts, counts, strict=True):
            yield first, out[: count * self.row_bytes]
            out = out[count * self.row_bytes :]

    def _groups(self, firsts: Sequence[int], counts: Sequence[int], out: memoryview) -> Iterator[tuple[int, int, _Runs]]:
        """Groups of runs that share stripes, each with its stripes `begin` to `end`."""
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

    def _whole(self, begin: int, end: int, runs: _Runs) -> list[memoryview]:
        """Buffers of all of stripes `begin` to `end`: those of the runs, and new ones for the gaps before, between and behind."""
        held: list[memoryview] = []
        here = begin * self.stripe
        for first, target in [*runs, (min(end * self.stripe, self.rows), memoryview(b""))]:
            if here < first:
                held.append(memoryview(bytearray((first - here) * self.row_bytes)))
            if target:
                held.append(target)
            here = first + len(target) // self.row_bytes
        return held

    def _crc_of(self, begin: int, end: int) -> int:
        """CRC-32 of stripes `begin` to `end` as they were written."""
        before = int(self.crcs[begin - 1]) if begin else 0
        return zlib_ng.crc32_combine(before, int(self.crcs[end - 1]), self._bytes(begin, end))

    def _bytes(self, begin: int, end: int) -> int:
        return (min(end * self.stripe, self.rows) - begin * self.stripe) * self.row_bytes

    def _blame(self, begin: int, end: int) -> None:
        """Read damaged stripes `begin` to `end` again; raise for the first damaged one or, where none is now, for the machine."""
        buffer = memoryview(bytearray(self.stripe * self.row_bytes))
        for number in range(begin, end):
            first, size = number * self.stripe, self._bytes(number, number + 1)
            self.fetch([(first, [buffer[:size]])])
            if _crc32(buffer[:size]) != self._crc_of(number, number + 1):
                last = first + size // self.row_bytes - 1
                reason = f"tokens {first} to {last} do not have the CRC-32 they were written with"
                raise damaged(self.path, reason, self.advice)
        first, last = begin * self.stripe, min(end * self.stripe, self.rows) - 1
        raise damaged(
            self.path,
            f"tokens {first} to {last} had another CRC-32 than they were written with when they were read first, and the right "
            "one when they were read again: the disk, a cable, the memory or a GPU is at fault",
            "Check the machine.",
        )
