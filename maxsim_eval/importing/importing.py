"""Precomputed token embeddings into the cache: read, check, align with the task, write, so that no model is needed.

`read_embeddings` (many_files.py) reads and checks a file, a folder or chunks; `import_embeddings` puts the rows into the task's
order and fills the cache entries that evaluation finds. Without a dataset, a file with ids and qrels becomes a local one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np

from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.filling import fill_entry
from maxsim_eval.cache.housekeeping import remove_entry
from maxsim_eval.cache.sides import content_hash, entry_folder, entry_key
from maxsim_eval.data.beir import check_name
from maxsim_eval.data.loading import has_local, load_task, local_path
from maxsim_eval.errors import CacheError, DataError, UsageError
from maxsim_eval.importing.file_order import grouped
from maxsim_eval.importing.local import make_local
from maxsim_eval.importing.many_files import FileRows, Files, chunks_or_roles, read_embeddings
from maxsim_eval.importing.origins import Origin, names_and_digests, origins_of
from maxsim_eval.importing.tables import Imported, ImportedSide
from maxsim_eval.importing.token_checks import UNIT_TOLERANCE
from maxsim_eval.parsing import json_of
from maxsim_eval.types import Role, Task
from maxsim_kernels import Packed

__all__ = ["Imported", "ImportedSide", "import_embeddings", "read_embeddings"]

READING = 1  # version of the reading rules: raise it when the same file would give other tokens
SHARD_BYTES = 256 << 20
CHUNK = 1024  # documents copied out of the file at a time: often enough for the progress bar
UNIT_ENCODERS = ("colbertv2", "colpali", "gve", "hf")  # names, before a colon, that stand for models which give unit vectors
Paths = Files | Mapping[Role, Files]


@dataclass(frozen=True)
class _NewEntry:
    """One entry to write: where it goes, which file rows become it, and the entries that it would replace."""

    role: Role
    side: ImportedSide
    ids: Sequence[str]
    order: np.ndarray | None  # file row of every task row; None: the file's own order
    folder: Path
    key: str
    provenance: dict[str, Any]
    rivals: tuple[Path, ...]


def import_embeddings(
    paths: Paths,
    task: Task | None,
    *,
    source: str,
    dataset: str,
    encoder_name: str,
    cache_dir: Path | str,
    data_dir: Path | str,
    revision: str = "",
    quiet: bool = False,
    replace: bool = False,
    ids: Mapping[Role, Path | str] | None = None,
    drop_zero_tokens: bool = False,
    require_normalised: bool = False,
) -> dict[str, Entry]:
    """Write the embeddings of one or more files as cache entries of a task; nothing is written before all checks pass.

    Args:
        paths: a file or a folder, several (each role once; files whose names differ in a number only are chunks of one), or
            {"query": file, "document": file} where no file names its role; a list there is chunks.
        task: what the embeddings belong to. None: the local dataset `dataset`; where there is none, a file with ids and
            qrels makes one (`data_dir/local/<dataset>`, texts empty). `source` must then be "local".
        source, dataset: of the task.
        encoder_name, revision: what made the embeddings; evaluation finds them under this name.
        cache_dir, data_dir: folders of the cache and of the datasets.
        replace: delete the entry of another file, once the new one is whole; without it, another file is refused.
        ids: files of ids, one a line, for a role whose embeddings hold none.
        drop_zero_tokens: leave out tokens that are exactly zero (another reading of the same file: another entry).
        require_normalised: refuse tokens that are no unit vectors. Without it they are noted, and warned of where the encoder's
            name promises unit vectors.

    Returns:
        "query" and/or "document" -> entry, rows in the task's order. Its provenance's `notes` say what was assumed.

    Raises:
        DataError: a file that fails a check, ids that are not the task's, an entry of another file.
        UsageError: names that cannot work. CacheError: a damaged or locked entry.
    """
    _check_names(source, dataset, encoder_name)
    merged = _merge(_read_all(paths, ids or {}, drop_zero_tokens, quiet))
    loud = [f"{side.origin}: {side.zero_note}" for side in merged.sides.values() if side.zero_note]
    sides = {role: _judged(role, side, encoder_name, require_normalised, loud) for role, side in merged.sides.items()}
    merged = changed(merged, sides=sides)
    origins = origins_of(merged, quiet)
    if task is None:
        if source != "local":
            raise UsageError(f"source: got {source!r} without a task; embeddings alone can only become a 'local' dataset")
        if not has_local(dataset, Path(data_dir)):
            files = {name: digest for origin in origins.values() for name, digest in names_and_digests(origin)}
            make_local(merged, dataset, Path(data_dir), encoder_name, revision, files)
        task = load_task("local", dataset, data_dir=Path(data_dir), quiet=quiet)
    elif not _names_task(task, source, dataset):
        raise UsageError(f"task: is {task.source}/{task.dataset}, but source/dataset are {source}/{dataset}")
    notes = [*merged.notes, *_judgement_notes(merged, task)]
    reading = {"drop_zero_tokens": True} if drop_zero_tokens else {}
    names = {"encoder": encoder_name, "revision": revision}
    new_entries = [
        _new_entry(role, side, task, notes, origins[role], names, reading, Path(cache_dir))
        for role, side in merged.sides.items()
    ]
    if not replace:
        for new in new_entries:
            _refuse_rivals(new)
    for text in loud:
        warnings.warn(text, stacklevel=2)
    entries = {str(new.role): _fill(new, quiet) for new in new_entries}
    for rival in (rival for new in new_entries for rival in new.rivals):  # only now that everything new is whole
        _remove(Path(cache_dir), rival)
    return entries


def _check_names(source: str, dataset: str, encoder_name: str) -> None:
    for label, value in (("source", source), ("dataset", dataset), ("encoder_name", encoder_name)):
        if not value.strip():
            raise UsageError(f"{label}: got an empty name")
        check_name(label, value)


def _names_task(task: Task, source: str, dataset: str) -> bool:
    # A local dataset may be asked for by its path, one of ir_datasets is asked for with its split: the task has the shorter name.
    names = {dataset, local_path(dataset).resolve().name} if source == "local" else {dataset}
    whole = {task.dataset, task.provenance.get("id")} if source == "irds" else {task.dataset}
    return source == task.source and not names.isdisjoint(whole)


def _read_all(paths: Paths, ids: Mapping[Role, Path | str], drop_zero_tokens: bool, quiet: bool) -> list[Imported]:
    if not set(ids) <= {"query", "document"}:
        raise UsageError(f"ids: got roles {sorted(ids)}, need 'query' and/or 'document'")
    parts = []
    if isinstance(paths, Mapping):
        if not paths or not set(paths) <= {"query", "document"}:
            raise UsageError(f"paths: got roles {sorted(paths)}, need 'query' and/or 'document'")
        for role, path in paths.items():
            part = read_embeddings(path, role=role, ids=ids, drop_zero_tokens=drop_zero_tokens, quiet=quiet)
            if role not in part.sides:
                raise DataError(f"{part.path}: holds no {role} embeddings")
            parts.append(changed(part, sides={role: part.sides[role]}))
    else:
        several = [paths] if isinstance(paths, (str, Path)) else list(paths)
        if not several:
            raise UsageError("paths: got no file, need at least one")
        for group in grouped([Path(path) for path in several]):
            for path in chunks_or_roles(group):
                parts.append(read_embeddings(path, ids=ids, drop_zero_tokens=drop_zero_tokens, quiet=quiet))
    unused = set(ids) - {role for part in parts for role in part.sides}
    if unused:
        raise UsageError(f"ids: got a file of {unused.pop()} ids, but no embeddings of that role")
    return parts


def _merge(parts: Sequence[Imported]) -> Imported:
    """Queries, documents and qrels of several files as one; two files for one thing are refused."""
    first = parts[0]
    sides: dict[Role, ImportedSide] = {}
    origin: dict[Role, Path] = {}
    qrels, qrels_path = first.qrels, first.path
    for part in parts:
        for role, side in part.sides.items():
            if role in sides:
                raise DataError(
                    f"{origin[role]} and {part.path}: both hold {role} embeddings. Where files do not name their role, say "
                    "which one holds the queries and which one the documents; chunks of one set differ in a number only"
                )
            sides[role], origin[role] = side, part.path
        if part.qrels is not None and qrels is not None and part.qrels != qrels:
            raise DataError(f"{qrels_path} and {part.path}: their qrels differ, need one set of judgements")
        if qrels is None:
            qrels, qrels_path = part.qrels, part.path
    widths = {role: side.rows.dim for role, side in sides.items()}
    if len(set(widths.values())) > 1:
        detail = ", ".join(f"{width} in {origin[role]} ({role})" for role, width in widths.items())
        raise DataError(f"mixed embedding widths: {detail}")
    return Imported(first.path, sides, qrels, {}, tuple(note for part in parts for note in part.notes))


def _judged(role: Role, side: ImportedSide, encoder: str, required: bool, loud: list[str]) -> ImportedSide:
    """The side, with a note (also in `loud`) where tokens should be unit vectors and are not; `DataError` if `required`."""
    norms = side.norms
    wrong = norms.off_unit + (norms.zeros if required else 0)
    if not wrong or not (required or encoder.partition(":")[0] in UNIT_ENCODERS):
        return side
    what = (
        f"{wrong} of {norms.tokens} tokens are no unit vectors (norms {norms.low:.4g} to {norms.high:.4g}, {norms.zeros} zero; first: "
        f"{norms.first_off_unit or norms.first_zero}; {UNIT_TOLERANCE} more or less than 1 is taken as rounding)"
    )
    if required:
        raise DataError(f"{side.origin}: {role} embeddings: {what}, and --require-normalised was given")
    note = f"ImportWarning: {what}, but {encoder!r} stands for unit vectors: are these its embeddings before normalising?"
    loud.append(f"{side.origin}: {note}")
    return changed(side, notes=(*side.notes, note))


def _judgement_notes(merged: Imported, task: Task) -> list[str]:
    """Say so when the file's judgements of the task's queries and documents are not the task's."""
    if merged.qrels is None:
        return []
    documents = set(task.document_ids)
    differ = 0
    for query in task.query_ids:
        ours, theirs = task.qrels.get(query, {}), merged.qrels.get(query, {})
        differ += sum(ours.get(name) != theirs.get(name) for name in {*ours, *theirs} if name in documents)
    if not differ:
        return []
    return [f"ImportWarning: qrels: {differ} judgements differ from those of {task.source}/{task.dataset}, which are used"]


