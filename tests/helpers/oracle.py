"""Brute-force MaxSim from the contract's table: float64, one query token and one document at a time, nothing shared with the package.

`score(Q, D) = sum_i max_j <Q_i, D_j>` over valid tokens; a document without valid token gives -inf, a query without valid
token 0.0, NaN in a valid token NaN; argmax is the first index. Inputs may be tensors, `Packed`, `Int8Tokens`, `Fp8Tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxsim_kernels import Fp8Tokens, Int8Tokens, Packed

Key = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One query or one document: its tokens, which of them count, and where each stands in the caller's tensor."""

    tokens: np.ndarray  # float64 [L, d]
    valid: list[bool]
    where: list[Key]
    extra: np.ndarray  # float64 [L]: norm of an affine offset, which is added to the token's norm in the error bound


@dataclass(frozen=True)
class Truth:
    """What the contract says; `bound` is sum_i ||Q_i|| * max_j ||D_j|| of each score."""

    scores: np.ndarray  # float64, the result's shape
    argmax: np.ndarray  # int64, the result's shape + [longest query]
    bound: np.ndarray
    cells: dict[Key, tuple[Row, Row]]  # index of a score -> the query and the document behind it


def numbers(tensor: Tensor) -> np.ndarray:
    """Any tensor as float64."""
    return tensor.detach().to(torch.float64).numpy()


def dequantized(tokens: Int8Tokens | Fp8Tokens) -> tuple[np.ndarray, np.ndarray]:
    """`code * scale + offset` token by token in float64, and the norm of each token's offset part."""
    rows = tokens.codes if isinstance(tokens.codes, Packed) else None
    codes = numbers(tokens.codes.values if rows is not None else tokens.codes)
    scales = numbers(tokens.scales)
    offset = getattr(tokens, "offset", None)
    offsets = np.zeros_like(scales) if offset is None else numbers(offset)
    values, extra = np.zeros(codes.shape), np.zeros(codes.shape[:-1])
    owner = {}
    if rows is not None:
        for n, (start, length) in enumerate(zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True)):
            owner.update(dict.fromkeys(range(start, start + length), n))
    for token in np.ndindex(codes.shape[:-1]):
        if tokens.granularity == "token":
            at: Any = token
        elif tokens.granularity == "corpus":
            at = ()
        else:
            at = token[:-1] if rows is None else (owner.get(token[0], 0),)
        values[token] = codes[token] * scales[at] + offsets[at]
        extra[token] = abs(offsets[at]) * math.sqrt(codes.shape[-1])
    return values, extra


def rows(tokens: Any, mask: Tensor | None = None, lengths: Tensor | None = None) -> dict[Key, Row]:
    """Every query or document by its index: `()` for one matrix, `(n,)`, or `(i, n)` for per-query documents."""
    if isinstance(tokens, Int8Tokens | Fp8Tokens):
        values, extra = dequantized(tokens)
        ragged = tokens.codes if isinstance(tokens.codes, Packed) else None
    else:
        ragged = tokens if isinstance(tokens, Packed) else None
        values = numbers(ragged.values if ragged is not None else tokens)
        extra = np.zeros(values.shape[:-1])
    if ragged is not None:
        found = {}
        for n, (start, length) in enumerate(zip(ragged.starts.tolist(), ragged.lengths.tolist(), strict=True)):
            place = slice(start, start + length)
            found[(n,)] = Row(values[place], [True] * length, [(start + t,) for t in range(length)], extra[place])
        return found
    found = {}
    for index in np.ndindex(values.shape[:-2]):
        size = values.shape[-2]
        keep = [True] * size
        for t in range(size):
            if lengths is not None and t >= int(lengths.reshape(values.shape[:-2])[index]):
                keep[t] = False
            if mask is not None and not bool(mask[(*index, t)]):
                keep[t] = False
        found[index] = Row(values[index], keep, [(*index, t) for t in range(size)], extra[index])
    return found


