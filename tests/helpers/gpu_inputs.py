"""Makers of inputs on the GPU; everything follows from a seed. Nothing here runs at import."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from maxsim_kernels import Packed

DEVICE = "cuda"
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
BAD = (float("nan"), float("inf"), float("-inf"), 30000.0)


def random(seed: int, device: str | torch.device | None = None) -> torch.Generator:
    """A generator on the device the tests run on."""
    return torch.Generator(device or DEVICE).manual_seed(seed)


def gauss(*shape: int, dtype: torch.dtype = HALF, seed: int = 0, device: str | torch.device | None = None) -> Tensor:
    """Normal values, rounded to `dtype`."""
    place = device or DEVICE
    return torch.randn(shape, generator=random(seed + 1000, place), device=place).to(dtype)


def unit(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    """Tokens of norm 1, as encoders give them, rounded to `dtype`."""
    return torch.nn.functional.normalize(gauss(*shape, dtype=SINGLE, seed=seed), dim=-1).to(dtype)


def grid(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    """Small integers: products and sums are exact in FP32 in any order, so ties are exact and abound."""
    return torch.randint(-2, 3, shape, generator=random(seed + 2000), device=DEVICE).to(dtype)


def mask(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bool) -> Tensor:
    """Random validity; about 0.6 of the positions count."""
    return (torch.rand(shape, generator=random(seed + 3000), device=DEVICE) < 0.6).to(dtype)


def lengths(*shape: int, high: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Random lengths 0..high; of three or more the middle one is 0 and the last one `high`."""
    numbers = torch.randint(0, high + 1, shape, generator=random(seed + 4000), device=DEVICE)
    flat = numbers.view(-1)
    if flat.numel() >= 3:
        flat[flat.numel() // 2], flat[-1] = 0, high
    return numbers.to(dtype)


def masks(
    kind: str,
    name: str,
    *shape: int,
    seed: int = 0,
    mask_dtype: torch.dtype = torch.bool,
    length_dtype: torch.dtype = torch.int64,
) -> dict[str, Tensor]:
    """The arguments `{name}_mask` and `{name}_lengths` of padded tokens `[*shape]` ("none", "mask", "lengths", "both")."""
    made = {}
    if kind in ("mask", "both"):
        made[f"{name}_mask"] = mask(*shape, seed=seed, dtype=mask_dtype)
    if kind in ("lengths", "both"):
        made[f"{name}_lengths"] = lengths(*shape[:-1], high=shape[-1], seed=seed, dtype=length_dtype)
    return made


def valid(size: int, mask: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """Validity `[..., size]` that mask AND lengths mean; None: every token counts."""
    inside = None if lengths is None else torch.arange(size, device=lengths.device) < lengths.unsqueeze(-1)
    kept = None if mask is None else mask != 0
    if inside is None or kept is None:
        return kept if inside is None else inside
    return inside & kept


def dirty(tokens: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
    """A copy whose invalid tokens are NaN, +Inf, -Inf and a large number in turn."""
    keep = valid(tokens.shape[-2], mask, lengths)
    if keep is None:
        return tokens
    bad = torch.tensor(BAD, device=tokens.device, dtype=tokens.dtype)
    turn = torch.arange(keep.numel(), device=tokens.device).view(keep.shape) % len(BAD)
    return torch.where(keep.unsqueeze(-1), tokens, bad[turn].unsqueeze(-1))


def sizes(count: int, high: int, seed: int = 0, low: int = 0) -> list[int]:
    """Random document lengths low..high as Python numbers."""
    return torch.randint(low, high + 1, (count,), generator=random(seed + 5000, "cpu"), device="cpu").tolist()


def packed(
    counts: Sequence[int],
    d: int,
    *,
    dtype: torch.dtype = HALF,
    index: torch.dtype = torch.int64,
    seed: int = 0,
    make: Callable[..., Tensor] = gauss,
) -> Packed:
    """`Packed` with the given lengths."""
    ends = torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)
    return Packed(make(int(ends[-1]), d, dtype=dtype, seed=seed), ends.to(index).to(DEVICE))


def scattered(rows: Packed, *, seed: int = 0, gap: int = 3) -> Packed:
    """The same rows as a view: stored in another order, with NaN tokens between them."""
    counts, before = rows.lengths.tolist(), rows.starts.tolist()
    order = torch.randperm(len(counts), generator=random(seed, "cpu"), device="cpu").tolist()
    hole = torch.full((gap, rows.dim), float("nan"), device=rows.device).to(rows.dtype)
    starts, pieces, position = [0] * len(counts), [hole], gap
    for n in order:
        starts[n] = position
        pieces += [rows.values[before[n] : before[n] + counts[n]], hole]
        position += counts[n] + gap
    return Packed.view(torch.cat(pieces), torch.tensor(starts, device=rows.device), rows.lengths.long())


def padded(rows: Packed, size: int | None = None) -> tuple[Tensor, Tensor]:
    """The same rows as dense `[N, size, d]`, NaN as padding, and their lengths."""
    longest = size or max(rows.lengths.tolist(), default=0)
    dense = torch.full((len(rows), longest, rows.dim), float("nan"), device=rows.device).to(rows.dtype)
    for n in range(len(rows)):
        tokens = rows[n]
        dense[n, : tokens.shape[0]] = tokens
    return dense, rows.lengths.long()


def unaligned(tokens: Tensor) -> Tensor:
    """The same values one element past an allocation's start, so that no address is a multiple of 4 bytes (16-bit types)."""
    room = torch.empty(tokens.numel() + 1, dtype=tokens.dtype, device=tokens.device)
    moved = room[1:].view(tokens.shape)
    return moved.copy_(tokens)


def hole(tokens: Tensor) -> Tensor:
    """What stands between values of a strided tensor: NaN, or the largest code."""
    return torch.full_like(tokens, float("nan") if tokens.is_floating_point() else 127)


def strided(tokens: Tensor, how: str) -> Tensor:
    """The same values with other strides."""
    if how == "transposed":  # the embedding axis is not the innermost
        return tokens.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "batch inside":  # [L, n, d] storage
        return tokens.transpose(0, -2).contiguous().transpose(0, -2)
    if how == "every second element":
        return torch.stack([tokens, hole(tokens)], -1)[..., 0]
    if how == "wider rows":
        return torch.cat([tokens, hole(tokens)], -1)[..., : tokens.shape[-1]]
    if how == "odd rows":  # a row stride that no vector load divides
        return torch.cat([tokens, hole(tokens[..., :1])], -1)[..., : tokens.shape[-1]]
    if how == "unaligned":
        return unaligned(tokens)
    raise ValueError(f"how: got {how!r}")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal shape, dtype and bits (NaN equals NaN, -0.0 differs from 0.0)."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == torch.float32:
        return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))
    return torch.equal(one, other)
