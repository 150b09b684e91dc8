"""Filling an entry of the embedding cache: its manifest first, then every shard that is missing, by one process or several.

The manifest fixes which documents every shard holds. A missing shard is encoded again and a finished one never is, so an
interrupted run continues where it stopped, with any number of processes. Several take one shard after the other, each the next that
nobody has: what a shard holds does not depend on who encodes it, nor on how many there are.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from maxsim_eval.cache.entries import (
    MANIFEST,
    Entry,
    entry_of,
    ids_hash,
    locked,
    missing_shards,
    open_if_complete,
    read_manifest,
    require_same,
    require_whole,
    spec_of,
    write_manifest,
)
from maxsim_eval.cache.shards import DTYPES, FORMAT, Shard, ShardSpec, encode_ids, open_shard, shard_name, write_shard
from maxsim_eval.errors import CacheError, UsageError
from maxsim_eval.hashing import canonical
from maxsim_eval.processes.agreement import PATIENCE, blind_ranks
from maxsim_eval.processes.progress import EncodeProgress
from maxsim_eval.processes.turns import each_turn
from maxsim_eval.processes.world import World
from maxsim_kernels import Packed

LEAST = 512  # documents a shard, by default
_MOST = 65536
_MOST_BYTES, _LONG = 2 << 30, 256  # bytes of a shard at most, if its documents have 256 tokens: several shards are in memory
_SHARDS = 64  # aimed at
_TICKS = threading.Lock()
_VISIBLE = 60.0  # seconds after which a network file system shows everybody what was written


@dataclass(frozen=True)
class Begun:
    """What every process that fills an entry needs to know of it; `token` is unique to this filling."""

    folder: Path
    manifest: Mapping[str, Any]
    missing: tuple[int, ...]
    token: str

    @property
    def key(self) -> str:
        """Key of what the entry is made from."""
        return str(self.manifest["key"])


def new_manifest(
    ids: Sequence[str],
    key: str,
    dtype: torch.dtype,
    dim: int,
    provenance: Mapping[str, Any],
    per_shard: int | None = None,
    least: int = LEAST,
    together: int = 1,
) -> dict[str, Any]:
    """The manifest of an entry that is not begun yet; arguments and errors as of `fill_entry`.

    By default a shard has `least` documents or more, if they fit, and where that is more than `together`, a multiple of it.
    """
    names = {value: name for name, value in DTYPES.items()}
    if dtype not in names:
        raise UsageError(f"dtype: got {dtype}, need one of {', '.join(map(str, names))}")
    if dim < 1:
        raise UsageError(f"dim: got {dim}, need at least 1")
    if per_shard is None:
        most = min(_MOST, max(1, _MOST_BYTES // (_LONG * dim * dtype.itemsize)))
        per_shard = min(max(-(-len(ids) // _SHARDS), least), most)
        if per_shard > together:
            per_shard = min(round(per_shard / together), most // together) * together
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
    at_once: int = 1,
) -> Entry:
    """Open the entry, or write what it lacks: the manifest first, then every missing shard, under a lock. By this process alone.

    Args:
        ids: ids of all N documents, in order.
        key: what the entry was made from (`entry_key`); shards and manifest carry it.
        dtype, dim: of every token: float16, bfloat16 or float32, dim >= 1.
        provenance: JSON-able; kept in the manifest of a new entry.
        encode: `encode(start, stop)` gives the tokens of documents start to stop, on any device.
        documents_per_shard: for a new entry (default ceil(N / 64), within 512 and 65536, and within 2 GiB of documents of 256
            tokens); one that was begun keeps its own.
        chunk: ask `encode` for at most that many documents at a time (default: a shard at a time).
        label, quiet: of the progress bar on stderr.
        lock_timeout: seconds to wait for another process that writes this entry.
        at_once: pieces that are encoded at a time, each by a thread; `encode` is then called by several. Shards are written meanwhile.

    Raises:
        CacheError: an entry for something else, a damaged shard, the lock (names the folder), a disk that is full.
        DataError: NaN or infinity in an embedding (names the document). UsageError: an argument that cannot work.
    """
    folder = Path(folder)
    manifest = new_manifest(ids, key, dtype, dim, provenance, documents_per_shard)
    if chunk is not None and chunk < 1:
        raise UsageError(f"chunk: got {chunk}, need at least 1")
    if (entry := open_if_complete(folder, _wanted(manifest))) is not None:
        return entry
    with begun_entry(folder, manifest, ids, lock_timeout) as begun:
        entry = fill_shards(begun, ids, encode, chunk=chunk, label=label, quiet=quiet, at_once=at_once)
    assert entry is not None  # this process is the leader
    return entry


def _wanted(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: manifest[name] for name in ("key", "documents", "ids", "dim", "dtype")}


@contextmanager
def begun_entry(folder: Path, manifest: Mapping[str, Any], ids: Sequence[str], lock_timeout: float = 60.0) -> Iterator[Begun]:
    """Begin an entry with this manifest, or go on with one that was begun: yields what it lacks, and proves the shards it has.

    The entry's lock is held in the block.

    Raises:
        CacheError: as `fill_entry`.
    """
    with locked(folder, lock_timeout):
        for leftover in folder.glob(".*.tmp"):  # of a writer that was killed: a living one would hold the lock
            leftover.unlink(missing_ok=True)
        if (folder / MANIFEST).exists():
            wanted, manifest = _wanted(manifest), read_manifest(folder)
            require_same(folder, manifest, wanted)
        else:
            write_manifest(folder, manifest)
        missing = missing_shards(folder, manifest)
        for spec in _specs(manifest):  # what is there must be right before hours go into the rest
            if spec.shard not in missing:
                _proven(folder, spec, ids)
        yield Begun(folder, manifest, tuple(missing), uuid.uuid4().hex)


def _proven(folder: Path, spec: ShardSpec, ids: Sequence[str]) -> Shard:
    """Open a shard, and prove that it holds these documents."""
    path = folder / shard_name(spec.shard)
    shard, names = open_shard(path, spec)
    if names != encode_ids(ids[spec.start : spec.stop]):
        raise CacheError(f"{path}: its ids are not those of documents {spec.start} to {spec.stop}")
    return shard


def _specs(manifest: Mapping[str, Any]) -> list[ShardSpec]:
    return [spec_of(manifest, number) for number in range(len(manifest["boundaries"]) - 1)]


def fill_shards(
    begun: Begun,
    ids: Sequence[str],
    encode: Callable[[int, int], Packed],
    *,
    chunk: int | None,
    label: str,
    quiet: bool,
    world: World | None = None,
    at_once: int = 1,
    said: Sequence[str] = (),
) -> Entry | None:
    """Encode and write what is missing; every process of `world` calls this alike and returns when all of it is there.

    The leader gets the entry, and holds its lock; it opens its shards as they are written, while others are encoded. It takes the
    first of the missing shards, whose beginning it may have encoded already.
    `said`: what this process has warned of before, which goes to the leader too.

    Raises:
        CacheError, DataError: as `fill_entry`; a cache folder that not all processes see. RankError: another process failed.
    """
    world = world or World()
    turn = world.draw(begun.token) if world.leader else None
    _require_seen(begun, world)
    specs = _specs(begun.manifest)
    opened: dict[int, Shard] = {}
    done = sum(spec.stop - spec.start for spec in specs if spec.shard not in begun.missing)
    unit = "queries" if begun.manifest["provenance"].get("role") == "query" else "documents"
    hidden = quiet or not begun.missing
    bar = EncodeProgress(begun.token, len(ids), done if world.leader else 0, world, hidden, label=label, unit=unit)
    with bar as progress, heard(world) as now:

        def turns() -> Iterator[ShardSpec]:
            first = turn
            while (drawn := world.draw(begun.token) if first is None else first) < len(begun.missing):
                yield specs[begun.missing[drawn]]
                first = None

        def piece(start: int, stop: int) -> Packed:
            found = encode(start, stop)
            if len(found) != stop - start:
                got = f"{len(found)} embeddings for documents {start} to {stop}"
                raise CacheError(f"{begun.folder}: the encoder gave {got}, need {stop - start}; nothing of them was stored")
            with _TICKS:
                progress.tick(stop - start, int(found.lengths.sum()))
            return found

        def write(spec: ShardSpec, pieces: Iterable[Packed]) -> None:
            started, coming = time.monotonic(), _Coming(pieces)
            write_shard(begun.folder / shard_name(spec.shard), spec, ids[spec.start : spec.stop], coming)
            ended = time.monotonic()
            with _TICKS:
                progress.spent(ended - started - coming.seconds, ended - started)
            if world.leader:
                opened[spec.shard] = _proven(begun.folder, spec, ids)

        def spans(spec: ShardSpec) -> Iterator[tuple[int, int]]:
            step = chunk or spec.stop - spec.start
            return ((start, min(start + step, spec.stop)) for start in range(spec.start, spec.stop, step))

        each_turn(turns(), spans, piece, write, at_once)
        counts = world.collect([progress.documents, progress.size, [*said, *now]])
        progress.settle(counts)
    if not world.leader:
        return None
    if world.size > 1:
        _repeat([texts for _, _, texts in counts])
        _await_shards(begun)
    require_whole(begun.folder, begun.manifest)
    return entry_of(begun.folder, begun.manifest, [opened.get(one.shard) or _proven(begun.folder, one, ids) for one in specs])


@dataclass
class _Coming:
    """Pieces, and the seconds spent waiting for them."""

    pieces: Iterable[Packed]
    seconds: float = 0.0

    def __iter__(self) -> Iterator[Packed]:
        asked = time.monotonic()
        for piece in self.pieces:
            self.seconds += time.monotonic() - asked
            yield piece
            asked = time.monotonic()


@contextmanager
def heard(world: World) -> Iterator[list[str]]:
    """Collect RuntimeWarnings (memory ran out) where this is not the leader, which repeats them: nobody reads others' stderr."""
    said: list[str] = []
    show = warnings.showwarning

    def keep(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, RuntimeWarning):
            said.append(str(message))
        else:
            show(message, category, *rest)

    if not world.leader:
        warnings.showwarning = keep  # type: ignore[assignment]
    try:
        yield said
    finally:
        warnings.showwarning = show


