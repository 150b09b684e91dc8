"""Precomputed token embeddings into the cache: read, check, align with the task, write, so that no model is needed.

`read_embeddings` (import_tables.py) reads and checks a file; `import_embeddings` puts its rows into the task's order
and fills the cache entries that evaluation finds. Without a dataset, a file with ids and qrels becomes a local one.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from maxsim_eval.beir_format import QRELS_HEADER, dump_jsonl, write_folder
from maxsim_eval.cache import Entry, content_hash, entry_folder, entry_key, fill_entry
from maxsim_eval.errors import CacheError, DataError, UsageError
from maxsim_eval.import_tables import Imported, Side, read_embeddings
from maxsim_eval.loaders import load_task
from maxsim_eval.types import Role, Task
from maxsim_kernels import Packed

__all__ = ["Imported", "Side", "import_embeddings", "read_embeddings"]

READING = 1  # version of the reading rules: raise it when the same file would give other tokens
SHARD_BYTES = 256 << 20
CHUNK = 1024  # documents copied out of the file at a time: often enough for the progress bar
Paths = Path | str | Sequence[Path | str] | Mapping[Role, Path | str]


@dataclass(frozen=True)
class _Plan:
    """One entry to write: where it goes, which file rows become it, and the entries that it would replace."""

    role: Role
    side: Side
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
) -> dict[str, Entry]:
    """Write the embeddings of one or more files as cache entries of a task; nothing is written before all checks pass.

    Args:
        paths: one file, several (each role once), or {"query": file, "document": file} where no file names its role.
        task: what the embeddings belong to. None: the local dataset `dataset`; where there is none, a file with ids and
            qrels makes one (`data_dir/local/<dataset>`, texts empty). `source` must then be "local".
        source, dataset: of the task.
        encoder_name, revision: what made the embeddings; evaluation finds them under this name.
        cache_dir, data_dir: folders of the cache and of the datasets.
        replace: delete the entry of another file, once the new one is whole; without it, another file is refused.

    Returns:
        "query" and/or "document" -> entry, rows in the task's order. Its provenance's `notes` say what was assumed.

    Raises:
        DataError: a file that fails a check, ids that are not the task's, an entry of another file.
        UsageError: names that cannot work. CacheError: a damaged or locked entry.
    """
    _check_names(source, dataset, encoder_name)
    parts = _read_all(paths, quiet)
    merged = _merge(parts)
    digests = {file: _sha256(file, quiet) for part in parts for side in part.sides.values() for file in side.files}
    if task is None:
        if source != "local":
            raise UsageError(f"source: got {source!r} without a task; embeddings alone can only become a 'local' dataset")
        if not _has_local(dataset, Path(data_dir)):
            _make_local(merged, dataset, Path(data_dir), encoder_name, revision, digests)
        task = load_task("local", dataset, data_dir=Path(data_dir), quiet=quiet)
    elif not _names_task(task, source, dataset):
        raise UsageError(f"task: is {task.source}/{task.dataset}, but source/dataset are {source}/{dataset}")
    notes = [*merged.notes, *_judgement_notes(merged, task)]
    plans = [
        _plan(role, side, task, notes, digests, encoder_name, revision, Path(cache_dir)) for role, side in merged.sides.items()
    ]
    if not replace:
        for plan in plans:
            _refuse_rivals(plan)
    entries = {str(plan.role): _fill(plan, quiet) for plan in plans}
    for rival in (rival for plan in plans for rival in plan.rivals):  # only now that everything new is whole
        _delete(rival)
    return entries


def _check_names(source: str, dataset: str, encoder_name: str) -> None:
    for label, value in (("source", source), ("dataset", dataset), ("encoder_name", encoder_name)):
        if not value.strip():
            raise UsageError(f"{label}: got an empty name")


def _names_task(task: Task, source: str, dataset: str) -> bool:
    # A local dataset may be asked for by its path; the task then carries the folder's name.
    names = {dataset, Path(dataset).expanduser().resolve().name} if source == "local" else {dataset}
    return source == task.source and task.dataset in names


def _read_all(paths: Paths, quiet: bool) -> list[Imported]:
    if isinstance(paths, Mapping):
        if not paths or not set(paths) <= {"query", "document"}:
            raise UsageError(f"paths: got roles {sorted(paths)}, need 'query' and/or 'document'")
        parts = []
        for role, path in paths.items():
            part = read_embeddings(path, role=role, quiet=quiet)
            if role not in part.sides:
                raise DataError(f"{part.path}: holds no {role} embeddings")
            parts.append(changed(part, sides={role: part.sides[role]}))
        return parts
    several = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not several:
        raise UsageError("paths: got no file, need at least one")
    return [read_embeddings(path, quiet=quiet) for path in several]


def _merge(parts: Sequence[Imported]) -> Imported:
    """Queries, documents and qrels of several files as one; two files for one thing are refused."""
    first = parts[0]
    sides: dict[Role, Side] = {}
    origin: dict[Role, Path] = {}
    qrels, qrels_path = first.qrels, first.path
    for part in parts:
        for role, side in part.sides.items():
            if role in sides:
                raise DataError(
                    f"{origin[role]} and {part.path}: both hold {role} embeddings. Where files do not name their role, "
                    "say which one holds the queries and which one the documents"
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


def _sha256(path: Path, quiet: bool) -> str:
    digest = hashlib.sha256()
    with (
        open(path, "rb") as handle,
        tqdm(total=path.stat().st_size, desc=f"hashing {path.name}", unit="B", unit_scale=True, disable=quiet, delay=1) as bar,
    ):
        while block := handle.read(8 << 20):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()


# The task -------------------------------------------------------------------------------------------------------------


def _has_local(dataset: str, data_dir: Path) -> bool:
    return any((folder / dataset).is_dir() for folder in (data_dir, data_dir / "local"))


def _make_local(
    merged: Imported, dataset: str, data_dir: Path, encoder: str, revision: str, digests: Mapping[Path, str]
) -> None:
    """Make the local dataset of that name from the file's own ids and qrels."""
    if Path(dataset).name != dataset or dataset in (".", "..") or "\0" in dataset:
        raise UsageError(f"dataset: got {dataset!r}; a new local dataset needs a plain name, not a path")
    lacks = [f"{role} embeddings" for role in ("query", "document") if role not in merged.sides]
    lacks += [f"{role} ids" for role, side in merged.sides.items() if side.ids is None]
    if merged.qrels is None:
        lacks.append("qrels")
    folder = data_dir / "local" / dataset
    if lacks:
        raise DataError(
            f"{merged.path}: there is no dataset {dataset!r} in {data_dir}, and the file cannot make one: it has no "
            f"{', no '.join(lacks)}. Put the dataset (BEIR layout) into {folder}, or save "
            "meta = {'qrels', 'query_ids', 'doc_ids'} with the embeddings"
        )
    _write_local(merged, folder, encoder, revision, digests)