def one(query: Row, document: Row) -> tuple[float, list[int], float]:
    """Score, argmax and error bound of one query against one document."""
    kept = np.flatnonzero(document.valid)
    tokens = document.tokens[kept]
    longest = float(np.fmax.reduce(np.sqrt(np.sum(tokens * tokens, axis=1)) + document.extra[kept], initial=0.0))
    score, argmax, size = 0.0, [-1] * len(query.tokens), 0.0
    for s, token in enumerate(query.tokens):
        if not query.valid[s]:
            continue
        best, products = -math.inf, np.sum(tokens * token, axis=1)
        if len(products):
            first = int(np.argmax(products))  # the first NaN, where there is one
            best, argmax[s] = float(products[first]), int(kept[first])
        score += best
        size += float(np.sqrt(np.sum(token * token)))
    return score, argmax, size * longest


def _collect(cells: dict[Key, tuple[Row, Row]], shape: Key, longest: int) -> Truth:
    scores, bound = np.zeros(shape), np.zeros(shape)
    argmax = np.full((*shape, longest), -1, dtype=np.int64)
    with np.errstate(all="ignore"):
        for index, (query, document) in cells.items():
            scores[index], chosen, bound[index] = one(query, document)
            argmax[index][: len(chosen)] = chosen
    return Truth(scores, argmax, bound, cells)


def maxsim(
    queries: Any,
    documents: Any,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    document_lengths: Tensor | None = None,
) -> Truth:
    """Every query with every document (shared) or with its own documents (`[Nq, B, Ld, d]`)."""
    asked = rows(queries, query_mask, query_lengths)
    found = rows(documents, document_mask, document_lengths)
    values = documents.token_values if isinstance(documents, Int8Tokens | Fp8Tokens) else documents
    own = not isinstance(values, Packed) and values.dim() == 4
    cells = {}
    for i, query in asked.items():
        for j, document in found.items():
            if own and j[:1] != i:
                continue
            cells[(*i, j[-1])] = (query, document)
    if own:
        shape: Key = tuple(values.shape[:2])
    else:
        shape = (*_leading(queries), len(found))
    return _collect(cells, shape, _longest(queries))


def pairs(
    queries: Any,
    documents: Any,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    document_lengths: Tensor | None = None,
) -> Truth:
    """Query n with document n."""
    asked = rows(queries, query_mask, query_lengths)
    found = rows(documents, document_mask, document_lengths)
    cells = {n: (asked[n], found[n]) for n in asked}
    return _collect(cells, (len(found),), _longest(queries))


def _leading(queries: Any) -> Key:
    return (len(queries),) if isinstance(queries, Packed) else tuple(queries.shape[:-2])


def _longest(queries: Any) -> int:
    if isinstance(queries, Packed):
        return max(queries.lengths.tolist(), default=0)
    return int(queries.shape[-2])


def gradients(queries: Any, documents: Any, truth: Truth, upstream: Tensor) -> tuple[np.ndarray, ...]:
    """dQ[i,s] = sum_j g[i,j] D[j,t*] and dD[j,t] = sum g[i,j] Q[i,s], then the same sums of absolute values (for bounds)."""
    q_shape = queries.values.shape if isinstance(queries, Packed) else queries.shape
    d_shape = documents.values.shape if isinstance(documents, Packed) else documents.shape
    dq, dd, dq_size, dd_size = (np.zeros(tuple(shape)) for shape in (q_shape, d_shape, q_shape, d_shape))
    g = numbers(upstream)
    for index, (query, document) in truth.cells.items():
        for s in range(len(query.tokens)):
            t = int(truth.argmax[index][s])
            if t < 0:
                continue
            dq[query.where[s]] += g[index] * document.tokens[t]
            dd[document.where[t]] += g[index] * query.tokens[s]
            dq_size[query.where[s]] += np.abs(g[index] * document.tokens[t])
            dd_size[document.where[t]] += np.abs(g[index] * query.tokens[s])
    return dq, dd, dq_size, dd_size


