"""An entry of the embedding cache: a manifest and its shards in one folder, opened when whole (`filling.py`: filled where not).

The manifest is written first and fixes which documents every shard holds. Anything that is damaged, truncated, partial or
foreign is refused with its path and the reason; nothing is repaired silently.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch

from maxsim_eval.bars import Bar
from maxsim_eval.cache.blocks import Span, lazy_blocks, loaded
from maxsim_eval.cache.shards import (
    DTYPES,
    FORMAT,
    Shard,
    ShardSpec,
    open_shard,
    shard_name,
    write_error,
)
from maxsim_eval.cache.stripes import Claims
from maxsim_eval.errors import CacheError
from maxsim_eval.files import open_regular, write_text
from maxsim_eval.hashing import digest, feed
from maxsim_eval.parsing import json_of
from maxsim_kernels import LazyBlock, Packed

MANIFEST = "manifest.json"
_FIELDS = ("format", "key", "documents", "ids", "documents_per_shard", "boundaries", "dim", "dtype", "provenance")


@dataclass(frozen=True)
class Entry:
    """A complete entry: token embeddings of `documents` documents (or queries), read from disk when asked for."""

    folder: Path
    manifest: dict[str, Any] = field(repr=False)
    documents: int
    tokens: int
    dim: int
    dtype: torch.dtype
    shards: tuple[Shard, ...] = field(repr=False)

    def ids(self) -> list[str]:
        """Document ids, in order."""
        return [text for shard in self.shards for text in shard.ids()]

    def lengths(self) -> np.ndarray:
        """`[N]` int64: tokens of every document."""
        return np.concatenate([np.zeros(0, np.int64), *(np.diff(shard.offsets) for shard in self.shards)])

    def stamp(self) -> dict[str, Any]:
        """What tells these embeddings from any others, as JSON: the entry's key and the checksum of every shard, values included."""
        return {"key": self.manifest["key"], "shards": [shard.metadata_sha256 for shard in self.shards]}

    def blocks(self, max_bytes: int = 64 << 20) -> Iterator[Packed]:
        """All documents in order, as CPU `Packed` of whole documents with at most `max_bytes` of values.

        A document that is larger than `max_bytes` is a block of its own. Every block has memory of its own.

        Raises:
            UsageError: `max_bytes` below 1.
            CacheError: a file that ends too early, cannot be read, or is no longer the one that was opened.
        """
        return loaded(self.lazy_blocks(max_bytes))

    def lazy_blocks(
        self, max_bytes: int, start: int = 0, stop: int | None = None, claims: Claims | None = None
    ) -> Iterator[LazyBlock]:
        """Documents `start` to `stop` (default: the last) cut as `blocks` cuts them, to be read when their turn comes.

        Any number of threads may call `read` of any blocks, or of parts of one block, at once. With `claims`, long runs of tokens are
        read unchecked, and whoever takes the claims proves them.

        Raises:
            UsageError: `max_bytes` below 1, or an impossible range; at once.
            CacheError: when a block is read: as `blocks`.
        """
        return lazy_blocks(self.spans, max_bytes, start, stop, self.documents, claims)

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Documents `start` to `stop`, shard by shard."""
        for shard in self.shards:
            first, last = max(start, shard.spec.start) - shard.spec.start, min(stop, shard.spec.stop) - shard.spec.start
            if first < last:
                yield Span.of(shard, np.arange(first, last, dtype=np.int64))

    @property
    def checked(self) -> bool:
        """Whether values are proven whenever they are read."""
        return all(shard.checked for shard in self.shards)

    def unchecked(self) -> Entry:
        """The same entry, whose values are not checked when they are read."""
        return replace(self, shards=tuple(replace(shard, checked=False) for shard in self.shards))

    def load(self) -> Packed:
        """The whole entry in memory: values `[tokens, dim]`, offsets `[documents + 1]` int64."""
        values = torch.empty(self.tokens, self.dim, dtype=self.dtype)
        first = 0
        for shard in self.shards:
            shard.read(0, values[first : first + shard.tokens])
            first += shard.tokens
        return Packed(values, torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths())])))

    def verify(self, *, quiet: bool = True) -> None:
        """Read everything; `CacheError` names the file and the tokens that changed."""
        with Bar(total=self.tokens, desc="verify", unit=" tokens", unit_scale=True, disable=quiet) as bar:
            for shard in self.shards:
                for count in shard.verify():
                    bar.update(count)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an entry, proven by its checksum; `CacheError` names the file and the reason."""
    path = folder / MANIFEST
    remove = f"Remove the folder {folder} to encode it again."
    try:
        with open_regular(path) as handle:
            manifest = json_of(handle.read())
    except FileNotFoundError as error:
        raise CacheError(f"{path}: missing, so {folder} is no cache entry (or one that was never begun)") from error
    except OSError as error:
        raise CacheError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise CacheError(f"{path}: damaged: no JSON ({error}). {remove}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), str):
        raise CacheError(f"{path}: not a manifest of the embedding cache (no format, need {FORMAT!r})")
    if manifest["format"] != FORMAT:
        raise CacheError(f"{path}: format {manifest['format']!r}, this version of maxsim-eval reads {FORMAT!r}. {remove}")
    checksum = manifest.pop("checksum", None)
    if set(manifest) != set(_FIELDS) or checksum != digest(manifest):
        raise CacheError(f"{path}: damaged or edited: its checksum does not fit what it says. {remove}")
    for name, (fits, need) in _NEEDED.items():
        if not fits(manifest[name]):
            raise CacheError(f"{path}: {name} is {str(manifest[name])[:60]}, need {need}. {remove}")
    if manifest["boundaries"][-1] != manifest["documents"]:
        raise CacheError(
            f"{path}: boundaries end at {manifest['boundaries'][-1]}, need {manifest['documents']} documents. {remove}"
        )
    return manifest


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_size(value: Any) -> bool:
    return _is_count(value) and value > 0


def _are_boundaries(value: Any) -> bool:
    if not isinstance(value, list) or not value or not all(map(_is_count, value)):
        return False
    return value[0] == 0 and all(low < high for low, high in itertools.pairwise(value))


def _is_provenance(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(value.get(name, ""), str) for name in _NAMES):
        return False
    notes = value.get("notes", [])
    return isinstance(notes, list) and all(map(_is_text, notes))


_NAMES = ("origin", "source", "dataset", "role", "encoder", "revision", "content")
# A checksum says that nobody changed a manifest since it was written, not that this program wrote it.
_NEEDED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "key": (_is_text, "text"),
    "documents": (_is_count, "a count"),
    "ids": (_is_text, "text"),
    "documents_per_shard": (_is_size, "a count of 1 or more"),
    "boundaries": (_are_boundaries, "ascending counts from 0 on"),
    "dim": (_is_size, "a width of 1 or more"),
    "dtype": (lambda value: _is_text(value) and value in DTYPES, f"one of {', '.join(DTYPES)}"),
    "provenance": (_is_provenance, f"an object whose {', '.join(_NAMES)} are text and whose notes are a list of it"),
}


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest, whole or not at all, with its checksum."""
    text = json.dumps({**manifest, "checksum": digest(manifest)}, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        write_text(folder / MANIFEST, text + "\n")
    except OSError as error:
        raise write_error(folder / MANIFEST, len(text.encode()), error) from error


def ids_hash(ids: Sequence[bytes]) -> str:
    """SHA-256 over ordered ids (UTF-8), each behind its length."""
    running = hashlib.sha256()
    for start in range(0, len(ids), 65536):
        feed(running, ids[start : start + 65536])
    return running.hexdigest()


def require_same(folder: Path, manifest: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """`CacheError` where a field of the manifest is not what is asked for."""
    for name, need in wanted.items():
        if manifest[name] != need:
            what = "hash of the ids" if name == "ids" else name
            raise CacheError(
                f"{folder / MANIFEST}: an entry for something else: {what} is {manifest[name]!r}, need {need!r}. "
                "Remove the folder, or choose another cache folder."
            )


def spec_of(manifest: Mapping[str, Any], number: int) -> ShardSpec:
    """What a shard of the entry must be."""
    start, stop = manifest["boundaries"][number : number + 2]
    return ShardSpec(manifest["key"], number, start, stop, manifest["dim"], manifest["dtype"])


def missing_shards(folder: Path, manifest: Mapping[str, Any]) -> list[int]:
    """Numbers of the shards that are not there, in order."""
    return [n for n in range(len(manifest["boundaries"]) - 1) if not (folder / shard_name(n)).exists()]


def open_entry(folder: Path | str, *, verify: bool = False) -> Entry:
    """Open a complete entry; metadata of every shard is proven, with `verify=True` every stored value too.

    Raises:
        CacheError: missing, partial (names the shards), damaged, truncated, of another format version, or with
            shards or ids of something else; the message names the file and the reason.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    require_whole(folder, manifest)
    shards: list[Shard] = []
    ids: list[bytes] = []
    for number in range(len(manifest["boundaries"]) - 1):
        shard, names_of_shard = open_shard(folder / shard_name(number), spec_of(manifest, number))
        shards.append(shard)
        ids += names_of_shard
    if ids_hash(ids) != manifest["ids"]:
        raise CacheError(f"{folder}: the ids in its shards are not those of {MANIFEST}. Remove the folder to encode it again.")
    entry = entry_of(folder, manifest, shards)
    if verify:
        entry.verify()
    return entry


