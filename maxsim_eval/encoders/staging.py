"""Tokens from a GPU to ordinary memory that is used again, through a few small pinned buffers that are kept.

Pinned memory for whole windows of texts is what a GPU would wait for: a gigabyte of it takes the driver half a second to make, in which
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
_GRAIN, _KEPT = 64 << 20, 8  # bytes by which rooms differ, and rooms that nobody uses


class Rooms:
    """Memory of windows that were written, for those to come; given back when the last of them was written.

    Fresh pages are touched at a third of a copy's rate, and giving them back keeps Python's lock: 30 ms of a window of 350 MB where the
    host has no huge pages left, in which nothing is launched.
    """

    def __init__(self) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=_KEPT)
        self._used: set[int] = set()

    def take(self, size: int) -> np.ndarray:
        """So many bytes, uint8; they are taken again when nobody holds the array, or what was made of it, any more."""
        if size < _GRAIN // 2:
            return np.empty(size, np.uint8)  # a query, that somebody may keep: soon touched, and it should hold no more
        room = self._large(size)
        if room is None:
            room = np.empty(-(-size // _GRAIN) * _GRAIN, np.uint8)
        self._used.add(id(room))
        given = np.asarray(room.data[:size])  # of a slice, numpy's views would hold the room, and not what was given
        weakref.finalize(given, self._back, room).atexit = False
        return given

    def _back(self, room: np.ndarray) -> None:
        """Called wherever the last reference goes, in any thread: so without a lock, by single steps that Python does as one."""
        self._used.discard(id(room))  # first: the next to take it puts it there again
        self._free.append(room)
        if not self._used:
            self._free.clear()

    def _large(self, size: int) -> np.ndarray | None:
        """A free room of so many bytes; smaller ones are given up, since windows come to be alike."""
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
    """A GPU's lanes that nobody uses."""
    free: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
    for _ in range(_AT_ONCE):
        free.put(_Lane(device))
    return free