def _write_local(merged: Imported, folder: Path, encoder: str, revision: str, digests: Mapping[Path, str]) -> None:
    """The file's ids and qrels as a dataset in BEIR layout, whole or not at all."""
    queries, documents, qrels = merged.query_ids or [], merged.document_ids or [], merged.qrels or {}
    known, asked = set(documents), set(queries)
    if not any(document in known for query, row in qrels.items() if query in asked for document in row):
        raise DataError(f"{merged.path}: qrels: no judgement names a query and a document of the file, need at least one")
    for name in chain(queries, documents, qrels, *qrels.values()):
        if name.split() != [name]:
            raise DataError(f"{merged.path}: id {name!r} is empty or holds white space, which neither qrels nor runs can")
    sides = merged.sides.values()
    origin = {
        "origin": "imported",
        "files": {file.name: digests[file] for side in sides for file in side.files},
        "encoder": encoder,
        "revision": revision,
        "texts": "empty: the embeddings came without texts",
        "notes": list(merged.notes),
    }
    table = io.StringIO(newline="")
    writer = csv.writer(table, delimiter="\t", lineterminator="\n")  # quotes what the reader unquotes
    writer.writerow(QRELS_HEADER)
    writer.writerows((query, document, score) for query, row in qrels.items() for document, score in row.items())
    files = {
        "corpus.jsonl": dump_jsonl({"_id": name, "title": "", "text": ""} for name in documents),
        "queries.jsonl": dump_jsonl({"_id": name, "text": ""} for name in queries),
        "qrels/test.tsv": table.getvalue().encode("utf-8"),
        "origin.json": json.dumps(origin, indent=2, ensure_ascii=False).encode("utf-8"),
    }
    try:
        write_folder(folder, files)
    except OSError as error:
        raise DataError(f"{folder}: the dataset folder cannot be written: {error}") from error


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


