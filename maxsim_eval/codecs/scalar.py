"""Coders of single numbers: a few bits each, and one FP16 scale a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from maxsim_eval.codecs.bits import pack_bits, packed_size, unpack_bits
from maxsim_eval.codecs.steps import Coder, State, require
from maxsim_eval.errors import DataError
from maxsim_kernels import BitTokens, Packed, quantize_int8

Scale = Literal["rms", "max"]
Query = Literal["float", "int8"]
# The steps of the uniform quantisers of 2**bits levels that lose least of a standard normal variable (Max 1960, table II).
_STEPS = {2: 0.9957, 4: 0.3352}
_SCALE_BYTES = 2
_FP16_MAX = 65504.0
_TINY = 2.0**-60


def _half(scale: Tensor, name: str) -> Tensor:
    """Scales of tokens, `[T]`, as they are stored: FP16."""
    if scale.numel() and float(scale.amax()) > _FP16_MAX:
        raise DataError(
            f"{name}: a scale of {float(scale.amax()):g} does not fit FP16; embeddings this long cannot be stored so"
        )
    return scale.to(torch.float16)


@dataclass(frozen=True)
class Fp16(Coder):
    """Numbers as FP16; what a codec without a coder stores."""

    summary = "numbers rounded to FP16"

    def token_bytes(self, dim: int, state: State) -> float:
        return 2.0 * dim

    def encode(self, values: Tensor, state: State) -> dict[str, Tensor]:
        stored = values.to(torch.float16)
        if bool(torch.isinf(stored).any()):
            raise DataError(f"fp16: a number is larger than {_FP16_MAX:g}, which FP16 does not hold")
        return {"values": stored}

    def decode(self, stored: Mapping[str, Tensor], state: State, dim: int) -> Tensor:
        return stored["values"].float()


@dataclass(frozen=True)
class Scaled(Coder):
    """Whole numbers, and one FP16 scale a token: a token is `levels * scale`.

    With `queries=int8` queries are quantised too, one scale a token, and products are the operator's own integer ones.
    """

    queries: Query = "float"

    def check(self, dim: int) -> None:
        require("queries", self.queries, self.queries in get_args(Query), " or ".join(get_args(Query)))

    @property
    def int8_queries(self) -> bool:
        return self.queries == "int8"

    def levels(self, stored: Mapping[str, Tensor], dim: int) -> Tensor:
        """The whole numbers `[T, d]` int8 that are stored."""
        raise NotImplementedError

    def decode(self, stored: Mapping[str, Tensor], state: State, dim: int) -> Tensor:
        return self.levels(stored, dim).float().mul_(stored["scales"].float()[:, None])


@dataclass(frozen=True)
class Int8(Scaled):
    """The operator's own INT8 codes at token scale."""

    summary = "INT8, one scale a token, as of the path int8"

    def token_bytes(self, dim: int, state: State) -> float:
        return float(dim + _SCALE_BYTES)

    def encode(self, values: Tensor, state: State) -> dict[str, Tensor]:
        found = quantize_int8(values)
        assert isinstance(found.codes, Tensor)
        return {"codes": found.codes, "scales": found.scales}

    def levels(self, stored: Mapping[str, Tensor], dim: int) -> Tensor:
        return stored["codes"]


@dataclass(frozen=True)
class Uniform(Scaled):
    """`2**bits` levels an equal step apart, none at 0: odd numbers up to +-`(2**bits - 1)`, times the scale: half a step."""

    bits: int = 4
    scale: Scale = "rms"

    summary = (
        "levels an equal step apart; the step from the token's root mean square (Max's quantiser), or from its largest number"
    )
    source = "Max 1960, Quantizing for Minimum Distortion"

    def check(self, dim: int) -> None:
        super().check(dim)
        require("scale", self.scale, self.scale in get_args(Scale), " or ".join(get_args(Scale)))

    def token_bytes(self, dim: int, state: State) -> float:
        return float(packed_size(dim, self.bits) + _SCALE_BYTES)

    def encode(self, values: Tensor, state: State) -> dict[str, Tensor]:
        if self.scale == "rms":
            step = values.square().mean(1).sqrt_() * _STEPS[self.bits]
        else:
            step = values.abs().amax(1) / 2 ** (self.bits - 1)
        scales = _half(step / 2, f"int{self.bits}")
        step = 2 * scales.float().clamp_(min=_TINY)  # of zeros: any code, times a scale of 0
        half = 2 ** (self.bits - 1)
        codes = torch.floor(values / step[:, None]).clamp_(-half, half - 1).add_(half).to(torch.uint8)
        return {"codes": pack_bits(codes, self.bits), "scales": scales}

    @property
    def fused(self) -> bool:
        return True

    def as_stored(self, tokens: Packed, stored: Mapping[str, Tensor], state: State) -> BitTokens:
        return BitTokens(tokens.with_values(stored["codes"]), stored["scales"], self.bits, tokens.dim)

    def levels(self, stored: Mapping[str, Tensor], dim: int) -> Tensor:
        codes = unpack_bits(stored["codes"], dim, self.bits).to(torch.int8)
        return codes.mul_(2).sub_(2**self.bits - 1)


@dataclass(frozen=True)
class Sign(Scaled):
    """One bit a number, its sign; the scale is the mean magnitude, which loses least."""

    summary = "the sign of every number; one scale a token, the mean magnitude"

    def token_bytes(self, dim: int, state: State) -> float:
        return float(packed_size(dim, 1) + _SCALE_BYTES)

    def encode(self, values: Tensor, state: State) -> dict[str, Tensor]:
        return {"codes": pack_bits((values >= 0).to(torch.uint8), 1), "scales": _half(values.abs().mean(1), "sign")}

    @property
    def fused(self) -> bool:
        return True

    def as_stored(self, tokens: Packed, stored: Mapping[str, Tensor], state: State) -> BitTokens:
        return BitTokens(tokens.with_values(stored["codes"]), stored["scales"], 1, tokens.dim)

    def levels(self, stored: Mapping[str, Tensor], dim: int) -> Tensor:
        return unpack_bits(stored["codes"], dim, 1).to(torch.int8).mul_(2).sub_(1)


@dataclass(frozen=True)
class Control(Uniform):
    """A negative control: `int4` whose decoder takes the two codes of a byte in the wrong order. An atlas must find it different."""

    summary = "negative control: int4 with the two codes of every byte swapped"

    @property
    def fused(self) -> bool:
        return False  # the operator would read the codes in their right order

    def levels(self, stored: Mapping[str, Tensor], dim: int) -> Tensor:
        codes = stored["codes"]
        return super().levels({**stored, "codes": codes >> 4 | (codes & 15) << 4}, dim)