# Entries --------------------------------------------------------------------------------------------------------------


def _new_entry(
    role: Role,
    side: ImportedSide,
    task: Task,
    notes: Sequence[str],
    origin: Origin,
    made_by: Mapping[str, str],
    reading: Mapping[str, bool],
    cache_dir: Path,
) -> _NewEntry:
    ids, items = (task.query_ids, task.queries) if role == "query" else (task.document_ids, task.documents)
    order, said = _align(role, side, task, ids)
    content, encoder = content_hash(ids, items), made_by["encoder"]
    made_from = {"origin": "imported", "reading": READING, "file_sha256": origin.sha256, "siblings_sha256": origin.beside}
    made_from |= reading
    key = entry_key(content, {**made_from, **made_by, "role": role})
    folder = entry_folder(cache_dir, task.source, task.dataset, encoder, role, key)
    names = {"encoder": encoder, "role": role, "source": task.source, "dataset": task.dataset}
    provenance = {
        **made_from,
        **names,
        "content": content,
        "file": origin.name,
        "files": origin.count,
        "revision": made_by["revision"],
        "norms": side.norms.as_json(),
        "notes": [*notes, *side.notes, *said],
    }
    like = {**names, "origin": "imported", "content": content}
    rivals = tuple(path for path in _folders_like(folder.parent, like) if path != folder)
    return _NewEntry(role, side, ids, order, folder, key, provenance, rivals)


