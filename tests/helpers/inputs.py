"""Makers of inputs for the operator's tests, `on_cpu` and `on_gpu`; everything follows from a seed, and nothing runs at import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maxsim_kernels import Packed


def valid(size: int, mask: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """Validity `[..., size]` that mask AND lengths mean; None: every token counts."""
    inside = None if lengths is None else torch.arange(size, device=lengths.device) < lengths.unsqueeze(-1)
    kept = None if mask is None else mask != 0
    if inside is None or kept is None:
        return kept if inside is None else inside
    return inside & kept


def dirty(tokens: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
    """A copy whose invalid tokens are NaN, +Inf, -Inf and the largest finite value in turn."""
    keep = valid(tokens.shape[-2], mask, lengths)
    if keep is None:
        return tokens
    numbers = (float("nan"), float("inf"), float("-inf"), torch.finfo(tokens.dtype).max)
    bad = torch.tensor(numbers, device=tokens.device, dtype=tokens.dtype)
    turn = torch.arange(keep.numel(), device=tokens.device).view(keep.shape) % len(bad)
    return torch.where(keep.unsqueeze(-1), tokens, bad[turn].unsqueeze(-1))


def values_of(tokens: Tensor | Packed) -> Tensor:
    """The tensor that holds the tokens, dense or packed."""
    return tokens.values if isinstance(tokens, Packed) else tokens


def scattered(rows: Packed, *, seed: int = 0, gap: int = 3) -> Packed:
    """The same rows as a view: stored in another order, with NaN tokens between them."""
    counts, before = rows.lengths.tolist(), rows.starts.tolist()
    order = torch.randperm(len(counts), generator=torch.Generator("cpu").manual_seed(seed), device="cpu").tolist()
    hole = torch.full((gap, rows.dim), float("nan"), device=rows.device).to(rows.dtype)
    starts, pieces, position = [0] * len(counts), [hole], gap
    for n in order:
        starts[n] = position
        pieces += [rows.values[before[n] : before[n] + counts[n]], hole]
        position += counts[n] + gap
    return Packed.view(torch.cat(pieces), torch.tensor(starts, dtype=torch.int64, device=rows.device), rows.lengths.long())


def padded(rows: Packed, size: int | None = None) -> tuple[Tensor, Tensor]:
    """The same rows as dense `[N, size, d]`, NaN as padding, and their lengths."""
    longest = max(rows.lengths.tolist(), default=0) if size is None else size
    dense = torch.full((len(rows), longest, rows.dim), float("nan"), device=rows.device).to(rows.dtype)
    for n in range(len(rows)):
        tokens = rows[n]
        dense[n, : tokens.shape[0]] = tokens
    return dense, rows.lengths.long()


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
    if how == "unaligned":  # one element past an allocation's start: no address of 16-bit values is a multiple of 4 bytes
        room = torch.empty(tokens.numel() + 1, dtype=tokens.dtype, device=tokens.device)
        return room[1:].view(tokens.shape).copy_(tokens)
    raise ValueError(f"how: got {how!r}")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal shape, dtype and bits (NaN equals NaN, -0.0 differs from 0.0)."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == torch.float32:
        return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))
    return torch.equal(one, other)


@dataclass
class Makers:
    """Makers of tensors on `device`, of `dtype` unless told.

    Numbers of the grid are k * `step` for k in -`levels`..`levels`: exact in every dtype, and so are all their FP32 products and sums
    in any order (ties abound). `exact`: packed rows lie on the grid unless told.
    """

    device: str
    dtype: torch.dtype
    levels: int
    step: float
    exact: bool

    valid, dirty, values_of, scattered, padded = map(staticmethod, (valid, dirty, values_of, scattered, padded))
    strided, same_bits = map(staticmethod, (strided, same_bits))

    def random(self, seed: int, device: str | torch.device | None = None) -> torch.Generator:
        """A generator on the device the tests run on."""
        return torch.Generator(device or self.device).manual_seed(seed)

    def gauss(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0, device: str | None = None) -> Tensor:
        """Normal values, rounded to `dtype`."""
        place = device or self.device
        return torch.randn(shape, generator=self.random(seed + 1000, place), device=place).to(dtype or self.dtype)

    def unit(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        """Tokens of norm 1, as encoders give them, rounded to `dtype`."""
        tokens = self.gauss(*shape, dtype=torch.float32, seed=seed)
        return torch.nn.functional.normalize(tokens, dim=-1).to(dtype or self.dtype)

    def grid(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        """Values of the grid."""
        numbers = torch.randint(-self.levels, self.levels + 1, shape, generator=self.random(seed + 2000), device=self.device)
        return (numbers * self.step).to(dtype or self.dtype)

    def mask(self, *shape: int, seed: int = 0, keep: float = 0.6, dtype: torch.dtype = torch.bool) -> Tensor:
        """Random validity; about `keep` of the positions count."""
        return (torch.rand(shape, generator=self.random(seed + 3000), device=self.device) < keep).to(dtype)

    def lengths(self, *shape: int, high: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
        """Random lengths 0..high; of three or more the middle one is 0 and the last one `high`."""
        numbers = torch.randint(0, high + 1, shape, generator=self.random(seed + 4000), device=self.device)
        flat = numbers.view(-1)
        if flat.numel() >= 3:
            flat[flat.numel() // 2], flat[-1] = 0, high
        return numbers.to(dtype)

    def masks(
        self,
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
            made[f"{name}_mask"] = self.mask(*shape, seed=seed, dtype=mask_dtype)
        if kind in ("lengths", "both"):
            made[f"{name}_lengths"] = self.lengths(*shape[:-1], high=shape[-1], seed=seed, dtype=length_dtype)
        return made

    def sizes(self, count: int, high: int, seed: int = 0, low: int = 0) -> list[int]:
        """Random document lengths low..high as Python numbers."""
        return torch.randint(low, high + 1, (count,), generator=self.random(seed + 5000, "cpu"), device="cpu").tolist()

    def packed(
        self,
        counts: Sequence[int] | Tensor,
        d: int,
        *,
        dtype: torch.dtype | None = None,
        index: torch.dtype = torch.int64,
        seed: int = 0,
        make: Callable[..., Tensor] | None = None,
    ) -> Packed:
        """`Packed` with the given lengths."""
        make = make or (self.grid if self.exact else self.gauss)
        ends = torch.tensor([0, *map(int, counts)], dtype=torch.int64).cumsum(0)
        return Packed(make(int(ends[-1]), d, dtype=dtype or self.dtype, seed=seed), ends.to(index).to(self.device))

    def either(self, layout: str, d: int = 24, dtype: torch.dtype | None = None) -> Tensor | Packed:
        """Documents of normal values: "dense" `[4, 9, d]`, or "packed" with five ragged ones, the second of them empty."""
        if layout == "dense":
            return self.gauss(4, 9, d, dtype=dtype, seed=1)
        return self.packed([3, 0, 31, 1, 7], d, dtype=dtype, seed=1, make=self.gauss)


on_cpu = Makers("cpu", torch.float32, levels=8, step=1 / 8, exact=True)
on_gpu = Makers("cuda", torch.float16, levels=2, step=1, exact=False)
