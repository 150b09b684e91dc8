"""Makers of inputs for the operator tests; everything follows from a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from maxsim_kernels import Packed

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def grid(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Multiples of 1/8 in [-1, 1]: exact in every dtype, and so are all their FP32 products and sums (ties abound)."""
    numbers = np.asarray(np.random.default_rng((1, seed, *shape)).integers(-8, 9, size=shape))
    return torch.from_numpy(numbers.astype(np.float32)).div(8).to(dtype)


def gauss(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal values, rounded to `dtype`."""
    numbers = np.random.default_rng((2, seed, *shape)).standard_normal(size=shape)
    return torch.from_numpy(numbers.astype(np.float32)).to(dtype)


def mask(*shape: int, seed: int = 0, keep: float = 0.6) -> Tensor:
    """Random validity; about `keep` of the positions are valid."""
    return torch.from_numpy(np.random.default_rng((3, seed, *shape)).random(size=shape) < keep)


def lengths(n: int, high: int, *, dtype: torch.dtype = torch.int64, seed: int = 0) -> Tensor:
    """Random lengths 0..high; with three or more, 0 and `high` are among them."""
    numbers = np.random.default_rng((4, seed, n, high)).integers(0, high + 1, size=n)
    if n >= 3:
        numbers[n // 2], numbers[-1] = 0, high
    return torch.from_numpy(numbers).to(dtype)


def valid(size: int, mask: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Validity `[..., size]` that mask AND lengths mean."""
    parts = []
    if lengths is not None:
        parts.append(torch.arange(size) < lengths.unsqueeze(-1))
    if mask is not None:
        parts.append(mask.bool())
    return parts[0] if len(parts) == 1 else parts[0] & parts[1]


def dirty(tokens: Tensor, valid: Tensor) -> Tensor:
    """A copy whose invalid tokens are NaN, +Inf, -Inf and the largest finite value in turn."""
    tokens = tokens.clone()
    rows = (~valid.bool()).nonzero()
    bad = (float("nan"), float("inf"), float("-inf"), torch.finfo(tokens.dtype).max)
    for number, row in enumerate(rows):
        tokens[tuple(row)] = bad[number % len(bad)]
    return tokens


def packed(
    counts: Sequence[int] | Tensor,
    d: int,
    *,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
    seed: int = 0,
    make: Callable[..., Tensor] = grid,
) -> Packed:
    """`Packed` with the given document lengths."""
    sizes = [int(count) for count in counts]
    offsets = torch.tensor([0, *np.cumsum(sizes, dtype=np.int64).tolist()], dtype=index)
    return Packed(make(sum(sizes), d, dtype=dtype, seed=seed), offsets)


def either(layout: str, d: int = 24, dtype: torch.dtype = torch.float32) -> Tensor | Packed:
    """Documents of normal values: "dense" `[4, 9, d]`, or "packed" with five ragged ones, the second of them empty."""
    if layout == "dense":
        return gauss(4, 9, d, dtype=dtype, seed=1)
    return packed([3, 0, 31, 1, 7], d, dtype=dtype, seed=1, make=gauss)


def values_of(tokens: Tensor | Packed) -> Tensor:
    """The tensor that holds the tokens, dense or packed."""
    return tokens.values if isinstance(tokens, Packed) else tokens


def padded(rows: Packed, size: int | None = None) -> tuple[Tensor, Tensor]:
    """The same documents as dense `[N, size, d]` with NaN as padding, and their lengths."""
    sizes = [int(n) for n in rows.lengths]
    size = max(sizes, default=0) if size is None else size
    dense = torch.full((len(sizes), size, rows.dim), float("nan"), dtype=rows.dtype)
    for n, (start, count) in enumerate(zip(rows.starts.tolist(), sizes, strict=True)):
        dense[n, :count] = rows.values[start : start + count]
    return dense, torch.tensor(sizes, dtype=torch.int64)


def scattered(rows: Packed, *, seed: int = 0, gap: int = 3) -> Packed:
    """The same documents as a view: stored in another order, with NaN tokens between them."""
    order = np.random.default_rng((5, seed)).permutation(len(rows)).tolist()
    starts = [0] * len(rows)
    pieces, position = [], 0
    hole = torch.full((gap, rows.dim), float("nan"), dtype=rows.dtype)
    for n in order:
        first, count = int(rows.starts[n]), int(rows.lengths[n])
        pieces += [hole, rows.values[first : first + count]]
        starts[n] = position + gap
        position += gap + count
    values = torch.cat([*pieces, hole])
    return Packed.view(values, torch.tensor(starts, dtype=torch.int64), rows.lengths.to(torch.int64))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal shape, dtype and bits (NaN equals NaN, -0.0 differs from 0.0)."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == torch.float32:
        return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))
    return torch.equal(one, other)
