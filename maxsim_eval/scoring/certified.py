"""Certified paths: the exact top-k of the stored embeddings through a scan of their INT8 copy (`maxsim_kernels.search`), unit by unit.

A unit's keys are its documents among the best of all documents so far, so that what was found before prunes what comes after. That is
exact in any order of units, resumed parts included: a document is left out only where k others are strictly better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from maxsim_eval.cache.blocks import loaded
from maxsim_eval.cache.copies import Quantised
from maxsim_eval.cache.copy_shards import Tokens
from maxsim_eval.cache.corpus import Corpus, largest_of
from maxsim_eval.cache.selection import Documents, Selection
from maxsim_eval.errors import UsageError
from maxsim_eval.scoring import finite
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.paths import ScoringPath, check_range
from maxsim_eval.scoring.stream import UnitScores
from maxsim_kernels import Int8Tokens, Packed
from maxsim_kernels.search import Rows, Search
from maxsim_kernels.topk import of_keys

_BLOCK_BYTES = 16 << 20  # of codes: a few are read ahead
# Of codes that are searched at once: the best k of them are scored in full precision, so they had better be many more documents than k.
_SEARCHED_BYTES = 128 << 20
_NO_KEY = torch.iinfo(torch.int64).min
_SAME_BITS = {torch.float16: ("fp16", "fused-fp32"), torch.bfloat16: ("bf16", "fused-fp32"), torch.float32: ("fused-fp32",)}


class StoredRows(Rows):
    """Documents of the cache in full precision, read by number; `bytes` and `seconds` say how much and for how long."""

    def __init__(self, documents: Documents) -> None:
        super().__init__(torch.from_numpy(documents.lengths()), documents.dim, documents.dtype)
        self.documents = documents
        self.bytes, self.seconds = 0, 0.0

    def read(self, numbers: Tensor) -> Packed:
        """Only their tokens, in merged reads, checked like everything that is read."""
        started = time.perf_counter()
        rows, entry = numbers.numpy(), self.documents
        if isinstance(entry, Selection):
            rows, entry = entry.rows[rows], entry.entry
        (block,) = loaded(Selection(entry, rows).lazy_blocks(1 << 62))
        self.bytes += block.values.numel() * block.values.element_size()
        self.seconds += time.perf_counter() - started
        return block


def require_certifiable(paths: Mapping[str, ScoringPath], device: str, *, candidates: bool) -> None:
    """Refuse certified paths on another device than the CPU, and beside candidates."""
    for name in (name for name, path in paths.items() if path.certified):
        if torch.device(device).type != "cpu":
            raise UsageError(
                f"path {name}: got device {device}, need cpu: certified evaluations run there alone (exact_topk searches on a GPU too)"
            )
        if candidates:
            raise UsageError(f"path {name}: every listed pair of candidates is scored anyway; name fp16 or fused-fp32 instead")


def require_copies(paths: Mapping[str, ScoringPath], copies: Container[str], convert: str) -> None:
    """Refuse certified paths that are not among `copies`; `convert` is the command that makes them, but for their kind."""
    for name, path in paths.items():
        if path.certified and name not in copies:
            raise UsageError(
                f"path {name}: scans the {path.copy} copy of these embeddings; make it first: {convert} --to {path.copy}"
            )


def certified_units(
    name: str,
    queries: Packed,
    corpus: Corpus,
    asked: Asked,
    units: Sequence[tuple[int, int]],
    *,
    known: Tensor,
    tick: Callable[[int, int], None] = lambda documents, size: None,
) -> Iterator[UnitScores]:
    """As `stream.score_units`, of a certified path: no score rows, since most documents are ruled out without a score.

    Args:
        known: keys `[Nq, k]` of units that are finished: where the threshold begins.

    Raises:
        DataError: a score that is NaN or infinite, named by query and document. CacheError: a file that cannot be read.
    """
    copy, rows = corpus.copies[name], StoredRows(corpus.entry)
    if rows.dtype == torch.float16 and queries.dtype != torch.float16:
        check_range(float(largest_of(queries.values)))
    excluded = torch.from_numpy(asked.excluded)[:, None]
    spare = int(bool((excluded >= 0).any()))  # the document that a query must not retrieve may be its best
    search = Search(queries.to(rows.dtype), asked.k + spare)
    search.take(torch.cat([known, known.new_full((len(known), spare), _NO_KEY)], 1))
    blocks = copy.blocks(units, max_bytes=_BLOCK_BYTES, readers=corpus.readers)
    with closing(blocks):  # type: ignore[type-var]
        for group in _groups(units, rows):
            cost = _Cost(search, rows)
            first, stop = group[0][0], group[-1][1]
            while first < stop:
                codes = cost.waiting(blocks, stop - first)
                span = slice(first, first + len(codes))
                try:
                    search.add(rows[span], codes, copy.residuals(span.start, span.stop), first=first)
                except ValueError:
                    finite.refuse(name, search.keys, None, queries, corpus, asked)  # names what the operator can only number
                    raise
                tick(len(codes), int(codes.token_values.numel()))
                first = span.stop
            keys = _without(search.keys, excluded)[:, : asked.k]
            finite.refuse(name, keys, None if search.lost is None else torch.tensor(search.lost), queries, corpus, asked)
            if not search.stats().certificate.holds:
                raise RuntimeError(f"path {name}: the certificate does not hold; please report this")
            indices, took = of_keys(keys)[1], cost.of_group()
            for start, stop in group:
                own = keys.masked_fill((indices < start) | (indices >= stop), _NO_KEY).sort(1, descending=True).values
                yield UnitScores(start, stop, own.numpy(), None, took)
                took = dict.fromkeys(took, 0.0)  # the first has it all


def _groups(units: Sequence[tuple[int, int]], rows: Rows) -> Iterator[list[tuple[int, int]]]:
    """Units that follow each other, as many as are searched at once."""
    held: list[tuple[int, int]] = []
    for start, stop in units:
        whole = int(rows.lengths[held[0][0] if held else start : stop].sum()) * rows.dim
        if held and (start != held[-1][1] or whole > _SEARCHED_BYTES):
            yield held
            held = []
        held.append((start, stop))
    if held:
        yield held


def _next(blocks: Iterator[Tokens], documents: int) -> Tokens:
    """The codes of the next documents, of this many at most, end to end."""
    held = [next(blocks)]
    while sum(map(len, held)) < documents and sum(one.token_values.numel() for one in held) < _SEARCHED_BYTES:
        held.append(next(blocks))
    if len(held) == 1:
        return held[0]
    lengths = torch.cat([one.codes.lengths for one in held])  # type: ignore[union-attr]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    codes = Packed(torch.cat([one.token_values for one in held]), offsets)
    return Int8Tokens(codes, torch.cat([one.scales for one in held]), granularity="document")


def search_facts(
    counts: Mapping[str, float], queries: int, documents: Documents, copy: Quantised
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a Result says of the search, and of the bytes that a document takes."""
    entry = documents.entry if isinstance(documents, Selection) else documents
    stored = documents.tokens * documents.dim * documents.dtype.itemsize
    search = {
        "certifies": list(_SAME_BITS[documents.dtype]),
        "survivors": counts.get("survivors", 0.0) / max(1, queries),
        "documents": documents.documents,
        "code_bytes": int(counts.get("code_bytes", 0)),
        "row_bytes": int(counts.get("row_bytes", 0)),
        "stored_bytes": stored,
        "pieces": int(counts.get("pieces", 0)),
        "brute_pieces": int(counts.get("brute_pieces", 0)),
    }
    copied = copy.stored_bytes / max(1, entry.documents) + 8
    return search, {"document_bytes": round(stored / max(1, documents.documents) + copied, 3)}


