"""The embedding cache: encode a collection once, keep its tokens in HDF5, find them again only when nothing changed.

    <cache>/<source>/<dataset>/<encoder>-<queries|documents>-<key>/
        manifest.json     written first: what the entry holds and which documents every shard holds   (`entries.py`)
        00000.h5 ...      the shards, each written whole or not at all                                 (`shards.py`)
        .lock             held by the process that writes

This file names entries, finds them and encodes what is missing; `<key>` changes with any id, text or encoder setting.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from maxsim_eval.entries import (
    MANIFEST,
    Entry,
    fill_entry,
    ids_hash,
    open_entry,
    open_if_complete,
    read_manifest,
    require_same,
)
from maxsim_eval.errors import CacheError, UsageError
from maxsim_eval.hashing import canonical, feed
from maxsim_eval.items import Pages
from maxsim_eval.shards import DTYPES, FORMAT, encode_ids
from maxsim_eval.types import Encoder, Role, Task
from maxsim_kernels import Packed

__all__ = [
    "FORMAT",
    "Contents",
    "Entry",
    "content_hash",
    "embed",
    "embedding_key",
    "entry_folder",
    "entry_key",
    "fill_entry",
    "find_entry",
    "find_imported",
    "open_entry",
]

CHUNK = 256  # texts an encoder gets at a time: often enough for a progress bar, enough to sort by length
PAGE_CHUNK = 16  # page images: each takes some 10 MB once decoded
_PACKAGES = ("maxsim-eval", "torch", "numpy", "h5py", "transformers", "sentence-transformers", "pillow")


def content_hash(ids: Sequence[str], items: Sequence[Any]) -> str:
    """SHA-256 over ordered ids and texts or images, each behind its length and kind: any change gives another hash.

    Items are taken one at a time. Lazy page images (`items.Pages`) are hashed by their files' bytes and not decoded.

    Raises:
        UsageError: another number of items than ids, or an item that is neither a text nor a PIL image.
    """
    if len(ids) != len(items):
        raise UsageError(f"items: got {len(items)}, need one for each of the {len(ids)} ids")
    digest = hashlib.sha256()
    feed(digest, [b"maxsim-eval/content/1", str(len(ids)).encode()])
    for row, name in enumerate(ids):
        parts = items.item_parts(row) if isinstance(items, Pages) else _item_parts(name, items[row])
        feed(digest, [name.encode("utf-8", "surrogatepass"), *parts])
    return digest.hexdigest()


class Contents:
    """The content hashes of a task's two sides, each found once and when first asked for: millions of texts take seconds."""

    def __init__(self, task: Task) -> None:
        self._sides = {"query": (task.query_ids, task.queries), "document": (task.document_ids, task.documents)}
        self._found: dict[str, str] = {}

    def of(self, role: Role) -> str:
        """The content hash of a side's ids and items."""
        if role not in self._found:
            self._found[role] = content_hash(*self._sides[role])
        return self._found[role]


def _item_parts(name: str, item: Any) -> list[bytes]:
    if isinstance(item, str):
        return [b"text", item.encode("utf-8", "surrogatepass")]
    if all(hasattr(item, attribute) for attribute in ("mode", "size", "tobytes", "getpalette")):
        pixels = item.tobytes()  # first: reading a lazily opened image may change its mode
        palette = bytes(item.getpalette() or ()) if item.mode in ("P", "PA") else b""
        return [b"image", item.mode.encode(), canonical(list(item.size)), palette, pixels]
    raise UsageError(f"item {name!r}: got {type(item).__name__}, need a text or a PIL image")


def entry_key(content: str, fingerprint: Mapping[str, Any]) -> str:
    """16 hex characters that change with the content hash and with every field of the fingerprint (JSON-able)."""
    return hashlib.sha256(canonical({"content": content, "fingerprint": dict(fingerprint)})).hexdigest()[:16]


def entry_folder(cache_dir: Path | str, source: str, dataset: str, encoder_name: str, role: Role, key: str) -> Path:
    """`<cache_dir>/<source>/<dataset>/<encoder>-<queries|documents>-<key>`, names made safe for a file system."""
    return Path(cache_dir) / _safe(source) / _safe(dataset) / f"{_prefix(encoder_name, role)}{key}"


def _prefix(encoder_name: str, role: Role) -> str:
    return f"{_safe(encoder_name)}-{'queries' if role == 'query' else 'documents'}-"


def _safe(name: str) -> str:
    # Two names may become one: the key, and the provenance of imported entries, keep their entries apart.
    text = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")
    return text[-64:].strip("-.") or "unnamed"


def find_imported(
    cache_dir: Path | str, source: str, dataset: str, encoder_name: str, role: Role, content: str
) -> Entry | None:
    """The imported entry of exactly this content under this encoder name, or None.

    Raises:
        CacheError: a candidate that is damaged, partial or of another format version, or several that fit.
    """
    found = []
    dataset_folder = Path(cache_dir) / _safe(source) / _safe(dataset)
    for path in sorted(dataset_folder.glob(f"{_prefix(encoder_name, role)}*/{MANIFEST}")):
        provenance = read_manifest(path.parent)["provenance"]
        same_encoder = provenance.get("encoder", encoder_name) == encoder_name  # two names may be one folder name
        if provenance.get("origin") == "imported" and provenance.get("content") == content and same_encoder:
            found.append(path.parent)
    if len(found) > 1:
        names = " and ".join(str(folder) for folder in found)
        raise CacheError(f"{names}: imported embeddings of the same texts under one encoder name. Remove all but one.")
    return open_entry(found[0]) if found else None


