"""The search itself: codes of a block are scanned, bounds prune, what is left is scored exactly, and the threshold rises.

For a block of documents: scores over codes and their widths (`bounds.py`) give an interval that holds each exact score. A guess of the
threshold, from the k-th best score over codes, chooses the documents that are scored exactly; the k-th best exact score so far, of this
block and those before, is the threshold. Every other document whose upper bound reaches it, ties included, is scored exactly too: most
often none is left, since the guess was lower. The rest cannot be among the best k, whatever their ties. Thresholds only rise, so later
blocks prune harder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from maxsim_kernels.api import maxsim
from maxsim_kernels.checks import Call
from maxsim_kernels.search.bounds import WIDEST, AnyCodes, QueryTerms, Residuals, query_terms
from maxsim_kernels.search.rescoring import Some, brute_force, why_not_some
from maxsim_kernels.search.rows import Rows, documents_at, part, whole
from maxsim_kernels.streaming import device_blocks
from maxsim_kernels.tokens import Packed
from maxsim_kernels.topk import TopK, keys_of, merge_topk, of_keys, refuse_nan

_CELLS = 1 << 21  # (query, document) pairs bounded at once: about 100 MB of scores, widths and bounds
_LEAST_DOCUMENTS = 256
# Share of a width by which the guess of the threshold lies below scores over codes: true errors are 0.5 to 3% of a width
# (docs/search.md). No proof rests on it, only how often documents are read.
GUESSED = 0.1


@dataclass(frozen=True, eq=False)
class Certificate:
    """Why nothing was missed: no document that was not scored exactly could have reached the k-th best score.

    Args:
        kth: `[Nq]` float32, the k-th best exact score of each query; -inf where it has fewer than k. Where several processes share a
            corpus, at least the k-th best of all their first pieces.
        highest: `[Nq]` float64, the highest upper bound among the documents that were not scored exactly; -inf where all were.
    """

    kth: Tensor
    highest: Tensor

    @property
    def holds(self) -> bool:
        """Whether every bound lies below its query's k-th best score."""
        return bool(((self.highest < self.kth) | (self.highest == -torch.inf)).all())


@dataclass(frozen=True, eq=False)
class Stats:
    """What `exact_topk` did.

    Args:
        scanned: documents whose codes were scored.
        survivors: `[Nq]` int64, documents scored exactly for each query, those of a fallback included.
        rescored_bytes: bytes of full-precision tokens behind these scores, each query's counted for itself.
        fell_back: why some or all documents were scored by brute force; empty where none were.
        certificate: what proves the answer.
    """

    scanned: int
    survivors: Tensor
    rescored_bytes: int
    fell_back: str
    certificate: Certificate


