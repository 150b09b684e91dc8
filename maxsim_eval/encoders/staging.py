"""Copies tokens from a GPU to ordinary memory, which is reused, through a few small pinned buffers, which are kept.

A GPU would have to wait for pinned memory of whole windows of texts: the driver takes half a second to pin a gigabyte, in which
nothing is launched, and an encoder holds a dozen windows at a time.
"""

from __future__ import annotations

import functools
import queue
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

_BYTES = 16 << 20  # of a buffer
_AT_ONCE = 4  # threads that copy at a time: one copies at 7 GB/s, a link brings 55
_GRAIN, _KEPT = 64 << 20, 8  # bytes that sizes of rooms are rounded up to; most free rooms that are kept


class Rooms:
    """Reuses the memory (rooms) of windows that were written for later ones; frees all of it when no room is in use.

    Fresh pages are touched at a third of a copy's rate, and freeing them holds Python's lock: 30 ms for a window of 350 MB where
    the host has no huge pages left, in which nothing is launched.
    """

    def __init__(self) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=_KEPT)
        self._used: set[int] = set()

    def take(self, size: int) -> np.ndarray:
        """A uint8 array of `size` bytes; its memory is reused once nobody holds the array, or anything made of it."""
        if size < _GRAIN // 2:
            return np.empty(size, np.uint8)  # such as queries, which a caller may keep: they must not hold a whole room
        room = self._large(size)
        if room is None:
            room = np.empty(-(-size // _GRAIN) * _GRAIN, np.uint8)
        self._used.add(id(room))
        given = np.asarray(room.data[:size])  # no slice: numpy's views of one would keep the room alive, not `given`
        weakref.finalize(given, self._back, room).atexit = False
        return given

    def _back(self, room: np.ndarray) -> None:
        """Finalizer, run in any thread that drops the last reference: so it takes no lock, and each step is atomic in Python."""
        self._used.discard(id(room))  # before the append: whoever takes the room next adds it again
        self._free.append(room)
        if not self._used:
            self._free.clear()

    def _large(self, size: int) -> np.ndarray | None:
        """A free room of at least `size` bytes, else None; smaller ones are dropped, since later windows are of similar size."""
        while True:
            try:
                room = self._free.popleft()
            except IndexError:
                return None
            if len(room) >= size:
                return room


class _Lane:
    """A stream of copies to the CPU with two buffers: one is filled while the other is emptied."""

    def __init__(self, device: int) -> None:
        self.stream = torch.cuda.Stream(device)
        self.buffers = [torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def bring(self, source: Tensor, to: Tensor) -> None:
        """Copy bytes of the device, which nothing writes any more, to bytes of the CPU; both `[n]` uint8."""
        before: tuple[torch.cuda.Event, Tensor, Tensor] | None = None
        with torch.cuda.stream(self.stream):
            for number, first in enumerate(range(0, len(source), _BYTES)):
                part = source[first : first + _BYTES]
                buffer = self.buffers[number % 2][: len(part)]
                buffer.copy_(part, non_blocking=True)
                event = torch.cuda.Event(blocking=True)
                event.record()
                if before is not None:
                    _empty(*before)
                before = event, buffer, to[first : first + len(part)]
        if before is not None:
            _empty(*before)


def _empty(copied: torch.cuda.Event, buffer: Tensor, to: Tensor) -> None:
    copied.synchronize()
    np.copyto(to.numpy(), buffer.numpy())  # in this thread alone; torch would start a team of them


def to_host(values: Tensor, rooms: Rooms) -> Tensor:
    """A copy in ordinary memory of values that are ready on the current GPU; several threads may ask at a time."""
    with torch.inference_mode(False):  # numpy's memory comes in huge pages where there are any
        room = torch.from_numpy(rooms.take(values.nbytes))
        found = room.view(values.dtype).view(values.shape)
    lanes = _lanes(torch.cuda.current_device())
    lane = lanes.get()
    try:
        lane.bring(values.contiguous().view(-1).view(torch.uint8), room)
    finally:
        lanes.put(lane)
    return found


@functools.cache
def _lanes(device: int) -> queue.SimpleQueue[_Lane]:
    """The queue of a GPU's free lanes."""
    free: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
    for _ in range(_AT_ONCE):
        free.put(_Lane(device))
    return free