def _align(role: Role, side: ImportedSide, task: Task, ids: Sequence[str]) -> tuple[np.ndarray | None, list[str]]:
    """File row of every row of the task (None: the same order), and what had to be assumed."""
    file, where = side.origin, f"{task.source}/{task.dataset} ({task.split})"
    plural = "queries" if role == "query" else "documents"
    if side.ids is None:
        if len(side.rows) != len(ids):
            hint = " (those with judgements)" if role == "query" else ""
            raise DataError(
                f"{file}: holds {len(side.rows)} {plural} without ids, {where} has {len(ids)}{hint}: without ids the "
                f"counts must be equal. Save {'query_ids' if role == 'query' else 'doc_ids'} with the embeddings"
            )
        return None, [f"ImportWarning: no {role} ids: row n of the file was taken as {role} n of the task, by order alone"]
    row_of = {name: row for row, name in enumerate(side.ids)}
    missing = [name for name in ids if name not in row_of]
    wanted = set(ids)
    extra = [name for name in side.ids if name not in wanted]
    if missing or (extra and role == "document"):
        raise DataError(
            f"{file}: its {role} ids are not those of {where}: {len(missing)} of {len(ids)} are missing"
            f"{_first(missing)}, {len(extra)} are not in the task{_first(extra)}"
            + (f". The ids were taken from {side.ids_are}" if side.ids_are else "")
        )
    order = np.fromiter((row_of[name] for name in ids), dtype=np.int64, count=len(ids))
    said = [f"{len(extra)} queries without judgements in {where} were left out"] if extra else []
    return (None if np.array_equal(order, np.arange(len(side.rows))) else order), said


