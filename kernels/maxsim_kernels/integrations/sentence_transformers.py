"""sentence-transformers 6: `util.similarity`, the scorings of `multi_vector_encoder`, and with them its losses and evaluators.

Rules of the library that hold here: a float32 result on the documents' device; `[L, d]` is one item; lists of `[L, d]`; masks of any
dtype, a query's multiplies its maxima (bool: excludes), a document's excludes; without a mask, all-zero rows are padding; a document
without tokens scores the library's own low value and warns as there. What the operator does not take (float64, integers, arrays, a list
with a mask, weights of query tokens that want a gradient or, on CPUs, are negative, another device's tensors) runs the library's own
code. On GPUs, where reading weights would wait, negative ones give other scores than the library's.

The functions need no `enable`: `similarity_fct=maxsim_kernels.integrations.sentence_transformers.colbert_scores`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from maxsim_kernels.integrations import calls
from maxsim_kernels.integrations.patching import Library, Target
from maxsim_kernels.tokens import Packed, joined

_SIMILARITY = "sentence_transformers.util.similarity"
_SCORING = "sentence_transformers.multi_vector_encoder.scoring.colbert"
_SCORE = "(a, b, a_mask=None, b_mask=None, chunk_elements=None, length_normalize=False, device=None)"
_SIDES = "queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None"
_GROUPS = f"({_SIDES}, chunk_elements=None, length_normalize=False)"
LIBRARY = Library(
    "sentence-transformers",
    "sentence_transformers",
    ("6.0", "6.1", "6.2"),
    (
        Target(_SIMILARITY, "maxsim", _SCORE),
        Target(_SIMILARITY, "maxsim_pairwise", _SCORE),
        Target(_SIMILARITY, "_maxsim_score_documents", "(a, b, a_mask, b_mask)"),
        Target(_SIMILARITY, "_maxsim_score_pairs", "(a, b, a_mask, b_mask)"),
        Target(_SCORING, "colbert_scores", _GROUPS),
        Target(_SCORING, "colbert_kd_scores", _GROUPS),
        Target(_SCORING, "colbert_scores_pairwise", _GROUPS, replaced=False),
        Target(_SIMILARITY, "_fill_empty_document_scores", "(scores, empty)", replaced=False),
        Target(_SIMILARITY, "_query_token_counts", "(a, a_mask)", replaced=False),
    ),
)


class _Side(NamedTuple):
    """Queries or documents as the operator takes them. A list in `tokens`, with items of `lengths`, is yet to be packed."""

    tokens: Tensor | list[Tensor]
    mask: Tensor | None
    lengths: list[int] | None = None


def maxsim(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: Any = None,
) -> Tensor:
    """`sentence_transformers.util.maxsim`: every query `a` with every document `b`, `[Na, Nb]` float32."""
    sides = _both(_asked(a, a_mask), _side(b, b_mask), device)
    if isinstance(sides, str):
        return calls.theirs(LIBRARY, "maxsim", sides, (a, b, a_mask, b_mask, chunk_elements, length_normalize, device))
    calls.count(LIBRARY, "maxsim")
    scores = _all(*sides, chunk_elements)
    return _normalized(scores, sides[0]) if length_normalize else scores


def maxsim_pairwise(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: Any = None,
) -> Tensor:
    """`sentence_transformers.util.maxsim_pairwise`: query n of `a` with document n of `b`, `[N]` float32."""
    sides = _both(_asked(a, a_mask), _side(b, b_mask), device, equal=True)
    if isinstance(sides, str):
        return calls.theirs(LIBRARY, "maxsim_pairwise", sides, (a, b, a_mask, b_mask, chunk_elements, length_normalize, device))
    calls.count(LIBRARY, "maxsim_pairwise")
    scores = _pairs(*sides, chunk_elements)
    return _normalized(scores, sides[0]) if length_normalize else scores


def colbert_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """`multi_vector_encoder.scoring.colbert_scores`: every query with the documents of every group, `[Q, G * N]` float32.

    Groups `[G, N, Ld, d]` are scored in one call, where the library scores a column of groups at a time.
    """
    groups, mask = documents_embeddings, documents_mask
    flat = isinstance(groups, Tensor) and groups.dim() == 4 and groups.shape[0] and groups.shape[1]
    if not (flat and _fits(mask, groups)):
        given = (queries_embeddings, groups, queries_mask, mask, chunk_elements, length_normalize)
        return calls.theirs(LIBRARY, "colbert_scores", "groups of documents that are no [G, N, Ld, d] tensor", given)
    flat_mask = None if mask is None else mask.flatten(0, 1)
    return maxsim(queries_embeddings, groups.flatten(0, 1), queries_mask, flat_mask, chunk_elements, length_normalize)


def colbert_kd_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """`multi_vector_encoder.scoring.colbert_kd_scores`: every query with its own candidates `[Q, K, Ld, d]`, `[Q, K]` float32."""
    sides = _both(_asked(queries_embeddings, queries_mask), _side(documents_embeddings, documents_mask, dims=4), equal=True)
    if isinstance(sides, str):
        given = (queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements, length_normalize)
        return calls.theirs(LIBRARY, "colbert_kd_scores", sides, given)
    calls.count(LIBRARY, "colbert_kd_scores")
    scores = _scored(*sides)
    return _normalized(scores, sides[0]) if length_normalize else scores


def colbert_scores_pairwise(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """`multi_vector_encoder.scoring.colbert_scores_pairwise`: `maxsim_pairwise` by the losses' keywords."""
    return maxsim_pairwise(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements, length_normalize
    )