def _repeat(said: Sequence[Sequence[str]]) -> None:
    """Warn of what other ranks warned of: each text once, with the ranks it came from."""
    for text in dict.fromkeys(text for texts in said for text in texts):
        ranks = ", ".join(str(rank) for rank, texts in enumerate(said) if text in texts)
        warnings.warn(f"rank {ranks} of {len(said)}: {text}", RuntimeWarning, stacklevel=3)


def forget(begun: Begun) -> None:
    """Remove all of an entry that was filled and is of no use, its manifest last; the caller holds its lock."""
    for number in range(len(begun.manifest["boundaries"]) - 1):
        (begun.folder / shard_name(number)).unlink(missing_ok=True)
    (begun.folder / MANIFEST).unlink(missing_ok=True)


def _require_seen(begun: Begun, world: World) -> None:
    """Every rank must see the entry that the leader has begun, or it would write its shards where nobody looks for them."""
    if world.size == 1:
        return
    sign = begun.folder / f".{begun.token}.tmp"  # a writer that is killed leaves it to the next one's cleaning
    if world.leader:
        sign.touch()
    try:
        blind = blind_ranks(sign, world, PATIENCE)
    finally:
        if world.leader:
            sign.unlink(missing_ok=True)
    if blind:
        raise CacheError(
            f"{begun.folder}: not seen by rank {', '.join(map(str, blind))}; with several processes the cache folder must lie on a "
            "file system that all of them see (--cache-dir)"
        )


def _await_shards(begun: Begun) -> None:
    """Wait for other machines' shards, which a network file system may show late; `require_whole` names what never comes."""
    end = time.monotonic() + _VISIBLE
    while missing_shards(begun.folder, begun.manifest) and time.monotonic() < end:
        time.sleep(0.1)
