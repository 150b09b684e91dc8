"""Documents of a search on a GPU by number, wherever they lie: on the device, pinned or pageable on the host, behind `Rows`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from maxsim_kernels.gpu.search.fetching import fetched
from maxsim_kernels.search.rows import Rows, documents_at, whole
from maxsim_kernels.streaming import device_blocks, least_budget
from maxsim_kernels.streaming.blocks import slice_of
from maxsim_kernels.tokens import Packed

_ROOM = 256 << 20  # bytes of tokens that are fetched at once, at most


@dataclass(frozen=True)
class Room:
    """Parts of a memory budget in bytes (None: no budget): `cells` for bounds, `ring` for streaming, `rows` for a fetch."""

    cells: int | None = None
    ring: int | None = None
    rows: int | None = None

    @classmethod
    def of(cls, budget: int | None, device: torch.device, queries: int) -> Room:
        """Divide a budget.

        Raises:
            ValueError: it is too small; says what is needed.
        """
        if budget is None:
            return cls()
        least = 2 * least_budget(device, queries)
        if budget < least:
            raise ValueError(f"memory_budget: got {budget} bytes, need at least {least} for {queries} queries")
        return cls(budget // 4, budget // 2, budget // 16)


def cut(documents: Packed | Rows, first: int, stop: int) -> Packed | Rows:
    """Documents `first` to `stop`; packed ones stay end to end, so that the operator takes them by the same kernel."""
    if first == 0 and stop == len(documents):
        return documents
    if isinstance(documents, Rows):
        return documents[slice(first, stop)]
    return cast(Packed, slice_of(documents, first, stop))


def in_one_piece(documents: Packed) -> bool:
    """Whether the same kernel scores all documents and copies of some of them: they are end to end, contiguous and aligned."""
    values = documents.values
    return documents.offsets is not None and values.is_contiguous() and values.data_ptr() % 16 == 0


def everything(documents: Packed | Rows, device: torch.device, queries: int, room: Room) -> Iterator[Packed]:
    """All documents on the device, in order, in blocks that are each valid until the next."""
    if isinstance(documents, Packed) and documents.device == device:
        yield documents
        return
    for held in whole(documents, room.rows):
        with closing(device_blocks([held], device, queries=queries, memory_budget=room.ring)) as blocks:
            for block in blocks:
                yield cast(Packed, block)


def some(documents: Packed | Rows, chosen: Tensor, room: Room) -> Iterator[tuple[Tensor, Packed]]:
    """Documents `chosen` `[m]` int64 (ascending, on the device), a few at a time: their numbers and themselves, on the device."""
    device = chosen.device
    if isinstance(documents, Rows):
        for few, rows in documents_at(documents, chosen.cpu(), room.rows):
            yield few.to(device), rows.to(device)
        return
    if documents.device == device and not in_one_piece(documents):
        yield chosen, Packed.view(documents.values, documents.starts[chosen], documents.lengths[chosen])
        return
    numbers = chosen.to(documents.device)
    starts, lengths = documents.starts[numbers].long(), documents.lengths[numbers].long()
    ends = torch.cumsum(lengths, 0)
    for span, tokens in _spans(ends.cpu(), min(_ROOM, room.rows or _ROOM) // (documents.dim * documents.dtype.itemsize)):
        offsets = torch.cat([ends.new_zeros(1), lengths[span].cumsum(0)])
        yield chosen[span], _brought(documents.values, starts[span], offsets, tokens, device)


def _spans(ends: Tensor, room: int) -> Iterator[tuple[slice, int]]:
    """Cut documents that end at `ends` `[m]` into spans of at most `room` tokens (one document at least), and their tokens."""
    first, before = 0, 0
    while first < len(ends):
        last = max(first + 1, int(torch.searchsorted(ends, before + room, right=True)))
        after = int(ends[last - 1])
        yield slice(first, last), after - before
        first, before = last, after


def _brought(values: Tensor, starts: Tensor, offsets: Tensor, tokens: int, device: torch.device) -> Packed:
    """Documents at `starts` of `values`, end to end, on the device."""
    if values.device == device:
        return fetched(values, starts, offsets, tokens)
    if values.is_pinned() and values.is_contiguous() and _reads_pinned(device):
        return fetched(values, starts.to(device), offsets.to(device), tokens)
    rows = torch.repeat_interleave(starts - offsets[:-1], offsets.diff(), output_size=tokens) + torch.arange(
        tokens, device="cpu"
    )
    held = torch.empty(tokens, values.shape[1], dtype=values.dtype, pin_memory=device.type == "cuda", device="cpu")
    torch.index_select(values, 0, rows, out=held)
    return Packed(held.to(device, non_blocking=True), offsets.to(device))


@lru_cache
def _reads_pinned(device: torch.device) -> bool:
    """Whether kernels on this GPU read pinned host memory where it lies; looked at once a process."""
    values = torch.arange(64, dtype=torch.float32, device="cpu").view(16, 4).pin_memory()
    starts, offsets = torch.tensor([9, 2], device=device), torch.tensor([0, 3, 8], device=device)
    try:
        found = fetched(values, starts, offsets, 8).values.cpu()
    except (RuntimeError, ValueError):
        return False
    return torch.equal(found, values[[9, 10, 11, 2, 3, 4, 5, 6]])
