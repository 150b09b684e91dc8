"""Certified paths: the exact top-k of the stored embeddings through a scan of their INT8 copy (`maxsim_kernels.search`), unit by unit.

A unit's keys are its documents among the best of all documents so far, so that what was found before prunes what comes after. That is
exact in any order of units, resumed parts included: a document is left out only where k others are strictly better. Codes are
streamed to a GPU as they are read, followed by the full precision of documents that the scan could not rule out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maxsim_eval.cache.blocks import loaded
from maxsim_eval.cache.copies import Quantised
from maxsim_eval.cache.copy_shards import Tokens
from maxsim_eval.cache.corpus import Corpus, largest_of, within_memory
from maxsim_eval.cache.selection import Documents, choose, whole
from maxsim_eval.errors import UsageError
from maxsim_eval.processes.world import World
from maxsim_eval.scoring import finite
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.paths import ScoringPath, check_range
from maxsim_eval.scoring.stream import UnitScores
from maxsim_kernels import Int8Tokens, LazyCodes, Packed
from maxsim_kernels.search import Rows, Search, StreamedCodes, begin_search, why_no_search
from maxsim_kernels.topk import of_keys

_BLOCK_BYTES = 16 << 20  # of codes in memory: a few are read ahead
_LAZY_BYTES = 128 << 20  # of those that flow to a GPU, as its ring cuts them
# Codes that are searched at once: the best k of each search are scored in full precision, so it should span far more documents
# than k. A CPU holds them all, a GPU streams them. A search that was interrupted is done again: a few seconds.
_SEARCHED_BYTES = {"cpu": 128 << 20, "cuda": 8 << 30}
_NO_KEY = torch.iinfo(torch.int64).min
_SAME_BITS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fused-fp32"}
Tick = Callable[[int, int], None]


class StoredRows(Rows):
    """Documents of the cache in full precision, or widened to `dtype`, by number; counts `bytes` and `seconds` of reading."""

    def __init__(self, documents: Documents, dtype: torch.dtype | None = None) -> None:
        super().__init__(torch.from_numpy(documents.lengths()), documents.dim, dtype or documents.dtype)
        self.documents = documents
        self.bytes, self.seconds = 0, 0.0

    def read(self, numbers: Tensor) -> Packed:
        """Only their tokens, in merged reads, checked like everything that is read."""
        started = time.perf_counter()
        (block,) = loaded(choose(self.documents, numbers.numpy()).lazy_blocks(1 << 62))
        self.bytes += block.values.numel() * block.values.element_size()
        self.seconds += time.perf_counter() - started
        return block.to(self.dtype)


class StoredCodes(StreamedCodes):
    """The copy's codes of documents `first` to `stop`, read when they are scanned; `bytes`, `documents`: read so far."""

    def __init__(self, copy: Quantised, lengths: Tensor, first: int, tick: Tick) -> None:
        super().__init__(lengths, torch.int8)
        self.copy, self.first, self.tick = copy, first, tick
        self.bytes, self.documents = 0, 0

    def read(self, start: int, stop: int) -> Iterator[LazyCodes]:
        """Blocks that are read on their way to the device."""
        for block in self.copy.lazy_blocks(_LAZY_BYTES, [(self.first + start, self.first + stop)]):
            size = int(block.offsets[-1]) * block.dim
            self.bytes, self.documents = self.bytes + size, self.documents + len(block)
            yield block
            self.tick(len(block), size)


def certified_by(dtype: torch.dtype, device: str) -> list[str]:
    """The paths whose run a certified path equals to the last byte, where it multiplies embeddings as `dtype`.

    A CPU widens half precision before it multiplies, so `fused-fp32` is the same there; matrix units of a GPU do not.
    """
    same = [_SAME_BITS[dtype]]
    return same if torch.device(device).type != "cpu" or same == ["fused-fp32"] else [*same, "fused-fp32"]


def require_certifiable(paths: Mapping[str, ScoringPath], device: str, *, candidates: bool) -> None:
    """Refuse certified paths on a device that cannot search, and beside candidates."""
    for name in (name for name, path in paths.items() if path.certified):
        if reason := why_no_search(device):
            raise UsageError(f"path {name}: device {device}: {reason}")
        if candidates:
            raise UsageError(f"path {name}: every listed pair of candidates is scored anyway; name fp16 or fused-fp32 instead")


