"""MaxSim from the contract's table as one float64 product per block of documents, on the inputs' device; and the checks against it.

Shares nothing with the package but its token types (queries are quantised by the public functions, whose own tests check them).
`test_gpu_dense.py` compares it once with `maxsim_reference` for every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maxsim_kernels import Fp8Tokens, Int8Tokens, Packed, maxsim, maxsim_pairs, quantize_fp8, quantize_int8

# The contract's bound, times sum_i ||Q_i|| * max_j ||D_j||; the reasons stand in tolerances.py (SCORE).
SCORE = 2e-6
# FP8 tensor cores keep about 13 bits behind the largest number of a group of 32 products (Hopper), not full FP32, and cut off what is
# below, of the sum so far and of each product. Of random tokens this is less than 2^-13 of ||q|| * ||d|| for every 32 of d; the contract
# allows four times that (docs/kernels.md), of which lexical tokens take 2.25.
SCORE_FP8 = 2.0**-13


_CELLS = 2**26  # float64 cells at a time: half a gigabyte


@dataclass(frozen=True)
class Side:
    """Queries `[1, n, L, d]` or documents `[G, n, L, d]` (G = 1: shared), invalid tokens 0."""

    tokens: Tensor
    valid: Tensor  # bool [G, n, L]
    norms: Tensor  # [G, n, L]: what a token adds to the error bound


@dataclass(frozen=True)
class Truth:
    """What the contract says, float64. `best` and `argmax` are per query token, `limit` its part of `bound`."""

    scores: Tensor  # [Nq, N] or [N]
    bound: Tensor  # the same shape: sum_i ||Q_i|| * max_j ||D_j||
    best: Tensor  # [..., Lq]
    argmax: Tensor  # [..., Lq]: first index of the maximum, -1 where there is none, -2 where the maximum is NaN
    limit: Tensor  # [..., Lq]: ||Q_i|| * max_j ||D_j||
    queries: Side
    documents: Side
    pairs: bool
    single: bool


def _valid(shape: tuple[int, ...], mask: Tensor | None, lengths: Tensor | None, device: torch.device) -> Tensor:
    keep = torch.ones(shape, dtype=torch.bool, device=device)
    if mask is not None:
        keep &= mask.reshape(shape) != 0
    if lengths is not None:
        keep &= torch.arange(shape[-1], device=device) < lengths.reshape(shape[:-1]).unsqueeze(-1)
    return keep


def _ragged(rows: Packed) -> tuple[Tensor, Tensor]:
    """Token numbers and validity `[n, longest]`; rows that leave the buffer end where it ends."""
    starts, lengths, total = rows.starts.long(), rows.lengths.long(), rows.values.shape[0]
    longest = int(torch.minimum(lengths, total - starts).clamp(min=0).max()) if len(rows) else 0
    place = torch.arange(longest, device=rows.device)
    index = starts[:, None] + place
    keep = (place < lengths[:, None]) & (index < total)
    return torch.where(keep, index, torch.zeros_like(index)), keep


def _parts(tokens: Any) -> tuple[Any, Callable[[Tensor], Tensor] | None, Callable[[Tensor], Tensor] | None]:
    """Stored values (tensor or `Packed`), and how scales and offsets spread over `[..., L]` (None: there are none)."""
    if not isinstance(tokens, Int8Tokens | Fp8Tokens):
        return tokens, None, None

    def spread(numbers: Tensor) -> Callable[[Tensor], Tensor]:
        wide = numbers.double()
        if tokens.granularity == "corpus":
            return lambda index: wide.expand(index.shape)
        if tokens.granularity == "token":
            return lambda index: wide.reshape(-1)[index]
        return lambda index: wide.unsqueeze(-1).expand(index.shape)

    offset = getattr(tokens, "offset", None)
    return tokens.codes, spread(tokens.scales), None if offset is None else spread(offset)


def side(tokens: Any, mask: Tensor | None = None, lengths: Tensor | None = None, *, pairs: bool = False) -> Side:
    """Any tokens as float64, padded, with their validity."""
    stored, scale, offset = _parts(tokens)
    if isinstance(stored, Packed):
        index, keep = _ragged(stored)
        values = stored.values.double()[index] if index.numel() else stored.values.new_zeros(*index.shape, stored.dim).double()
    else:
        values = stored.double()
        keep = _valid(tuple(stored.shape[:-1]), mask, lengths, stored.device)
        index = torch.arange(keep.numel(), device=stored.device).view(keep.shape)
    values = values.masked_fill(~keep.unsqueeze(-1), 0.0)
    norms = values.norm(dim=-1)
    if scale is not None:
        factor = scale(index).masked_fill(~keep, 0.0)
        values, norms = values * factor.unsqueeze(-1), norms * factor.abs()
    if offset is not None:
        added = offset(index).masked_fill(~keep, 0.0)
        values, norms = values + added.unsqueeze(-1), norms + added.abs() * math.sqrt(values.shape[-1])
    if pairs:
        values, keep, norms = values.unsqueeze(1), keep.unsqueeze(1), norms.unsqueeze(1)
    elif values.dim() == 3:
        values, keep, norms = values.unsqueeze(0), keep.unsqueeze(0), norms.unsqueeze(0)
    if values.shape[2] == 0:  # one invalid token, so that maxima exist
        values = values.new_zeros(*values.shape[:2], 1, values.shape[3])
        keep, norms = keep.new_zeros(values.shape[:3]), norms.new_zeros(values.shape[:3])
    return Side(values, keep, norms)


def _query_side(queries: Any, documents: Any, quantize: bool, mask: Tensor | None, lengths: Tensor | None) -> Side:
    if quantize and isinstance(documents, Int8Tokens | Fp8Tokens):
        how = quantize_fp8 if isinstance(documents, Fp8Tokens) else quantize_int8
        queries = how(queries, "token", mask=mask, lengths=lengths)
    return side(queries, mask, lengths)


def oracle(
    queries: Any,
    documents: Any,
    *,
    pairs: bool = False,
    quantize_queries: bool = True,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    document_lengths: Tensor | None = None,
) -> Truth:
    """Truth of a call of `maxsim` (`pairs=True`: of `maxsim_pairs`)."""
    single = isinstance(queries, Tensor) and queries.dim() == 2
    if single:
        queries = queries.unsqueeze(0)
        query_mask = None if query_mask is None else query_mask.unsqueeze(0)
        query_lengths = None if query_lengths is None else query_lengths.unsqueeze(0)
    width = int(queries.lengths.max()) if isinstance(queries, Packed) and len(queries) else None
    width = width if width is not None else (0 if isinstance(queries, Packed) else queries.shape[1])
    asked = _query_side(queries, documents, quantize_queries, query_mask, query_lengths)
    found = side(documents, document_mask, document_lengths, pairs=pairs)
    count, total, rows = asked.tokens.shape[1], found.tokens.shape[1], asked.tokens.shape[2]
    longest = found.norms.amax(-1).expand(count, total)
    best = found.tokens.new_empty(count, total, rows)
    argmax = torch.empty(count, total, rows, dtype=torch.int64, device=best.device)
    step = max(1, _CELLS // max(1, count * rows * found.tokens.shape[2]))
    for begin in range(0, total if count else 0, step):
        part = slice(begin, begin + step)
        best[:, part], argmax[:, part] = _winners(asked, found, part)
    counted = asked.valid[0].unsqueeze(1)
    scores = torch.where(counted, best, torch.zeros_like(best)).sum(-1)
    # A query token that does not count adds nothing to the bound, not even where a document holds NaN.
    limit = (asked.norms[0].unsqueeze(1) * longest.unsqueeze(-1)).where(counted, 0.0)
    nothing = ~counted | ~found.valid.any(-1).expand(count, total).unsqueeze(-1)
    argmax = argmax.masked_fill(nothing, -1)[..., :width]
    best, limit = best[..., :width], limit[..., :width]
    bound = limit.sum(-1)
    if pairs or single:
        along = 1 if pairs else 0
        scores, bound = scores.select(along, 0), bound.select(along, 0)
        best, argmax, limit = (x.select(along, 0) for x in (best, argmax, limit))
    return Truth(scores, bound, best, argmax, limit, asked, found, pairs, single)


def _winners(queries: Side, documents: Side, part: slice) -> tuple[Tensor, Tensor]:
    """Maximum and its first index `[Nq, n, Lq]` over the tokens of the documents in `part`."""
    tokens, valid = documents.tokens[:, part], documents.valid[:, part]
    rows = queries.tokens[0]
    groups, n, size, d = tokens.shape
    if groups == 1:
        cells = (rows.reshape(-1, d) @ tokens.reshape(-1, d).T).view(*rows.shape[:2], n, size).transpose(1, 2)
    else:
        cells = torch.einsum("qld,qntd->qnlt", rows, tokens)
    cells = cells.masked_fill(~valid.unsqueeze(2), -torch.inf)
    best = cells.amax(-1)
    place = torch.arange(size, device=cells.device)
    wins = ((cells == best.unsqueeze(-1)) | cells.isnan()) & valid.unsqueeze(2)
    return best, torch.where(wins, place, place.new_full((), size)).amin(-1)


def check_scores(scores: Tensor, truth: Truth, tolerance: float | None = SCORE) -> None:
    """Scores within `tolerance * bound` of the truth (None: equal); infinities and NaN exactly where the truth has them."""
    assert isinstance(scores, Tensor), f"scores: got {type(scores).__name__}"
    assert scores.dtype == torch.float32, f"scores: {scores.dtype}"
    assert scores.shape == truth.scores.shape, f"shape {list(scores.shape)}, need {list(truth.scores.shape)}"
    assert scores.device == truth.scores.device, f"scores on {scores.device}"
    got, need = scores.double(), truth.scores
    allowed = torch.zeros_like(need) if tolerance is None else tolerance * truth.bound
    close = torch.where(need.isfinite(), (got - need).abs() <= allowed, (got == need) | (got.isnan() & need.isnan()))
    _refuse(~close, lambda at: f"got {got[at].item()!r}, need {need[at].item()!r} within {allowed[at].item():.3g}")


def check_argmax(argmax: Tensor, truth: Truth, tolerance: float | None = SCORE) -> None:
    """Argmax as good as the best cell (None: the first best cell), the first NaN, -1 where the contract says so."""
    assert argmax.dtype == torch.int32, f"argmax: {argmax.dtype}"
    assert argmax.shape == truth.argmax.shape, f"shape {list(argmax.shape)}, need {list(truth.argmax.shape)}"
    got, need = argmax.long(), truth.argmax
    good = got == need
    if tolerance is not None and need.numel():
        # Each of two cells may be off by the bound when the kernel compares them.
        good |= (need >= 0) & (truth.best - _chosen(got, truth) <= 2 * tolerance * truth.limit)
    _refuse(~good, lambda at: f"argmax: got {got[at].item()}, need {need[at].item()}")


def _chosen(argmax: Tensor, truth: Truth) -> Tensor:
    """Exact product at the chosen cells; -inf where the choice is no valid token."""
    index = argmax.unsqueeze(1) if truth.pairs else argmax.unsqueeze(0) if truth.single else argmax
    documents, rows = truth.documents, truth.queries.tokens[0][:, : index.shape[-1]]
    count, total, width = index.shape
    size, d = documents.tokens.shape[2:]
    outside = (index < 0) | (index >= size)
    place = index.clamp(0, size - 1)
    valid = documents.valid.expand(count, total, size).gather(2, place) & ~outside
    tokens = documents.tokens.expand(count, total, size, d).gather(2, place.unsqueeze(-1).expand(count, total, width, d))
    products = torch.einsum("qld,qnld->qnl", rows, tokens).masked_fill(~valid, -torch.inf)
    return products.view(truth.best.shape)


def _refuse(wrong: Tensor, describe: Callable[[tuple[int, ...]], str]) -> None:
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(f"{int(wrong.sum())} of {wrong.numel()} wrong; first at {first}: {describe(first)}")


def tolerance_of(documents: Any) -> float:
    """What a score may be off by: the contract's factor, for FP8 that of random tokens."""
    return SCORE_FP8 * math.ceil(documents.dim / 32) if isinstance(documents, Fp8Tokens) else SCORE