def require_whole(folder: Path, manifest: Mapping[str, Any]) -> None:
    """`CacheError` names the shards that are missing."""
    if missing := missing_shards(folder, manifest):
        names = ", ".join(shard_name(number) for number in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise CacheError(
            f"{folder}: partial: {len(missing)} of {len(manifest['boundaries']) - 1} shards are missing ({names}). "
            "Run the command that began it again: it encodes only these."
        )


def entry_of(folder: Path, manifest: Mapping[str, Any], shards: Sequence[Shard]) -> Entry:
    """The entry made of all its shards, opened; that they hold the manifest's ids is proven already."""
    if slow := [shard.path.name for shard in shards if shard.position is None]:
        warnings.warn(
            f"{folder}: {len(slow)} shards ({slow[0]}, ...) are chunked or compressed: read through HDF5, more slowly",
            stacklevel=3,
        )
    return Entry(
        folder=folder,
        manifest=dict(manifest),
        documents=manifest["documents"],
        tokens=sum(shard.tokens for shard in shards),
        dim=manifest["dim"],
        dtype=DTYPES[manifest["dtype"]],
        shards=tuple(shards),
    )


def open_if_complete(folder: Path, wanted: Mapping[str, Any]) -> Entry | None:
    """The entry when it is whole, None when it has to be filled; `CacheError` when it is for something else."""
    if not (folder / MANIFEST).exists():
        return None
    manifest = read_manifest(folder)
    require_same(folder, manifest, wanted)
    return None if missing_shards(folder, manifest) else open_entry(folder)


@contextmanager
def locked(folder: Path, timeout: float) -> Iterator[None]:
    """Hold the entry's lock; a `CacheError` where another process does for longer than `timeout` seconds.

    The lock file stays: removed, it would let two processes lock two files of one name.
    """
    lock = filelock.FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout)
    except filelock.Timeout as error:
        raise CacheError(
            f"{folder}: another process is writing this entry (waited {timeout:g} s for its lock). Run the command "
            "again when that process has finished: what it wrote is used."
        ) from error
    except OSError as error:
        raise CacheError(f"{folder}: cannot be created or locked: {error}") from error
    try:
        yield
    finally:
        lock.release()