def _score_documents(a: Tensor, b: Tensor, a_mask: Tensor | None, b_mask: Tensor | None) -> Tensor:
    """What the library's own `maxsim` calls for one chunk: `[Na, Nb]` float32; no mask means that every token counts."""
    return _chunk("_maxsim_score_documents", a, b, a_mask, b_mask, pairs=False)


def _score_pairs(a: Tensor, b: Tensor, a_mask: Tensor | None, b_mask: Tensor | None) -> Tensor:
    """The same for `maxsim_pairwise`: `[N]` float32."""
    return _chunk("_maxsim_score_pairs", a, b, a_mask, b_mask, pairs=True)


def _chunk(name: str, a: Tensor, b: Tensor, a_mask: Tensor | None, b_mask: Tensor | None, pairs: bool) -> Tensor:
    # Where a call was left to the library's own `maxsim`, that comes here with whatever it was given.
    shaped = a.dim() == b.dim() == 3 and _fits(a_mask, a) and _fits(b_mask, b)
    reason = (calls.untaken(a, b) or _unweighed(a_mask)) if shaped else "tokens or a mask of another shape"
    if reason:
        return calls.theirs(LIBRARY, name, reason, (a, b, a_mask, b_mask))
    calls.count(LIBRARY, name)
    return _scored(_Side(a, a_mask), _Side(b, b_mask), pairs=pairs)


REPLACEMENTS = {
    "maxsim": maxsim,
    "maxsim_pairwise": maxsim_pairwise,
    "_maxsim_score_documents": _score_documents,
    "_maxsim_score_pairs": _score_pairs,
    "colbert_scores": colbert_scores,
    "colbert_kd_scores": colbert_kd_scores,
}


def _asked(tokens: Any, mask: Any) -> _Side | None:
    """The queries' side. Rows of zeros add nothing to a score: only gradients have to know that they are padding."""
    if mask is None and isinstance(tokens, Tensor) and not (torch.is_grad_enabled() and tokens.requires_grad):
        tokens = tokens.unsqueeze(0) if tokens.dim() == 2 else tokens
        return _Side(tokens, None) if tokens.dim() == 3 and tokens.is_floating_point() else None
    return _side(tokens, mask)


def _side(tokens: Any, mask: Any, dims: int = 3) -> _Side | None:
    """One side as the library reads it, or None where the library's own code should."""
    if isinstance(tokens, Tensor):
        if tokens.dim() == 2 and dims == 3:
            tokens = tokens.unsqueeze(0)
            mask = mask.unsqueeze(0) if isinstance(mask, Tensor) and mask.dim() == 1 else mask
        if tokens.dim() != dims or not tokens.is_floating_point() or not _fits(mask, tokens):
            return None
        return _Side(tokens, calls.used_tokens(tokens) if mask is None else mask)
    lengths = calls.list_lengths(tokens) if dims == 3 and mask is None else None
    return None if lengths is None else _Side(tokens, None, lengths)


def _fits(mask: Any, tokens: Tensor) -> bool:
    return mask is None or (isinstance(mask, Tensor) and mask.shape == tokens.shape[:-1] and mask.device == tokens.device)


def _both(
    queries: _Side | None, documents: _Side | None, device: Any = None, *, equal: bool = False
) -> tuple[_Side, _Side] | str:
    """Both sides, or why the call is left to the library."""
    if queries is None or documents is None:
        return "arrays, integers, lists of several kinds, or masks of another shape"
    if equal and len(queries.tokens) != len(documents.tokens):
        return "queries and documents of different counts"
    first, second = _sample(queries), _sample(documents)
    reason = calls.untaken(first, second) or _unweighed(queries.mask)
    if not reason and device is not None and torch.device(device) != second.device:
        reason = "scoring on another device"
    return reason or (queries, documents)


def _unweighed(weights: Tensor | None) -> str:
    """Why weights of query tokens are left to the library; empty where multiplying tokens by them multiplies their maxima."""
    if weights is None or weights.dtype == torch.bool:
        return ""
    if weights.requires_grad and torch.is_grad_enabled():
        # The gradient is the token's maximum, which is lost where a weight of 0 makes the token zeros.
        return "weights of query tokens that want a gradient"
    if weights.is_complex():
        return "complex weights of query tokens"
    if weights.device.type == "cpu" and not torch.compiler.is_compiling() and bool((weights < 0).any()):
        return "negative weights of query tokens"
    return ""