def _without(keys: Tensor, excluded: Tensor) -> Tensor:
    """Keys `[Nq, k]`, best first, without those of documents `excluded` `[Nq, 1]`."""
    return keys.masked_fill(of_keys(keys)[1] == excluded, _NO_KEY).sort(1, descending=True).values


class _Cost:
    """What a group of units takes: seconds by phase, documents scored exactly, bytes read."""

    def __init__(self, search: Search, rows: StoredRows) -> None:
        self.search, self.rows = search, rows
        self.waited, self.codes = 0.0, 0
        self.before, self.started = self._counted(), time.perf_counter()

    def waiting(self, blocks: Iterator[Tokens], documents: int) -> Tokens:
        """The next codes, which have to be waited for."""
        asked = time.perf_counter()
        found = _next(blocks, documents)
        self.waited += time.perf_counter() - asked
        self.codes += found.token_values.numel()
        return found

    def of_group(self) -> dict[str, float]:
        """Seconds by phase and in all, and the counts."""
        found = {name: value - self.before[name] for name, value in self._counted().items()}
        total = time.perf_counter() - self.started
        read = found.pop("read_seconds") + self.waited
        return {"read": read, "score": total - read, "total": total, **found, "code_bytes": float(self.codes)}

    def _counted(self) -> dict[str, float]:
        search = self.search
        return {
            "read_seconds": self.rows.seconds,
            "survivors": float(search.survivors.sum()),
            "row_bytes": float(self.rows.bytes),
            "pieces": float(search.pieces),
            "brute_pieces": float(search.brute),
        }
