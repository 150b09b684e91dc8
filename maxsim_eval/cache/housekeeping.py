"""What the cache folder holds, and how it is freed: `cache ls`, `cache rm`, `cache gc`.

Removed are only entries, which are folders three levels below the cache folder that have a manifest, and leftovers of processes
that died. What a living process writes stays: an entry is locked while something of it is removed. Looking takes no lock, so any
file, and any entry, may be gone a moment after it was seen, and then counts as not there.
"""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

import filelock

from maxsim_eval.cache.copy_shards import KINDS, StaleCopyError, copy_name, entry_digest, open_copy
from maxsim_eval.cache.entries import MANIFEST, locked, open_entry, read_manifest
from maxsim_eval.cache.hdf5 import open_hdf5, structure
from maxsim_eval.cache.shards import shard_name
from maxsim_eval.encoders.checkpoints import looks_like_path, shown_name
from maxsim_eval.errors import CacheError, UsageError, did_you_mean
from maxsim_eval.files import delete, hidden, leftovers
from maxsim_eval.parsing import json_of


@dataclass(frozen=True)
class Listed:
    """An entry as `cache ls` shows it. `tokens` is None if a shard is missing or unreadable; `problem` says what is damaged."""

    folder: Path
    source: str
    dataset: str
    encoder: str
    role: str
    origin: str
    documents: int
    tokens: int | None
    file_bytes: int
    shards: int
    missing: int
    copies: tuple[str, ...]
    age_seconds: float  # since anything of it was written last
    problem: str = ""

    @property
    def state(self) -> str:
        """What the entry lacks, in words."""
        return self.problem or (f"{self.missing} of {self.shards} shards missing" if self.missing else "complete")


def entry_folders(cache_dir: Path) -> list[Path]:
    """Folders of all entries, whole or begun.

    Raises:
        CacheError: the cache folder is no folder.
    """
    if os.path.lexists(cache_dir) and not cache_dir.is_dir():
        raise CacheError(f"{cache_dir}: is no folder, need that of the cache (--cache-dir)")
    return sorted(path.parent for path in cache_dir.glob("[!.]*/[!.]*/[!.]*/" + MANIFEST))


def list_entries(cache_dir: Path) -> list[Listed]:
    """Everything in the cache folder; reads manifests and the heads of shards."""
    listed = [_listed(folder) for folder in entry_folders(cache_dir)]
    return [entry for entry in listed if (entry.folder / MANIFEST).exists()]  # not one that was removed meanwhile


def _listed(folder: Path) -> Listed:
    found = {name: _status(folder / name) for name in _names(folder)}
    files = {name: status for name, status in found.items() if status is not None and S_ISREG(status.st_mode)}
    written = max((status.st_mtime for name, status in files.items() if name != ".lock"), default=time.time())
    size = sum(status.st_size for status in files.values())
    copies = tuple(kind for kind in KINDS if any(name.endswith(f".{kind}.h5") for name in files))
    place: dict[str, Any] = {
        "folder": folder,
        "file_bytes": size,
        "copies": copies,
        "age_seconds": max(0.0, time.time() - written),
    }
    source, dataset = folder.parts[-3:-1]
    try:
        manifest = read_manifest(folder)
    except CacheError as error:
        return Listed(
            **place, source=source, dataset=dataset, encoder="?", role="?", origin="?",
            documents=0, tokens=None, shards=0, missing=0, problem=str(error),
        )  # fmt: skip
    said, shards = manifest["provenance"], len(manifest["boundaries"]) - 1
    there = [folder / shard_name(number) for number in range(shards) if (folder / shard_name(number)).exists()]
    tokens, problem = None, ""
    try:
        tokens = sum(_tokens(path) for path in there) if len(there) == shards else None
    except CacheError as error:
        problem = str(error)
    return Listed(
        **place,
        source=said.get("source", source),
        dataset=said.get("dataset", dataset),
        encoder=said.get("encoder", "?"),
        role=said.get("role", "?"),
        origin=said.get("origin", "?"),
        documents=manifest["documents"],
        tokens=tokens,
        shards=shards,
        missing=shards - len(there),
        problem=problem,
    )


