"""`convert`: a quantised copy beside a cache entry, shard by shard, in flat memory; an interrupted one goes on where it stopped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from maxsim_eval.bars import Bar
from maxsim_eval.cache.blocks import loaded
from maxsim_eval.cache.copies import Quantised, quantised
from maxsim_eval.cache.copy_shards import (
    Kind,
    StaleCopyError,
    Tokens,
    copy_name,
    corpus_scale,
    entry_digest,
    get_kind,
    open_copy,
    write_copy,
)
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.entries import Entry, locked, open_entry
from maxsim_eval.cache.shards import Shard
from maxsim_eval.errors import CacheError, DataError
from maxsim_kernels.search import Residuals, residuals_of

_PIECE_BYTES = 8 << 20  # quantising takes some six times that


@dataclass(frozen=True)
class Converted:
    """What `convert` left behind: the copy, and how many of its shards were there, are new, or replaced a stale one."""

    copy: Quantised
    kept: int
    written: int
    replaced: int

    @property
    def ratio(self) -> float:
        """Bytes of the entry's tokens for each of the copy's (nan: no tokens)."""
        entry = self.copy.documents
        return entry.tokens * entry.dim * entry.dtype.itemsize / (self.copy.stored_bytes or float("nan"))


def convert_entry(entry: Entry, name: str, *, quiet: bool = False, lock_timeout: float = 60.0) -> Converted:
    """Write the quantised copy `name` of a complete entry, or what is missing of it, under the entry's lock.

    A corpus's scale takes a pass over all shards first; an interrupted conversion takes it from a shard that is finished. A copy of a
    shard that has changed since is replaced.

    Raises:
        UnknownNameError: no such kind. DataError: tokens that no FP16 scale can hold, an entry without documents.
        CacheError: a damaged shard or copy (named, left as it is), the lock, a disk that is full: finished shards stay.
    """
    kind = get_kind(name)
    if not entry.documents:
        raise DataError(f"{entry.folder}: holds no documents, so there is nothing to convert")
    with locked(entry.folder, lock_timeout):
        for leftover in entry.folder.glob(".*.tmp"):  # of a writer that was killed: a living one would hold the lock
            leftover.unlink(missing_ok=True)
        entry = open_entry(entry.folder)  # what it is now that nobody else writes
        digest = entry_digest(entry.stamp())
        missing, stale, scale = _state_of_copies(entry, kind, digest)
        todo = [shard for shard in entry.shards if shard.spec.shard in {*missing, *stale}]
        if todo:
            _require_space(entry, kind, todo)
            if kind.granularity == "corpus" and scale is None:
                scale = _scale(entry, quiet)
            _write(entry, kind, digest, todo, scale, quiet)
    copy = quantised(entry, name)
    assert copy is not None
    return Converted(copy, len(entry.shards) - len(todo), len(missing), len(stale))


def _state_of_copies(entry: Entry, kind: Kind, digest: str) -> tuple[list[int], list[int], Tensor | None]:
    """Shards without a copy, those whose copy is stale, and the corpus's scale if a good one has it."""
    missing, stale, scale = [], [], None
    for shard in entry.shards:
        path = entry.folder / copy_name(shard.spec.shard, kind)
        if not path.exists():
            missing.append(shard.spec.shard)
            continue
        try:
            found = open_copy(path, shard, kind, digest)
        except StaleCopyError:
            stale.append(shard.spec.shard)
            continue
        if kind.granularity == "corpus":
            scale = torch.from_numpy(found.columns["scales"])
    return missing, stale, scale


def _require_space(entry: Entry, kind: Kind, todo: list[Shard]) -> None:
    need = sum(shard.tokens for shard in todo) * kind.token_bytes(entry.dim)
    free = shutil.disk_usage(entry.folder).free
    if free < need:
        raise CacheError(
            f"{entry.folder}: the {kind.name} copy needs {need / 1e9:,.2f} GB more, {free / 1e9:,.2f} GB are free. Make room; "
            "nothing was written."
        )


def _scale(entry: Entry, quiet: bool) -> Tensor:
    try:
        return corpus_scale(Corpus(entry, quiet).absmax())
    except ValueError as error:
        raise DataError(f"{entry.folder}: {error}") from error


def _write(entry: Entry, kind: Kind, digest: str, todo: list[Shard], scale: Tensor | None, quiet: bool) -> None:
    documents = sum(shard.spec.stop - shard.spec.start for shard in todo)
    with Bar(
        total=entry.documents, initial=entry.documents - documents, desc=kind.name, unit=" documents", disable=quiet
    ) as bar:
        for shard in todo:

            def pieces(shard: Shard = shard) -> Iterator[tuple[Tokens, Residuals]]:
                for block in loaded(entry.lazy_blocks(_PIECE_BYTES, shard.spec.start, shard.spec.stop)):
                    try:
                        codes = kind.quantise(block, scale)
                    except ValueError as error:
                        raise DataError(f"{shard.path}: {error}") from error
                    yield codes, residuals_of(block, codes)
                    bar.update(len(block))

            write_copy(entry.folder / copy_name(shard.spec.shard, kind), shard, kind, digest, pieces())