def _plan(
    role: Role,
    side: Side,
    task: Task,
    notes: Sequence[str],
    digests: Mapping[Path, str],
    encoder: str,
    revision: str,
    cache_dir: Path,
) -> _Plan:
    ids, items = (task.query_ids, task.queries) if role == "query" else (task.document_ids, task.documents)
    order, said = _align(role, side, task, ids)
    content = content_hash(ids, items)
    file, *siblings = side.files
    # A npy or safetensors file may carry offsets or ids beside it: they decide the tokens as much as the file does.
    beside = {sibling.name.removeprefix(file.stem): digests[sibling] for sibling in siblings}
    made_from = {"origin": "imported", "reading": READING, "file_sha256": digests[file], "siblings_sha256": beside}
    key = entry_key(content, {**made_from, "encoder": encoder, "revision": revision, "role": role})
    folder = entry_folder(cache_dir, task.source, task.dataset, encoder, role, key)
    names = {"encoder": encoder, "role": role, "source": task.source, "dataset": task.dataset}
    provenance = {
        **made_from,
        **names,
        "content": content,
        "file": file.name,
        "revision": revision,
        "notes": [*notes, *side.notes, *said],
    }
    like = {**names, "origin": "imported", "content": content}
    rivals = tuple(path for path in _folders_like(folder.parent, like) if path != folder)
    return _Plan(role, side, ids, order, folder, key, provenance, rivals)


def _align(role: Role, side: Side, task: Task, ids: Sequence[str]) -> tuple[np.ndarray | None, list[str]]:
    """File row of every row of the task (None: the same order), and what had to be assumed."""
    file, where = side.files[0], f"{task.source}/{task.dataset} ({task.split})"
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
            manifest = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue  # damaged: whoever opens that entry is told; it is no reason to refuse this file
        provenance = manifest.get("provenance") if isinstance(manifest, dict) else None
        if isinstance(provenance, dict) and need.items() <= provenance.items():
            found.append(path.parent)
    return found


def _refuse_rivals(plan: _Plan) -> None:
    for rival in plan.rivals:
        provenance = json.loads((rival / "manifest.json").read_bytes())["provenance"]
        raise DataError(
            f"{plan.side.files[0]}: {provenance['source']}/{provenance['dataset']} already has imported {plan.role} "
            f"embeddings of {provenance['encoder']!r}, from {provenance.get('file')!r} (revision "
            f"{provenance.get('revision')!r}): {rival}. Pass --replace to put this file in their place"
        )


def _fill(plan: _Plan, quiet: bool) -> Entry:
    """Write the entry, or finish it, or find it whole."""
    rows, order = plan.side.rows, plan.order

    def encode(start: int, stop: int) -> Packed:
        return rows.span(start, stop) if order is None else rows.take(order[start:stop])

    mean = max(1, int(rows.lengths.mean() * rows.dim * rows.dtype.itemsize))
    return fill_entry(
        plan.folder,
        ids=plan.ids,
        key=plan.key,
        dtype=rows.dtype,
        dim=rows.dim,
        provenance=plan.provenance,
        encode=encode,
        documents_per_shard=max(1, min(65536, SHARD_BYTES // mean)),
        chunk=CHUNK,
        label=f"importing {plan.role} embeddings",
        quiet=quiet,
    )


def _delete(entry: Path) -> None:
    aside = entry.with_name(f".{entry.name}.{os.getpid()}.old")  # gone at once for readers, however long deleting takes
    try:
        os.replace(entry, aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise CacheError(f"{entry}: the new embeddings are stored, but these cannot be removed: {error}") from error
