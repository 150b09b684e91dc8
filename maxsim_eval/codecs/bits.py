"""Codes of 1, 2, 4 or 8 bits, packed into bytes along the last dimension: the first code in the highest bits."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` codes."""
    return -(-count * bits // 8)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """`[T, d]` uint8 codes below `2**bits` as `[T, packed_size(d, bits)]` uint8; unused bits are 0."""
    if bits == 8:
        return codes
    each = 8 // bits
    missing = -codes.shape[1] % each
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    parts = codes.view(codes.shape[0], -1, each)
    found = parts[:, :, 0] << (8 - bits)
    for place in range(1, each):
        found |= parts[:, :, place] << (8 - bits * (place + 1))
    return found


def unpack_bits(packed: Tensor, count: int, bits: int) -> Tensor:
    """The first `count` codes `[T, count]` uint8 of every row of `pack_bits`."""
    if bits == 8:
        return packed
    each = 8 // bits
    found = torch.empty(*packed.shape, each, dtype=torch.uint8, device=packed.device)
    for place in range(each):
        found[:, :, place] = packed >> (8 - bits * (place + 1))
    return (found & (2**bits - 1)).view(packed.shape[0], -1)[:, :count]
