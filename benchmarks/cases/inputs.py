"""Inputs of the paper's tables: random unit vectors from a fixed seed, FP16 and d = 128 where nothing else is said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maxsim_kernels import Packed
from measure.method import Options
from measure.names import SHAPES
from measure.work import Work

DIM = 128
SHORT = {**SHAPES, "textual": (32, 180)}  # 'textual' of op_abl, multiquery and int8
LONGEST = 512  # of the ragged tables


@dataclass(frozen=True)
class Sizes:
    """One query batch and one corpus."""

    queries: int
    query_tokens: int
    documents: int
    tokens: int
    dim: int = DIM

    @property
    def about(self) -> dict[str, Any]:
        """The sizes as the results file has them."""
        return {
            "queries": self.queries,
            "query_tokens": self.query_tokens,
            "documents": self.documents,
            "document_tokens": self.tokens,
            "dim": self.dim,
        }

    def work(self, unit: str = "fp16", scales: int = 0) -> Work:
        """Operations and document bytes; `scales` FP16 scales are read too."""
        rows, tokens = self.queries * self.query_tokens, self.documents * self.tokens
        size = tokens * self.dim * (2 if unit == "fp16" else 1) + 2 * scales
        return Work(2.0 * rows * tokens * self.dim, float(size), unit)


def sizes(options: Options, shape: tuple[int, int], documents: int, queries: int = 1, dim: int = DIM) -> Sizes:
    """The sizes of a row; in a smoke run small ones of the same kind."""
    if not options.smoke:
        return Sizes(queries, shape[0], documents, shape[1], dim)
    return Sizes(min(queries, 3), min(shape[0], 24), min(documents, 20), min(shape[1], 40), min(dim, 32))


def unit(device: torch.device, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Random unit vectors, drawn in blocks so that the FP32 draft stays small."""
    found = torch.empty(shape, dtype=dtype, device=device)
    flat = found.view(-1, shape[-1])
    step = max(1, (1 << 28) // shape[-1])
    for start in range(0, flat.shape[0], step):
        draft = torch.randn(flat[start : start + step].shape, device=device)
        flat[start : start + step] = torch.nn.functional.normalize(draft, dim=-1).to(dtype)
    return found


def drawn(options: Options, held: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[Nq, Lq, d]`, the same as calls take them (one query: `[Lq, d]`), documents `[B, Ld, d]`."""
    torch.manual_seed(0)
    queries = unit(options.device, held.queries, held.query_tokens, held.dim)
    documents = unit(options.device, held.documents, held.tokens, held.dim)
    return queries, queries[0] if held.queries == 1 else queries, documents


# Ragged documents

# How lengths are drawn: (the paper's fill, the paper's mean)
RAGGED = {"uniform 256 to 512": (0.76, 390), "HotpotQA-like": (0.24, 120), "highly ragged": (0.14, 71)}


def lengths(kind: str, count: int, longest: int) -> Tensor:
    """Lengths `[count]` whose fill of `longest` is about the paper's; one document is as long as the longest.

    HotpotQA-like: log-normal around 100 tokens (mean 120 of 512); highly ragged: exponential (mean 71); both from 8 tokens on.
    """
    generator = torch.Generator().manual_seed(7)
    if kind == "uniform 256 to 512":
        found = torch.randint(longest // 2, longest + 1, (count,), generator=generator)
    elif kind == "HotpotQA-like":
        found = (torch.randn(count, generator=generator) * 0.55).exp() * longest * 0.2
    elif kind == "highly ragged":
        found = -torch.rand(count, generator=generator).clamp_min(1e-6).log() * longest * 0.128 + longest * 0.0117
    else:
        raise ValueError(f"kind: got {kind!r}, need one of {', '.join(RAGGED)}")
    found = found.long().clamp(min(8, longest), longest)
    found[-1] = longest
    return found


def ragged(options: Options, kind: str, count: int) -> tuple[Packed, Tensor, Tensor, Tensor]:
    """Packed documents, the same padded `[B, longest, d]`, their lengths, and where padding is `[B, longest]`."""
    torch.manual_seed(0)
    longest, dim = (40, 32) if options.smoke else (LONGEST, DIM)
    count = min(count, 20) if options.smoke else count
    held = lengths(kind, count, longest).to(options.device)
    offsets = torch.zeros(count + 1, dtype=torch.int64, device=options.device)
    offsets[1:] = held.cumsum(0)
    packed = Packed(unit(options.device, int(offsets[-1]), dim), offsets)
    padding = torch.arange(longest, device=options.device) >= held[:, None]
    padded = torch.zeros(count, longest, dim, dtype=torch.float16, device=options.device)
    padded[~padding] = packed.values
    return packed, padded, held, padding
