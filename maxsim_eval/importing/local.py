"""A local dataset from embeddings alone: ids and judgements of the file, texts empty, in BEIR layout."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from maxsim_eval.data.assembling import relevance_warnings
from maxsim_eval.data.beir import QRELS_HEADER, dump_jsonl, write_folder
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.importing.tables import Imported


def make_local(merged: Imported, dataset: str, data_dir: Path, encoder: str, revision: str, files: Mapping[str, str]) -> None:
    """Make the local dataset of that name from the file's own ids and qrels; `files` are names and SHA-256 for its `origin.json`.

    Raises:
        UsageError: a name that is a path. DataError: embeddings without ids or qrels, or a folder that cannot be written.
    """
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
    _write_local(merged, folder, encoder, revision, files)


def _write_local(merged: Imported, folder: Path, encoder: str, revision: str, files: Mapping[str, str]) -> None:
    """The file's ids and qrels as a dataset in BEIR layout, whole or not at all."""
    queries, documents, qrels = merged.query_ids or [], merged.document_ids or [], merged.qrels or {}
    known, asked = set(documents), set(queries)
    judged = {query: row for query, row in qrels.items() if query in asked}
    if not any(document in known for row in judged.values() for document in row):
        raise DataError(f"{merged.path}: qrels: no judgement names a query and a document of the file, need at least one")
    list(relevance_warnings(merged.path, judged))  # raises where nothing is relevant; loading gives the warnings
    for name in chain(queries, documents, qrels, *qrels.values()):
        if name.split() != [name]:
            raise DataError(f"{merged.path}: id {name!r} is empty or holds white space, which neither qrels nor runs can")
    origin = {
        "origin": "imported",
        "files": dict(files),
        "encoder": encoder,
        "revision": revision,
        "texts": "empty: the embeddings came without texts",
        "notes": list(merged.notes),
    }
    table = io.StringIO(newline="")
    writer = csv.writer(table, delimiter="\t", lineterminator="\n")  # quotes what the reader unquotes
    writer.writerow(QRELS_HEADER)
    writer.writerows((query, document, score) for query, row in qrels.items() for document, score in row.items())
    content = {
        "corpus.jsonl": dump_jsonl({"_id": name, "title": "", "text": ""} for name in documents),
        "queries.jsonl": dump_jsonl({"_id": name, "text": ""} for name in queries),
        "qrels/test.tsv": table.getvalue().encode("utf-8"),
        "origin.json": json.dumps(origin, indent=2, ensure_ascii=False).encode("utf-8"),
    }
    try:
        write_folder(folder, content)
    except OSError as error:
        raise DataError(f"{folder}: the dataset folder cannot be written: {error}") from error
