"""From the keys of an embedding file to queries, documents, ids and judgements, with every check that needs no dataset.

Layouts, for a role R of `query` and `doc` (also `document`, `corpus`, `passage`):
    R_embeddings   [N, L, d], list of [L, d], or chunks: list of [b, L, d]; optional R_lengths and R_mask
    R_values       [T, d] with R_offsets [N + 1]
    values         [T, d] with offsets [N + 1]: one role, told by `role`, or by the file's name
    embeddings     as R_embeddings, likewise; a file that holds nothing but a list or a tensor is read as this
R_ids, ids and qrels stand beside them or in `meta`. Files that are parts of one thing are put together in many_files.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from maxsim_eval.errors import DataError
from maxsim_eval.importing.formats import OFFSETS, FileTable, open_table
from maxsim_eval.importing.ids import Judgements, id_lists, ids_of, note_unknown, qrels_of
from maxsim_eval.importing.rows import TokenRows, Where, rows_from_embeddings, rows_from_values
from maxsim_eval.importing.token_checks import Norms, check_tokens, without_zeros
from maxsim_eval.types import Role
from maxsim_kernels import Packed

PREFIXES: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("doc", "document", "corpus", "passage")}
SUFFIXES = ("embeddings", "values", "offsets", "lengths", "mask", "ids")
KNOWN = frozenset(f"{prefix}_{suffix}" for names in PREFIXES.values() for prefix in names for suffix in SUFFIXES) | {
    *SUFFIXES,
    "qrels",
    "role",
}
NEEDED = (
    "need query_embeddings and/or doc_embeddings ([N, L, d] with lengths, a list of [L, d], or a list of [b, L, d]), "
    "query_values + query_offsets and/or document_values + document_offsets, values + offsets, or embeddings"
)
ROLE_WORDS: dict[Role, frozenset[str]] = {
    "query": frozenset({"q", "query", "queries"}),
    "document": frozenset({"d", "doc", "docs", "document", "documents", "corpus", "passage", "passages", "page", "pages"}),
}


@dataclass(frozen=True)
class ImportedSide:
    """One role of a file, or of a set of files.

    rows: token matrices; ids: theirs (None: only the order is known); notes: what was said; files: all that was read, in order;
    origin: what messages call them; norms: of all tokens; ids_are: what the ids were taken from, where a set has none inside.
    """

    rows: TokenRows
    ids: list[str] | None
    notes: tuple[str, ...]
    files: tuple[Path, ...]
    origin: str
    norms: Norms
    ids_are: str = ""
    zero_note: str = ""  # that of `notes` which says that tokens are zero, if any


@dataclass(frozen=True)
class Imported:
    """Embeddings of a file, checked; the tokens stay in the mapped file until `queries` or `documents` is read.

    qrels: query id -> document id -> relevance, as the file has it. meta: the rest of the file's `meta`, and `notes`:
    what was inferred, converted or ignored, a sentence each (those that may change results begin with "ImportWarning").
    """

    path: Path
    sides: Mapping[Role, ImportedSide]
    qrels: Judgements | None
    meta: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # those of the file as a whole; a side has its own

    @cached_property
    def queries(self) -> Packed | None:
        """All query tokens, `[T, d]` with offsets (a view for dense layouts); None when the file has no queries."""
        return self.sides["query"].rows.packed() if "query" in self.sides else None

    @cached_property
    def documents(self) -> Packed | None:
        """All document tokens, as `queries` gives those of the queries."""
        return self.sides["document"].rows.packed() if "document" in self.sides else None

    @property
    def query_ids(self) -> list[str] | None:
        """Query ids in row order, or None."""
        return self.sides["query"].ids if "query" in self.sides else None

    @property
    def document_ids(self) -> list[str] | None:
        """Document ids in row order, or None."""
        return self.sides["document"].ids if "document" in self.sides else None


@dataclass(frozen=True)
class RoleKeys:
    """The embeddings of one role in a table: which keys hold them, and under which names their ids may stand."""

    role: Role
    keys: Mapping[str, str]  # suffix -> key of the table
    id_names: tuple[str, ...]

    @property
    def key(self) -> str:
        """The key of the tokens themselves."""
        return self.keys.get("embeddings") or self.keys["values"]


def read_file(path: Path, *, role: Role | None, ids: Mapping[Role, Path], drop_zero_tokens: bool, quiet: bool) -> Imported:
    """One file, as `many_files.read_embeddings` promises it."""
    table = open_table(path)
    check_keys(table)
    sides: dict[Role, ImportedSide] = {}
    for found in find_embeddings(table, role):
        where = where_of(table, found)
        value = table.entries[found.key]
        if path.suffix.lower() == ".npy" and found.key == "embeddings" and isinstance(value, Tensor) and value.dim() == 2:
            raise DataError(
                f"{path}: holds {list(value.shape)}: needs {path.stem}{OFFSETS} beside it: [N + 1] integers, where each row of "
                "tokens starts and ends (to import a file for each document, name their folder)"
            )
        rows = build_rows(table, found, where, drop_zero_tokens=drop_zero_tokens, quiet=quiet)
        names = ids_of(table, where, found.id_names, len(rows), ids.get(found.role))
        norms = check_tokens(where, rows, quiet)
        files = (*table.files, *([ids[found.role]] if found.role in ids else []))
        sides[found.role] = finished_side(where, rows, names, norms, files, str(table.path))
    require_one_width(table.path, sides)
    qrels = qrels_of(table)
    queries, documents = (sides[name].ids if name in sides else None for name in PREFIXES)
    note_unknown(table.notes, queries, documents, qrels)
    used = {"qrels", "role", "ids"} | {key for key in table.meta if key in KNOWN}
    meta = {key: value for key, value in table.meta.items() if key not in used}
    meta["notes"] = [*table.notes, *(note for side in sides.values() for note in side.notes)]
    return Imported(table.path, sides, qrels, meta, tuple(table.notes))


def find_embeddings(table: FileTable, role: Role | None) -> list[RoleKeys]:
    """Which roles a table holds, each once; `role` is that of keys that name none."""
    found = [side for name in PREFIXES if (side := _find_role(table, name)) is not None]
    lone = _find_lone(table)
    if lone is not None:
        if found:
            key = next(iter(lone.values()))
            raise DataError(f"{table.path}: {key}: stands beside keys with a role; name it query_{key} or document_{key}")
        name = _lone_role(table, role)
        found.append(RoleKeys(name, lone, ("ids", *_names(name, "ids"))))
    if not found:
        raise DataError(f"{table.path}: holds the keys {_listed([*table.entries])}; {NEEDED}")
    return found


def where_of(table: FileTable, found: RoleKeys, names: Sequence[str] | None = None, first: int = 0) -> Where:
    """Where a role's tokens stand; names for messages are those given (`first`: row 0 in them), else the table's ids."""
    where = Where(table.path, found.key, [], found.role)
    if names is None:
        listed = id_lists(table, where, found.id_names)
        names = listed[0][1] if listed else None
    return Where(table.path, found.key, where.notes, found.role, names, first)


def build_rows(
    table: FileTable,
    found: RoleKeys,
    where: Where,
    *,
    drop_zero_tokens: bool = False,
    known: np.ndarray | None = None,
    quiet: bool = True,
) -> TokenRows:
    """The token matrices of one role, unread; `known` are their lengths, where an earlier look found them."""
    entries = {suffix: table.entries[key] for suffix, key in found.keys.items()}
    if "values" in entries:
        rows = rows_from_values(where, entries["values"], where.sibling(found.keys["offsets"]), entries["offsets"])
    else:
        pad = not drop_zero_tokens if known is None or drop_zero_tokens else known
        lengths, mask = entries.get("lengths"), entries.get("mask")
        rows = rows_from_embeddings(where, entries["embeddings"], lengths, mask, pad=pad, quiet=quiet)
    return without_zeros(where, rows, known, quiet) if drop_zero_tokens else rows


def finished_side(
    where: Where,
    rows: TokenRows,
    ids: list[str] | None,
    norms: Norms,
    files: tuple[Path, ...],
    origin: str,
    ids_are: str = "",
) -> ImportedSide:
    """The `ImportedSide` of what was read; notes count documents without tokens, and warn of tokens that are zero."""
    empty = int((rows.lengths == 0).sum())
    if empty == len(rows):
        where.fail(f"none of the {empty} rows has a token")
    if empty:
        where.note(f"{empty} of {len(rows)} rows have no token; they are kept, and never retrieved")
    if rows.dropped is not None:
        where.note(f"{rows.dropped} all-zero tokens were dropped, as asked")
    zero_note = ""
    if norms.zeros:
        where.note(
            f"ImportWarning: {norms.zeros} of {norms.tokens} tokens are exactly zero (first: {norms.first_zero}) and were kept: "
            "if they are padding, say so with a mask or lengths, or drop them with --drop-zero-tokens"
        )
        zero_note = where.notes[-1]
    return ImportedSide(rows, ids, tuple(where.notes), files, origin, norms, ids_are, zero_note)


def require_one_width(path: Path, sides: Mapping[Role, ImportedSide]) -> None:
    """`DataError` where queries and documents have two widths."""
    dims = {name: side.rows.dim for name, side in sides.items()}
    if len(set(dims.values())) > 1:
        raise DataError(f"{path}: mixed embedding widths: queries {dims['query']}, documents {dims['document']}")


def _names(role: Role, suffix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_{suffix}" for prefix in PREFIXES[role])


def _listed(keys: list[str], most: int = 12) -> str:
    return (", ".join(map(repr, keys[:most])) or "none") + (", ..." if len(keys) > most else "")


def check_keys(table: FileTable) -> None:
    """Refuse what looks like a misspelt key; note keys that are not used."""
    unknown = [key for key in table.entries if key not in KNOWN]
    for key in unknown:
        near = difflib.get_close_matches(key, KNOWN - {"embeddings", "lengths", "mask"} - set(table.entries), n=1, cutoff=0.9)
        if near:
            raise DataError(f"{table.path}: unknown key {key!r}. Did you mean {near[0]!r}?")
    if unknown and len(unknown) < len(table.entries):
        table.notes.append(f"keys that were not used: {_listed(sorted(unknown))}")


def _one(table: FileTable, names: tuple[str, ...]) -> str | None:
    """The one of `names` that the file has, or None; two names for one thing are refused."""
    found = [name for name in names if table.entries.get(name) is not None]
    if len(found) > 1:
        raise DataError(f"{table.path}: {' and '.join(found)} mean the same thing, need one of them")
    return found[0] if found else None


def _find_role(table: FileTable, role: Role) -> RoleKeys | None:
    found = {suffix: _one(table, _names(role, suffix)) for suffix in SUFFIXES if suffix != "ids"}
    keys = {suffix: key for suffix, key in found.items() if key is not None}
    _require_whole(table, keys, f"{role}_")
    return RoleKeys(role, keys, _names(role, "ids")) if keys else None


def _find_lone(table: FileTable) -> dict[str, str] | None:
    """The keys that name no role: `embeddings` with lengths or mask, or `values` with `offsets`."""
    keys = {suffix: suffix for suffix in SUFFIXES if suffix != "ids" and table.entries.get(suffix) is not None}
    if not keys.keys() & {"embeddings", "values"}:
        return None  # stray keys of other things: lengths, a mask
    _require_whole(table, keys, "")
    return keys


def _require_whole(table: FileTable, keys: Mapping[str, str], prefix: str) -> None:
    """Refuse keys of one role that are not exactly one whole layout."""
    embeddings, values, offsets = (keys.get(suffix) for suffix in ("embeddings", "values", "offsets"))
    if embeddings and values:
        raise DataError(f"{table.path}: {embeddings} and {values} both hold embeddings, need one of them")
    if values or offsets:
        if not prefix and not offsets:
            raise DataError(f"{table.path}: values without offsets; need offsets [N + 1], where each row starts and ends")
        if not (values and offsets) or "lengths" in keys or "mask" in keys:
            given = ", ".join(keys.values())
            raise DataError(f"{table.path}: found {given}, need {prefix}values [T, d] together with {prefix}offsets [N + 1]")
    elif keys and not embeddings:
        stray = keys.get("lengths") or keys["mask"]
        raise DataError(f"{table.path}: {stray}: found without embeddings, need {stray.rsplit('_', 1)[0]}_embeddings")


def _lone_role(table: FileTable, role: Role | None) -> Role:
    """Which role keys without one have: what the caller says, the file says, or its name says, in that order."""
    said = table.entries.get("role", table.meta.get("role"))
    if said is not None and said not in PREFIXES:
        raise DataError(f"{table.path}: role: got {said!r}, need 'query' or 'document'")
    named = role or said or role_in(table.path.stem)
    if named is None:
        table.notes.append(f"{_lone_key(table)}: taken as documents: neither the file nor its name says query or document")
    return named or "document"


def _lone_key(table: FileTable) -> str:
    return "values" if "values" in table.entries else "embeddings"


def role_in(name: str) -> Role | None:
    """The role that the name of a file or folder says, if any."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    return next((role for role, known in ROLE_WORDS.items() if words & known), None)
