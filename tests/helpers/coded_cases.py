"""Makers and truth of `BitTokens` and `ResidualTokens`: codes packed by arithmetic, decoded and scored in float64, a document at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maxsim_kernels import BitTokens, Packed, ResidualTokens, maxsim, maxsim_pairs, quantize_int8

SCORE = 2e-6  # of sum_i ||Q_i|| * max_j ||D_j||: the contract's (docs/kernels.md)
LENGTHS = (3, 0, 31, 1, 7, 100, 63, 0)


def pack(codes: Tensor, bits: int) -> Tensor:
    """`[T, d]` codes as bytes: base-2**bits digits, the first one the largest."""
    each = 8 // bits
    digits = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % each)).unflatten(1, (-1, each))
    return (digits * (2**bits) ** torch.arange(each - 1, -1, -1, device=codes.device)).sum(-1).to(torch.uint8)


def digits_of(packed: Tensor, dim: int, bits: int) -> Tensor:
    """The codes `[T, dim]`, int64."""
    each = 8 // bits
    powers = (2**bits) ** torch.arange(each - 1, -1, -1, device=packed.device)
    return (packed.long()[:, :, None] // powers % 2**bits).flatten(1)[:, :dim]


def coded(
    kind: str, bits: int, dim: int, lengths: Sequence[int] = LENGTHS, *, device: str = "cpu", seed: int = 0, centroids: int = 9
) -> BitTokens | ResidualTokens:
    """Random tokens: `kind` is "bits", "unit" (residuals at length 1) or "free"."""
    random = torch.Generator("cpu").manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total = int(offsets[-1])
    codes = torch.randint(0, 2**bits, (total, dim), generator=random)
    packed = Packed(pack(codes, bits), offsets)
    if kind == "bits":
        scales = (torch.rand(total, generator=random) + 0.01).half()
        return BitTokens(packed, scales, bits, dim).to(device)
    ids = torch.randint(0, centroids, (total,), generator=random).to(torch.uint16)
    tables = torch.randn(centroids, dim, generator=random), torch.randn(2**bits, generator=random) * 0.3
    return ResidualTokens(packed, ids, *tables, unit=kind == "unit").to(device)


def few_bits(documents: Packed, kind: str, bits: int) -> BitTokens | ResidualTokens:
    """Codes of some tokens end to end: "bits" with a scale that fits each token, "residual" or "unit" about a few of the tokens."""
    values = documents.values.float()
    sound = values.nan_to_num(0.0, 3e38, -3e38).double()
    most = 2**bits - 1
    if kind == "bits":
        scales = values.abs().amax(1) / most if len(values) else values.new_zeros(0)
        codes = ((sound / scales.double().clamp(min=1e-300)[:, None]).nan_to_num(0.0) + most).div(2).round().clamp(0, most)
        return BitTokens(documents.with_values(pack(codes, bits)), scales, bits, documents.dim)
    centroids = values[:: max(1, len(values) // 5)] if len(values) else torch.zeros(1, documents.dim)
    ids = torch.cdist(sound, centroids.nan_to_num(0.0).double()).argmin(1) if len(values) else torch.zeros(0, dtype=torch.int64)
    apart = (sound - centroids[ids].nan_to_num(0.0)).clamp(-3e38, 3e38)
    width = float(apart.std()) if apart.numel() > 1 else 1.0
    weights = (torch.linspace(-1.5, 1.5, 2**bits) * width).clamp(-3e38, 3e38)
    codes = (apart[:, :, None] - weights.double()).abs().argmin(2)
    packed = documents.with_values(pack(codes, bits))
    return ResidualTokens(packed, ids, centroids.contiguous(), weights, unit=kind == "unit")


def values_of(documents: BitTokens | ResidualTokens, rounded: torch.dtype | None = None) -> Tensor:
    """Decoded tokens `[T, d]` float64; `rounded`: residuals rounded to it before they are brought to length 1, as the kernel does."""
    digits = digits_of(documents.codes.values, documents.dim, documents.bits)
    if isinstance(documents, BitTokens):
        return (2 * digits - (2**documents.bits - 1)).double() * documents.scales.double()[:, None]
    exact = documents.centroids[documents.ids.long()].float() + documents.weights[digits]
    length = exact.double().norm(dim=1, keepdim=True).clamp_min(1e-12) if documents.unit else 1.0
    return (exact if rounded is None else exact.to(rounded)).double() / length


def tokens_of(queries: Any, mask: Tensor | None, lengths: Tensor | None) -> list[Tensor]:
    """The valid tokens of every query."""
    if isinstance(queries, Packed):
        return [queries[n] for n in range(len(queries))]
    queries = queries.unsqueeze(0) if queries.dim() == 2 else queries
    keep = torch.ones(queries.shape[:2], dtype=torch.bool, device=queries.device)
    if mask is not None:
        keep &= mask.reshape(keep.shape) != 0
    if lengths is not None:
        keep &= torch.arange(queries.shape[1], device=queries.device) < lengths.reshape(-1, 1)
    return [tokens[valid] for tokens, valid in zip(queries, keep, strict=True)]


def truth(
    queries: Any, documents: BitTokens | ResidualTokens, *, quantize_queries: bool = True, pairs: bool = False,
    rounded: torch.dtype | None = None, query_mask: Tensor | None = None, query_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores and what the error is measured by, float64."""
    asked = [tokens.double() for tokens in tokens_of(queries, query_mask, query_lengths)]
    if quantize_queries and isinstance(documents, BitTokens):
        given = tokens_of(queries, query_mask, query_lengths)
        asked = [quantize_int8(tokens, "token").dequantize().double() if len(tokens) else tokens.double() for tokens in given]
    decoded = values_of(documents, rounded)
    starts, lengths = documents.codes.starts.tolist(), documents.codes.lengths.tolist()
    held = [decoded[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    cells = [
        [_one(query, document) for document in ([held[n]] if pairs else held)] for n, query in enumerate(asked)
    ]  # score and bound of each
    found = torch.tensor(cells, dtype=torch.float64, device=documents.device).reshape(len(asked), 1 if pairs else len(held), 2)
    if pairs or (isinstance(queries, Tensor) and queries.dim() == 2):
        found = found[:, 0] if pairs else found[0]
    return found[..., 0], found[..., 1]


def _one(query: Tensor, document: Tensor) -> tuple[float, float]:
    if not len(query):
        return 0.0, 0.0
    if not len(document):
        return -torch.inf, 0.0
    bound = float(query.norm(dim=1).sum() * document.norm(dim=1).max())
    return float((query @ document.T).amax(1).sum()), bound


def check(scores: Tensor, need: Tensor, bound: Tensor, tolerance: float = SCORE) -> None:
    """Scores within the tolerance; NaN and infinities where the truth has them."""
    assert scores.dtype == torch.float32
    assert scores.shape == need.shape
    allowed = tolerance * bound.nan_to_num(0.0, 0.0, 0.0) + 1e-12
    got = scores.double()
    good = torch.where(need.isfinite(), (got - need).abs() <= allowed, (got == need) | (got.isnan() & need.isnan()))
    assert bool(good.all()), (
        f"{(~good).nonzero()[:3].tolist()}: got {got[~good][:3]}, need {need[~good][:3]}, {allowed[~good][:3]}"
    )


def agree(
    queries: Any, documents: BitTokens | ResidualTokens, *, pairs: bool = False, impl: str = "auto", **options: Any
) -> Tensor:
    """Call the operator, compare it with the truth, return its scores.

    On a GPU residuals are rounded to the queries' dtype, elsewhere decoded in FP32.
    """
    scores: Any = (maxsim_pairs if pairs else maxsim)(queries, documents, impl=impl, **options)
    rounded = queries.dtype if documents.device.type == "cuda" and impl != "reference" else None
    check(scores, *truth(queries, documents, pairs=pairs, rounded=rounded, **options))
    return scores
