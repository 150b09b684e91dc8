"""Some documents of a cache entry, read where they lie: how a subset of a corpus is scored without a copy of its embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maxsim_eval.entries import Entry, cuts
from maxsim_eval.errors import UsageError
from maxsim_eval.shards import ReadTokens, Shard
from maxsim_kernels import Packed


@dataclass(frozen=True)
class Selection:
    """Documents `rows` of a complete entry, in its order; to a reader of blocks it is an entry of these documents alone.

    Args:
        entry: the entry of the whole corpus.
        rows: `[M]` int64, strictly ascending, within the entry's documents.

    Raises:
        UsageError: rows that are not so.
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

    def blocks(self, max_bytes: int = 64 << 20) -> Iterator[Packed]:
        """The chosen documents in order, as `Entry.blocks` gives those of an entry; only their tokens are read.

        Raises:
            UsageError: `max_bytes` below 1.
            CacheError: a file that ends too early or cannot be read.
        """
        if max_bytes < 1:
            raise UsageError(f"max_bytes: got {max_bytes}, need at least 1")
        return self._blocks(max_bytes)

    def _blocks(self, max_bytes: int) -> Iterator[Packed]:
        for shard in self.entry.shards:
            first, last = np.searchsorted(self.rows, (shard.spec.start, shard.spec.stop))
            if first < last:
                with shard.opened() as read:
                    yield from self._shard_blocks(shard, read, self.rows[first:last] - shard.spec.start, max_bytes)

    def _shard_blocks(self, shard: Shard, read: ReadTokens, rows: np.ndarray, max_bytes: int) -> Iterator[Packed]:
        """Blocks of documents `rows` of one shard."""
        starts, stops = shard.offsets[rows], shard.offsets[rows + 1]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])  # within the chosen tokens
        for begin, end in cuts(offsets, max_bytes // shard.spec.row_bytes):
            values = torch.empty(int(offsets[end] - offsets[begin]), self.dim, dtype=self.dtype)
            # Documents whose tokens follow each other in the file are read at once.
            breaks = np.flatnonzero(starts[begin + 1 : end] != stops[begin : end - 1]) + begin + 1
            bounds = [begin, *breaks.tolist(), end]
            for one, other in pairwise(bounds):
                target = values[int(offsets[one] - offsets[begin]) : int(offsets[other] - offsets[begin])]
                if target.shape[0]:
                    read(int(starts[one]), target)
            yield Packed(values, torch.from_numpy(offsets[begin : end + 1] - offsets[begin]))


Documents = Entry | Selection
