"""The embedding cache: encode a collection once, keep its tokens in HDF5, find them again only when nothing changed.

    <cache>/<source>/<dataset>/<encoder>-<queries|documents>-<key>/
        manifest.json     written first: what the entry holds and which documents every shard holds   (`entries.py`)
        00000.h5 ...      the shards, each written whole or not at all                                 (`shards.py`)
        .lock             held by the process that writes, or by the leader of several                 (`filling.py`)

This file names entries, finds them and encodes what is missing; `<key>` changes with any id, text or encoder setting.
"""

from __future__ import annotations

import functools
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from maxsim_eval.cache.entries import (
    MANIFEST,
    Entry,
    ids_hash,
    missing_shards,
    open_entry,
    open_if_complete,
    read_manifest,
    require_same,
)
from maxsim_eval.cache.filling import LEAST, Begun, begun_entry, fill_shards, forget, heard, new_manifest
from maxsim_eval.cache.shards import DTYPES, encode_ids
from maxsim_eval.data.items import PackedTexts, Pages
from maxsim_eval.encoders.lexical import LexicalEncoder
from maxsim_eval.encoders.model_encoder import ModelEncoder
from maxsim_eval.encoders.refused_items import ItemError
from maxsim_eval.errors import CacheError, DataError, UsageError
from maxsim_eval.hashing import canonical, digest, feed
from maxsim_eval.processes.world import World
from maxsim_eval.quantities import size_text
from maxsim_eval.types import Encoder, Role, Task
from maxsim_kernels import Packed

CHUNK = 256  # texts an encoder gets at a time: often enough for a progress bar, enough to sort by length
_FIRST = 128  # texts encoded first to learn the dtype, where several chunks are encoded at once: all others wait for these
_TEXTS = (list, tuple, PackedTexts)  # containers that give slices of texts; others may have none, or make items when asked
_FED = 128  # texts hashed by one call, whose overhead in Python takes longer than the hash
PAGE_CHUNK = 16  # page images: each takes some 10 MB once decoded
PAGE_LEAST = 64  # pages a shard, by default: 17 MB of ColPali's; a set of two thousand is work for many GPUs
_PACKAGES = ("maxsim-eval", "torch", "numpy", "h5py", "transformers", "sentence-transformers", "pillow")


def content_hash(ids: Sequence[str], items: Sequence[Any]) -> str:
    """SHA-256 over ordered ids and texts or images, each behind its length and kind: any change gives another hash.

    Texts are taken many at a time, other items one at a time. Lazy page images (`items.Pages`) are hashed by their files' bytes and
    not decoded.

    Raises:
        UsageError: another number of items than ids, or an item that is neither a text nor a PIL image.
    """
    if len(ids) != len(items):
        raise UsageError(f"items: got {len(items)}, need one for each of the {len(ids)} ids")
    running = hashlib.sha256()
    feed(running, [b"maxsim-eval/content/1", str(len(ids)).encode()])
    for start in range(0, len(ids), _FED):
        names = [name.encode("utf-8", "surrogatepass") for name in ids[start : start + _FED]]
        if isinstance(items, _TEXTS) and set(map(type, some := list(items[start : start + _FED]))) == {str}:
            texts = [text.encode("utf-8", "surrogatepass") for text in some]
            feed(running, chain.from_iterable(zip(names, repeat(b"text", len(names)), texts, strict=True)))
            continue
        for row, name in enumerate(names, start):
            parts = items.item_parts(row) if isinstance(items, Pages) else _item_parts(ids[row], items[row])
            feed(running, [name, *parts])
    return running.hexdigest()


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
    return digest({"content": content, "fingerprint": dict(fingerprint)})[:16]


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


def cached_names(cache_dir: Path | str, source: str, dataset: str) -> list[str]:
    """Names of the encoders whose document embeddings of this dataset the cache holds."""
    found = {
        str(provenance.get("encoder"))
        for _, provenance in provenances(cache_dir, source, dataset)
        if provenance.get("role", "document") == "document" and provenance.get("encoder")
    }
    return sorted(found)


def holds_documents(cache_dir: Path | str, source: str, dataset: str, encoder_name: str) -> bool:
    """Whether the cache holds a complete entry of the dataset's documents by this encoder, whatever its texts and options."""
    name = encoder_name.partition("@")[0]
    return any(
        said.get("role", "document") == "document"
        and str(said.get("encoder")).partition("@")[0] == name
        and not missing_shards(folder, read_manifest(folder))
        for folder, said in provenances(cache_dir, source, dataset)
    )


