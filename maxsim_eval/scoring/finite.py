"""Scores that are no finite numbers: which pair it is, whether its embeddings are to blame, and what can be done.

NaN and infinity have the highest keys of all, so a top-k holds them wherever they occur. -inf is another matter: it means "not
retrieved" (a document without tokens, a pair that is not listed, what a user's function leaves out). To a document with tokens
our own paths give it only where numbers overflowed; no top-k shows that, so `first_lost` looks for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maxsim_eval.cache.blocks import loaded
from maxsim_eval.cache.corpus import Corpus, largest_of
from maxsim_eval.cache.selection import Documents
from maxsim_eval.errors import DataError
from maxsim_eval.scoring.asked import Asked
from maxsim_kernels import Packed
from maxsim_kernels.topk import of_keys


def one_row(documents: Documents, row: int) -> Packed:
    """One document of an entry or a selection, only its tokens read."""
    for block in loaded(documents.lazy_blocks(1 << 40, row, row + 1)):
        return block
    return Packed(torch.empty(0, documents.dim, dtype=documents.dtype), torch.zeros(2, dtype=torch.int64))


def reason(query: Tensor, document: Tensor) -> str:
    """Why a score of these tokens `[L, d]`, as they are stored, is no finite number, and the remedy."""
    for what, tokens in (("query", query), ("document", document)):
        if not bool(torch.isfinite(tokens).all()):
            return f"the embeddings must be finite, and those of this {what} are not"
    most = max(float(largest_of(tokens)) for tokens in (query, document))
    return (
        f"the embeddings are finite, but with components up to {most:g} the score outgrows the numbers that this path computes with; "
        "scale them, or normalise them to unit vectors, before they are stored"
    )


def first_lost(scores: Tensor, lengths: Tensor, pairs: tuple[Tensor, Tensor] | None, first: int) -> Tensor:
    """(query, document) `[2]` of the first document with tokens that has a score of -inf: an overflow; (-1, -1): there is none.

    Nothing waits for a GPU.

    Args:
        scores: `[Nq, n]` of documents `first .. first + n`, by one of our paths.
        lengths: `[n]` tokens of each: one without tokens scores -inf.
        pairs: rows and columns `[p]` of what was scored, document by document; None: everything.
    """
    none = torch.full((2,), -1, device=scores.device)
    if pairs is None:
        if not scores.numel():
            return none
        bad = (scores.amin(0) == -torch.inf) & (lengths > 0)
        document = bad.int().argmax()[None]
        query = scores.index_select(1, document).argmin(0)
    else:
        rows, columns = pairs
        if not rows.numel():
            return none
        bad = (scores[rows, columns] == -torch.inf) & (lengths[columns] > 0)
        place = bad.int().argmax()[None]
        query, document = rows[place], columns[place]
    return torch.where(bad.any(), torch.cat([query, document + first]), none)


def refuse(name: str, keys: Tensor, lost: Tensor | None, queries: Packed, corpus: Corpus, asked: Asked) -> None:
    """Refuse a path's top-k keys `[Nq, k]` that hold NaN or infinity, and a pair of `first_lost`, by a `DataError`."""
    scores = of_keys(keys)[0]
    for word, bad in (("NaN", torch.isnan(scores)), ("infinite", torch.isposinf(scores))):
        if bool(bad.any()):
            query = int(bad.any(1).int().argmax())
            raise _error(name, word, query, int(of_keys(keys[query][bad[query]])[1].min()), queries, corpus, asked)
    if lost is not None and int(lost[0]) >= 0:
        raise _error(name, "infinite", int(lost[0]), int(lost[1]), queries, corpus, asked)


def _error(name: str, word: str, query: int, document: int, queries: Packed, corpus: Corpus, asked: Asked) -> DataError:
    if asked.paths[name].own:
        what = "its function must return finite scores (-inf: not retrieved)"
    else:
        what = reason(queries[query], one_row(corpus.entry, document).values)
    return DataError(
        f"path {name}: {word} score for query {asked.query_ids[query]!r} and document {asked.document_ids[document]!r}; {what}"
    )