def require_copies(paths: Mapping[str, ScoringPath], copies: Container[str], convert: str) -> None:
    """Refuse certified paths that are not among `copies`; `convert` is the command that makes them, without `--to KIND`."""
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
    tick: Tick = lambda documents, size: None,
    world: World | None = None,
) -> Iterator[UnitScores]:
    """As `stream.score_units`, of a certified path: no score rows, since most documents are ruled out without a score.

    Args:
        known: keys `[Nq, k]` of units that are finished: they give the first threshold.
        world: the processes that share the corpus; on CPUs each prunes by what all have found in their first pieces, so those without
            units call this too.

    Raises:
        DataError: a score that is NaN or infinite, named by query and document. CacheError: a file that cannot be read. UsageError: a
            memory budget that is too small, or large.
    """
    copy, rows = corpus.copies[name], StoredRows(corpus.entry, asked.paths[name].precision)
    if rows.dtype == torch.float16 and queries.dtype != torch.float16:
        check_range(float(largest_of(queries.values)))
    excluded = torch.from_numpy(asked.excluded)[:, None]
    spare = int(bool((excluded >= 0).any()))  # one more: the document that a query must not retrieve may be among its best
    with within_memory(f"path {name}"), ExitStack() as stack:
        try:
            search = begin_search(queries.to(rows.dtype).to(corpus.device), asked.k + spare, memory_budget=corpus.memory_budget)
        except ValueError as error:  # too small a memory budget
            raise UsageError(f"path {name}: {error}") from error
        search.take(torch.cat([known, known.new_full((len(known), spare), _NO_KEY)], 1))
        if isinstance(search, Search) and world is not None and meets(world, corpus.device):
            search.meet = partial(_kth_of_all, world)
        feed = (_HeldCodes if isinstance(search, Search) else _StreamedCodes)(copy, rows, units, corpus.readers, tick)
        stack.callback(feed.close)
        for group in _groups(units, rows, _SEARCHED_BYTES[torch.device(corpus.device).type]):
            cost = _Cost(search, rows, feed)
            for first, stop, codes in feed.of(group[0][0], group[-1][1]):
                try:
                    search.add(rows[slice(first, stop)], codes, copy.residuals(first, stop), first=first)  # type: ignore[arg-type]
                except ValueError:
                    finite.refuse(name, search.keys, None, queries, corpus, asked)  # names the pair by its ids
                    raise
            keys = _without(search.keys.cpu(), excluded)[:, : asked.k]
            finite.refuse(name, keys, None if search.lost is None else torch.tensor(search.lost), queries, corpus, asked)
            if not search.stats().certificate.holds:
                raise RuntimeError(f"path {name}: the certificate does not hold; please report this")
            indices, took = of_keys(keys)[1], cost.of_group()
            for start, stop in group:
                own = keys.masked_fill((indices < start) | (indices >= stop), _NO_KEY).sort(1, descending=True).values
                yield UnitScores(start, stop, own.numpy(), None, took)
                took = dict.fromkeys(took, 0.0)  # the first unit bears the cost of its group
        if isinstance(search, Search):
            search.attend()


def meets(world: World, device: str) -> bool:
    """Whether processes share the best scores of their first pieces (several on CPUs); those without units then take part too."""
    return world.size > 1 and torch.device(device).type == "cpu"


def _kth_of_all(world: World, best: Tensor) -> Tensor:
    """The k-th best score `[Nq, 1]` over the k best `[Nq, k]` of every process."""
    merged = world.reduce(best, lambda parts: torch.cat(list(parts), 1).topk(best.shape[1], dim=1).values)
    found: Tensor = world.share(None if merged is None else merged[:, -1:].contiguous())
    return found


Group = list[tuple[int, int]]
Fed = Iterator[tuple[int, int, Tokens | StoredCodes]]