def provenances(cache_dir: Path | str, source: str, dataset: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and provenance of every entry of a dataset; damaged ones are left out, and reported where they are used."""
    for path in sorted((Path(cache_dir) / _safe(source) / _safe(dataset)).glob(f"*/{MANIFEST}")):
        with suppress(CacheError):
            yield path.parent, read_manifest(path.parent)["provenance"]


def imported_names(cache_dir: Path | str, source: str, dataset: str) -> list[str]:
    """Encoder names that embeddings of this dataset were imported under, whatever their texts."""
    found = [provenance for _, provenance in provenances(cache_dir, source, dataset)]
    return sorted({str(said["encoder"]) for said in found if said.get("origin") == "imported" and "encoder" in said})


def chunk_of(encoder: Encoder, items: Sequence[Any]) -> int:
    """Items an encoder gets at a time: 16 pages, or as many texts as it says (256 where it does not)."""
    return PAGE_CHUNK if isinstance(items, Pages) else getattr(encoder, "chunk", None) or CHUNK


def announce(encoder: Encoder, items: int) -> None:
    """Tell an encoder how many items will come, if it wants to know (has `expect`)."""
    expect = getattr(encoder, "expect", None)
    if expect is not None:
        expect(items)


def embedding_key(role: Role, encoder: Encoder, contents: Contents) -> str:
    """Key of the entry that `embed` uses."""
    settings = encoder.fingerprint(role)
    fingerprint = {"name": encoder.name, "revision": encoder.revision, "role": role, "settings": settings}
    if role == "query" and settings.get("corpus_statistics"):
        fingerprint["corpus"] = contents.of("document")
    return entry_key(contents.of(role), fingerprint)


class TaskSide:
    """One side of a task on its way into the cache: which entry it belongs to, and how its tokens are made.

    `contents`: the task's, where the caller has them already.
    """

    def __init__(
        self, task: Task, role: Role, encoder: Encoder, cache_dir: Path | str, contents: Contents | None = None
    ) -> None:
        self.task, self.role, self.encoder, self.cache_dir = task, role, encoder, cache_dir
        self.ids, self.items = (task.query_ids, task.queries) if role == "query" else (task.document_ids, task.documents)
        contents = contents or Contents(task)
        self.content = contents.of(role)
        self.key = embedding_key(role, encoder, contents)
        self.folder = entry_folder(cache_dir, task.source, task.dataset, encoder.name, role, self.key)
        self.chunk = chunk_of(encoder, self.items)
        self.at_once = getattr(encoder, "at_once", 1)
        self._prepared = role != "query"
        self._first: Packed | None = None
        self._said: list[str] = []  # warnings of `start`, where this is not the leader

    def find(self) -> Entry | None:
        """The complete entry of this key or, where that was never begun, an imported one of the same content."""
        # Not encoder.dim: it may load the model, which a complete entry does without.
        wanted = {"documents": len(self.ids), "ids": ids_hash(encode_ids(self.ids))}
        if (self.folder / MANIFEST).exists():
            return open_if_complete(self.folder, {"key": self.key, **wanted})
        task = self.task
        imported = find_imported(self.cache_dir, task.source, task.dataset, self.encoder.name, self.role, self.content)
        if imported is not None:
            require_same(imported.folder, imported.manifest, wanted)
        return imported

    def say_anew(self) -> None:
        """Warn where the same items are cached by this encoder with other options, naming the entry and these options."""
        if (self.folder / MANIFEST).exists():
            return  # begun with these options
        mine = _provenance(self.task, self.role, self.encoder, self.content)
        for folder, theirs in provenances(self.cache_dir, self.task.source, self.task.dataset):
            if any(theirs.get(name) != mine[name] for name in ("origin", "content", "role", "encoder")):
                continue
            told = [{"revision": one.get("revision"), **(one.get("fingerprint") or {})} for one in (theirs, mine)]
            if not list(folder.glob("[0-9]*.h5")):
                continue  # it was begun, and holds nothing
            differ = [name for name in dict.fromkeys([*told[0], *told[1]]) if told[0].get(name) != told[1].get(name)]
            if not differ:
                continue  # of another corpus, whose statistics it depends on
            said = ", ".join(f"{name} {told[0].get(name)} there, {told[1].get(name)} here" for name in differ[:3])
            size = size_text(sum(path.stat().st_size for path in folder.glob("[0-9]*.h5")))
            what = "queries" if self.role == "query" else "documents"
            warnings.warn(
                f"{self.task.source} {self.task.dataset}: {len(self.ids):,} {what} are encoded anew, though {folder} ({size}) holds "
                f"them by {self.encoder.name} with other options: {said}",
                stacklevel=2,
            )
            return

    @contextmanager
    def begun(self) -> Iterator[Begun]:
        """Begin the entry, or go on with it: yields its manifest and what it lacks, and holds its lock in the block.

        Raises:
            CacheError, DataError, UsageError: as `fill_entry` and the encoder.
        """
        self.say_anew()
        if (self.folder / MANIFEST).exists():
            dtype = DTYPES[read_manifest(self.folder)["dtype"]]
        else:  # only the embeddings themselves say which dtype the encoder yields, and the manifest comes before any shard
            self.start()
            assert self._first is not None
            dtype = self._first.dtype
        provenance = _provenance(self.task, self.role, self.encoder, self.content)
        together = 1 if isinstance(self.items, Pages) else getattr(self.encoder, "chunk", None) or 1  # shards of whole chunks
        least = PAGE_LEAST if isinstance(self.items, Pages) else max(LEAST, together)
        manifest = new_manifest(self.ids, self.key, dtype, self.encoder.dim, provenance, least=least, together=together)
        with begun_entry(self.folder, manifest, self.ids) as begun:
            yield begun

    def start(self, world: World | None = None) -> None:
        """Encode the first texts, which loads the model and begins the processes that read texts."""
        announce(self.encoder, len(self.ids))
        few = self.chunk if self.at_once == 1 else min(self.chunk, _FIRST)
        with heard(world or World()) as self._said:
            self._first = self._encode(0, min(few, len(self.ids)))

    def fill(self, begun: Begun, *, quiet: bool, world: World | None = None) -> Entry | None:
        """Encode what is missing of an entry that was begun, here or by the leader of `world`, which gets the entry.

        Raises:
            CacheError: an entry that is not of these texts and this encoder; and as `fill_shards`.
            DataError: queries of which none has a token by a model; nothing is kept of them.
        """
        if begun.key != self.key:
            raise CacheError(
                f"{begun.folder}: rank 0 fills it from other texts, or with another model: its key is {begun.key}, here it would be "
                f"{self.key}; all processes need the same data, model and options"
            )
        label = f"encode {self.task.dataset}"
        announce(self.encoder, len(self.ids))
        if self._first is not None and len(self._first) < min(self.chunk, len(self.ids)):
            self._first = None  # no piece is so short: it would never be taken
        options: dict[str, Any] = {"chunk": self.chunk, "label": label, "quiet": quiet, "at_once": self.at_once}
        entry = fill_shards(begun, self.ids, self._tokens, world=world, said=self._said, **options)
        own = isinstance(self.encoder, ModelEncoder | LexicalEncoder)  # the caller's own encoder gives what he means it to
        if own and entry is not None and len(self.ids) and not entry.tokens:
            self._say_empty(begun)
        return entry

    def _say_empty(self, begun: Begun) -> None:
        """Refuse queries if a model gave none of them a token, since all documents would score alike; else warn.

        Documents without tokens are never retrieved, which metrics show. By an encoder of words, queries of stop words have none.
        """
        what = "queries" if self.role == "query" else "documents"
        task, name = self.task, self.encoder.name
        said = f"{task.source} {task.dataset}: none of the {len(self.ids):,} {what} has a token by {name}"
        if self.role == "query" and isinstance(self.encoder, ModelEncoder):
            forget(begun)
            raise DataError(f"{said}, need at least one: look at the texts, the tokenizer and --max-query-tokens")
        ranked = "all scores are 0, and the ranking is the order of the documents"
        warnings.warn(f"{said}: {ranked if self.role == 'query' else 'none is ever retrieved'}", stacklevel=3)

    def _tokens(self, start: int, stop: int) -> Packed:
        if self._first is not None and (start, stop) == (0, len(self._first)):
            ready, self._first = self._first, None
            return ready
        return self._encode(start, stop)

    def _encode(self, start: int, stop: int) -> Packed:
        if not self._prepared:
            self.encoder.prepare(self.task.documents)
            self._prepared = True
        items = self.items[start:stop]  # a slice: lazy page images are decoded a batch at a time
        try:
            found = self.encoder.encode(items, self.role)
        except ItemError as error:
            number = start + error.number
            raise error.named(f"{self.role} {self.ids[number]!r} (item {number} of {len(self.ids)})") from error
        if not isinstance(found, Packed):
            got = type(found).__name__
            raise UsageError(f"encoder {self.encoder.name!r}: encode returned {got}, need a Packed with a row for each item")
        return found


def find_entry(
    task: Task, role: Role, encoder: Encoder, cache_dir: Path | str, contents: Contents | None = None
) -> Entry | None:
    """The entry that `embed` would give without encoding anything; None where it would encode. Writes nothing.

    `contents`: the task's, where the caller has them already.

    Raises:
        CacheError, DataError, UsageError: as `embed`.
    """
    return TaskSide(task, role, encoder, cache_dir, contents).find()


def embed(
    task: Task, role: Role, encoder: Encoder, cache_dir: Path | str, *, quiet: bool = False, contents: Contents | None = None
) -> Entry:
    """Token embeddings of a task's queries or documents, from the cache where they are in it; encoded by this process alone.

    In this order: the entry with exactly this key, complete or to be resumed; an imported entry of the same texts and
    encoder name; else everything is encoded, in chunks (`chunk_of`), with a progress bar on stderr. Before queries are
    encoded the encoder is offered the corpus (`encoder.prepare`). `contents`: as in `find_entry`.

    Raises:
        CacheError, DataError, UsageError: as `fill_entry` and `content_hash`.
    """
    side = TaskSide(task, role, encoder, cache_dir, contents)
    if (entry := side.find()) is not None:
        return entry
    with side.begun() as begun:
        filled = side.fill(begun, quiet=quiet)
    assert filled is not None  # this process is the leader
    return filled


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
        "packages": {name: version for name, version in package_versions().items() if version is not None},
    }


def package_versions() -> dict[str, str | None]:
    """Versions of what embeddings are made and stored with; None: not installed."""
    found: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = _version(name)
    return found


_version = functools.cache(metadata.version)  # of an installed package, looked up once
