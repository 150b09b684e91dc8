"""The search on a GPU: the same three steps as `searching.py`, queued one behind the other, with one small read a piece.

A piece's codes are scored. About the k best documents by these scores, the leads, give a guess of the threshold, and what could reach
the guess is scored exactly. The leads' exact scores set the threshold, and what still reaches that is scored exactly too. Exact scores
are found in one of two ways. Marked pairs are scored alone, document by document, where that has the bits of brute force on this GPU
(`trust.py`), the kernel takes the dtype, and documents that lie here are in one piece; else all queries are scored against the marked
documents, by the very call that brute force makes, of fewer documents. Documents that lie elsewhere are fetched first, those alone
that some pair needs.

Bounds need not prune. A search that brute force ends in a few milliseconds begins with it, the first time and after bounds pruned
nothing, and some of its scores say whether the next search of these codes should scan. A larger one begins with a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeGuard, cast

import torch
from torch import Tensor

from maxsim_kernels.gpu import keys as key_kernels
from maxsim_kernels.gpu.forward.query_codes import query_codes
from maxsim_kernels.gpu.search.bounds import Bounded, Marks, Rounding, Tallied, kth_best, query_terms
from maxsim_kernels.gpu.search.survivors import score_alone, score_marked, takes
from maxsim_kernels.search.ahead import asked_of, pruned_before, remember
from maxsim_kernels.search.bounds import LARGEST, WIDEST, Codes, Residuals, gamma_of, tiny_of
from maxsim_kernels.search.fetching import Room, cut, everything, in_one_piece, some
from maxsim_kernels.search.queries import Queries
from maxsim_kernels.search.rows import Rows, StreamedCodes
from maxsim_kernels.search.scanning import Scan, cut_codes
from maxsim_kernels.search.searching import Certificate, Stats
from maxsim_kernels.search.trust import FP8, factor_of, form_of, looked_at
from maxsim_kernels.tokens import Packed
from maxsim_kernels.topk import TopK, group_size, of_keys, refuse_nan

# (query, document) pairs bounded at once, and what one takes: 16 bytes, and a top-k's temporaries.
_CELLS, _CELL_BYTES = 1 << 27, 32
_LEAST_DOCUMENTS = 4096
_SAMPLED, _SAMPLE = 4096, 128  # pieces from this size on may begin with a sample of so many documents, scored exactly
_LITTLE, _FEW_BYTES = (
    1 << 41,
    1 << 34,
)  # multiply-adds and bytes below which brute force is so short that a sample would only delay it
_HOPELESS = 0.4  # share of the sample's pairs that bounds would leave, beyond which nothing is scanned
# Share of a width by which the guess of the threshold lies below scores over codes: about their true errors. What is missed comes late.
_GUESSED = 0.03
_PAIRS_PAY, _UNION_PAYS = 0.2, 0.6  # shares of pairs and documents beyond which brute force is the cheaper way
_SPREAD = 0.9  # no union is tried if queries with nothing in common would want more than this share of the documents


class DeviceSearch:
    """An exact top-k over blocks of documents that come one after the other, on a GPU. As `Search`, of queries as a call gets them.

    Args:
        memory_budget: bytes of the device's memory for what is searched, as of `stream_topk`; documents and codes that lie there, and
            what the queries take, not counted. None: an eighth of the free memory for bounds, and what streaming takes by default.
        watched: whether `lost` is looked for.

    Raises:
        ValueError: a memory budget that is too small.
    """

    def __init__(
        self,
        queries: Queries,
        k: int,
        quantize_queries: bool = True,
        most_rescored: float = 0.25,
        memory_budget: int | None = None,
        watched: bool = False,
    ) -> None:
        self.queries, self.k, self.device = queries, k, queries.device
        self.quantize_queries, self.most_rescored = quantize_queries, most_rescored
        self.room = Room.of(memory_budget, self.device, len(queries))
        self.best = TopK(len(queries), k, self.device)
        self.known = False  # whether `best` holds anything
        self.lost: tuple[int, int] | None = None
        self.largest = queries.largest() if watched else None
        self.never: str | None = None  # why nothing can be pruned; None: not looked at yet
        # Whether pairs may be scored alone on this GPU; whether all of this piece's are, at once.
        self.pairs = self.alone = False
        self.doubt = True  # whether the next piece begins with a sample
        self.ahead: Tensor | None = None  # scores over the first codes, where they were queued before (`ahead.py`)
        self.scanned = 0
        self.answered: _Answer | None = None  # of the best so far
        self.read = 0  # tokens behind exact scores, each query's counted for itself
        self.brute_read: list[Tensor] = []  # numbers of tokens scored by brute force, still on the device
        self.every = 0  # documents scored by brute force
        self.tallied: list[Tallied] = []  # of pieces that were pruned
        self.looks: list[_Look] = []
        self.width = 0  # bytes of a token
        self.brute, self.pieces, self.why = 0, 0, ""

    @property
    def survivors(self) -> Tensor:
        """`[Nq]` int64: documents scored exactly."""
        held = [one.tally for one in self.tallied]
        if not held:
            return torch.full((len(self.queries),), self.every, dtype=torch.int64, device=self.device)
        found = held[0] if len(held) == 1 else torch.stack(held).sum(0)
        return found + self.every if self.every else found

    @property
    def highest(self) -> Tensor:
        """`[Nq]` float64: the highest upper bound of documents that were not scored exactly."""
        held = [one.highest for one in self.tallied]
        if not held:
            return torch.full((len(self.queries),), -torch.inf, dtype=torch.float64, device=self.device)
        return held[0] if len(held) == 1 else torch.stack(held).amax(0)

    @property
    def keys(self) -> Tensor:
        """`[Nq, k]` int64 keys of the best so far, descending (`maxsim_kernels.topk`), NaN still in them."""
        return self.best.pending

    def answer(self) -> tuple[Tensor, Tensor, Stats]:
        """As of `Search`; waits for the GPU, unless the last piece already did."""
        found = self.answered
        if found is None:
            keys = self.best.pending
            found = _Answer(keys, *of_keys(keys))
            refuse_nan(keys)
        elif found.lost:
            refuse_nan(found.keys)
        return found.scores, found.indices, self.stats(found.scores[:, -1])

    def stats(self, kth: Tensor | None = None) -> Stats:
        """What was done, and the certificate; waits for the GPU. `kth` `[Nq]`: the k-th best scores, where they are at hand."""
        fell_back = self.never or ""
        if self.brute and not fell_back:
            fell_back = f"{self.brute} of {self.pieces} pieces by brute force: {self.why}"
        kth = of_keys(self.best.pending[:, -1])[0] if kth is None else kth
        read = self.read + len(self.queries) * sum(int(tokens) for tokens in self.brute_read)
        for look in self.looks:
            pruned_before[look.codes] = look.share(kth) <= look.most
        self.looks = []
        return Stats(self.scanned, self.survivors, read * self.width, fell_back, Certificate(kth, self.highest))

    def take(self, keys: Tensor) -> None:
        """As of `Search`."""
        self.best.add_keys(keys)
        self.answered = None
        self.known = self.known or bool((of_keys(keys)[1] >= 0).any())

    def add(
        self, documents: Packed | Rows, codes: Codes | StreamedCodes, residuals: Residuals, first: int | None = None
    ) -> None:
        """Search the documents from number `first` on (None: the next ones), cut into pieces whose bounds fit in memory.

        Codes that lie on the host are streamed.
        """
        if first is not None:
            self.best.skip_to(first)
        # Triton launches on the current device, which need not be the queries' one.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            self._add(documents, codes, residuals)

    def _add(self, documents: Packed | Rows, codes: Codes | StreamedCodes, residuals: Residuals) -> None:
        count = len(documents)
        if not count or not len(self.queries):
            self.best.seen += count
            return
        self.width = documents.dim * documents.dtype.itemsize
        if self.never is None:
            self._look(documents)
        never = self.never or self._unbounded(residuals)
        step, before = self._step(count), self.brute
        if never:
            for first in range(0, count, step):
                self._brute_piece(cut(documents, first, min(first + step, count)), never)
            return
        scan, self.ahead = Scan(codes, self.device, self.room, self.ahead), None
        at_hand = codes if scan.here and not isinstance(codes, StreamedCodes) else None
        pruned = None if at_hand is None else pruned_before.get(at_hand)
        self.doubt = self.doubt and not pruned
        known = residuals.to(self.device)
        terms = cache(lambda: self._terms(scan))  # queued behind the scan, so that the GPU has that to do meanwhile
        if at_hand is not None and not pruned and self._at_once(documents, pruned):
            self._without_scan(documents, at_hand, known, scan.lengths, terms)
            return
        for first in range(0, count, step):
            self._piece(documents, slice(first, min(first + step, count)), scan, known, terms)
        if at_hand is not None:
            pruned_before[at_hand] = self.brute == before
            if scan.ahead is None and self.pieces == 1 and self.brute == before:
                asked = asked_of(self.queries.given, self.k, self.quantize_queries, self.most_rescored)
                remember(documents, at_hand, asked, cut_codes(at_hand, 0, count, scan.size))

    def _at_once(self, documents: Packed | Rows, pruned: bool | None) -> bool:
        """Whether brute force comes first, where bounds did not prune last time or were never looked at (None)."""
        if len(documents) < _SAMPLED or self.most_rescored == 1:
            return False
        if pruned is not None:
            return True
        if self.known or not self._here(documents):
            return False  # one block of many: a sample is enough, for it and those that follow
        tokens = documents.values.shape[0]
        operations = tokens * len(self.queries.values) * documents.dim
        return operations <= _LITTLE and tokens * self.width <= _FEW_BYTES

    def _without_scan(
        self, documents: Packed | Rows, codes: Codes, residuals: Residuals, lengths: Tensor, terms: Callable[[], Tensor]
    ) -> None:
        """Brute force, whose first scores show how many pairs bounds would have left: `stats`, which waits anyhow, counts them."""
        count, step, sample = len(documents), self._step(len(documents)), torch.empty(0, dtype=torch.float32, device="cpu")
        why = "bounds left most of these documents last time"
        if codes not in pruned_before:
            why = "the first search of so few documents, which shows whether the next one should scan"
        for first in range(0, count, step):
            head = self._brute_piece(cut(documents, first, min(first + step, count)), why)
            sample = head if first == 0 else sample
        bounded = self._bounded(sample, terms(), residuals, lengths)
        self.alone = self._alone(documents)
        self.looks.append(_Look(codes, bounded, self._share()))

    def _bounded(self, scores: Tensor, terms: Tensor, residuals: Residuals, lengths: Tensor) -> Bounded:
        """Bounds around `scores` `[Nq, n]` of the first n documents, over codes or exact."""
        count = scores.shape[1]
        sides = residuals.errors[:count], residuals.norms[:count], lengths[:count]
        return Bounded(scores, terms, self.queries.lengths, *sides, _GUESSED)

    def _step(self, count: int) -> int:
        """Documents of a piece: as many as their bounds fit in an eighth of the free memory; the more, the fewer are scored exactly."""
        queries = len(self.queries)
        if self.room.cells is not None:
            return max(1, self.room.cells // _CELL_BYTES // queries)
        if count * queries <= _CELLS // 32 or self.device.type != "cuda":
            return max(_LEAST_DOCUMENTS, _CELLS // 32 // queries)
        free = torch.cuda.mem_get_info(self.device)[0] // 8
        return max(_LEAST_DOCUMENTS, min(_CELLS, free // _CELL_BYTES) // queries)

    def _unbounded(self, residuals: Residuals) -> str:
        """Why documents must be scored by brute force, so that a score lost to -inf is seen; empty if `watched` is off or bounds hold.

        A score with a bound cannot be lost. Computed where residuals lie: on the host nothing waits.
        """
        if self.largest is None:
            return ""
        reach = (residuals.errors.double() + residuals.norms.double()).amax()  # inf where a token is not finite
        bounded = bool(reach * self.largest <= LARGEST) and bool(reach <= LARGEST) and self.largest <= LARGEST
        return "" if bounded else "embeddings among them are not finite, or too large for bounds"

    def _look(self, documents: Packed | Rows) -> None:
        """Find out whether bounds hold on this GPU, and whether pairs may be scored alone."""
        if documents.dim > WIDEST:
            self.never = f"d = {documents.dim} is more than {WIDEST}"
            return
        asked = self.queries
        if not asked.longest:
            self.never = "queries without tokens"
            return
        packed = isinstance(asked.given, Packed)
        form = form_of(self.device, documents.dtype, len(asked), asked.longest, documents.dim, packed)
        trust = looked_at(form, score_alone)
        self.never, self.pairs = trust.bounded, trust.pairs

    def _terms(self, scan: Scan) -> Tensor:
        """The queries' part of the bounds."""
        values, dtype = self.queries.values, scan.dtype
        exact = factor_of(values.dtype)
        quantised = self.quantize_queries
        coded = exact if not quantised else FP8 if dtype == torch.float8_e4m3fn else 1.0
        width = values.shape[1]
        rounding = Rounding.up(gamma_of(width, exact), gamma_of(width, coded), tiny_of(width), scan.shift)
        codes_of, scales = query_codes(values, dtype) if quantised else (None, None)
        asked = self.queries
        return query_terms(values, asked.starts, asked.lengths, asked.longest, codes_of, scales, rounding)

    def _piece(self, whole: Packed | Rows, span: slice, scan: Scan, residuals: Residuals, terms: Callable[[], Tensor]) -> None:
        """Search the documents `span` of `whole`; all other arguments are of `whole`, too."""
        documents, lengths = whole, scan.lengths
        if span != slice(0, len(whole)):
            documents, residuals, lengths = cut(whole, span.start, span.stop), residuals[span], lengths[span]
        count, first, self.alone = len(documents), self.best.seen, self._alone(documents)
        if self.k > self._share() * count and not self.known:  # the leads alone would be too many
            self._brute_piece(documents, self._too_many())
            return
        if self._spread_out(documents):
            self._brute_piece(documents, "the best of so many queries would together be most of the documents")
            return
        doubt = self.doubt and count >= _SAMPLED and self.most_rescored < 1
        if doubt and self._hopeless(documents, terms(), residuals, lengths):
            self._brute_piece(documents, f"a sample of {_SAMPLE} documents says that bounds would leave most")
            return
        self.scanned += count
        approximate = scan.scores(self.queries, span.start, span.stop, self.quantize_queries)
        refused = self._pruned(documents, self._bounded(approximate, terms(), residuals, lengths), scan)
        self.doubt = bool(refused)
        if refused:
            self._brute_piece(documents, refused)
            return
        self.best.skip_to(first + count)
        self.known = True
        self.pieces += 1

    def _too_many(self) -> str:
        return f"more than {self._share():.0%} of the pairs could still be among the best"

    def _brute_piece(self, documents: Packed | Rows, why: str) -> Tensor:
        """Score a piece by brute force; returns the scores `[Nq, n]` of its first documents, at most a sample."""
        self.brute, self.pieces, self.why = self.brute + 1, self.pieces + 1, self.why or why
        head = torch.empty(len(self.queries), 0, dtype=torch.float32, device=self.device)
        for block in everything(documents, self.device, len(self.queries), self.room):
            scores = self._exactly(block)
            head = head if head.shape[1] else scores[:, :_SAMPLE].clone()
        return head

    def _exactly(self, documents: Packed) -> Tensor:
        """Scores `[Nq, n]` of the next documents as brute force has them, added to the best."""
        scores = self.queries.scores(documents)
        self._note_lost(documents, scores)
        self.best.add(scores)
        self.answered, self.known = None, True
        self.every += len(documents)
        self.brute_read.append(documents.lengths.sum())
        return scores

    def _note_lost(self, documents: Packed, scores: Tensor) -> None:
        """Remember the first pair of the next documents that lost its score to -inf; waits for the GPU, where that is looked for."""
        if self.largest is None or self.lost is not None:
            return
        lost = (scores == -torch.inf) & (documents.lengths > 0)[None, :] & (self.queries.lengths > 0)[:, None]
        if bool(lost.any()):
            document, query = lost.T.nonzero()[0].tolist()
            self.lost = query, document + self.best.first + self.best.seen

    def _hopeless(self, documents: Packed | Rows, terms: Tensor, residuals: Residuals, lengths: Tensor) -> bool:
        """Whether bounds would leave most of a piece, by exact scores of a sample; waits for the GPU."""
        sample = everything(cut(documents, 0, _SAMPLE), self.device, len(self.queries), self.room)
        scores = torch.cat([self.queries.scores(block) for block in sample], 1)
        rank = min(_SAMPLE, -(-self.k * _SAMPLE // len(documents)))
        least = scores.topk(rank, dim=1).values[:, -1]
        known = self._known()
        if known is not None:
            least = torch.maximum(least, kth_best(known, self.k))
        left = self._bounded(scores, terms, residuals, lengths).left(least)
        return int(left) > _HOPELESS * scores.numel()

    def _known(self) -> Tensor | None:
        """`[Nq, k]` float32: the best scores so far, in no order; NaN, which will be refused, among them."""
        return of_keys(self.best.unsorted)[0] if self.known else None

    def _pruned(self, documents: Packed | Rows, bounded: Bounded, scan: Scan) -> str:
        """Add the best of the next documents; or say why brute force is cheaper."""
        count, known = len(documents), self._known()
        tallied = Tallied.of(len(self.queries), self.device)
        leads = bounded.leads(min(self.k, count), group_size(count, self.k), known)
        refused = self._score(documents, bounded.marks(leads, None, tallied), scan, leads.scores)
        if refused:
            return refused
        late = bounded.marks(leads, kth_best(known, self.k, leads), tallied)
        refused = self._score(documents, late, scan, leads.scores)
        if refused:
            return refused
        keys = self.best.after(leads.scores)
        found = key_kernels.of_keys(keys, tallied.lost)
        pairs, tokens, lost = tallied.read()  # all of it is queued before the host waits, once
        if self.alone and pairs > int(self._share() * leads.scores.numel()):
            return self._too_many()
        self.tallied.append(tallied)
        self.read += tokens
        self.best.replace(keys)
        self.answered = _Answer(keys, *found, lost)
        return ""

    def _alone(self, documents: Packed | Rows) -> bool:
        """Whether all marked pairs are scored alone at once, where the documents lie, and nobody waits for their number."""
        return self.pairs and self._here(documents) and in_one_piece(documents) and takes(self.queries.values, documents)

    def _here(self, documents: Packed | Rows) -> TypeGuard[Packed]:
        """Whether documents lie on this GPU."""
        return isinstance(documents, Packed) and documents.device == self.device

    def _share(self) -> float:
        """Share of a piece's pairs beyond which brute force is the cheaper way; 1: never."""
        alone = self.most_rescored < 1 and self.alone
        return min(self.most_rescored, _PAIRS_PAY) if alone else self.most_rescored

    def _spread_out(self, documents: Packed | Rows) -> bool:
        """Whether only unions can be scored, and of independent queries that is nearly every document, with no copying to save."""
        left = (1 - min(1.0, self.k / len(documents))) ** len(self.queries)
        return self._here(documents) and self.most_rescored < 1 and left < 1 - _SPREAD and not self.alone

    def _score_pairs(self, documents: Packed, marks: Marks, longest: int, limit: int, scores: Tensor) -> None:
        """Write the marked pairs' scores, unless there are more than `limit`; nothing waits for the GPU."""
        asked = self.queries
        places = asked.starts, asked.lengths, asked.longest
        score_marked(asked.values, *places, documents, longest, marks, limit, scores)

    def _score(self, documents: Packed | Rows, marks: Marks, scan: Scan, scores: Tensor) -> str:
        """Write exact scores of the marked pairs, and maybe of others; returns why not, where there are too many (empty: done)."""
        count = len(documents)
        if self.alone:
            limit = int(self._share() * scores.numel())
            self._score_pairs(cast(Packed, documents), marks, scan.longest, limit, scores)
            return ""
        chosen = marks.counts.nonzero()[:, 0]
        share = chosen.numel() / count
        if int(marks.total) > self.most_rescored * scores.numel():
            return self._too_many()
        if share > _UNION_PAYS and self.most_rescored < 1:
            return f"what some query could still want is {share:.0%} of a piece's documents"
        # Documents that are here and not in one piece may have other bits by the kernel of pairs than by brute force's.
        pairs = self.pairs and not self._here(documents)
        for numbers, held in some(documents, chosen, self.room):
            if pairs and takes(self.queries.values, held):
                self._score_pairs(*_placed(held, numbers, marks), scan.longest, scores.numel(), scores)
            else:
                scores.index_copy_(1, numbers, self.queries.scores(held))
        return ""


def _placed(held: Packed, numbers: Tensor, marks: Marks) -> tuple[Packed, Marks]:
    """Fetched documents, and the marks of those alone, by the numbers `[m]` that they have among all documents of `marks`."""
    starts, lengths = (side.new_zeros(len(marks.counts)).index_copy_(0, numbers, side) for side in (held.starts, held.lengths))
    few = torch.full((), len(numbers), dtype=torch.int64, device=numbers.device)
    return Packed.view(held.values, starts, lengths), replace(marks, listed=numbers.int(), documents=few)


@dataclass(frozen=True)
class _Look:
    """Bounds around exact scores of the first documents of `codes`: they prune if a share of at most `most` of the pairs is left."""

    codes: Codes
    bounded: Bounded
    most: float

    def share(self, kth: Tensor) -> float:
        """Share of pairs that bounds would leave, given the k-th best scores `[Nq]`; waits for the GPU."""
        return int(self.bounded.left(kth)) / max(1, self.bounded.scores.numel())


@dataclass(frozen=True)
class _Answer:
    """The best so far, best first: keys, scores and indices `[Nq, k]`; and whether a NaN, which is to be refused, is among them."""

    keys: Tensor
    scores: Tensor
    indices: Tensor
    lost: bool = False
