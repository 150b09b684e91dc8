"""A running exact top-k: score descending, then document index ascending, whatever blocks the scores arrive in.

A score and its document's index become one 64-bit key: the score's bits in an order that integers share, above the index counted
backwards. Keys are all different and compare as (score, -index), so `torch.topk` on them has one answer, ties included; a block's
own top-k and the merge with what is held are the same operation, and nothing waits for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_DOCUMENTS = 1 << 32
_NONE = -(1 << 63)  # below every key
_NEVER = (1 << 63) - 1


def keys_of(scores: Tensor, first: int) -> Tensor:
    """int64 keys of float32 scores `[Nq, n]` of documents `first .. first + n`; -inf and NaN have the lowest of all."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, which it equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = _MOST_DOCUMENTS - 1 - torch.arange(first, first + scores.shape[1], device=scores.device)
    # NaN is neither above nor below -inf.
    return torch.where(scores > -torch.inf, (ordered.long() << 32) + places, _NONE)


def of_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores float32 and indices int64 of keys; -inf and -1 where there is no document."""
    ordered = (keys >> 32).int()
    scores = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    indices = _MOST_DOCUMENTS - 1 - (keys & (_MOST_DOCUMENTS - 1))
    none = keys == _NONE
    return scores.masked_fill(none, -torch.inf), indices.masked_fill(none, -1)


class TopK:
    """A running top-k over documents that arrive in index order: `[Nq, k]` scores and indices.

    `add` takes scores `[Nq, n]` of the next n documents. -inf is "not retrieved"; a NaN score is a `ValueError` that names the
    query and the document, raised at once on a CPU and by `scores` and `indices` on a GPU (`add` does not wait for it). Rows short of
    k end in score -inf, index -1.
    """

    def __init__(self, queries: int, k: int, device: torch.device | str = "cpu") -> None:
        if k < 1:
            raise ValueError(f"k: got {k}, need 1 or more")
        self.k = k
        self.seen = 0
        self._keys = torch.full((queries, k), _NONE, dtype=torch.int64, device=device)
        self._bad = torch.full((), _NEVER, dtype=torch.int64, device=device)  # query * 2^32 + document of the first NaN

    def add(self, scores: Tensor) -> None:
        """Merge the scores `[Nq, n]` of the next n documents."""
        count = scores.shape[1]
        if self.seen + count > _MOST_DOCUMENTS:
            raise ValueError(f"scores: got document {self.seen + count - 1}, need fewer than {_MOST_DOCUMENTS} documents")
        if scores.numel():
            self._note_nan(scores)
            keys = keys_of(scores, self.seen)
            if count > self.k:
                keys = keys.topk(self.k, dim=1, sorted=False).values
            self._keys = torch.cat([self._keys, keys], 1).topk(self.k, dim=1).values
        self.seen += count

    @property
    def scores(self) -> Tensor:
        """`[Nq, k]` float32, descending."""
        self._refuse_nan()
        return of_keys(self._keys)[0]

    @property
    def indices(self) -> Tensor:
        """`[Nq, k]` int64, the documents of `scores`."""
        self._refuse_nan()
        return of_keys(self._keys)[1]

    def _note_nan(self, scores: Tensor) -> None:
        bad = torch.isnan(scores)
        if not scores.is_cuda and not bool(bad.any()):
            return
        rows = torch.arange(scores.shape[0], device=scores.device)[:, None] << 32
        columns = torch.arange(self.seen, self.seen + scores.shape[1], device=scores.device)
        self._bad = torch.minimum(self._bad, torch.where(bad, rows + columns, _NEVER).min())
        if not scores.is_cuda:
            self._refuse_nan()

    def _refuse_nan(self) -> None:
        bad = int(self._bad)
        if bad != _NEVER:
            query, document = divmod(bad, 1 << 32)
            raise ValueError(f"scores: NaN for query {query}, document {document}; need finite embeddings")
