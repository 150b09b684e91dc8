"""Small awkward corpora for certified search, on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from coded_cases import few_bits
from inputs import on_cpu as cases
from maxsim_kernels import (
    BitTokens,
    Fp8Tokens,
    Int8Tokens,
    Packed,
    ResidualTokens,
    pack,
    quantize_fp8,
    quantize_int8,
    stream_topk,
)
from maxsim_kernels.search import Rows, exact_topk

FEW_BITS = ("bits", "unit", "residual")
KINDS = [f"{kind} {scale}" for kind in ("int8", "affine", "fp8") for scale in ("token", "document", "corpus")]
CPU_KINDS = [*KINDS, *(f"{kind} {bits}" for kind in FEW_BITS for bits in (1, 2, 4))]

ANSWERS = ("pruned", "all rescored", "brute force", "refused")


@dataclass(frozen=True)
class Awkward:
    """How large a corpus is at most, how near its ties, how small and large its numbers; `kinds`: how many are drawn from."""

    documents: int
    tokens: int
    kinds: int
    tie: float
    least_power: int
    most_power: int
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
            most = min(self.most_power, 3) if dtype == torch.float16 else self.most_power
            parts = [part * 10.0 ** draw.integers(self.least_power, most + 1) for part in parts]
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


SPREAD = ("topics", "duplicates", "near ties", "one sign", "norms", "large", "zeros", "long documents")


def _normalised(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def spread(draw: np.random.Generator, dtype: torch.dtype) -> tuple[Packed, Packed, int]:
    """Documents about topics, queries about some of them, and a k of at most a twentieth: most pairs can be ruled out."""
    count, d, kind = int(draw.integers(200, 900)), int(draw.choice([16, 64, 128])), str(draw.choice(SPREAD))
    topics = draw.normal(size=(count // 5, d))
    documents: list[np.ndarray] = []
    for number in range(count):
        size = 40 if kind == "long documents" and number % 50 == 0 else int(draw.integers(0 if kind == "zeros" else 1, 10))
        tokens = _normalised(topics[draw.integers(len(topics))] + 0.4 * draw.normal(size=(size, d)))
        if kind in ("duplicates", "near ties") and number and draw.random() < 0.5:
            tokens = documents[draw.integers(number)] * (1 if kind == "duplicates" else 1 + draw.integers(-2, 3) * 2.0**-11)
        if kind == "one sign":
            tokens = np.abs(tokens)
        if kind == "norms":
            tokens = tokens * 2.0 ** draw.integers(-2, 3)
        if kind == "large":
            tokens = tokens * 3e4  # FP16 has to hold scales and offsets
        documents.append(tokens)
    filled = [one for one in documents if len(one)]
    queries = [filled[draw.integers(len(filled))][: draw.integers(1, 9)] for _ in range(draw.integers(1, 30))]
    queries = [one + 0.1 * np.abs(one).max() * draw.normal(size=one.shape) / d**0.5 for one in queries]

    def packed(parts: list[np.ndarray]) -> Packed:
        return pack([torch.from_numpy(np.ascontiguousarray(part)).to(dtype) for part in parts], dim=d)

    return packed(documents), packed(queries), int(draw.integers(1, count // 20 + 1))


def same(queries, documents: Packed, k: int, codes, **options):
    """Compare with brute force, bit for bit; returns the stats."""
    expected = stream_topk(queries, [documents], k)
    scores, indices, stats = exact_topk(queries, documents, k, codes=codes, **options)
    assert cases.same_bits(scores, expected[0])
    assert torch.equal(indices, expected[1])
    assert stats.certificate.holds
    assert bool((stats.survivors <= len(documents)).all())
    return stats


def clustered(count: int, d: int, seed: int, dtype: torch.dtype = torch.float32) -> Packed:
    """Documents whose tokens lie around a few topics: few of them are near any query."""
    draw = np.random.default_rng(seed)
    topics = draw.normal(size=(max(2, count // 4), d))
    parts = [topics[draw.integers(len(topics))] + 0.4 * draw.normal(size=(draw.integers(1, 12), d)) for _ in range(count)]
    return pack([torch.from_numpy(part / np.linalg.norm(part, axis=1, keepdims=True)).to(dtype) for part in parts])


def about(documents: Packed, count: int, seed: int, noise: float = 0.3) -> Packed:
    """Queries made of documents' tokens and noise."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, len(documents), (count,), generator=draw).tolist()
    parts = [documents[n][: 1 + n % 7].float() for n in chosen]
    return pack(
        [(part + noise * torch.randn(part.shape, generator=draw) / part.shape[1] ** 0.5).to(documents.dtype) for part in parts]
    )