def _names(folder: Path) -> list[str]:
    """Names of what is in a folder; nothing, where it is gone."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _tokens(shard: Path) -> int:
    with open_hdf5(shard, "Remove the file to encode its documents again.") as (file, _):
        return int(structure(shard, "", lambda: file["values"].shape[0]))


def chosen(cache_dir: Path, words: list[str], encoder: str | None = None, role: str | None = None, *, what: str) -> list[Path]:
    """Folders that a command means: one word is a folder (an entry, or one that entries lie in), two are source and dataset.

    Raises:
        UsageError: other than one or two words, or an unknown role. CacheError: nothing that fits; says what there is.
    """
    if role not in (None, "query", "document"):
        raise UsageError(f"--role: got {role!r}, need query or document")
    if len(words) not in (1, 2):
        raise UsageError(f"{what}: got {len(words)} arguments, need the folder of an entry, or a source and a dataset")
    if len(words) == 1:
        places = [place for place in (Path(words[0]), cache_dir / words[0]) if place.is_dir()]
        if not places:
            names = [str(folder.relative_to(cache_dir)) for folder in entry_folders(cache_dir)]
            hint = did_you_mean(words[0], [*names, *(Path(name).name for name in names)])
            raise CacheError(f"{words[0]}: no such folder, here or in {cache_dir}. {hint}".rstrip())
        walks = ((place, [Path(folder) for folder, _, names in os.walk(place) if MANIFEST in names]) for place in places)
        place, below = next(
            (walk for walk in walks if walk[1]), (places[0], [])
        )  # the second is walked where the first holds none
        parts = {folder: folder.relative_to(place).parts for folder in below}
        found = sorted(folder for folder in parts if not any(part.startswith(".") for part in parts[folder]))
        listed = [_listed(folder) for folder in found]
        if not found:
            raise CacheError(f"{place}: holds no {MANIFEST}, so it is no cache entry, and none lies below it")
    else:
        everything = list_entries(cache_dir)
        listed = [entry for entry in everything if entry.source == words[0] and _is_of(words[1], entry)]
        if not listed:
            held = ", ".join(sorted({f"{entry.source} {entry.dataset}" for entry in everything})) or "nothing"
            hint = did_you_mean(" ".join(words), [f"{entry.source} {entry.dataset}" for entry in everything])
            raise CacheError(f"{cache_dir}: holds no embeddings of {words[0]} {words[1]}. {hint}It holds {held}")
    meant = None if encoder is None else {encoder, _cached_name(encoder)}
    fitting = [entry.folder for entry in listed if (meant is None or entry.encoder in meant) and role in (None, entry.role)]
    if not fitting:
        held = ", ".join(sorted({f"{entry.encoder} ({entry.role})" for entry in listed}))
        hint = did_you_mean(encoder or "", [entry.encoder for entry in listed])
        raise CacheError(
            f"{' '.join(words)}: no entry of encoder {encoder or 'any'}, role {role or 'any'}. {hint}There are {held}"
        )
    return fitting


def _is_of(dataset: str, entry: Listed) -> bool:
    """Whether an evaluation of that dataset uses the entry: a local one may be named by its path, one of irds has a split behind it."""
    if entry.source == "irds":
        return f"{dataset}/".startswith(f"{entry.dataset}/")
    return entry.dataset in (dataset, Path(dataset).name)


def _cached_name(encoder: str) -> str:
    """The name that embeddings are cached under, from the one given to an evaluation: `hf:<path>` and the like are shortened."""
    prefix, _, model = encoder.partition(":")
    return f"{prefix}:{shown_name(Path(model).expanduser().resolve())}" if looks_like_path(model) else encoder


def require_entry(cache_dir: Path, folder: Path) -> None:
    """`CacheError` unless `folder` is an entry's place in the cache folder, itself no link, and has a manifest of the cache."""
    if folder.is_symlink():
        raise CacheError(f"{folder}: is a link, and what it points to is not removed; remove the link by hand")
    home, place = cache_dir.resolve(), folder.resolve()
    if home not in place.parents or len(place.relative_to(home).parts) != 3:
        raise CacheError(f"{folder}: not an entry of {cache_dir} (<source>/<dataset>/<entry> below it); nothing was removed")
    try:
        manifest = json_of((place / MANIFEST).read_bytes())
        ours = isinstance(manifest, dict) and str(manifest.get("format")).startswith("maxsim-eval/cache/")
    except (OSError, ValueError) as error:
        raise CacheError(f"{place / MANIFEST}: cannot be read ({error}), so {folder} is not removed") from error
    if not ours:
        raise CacheError(f"{place / MANIFEST}: not a manifest of the embedding cache, so {folder} is not removed")


def remove_entry(cache_dir: Path, folder: Path) -> int:
    """Remove an entry and its copies; returns the bytes. It is gone at once for readers, however long deleting takes.

    Raises:
        CacheError: not an entry of the cache folder, one that somebody writes, or one that cannot be removed.
    """
    require_entry(cache_dir, folder)
    place = folder.resolve()
    size = folder_bytes(place)
    aside = hidden(place, "old")
    with locked(place, 0.0):
        try:
            os.replace(place, aside)
        except OSError as error:
            raise CacheError(f"{folder}: cannot be removed: {error}") from error
    _delete(aside)
    return size