def _sample(side: _Side) -> Tensor:
    """A tensor that has the side's dtype, device and width, and is empty only where the side is."""
    if isinstance(side.tokens, Tensor):
        return side.tokens
    return next((item for item in side.tokens if item.numel()), side.tokens[0])


def _all(queries: _Side, documents: _Side, chunk_elements: int | None) -> Tensor:
    """Every query with every document; of a list, a chunk of documents is packed at a time."""
    ready = _asking(queries)
    parts = [_scored_with(ready, part) for part in _chunks(documents, chunk_elements)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _pairs(queries: _Side, documents: _Side, chunk_elements: int | None) -> Tensor:
    limit = min(chunk_elements or calls.CHUNK, calls.CHUNK)
    if queries.lengths is None and documents.lengths is None:
        return _scored(queries, documents, pairs=True)
    lengths = [sum(pair) for pair in zip(_sizes(queries), _sizes(documents), strict=True)]
    runs = calls.slices(lengths, _sample(documents).shape[-1], limit)
    parts = [_scored(_part(queries, run), _part(documents, run), pairs=True) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _chunks(documents: _Side, chunk_elements: int | None) -> list[_Side]:
    if documents.lengths is None:
        return [documents]
    limit = min(chunk_elements or calls.CHUNK, calls.CHUNK)
    return [_part(documents, run) for run in calls.slices(documents.lengths, _sample(documents).shape[-1], limit)]


def _sizes(side: _Side) -> list[int]:
    if side.lengths is not None:
        return side.lengths
    assert isinstance(side.tokens, Tensor)
    return [side.tokens.shape[1]] * len(side.tokens)


def _part(side: _Side, run: slice) -> _Side:
    mask = None if side.mask is None else side.mask[run]
    return _Side(side.tokens[run], mask, None if side.lengths is None else side.lengths[run])


def _scored(queries: _Side, documents: _Side, pairs: bool = False) -> Tensor:
    """Scores of the operator, with the library's value where a document has no token that counts."""
    return _scored_with(_asking(queries), documents, pairs)


def _scored_with(ready: tuple[Tensor | Packed, Tensor | None], documents: _Side, pairs: bool = False) -> Tensor:
    rows, query_mask = ready
    columns, document_mask = _ready(documents)
    document_mask = None if document_mask is None else document_mask.bool()
    low = _empty_score(columns) if isinstance(columns, Packed) or document_mask is not None else None
    scores = calls.score(LIBRARY, rows, columns, query_mask, document_mask, pairs=pairs, empty_score=low)
    if low is not None:
        return scores
    if isinstance(columns, Packed):
        empty = columns.lengths == 0
    elif document_mask is not None:
        empty = ~document_mask.any(dim=-1)
    else:
        return scores
    if empty.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(empty.any()):
        return scores
    filled: Tensor = LIBRARY["_fill_empty_document_scores"](scores, empty)
    return filled


def _empty_score(documents: Tensor | Packed) -> float | None:
    """The library's score of an empty document, if the operator is to write it; None if the library's own function is to.

    That function warns on CPUs. On a GPU it only fills, which takes torch three launches and the operator one.
    """
    if documents.device.type != "cuda" or torch.compiler.is_compiling():
        return None
    low: float | None = getattr(LIBRARY["_fill_empty_document_scores"], "__globals__", {}).get("_EMPTY_DOCUMENT_SCORE")
    return low


def _ready(side: _Side) -> tuple[Tensor | Packed, Tensor | None]:
    if isinstance(side.tokens, list):
        assert side.lengths is not None
        return joined(side.tokens, side.lengths), side.mask
    return side.tokens, side.mask


def _asking(side: _Side) -> tuple[Tensor | Packed, Tensor | None]:
    """Queries, and their mask. Weights multiply tokens instead, as maxima are linear in weights of 0 and above."""
    rows, weights = _ready(side)
    if weights is None or weights.dtype == torch.bool:
        return rows, weights
    assert isinstance(rows, Tensor)
    if weights.device.type == "cpu" and not torch.compiler.is_compiling():
        kept = weights.bool()
        if torch.equal(kept.to(weights.dtype), weights):  # weights of 0 and 1, as most are: fewer rows to score
            return rows, kept
    weights = weights.to(rows.dtype) if weights.is_floating_point() else weights  # integers are cast in the product
    return rows * weights.unsqueeze(-1), None


def _normalized(scores: Tensor, queries: _Side) -> Tensor:
    """Scores over the number of tokens that count in each query, as the library counts them."""
    counts = LIBRARY["_query_token_counts"](queries.tokens, queries.mask)
    counts = counts.to(device=scores.device, dtype=scores.dtype)
    return scores / (counts if scores.dim() == 1 else counts.unsqueeze(1))
