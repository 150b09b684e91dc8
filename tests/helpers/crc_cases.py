"""What rows add to a CRC-32, by zlib and powers of x alone: the kernel's oracle."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.cache.stripes import add_crcs
from maxsim_eval.crc.remainders import ALL, moved, without_tail
from maxsim_eval.crc.summed import Summed


def sums_of(rows: Tensor, first: int = 0) -> np.ndarray:
    """`[T]` uint32 of rows `[T, d]` of any dtype, which lie from row `first` on."""
    held = as_bytes(rows)
    size = held.shape[1]
    found = [zlib.crc32(row.tobytes()) ^ moved(ALL, size) ^ ALL for row in held]
    return np.array([without_tail(one, size * number) for number, one in enumerate(found, first)], np.uint32)


def as_bytes(rows: Tensor) -> np.ndarray:
    """Rows as `[T, bytes]`."""
    return rows.contiguous().view(-1).view(torch.uint8).numpy().reshape(len(rows), rows.shape[1] * rows.element_size())


def summed(values: Tensor, lengths: list[int] | None = None) -> Summed:
    """Tokens with the sums that zlib makes."""
    offsets = torch.tensor([0, *np.cumsum(lengths or [len(values)]).tolist()])
    return Summed(values, offsets, sums_of(values))


def entered(values: Tensor, sums: np.ndarray, stripe: int, before: np.ndarray) -> tuple[list[int], list[int]]:
    """Running CRCs of rows behind others (bytes `[n, row bytes]`): by their sums, and by all bytes."""
    crcs = np.zeros(-(-(len(before) + len(values)) // stripe), np.uint32)
    add_crcs(crcs, before, 0, stripe)
    read = crcs.copy()
    add_crcs(read, as_bytes(values), len(before), stripe)
    Summed(values, torch.tensor([0, len(values)]), sums).enter(crcs, len(before), stripe)
    return crcs.tolist(), read.tolist()