def _delete(folder: Path) -> None:
    try:
        delete(folder)
    except OSError as error:
        raise CacheError(f"{folder}: cannot be removed: {error}") from error


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return size


@dataclass(frozen=True)
class Garbage:
    """Something that `cache gc` frees: a file, or (`whole`) a folder."""

    path: Path
    why: str
    file_bytes: int
    whole: bool = False
    inode: int | None = None  # of a file: one written under its name since has another, and is no garbage


def _file(path: Path, why: str) -> Iterator[Garbage]:
    """The file as garbage, where it is still there."""
    status = _status(path)
    if status is not None and not S_ISDIR(status.st_mode):  # nobody here makes folders in an entry
        yield Garbage(path, why, status.st_size, inode=status.st_ino)


def find_garbage(cache_dir: Path, data_dir: Path | None = None, *, partial: bool = False) -> tuple[list[Garbage], list[str]]:
    """What nobody can use any more, and what could not be looked at (a line each). Removes nothing.

    These are leftovers of writers that died (of datasets below `data_dir` too), quantised copies whose shard has changed and, with
    `partial`, entries that lack shards.
    What another process holds locked is left out.
    """
    found = [*_removed(cache_dir, data_dir)]
    problems: list[str] = []
    begun = {path.parent for path in cache_dir.glob("[!.]*/[!.]*/[!.]*/.lock")}
    for folder in sorted({*entry_folders(cache_dir), *begun}):
        try:
            held = _held(folder)
        except OSError as error:  # its lock cannot be opened, on a read-only disk or as another user
            problems.append(f"{folder}: {error.strerror or error}")
            continue
        if held:
            problems.append(f"{folder}: another process is writing it")
            continue
        if partial and (folder / MANIFEST).exists() and (listed := _listed(folder)).missing:
            found.append(Garbage(folder, f"partial: {listed.state}", folder_bytes(folder), whole=True))
            continue
        for name in fnmatch.filter(_names(folder), ".*.tmp"):
            found += _file(folder / name, "left by a writer that died")
        try:
            found += _stale(folder)
        except CacheError as error:
            problems.append(str(error))
    return found, problems


def _removed(cache_dir: Path, data_dir: Path | None) -> Iterator[Garbage]:
    """Leftovers of processes that died: entries that were being deleted, datasets that were being fetched or written."""
    for parent in sorted(cache_dir.glob("[!.]*/[!.]*")):
        for path in leftovers(parent):
            if path.suffix == ".old":
                yield Garbage(path, "removed, but not to the end", folder_bytes(path), whole=True)
    for parent in [] if data_dir is None else [data_dir, *sorted(data_dir.glob("[!.]*/"))]:
        for path in leftovers(parent):
            yield Garbage(path, "left by a load that died", folder_bytes(path), whole=True)


def _held(folder: Path) -> bool:
    """Whether another process holds the entry's lock; makes no file."""
    if not (folder / ".lock").exists():
        return False
    try:
        with filelock.FileLock(folder / ".lock", timeout=0):
            return False
    except FileNotFoundError:
        return False
    except filelock.Timeout:
        return True


def _stale(folder: Path) -> Iterator[Garbage]:
    """Copies whose shard has changed since; none of an entry that lacks shards, which cannot be opened."""
    if not fnmatch.filter(_names(folder), "[0-9]*.*.h5") or not (folder / MANIFEST).exists() or _listed(folder).missing:
        return
    entry = open_entry(folder)
    digest = entry_digest(entry.stamp())
    for kind in KINDS.values():
        for shard in entry.shards:
            path = folder / copy_name(shard.spec.shard, kind)
            if path.exists():
                try:
                    open_copy(path, shard, kind, digest)
                except StaleCopyError:
                    yield from _file(path, "copy of a shard that has changed since")


def collect(cache_dir: Path, garbage: list[Garbage]) -> int:
    """Remove what `find_garbage` gave and is garbage still; returns the bytes.

    Raises:
        CacheError: an entry that somebody writes by now, or something that cannot be removed; what came before it is gone.
    """
    freed = 0
    for item in garbage:
        if not os.path.lexists(item.path):  # and locking would make its folder again
            continue
        if item.whole and item.path.name.startswith("."):
            _delete(item.path)
        elif item.whole:
            if not _listed(item.path).missing:
                continue
            remove_entry(cache_dir, item.path)
        else:
            with locked(item.path.parent, 0.0):
                status = _status(item.path)
                if status is None or status.st_ino != item.inode:
                    continue
                item.path.unlink()
        freed += item.file_bytes
    return freed
