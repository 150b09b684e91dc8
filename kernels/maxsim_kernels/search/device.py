"""The search on a GPU: the same three steps as `searching.py`, queued one behind the other, with one small read a piece.

A piece's codes are scored, lower bounds choose the leads, the leads' exact scores set the threshold, and what still reaches it is
scored exactly too. Exact scores are found in one of two ways. Marked pairs are scored alone, document by document, where that has the
bits of brute force on this GPU (`trust.py`) and documents are there; else all queries are scored against the union of the marked
documents, by the very call that brute force makes, of fewer documents. Where a sample says that bounds will not prune, brute force
follows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from maxsim_kernels.gpu.forward.query_codes import query_codes
from maxsim_kernels.gpu.search.bounds import Bounded, Marks, Rounding, query_terms
from maxsim_kernels.gpu.search.survivors import score_marked, takes
from maxsim_kernels.search.bounds import WIDEST, Codes, Residuals, gamma_of, shift_of, tiny_of
from maxsim_kernels.search.fetching import cut, everything, in_one_piece, some
from maxsim_kernels.search.queries import Queries
from maxsim_kernels.search.rows import Rows
from maxsim_kernels.search.searching import Certificate, Stats
from maxsim_kernels.search.trust import FP8, factor_of, form_of, looked_at
from maxsim_kernels.streaming import device_blocks
from maxsim_kernels.streaming.blocks import slice_of
from maxsim_kernels.tokens import Fp8Tokens, Int8Tokens, Packed
from maxsim_kernels.topk import TopK, of_keys

_CELLS, _CELL_BYTES = (
    1 << 27,
    32,
)  # (query, document) pairs bounded at once, and what one takes: 16 bytes, and a top-k's temporaries
_LEAST_DOCUMENTS = 4096
_SAMPLED, _SAMPLE = 2048, 128  # pieces from this size on begin with a sample of so many documents, scored exactly
_HOPELESS = 0.4  # share of the sample's pairs that bounds would leave, beyond which nothing is scanned
_PAIRS_PAY, _UNION_PAYS = 0.1, 0.6  # shares of pairs and documents beyond which brute force is the cheaper way
_SPREAD = 0.9  # of documents that queries which have nothing in common would want, beyond which no union is tried

_pruned_before: WeakKeyDictionary[Codes, bool] = (
    WeakKeyDictionary()
)  # by codes on a device: whether bounds pruned them last time


class DeviceSearch:
    """An exact top-k over blocks of documents that come one after the other, on a GPU. As `Search`, of queries as a call gets them."""

    def __init__(self, queries: Queries, k: int, quantize_queries: bool = True, most_rescored: float = 0.25) -> None:
        self.queries, self.k, self.device = queries, k, queries.device
        self.quantize_queries, self.most_rescored = quantize_queries, most_rescored
        self.best = TopK(len(queries), k, self.device)
        self.never: str | None = None  # why nothing can be pruned; None: not looked at yet
        self.pairs = False
        self.doubt = True
        self.scanned = 0
        self.survivors = torch.zeros(len(queries), dtype=torch.int64, device=self.device)
        self.highest = torch.full((len(queries),), -torch.inf, dtype=torch.float64, device=self.device)
        self.read = torch.zeros((), dtype=torch.int64, device=self.device)  # tokens behind exact scores, for each query
        self.width = 0  # bytes of a token
        self.brute, self.pieces, self.why = 0, 0, ""

    @property
    def keys(self) -> Tensor:
        """`[Nq, k]` int64 keys of the best so far, descending (`maxsim_kernels.topk`), NaN still in them."""
        return self.best.pending

    def stats(self) -> Stats:
        """What was done, and the certificate; waits for the GPU."""
        fell_back = self.never or ""
        if self.brute and not fell_back:
            fell_back = f"{self.brute} of {self.pieces} pieces by brute force: {self.why}"
        certificate = Certificate(of_keys(self.best.pending)[0][:, -1], self.highest)
        return Stats(self.scanned, self.survivors, int(self.read) * self.width, fell_back, certificate)

    def add(self, documents: Packed | Rows, codes: Codes, residuals: Residuals) -> None:
        """The next documents, cut into pieces whose bounds fit in memory. Codes that lie on the host are streamed."""
        # Triton launches on the current device, which need not be the queries' one.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            self._add(documents, codes, residuals)

    def _add(self, documents: Packed | Rows, codes: Codes, residuals: Residuals) -> None:
        count = len(documents)
        if not count or not len(self.queries):
            self.best.seen += count
            return
        self.width = documents.dim * documents.dtype.itemsize
        if self.never is None:
            self._look(documents)
        known = Residuals(residuals.errors.to(self.device), residuals.norms.to(self.device))
        packed = cast(Packed, codes.codes)
        here, before = packed.device == self.device, self.brute
        self.doubt = self.doubt and not (here and _pruned_before.get(codes, False))
        step, size = self._step(count), _even(packed)
        for first in range(0, count, step):
            stop = min(first + step, count)
            part = cut(documents, first, stop)
            if self.never:
                self._brute_piece(part, self.never)
            else:
                lengths = packed.lengths[first:stop].to(self.device)
                scan = partial(self._scan, cut_codes(codes, first, stop, size if here else 0))
                self._piece(part, scan, codes, known[first:stop], lengths)
        if here:
            _pruned_before[codes] = self.brute == before

    def _step(self, count: int) -> int:
        """Documents of a piece: as many as their bounds fit in an eighth of the free memory; the more, the fewer are scored exactly."""
        queries = len(self.queries)
        if count * queries <= _CELLS // 32 or self.device.type != "cuda":
            return max(_LEAST_DOCUMENTS, _CELLS // 32 // queries)
        free = torch.cuda.mem_get_info(self.device)[0] // 8
        return max(_LEAST_DOCUMENTS, min(_CELLS, free // _CELL_BYTES) // queries)

    def _scan(self, codes: Codes) -> Tensor:
        """Scores over codes `[Nq, n]`; codes on the host flow to the device while those before are scored."""
        queries = self.queries
        self.scanned += len(codes)
        if codes.device == self.device:
            return queries.scores(codes, self.quantize_queries)
        found = torch.empty(len(queries), len(codes), device=self.device)
        first = 0
        with closing(device_blocks([codes], self.device, queries=len(queries))) as blocks:
            for block in blocks:
                found[:, first : first + len(block)] = queries.scores(block, self.quantize_queries)
                first += len(block)
        return found

    def _look(self, documents: Packed | Rows) -> None:
        """Whether bounds hold on this GPU, and whether pairs may be scored alone."""
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

    def _terms(self, codes: Codes) -> Tensor:
        """The queries' part of the bounds."""
        values, dtype = self.queries.values, codes.token_values.dtype
        exact = factor_of(values.dtype)
        quantised = self.quantize_queries
        coded = exact if not quantised else FP8 if dtype == torch.float8_e4m3fn else 1.0
        width = values.shape[1]
        rounding = Rounding(_up(gamma_of(width, exact)), _up(gamma_of(width, coded)), _up(tiny_of(width)), _up(shift_of(codes)))
        codes_of, scales = query_codes(values, dtype) if quantised else (None, None)
        return query_terms(values, self.queries.starts, self.queries.lengths, codes_of, scales, rounding)

    def _piece(
        self, documents: Packed | Rows, scan: Callable[[], Tensor], codes: Codes, residuals: Residuals, lengths: Tensor
    ) -> None:
        """Some documents: `scan()` scores their codes; `codes` say of which kind those are."""
        count, first = len(documents), self.best.seen
        if self.k > self._share(documents) * count and not first:  # the leads alone would be too many
            self._brute_piece(documents, self._too_many(documents))
            return
        if self._spread_out(documents):
            self._brute_piece(documents, "the best of so many queries would together be most of the documents")
            return
        sampled = 0
        if self.doubt and count >= _SAMPLED and self.most_rescored < 1:
            sampled = _SAMPLE
            if self._sample(cut(documents, 0, sampled), residuals[:sampled], self._terms(codes), count):
                why = f"a sample of {sampled} documents says that bounds would leave most"
                self._brute_piece(cut(documents, sampled, count), why)
                return
            lengths = lengths.clone()
            lengths[:sampled] = 0  # which have their scores: no bound of theirs is looked at
        approximate = scan()
        bounded = Bounded(approximate, self._terms(codes), self.queries.lengths, residuals.errors, residuals.norms, lengths)
        keys = self._pruned(documents, bounded, first, sampled)
        self.doubt = isinstance(keys, str)
        if isinstance(keys, str):
            self._brute_piece(cut(documents, sampled, count), keys)
            return
        self.best.add_keys(keys)
        self.best.seen = first + count
        self.pieces += 1

    def _too_many(self, documents: Packed | Rows) -> str:
        return f"more than {self._share(documents):.0%} of the pairs could still be among the best"

    def _brute_piece(self, documents: Packed | Rows, why: str) -> None:
        self.brute, self.pieces, self.why = self.brute + 1, self.pieces + 1, self.why or why
        for block in everything(documents, self.device, len(self.queries)):
            self._exactly(block)

    def _exactly(self, documents: Packed) -> Tensor:
        """Scores `[Nq, n]` of the next documents as brute force has them, added to the best."""
        scores = self.queries.scores(documents)
        self.best.add(scores)
        self.survivors += len(documents)
        self.read += documents.lengths.sum() * len(self.queries)
        return scores

    def _sample(self, documents: Packed | Rows, residuals: Residuals, terms: Tensor, count: int) -> bool:
        """Score the first documents of a piece exactly, and say whether bounds would leave most of what follows; waits for the GPU."""
        before = self._best_scores()
        scores = torch.cat([self._exactly(block) for block in everything(documents, self.device, len(self.queries))], 1)
        rank = min(len(documents), -(-self.k * len(documents) // count))
        least = scores.topk(rank, dim=1).values[:, -1]
        if before.shape[1]:
            least = torch.maximum(least, before[:, -1])
        of_error, of_norm, rest = terms[:3].unsqueeze(2)
        width = of_error * residuals.errors + of_norm * residuals.norms + rest
        return float((scores + width >= least[:, None]).double().mean()) > _HOPELESS

    def _best_scores(self) -> Tensor:
        """`[Nq, k]` float32: the best scores so far, descending; NaN, which will be refused, as -inf. Nothing seen yet: `[Nq, 0]`."""
        if not self.best.seen:
            return torch.empty(len(self.queries), 0, device=self.device)
        return of_keys(self.best.pending)[0].nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(1, descending=True).values

    def _pruned(self, documents: Packed | Rows, bounded: Bounded, number: int, sampled: int) -> Tensor | str:
        """Keys `[Nq, k]` of the best of documents from `number` on, but for the sampled ones; or why brute force is cheaper."""
        queries, count = self.queries, len(documents)
        before = self._best_scores()
        held = before[:, -1] if before.shape[1] else torch.full((len(queries),), -torch.inf, device=self.device)
        lower = bounded.lower(held)
        leads = lower.topk(min(self.k, count), dim=1, sorted=False)
        floor = leads.values.amin(1)
        scores = torch.full_like(lower, -torch.inf)
        scores[:, sampled:].masked_fill_((queries.lengths == 0)[:, None], 0.0)
        first = bounded.marks(lower, floor, None)
        refused = self._score(documents, first, scores)
        if refused:
            return refused
        found = scores.gather(1, leads.indices).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        known = torch.cat([before, found], 1)
        least = known.topk(self.k, dim=1).values[:, -1] if known.shape[1] >= self.k else held
        late = bounded.marks(lower, floor, least)
        refused = self._score(documents, late, scores)
        if refused:
            return refused
        best = TopK(len(queries), self.k, self.device, first=number)
        best.add(scores)
        keys = best.pending  # queued before the host waits for the number of pairs
        if self._alone(documents) and int(first.total + late.total) > int(self._share(documents) * scores.numel()):
            return self._too_many(documents)
        self.survivors += first.tally + late.tally
        self.read += ((first.counts + late.counts).long() * bounded.lengths).sum()
        self.highest = torch.maximum(self.highest, late.highest)
        return keys

    def _alone(self, documents: Packed | Rows) -> bool:
        """Whether marked pairs are scored alone."""
        here = isinstance(documents, Packed) and documents.device == self.device and in_one_piece(documents)
        return self.pairs and here and takes(self.queries.values, cast(Packed, documents))

    def _share(self, documents: Packed | Rows) -> float:
        """Share of a piece's pairs beyond which brute force is the cheaper way; 1: never."""
        alone = self.most_rescored < 1 and self._alone(documents)
        return min(self.most_rescored, _PAIRS_PAY) if alone else self.most_rescored

    def _spread_out(self, documents: Packed | Rows) -> bool:
        """Whether unions alone could be scored, and of independent queries would be nearly everything, with no link to spare."""
        here = isinstance(documents, Packed) and documents.device == self.device
        left = (1 - min(1.0, self.k / len(documents))) ** len(self.queries)
        return here and self.most_rescored < 1 and left < 1 - _SPREAD and not self._alone(documents)

    def _score(self, documents: Packed | Rows, marks: Marks, scores: Tensor) -> str:
        """Write exact scores of the marked pairs, and maybe of others; why not, where the union of their documents is too large."""
        count = len(documents)
        if self._alone(documents):
            asked = self.queries
            held = cast(Packed, documents)
            limit = int(self._share(documents) * scores.numel())
            score_marked(asked.values, asked.starts, asked.lengths, asked.longest, held, marks, limit, scores)
            return ""
        chosen = marks.counts.nonzero()[:, 0]
        share = chosen.numel() / count
        if int(marks.total) > self.most_rescored * scores.numel():
            return self._too_many(documents)
        if share > _UNION_PAYS and self.most_rescored < 1:
            return f"what some query could still want is {share:.0%} of a piece's documents"
        for numbers, held in some(documents, chosen):
            scores.index_copy_(1, numbers, self.queries.scores(held))
        return ""


def score_alone(values: Tensor, starts: Tensor, lengths: Tensor, documents: Packed) -> Tensor | None:
    """All pairs as marked ones: what a search is compared with before it scores pairs alone. None: the kernel cannot."""
    if not takes(values, documents):
        return None
    count, device = starts.numel(), values.device
    lists = torch.arange(count, dtype=torch.int32, device=device).expand(len(documents), count).contiguous()
    total = torch.tensor(lists.numel(), device=device)
    marks = Marks(lists, torch.full((len(documents),), count, dtype=torch.int32, device=device), total, total, total)
    scores = torch.empty(count, len(documents), device=device)
    score_marked(values, starts, lengths, int(lengths.max()), documents, marks, lists.numel(), scores)
    return scores


def _up(value: float) -> float:
    """The next number that FP32 holds, not below."""
    found = np.float32(value)
    return float(found if float(found) >= value else np.nextafter(found, np.float32(np.inf)))


_evenness: WeakKeyDictionary[Packed, int] = WeakKeyDictionary()


def _even(packed: Packed) -> int:
    """The length of all documents where that is one, else 0; read from a GPU once."""
    if packed not in _evenness:
        count, tokens = len(packed), packed.values.shape[0]
        size = tokens // count
        even = tokens == count * size and packed.values.is_contiguous() and bool((packed.lengths == size).all())
        _evenness[packed] = size if even else 0
    return _evenness[packed]


def cut_codes(codes: Codes, first: int, stop: int, size: int) -> Codes:
    """Codes of documents `first` to `stop`; of `size` tokens each, where that is not 0, in the faster dense form."""
    held = cast(Packed, codes.codes)
    if not size:
        return cast(Codes, slice_of(codes, first, stop))
    values = held.values[first * size : stop * size].view(stop - first, size, held.dim)

    def dense(one: Tensor) -> Tensor:
        if codes.granularity == "token":
            return one[first * size : stop * size].view(stop - first, size)
        return one[first:stop] if codes.granularity == "document" else one

    if isinstance(codes, Fp8Tokens):
        return Fp8Tokens(values, dense(codes.scales), codes.granularity)
    return Int8Tokens(values, dense(codes.scales), None if codes.offset is None else dense(codes.offset), codes.granularity)