def check(scores: Tensor, truth: Truth, tolerance: float | None = None, dtype: torch.dtype = torch.float32) -> None:
    """Scores against the truth: exactly (`tolerance=None`, grid inputs) or within `tolerance * bound`."""
    assert isinstance(scores, Tensor), f"scores: got {type(scores).__name__}"
    assert scores.dtype == dtype, f"scores: {scores.dtype}, need {dtype}"
    assert tuple(scores.shape) == truth.scores.shape, f"shape {tuple(scores.shape)}, need {truth.scores.shape}"
    got, need = numbers(scores), truth.scores
    with np.errstate(all="ignore"):
        special = ~np.isfinite(need)
        same = np.where(special, (got == need) | (np.isnan(got) & np.isnan(need)), True)
        if tolerance is None:
            close = np.where(special, True, got == need)
        else:
            close = np.where(special, True, np.abs(got - need) <= tolerance * truth.bound)
    wrong = np.argwhere(~(same & close))
    if len(wrong):
        first = tuple(int(n) for n in wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {need.size} scores wrong; first at {first}: got {got[first]!r}, need {need[first]!r}, "
            f"allowed {0.0 if tolerance is None else tolerance * truth.bound[first]!r}"
        )


def check_argmax(argmax: Tensor, truth: Truth, tolerance: float | None = None) -> None:
    """Argmax against the truth: exactly, or as good as the best within the bound; the first NaN where there is one."""
    assert argmax.dtype == torch.int32, f"argmax: {argmax.dtype}, need int32"
    assert tuple(argmax.shape) == truth.argmax.shape, f"shape {tuple(argmax.shape)}, need {truth.argmax.shape}"
    for index, s, need in _positions(truth):
        got = int(argmax[(*index, s)])
        if got == need:
            continue
        at = f"argmax[{', '.join(map(str, (*index, s)))}]: got {got}, need {need}"
        query, document = truth.cells.get(index, (None, None))
        if query is None or document is None or need < 0 or not 0 <= got < len(document.tokens):
            raise AssertionError(at)
        with np.errstate(all="ignore"):
            best = float(query.tokens[s] @ document.tokens[need])
        if math.isnan(best):
            raise AssertionError(at)
        allowed = 0.0 if tolerance is None else tolerance * float(np.linalg.norm(query.tokens[s])) * _longest_token(document)
        if tolerance is None or not document.valid[got] or best - float(query.tokens[s] @ document.tokens[got]) > allowed:
            raise AssertionError(at)


def _positions(truth: Truth) -> Iterator[tuple[Key, int, int]]:
    for index in np.ndindex(truth.argmax.shape):
        yield index[:-1], index[-1], int(truth.argmax[index])


def _longest_token(document: Row) -> float:
    norms = [float(np.linalg.norm(token)) for token, keep in zip(document.tokens, document.valid, strict=True) if keep]
    return max(norms, default=0.0)


def chamfer(p: Tensor, q: Tensor) -> tuple[float, np.ndarray, np.ndarray]:
    """Mean over p of the smallest squared distance to q plus the same from q, and its gradients; first index on ties."""
    a, b = numbers(p), numbers(q)
    da, db, total = np.zeros_like(a), np.zeros_like(b), 0.0
    for one_side, other, d_one, d_other in ((a, b, da, db), (b, a, db, da)):
        for i, point in enumerate(one_side):
            distances = [float(np.sum((point - target) ** 2)) for target in other]
            if any(math.isnan(distance) for distance in distances):
                total = math.nan
                continue
            j = distances.index(min(distances))
            total += distances[j] / len(one_side)
            d_one[i] += 2 * (point - other[j]) / len(one_side)
            d_other[j] += 2 * (other[j] - point) / len(one_side)
    return total, da, db
