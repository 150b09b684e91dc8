"""Correctness before speed: the FP64 truth on a part of the documents, and how far a method's scores are from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maxsim_kernels import Fp8Tokens, Int8Tokens, Packed, maxsim_reference, pack

Documents = Tensor | Packed | Int8Tokens | Fp8Tokens
PART = 16  # documents checked: the first and the last eight, with all queries


@dataclass(frozen=True)
class Truth:
    """FP64 scores of a part of the documents, and `sum_i |Q_i| * max_j |D_j|` of each, both `[Nq, part]` (pairs: `[part]`)."""

    scores: Tensor
    scale: Tensor


def numbers(count: int) -> list[int]:
    """Which documents are checked."""
    half = PART // 2
    return list(range(count)) if count <= PART else [*range(half), *range(count - half, count)]


def part(documents: Documents, chosen: list[int]) -> Documents:
    """The documents `chosen`, held the same way, on the CPU."""
    if isinstance(documents, Tensor):
        return torch.stack([documents[n].cpu() for n in chosen])
    if isinstance(documents, Packed):
        return pack([documents[n].cpu() for n in chosen])
    codes, scales = part(documents.codes, chosen), _of_part(documents.scales.cpu(), documents, chosen)
    assert isinstance(codes, Tensor | Packed)
    if isinstance(documents, Fp8Tokens):
        return Fp8Tokens(codes, scales, documents.granularity)
    offset = None if documents.offset is None else _of_part(documents.offset.cpu(), documents, chosen)
    return Int8Tokens(codes, scales, offset, documents.granularity)


def _of_part(values: Tensor, documents: Int8Tokens | Fp8Tokens, chosen: list[int]) -> Tensor:
    """Scales or offsets of the documents `chosen`."""
    if documents.granularity == "corpus":
        return values
    if documents.granularity == "token" and isinstance(documents.codes, Packed):
        starts, lengths = documents.codes.starts.tolist(), documents.codes.lengths.tolist()
        return torch.cat([values[starts[n] : starts[n] + lengths[n]] for n in chosen])
    return torch.stack([values[n] for n in chosen])


def truth(queries: Tensor, documents: Documents, *, pairs: bool = False) -> Truth:
    """The truth for queries `[Nq, Lq, d]` and all `documents`; of quantised ones, for their codes and the queries' own."""
    chosen = numbers(len(documents))
    few = part(documents, chosen)
    queries = (queries[chosen] if pairs else queries).cpu()
    scores = maxsim_reference(queries, few, dtype=torch.float64, pairs=pairs)
    assert isinstance(scores, Tensor)
    plain = few.dequantize() if isinstance(few, Int8Tokens | Fp8Tokens) else few
    longest = torch.stack([plain[n].double().norm(dim=-1).max() for n in range(len(plain))])
    sums = queries.double().norm(dim=-1).sum(-1)
    return Truth(scores, sums * longest if pairs else sums[:, None] * longest)


def error(scores: Tensor, against: Truth, shape: tuple[int, ...]) -> float:
    """The largest error over `scale`; infinite where any score of any document is not finite.

    Args:
        scores: what a method returned, `shape` or a view of it.
        against: the truth of a part of the last axis.
        shape: `(Nq, N)`, or `(N,)` for pairs.
    """
    if scores.numel() != torch.Size(shape).numel():
        raise ValueError(f"scores: got {list(scores.shape)}, need {list(shape)}")
    scores = scores.reshape(shape)
    if not bool(torch.isfinite(scores).all()):
        return float("inf")
    few = scores[..., numbers(shape[-1])].double().cpu()
    return float(((few - against.scores).abs() / against.scale).max())
