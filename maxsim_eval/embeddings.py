"""Token embeddings of a task: from the cache, imported, or encoded now; of the whole task or of a subset of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from maxsim_eval.cache import Contents, embed, find_entry, find_imported
from maxsim_eval.encoders import get_encoder
from maxsim_eval.entries import Entry
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.selection import Documents, Selection
from maxsim_eval.subsets import rows_of
from maxsim_eval.types import Encoder, Role, Task
from maxsim_kernels import Packed

_NO_DIFFERENCE = ("batch_size", "trust_remote_code")  # to embeddings that are there
_ROLES: tuple[Role, ...] = ("query", "document")


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

    What was imported under exactly this name for exactly these texts is used as it is. Else a name this version can run goes
    through `cache.embed`; of any other, the error of `get_encoder` says what is missing and what to do. Imported embeddings
    are what they are: an option that would change them, or another revision, is refused beside them (`UsageError`), and so
    are imported embeddings of one side beside encoded ones of the other (`DataError`).

    `kept` is the task itself or a subset of it (`subsets.limit_task`). Its documents are rows of the whole corpus's entry
    where that is complete or imported; else they alone are encoded, into an entry of their own, whose key their ids and
    texts make. The queries are always those of the whole task, and an encoder that counts the corpus is offered all of it:
    what a query or document is encoded to does not depend on what was left out.
    """
    kept = task if kept is None else kept
    if options and not isinstance(encoder, str):
        raise UsageError(f"encoder options {', '.join(options)}: need the name of an encoder; this one was made with its own")
    contents = Contents(task)
    of_kept = contents if kept is task else Contents(kept)
    changing: list[str] = []
    if isinstance(encoder, str):
        named = encoder
        changing = [name for name, value in options.items() if value is not None and name not in _NO_DIFFERENCE]
        imported = imported_entries(task, named, cache_dir, contents)
        if imported:
            _require_imported_alone(task, named, named, imported, changing)
            queries, documents = imported["query"], imported["document"]
            return Embeddings(queries, chosen_rows(documents, task, kept), _encoder_facts(named, "", documents))
        encoder = get_encoder(named, device=device, **options)
        if named.startswith(f"{encoder.name}@") and "revision" not in changing:
            changing.append("revision")
    else:
        named = encoder.name
    whole = None if kept.document_ids is task.document_ids else find_entry(task, "document", encoder, cache_dir, contents)
    there: dict[Role, Entry | None] = {
        "query": find_entry(task, "query", encoder, cache_dir, contents),
        "document": whole or find_entry(kept, "document", encoder, cache_dir, of_kept),
    }
    # The name as typed and the encoder's own may differ (a path, name@revision), and imports are found by the latter too.
    taken = {role: entry for role, entry in there.items() if entry is not None and _origin(entry) == "imported"}
    _require_imported_alone(task, named, encoder.name, taken, changing)
    found: Documents
    if whole is not None:
        found = chosen_rows(whole, task, kept)
    else:
        found = there["document"] or embed(kept, "document", encoder, cache_dir, quiet=quiet, contents=of_kept)
    queries = there["query"] or embed(task, "query", encoder, cache_dir, quiet=quiet, contents=contents)
    return Embeddings(queries, found, _encoder_facts(encoder.name, encoder.revision, found))


def chosen_rows(entry: Entry, task: Task, kept: Task) -> Documents:
    """The kept documents of the whole corpus's entry."""
    if kept.document_ids is task.document_ids:
        return entry
    return Selection(entry, rows_of(task.document_ids, kept.document_ids))


def imported_entries(task: Task, name: str, cache_dir: Path | str, contents: Contents) -> dict[Role, Entry]:
    """The imported entries of a task under exactly this name; a role that was not imported is left out."""
    entries: dict[Role, Entry] = {}
    for role in _ROLES:
        entry = find_imported(cache_dir, task.source, task.dataset, name, role, contents.of(role))
        if entry is not None:
            entries[role] = entry
    return entries


def _origin(documents: Documents) -> str:
    return str(documents.manifest["provenance"].get("origin", ""))


def _require_imported_alone(
    task: Task, named: str, owner: str, imported: Mapping[Role, Entry], changing: Sequence[str]
) -> None:
    """Refuse imported entries beside options they were not made with, and one imported side beside an encoded one.

    `named` is the encoder as the user gave it, `owner` the name the entries were imported under.
    """
    if not imported:
        return
    folders = " and ".join(str(entry.folder) for entry in imported.values())
    if changing:
        under = "" if owner == named else f" as {owner!r}"
        raise UsageError(
            f"encoder {named!r}: its embeddings were imported{under}, to which {', '.join(changing)} cannot be applied; leave that "
            f"away, or remove what was imported (evaluate.py cache ls): {folders}"
        )
    missing = [role for role in _ROLES if role not in imported]
    if missing:
        raise DataError(
            f"encoder {named!r}: the {missing[0]} embeddings of {task.source} {task.dataset} were not imported, the other side was, "
            f"and one evaluation takes both from one place; import them too (evaluate.py import {task.source} {task.dataset} FILE "
            f"--encoder {owner}) and evaluate with --encoder {owner}, or remove what was imported (evaluate.py cache ls): {folders}"
        )


def _encoder_facts(name: str, revision: str, documents: Documents) -> dict[str, Any]:
    origin = _origin(documents)
    if origin == "imported":  # an import says itself which revision made it; the encoder at hand had no part in it
        revision = documents.manifest["provenance"].get("revision", "")
    return {
        "name": name,
        "revision": revision,
        "dim": documents.dim,
        "dtype": str(documents.dtype).removeprefix("torch."),
        "origin": origin,
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
