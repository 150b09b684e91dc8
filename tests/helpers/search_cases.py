"""Small awkward corpora for certified search, on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from coded_cases import few_bits
from maxsim_kernels import BitTokens, Fp8Tokens, Int8Tokens, Packed, ResidualTokens, pack, quantize_fp8, quantize_int8
from maxsim_kernels.search import Rows

FEW_BITS = ("bits", "unit", "residual")
KINDS = [f"{kind} {scale}" for kind in ("int8", "affine", "fp8") for scale in ("token", "document", "corpus")]
CPU_KINDS = [*KINDS, *(f"{kind} {bits}" for kind in FEW_BITS for bits in (1, 2, 4))]


@dataclass(frozen=True)
class Awkward:
    """How large a corpus is at most, how near its ties, how small its numbers; `kinds`: of how many kinds one is drawn."""

    documents: int
    tokens: int
    kinds: int
    tie: float
    least_power: int
    tiny: float

    def corpus(self, draw: np.random.Generator, d: int, dtype: torch.dtype) -> Packed:
        """Near ties, duplicates, all equal, huge or tiny norms, zeros, empty documents, code values."""
        count, kind = int(draw.integers(1, self.documents)), int(draw.integers(0, self.kinds))
        sizes = draw.integers(0 if kind % 2 else 1, self.tokens, count)
        parts = [draw.normal(size=(size, d)) for size in sizes]
        if kind in (1, 2):  # duplicates of a few, nearly or exactly
            parts = [parts[n % 3 % count] * (1 + (draw.integers(-2, 3) * self.tie if kind == 2 else 0)) for n in range(count)]
        elif kind == 3:
            parts = [np.ones((size, d)) for size in sizes]
        elif kind == 4:
            parts = [part * 10.0 ** draw.integers(self.least_power, 4) for part in parts]
        elif kind == 5:
            parts = [part * (draw.random((len(part), 1)) < 0.5) for part in parts]
        elif kind == 6:
            parts = [draw.integers(-127, 128, part.shape) / draw.choice([1, 64, 127]) for part in parts]
        elif kind == 7:
            parts = [part * self.tiny for part in parts]
        return pack([torch.from_numpy(np.ascontiguousarray(part)).to(dtype) for part in parts])


class Held(Rows):
    """Documents in memory that are read by number, and how often each was."""

    def __init__(self, documents: Packed) -> None:
        super().__init__(documents.lengths.long(), documents.dim, documents.dtype)
        self.documents, self.reads = documents, torch.zeros(len(documents), dtype=torch.int64)

    def read(self, numbers: torch.Tensor) -> Packed:
        assert (numbers[1:] > numbers[:-1]).all()
        self.reads[numbers] += 1
        return self.documents.select(numbers).compact()


def coded(documents: Packed, kind: str) -> Int8Tokens | Fp8Tokens | BitTokens | ResidualTokens:
    """Documents as one of `CPU_KINDS` of codes."""
    name, granularity = kind.split()
    if name in FEW_BITS:
        return few_bits(documents, name, int(granularity))
    return quantize_fp8(documents, granularity) if name == "fp8" else quantize_int8(documents, granularity, name == "affine")
