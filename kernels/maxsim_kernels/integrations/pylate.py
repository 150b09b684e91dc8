"""PyLate 1.6: `pylate.scores`, and with them its losses, its evaluators and `rank.rerank`.

Rules of the library that hold here: masks of any dtype multiply similarities, so a masked token has the similarity 0, which beats
negative ones, and a document without tokens scores 0; so do the zeros that `rank.rerank` pads with. `strict=True` leaves masked tokens
and, without a mask, all-zero rows out instead, of lists too, and refuses calls that only the library scores; documents without tokens
then score -inf. Scores have the dtype that the library's would have, rounded once from float32. A backend that is named (`backend=`,
PYLATE_SCORES_BACKEND) other than "auto" is the library's.

The functions need no `enable`: `score_metric=maxsim_kernels.integrations.pylate.colbert_kd_scores`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maxsim_kernels.integrations import calls
from maxsim_kernels.integrations.patching import Library, Target
from maxsim_kernels.tokens import Packed, joined

_SCORES = "pylate.scores.colbert"
_MASKED = "(queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None, backend=None)"
LIBRARY = Library(
    "pylate",
    "pylate",
    ("1.6",),
    (
        Target(_SCORES, "colbert_scores", _MASKED),
        Target(_SCORES, "colbert_scores_pairwise", "(queries_embeddings, documents_embeddings, backend=None)"),
        Target(_SCORES, "colbert_kd_scores", _MASKED),
        Target(_SCORES, "ColBERTScores.__call__", _MASKED.replace("(", "(self, ")),
        Target(_SCORES, "_resolve_backend", "(backend)", replaced=False),
        Target("pylate.utils.tensor", "convert_to_tensor", "(x)", replaced=False),
    ),
)


def colbert_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    backend: str | None = None,
    *,
    strict: bool | None = None,
) -> Tensor:
    """`pylate.scores.colbert_scores`: every query `[Nq, Lq, d]` with every document `[B, Ld, d]`, `[Nq, B]`."""
    given = (queries_embeddings, documents_embeddings, queries_mask, documents_mask)
    return _masked("colbert_scores", given, backend, 3, strict)


def colbert_kd_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    backend: str | None = None,
    *,
    strict: bool | None = None,
) -> Tensor:
    """`pylate.scores.colbert_kd_scores`: every query with its own candidates `[Nq, K, Ld, d]`, `[Nq, K]`."""
    given = (queries_embeddings, documents_embeddings, queries_mask, documents_mask)
    return _masked("colbert_kd_scores", given, backend, 4, strict)


def colbert_scores_pairwise(
    queries_embeddings: Any, documents_embeddings: Any, backend: str | None = None, *, strict: bool | None = None
) -> Tensor:
    """`pylate.scores.colbert_scores_pairwise`: query n with document n, tensors or lists of `[L, d]`, `[N]`."""
    pairs = _pairs(queries_embeddings, documents_embeddings, backend)
    if isinstance(pairs, str):
        given = (queries_embeddings, documents_embeddings)
        return calls.theirs(LIBRARY, "colbert_scores_pairwise", pairs, given, _strict(strict), backend=backend)
    calls.count(LIBRARY, "colbert_scores_pairwise")
    queries, documents = pairs
    mask = None
    if _strict(strict) and isinstance(documents, Tensor):
        mask = calls.used_tokens(documents)
    elif _strict(strict):
        documents = calls.without_zeros(documents)  # type: ignore[arg-type]
    return calls.score(LIBRARY, queries, documents, None, mask, pairs=True, out=_dtype(queries))


def _grouped_scores(
    metric: object,
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    backend: str | None = None,
) -> Tensor:
    """`ColBERTScores()(...)`: every query with the documents of every group `[G, N, Ld, d]`, `[Nq, G * N]`, in one call."""
    groups, mask = documents_embeddings, documents_mask
    flat = isinstance(groups, Tensor) and groups.dim() == 4 and groups.shape[0] and groups.shape[1]
    flat = flat and (mask is None or isinstance(mask, Tensor))
    if not flat or (mask is not None and mask.shape != groups.shape[:3]):
        given, reason = (
            (metric, queries_embeddings, groups, queries_mask, mask),
            "groups of documents that are no [G, N, Ld, d] tensor",
        )
        return calls.theirs(LIBRARY, "ColBERTScores.__call__", reason, given, backend=backend)
    flat_mask = None if mask is None else mask.flatten(0, 1)
    return colbert_scores(queries_embeddings, groups.flatten(0, 1), queries_mask, flat_mask, backend)


REPLACEMENTS = {
    "colbert_scores": colbert_scores,
    "colbert_scores_pairwise": colbert_scores_pairwise,
    "colbert_kd_scores": colbert_kd_scores,
    "ColBERTScores.__call__": _grouped_scores,
}


def _masked(name: str, given: tuple[Any, Any, Any, Any], backend: str | None, dims: int, strict: bool | None) -> Tensor:
    queries, documents = _tensor(given[0]), _tensor(given[1])
    query_mask, document_mask = (None if mask is None else _tensor(mask) for mask in given[2:])
    reason = _named_backend(backend) or _unshaped(queries, documents, query_mask, document_mask, dims)
    reason = reason or calls.untaken(queries, documents)
    if reason:
        return calls.theirs(LIBRARY, name, reason, given, _strict(strict), backend=backend)
    calls.count(LIBRARY, name)
    dtype = _dtype(queries, query_mask, document_mask)
    if query_mask is not None and query_mask.dtype != torch.bool:
        queries = queries * query_mask.to(queries.dtype).unsqueeze(-1)  # a zero query token adds 0, as a masked one does
        query_mask = None
    if _strict(strict):
        document_mask = calls.used_tokens(documents) if document_mask is None else document_mask != 0
    elif document_mask is not None:
        # The similarity with a zero token is 0: what multiplying by the mask gives, without the similarities' tensor. Whole numbers
        # are multiplied in autocast's dtype, which is exact for 0 and 1 and takes half the memory; weights in the tokens' own.
        lower = None if document_mask.is_floating_point() else calls.autocast_dtype(documents.device)
        documents = documents.to(lower or documents.dtype)
        documents = documents * document_mask.to(documents.dtype).unsqueeze(-1)
        document_mask = None
    return calls.score(LIBRARY, queries, documents, query_mask, document_mask, out=dtype)


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else LIBRARY["convert_to_tensor"](value)


def _strict(asked: bool | None) -> bool:
    return LIBRARY.strict if asked is None else asked


def _named_backend(backend: str | None) -> str:
    """Why calls are left to the backend that somebody named; empty where none is."""
    named = LIBRARY["_resolve_backend"](backend)
    return "" if named == "auto" else f"backend {named!r} was asked for"


def _unshaped(queries: Tensor, documents: Tensor, query_mask: Tensor | None, document_mask: Tensor | None, dims: int) -> str:
    if queries.dim() != 3 or documents.dim() != dims or (dims == 4 and len(queries) != len(documents)):
        return "embeddings of other shapes"
    for mask, tokens in ((query_mask, queries), (document_mask, documents)):
        if mask is not None and (mask.shape != tokens.shape[:-1] or mask.device != tokens.device):
            return "a mask of another shape or device"
        if mask is not None and mask.is_complex():
            return "a complex mask"
    return ""


def _pairs(queries: Any, documents: Any, backend: str | None) -> tuple[calls.Tokens, calls.Tokens] | str:
    """Both sides of pairs, or why they are left to the library."""
    reason = _named_backend(backend)
    if reason:
        return reason
    first, second = _matrices(queries), _matrices(documents)
    if first is None or second is None or len(first) != len(second):
        return "pairs that are no equally many [L, d] tensors"
    return calls.untaken(first, second) or (first, second)


def _matrices(tokens: Any) -> Tensor | Packed | None:
    if isinstance(tokens, Tensor):
        return tokens if tokens.dim() == 3 else None
    lengths = calls.list_lengths(tokens)
    return joined(tokens, lengths) if lengths is not None and all(lengths) else None


def _dtype(queries: Tensor | Packed, *masks: Tensor | None) -> torch.dtype:
    """The dtype of the library's own scores: the product's, raised by float masks; under a GPU's autocast sums are float32."""
    lower = calls.autocast_dtype(queries.device)
    if lower is not None and queries.device.type == "cuda":
        return torch.float32
    dtype = lower or queries.dtype
    for mask in masks:
        if mask is not None:
            dtype = torch.promote_types(dtype, mask.dtype)
    return dtype