class Search:
    """An exact top-k over blocks of documents that come one after the other; `exact_topk` runs one from begin to end.

    Args:
        queries: `packed_queries`: the valid tokens of every query, end to end, on the CPU.
        k: how many documents of each query.
        quantize_queries, most_rescored: as of `exact_topk`.
        call: the call whose bits are wanted, where its queries are not packed.

    `keys` `[Nq, k]` int64 are the best so far (`maxsim_kernels.topk`), in no order; `lost` is a (query, document) pair whose document
    has tokens and whose score is -inf all the same, or None.
    """

    def __init__(
        self, queries: Packed, k: int, quantize_queries: bool = True, most_rescored: float = 0.25, call: Call | None = None
    ) -> None:
        self.queries, self.k = queries, k
        self.call = call
        self.some = Some(queries)
        self.quantize_queries, self.most_rescored = quantize_queries, most_rescored
        count = len(queries)
        self.keys = TopK(count, k).pending
        self.void = queries.lengths == 0  # queries without tokens, which score 0 with every document
        self.seen = 0  # documents so far: the number of the next one
        self.lost: tuple[int, int] | None = None
        self.scanned = 0
        self.survivors = torch.zeros(count, dtype=torch.int64, device="cpu")
        self.highest = torch.full((count,), -torch.inf, dtype=torch.float64, device="cpu")
        self.rescored_bytes = 0
        self.never = ""  # why nothing can be pruned
        self.brute, self.pieces = 0, 0
        # Where processes search parts of one corpus: takes `[Nq, k]` FP64 of each, returns the k-th best `[Nq, 1]` of all. Each calls
        # it twice, with guesses and then exact scores of its first piece, so that all prune by what all have found; see `attend`.
        self.meet: Callable[[Tensor], Tensor] | None = None
        self.met = 0
        self.floor = torch.full(
            (count, 1), -torch.inf, dtype=torch.float64, device="cpu"
        )  # k exact scores of the whole corpus are at least this

    def answer(self) -> tuple[Tensor, Tensor, Stats]:
        """Scores and indices `[Nq, k]` of the best, and what was done; a NaN is refused."""
        refuse_nan(self.keys)
        scores, indices = of_keys(self.keys)
        return scores, indices, self.stats(scores[:, -1])

    def stats(self, kth: Tensor | None = None) -> Stats:
        """What was done, and the certificate. `kth` `[Nq]`: the k-th best scores, where they are at hand."""
        kth = of_keys(self.keys)[0][:, -1] if kth is None else kth
        fell_back = self.never
        if self.brute and not fell_back:
            share = f"more than {self.most_rescored:.0%} of the pairs could still be among the best"
            fell_back = f"{self.brute} of {self.pieces} pieces by brute force: {share}"
        certificate = Certificate(torch.maximum(kth, self.floor[:, 0].float()), self.highest)
        return Stats(self.scanned, self.survivors, self.rescored_bytes, fell_back, certificate)

    def take(self, keys: Tensor) -> None:
        """Take in keys `[Nq, k]` of documents that are not added here; they raise the threshold."""
        self.keys = merge_topk([self.keys, keys])

    def attend(self) -> None:
        """Take part in the meetings still due: a part of the corpus that had nothing to prune must not keep others waiting."""
        while self.meet is not None and self.met < 2:
            self._kth(self._held().double(), self.met + 1)

    def _held(self) -> Tensor:
        """`[Nq, k]` float32: the best scores so far; NaN, which will be refused, as -inf."""
        return of_keys(self.keys)[0].nan_to_num(-torch.inf, torch.inf, -torch.inf)

    def _kth(self, values: Tensor, meeting: int) -> Tensor:
        """The k-th best `[Nq, 1]` of values FP64 `[Nq, k or more]`; of all processes' values, if `meeting` (1 or 2) is still due."""
        best = values.topk(self.k, dim=1).values
        if self.meet is None or self.met >= meeting:
            return best[:, -1:]
        self.met += 1
        found = self.meet(best)
        if self.met == 2:
            self.floor = found
        return found

    def add(self, documents: Packed | Rows, codes: AnyCodes, residuals: Residuals, first: int | None = None) -> None:
        """Search the documents from number `first` on (None: the next ones), cut into pieces whose bounds fit in memory."""
        self.seen = self.seen if first is None else first
        if self.pieces == 0 and len(documents):
            wide = f"d = {documents.dim} is more than {WIDEST}" if documents.dim > WIDEST else ""
            self.never = wide or why_not_some(self.queries, documents.dim, self.call)
        terms = None if self.never else query_terms(self.queries, codes, self.quantize_queries)
        step = max(_LEAST_DOCUMENTS, _CELLS // max(1, len(self.queries)))
        for begin in range(0, len(documents), step):
            span = slice(begin, min(begin + step, len(documents)))
            piece = part(documents, span)
            scores = None
            if terms is not None:
                coded = codes.select(torch.arange(span.start, span.stop, device="cpu"))
                scores = self._pruned(piece, coded, terms, residuals[span])
            if scores is None:
                scores = self._all(piece)
            keys = keys_of(scores, self.seen)
            self.keys = torch.cat([self.keys, keys], 1).topk(self.k, dim=1).values
            self.attend()  # where `_pruned` was not called, or gave up before its meetings
            self.seen += len(piece)
            self.pieces += 1
        if bool(torch.isnan(of_keys(self.keys)[0]).any()):
            self._refuse_nan(documents, self.seen - len(documents))

    def _all(self, documents: Packed | Rows) -> Tensor:
        """Brute force: scores `[Nq, n]`."""
        self.brute += 1
        self.survivors += len(documents)
        self.rescored_bytes += len(self.queries) * int(documents.lengths.sum()) * _token_bytes(documents)
        scores = torch.cat([brute_force(self.call or self.some.call, block) for block in whole(documents)], 1)
        filled = (documents.lengths > 0)[None, :] & ~self.void[:, None]
        self._note_lost((scores == -torch.inf) & filled)
        return scores

    def _refuse_nan(self, documents: Packed | Rows, first: int) -> None:
        """Refuse a NaN: brute force once more, in the pieces of `stream_topk`, so that the error names the same NaN as there."""
        best = TopK(len(self.queries), self.k, first=first)
        for held in whole(documents):
            for block in device_blocks([held], "cpu", queries=len(self.queries)):
                assert isinstance(block, Packed)
                best.add(brute_force(self.call or self.some.call, block))
        refuse_nan(self.keys)

    def _note_lost(self, lost: Tensor) -> None:
        """Remember the first pair that `lost` `[Nq, n]` marks, of the piece that begins with document `seen`."""
        if self.lost is None and bool(lost.any()):
            document, query = lost.T.nonzero()[0].tolist()
            self.lost = query, document + self.seen

    def _pruned(self, documents: Packed | Rows, codes: AnyCodes, terms: QueryTerms, residuals: Residuals) -> Tensor | None:
        """Scores `[Nq, n]`, exact or -inf where a document cannot be among the best; None where too many can."""
        approximate, width, upper = self._bounds(documents, codes, terms, residuals)
        scores = torch.full(upper.shape, -torch.inf, dtype=torch.float32, device="cpu")
        most = self.most_rescored * upper.numel()
        held = self._held().double()
        alive = (upper >= torch.maximum(held.amin(1, keepdim=True), self.floor)) & (upper > -torch.inf)
        likely = (approximate - GUESSED * width).masked_fill_(~alive, -torch.inf)
        done = alive & (upper >= self._kth(torch.cat([held, likely], 1), 1))
        if int(done.sum()) > most:
            return None
        self._rescore(documents, done, scores)
        if bool(torch.isnan(scores).any()):
            return None  # brute force finds the first such document, which the error names
        kth = self._kth(torch.cat([held, scores.double()], 1), 2)
        late = (upper >= torch.maximum(kth, self.floor)) & alive & ~done
        if left := int(late.sum()):
            if int(done.sum()) + left > most:
                return None
            self._rescore(documents, late, scores)
            if bool(torch.isnan(scores).any()):
                return None
            done |= late
        self._note_lost((scores == -torch.inf) & done)
        scores[self.void] = 0.0
        self.survivors += done.sum(1)
        self.rescored_bytes += int((done.sum(0) * documents.lengths).sum()) * _token_bytes(documents)
        self.highest = torch.maximum(self.highest, upper.masked_fill_(done, -torch.inf).amax(1))
        return scores

    def _bounds(
        self, documents: Packed | Rows, codes: AnyCodes, terms: QueryTerms, residuals: Residuals
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores over codes, their widths and the upper bounds of the exact scores, FP64 `[Nq, n]`.

        Without a bound: -inf, inf, inf. For pairs with an empty side, whose score is known, the upper bound is -inf.
        """
        found = maxsim(self.queries, codes, quantize_queries=self.quantize_queries)
        assert isinstance(found, Tensor)
        self.scanned += len(documents)
        approximate, width = found.double(), terms.width(residuals)
        unknown = ~(torch.isfinite(width) & torch.isfinite(approximate))
        if bool(unknown.any()):
            approximate.masked_fill_(unknown, -torch.inf)
            width.masked_fill_(unknown, torch.inf)
        upper = (approximate + width).masked_fill_(unknown, torch.inf)  # -inf + inf is NaN
        known = (documents.lengths == 0)[None, :] | self.void[:, None]
        return approximate, width, upper.masked_fill_(known, -torch.inf)

    def _rescore(self, documents: Packed | Rows, chosen: Tensor, scores: Tensor) -> None:
        """Write the exact scores of the chosen pairs; of `Rows` each document is read once, in order."""
        for numbers, held in documents_at(documents, chosen.any(0).nonzero()[:, 0]):
            asked = chosen[:, numbers]
            found = torch.empty(asked.shape, dtype=torch.float32, device="cpu")
            self.some.score(held, asked, found)
            scores[:, numbers] = torch.where(asked, found, scores[:, numbers])


def _token_bytes(documents: Packed | Rows) -> int:
    return documents.dim * documents.dtype.itemsize
