"""Token embeddings of a task: from the cache, imported, or encoded now; of the whole task or of a subset of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from maxsim_eval.cache import content_hash, embed, find_entry, find_imported
from maxsim_eval.encoders import get_encoder
from maxsim_eval.entries import Entry
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.selection import Documents, Selection
from maxsim_eval.subsets import rows_of
from maxsim_eval.types import Encoder, Role, Task
from maxsim_kernels import Packed

_NO_DIFFERENCE = ("batch_size", "trust_remote_code")  # to embeddings that are there


@dataclass(frozen=True)
class Embeddings:
    """The token embeddings of an evaluation in the cache, and what the report says of the encoder."""

    queries: Entry
    documents: Documents
    encoder: Mapping[str, Any]


def embeddings(
    task: Task,
    encoder: Encoder | str,
    cache_dir: Path | str,
    *,
    kept: Task | None = None,
    device: str = "cpu",
    quiet: bool = False,
    **options: Any,
) -> Embeddings:
    """Token embeddings of a task through the cache: cached, imported, or encoded now.

    A name this version can run goes through `cache.embed`. Any other name must have been imported for exactly these texts;
    else the error of `get_encoder` says what is missing and what to do.

    `kept` is the task itself or a subset of it (`subsets.limit_task`). Its documents are rows of the whole corpus's entry
    where that is complete or imported; else they alone are encoded, into an entry of their own, whose key their ids and
    texts make. The queries are always those of the whole task, and an encoder that counts the corpus is offered all of it:
    what a query or document is encoded to does not depend on what was left out.
    """
    kept = task if kept is None else kept
    if options and not isinstance(encoder, str):
        raise UsageError(f"encoder options {', '.join(options)}: need the name of an encoder; this one was made with its own")
    if isinstance(encoder, str):
        imported = _imported(task, kept, encoder, cache_dir)
        if imported is not None:
            changing = [name for name, value in options.items() if value is not None and name not in _NO_DIFFERENCE]
            if changing:
                raise UsageError(
                    f"encoder {encoder!r}: its embeddings were imported, to which {', '.join(changing)} cannot be applied; leave the "
                    "options away, or remove the imported entries (evaluate.py cache ls)"
                )
            return imported
        encoder = get_encoder(encoder, device=device, **options)
    documents: Documents
    whole = None if kept.document_ids is task.document_ids else find_entry(task, "document", encoder, cache_dir)
    if whole is None:
        documents = embed(kept, "document", encoder, cache_dir, quiet=quiet)
    else:
        documents = _rows(whole, task, kept)
    queries = embed(task, "query", encoder, cache_dir, quiet=quiet)
    return Embeddings(queries, documents, _encoder_facts(encoder.name, encoder.revision, documents))


def _rows(entry: Entry, task: Task, kept: Task) -> Documents:
    """The kept documents of the whole corpus's entry."""
    if kept.document_ids is task.document_ids:
        return entry
    return Selection(entry, rows_of(task.document_ids, kept.document_ids))


def _imported(task: Task, kept: Task, name: str, cache_dir: Path | str) -> Embeddings | None:
    sides: tuple[tuple[Role, Sequence[str], Sequence[Any]], ...] = (
        ("query", task.query_ids, task.queries),
        ("document", task.document_ids, task.documents),
    )
    entries = {}
    for role, ids, items in sides:
        entries[role] = find_imported(cache_dir, task.source, task.dataset, name, role, content_hash(ids, items))
    missing = [role for role, entry in entries.items() if entry is None]
    queries, documents = entries["query"], entries["document"]
    if queries is None or documents is None:
        if len(missing) == 1 and name.partition(":")[0] not in ("lexical", "hf"):
            raise DataError(
                f"encoder {name!r}: the {missing[0]} embeddings of {task.source} {task.dataset} were not imported, the other "
                f"side was; import them too (evaluate.py import {task.source} {task.dataset} FILE --encoder {name})"
            )
        return None
    facts = _encoder_facts(name, documents.manifest["provenance"].get("revision", ""), documents)
    return Embeddings(queries, _rows(documents, task, kept), facts)


def _encoder_facts(name: str, revision: str, documents: Documents) -> dict[str, Any]:
    return {
        "name": name,
        "revision": revision,
        "dim": documents.dim,
        "dtype": str(documents.dtype).removeprefix("torch."),
        "origin": documents.manifest["provenance"].get("origin", ""),
    }


def query_tokens(task: Task, kept: Task, entry: Entry) -> Packed:
    """Tokens of the kept queries, in their order; `entry` holds those of the whole task."""
    tokens = entry.load()
    if kept.query_ids is task.query_ids:
        return tokens
    return tokens.select(torch.from_numpy(rows_of(task.query_ids, kept.query_ids))).compact()


def check_widths(found: Embeddings, queries: Packed) -> None:
    """Refuse queries and documents of different widths, by a `DataError`."""
    if found.documents.dim != queries.dim:
        raise DataError(
            f"{found.queries.folder}: query embeddings have d = {queries.dim}, the documents in {found.documents.folder} "
            f"d = {found.documents.dim}; both must come from one encoder"
        )
