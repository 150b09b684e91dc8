"""A running exact top-k: score descending, then document index ascending, whatever blocks the scores arrive in.

A score and its document's index become one 64-bit key: the score's bits in an order that integers share, above the index counted
backwards. Keys are all different and compare as (score, -index), so `torch.topk` on them has one answer, ties included; a block's
own top-k, the merge with what is held and the merge of the parts of a corpus (`merge_topk`) are the same operation, and nothing
waits for a GPU. NaN has the highest keys of all, so that none is lost on the way to whoever can refuse it.

On a GPU with Triton a step is one launch (`gpu/keys.py`), with the same bits. By torch it is dozens of launches, and for few documents
the host's time for these would be most of the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import torch
from torch import Tensor

from maxsim_kernels.fallback import HAS_TRITON

_MOST_DOCUMENTS = 1 << 32
_NONE = -(1 << 63)  # below every key
_NAN = 0x7FC00000  # above infinity's bits
_INFINITY = (0x7F800000 << 32) + _MOST_DOCUMENTS - 1  # the highest key of a number
_FOLD = 16  # parts merged at once
_WAITING = 1 << 18  # scores that wait, on a GPU, to be merged as one block: a merge takes several launches, a copy one


def keys_of(scores: Tensor, first: int) -> Tensor:
    """int64 keys of float32 scores `[Nq, n]` of documents `first .. first + n`; -inf has the lowest of all, NaN the highest."""
    return _keys_at(scores, torch.arange(first, first + scores.shape[1], device=scores.device))


def _keys_at(scores: Tensor, documents: Tensor) -> Tensor:
    """int64 keys of float32 scores of `documents` (int64, broadcast to the scores' shape)."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, which it equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered.masked_fill_(torch.isnan(scores), _NAN)  # every NaN alike: by their own bits some would lie below all numbers
    keys = (ordered.long() << 32).add_(_MOST_DOCUMENTS - 1 - documents)
    return keys.masked_fill_(scores == -torch.inf, _NONE)


def of_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores float32 and indices int64 of keys; -inf and -1 where there is no document."""
    if _by_kernels(keys):
        from maxsim_kernels.gpu import keys as kernels  # needs Triton

        with torch.cuda.device(keys.device):
            return kernels.of_keys(keys)
    ordered = (keys >> 32).int()
    scores = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    indices = _MOST_DOCUMENTS - 1 - (keys & (_MOST_DOCUMENTS - 1))
    none = keys == _NONE
    return scores.masked_fill(none, -torch.inf), indices.masked_fill(none, -1)


def refuse_nan(keys: Tensor) -> None:
    """Raise a `ValueError` that names the first query with a NaN score and its first such document, if any; waits on a GPU.

    `keys`: `[Nq, k]` as held by a `TopK` or merged from several, in any order.
    """
    if bool((keys > _INFINITY).any()):
        best = keys.amax(1)
        query = int((best > _INFINITY).int().argmax())
        document = _MOST_DOCUMENTS - 1 - (int(best[query]) & (_MOST_DOCUMENTS - 1))
        raise ValueError(f"scores: NaN for query {query}, document {document}; need finite embeddings")


def merge_topk(keys: Sequence[Tensor]) -> Tensor:
    """Keys of a whole corpus from those of its parts: exact, whatever the parts, their order and how merges are grouped.

    Args:
        keys: `[Nq, k]` int64 each (`TopK.keys` or `TopK.pending`), of parts that share no document.

    Returns:
        `[Nq, k]` int64, descending.

    Raises:
        ValueError: no parts, parts of different shapes, a NaN score in any of them, or a document that two parts hold.
    """
    if not keys:
        raise ValueError("keys: got no parts, need at least one")
    held = keys[0]
    for part in keys:
        if part.dtype != torch.int64 or part.dim() != 2 or part.shape[1] < 1:
            raise ValueError(f"keys: got {part.dtype} {list(part.shape)}, need int64 [Nq, k]")
        if part.shape != held.shape:
            raise ValueError(f"keys: got parts {list(held.shape)} and {list(part.shape)}, need one shape")
    k = held.shape[1]
    for first in range(1, len(keys), _FOLD):
        held = torch.cat([held, *keys[first : first + _FOLD]], 1).topk(k, dim=1, sorted=False).values
    held = held.sort(dim=1, descending=True).values
    refuse_nan(held)
    twice = (held[:, 1:] == held[:, :-1]) & (held[:, 1:] != _NONE)
    if bool(twice.any()):
        query, place = twice.nonzero()[0].tolist()
        document = int(of_keys(held[query, place])[1])
        raise ValueError(f"keys: document {document} of query {query} is in two parts, need parts that share no document")
    return held


class TopK:
    """A running top-k over documents that arrive in index order: `[Nq, k]` scores and indices.

    `add` takes scores `[Nq, n]` of the next n documents, the first of which has index `first`. -inf is "not retrieved"; a NaN score is
    a `ValueError` that names the query and the document, raised at once on a CPU and by `keys`, `scores` and `indices` on a GPU (`add`
    does not wait for it). Rows short of k end in score -inf, index -1. On a GPU, few scores are copied and merged together later. Work
    goes to the stream that is current at each call, so all calls need the same one (or streams that wait for each other).
    """

    def __init__(self, queries: int, k: int, device: torch.device | str = "cpu", first: int = 0) -> None:
        if k < 1:
            raise ValueError(f"k: got {k}, need 1 or more")
        if not 0 <= first <= _MOST_DOCUMENTS:
            raise ValueError(f"first: got {first}, need 0 to {_MOST_DOCUMENTS}")
        self.k = k
        self.first = first
        self.seen = 0  # documents added so far
        self._merged = torch.full((queries, k), _NONE, dtype=torch.int64, device=device)  # in no order
        self._waiting: Tensor | None = None  # [queries, room], of which `_waits` columns are taken: the documents added last
        self._waits = 0
        self._most_waiting = _WAITING if torch.device(device).type == "cuda" else 0

    def add(self, scores: Tensor) -> None:
        """Merge the scores `[Nq, n]` of the next n documents."""
        count, at = scores.shape[1], self.first + self.seen
        if at + count > _MOST_DOCUMENTS:
            raise ValueError(f"scores: got document {at + count - 1}, need fewer than {_MOST_DOCUMENTS} documents")
        if scores.numel():
            scores, room = scores.detach(), self._most_waiting // scores.shape[0]
            if self._waits + count > room:
                self._merge_waiting()
            if count > room:
                self._merge_scores(scores, at)
            else:  # into one buffer: a caller may use its own again, and small blocks do not become a long list
                if self._waiting is None:
                    self._waiting = scores.new_empty(scores.shape[0], room)
                self._waiting[:, self._waits : self._waits + count] = scores
                self._waits += count
        self.seen += count

    def skip_to(self, index: int) -> None:
        """Make `index` the number of the next document added; those before it were added, or come as keys."""
        if not self.first <= index <= _MOST_DOCUMENTS:
            raise ValueError(f"index: got {index}, need {self.first} to {_MOST_DOCUMENTS}")
        self._merge_waiting()  # first: it numbers the waiting scores back from `seen`
        self.seen = index - self.first

    def add_keys(self, keys: Tensor) -> None:
        """Merge keys `[Nq, n]` int64 of other documents (another `TopK`'s `keys` or `pending`); `seen` stays."""
        rows = self._merged.shape[0]
        if keys.dtype != torch.int64 or keys.dim() != 2 or keys.shape[0] != rows:
            raise ValueError(f"keys: got {keys.dtype} {list(keys.shape)}, need int64 [{rows}, n]")
        self._keep(torch.cat([self._merged, keys.to(self._merged.device)], 1))

    def after(self, scores: Tensor) -> Tensor:
        """What `pending` would be after these scores `[Nq, n]` of the next documents. Nothing is kept: `replace` does that."""
        self._merge_waiting()
        return _candidates(scores, self.first + self.seen, self.k, self._merged).topk(self.k, dim=1).values

    def replace(self, keys: Tensor) -> None:
        """Hold these `[Nq, k]` keys instead; a NaN among them is refused later, as in `pending`. `seen` stays."""
        self._waiting, self._waits, self._merged = None, 0, keys

    def _merge_scores(self, scores: Tensor, at: int) -> None:
        self._keep(_candidates(scores, at, self.k, self._merged))

    def _keep(self, keys: Tensor) -> None:
        """Hold the k best of these keys `[Nq, n]`; on a CPU, refuse a NaN."""
        self._merged = keys.topk(self.k, dim=1, sorted=False).values
        if not keys.is_cuda:
            refuse_nan(self._merged)

    def _merge_waiting(self) -> None:
        if self._waiting is not None:
            scores, self._waiting, self._waits = self._waiting[:, : self._waits], None, 0
            self._merge_scores(scores, self.first + self.seen - scores.shape[1])

    @property
    def unsorted(self) -> Tensor:
        """`pending` in no order, which is quicker."""
        self._merge_waiting()
        return self._merged

    @property
    def pending(self) -> Tensor:
        """`[Nq, k]` int64 keys, descending, without waiting for a GPU: a NaN may be in them, for `merge_topk` to refuse."""
        return self.unsorted.sort(dim=1, descending=True).values

    @property
    def keys(self) -> Tensor:
        """`[Nq, k]` int64 keys, descending: what `merge_topk` and `add_keys` take. Waits on a GPU, as `scores` and `indices` do."""
        refuse_nan(self.unsorted)
        return self.pending

    @property
    def scores(self) -> Tensor:
        """`[Nq, k]` float32, descending."""
        return of_keys(self.keys)[0]

    @property
    def indices(self) -> Tensor:
        """`[Nq, k]` int64, the documents of `scores`."""
        return of_keys(self.keys)[1]


def group_size(count: int, k: int) -> int:
    """Neighbours in a group of `_candidates`: a power of two, small enough for k groups (if there are k documents)."""
    return 1 << (isqrt(max(1, count // k)).bit_length() - 1)


def _candidates(scores: Tensor, first: int, k: int, held: Tensor) -> Tensor:
    """Keys `[Nq, k + c]`: `held` `[Nq, k]`, then those of c documents of a block, among which are its k best.

    Groups of neighbours stand for their members: the k best documents lie in the k groups that are best by (maximum, then place). For a
    document outside of them, each of the k groups holds one with a higher score, or with an equal score and a lower index. So only the
    groups' maxima and the members of k groups get keys: about sqrt(n k) of n, and no 64-bit copy of the block.
    """
    count, size = scores.shape[1], group_size(scores.shape[1], k)
    if _by_kernels(scores):
        from maxsim_kernels.gpu import keys as kernels  # needs Triton

        with torch.cuda.device(scores.device):
            return kernels.candidates(scores, first, k, size, held)
    if size == 1:
        return torch.cat([held, keys_of(scores, first)], 1)
    whole = count // size * size
    members = scores[:, :whole].unflatten(1, (-1, size))  # [Nq, groups, size]
    groups = keys_of(members.amax(2), 0).topk(k, dim=1, sorted=False).indices
    chosen = members.gather(1, groups.unsqueeze(2).expand(-1, -1, size))
    places = torch.arange(first, first + size, device=scores.device)
    keys = _keys_at(chosen, groups.unsqueeze(2) * size + places).flatten(1)
    return torch.cat([held, keys, keys_of(scores[:, whole:], first + whole)], 1)


def _by_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and HAS_TRITON
