"""The quantised copy of a cache entry: what `convert` wrote beside it, read in place of quantising the entry while it is scored."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.bars import Bar
from maxsim_eval.cache.blocks import Span, cut, ends_of, reader, runs_of
from maxsim_eval.cache.copy_shards import Kind, QuantisedShard, Tokens, copy_name, entry_digest, get_kind, open_copy
from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.selection import Documents, Selection, whole
from maxsim_eval.cache.stripes import Claims
from maxsim_eval.errors import CacheError, UsageError
from maxsim_kernels import LazyCodes
from maxsim_kernels.search import Residuals

BLOCK_BYTES = 16 << 20  # of codes: a few blocks are in memory at once


@dataclass(frozen=True)
class Quantised:
    """Documents of a complete copy, in order."""

    documents: Documents
    kind: Kind
    shards: tuple[QuantisedShard, ...] = field(repr=False)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all codes, scales and offsets of the entry; the residuals of a certified search take 8 more a document."""
        entry = whole(self.documents)
        others = {"token": 0, "document": entry.documents, "corpus": len(self.shards)}[self.kind.granularity]
        return entry.tokens * self.kind.token_bytes(entry.dim) + others * 2 * len(self.kind.columns)

    def stamp(self) -> dict[str, Any]:
        """What tells this copy from any other, as JSON."""
        return {"kind": self.kind.name, "shards": [shard.metadata_sha256 for shard in self.shards]}

    def scale(self) -> float | None:
        """The corpus's scale; None where tokens or documents have their own."""
        return float(self.shards[0].columns["scales"]) if self.kind.granularity == "corpus" else None

    def lazy_blocks(
        self, max_bytes: int = BLOCK_BYTES, spans: Iterable[tuple[int, int]] | None = None, claims: Claims | None = None
    ) -> Iterator[LazyCodes]:
        """Packed codes of whole documents that are read when their turn comes.

        Args:
            max_bytes: of a block's codes; a larger document is a block of its own.
            spans: ranges of documents (start, stop), each cut into blocks of its own; default: one of all documents.
            claims: long runs of columns "codes", "scales" and "offset" are read unchecked; whoever takes the claims proves them.

        Raises:
            UsageError: `max_bytes` below 1, or a range that is none; at once. CacheError, when a block is read: a file that ends too
                early, cannot be read, or is no longer the one that was opened.
        """
        count = self.documents.documents
        spans = [(0, count)] if spans is None else list(spans)
        if max_bytes < 1:
            raise UsageError(f"max_bytes: got {max_bytes}, need at least 1")
        for start, stop in spans:
            if not 0 <= start <= stop <= count:
                raise UsageError(f"documents: got {start} to {stop}, need a range within 0 to {count}")
        make, most = partial(self._lazy, claims=claims), max_bytes // self.documents.dim
        return (block for start, stop in spans for block in cut(self.documents.spans(start, stop), lambda _: most, make))

    def blocks(
        self, spans: Iterable[tuple[int, int]] | None = None, *, max_bytes: int = BLOCK_BYTES, readers: int = 1
    ) -> Iterator[Tokens]:
        """The same blocks, read ahead by `readers` threads: CPU `Int8Tokens` or `Fp8Tokens` with memory of their own.

        Raises:
            UsageError: as `lazy_blocks`, and `readers` below 1; at once. CacheError: as `lazy_blocks`.
        """
        if readers < 1:
            raise UsageError(f"readers: got {readers}, need at least 1")
        return _ahead((block.load for block in self.lazy_blocks(max_bytes, spans)), readers)

    def _lazy(self, spans: Sequence[Span], claims: Claims | None) -> LazyCodes:
        offsets, runs = ends_of(np.concatenate([span.lengths for span in spans])), runs_of(spans)
        copies = {copy.shard.spec.shard: copy for copy in self.shards}
        here = [copies[span.shard.spec.shard] for span in spans]
        base = 0 if claims is None else claims.room(int(offsets[-1]))
        columns: dict[str, Tensor | Callable[[int, Tensor], None]] = {}
        for name in ("codes", *self.kind.columns):
            if name in here[0].single:
                own = [replace(part, shard=copy.single[name]) for part, copy in zip(runs, here, strict=True)]
                columns[name] = reader([part.left_to(claims, name, base) for part in own])
            elif self.kind.granularity == "document":
                parts = [copy.columns[name][span.rows] for copy, span in zip(here, spans, strict=True)]
                columns[name] = torch.from_numpy(np.concatenate(parts))
            else:
                columns[name] = torch.from_numpy(np.array(here[0].columns[name]))
        dtype = self.kind.torch_dtype
        return LazyCodes(torch.from_numpy(offsets), self.documents.dim, dtype, self.kind.granularity, columns)

    def residuals(self, start: int, stop: int) -> Residuals:
        """How far the codes of documents `start` to `stop` are from their tokens (docs/search.md)."""
        parts = [shard.residuals(_rows(self.documents, shard, start, stop)) for shard in self.shards]
        return Residuals(torch.cat([part.errors for part in parts]), torch.cat([part.norms for part in parts]))

    def verify(self, *, quiet: bool = True) -> None:
        """Read everything; `CacheError` names the file and the tokens that changed."""
        total, name = whole(self.documents).tokens, f"verify {self.kind.name}"
        with Bar(total=total, desc=name, unit=" tokens", unit_scale=True, disable=quiet) as bar:
            for shard in self.shards:
                for count in shard.verify():
                    bar.update(count)


