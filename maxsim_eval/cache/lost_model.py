"""Embeddings that were encoded on another day, or on another machine, found by what their manifests say: their model is not here.

With the model at hand the key of an entry is computed, from the texts and from every option. Without it only the name, the revision and
the texts can be compared, so what is found is used only where nothing else could be meant.
"""

from __future__ import annotations

from pathlib import Path

from maxsim_eval.cache.entries import Entry, missing_shards, open_entry, read_manifest
from maxsim_eval.cache.sides import Contents, provenances
from maxsim_eval.encoders.checkpoints import looks_like_path, shown_name
from maxsim_eval.errors import DataError
from maxsim_eval.types import Role, Task


def names_of(encoder: str) -> tuple[str, str]:
    """An encoder's name as entries hold it (a checkpoint's folder is called by its own name alone), and the revision in it or ""."""
    kind, colon, model = encoder.partition(":")
    if colon and looks_like_path(model):
        return f"{kind}:{shown_name(Path(model))}", ""
    name, _, revision = encoder.partition("@")
    return name, revision


def encoded_entries(task: Task, encoder: str, cache_dir: Path | str, contents: Contents) -> dict[Role, Entry]:
    """The complete entries of a task's texts by an encoder of this name; a side that has none is left out.

    Raises:
        DataError: several of one side, which only the model's options would tell apart, or two sides of different revisions.
        CacheError: one that is damaged.
    """
    name, revision = names_of(encoder)
    folders: dict[Role, list[Path]] = {"query": [], "document": []}
    for folder, said in provenances(cache_dir, task.source, task.dataset):
        role = said.get("role")
        if role not in folders or (said.get("origin"), said.get("encoder")) != ("encoded", name):
            continue
        same = revision in ("", said.get("revision")) and said.get("content") == contents.of(role)
        if same and not missing_shards(folder, read_manifest(folder)):
            folders[role].append(folder)
    several = [str(folder) for found in folders.values() if len(found) > 1 for folder in found]
    if several:
        raise DataError(
            f"encoder {encoder!r}: {' and '.join(several)} hold the same texts by it, with other options; without the model nothing "
            "says which are meant. Remove all but one, or make the model available"
        )
    entries = {role: open_entry(found[0]) for role, found in folders.items() if found}
    revisions = sorted({str(entry.manifest["provenance"].get("revision")) for entry in entries.values()})
    if len(revisions) > 1:
        raise DataError(
            f"encoder {encoder!r}: its queries and documents are cached by different revisions: {' and '.join(revisions)}"
        )
    return entries
