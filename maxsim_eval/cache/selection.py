"""Some documents of a cache entry, read where they lie: how a subset of a corpus is scored without a copy of its embeddings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maxsim_eval.cache.blocks import Span, lazy_blocks, loaded
from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.stripes import Claims
from maxsim_eval.errors import UsageError
from maxsim_kernels import LazyBlock, Packed


@dataclass(frozen=True)
class Selection:
    """Documents `rows` of a complete entry, in its order; to a reader of blocks it is an entry of these documents alone.

    Args:
        entry: the entry of the whole corpus.
        rows: `[M]` int64, strictly ascending, within the entry's documents.

    Raises:
        UsageError: other rows.
    """

    entry: Entry
    rows: np.ndarray = field(repr=False)

    def __post_init__(self) -> None:
        rows = self.rows
        if rows.ndim != 1 or rows.dtype != np.int64:
            raise UsageError(f"rows: got {rows.dtype} {list(rows.shape)}, need 1-D int64")
        if rows.size and (rows[0] < 0 or rows[-1] >= self.entry.documents or (np.diff(rows) < 1).any()):
            raise UsageError(f"rows: need ascending numbers within 0..{self.entry.documents - 1}, each once")

    @property
    def folder(self) -> Path:
        """Folder of the whole entry."""
        return self.entry.folder

    @property
    def checked(self) -> bool:
        """As of the whole entry."""
        return self.entry.checked

    def unchecked(self) -> Selection:
        """The same selection, whose values are not checked when they are read."""
        return replace(self, entry=self.entry.unchecked())

    @property
    def manifest(self) -> dict[str, Any]:
        """Manifest of the whole entry."""
        return self.entry.manifest

    @property
    def documents(self) -> int:
        """Number of chosen documents M."""
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """Number of their tokens."""
        return int(self.lengths().sum())

    @property
    def dim(self) -> int:
        """Embedding width d."""
        return self.entry.dim

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tokens."""
        return self.entry.dtype

    def lengths(self) -> np.ndarray:
        """`[M]` int64: tokens of every chosen document."""
        return self.entry.lengths()[self.rows]

    def stamp(self) -> dict[str, Any]:
        """What tells these embeddings from any others, as JSON: the whole entry's, and a SHA-256 of the rows."""
        return {**self.entry.stamp(), "rows": hashlib.sha256(self.rows.astype("<i8").tobytes()).hexdigest()}

    def blocks(self, max_bytes: int = 64 << 20) -> Iterator[Packed]:
        """The chosen documents in order, as `Entry.blocks` gives those of an entry; only their tokens are read.

        Raises:
            UsageError: `max_bytes` below 1.
            CacheError: a file that ends too early, cannot be read, or is no longer the one that was opened.
        """
        return loaded(self.lazy_blocks(max_bytes))

    def lazy_blocks(
        self, max_bytes: int, start: int = 0, stop: int | None = None, claims: Claims | None = None
    ) -> Iterator[LazyBlock]:
        """Chosen documents `start` to `stop`, as `Entry.lazy_blocks` gives those of an entry; only their tokens are read."""
        return lazy_blocks(self.spans, max_bytes, start, stop, self.documents, claims)

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Chosen documents `start` to `stop`, shard by shard."""
        chosen = self.rows[start:stop]
        for shard in self.entry.shards:
            first, last = np.searchsorted(chosen, (shard.spec.start, shard.spec.stop))
            if first < last:
                yield Span.of(shard, chosen[first:last] - shard.spec.start)


Documents = Entry | Selection


def whole(documents: Documents) -> Entry:
    """The entry that these documents belong to."""
    return documents.entry if isinstance(documents, Selection) else documents


def choose(documents: Documents, rows: np.ndarray) -> Selection:
    """Some of these documents, by their numbers `rows` among them (`[M]` int64, strictly ascending)."""
    return Selection(documents.entry, documents.rows[rows]) if isinstance(documents, Selection) else Selection(documents, rows)
