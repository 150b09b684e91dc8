"""`exact_topk`: codes are scanned, bounds prune, what is left is scored exactly: bit for bit the answer of brute force.

For a block of documents: scores over codes and their widths (`bounds.py`) give an interval that holds each exact score. The k
documents with the best lower bounds are scored exactly; the k-th best exact score so far, of this block and those before, is the
threshold. Every other document whose upper bound reaches it, ties included, is scored exactly too; the rest cannot be among the best
k, whatever their ties. Thresholds only rise, so later blocks prune harder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from maxsim_kernels.api import maxsim
from maxsim_kernels.checks import Options, validate
from maxsim_kernels.search.bounds import WIDEST, Codes, QueryTerms, Residuals, check_codes, query_terms, residuals_of
from maxsim_kernels.search.rescoring import packed_queries, rescored, why_not_alone
from maxsim_kernels.search.rows import Rows, documents_at, part, whole
from maxsim_kernels.tokens import Fp8Tokens, Int8Tokens, Packed
from maxsim_kernels.topk import TopK, keys_of, of_keys, refuse_nan

_CELLS = 1 << 21  # (query, document) pairs bounded at once: about 100 MB of scores, widths and bounds
_LEAST_DOCUMENTS = 256
_KINDS: dict[str, tuple[type, ...]] = {"documents": (Packed, Rows), "codes": (Int8Tokens, Fp8Tokens), "residuals": (Residuals,)}


@dataclass(frozen=True)
class Certificate:
    """Why nothing was missed: no document that was not scored exactly could have reached the k-th best score.

    Args:
        kth: `[Nq]` float32, the k-th best exact score of each query; -inf where it has fewer than k.
        highest: `[Nq]` float64, the highest upper bound among the documents that were not scored exactly; -inf where all were.
    """

    kth: Tensor
    highest: Tensor

    @property
    def holds(self) -> bool:
        """Whether every bound lies below its query's k-th best score."""
        return bool(((self.highest < self.kth) | (self.highest == -torch.inf)).all())


@dataclass(frozen=True)
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


def exact_topk(
    queries: Tensor | Packed,
    documents: Packed | Rows | Iterable[Packed | Rows],
    k: int,
    *,
    codes: Codes | Iterable[Codes],
    residuals: Residuals | Iterable[Residuals] | None = None,
    query_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    quantize_queries: bool = True,
    most_rescored: float = 0.25,
) -> tuple[Tensor, Tensor, Stats]:
    """The exact top-k of `stream_topk(queries, documents, k)`, bit for bit, at the price of a scan of codes. On the CPU.

    Args:
        queries: `[Lq, d]`, `[Nq, Lq, d]` or `Packed`, with mask and lengths as in `maxsim`.
        documents: float documents of the queries' dtype: `Packed` (a view too), `Rows` that are read when they are needed, or blocks of
            either in index order.
        k: how many documents of each query.
        codes: packed `Int8Tokens` or `Fp8Tokens` of the same documents, in the same blocks.
        residuals: `residuals_of(documents, codes)`, in the same blocks. None: made here, which reads every token in full precision;
            store them where a corpus is searched more than once. Needed with `Rows`.
        quantize_queries: scan with quantised queries (faster) or float ones (narrower bounds); never changes the answer.
        most_rescored: share of a block's (query, document) pairs beyond which the block is scored by brute force instead.

    Returns:
        Scores float32 and indices int64, `[k]` for one query `[Lq, d]`, else `[Nq, k]`, and `Stats`. Order, ties, -inf and padding as
        in `stream_topk`.

    Raises:
        ValueError: names the argument, what it got and what it needs; a NaN score, by query and document.
    """
    if k < 1:
        raise ValueError(f"k: got {k}, need 1 or more")
    if not 0 <= most_rescored <= 1:
        raise ValueError(f"most_rescored: got {most_rescored}, need 0 to 1")
    single = isinstance(queries, Tensor) and queries.dim() == 2
    search: _Search | None = None
    with torch.no_grad():
        for block, coded, stored in _blocks(documents, codes, residuals):
            like = block if isinstance(block, Packed) else Packed(block.empty(), torch.zeros(1, dtype=torch.int64))
            call = validate(queries, like, Options(query_mask=query_mask, query_lengths=query_lengths))
            if call.queries.device.type != "cpu":
                raise ValueError(
                    f"queries: on {call.queries.device}, need CPU tensors: a GPU rounds otherwise (docs/search.md)"
                )
            check_codes(block, coded)
            if stored is None and not isinstance(block, Packed):
                raise ValueError("residuals: got none with Rows, need residuals_of(documents, codes), stored beside the codes")
            known = residuals_of(block, coded) if stored is None else stored  # type: ignore[arg-type]
            if len(known) != len(block):
                raise ValueError(f"residuals: got {len(known)} documents, need {len(block)} as in documents")
            if search is None:
                search = _Search(packed_queries(call), k, quantize_queries, most_rescored)
            search.add(block, coded, known)
    if search is None:
        raise ValueError("documents: got no blocks, need at least one (it may hold no documents)")
    scores, indices = of_keys(search.keys)
    stats = search.stats()
    return (scores[0], indices[0], stats) if single else (scores, indices, stats)


