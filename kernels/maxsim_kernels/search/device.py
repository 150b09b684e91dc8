"""The search on a GPU: the same three steps as `searching.py`, queued one behind the other, with one small read a piece.

A piece's codes are scored, lower bounds choose the leads, the leads' exact scores set the threshold, and what still reaches it is
scored exactly too. Exact scores are found in one of two ways. Marked pairs are scored alone, document by document, where that has the
bits of brute force on this GPU (`trust.py`) and documents are there; else all queries are scored against the union of the marked
documents, by the very call that brute force makes, of fewer documents. Where a sample says that bounds will not prune, brute force
follows at once.
"""

from __future__ import annotations

from contextlib import closing, nullcontext
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

_CELLS = 1 << 25  # (query, document) pairs bounded at once: 16 bytes each
_LEAST_DOCUMENTS = 4096
_SAMPLED, _SAMPLE = 2048, 128  # pieces from this size on begin with a sample of so many documents, scored exactly
_HOPELESS = 0.4  # share of the sample's pairs that bounds would leave, beyond which nothing is scanned
_PAIRS_PAY, _UNION_PAYS = 0.1, 0.6  # shares of pairs and documents beyond which brute force is the cheaper way
_FEW_QUERIES = 4  # whose survivors are as many documents as pairs: scored together

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
        self.read = torch.zeros(
            (), dtype=torch.int64, device=self.device
        )  # tokens behind exact scores, each query's for itself
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
        residuals = Residuals(residuals.errors.to(self.device), residuals.norms.to(self.device))
        step = max(_LEAST_DOCUMENTS, _CELLS // len(self.queries))
        if self.never:
            for first in range(0, count, step):
                self._brute_piece(cut(documents, first, min(first + step, count)), self.never)
            return
        packed = cast(Packed, codes.codes)
        size = _even(packed)
        if packed.device == self.device:
            self.doubt = not _pruned_before.get(codes, False)
            before = self.brute
            for first in range(0, count, step):
                stop = min(first + step, count)
                self._piece(cut(documents, first, stop), _cut_codes(codes, first, stop, size), residuals[first:stop])
            _pruned_before[codes] = self.brute == before
            return
        first = 0
        with closing(device_blocks([codes], self.device, queries=len(self.queries))) as blocks:
            for block in blocks:
                stop = first + len(block)
                held = _cut_codes(cast(Codes, block), 0, len(block), size)
                self._piece(cut(documents, first, stop), held, residuals[first:stop])
                first = stop

    def _look(self, documents: Packed | Rows) -> None:
        """Whether bounds hold on this GPU, and whether pairs may be scored alone."""
        if documents.dim > WIDEST:
            self.never = f"d = {documents.dim} is more than {WIDEST}"
            return
        dtype = documents.dtype
        asked = self.queries
        form = form_of(self.device, dtype, len(asked), asked.longest, documents.dim, isinstance(asked.given, Packed))
        trust = looked_at(form, score_alone) if asked.longest else None
        self.never = trust.bounded if trust is not None else "queries without tokens"
        self.pairs = trust is not None and trust.pairs

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

    def _piece(self, documents: Packed | Rows, codes: Codes, residuals: Residuals) -> None:
        count = len(documents)
        shared = self.most_rescored * count
        if self.k > shared and not self.best.seen:  # the leads alone would be too many
            self._brute_piece(documents, self._too_many())
            return
        if self.doubt and count >= _SAMPLED and self.most_rescored < 1:
            hopeless = self._sample(cut(documents, 0, _SAMPLE), residuals[:_SAMPLE], self._terms(codes), count)
            documents, residuals = cut(documents, _SAMPLE, count), residuals[_SAMPLE:]
            if hopeless:
                self._brute_piece(documents, f"a sample of {_SAMPLE} documents says that bounds would leave most")
                return
            codes = _cut_codes(codes, _SAMPLE, count, 0)
        scores = self._pruned(documents, codes, residuals)
        if isinstance(scores, str):
            self.doubt = True
            self._brute_piece(documents, scores)
            return
        self.doubt = False
        self.best.add_keys(scores)
        self.best.seen += len(documents)
        self.pieces += 1

    def _too_many(self) -> str:
        return f"more than {self.most_rescored:.0%} of the pairs could still be among the best"

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

    def _pruned(self, documents: Packed | Rows, codes: Codes, residuals: Residuals) -> Tensor | str:
        """Keys `[Nq, k]` of the best, where documents that cannot be among them have no score; or why brute force is cheaper."""
        queries, count = self.queries, len(documents)
        approximate = queries.scores(codes, self.quantize_queries)
        self.scanned += count
        packed = codes.codes
        lengths = packed.lengths if isinstance(packed, Packed) else _full(count, packed.shape[1], self.device)
        bounded = Bounded(approximate, self._terms(codes), queries.lengths, residuals.errors, residuals.norms, lengths)
        before = self._best_scores()
        held = before[:, -1] if before.shape[1] else lengths.new_full((len(queries),), -torch.inf, dtype=torch.float32)
        lower = bounded.lower(held)
        leads = lower.topk(min(self.k, count), dim=1, sorted=False)
        floor = leads.values.amin(1)
        scores = torch.full_like(lower, -torch.inf)
        scores.masked_fill_((queries.lengths == 0)[:, None], 0.0)
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
        best = TopK(len(queries), self.k, self.device, first=self.best.seen)
        best.add(scores)
        keys = best.pending  # queued before the host waits for the number of pairs
        if self._alone(documents) and int(first.total + late.total) > self._most(count):
            return self._too_many()
        self.survivors += first.tally + late.tally
        self.read += ((first.counts + late.counts).long() * lengths).sum()
        self.highest = torch.maximum(self.highest, late.highest)
        return keys

    def _alone(self, documents: Packed | Rows) -> bool:
        """Whether marked pairs are scored alone."""
        here = isinstance(documents, Packed) and documents.device == self.device and in_one_piece(documents)
        few = len(self.queries) <= _FEW_QUERIES
        return self.pairs and here and not few and takes(self.queries.values, cast(Packed, documents))

    def _most(self, count: int) -> int:
        """Pairs of a piece beyond which brute force is the cheaper way."""
        share = self.most_rescored
        return int((share if share == 1 else min(share, _PAIRS_PAY)) * count * len(self.queries))

    def _score(self, documents: Packed | Rows, marks: Marks, scores: Tensor) -> str:
        """Write exact scores of the marked pairs, and maybe of others; why not, where the union of their documents is too large."""
        count = len(documents)
        if self._alone(documents):
            asked = self.queries
            held = cast(Packed, documents)
            score_marked(asked.values, asked.starts, asked.lengths, asked.longest, held, marks, self._most(count), scores)
            return ""
        chosen = marks.counts.nonzero()[:, 0]
        share = chosen.numel() / count
        if int(marks.total) > self.most_rescored * scores.numel():
            return self._too_many()
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


def _full(count: int, size: int, device: torch.device) -> Tensor:
    return torch.full((count,), size, dtype=torch.int64, device=device)


_evenness: WeakKeyDictionary[Packed, int] = WeakKeyDictionary()


def _even(packed: Packed) -> int:
    """The length of all documents where that is one, else 0; read from a GPU once."""
    if packed not in _evenness:
        count, tokens = len(packed), packed.values.shape[0]
        size = tokens // count
        even = tokens == count * size and packed.values.is_contiguous() and bool((packed.lengths == size).all())
        _evenness[packed] = size if even else 0
    return _evenness[packed]


def _cut_codes(codes: Codes, first: int, stop: int, size: int) -> Codes:
    """Codes of documents `first` to `stop`; of `size` tokens each, where that is not 0, in the faster dense form."""
    held = codes.codes
    if not isinstance(held, Packed):
        scales = codes.scales if codes.granularity == "corpus" else codes.scales[first:stop]
        offset = getattr(codes, "offset", None)
        return _like(codes, held[first:stop], scales, offset if offset is None or not offset.dim() else offset[first:stop])
    if not size:
        return cast(Codes, slice_of(codes, first, stop))
    values = held.values[first * size : stop * size].view(stop - first, size, held.dim)

    def dense(one: Tensor) -> Tensor:
        if codes.granularity == "token":
            return one[first * size : stop * size].view(stop - first, size)
        return one[first:stop] if codes.granularity == "document" else one

    offset = getattr(codes, "offset", None)
    return _like(codes, values, dense(codes.scales), None if offset is None else dense(offset))


def _like(codes: Codes, values: Tensor, scales: Tensor, offset: Tensor | None) -> Codes:
    if isinstance(codes, Fp8Tokens):
        return Fp8Tokens(values, scales, codes.granularity)
    return Int8Tokens(values, scales, offset, codes.granularity)
