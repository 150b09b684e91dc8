"""Codes of a search on a GPU, wherever they lie: on the device, on the host, or on a disk until they are scanned (`StreamedCodes`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import cached_property
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from maxsim_kernels.search.bounds import Codes, shift_of
from maxsim_kernels.search.fetching import Room
from maxsim_kernels.search.queries import Queries
from maxsim_kernels.search.rows import StreamedCodes
from maxsim_kernels.streaming import LazyCodes, device_blocks
from maxsim_kernels.streaming.blocks import slice_of
from maxsim_kernels.tokens import Packed


class Scan:
    """Codes, wherever they lie, and scores over some of them.

    `dtype`, `shift` (of `shift_of`) and `lengths` (on the device): what bounds need beside the scores. `ahead`: scores over all codes,
    where they were queued before.
    """

    def __init__(self, codes: Codes | StreamedCodes, device: torch.device, room: Room, ahead: Tensor | None = None) -> None:
        self.codes, self.device, self.room, self.ahead = codes, device, room, ahead
        if isinstance(codes, StreamedCodes):
            self.here, self.shift, self.dtype, lengths = False, 0.0, codes.dtype, codes.lengths
        else:
            packed = cast(Packed, codes.codes)
            self.here, self.shift, self.dtype, lengths = packed.device == device, shift_of(codes), packed.dtype, packed.lengths
            self.size = even(packed)
        self.lengths = lengths.to(device)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document; waits for the GPU once, where codes lie there."""
        if isinstance(self.codes, StreamedCodes):
            return int(self.codes.lengths.max()) if self.codes.lengths.numel() else 0
        return _extent(cast(Packed, self.codes.codes))[1]

    def scores(self, queries: Queries, first: int, stop: int, quantised: bool) -> Tensor:
        """Scores `[Nq, n]` over the codes of documents `first` to `stop`; codes on the host are copied while others are scored."""
        if self.ahead is not None and self.ahead.shape[1] == stop - first:
            return self.ahead
        if self.here:
            return queries.scores(cut_codes(cast(Codes, self.codes), first, stop, self.size), quantised)
        blocks: Iterable[Codes | LazyCodes]
        if isinstance(self.codes, StreamedCodes):
            blocks = _without_offsets(self.codes.read(first, stop))
        else:
            blocks = [cut_codes(self.codes, first, stop, self.size)]
        found = torch.empty(len(queries), stop - first, dtype=torch.float32, device=self.device)
        ring = device_blocks(blocks, self.device, queries=len(queries), memory_budget=self.room.ring)
        seen = 0
        with closing(ring) as arrived:
            for block in arrived:
                after = seen + len(block)
                if after <= stop - first:
                    found[:, seen:after] = queries.scores(block, quantised)
                seen = after
        if seen != stop - first:
            raise ValueError(f"codes: read gave {seen} documents, need {stop - first}: {first} to {stop}")
        return found


def _without_offsets(blocks: Iterable[Codes | LazyCodes]) -> Iterator[Codes | LazyCodes]:
    """The blocks; affine codes are refused: bounds are fixed before codes are read, and offsets would widen them."""
    for block in blocks:
        affine = "offset" in block.columns if isinstance(block, LazyCodes) else getattr(block, "offset", None) is not None
        if affine:
            raise ValueError("codes: read gave affine ones, need codes without offsets")
        yield block


_extents: WeakKeyDictionary[Packed, tuple[int, int]] = WeakKeyDictionary()


def even(packed: Packed) -> int:
    """The length that all documents share, if they lie end to end; else 0. Looked for once, which waits for a GPU."""
    least, most = _extent(packed)
    dense = len(packed) * most == packed.values.shape[0] and packed.values.is_contiguous()
    return most if least == most and dense else 0


def _extent(packed: Packed) -> tuple[int, int]:
    """Tokens of the shortest and the longest document."""
    if packed not in _extents:
        _extents[packed] = tuple(torch.stack(packed.lengths.aminmax()).tolist()) if len(packed) else (0, 0)
    return _extents[packed]


def cut_codes(codes: Codes, first: int, stop: int, size: int) -> Codes:
    """Codes of documents `first` to `stop`: in the faster dense form if all have `size` tokens (0: they do not)."""
    held = cast(Packed, codes.codes)
    if not size:
        return cast(Codes, slice_of(codes, first, stop))
    values = held.values[first * size : stop * size].view(stop - first, size, held.dim)

    def dense(one: Tensor) -> Tensor:
        if codes.granularity == "token":
            return one[first * size : stop * size].view(stop - first, size)
        return one[first:stop] if codes.granularity == "document" else one

    return codes.over(values, dense)