def _blocks(
    documents: Packed | Rows | Iterable[Packed | Rows],
    codes: Codes | Iterable[Codes],
    residuals: Residuals | Iterable[Residuals] | None,
) -> Iterator[tuple[Packed | Rows, Codes, Residuals | None]]:
    """Blocks beside their codes and residuals; a different number of them is refused."""
    if isinstance(documents, Packed | Rows):
        if not isinstance(codes, Int8Tokens | Fp8Tokens) or not isinstance(residuals, Residuals | None):
            raise ValueError("codes, residuals: got blocks of them with documents in one piece, need one of each")
        yield documents, codes, residuals
        return
    if isinstance(codes, Int8Tokens | Fp8Tokens) or isinstance(residuals, Residuals):
        raise ValueError("codes, residuals: got one piece with documents in blocks, need blocks of the same documents")
    sides = [iter(documents), iter(codes), *([iter(residuals)] if residuals is not None else [])]
    number = 0
    while True:
        held = [next(side, None) for side in sides]
        if all(one is None for one in held):
            return
        for (name, kinds), one in zip(_KINDS.items(), held, strict=False):
            if not isinstance(one, kinds):
                got = "no more blocks" if one is None else type(one).__name__
                need = " or ".join(kind.__name__ for kind in kinds)
                raise ValueError(f"{name}: got {got} as block {number}, need {need}")
        yield held[0], held[1], held[2] if residuals is not None else None  # type: ignore[misc]
        number += 1


