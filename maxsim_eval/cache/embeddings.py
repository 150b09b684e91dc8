"""Token embeddings of a task: from the cache, imported, or encoded now; of the whole task or of a subset of it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.filling import Begun
from maxsim_eval.cache.lost_model import encoded_entries, names_of
from maxsim_eval.cache.selection import Documents, Selection
from maxsim_eval.cache.sides import (
    Contents,
    TaskSide,
    cached_names,
    embed,
    find_entry,
    find_imported,
    holds_documents,
    imported_names,
    package_versions,
)
from maxsim_eval.data.subsets import rows_of
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.environment import resolve_device
from maxsim_eval.errors import DataError, MaxsimEvalError, MissingPackageError, NoModelError, UnknownNameError, UsageError
from maxsim_eval.processes.agreement import machine_of, require_same_machines
from maxsim_eval.processes.world import World
from maxsim_eval.types import Encoder, Role, Task
from maxsim_kernels import Packed

_NO_DIFFERENCE = ("batch_size", "trust_remote_code")  # options that change no stored embedding
_ROLES: tuple[Role, ...] = ("query", "document")


@dataclass(frozen=True)
class Embeddings:
    """The token embeddings of an evaluation in the cache, and what the report says of the encoder.

    `made_by` is the encoder; None where there is only its name: of imported embeddings, and where its model is not here.
    """

    queries: Entry
    documents: Documents
    encoder: Mapping[str, Any]
    made_by: Encoder | None = None


def embeddings(
    task: Task,
    encoder: Encoder | str,
    cache_dir: Path | str,
    *,
    kept: Task | None = None,
    device: str = "auto",
    quiet: bool = False,
    **options: Any,
) -> Embeddings:
    """Token embeddings of a task through the cache: cached, imported, or encoded now, by this process alone.

    Embeddings imported under exactly this name for exactly these texts are used as they are. Else the encoder of that name is
    made, and what its entries lack is encoded. Where its model cannot be had, embeddings cached under its name are used, with a
    warning, if nothing else could be meant; else `get_encoder`'s error says what is missing and what to do. Imported embeddings
    cannot be changed: an option that would do so, or another revision, is refused beside them (`UsageError`), and so are imported
    embeddings of one side beside encoded ones of the other (`DataError`). What is encoded is stored in `task.dtype` unless
    `options` name a dtype.

    `kept` is the task itself or a subset of it (`subsets.limit_task`). Its documents are rows of the whole corpus's entry
    where that is complete or imported; else they alone are encoded, into an entry of their own, whose key is made from their
    ids and texts. The queries are always those of the whole task, and an encoder that counts the corpus is offered all of it:
    what a query or document is encoded to does not depend on what was left out.
    """
    both = (task, task if kept is None else kept)
    found = embeddings_by(World(), lambda: both, encoder, cache_dir, device=device, quiet=quiet, **options)
    assert found is not None  # this process is the leader
    return found


def embeddings_by(
    world: World,
    tasks: Callable[[], tuple[Task, Task]],
    encoder: Encoder | str,
    cache_dir: Path | str,
    *,
    of: tuple[str, str] | None = None,
    device: str = "auto",
    quiet: bool = False,
    **options: Any,
) -> Embeddings | None:
    """As `embeddings`, by all processes of `world`, each of which calls this alike: the embeddings on the leader, elsewhere None.

    The leader looks up what is cached and begins the entry of the documents; every process encodes shards of it, on its own
    `device`; the leader alone encodes the queries. Reading millions of texts and starting a model take as long as encoding many of
    them, so all processes do that at the same time: the others as soon as the leader has found that documents must be encoded, or
    at the very beginning where the cache holds no entry that could be theirs.

    Args:
        tasks: gives the task and what is kept of it. Called by the leader, and by the others only where documents are, or seem,
            to be encoded; theirs must be the same (the entry's key proves it).
        of: the task's source and dataset, where several processes may read it at once; None: the others wait for the leader.

    Raises:
        UsageError: as `embeddings`, or processes whose hardware, versions or threads differ. CacheError: also texts or a model
            that differ, or a cache folder that not all see. RankError: another process failed.
    """
    if options and not isinstance(encoder, str):
        raise UsageError(f"encoder options {', '.join(options)}: need the name of an encoder; this one was made with its own")
    device = resolve_device(device, quiet=quiet or not world.leader)
    named = encoder if isinstance(encoder, str) else encoder.name

    def helping() -> TaskSide:
        return _helping_side(tasks()[1], encoder, cache_dir, device, options, world)

    side: TaskSide | None = None
    failed: MaxsimEvalError | OSError | None = None
    if not world.leader and of is not None and not holds_documents(cache_dir, *of, named):
        try:
            side = helping()
        except (MaxsimEvalError, OSError) as error:
            failed = error  # the leader may fail in the same way, and says so, or need no help
    found = _find(*tasks(), encoder, cache_dir, device, options) if world.leader else None
    own = found.documents if found is not None and isinstance(found.documents, TaskSide) else None
    to_encode = world.tell(own is not None)
    if to_encode and failed is not None:
        raise failed
    side = own or side or helping() if to_encode else None
    filled: Entry | None = None
    with contextlib.ExitStack() as held:
        begun: Begun | None = world.share(None if own is None else held.enter_context(own.begun()))
        if begun is not None:
            if world.size > 1:
                require_same_machines(world.collect({**machine_of(device), **package_versions()}), "embeddings")
            assert side is not None  # every process has one where documents are to be encoded
            filled = side.fill(begun, quiet=quiet, world=world)
    return found.rest(quiet, filled) if isinstance(found, _Search) else found


def _helping_side(
    kept: Task, encoder: Encoder | str, cache_dir: Path | str, device: str, options: Mapping[str, Any], world: World
) -> TaskSide:
    """The documents as a process other than the leader encodes them: with a model of its own, which starts now."""
    side = TaskSide(kept, "document", _encoder_of(encoder, kept, device, options), cache_dir)
    if side.at_once > 1:  # a GPU's model takes seconds to start
        side.start(world)
    return side


def _encoder_of(encoder: Encoder | str, task: Task, device: str, options: Mapping[str, Any]) -> Encoder:
    if not isinstance(encoder, str):
        return encoder
    return get_encoder(encoder, default_dtype=task.dtype, device=device, **options)


@dataclass
class _Search:
    """What an evaluation's embeddings are made from, and the entries that the cache already holds."""

    task: Task
    contents: Contents
    encoder: Encoder
    cache_dir: Path | str
    queries: Entry | None
    documents: Documents | TaskSide  # a side: they are still to be encoded

    def rest(self, quiet: bool, filled: Entry | None = None) -> Embeddings:
        """The embeddings; `filled` are the documents, where the cache lacked them. Queries that it lacks are encoded now."""
        documents = filled if isinstance(self.documents, TaskSide) else self.documents
        assert documents is not None  # a side was filled
        queries = self.queries
        if queries is None:
            queries = embed(self.task, "query", self.encoder, self.cache_dir, quiet=quiet, contents=self.contents)
        made_by = None if _origin(documents) == "imported" else self.encoder
        return Embeddings(queries, documents, _encoder_facts(self.encoder.name, self.encoder.revision, documents), made_by)


def cached_embeddings(
    task: Task, encoder: Encoder | str, cache_dir: Path | str, *, kept: Task | None = None, device: str = "auto", **options: Any
) -> Embeddings:
    """As `embeddings`, but nothing is encoded: what is not in the cache, whole, is a `DataError` that says how to put it there."""
    if options and not isinstance(encoder, str):
        raise UsageError(f"encoder options {', '.join(options)}: need the name of an encoder; this one was made with its own")
    found = _find(task, task if kept is None else kept, encoder, cache_dir, device, options)
    if isinstance(found, Embeddings):
        return found
    there = {"queries": found.queries is not None, "documents": not isinstance(found.documents, TaskSide)}
    if missing := " and ".join(side for side, is_there in there.items() if not is_there):
        named = encoder if isinstance(encoder, str) else encoder.name
        raise DataError(
            f"{cache_dir}: no complete embeddings of the {missing} of {task.source} {task.dataset} by encoder {named!r} with these "
            f"options, and nothing is encoded here; make them first (evaluate.py encode {task.source} {task.dataset} --encoder "
            f"{named}, or an evaluation), or name the encoder and options they were made with (evaluate.py cache ls)"
        )
    return found.rest(quiet=True)


def _find(
    task: Task, kept: Task, encoder: Encoder | str, cache_dir: Path | str, device: str, options: Mapping[str, Any]
) -> Embeddings | _Search:
    """The embeddings, where no encoder is needed, else what the cache holds of them; refuses what `embeddings` refuses."""
    contents = Contents(task)
    of_kept = contents if kept is task else Contents(kept)
    changing: list[str] = []
    named = encoder if isinstance(encoder, str) else encoder.name
    if isinstance(encoder, str):
        changing = [name for name, value in options.items() if value is not None and name not in _NO_DIFFERENCE]
        imported = imported_entries(task, named, cache_dir, contents)
        if imported:
            _require_imported_alone(task, named, named, imported, changing)
            queries, documents = imported["query"], imported["document"]
            return Embeddings(queries, chosen_rows(documents, task, kept), _encoder_facts(named, "", documents))
        try:
            encoder = _encoder_of(encoder, task, device, options)
        except UnknownNameError as error:
            names = [*error.known, *imported_names(cache_dir, task.source, task.dataset)]
            raise UnknownNameError("encoder", named, names) from None
        except (DataError, MissingPackageError) as error:
            no_model = isinstance(error, NoModelError | MissingPackageError)
            cached = _without_model(task, kept, named, cache_dir, (contents, of_kept)) if no_model and not changing else None
            if cached is not None:
                reason = error.reason if isinstance(error, NoModelError) else str(error)
                folders = f"{cached.queries.folder} and {cached.documents.folder}"
                warnings.warn(f"{reason}; the embeddings that are cached under its name are used: {folders}", stacklevel=2)
                return cached
            there_by = ", ".join(cached_names(cache_dir, task.source, task.dataset))
            if not there_by:
                raise
            if isinstance(error, NoModelError):
                others = f"embeddings of {task.source} {task.dataset} that are cached: by {there_by}"
                raise NoModelError(error.reason, [*error.ways, others]) from error
            raise DataError(f"{error} Embeddings of {task.source} {task.dataset} that are cached: by {there_by}.") from error
        if named.startswith(f"{encoder.name}@") and "revision" not in changing:
            changing.append("revision")
        if getattr(encoder, "other_dtypes", ()):
            encoder = _as_cached(task, kept, encoder, named, cache_dir, (contents, of_kept), {**options, "device": device})
    whole = None if kept.document_ids is task.document_ids else find_entry(task, "document", encoder, cache_dir, contents)
    side = TaskSide(kept, "document", encoder, cache_dir, of_kept) if whole is None else None
    there: dict[Role, Entry | None] = {
        "query": find_entry(task, "query", encoder, cache_dir, contents),
        "document": whole if side is None else side.find(),
    }
    # The name as typed and the encoder's own may differ (a path, name@revision), and imports are found by the latter too.
    taken = {role: entry for role, entry in there.items() if entry is not None and _origin(entry) == "imported"}
    _require_imported_alone(task, named, encoder.name, taken, changing)
    found: Documents | TaskSide | None = there["document"] or side
    if whole is not None:
        found = chosen_rows(whole, task, kept)
    assert found is not None  # one of the three is there
    return _Search(task, contents, encoder, cache_dir, there["query"], found)


def _without_model(
    task: Task, kept: Task, named: str, cache_dir: Path | str, contents: tuple[Contents, Contents]
) -> Embeddings | None:
    """The embeddings that the cache has by a model which cannot be had now; None unless both sides are there."""
    found = encoded_entries(task, named, cache_dir, contents[0])
    if "query" not in found:
        return None
    if "document" in found:
        documents: Documents = chosen_rows(found["document"], task, kept)
    else:
        of_kept = {} if kept is task else encoded_entries(kept, named, cache_dir, contents[1])
        if "document" not in of_kept:
            return None
        documents = of_kept["document"]
    revision = str(documents.manifest["provenance"].get("revision", ""))
    return Embeddings(found["query"], documents, _encoder_facts(names_of(named)[0], revision, documents))


def _as_cached(
    task: Task,
    kept: Task,
    own: Encoder,
    named: str,
    cache_dir: Path | str,
    contents: tuple[Contents, Contents],
    options: Mapping[str, Any],
) -> Encoder:
    """The encoder, in another device's default precision where documents are cached in that and not in this device's."""

    def there(encoder: Encoder) -> bool:
        whole = find_entry(task, "document", encoder, cache_dir, contents[0])
        return whole is not None or (
            kept is not task and find_entry(kept, "document", encoder, cache_dir, contents[1]) is not None
        )

    if there(own):
        return own
    for dtype in own.other_dtypes:  # type: ignore[attr-defined]
        stored = options.get("embedding_dtype") or task.dtype
        other = get_encoder(named, **{**options, "dtype": dtype, "embedding_dtype": stored})
        if there(other):
            return other
    return own


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
