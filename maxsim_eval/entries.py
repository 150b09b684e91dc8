"""An entry of the embedding cache: a manifest and its shards in one folder, opened when whole, filled where not.

The manifest is written first and fixes which documents every shard holds. A missing shard is encoded again and a
finished one never is, so an interrupted run continues where it stopped. Anything that is damaged, truncated, partial or
foreign is refused with its path and the reason; nothing is repaired silently.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
from tqdm import tqdm

from maxsim_eval.errors import CacheError, UsageError
from maxsim_eval.files import write_text
from maxsim_eval.hashing import canonical, feed
from maxsim_eval.lazy import Span, lazy_blocks, loaded
from maxsim_eval.shards import (
    DTYPES,
    FORMAT,
    Shard,
    ShardSpec,
    encode_ids,
    open_shard,
    shard_name,
    write_error,
    write_shard,
)
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

    def lazy_blocks(self, max_bytes: int, start: int = 0, stop: int | None = None) -> Iterator[LazyBlock]:
        """Documents `start` to `stop` (default: the last) cut as `blocks` cuts them, to be read when their turn comes.

        Any number of threads may call `read` of any blocks, or of parts of one block, at once.

        Raises:
            UsageError: `max_bytes` below 1, or a range that is none; at once.
            CacheError: when a block is read: as `blocks`.
        """
        return lazy_blocks(self._spans, max_bytes, start, stop, self.documents)

    def _spans(self, start: int, stop: int) -> Iterator[Span]:
        for shard in self.shards:
            first, last = max(start, shard.spec.start) - shard.spec.start, min(stop, shard.spec.stop) - shard.spec.start
            if first < last:
                yield Span(shard, shard.offsets[first:last], shard.offsets[first + 1 : last + 1])

    def load(self) -> Packed:
        """The whole entry in memory: values `[tokens, dim]`, offsets `[documents + 1]` int64."""
        values = torch.empty(self.tokens, self.dim, dtype=self.dtype)
        first = 0
        for shard in self.shards:
            shard.read(0, values[first : first + shard.tokens])
            first += shard.tokens
        return Packed(values, torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths())])))

    def verify(self, *, quiet: bool = True) -> None:
        """Read everything and check every stripe's CRC; `CacheError` names the file and the tokens that changed."""
        with tqdm(total=self.tokens, desc="verify", unit=" tokens", unit_scale=True, disable=quiet) as bar:
            for shard in self.shards:
                for count in shard.verify():
                    bar.update(count)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an entry, proven by its checksum; `CacheError` names the file and the reason."""
    path = folder / MANIFEST
    remove = f"Remove the folder {folder} to encode it again."
    try:
        manifest = json.loads(path.read_bytes())
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
    if set(manifest) != set(_FIELDS) or checksum != _checksum(manifest):
        raise CacheError(f"{path}: damaged or edited: its checksum does not fit what it says. {remove}")
    return manifest


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(manifest)).hexdigest()


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        write_text(folder / MANIFEST, text + "\n")
    except OSError as error:
        raise write_error(folder / MANIFEST, len(text.encode()), error) from error


def ids_hash(ids: Sequence[bytes]) -> str:
    """SHA-256 over ordered ids (UTF-8), each behind its length."""
    digest = hashlib.sha256()
    for start in range(0, len(ids), 65536):
        feed(digest, ids[start : start + 65536])
    return digest.hexdigest()


def require_same(folder: Path, manifest: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """`CacheError` where a field of the manifest is not what is asked for."""
    for name, need in wanted.items():
        if manifest[name] != need:
            what = "hash of the ids" if name == "ids" else name
            raise CacheError(
                f"{folder / MANIFEST}: an entry for something else: {what} is {manifest[name]!r}, need {need!r}. "
                "Remove the folder, or choose another cache folder."
            )


def _spec(manifest: Mapping[str, Any], number: int) -> ShardSpec:
    start, stop = manifest["boundaries"][number : number + 2]
    return ShardSpec(manifest["key"], number, start, stop, manifest["dim"], manifest["dtype"])


def _missing(folder: Path, manifest: Mapping[str, Any]) -> list[int]:
    return [n for n in range(len(manifest["boundaries"]) - 1) if not (folder / shard_name(n)).exists()]


def open_entry(folder: Path | str, *, verify: bool = False) -> Entry:
    """Open a complete entry; metadata of every shard is proven, with `verify=True` every stored value too.

    Raises:
        CacheError: missing, partial (names the shards), damaged, truncated, of another format version, or with
            shards or ids of something else; the message names the file and the reason.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if missing := _missing(folder, manifest):
        names = ", ".join(shard_name(number) for number in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise CacheError(
            f"{folder}: partial: {len(missing)} of {len(manifest['boundaries']) - 1} shards are missing ({names}). "
            "Run the command that began it again: it encodes only these."
        )
    shards: list[Shard] = []
    ids: list[bytes] = []
    for number in range(len(manifest["boundaries"]) - 1):
        shard, names_of_shard = open_shard(folder / shard_name(number), _spec(manifest, number))
        shards.append(shard)
        ids += names_of_shard
    if ids_hash(ids) != manifest["ids"]:
        raise CacheError(f"{folder}: the ids in its shards are not those of {MANIFEST}. Remove the folder to encode it again.")
    if slow := [shard.path.name for shard in shards if shard.position is None]:
        warnings.warn(
            f"{folder}: {len(slow)} shards ({slow[0]}, ...) are chunked or compressed: read through HDF5, more slowly",
            stacklevel=2,
        )
    entry = Entry(
        folder=folder,
        manifest=manifest,
        documents=manifest["documents"],
        tokens=sum(shard.tokens for shard in shards),
        dim=manifest["dim"],
        dtype=DTYPES[manifest["dtype"]],
        shards=tuple(shards),
    )
    if verify:
        entry.verify()
    return entry


def fill_entry(
    folder: Path | str,
    *,
    ids: Sequence[str],
    key: str,
    dtype: torch.dtype,
    dim: int,
    provenance: Mapping[str, Any],
    encode: Callable[[int, int], Packed],
    documents_per_shard: int | None = None,
    chunk: int | None = None,
    label: str = "",
    quiet: bool = False,
    lock_timeout: float = 60.0,
) -> Entry:
    """Open the entry, or write what it lacks: the manifest first, then every missing shard, under a lock.

    Args:
        ids: ids of all N documents, in order.
        key: what the entry was made from (`entry_key`); shards and manifest carry it.
        dtype, dim: of every token: float16, bfloat16 or float32, dim >= 1.
        provenance: JSON-able; kept in the manifest of a new entry.
        encode: `encode(start, stop)` gives the tokens of documents start to stop, on any device.
        documents_per_shard: for a new entry (default ceil(N / 64), within 512 and 65536); one that was begun
            keeps its own.
        chunk: ask `encode` for at most that many documents at a time (default: a shard at a time).
        label, quiet: of the progress bar on stderr.
        lock_timeout: seconds to wait for another process that writes this entry.

    Raises:
        CacheError: an entry for something else, a damaged shard, the lock (names the folder), a disk that is full.
        DataError: NaN or infinity in an embedding (names the document). UsageError: an argument that cannot work.
    """
    folder = Path(folder)
    manifest = _new_manifest(ids, key, dtype, dim, provenance, documents_per_shard)
    wanted = {name: manifest[name] for name in ("key", "documents", "ids", "dim", "dtype")}
    if chunk is not None and chunk < 1:
        raise UsageError(f"chunk: got {chunk}, need at least 1")
    if (entry := open_if_complete(folder, wanted)) is not None:
        return entry
    with locked(folder, lock_timeout):
        for leftover in folder.glob(".*.tmp"):  # of a writer that was killed: a living one would hold the lock
            leftover.unlink(missing_ok=True)
        if (folder / MANIFEST).exists():
            manifest = read_manifest(folder)
            require_same(folder, manifest, wanted)
        else:
            _write_manifest(folder, manifest)
        _fill_shards(folder, manifest, ids, encode, chunk, label, quiet)
    return open_entry(folder)


def _new_manifest(
    ids: Sequence[str], key: str, dtype: torch.dtype, dim: int, provenance: Mapping[str, Any], per_shard: int | None
) -> dict[str, Any]:
    names = {value: name for name, value in DTYPES.items()}
    if dtype not in names:
        raise UsageError(f"dtype: got {dtype}, need one of {', '.join(map(str, names))}")
    if dim < 1:
        raise UsageError(f"dim: got {dim}, need at least 1")
    if per_shard is None:
        per_shard = min(max(-(-len(ids) // 64), 512), 65536)
    if per_shard < 1:
        raise UsageError(f"documents_per_shard: got {per_shard}, need at least 1")
    return {
        "format": FORMAT,
        "key": key,
        "documents": len(ids),
        "ids": ids_hash(encode_ids(ids)),
        "documents_per_shard": per_shard,
        "boundaries": [*range(0, len(ids), per_shard), len(ids)],
        "dim": dim,
        "dtype": names[dtype],
        # Through JSON once, so that what is kept in memory is what is read back.
        "provenance": json.loads(canonical(dict(provenance))),
    }


def open_if_complete(folder: Path, wanted: Mapping[str, Any]) -> Entry | None:
    """The entry when it is whole, None when it has to be filled; `CacheError` when it is for something else."""
    if not (folder / MANIFEST).exists():
        return None
    manifest = read_manifest(folder)
    require_same(folder, manifest, wanted)
    return None if _missing(folder, manifest) else open_entry(folder)


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


def _fill_shards(
    folder: Path,
    manifest: Mapping[str, Any],
    ids: Sequence[str],
    encode: Callable[[int, int], Packed],
    chunk: int | None,
    label: str,
    quiet: bool,
) -> None:
    missing = _missing(folder, manifest)
    specs = [_spec(manifest, number) for number in range(len(manifest["boundaries"]) - 1)]
    for spec in specs:  # what is there must be right before hours go into the rest
        if spec.shard not in missing:
            _, names = open_shard(folder / shard_name(spec.shard), spec)
            if names != encode_ids(ids[spec.start : spec.stop]):
                raise CacheError(
                    f"{folder / shard_name(spec.shard)}: its ids are not those of documents {spec.start} to {spec.stop}"
                )
    done = sum(spec.stop - spec.start for spec in specs if spec.shard not in missing)
    unit = " queries" if manifest["provenance"].get("role") == "query" else " documents"
    began, tokens = time.monotonic(), 0
    with tqdm(total=len(ids), initial=done, desc=label or None, unit=unit, disable=quiet or not missing) as bar:
        for number in missing:
            spec = specs[number]
            step = chunk or spec.stop - spec.start
            pieces = []
            for start in range(spec.start, spec.stop, step):
                stop = min(start + step, spec.stop)
                pieces.append(encode(start, stop))
                if len(pieces[-1]) != stop - start:
                    got = f"{len(pieces[-1])} embeddings for documents {start} to {stop}"
                    raise CacheError(f"{folder}: the encoder gave {got}, need {stop - start}; nothing of them was stored")
                tokens += int(pieces[-1].lengths.sum())
                bar.set_postfix_str(f"{tokens / max(time.monotonic() - began, 1e-9):,.0f} tokens/s", refresh=False)
                bar.update(stop - start)
            write_shard(folder / shard_name(number), spec, ids[spec.start : spec.stop], pieces)