class _Search:
    """The best so far of every query, `keys` `[Nq, k]` (`topk.py`), and what finding them took."""

    def __init__(self, queries: Packed, k: int, quantize_queries: bool, most_rescored: float) -> None:
        self.queries, self.k = queries, k
        self.quantize_queries, self.most_rescored = quantize_queries, most_rescored
        count = len(queries)
        self.keys = TopK(count, k).pending
        self.void = queries.lengths == 0  # which score 0 with everything
        self.seen = 0
        self.scanned = 0
        self.survivors = torch.zeros(count, dtype=torch.int64)
        self.highest = torch.full((count,), -torch.inf, dtype=torch.float64)
        self.rescored_bytes = 0
        self.never = ""  # why nothing can be pruned
        self.brute, self.pieces = 0, 0

    def stats(self) -> Stats:
        """What was done, and the certificate."""
        kth = of_keys(self.keys)[0][:, -1]
        fell_back = self.never
        if self.brute and not fell_back:
            share = f"more than {self.most_rescored:.0%} of the pairs could still be among the best"
            fell_back = f"{self.brute} of {self.pieces} pieces by brute force: {share}"
        certificate = Certificate(kth, self.highest)
        return Stats(self.scanned, self.survivors, self.rescored_bytes, fell_back, certificate)

    def add(self, documents: Packed | Rows, codes: Codes, residuals: Residuals) -> None:
        """The next documents, cut into pieces whose bounds fit in memory."""
        if self.pieces == 0 and len(documents):
            wide = f"d = {documents.dim} is more than {WIDEST}" if documents.dim > WIDEST else ""
            self.never = wide or why_not_alone(self.queries, documents.dim)
        terms = None if self.never else query_terms(self.queries, codes, self.quantize_queries)
        step = max(_LEAST_DOCUMENTS, _CELLS // max(1, len(self.queries)))
        for first in range(0, len(documents), step):
            span = slice(first, min(first + step, len(documents)))
            piece = part(documents, span)
            scores = None
            if terms is not None:
                coded = codes.select(torch.arange(span.start, span.stop))
                scores = self._pruned(piece, coded, terms, residuals[span])
            if scores is None:
                scores = self._all(piece)
            keys = keys_of(scores, self.seen)
            self.keys = torch.cat([self.keys, keys], 1).topk(self.k, dim=1).values
            refuse_nan(self.keys)
            self.seen += len(piece)
            self.pieces += 1

    def _all(self, documents: Packed | Rows) -> Tensor:
        """Brute force: scores `[Nq, n]`."""
        self.brute += 1
        self.survivors += len(documents)
        self.rescored_bytes += len(self.queries) * int(documents.lengths.sum()) * _token_bytes(documents)
        found = [maxsim(self.queries, block) for block in whole(documents)]
        scores = torch.cat([one for one in found if isinstance(one, Tensor)], 1)
        return scores

    def _pruned(self, documents: Packed | Rows, codes: Codes, terms: QueryTerms, residuals: Residuals) -> Tensor | None:
        """Scores `[Nq, n]`, exact or -inf where a document cannot be among the best; None where too many can."""
        count, k = len(documents), self.k
        lower, upper = self._bounds(documents, codes, terms, residuals)
        scores = torch.full(upper.shape, -torch.inf)
        most = self.most_rescored * upper.numel()
        held = of_keys(self.keys)[0]
        alive = (upper >= held[:, -1:]) & (upper > -torch.inf)
        leads = lower.masked_fill_(~alive, -torch.inf).topk(min(k, count), dim=1).indices
        done = torch.zeros_like(alive).scatter_(1, leads, True).logical_and_(alive)
        if int(done.sum()) > most:
            return None
        self._rescore(documents, done, scores)
        if bool(torch.isnan(scores).any()):
            return None  # to be refused with the name of the first such document: brute force finds that
        kth = torch.cat([held, scores], 1).topk(k, dim=1).values[:, -1:]
        late = (upper >= kth) & alive & ~done
        if int(done.sum()) + int(late.sum()) > most:
            return None
        self._rescore(documents, late, scores)
        done |= late
        scores[self.void] = 0.0
        self.survivors += done.sum(1)
        self.rescored_bytes += int((done.sum(0) * documents.lengths).sum()) * _token_bytes(documents)
        self.highest = torch.maximum(self.highest, upper.masked_fill_(done, -torch.inf).amax(1))
        return scores

    def _bounds(self, documents: Packed | Rows, codes: Codes, terms: QueryTerms, residuals: Residuals) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds FP64 `[Nq, n]` of the exact scores; -inf for pairs whose score needs no look at the tokens."""
        approximate = maxsim(self.queries, codes, quantize_queries=self.quantize_queries)
        assert isinstance(approximate, Tensor)
        self.scanned += len(documents)
        width = terms.width(residuals)
        unknown = ~torch.isfinite(width)
        upper = (approximate + width).masked_fill_(unknown, torch.inf)
        lower = (approximate - width).masked_fill_(unknown, -torch.inf)
        known = (documents.lengths == 0)[None, :] | self.void[:, None]
        return lower.masked_fill_(known, -torch.inf), upper.masked_fill_(known, -torch.inf)

    def _rescore(self, documents: Packed | Rows, chosen: Tensor, scores: Tensor) -> None:
        """Write the exact scores of the chosen pairs; of `Rows` each document is read once, in order."""
        for numbers, held in documents_at(documents, chosen.any(0).nonzero()[:, 0]):
            asked = chosen[:, numbers]
            for query in asked.any(1).nonzero()[:, 0].tolist():
                which = asked[query].nonzero()[:, 0]
                scores[query, numbers[which]] = rescored(self.queries[query], held, which)


def _token_bytes(documents: Packed | Rows) -> int:
    return documents.dim * documents.dtype.itemsize