def _groups(units: Sequence[tuple[int, int]], rows: Rows, most: int) -> Iterator[Group]:
    """Units that follow each other, as many as are searched at once: `most` bytes of codes, one unit at least."""
    held: Group = []
    for start, stop in units:
        whole = int(rows.lengths[held[0][0] if held else start : stop].sum()) * rows.dim
        if held and (start != held[-1][1] or whole > most):
            yield held
            held = []
        held.append((start, stop))
    if held:
        yield held


class _HeldCodes:
    """Codes of documents in memory, a part after the other; those of all units are read ahead. `bytes`, `seconds`: of reading."""

    def __init__(self, copy: Quantised, rows: Rows, units: Sequence[tuple[int, int]], readers: int, tick: Tick) -> None:
        self.blocks = copy.blocks(units, max_bytes=_BLOCK_BYTES, readers=readers)
        self.tick, self.bytes, self.seconds = tick, 0, 0.0

    def of(self, first: int, stop: int) -> Fed:
        """Documents `first` to `stop` and their codes, a part after the other."""
        while first < stop:
            asked = time.perf_counter()
            codes = self._next(stop - first)
            size = int(codes.token_values.numel())
            self.seconds, self.bytes = self.seconds + time.perf_counter() - asked, self.bytes + size
            yield first, first + len(codes), codes
            self.tick(len(codes), size)
            first += len(codes)

    def _next(self, documents: int) -> Tokens:
        """The codes of the next documents, joined: at most this many, until they fill `_SEARCHED_BYTES`."""
        held, most = [next(self.blocks)], _SEARCHED_BYTES["cpu"]
        while sum(map(len, held)) < documents and sum(one.token_values.numel() for one in held) < most:
            held.append(next(self.blocks))
        if len(held) == 1:
            return held[0]
        lengths = torch.cat([one.codes.lengths for one in held])  # type: ignore[union-attr]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        codes = Packed(torch.cat([one.token_values for one in held]), offsets)
        return Int8Tokens(codes, torch.cat([one.scales for one in held]), granularity="document")

    def close(self) -> None:
        """End the threads that read ahead."""
        self.blocks.close()  # type: ignore[attr-defined]


class _StreamedCodes:
    """As `_HeldCodes`, of codes that are read when they are scanned."""

    def __init__(self, copy: Quantised, rows: Rows, units: Sequence[tuple[int, int]], readers: int, tick: Tick) -> None:
        self.copy, self.rows, self.tick = copy, rows, tick
        self.bytes, self.seconds = 0, 0.0  # of reading, no seconds: the scan waits for codes on the GPU

    def of(self, first: int, stop: int) -> Fed:
        """All of these documents as one part; their codes are read when they are scanned."""
        codes = StoredCodes(self.copy, self.rows.lengths[first:stop], first, self.tick)
        yield first, stop, codes
        self.tick(stop - first - codes.documents, 0)  # scored by brute force, without their codes
        self.bytes += codes.bytes

    def close(self) -> None:
        """Do nothing: nothing is open between two reads."""


def search_facts(
    counts: Mapping[str, float],
    queries: int,
    documents: Documents,
    copy: Quantised,
    device: str,
    precision: torch.dtype | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A Result's `search` of a certified path, and its `memory`: the bytes a document takes; `precision` as of the path."""
    entry = whole(documents)
    stored = documents.tokens * documents.dim * documents.dtype.itemsize
    search = {
        "certifies": certified_by(precision or documents.dtype, device),
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

    def __init__(self, search: Any, rows: StoredRows, feed: _HeldCodes | _StreamedCodes) -> None:
        self.search, self.rows, self.feed = search, rows, feed
        self.before, self.started = self._counted(), time.perf_counter()

    def of_group(self) -> dict[str, float]:
        """Seconds by phase and in all, and the counts."""
        found = {name: value - self.before[name] for name, value in self._counted().items()}
        total = time.perf_counter() - self.started
        read = found.pop("read_seconds")
        return {"read": read, "score": total - read, "total": total, **found}

    def _counted(self) -> dict[str, float]:
        search = self.search
        return {
            "read_seconds": self.rows.seconds + self.feed.seconds,
            "survivors": float(search.survivors.sum()),
            "row_bytes": float(self.rows.bytes),
            "code_bytes": float(self.feed.bytes),
            "pieces": float(search.pieces),
            "brute_pieces": float(search.brute),
        }
