"""A ring of buffers between the host and a device: read ahead, copy on a stream of its own, hand over in order, reuse when done.

A piece (`blocks.py`) goes through three steps, each several pieces ahead of the next:

1. Reader threads fill a host buffer (pinned, where the device is a GPU). Tensors that are pinned already are left where they are; if
   little else is left to fill (offsets), the consuming thread does it: handing it to another thread takes longer than a link of
   55 GB/s leaves for a piece.
2. Copies into a device buffer are queued on the copy stream. On a CPU there is no such step.
3. The documents are built and handed over; the consumer queues work on its current stream.

What orders every reuse: a host buffer is filled again after the event behind its copy, for which the reader thread waits; a device
buffer is copied into again after the events behind what the consumer queued while it had the documents, for which the copy stream
waits; the consumer's stream waits for the event behind the copy. The consuming thread waits only for readers or, where it fills a
buffer itself, for what they would wait for. Readers are at most `Link.hosts` pieces ahead of the copies, so that thread runs ahead of
the GPU by a few pieces, never by a whole corpus.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from maxsim_kernels.checks import Documents
from maxsim_kernels.streaming.blocks import ALIGNMENT, Part, Piece
from maxsim_kernels.streaming.links import Event, Link

_READ_BYTES = (
    32 << 20
)  # the least that is worth a job of its own: it is Python's work too, and other readers have the next pieces
_INLINE_BYTES = 256 << 10  # of a piece that the consuming thread fills itself, at most
_LEAST_HOST = 1 << 20  # the smallest host buffer
Made = TypeVar("Made")


@dataclass
class _Buffer:
    """A host or device buffer, the events behind its last use, and what has to stay alive until those."""

    bytes: Tensor | None = None
    after: Sequence[Event] = ()
    kept: Sequence[Tensor] = ()


@dataclass
class _Flight:
    """A piece on its way, or documents that were there already."""

    documents: Documents | None = None
    piece: Piece | None = None
    reading: Sequence[Future[None]] = ()
    filling: Sequence[Callable[[], object]] = ()  # jobs left to the thread that sends it, which waits for `before`
    before: Sequence[Event] = ()
    host: _Buffer | None = None
    room: _Buffer | None = None
    tensors: Sequence[Tensor] = ()  # of the piece's parts, where they are by now
    kept: Sequence[Tensor] = ()
    copied: Event = None

    def is_read(self, link: Link) -> bool:
        """Whether sending it would wait for nothing; a failure of its readers is raised when its turn comes."""
        read = all(one.done() and one.exception() is None for one in self.reading)
        return read and all(link.passed(event) for event in self.before)


class _Source:
    """The entries in order, pulled ahead; an error of their iterator is kept until what came before it is done."""

    def __init__(self, entries: Iterator[Piece | Documents]) -> None:
        self._entries = entries
        self._over = False
        self._error: Exception | None = None

    def pull(self) -> _Flight | None:
        if self._over:
            return None
        try:
            entry = next(self._entries)
        except StopIteration:
            self._over = True
            return None
        except Exception as error:  # noqa: BLE001 - raised by `end`
            self._over, self._error = True, error
            return None
        return _Flight(piece=entry) if isinstance(entry, Piece) else _Flight(documents=entry)

    def end(self) -> None:
        if self._error is not None:
            raise self._error


class Ring:
    """The buffers of one stream of pieces. `size`: bytes of a buffer; a piece that needs more gets one of its own, for once."""

    def __init__(self, link: Link, size: int, readers: int) -> None:
        self.link, self.size, self.readers = link, size, readers
        self._hosts = [_Buffer() for _ in range(link.hosts)]
        self._free_hosts = deque(self._hosts)
        self._free_rooms = deque(_Buffer() for _ in range(link.rooms))

    def documents(self, entries: Iterator[Piece | Documents]) -> Generator[Documents]:
        """The documents of all entries, in order; each valid until the next is asked for."""
        source = _Source(entries)
        reading: deque[_Flight] = deque()
        ready: deque[_Flight] = deque()
        with ThreadPoolExecutor(self.readers, "maxsim-reader", self.link.enter) as pool:
            try:
                while True:
                    self._advance(source, reading, ready, pool)
                    if not ready:
                        source.end()
                        return
                    flight = ready.popleft()
                    if flight.documents is not None:
                        yield flight.documents
                    else:
                        yield from self._hand_over(flight)
                    del flight  # the documents with it, before the next are made
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # leaving `with` waits for those that run
                # Wait for all copies: from here on, the owner of pinned blocks may change or free them.
                for event in {id(event): event for host in self._hosts for event in host.after}.values():
                    self.link.reuse(torch.empty(0, dtype=torch.uint8, device="cpu"), event)

    def _advance(self, source: _Source, reading: deque[_Flight], ready: deque[_Flight], pool: ThreadPoolExecutor) -> None:
        """Read wherever a host buffer is free, send wherever a device buffer is free; wait for a reader only if nothing is ready."""
        while True:
            # Documents already on the device may be made while `source` is iterated, so they are asked for one at a time.
            while self._free_hosts and not any(flight.documents is not None for flight in (*reading, *ready)):
                flight = source.pull()
                if flight is None:
                    break
                if flight.piece is not None:
                    self._start(flight, flight.piece, pool)
                reading.append(flight)
            if not reading or (ready and not reading[0].is_read(self.link)):
                return
            flight = reading[0]
            if flight.piece is not None:
                if not (self._free_rooms if self.link.rooms else not ready):
                    return
                self._send(flight, flight.piece)
            ready.append(reading.popleft())

    def _start(self, flight: _Flight, piece: Piece, pool: ThreadPoolExecutor) -> None:
        """Have the host side of a piece filled: by reader threads, or where that is little, when it is sent."""
        host = flight.host = self._free_hosts.popleft()
        places, size = _places(piece, lambda part: part.tensor is not None and self.link.direct(part.tensor))
        # Powers of two, which is what torch's pinned memory comes in; a small corpus pins little.
        usual = min(self.size, max(_LEAST_HOST, 1 << max(0, size - 1).bit_length()))
        if self._unfit(host, size):
            host.bytes = _allocate(self.link.host, max(usual, size))
        assert host.bytes is not None
        tensors: list[Tensor] = []
        jobs: list[tuple[Tensor, Callable[[], object]]] = []
        for part, place in zip(piece.parts, places, strict=True):
            if place is None:
                assert part.tensor is not None
                tensors.append(part.tensor)
            else:
                region = _region(host.bytes, place, part)
                tensors.append(region)
                jobs += _fillings(part, region, self.readers)
        # The sources of the copies that this buffer's last piece queued, pinned ones too, stay alive until a reader saw these end.
        flight.kept, host.kept = host.kept, ()
        flight.tensors = tensors
        after, link = tuple(host.after), self.link

        def run(region: Tensor, fill: Callable[[], object]) -> None:
            for event in after:
                link.reuse(region, event)
            if not after:
                link.reuse(region, None)
            fill()

        nothing = (host.bytes[:0], lambda: None)  # a piece that needs no filling waits for those copies all the same
        turns = [partial(run, region, fill) for region, fill in jobs or [nothing]]
        read = any(part.read is not None for part in piece.parts)
        if self.link.rooms and not read and sum(region.nbytes for region, _ in jobs) <= _INLINE_BYTES:
            flight.filling, flight.before = turns, after
        else:
            flight.reading = [pool.submit(turn) for turn in turns]

    def _send(self, flight: _Flight, piece: Piece) -> None:
        """Wait for its readers, raise what they raised, and queue its copies."""
        for one in flight.reading:
            one.result()
        for fill in flight.filling:
            fill()
        flight.reading, flight.filling, flight.before, flight.kept = (), (), (), ()
        if not self.link.rooms:
            return
        host, room = flight.host, self._free_rooms.popleft()
        assert host is not None
        places, size = _places(piece, lambda _: False)
        if self._unfit(room, size):
            room.bytes = None  # before the next is allocated
            room.bytes, room.after = _allocate(self.link.room, max(self.size, size))
        assert room.bytes is not None
        there = [_region(room.bytes, place or 0, part) for part, place in zip(piece.parts, places, strict=True)]
        moves = [(to, source) for to, source in zip(there, flight.tensors, strict=True) if to.numel()]
        flight.copied = self.link.copy(room.bytes, moves, room.after)
        host.after, host.kept = [flight.copied], flight.tensors
        self._free_hosts.append(host)
        flight.host, flight.room, flight.tensors = None, room, there

    def _hand_over(self, flight: _Flight) -> Iterator[Documents]:
        """Yield the documents of a piece, and take its buffer back behind whatever was queued meanwhile."""
        assert flight.piece is not None
        room = flight.room
        if room is None:
            yield flight.piece.build(flight.tensors)
            assert flight.host is not None
            self._free_hosts.append(flight.host)
            return
        assert room.bytes is not None
        self.link.arrive(flight.copied)
        stream = self.link.here()
        try:
            yield flight.piece.build(flight.tensors)
        finally:
            room.after = self.link.leave(room.bytes, [stream])
        self._free_rooms.append(room)

    def _unfit(self, buffer: _Buffer, size: int) -> bool:
        """Whether a buffer is too small, or was made for one large document and is not needed for this one."""
        held = 0 if buffer.bytes is None else buffer.bytes.numel()
        return buffer.bytes is None or held < size or held > self.size >= size


def _allocate(make: Callable[[int], Made], size: int) -> Made:
    """Make a buffer as an ordinary tensor, which reader threads may write, also where the consumer is in inference mode."""
    with torch.inference_mode(False):
        return make(size)


def _places(piece: Piece, skipped: Callable[[Part], bool]) -> tuple[list[int | None], int]:
    """Where each part begins in one buffer (None: not in it), and the bytes of all."""
    begins: list[int | None] = []
    at = 0
    for part in piece.parts:
        begins.append(None if skipped(part) else at)
        at += 0 if skipped(part) else -(-part.size // ALIGNMENT) * ALIGNMENT
    return begins, at


def _region(buffer: Tensor, place: int, part: Part) -> Tensor:
    """A part's place in a buffer, in its dtype and shape; an ordinary tensor as the buffer is."""
    with torch.inference_mode(False):
        return buffer[place : place + part.size].view(part.dtype).view(part.shape)


def _fillings(part: Part, region: Tensor, readers: int) -> list[tuple[Tensor, Callable[[], object]]]:
    """What fills a part's region of a host buffer, as (the region that one job writes, the job)."""
    if part.size == 0:
        return []
    shares = min(readers, max(1, part.size // _READ_BYTES))
    if part.read is not None:
        step = -(-part.shape[0] // shares)
        spans = [slice(first, min(first + step, part.shape[0])) for first in range(0, part.shape[0], step)]
        return [(region[span], partial(part.read, span.start, region[span])) for span in spans]
    assert part.tensor is not None
    if not part.tensor.is_contiguous():
        return [(region, partial(region.copy_, part.tensor))]
    # numpy copies in the calling thread alone; torch would start a team of threads for each reader.
    source, to = _as_bytes(part.tensor).numpy(), _as_bytes(region)
    step = -(-part.size // shares)
    spans = [slice(first, min(first + step, part.size)) for first in range(0, part.size, step)]
    return [(to[span], partial(np.copyto, to[span].numpy(), source[span])) for span in spans]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