def agree(
    queries: Any,
    documents: Any,
    *,
    pairs: bool = False,
    return_argmax: bool = False,
    exact: bool = False,
    **options: Any,
) -> Tensor:
    """Call the operator, compare it with the truth (`exact`: bit for bit and the first index among ties), return its scores."""
    function = maxsim_pairs if pairs else maxsim
    result: Any = function(queries, documents, return_argmax=return_argmax, **options)
    truth = oracle(queries, documents, pairs=pairs, **options)
    tolerance = None if exact else tolerance_of(documents)
    scores: Tensor = result[0] if return_argmax else result
    check_scores(scores, truth, tolerance)
    if return_argmax:
        check_argmax(result[1], truth, tolerance)
    return scores


def same_ranking(scores: Tensor, truth: Truth, k: int, tolerance: float = SCORE) -> None:
    """The first `k` documents of each query are the truth's, in its order, but for swaps inside twice the bound."""
    got = torch.sort(scores.double(), dim=-1, descending=True, stable=True).indices[..., :k]
    need = torch.sort(truth.scores, dim=-1, descending=True, stable=True).indices[..., :k]
    apart = (truth.scores.gather(-1, got) - truth.scores.gather(-1, need)).abs()
    allowed = 2 * tolerance * torch.maximum(truth.bound.gather(-1, got), truth.bound.gather(-1, need))
    _refuse((got != need) & (apart > allowed), lambda at: f"rank {at[-1]}: document {got[at].item()}, need {need[at].item()}")