def embedding_key(role: Role, encoder: Encoder, contents: Contents) -> str:
    """Key of the entry that `embed` uses."""
    settings = encoder.fingerprint(role)
    fingerprint = {"name": encoder.name, "revision": encoder.revision, "role": role, "settings": settings}
    if role == "query" and settings.get("corpus_statistics"):
        fingerprint["corpus"] = contents.of("document")
    return entry_key(contents.of(role), fingerprint)


@dataclass(frozen=True)
class _Address:
    """Where the entry of one role of a task belongs, and what it must be."""

    ids: Sequence[str]
    items: Sequence[Any]
    content: str
    key: str
    folder: Path

    def find(self, task: Task, role: Role, encoder: Encoder, cache_dir: Path | str) -> Entry | None:
        """The complete entry of this key or, where that was never begun, an imported one of the same content."""
        # Not encoder.dim: it may load the model, which a complete entry does without.
        wanted = {"documents": len(self.ids), "ids": ids_hash(encode_ids(self.ids))}
        if (self.folder / MANIFEST).exists():
            return open_if_complete(self.folder, {"key": self.key, **wanted})
        imported = find_imported(cache_dir, task.source, task.dataset, encoder.name, role, self.content)
        if imported is not None:
            require_same(imported.folder, imported.manifest, wanted)
        return imported


def _address(task: Task, role: Role, encoder: Encoder, cache_dir: Path | str, contents: Contents | None) -> _Address:
    ids, items = (task.query_ids, task.queries) if role == "query" else (task.document_ids, task.documents)
    contents = contents or Contents(task)
    key = embedding_key(role, encoder, contents)
    folder = entry_folder(cache_dir, task.source, task.dataset, encoder.name, role, key)
    return _Address(ids, items, contents.of(role), key, folder)


def find_entry(
    task: Task, role: Role, encoder: Encoder, cache_dir: Path | str, contents: Contents | None = None
) -> Entry | None:
    """The entry that `embed` would give without encoding anything; None where it would encode. Writes nothing.

    `contents`: the task's, where the caller has them already.

    Raises:
        CacheError, DataError, UsageError: as `embed`.
    """
    return _address(task, role, encoder, cache_dir, contents).find(task, role, encoder, cache_dir)


def embed(
    task: Task, role: Role, encoder: Encoder, cache_dir: Path | str, *, quiet: bool = False, contents: Contents | None = None
) -> Entry:
    """Token embeddings of a task's queries or documents, from the cache where they are in it.

    In this order: the entry with exactly this key, complete or to be resumed; an imported entry of the same texts and
    encoder name; else everything is encoded, in chunks of 256 texts or 16 pages, with a progress bar on stderr. Before queries are
    encoded the encoder is offered the corpus (`encoder.prepare`). `contents`: as in `find_entry`.

    Raises:
        CacheError, DataError, UsageError: as `fill_entry` and `content_hash`.
    """
    address = _address(task, role, encoder, cache_dir, contents)
    if (entry := address.find(task, role, encoder, cache_dir)) is not None:
        return entry
    ids, items, folder = address.ids, address.items, address.folder
    begun = (folder / MANIFEST).exists()
    chunk = PAGE_CHUNK if isinstance(items, Pages) else CHUNK
    if role == "query":
        encoder.prepare(task.documents)

    def encode(start: int, stop: int) -> Packed:
        return encoder.encode(items[start:stop], role)  # a slice: lazy page images stay lazy, for one batch at a time

    # Only the embeddings themselves say which dtype the encoder yields, and the manifest comes before any shard.
    first = None if begun else encode(0, min(chunk, len(ids)))

    def encode_rest(start: int, stop: int) -> Packed:
        nonlocal first
        if first is not None and (start, stop) == (0, len(first)):
            ready, first = first, None
            return ready
        return encode(start, stop)

    return fill_entry(
        folder,
        ids=ids,
        key=address.key,
        dtype=DTYPES[read_manifest(folder)["dtype"]] if first is None else first.dtype,
        dim=encoder.dim,
        provenance=_provenance(task, role, encoder, address.content),
        encode=encode_rest,
        chunk=chunk,
        label=f"encode {task.dataset}",
        quiet=quiet,
    )


def _provenance(task: Task, role: Role, encoder: Encoder, content: str) -> dict[str, Any]:
    return {
        "origin": "encoded",
        "content": content,
        "source": task.source,
        "dataset": task.dataset,
        "role": role,
        "encoder": encoder.name,
        "revision": encoder.revision,
        "fingerprint": encoder.fingerprint(role),
        "packages": {name: metadata.version(name) for name in _PACKAGES if _installed(name)},
    }


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