def quantised(documents: Documents, name: str) -> Quantised | None:
    """The quantised copy (`int8-token`, `int8-document`, ...) of an entry, or of documents of one; None where there is none.

    A partial copy is not used, and a warning says so. One with a scale for the whole corpus is not used for a part of it.

    Raises:
        UnknownNameError: no such kind. CacheError: a copy that is damaged, stale, truncated or foreign: the file and the reason.
    """
    kind, entry = get_kind(name), whole(documents)
    if kind.granularity == "corpus" and entry is not documents:
        return None
    missing = missing_copies(entry, kind)
    if len(missing) == len(entry.shards):
        return None
    if missing:
        warnings.warn(
            f"{entry.folder}: its {name} copy is partial ({len(missing)} of {len(entry.shards)} shards are missing) and not used; "
            "`evaluate.py convert` goes on with it",
            stacklevel=2,
        )
        return None
    digest = entry_digest(entry.stamp())
    shards = []
    for shard in entry.shards:
        shards.append(open_copy(entry.folder / copy_name(shard.spec.shard, kind), shard, kind, digest))
        if kind.granularity == "corpus" and shards[-1].columns["scales"] != shards[0].columns["scales"]:
            raise CacheError(
                f"{shards[-1].path}: its scale is not that of {shards[0].path.name}. Remove it, and convert again."
            )
    return Quantised(documents, kind, tuple(shards))


def missing_copies(entry: Entry, kind: Kind) -> list[int]:
    """Shards that have no copy of this kind."""
    return [shard.spec.shard for shard in entry.shards if not (entry.folder / copy_name(shard.spec.shard, kind)).exists()]


def _rows(documents: Documents, shard: QuantisedShard, start: int, stop: int) -> np.ndarray:
    """Documents `start` to `stop` that lie in a shard, numbered within it."""
    begin, end = shard.shard.spec.start, shard.shard.spec.stop
    if isinstance(documents, Selection):
        chosen = documents.rows[start:stop]
        first, last = np.searchsorted(chosen, (begin, end))
        rows: np.ndarray = chosen[first:last] - begin
        return rows
    return np.arange(max(start, begin), min(stop, end), dtype=np.int64) - begin  # empty where they do not overlap


def _ahead(reads: Iterator[Callable[[], Tokens]], readers: int) -> Iterator[Tokens]:
    """The results of these calls, in order; `readers` threads make them ahead of their turn."""
    with ThreadPoolExecutor(readers, "copy-reader") as pool:
        waiting: deque[Future[Tokens]] = deque()
        try:
            for read in reads:
                waiting.append(pool.submit(read))
                if len(waiting) > readers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # leaving `with` waits for those that run
