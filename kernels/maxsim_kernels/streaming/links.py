"""Devices as `transfer.py` sees them: buffers on the host and the device, copies between them, and the events that order reuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Event = Any


class Link(Protocol):
    """A device and the way to it. Events are marks in a stream's queue; only `reuse` makes a thread wait."""

    hosts: int  # host buffers
    rooms: int  # device buffers; 0: host buffers are handed over themselves

    def enter(self) -> None:
        """Called first in every reader thread."""

    def host(self, size: int) -> Tensor:
        """A host buffer, `[size]` uint8."""

    def room(self, size: int) -> tuple[Tensor, list[Event]]:
        """A device buffer, `[size]` uint8, and what to wait for before it is written."""

    def direct(self, tensor: Tensor) -> bool:
        """Whether a host tensor needs no host buffer."""

    def reuse(self, region: Tensor, copied: Event | None) -> None:
        """Wait until the copy out of this part of a host buffer is done; it is written next."""

    def passed(self, event: Event) -> bool:
        """Whether `reuse` would not wait for this event."""

    def copy(self, room: Tensor, moves: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        """Queue copies (to, from) into a device buffer on the copy stream, behind `after`; the event behind them."""

    def arrive(self, copied: Event) -> None:
        """Make the consumer's current stream wait for a copy."""

    def here(self) -> Any:
        """The consumer's current stream."""

    def leave(self, room: Tensor, streams: Sequence[Any]) -> list[Event]:
        """Events behind everything queued on `streams` by now, which may use this device buffer."""


class HostLink:
    """No device to copy to: what was read is used where it lies."""

    hosts, rooms = 3, 0  # one in use, two ahead

    def enter(self) -> None:  # noqa: D102
        pass

    def host(self, size: int) -> Tensor:  # noqa: D102
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def direct(self, tensor: Tensor) -> bool:  # noqa: D102
        return True

    def reuse(self, region: Tensor, copied: Event | None) -> None:  # noqa: D102
        pass

    def passed(self, event: Event) -> bool:  # noqa: D102
        return True

    def room(self, size: int) -> tuple[Tensor, list[Event]]:  # noqa: D102
        raise NotImplementedError

    def copy(self, room: Tensor, moves: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:  # noqa: D102
        raise NotImplementedError

    def arrive(self, copied: Event) -> None:  # noqa: D102
        pass

    def here(self) -> Any:  # noqa: D102
        return None

    def leave(self, room: Tensor, streams: Sequence[Any]) -> list[Event]:  # noqa: D102
        return []


class CudaLink:
    """A GPU: pinned host buffers, and copies on a stream of their own."""

    hosts, rooms = 4, 3

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def enter(self) -> None:
        """A thread starts on device 0, where waiting for an event of another device would make a context."""
        torch.cuda.set_device(self.device)

    def host(self, size: int) -> Tensor:
        """Pinned; torch's allocator gives pinned memory away again only when copies out of it are done."""
        with torch.cuda.device(self.device):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")

    def room(self, size: int) -> tuple[Tensor, list[Event]]:
        """Allocated on the consumer's stream: memory that torch keeps for a copy stream would be of no use to anybody else."""
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        buffer.record_stream(self.stream)  # freed while a copy runs, it is given away only after that
        return buffer, self.leave(buffer, [])  # whoever had this memory before may still be using it

    def direct(self, tensor: Tensor) -> bool:
        """Whether the tensor is pinned and in one piece, so that a copy can start where it lies."""
        return tensor.is_pinned() and tensor.is_contiguous()

    def reuse(self, region: Tensor, copied: Event | None) -> None:
        """Sleeps: the event was made blocking. The consumer calls it too, whose current device may be another (`enter`)."""
        if copied is not None:
            with torch.cuda.device(self.device):
                copied.synchronize()

    def passed(self, event: Event) -> bool:
        """Asks the driver; nothing waits."""
        with torch.cuda.device(self.device):
            return bool(event.query())

    def copy(self, room: Tensor, moves: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        """One asynchronous copy a tensor."""
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self.stream):
            for event in after:
                self.stream.wait_event(event)
            for to, source in moves:
                to.copy_(source, non_blocking=True)
            copied.record(self.stream)
        return copied

    def arrive(self, copied: Event) -> None:
        """The copy stream's work before the event is seen by what the current stream does next."""
        self.here().wait_event(copied)

    def here(self) -> torch.cuda.Stream:
        """The current stream of this device, whichever device is current."""
        return torch.cuda.current_stream(self.device)

    def leave(self, room: Tensor, streams: Sequence[torch.cuda.Stream]) -> list[Event]:
        """One event a stream; the stream that is current now is always among them."""
        events = []
        for stream in {*streams, self.here()}:
            room.record_stream(stream)
            events.append(stream.record_event(torch.cuda.Event()))
        return events