def _first(names: Sequence[str]) -> str:
    return f" ({', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''})" if names else ""


def _folders_like(dataset_folder: Path, need: Mapping[str, str]) -> list[Path]:
    """Folders of entries, whole or begun, whose provenance says what `need` says."""
    found = []
    for path in sorted(dataset_folder.glob("[!.]*/manifest.json")):
        try:
            manifest = json_of(path.read_bytes())
        except (OSError, ValueError):
            continue  # damaged: whoever opens that entry is told; it is no reason to refuse this file
        provenance = manifest.get("provenance") if isinstance(manifest, dict) else None
        if isinstance(provenance, dict) and need.items() <= provenance.items():
            found.append(path.parent)
    return found


def _refuse_rivals(new: _NewEntry) -> None:
    for rival in new.rivals:
        provenance = json_of((rival / "manifest.json").read_bytes())["provenance"]
        raise DataError(
            f"{new.side.origin}: {provenance['source']}/{provenance['dataset']} already has imported {new.role} "
            f"embeddings of {provenance['encoder']!r}, from {provenance.get('file')!r} (revision "
            f"{provenance.get('revision')!r}): {rival}. Pass --replace to put this file in their place"
        )


def _fill(new: _NewEntry, quiet: bool) -> Entry:
    """Write the entry, finish one that was begun, or return one that is whole already."""
    rows, order = new.side.rows, new.order

    def encode(start: int, stop: int) -> Packed:
        return rows.span(start, stop) if order is None else rows.take(order[start:stop])

    # None: a whole shard. Files that are read out of order are then opened once a shard, not once for every few documents.
    at_once = None if order is not None and isinstance(rows, FileRows) else CHUNK
    mean = max(1, int(rows.lengths.mean() * rows.dim * rows.dtype.itemsize))
    return fill_entry(
        new.folder,
        ids=new.ids,
        key=new.key,
        dtype=rows.dtype,
        dim=rows.dim,
        provenance=new.provenance,
        encode=encode,
        documents_per_shard=max(1, min(65536, SHARD_BYTES // mean)),
        chunk=at_once,
        label=f"importing {new.role} embeddings",
        quiet=quiet,
    )


def _remove(cache_dir: Path, rival: Path) -> None:
    try:
        remove_entry(cache_dir, rival)
    except CacheError as error:
        raise CacheError(f"the new embeddings are stored, but those they replace were not removed: {error}") from error
