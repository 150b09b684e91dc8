"""From the keys of an embedding file to queries, documents, ids and judgements, with every check that needs no dataset.

Layouts, for a role R of `query` and `doc` (also `document`, `corpus`, `passage`):
    R_embeddings   [N, L, d], list of [L, d], or chunks: list of [b, L, d]; optional R_lengths and R_mask
    R_values       [T, d] with R_offsets [N + 1]
    values         [T, d] with offsets [N + 1]: one role, told by `role`, or by the file's name
R_ids, ids and qrels stand beside them or in `meta`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.import_formats import Table, open_table
from maxsim_eval.import_rows import (
    INTEGERS,
    TokenRows,
    Where,
    check_finite,
    rows_from_embeddings,
    rows_from_values,
)
from maxsim_eval.types import Role
from maxsim_kernels import Packed

PREFIXES: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("doc", "document", "corpus", "passage")}
SUFFIXES = ("embeddings", "values", "offsets", "lengths", "mask", "ids")
KNOWN = frozenset(f"{prefix}_{suffix}" for names in PREFIXES.values() for prefix in names for suffix in SUFFIXES) | {
    "values",
    "offsets",
    "ids",
    "qrels",
    "role",
}
NEEDED = (
    "need query_embeddings and/or doc_embeddings ([N, L, d] with lengths, a list of [L, d], or a list of [b, L, d]), "
    "query_values + query_offsets and/or document_values + document_offsets, or values + offsets"
)


@dataclass(frozen=True)
class Side:
    """One role of a file: token matrices, their ids (None: only the order is known), what was said, the files read."""

    rows: TokenRows
    ids: list[str] | None
    notes: tuple[str, ...]
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Imported:
    """Embeddings of a file, checked; the tokens stay in the mapped file until `queries` or `documents` is read.

    qrels: query id -> document id -> relevance, as the file has it. meta: the rest of the file's `meta`, and `notes`:
    what was inferred, converted or ignored, a sentence each (those that may change results begin with "ImportWarning").
    """

    path: Path
    sides: Mapping[Role, Side]
    qrels: dict[str, dict[str, int]] | None
    meta: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # those of the file as a whole; a side has its own

    @cached_property
    def queries(self) -> Packed | None:
        """All query tokens, `[T, d]` with offsets (a view for dense layouts); None when the file has no queries."""
        return self.sides["query"].rows.packed() if "query" in self.sides else None

    @cached_property
    def documents(self) -> Packed | None:
        """All document tokens, likewise."""
        return self.sides["document"].rows.packed() if "document" in self.sides else None

    @property
    def query_ids(self) -> list[str] | None:
        """Query ids in row order, or None."""
        return self.sides["query"].ids if "query" in self.sides else None

    @property
    def document_ids(self) -> list[str] | None:
        """Document ids in row order, or None."""
        return self.sides["document"].ids if "document" in self.sides else None


def read_embeddings(path: Path | str, *, role: Role | None = None, quiet: bool = False) -> Imported:
    """Read and check a file of precomputed token embeddings (.pt .pth .bin, .npz, .npy, .safetensors).

    Every token is looked at once (NaN, Inf), a slice at a time, so memory stays small for files of any size.

    Args:
        path: the file; docs/import.md describes the layouts.
        role: what `values` + `offsets` without a role name are ("query" or "document").
        quiet: no progress bars.

    Raises:
        DataError: names the file, the key, what was found and what is needed.
    """
    if role not in (None, "query", "document"):
        raise UsageError(f"role: got {role!r}, need 'query' or 'document'")
    table = open_table(Path(path))
    _check_keys(table)
    sides: dict[Role, Side] = {}
    for name in PREFIXES:
        side = _role_side(table, name, quiet)
        if side is not None:
            sides[name] = side
    if "values" in table.entries:
        if sides:
            raise DataError(f"{table.path}: values: stands beside keys with a role; name it query_values or document_values")
        name = _lone_role(table, role)
        sides[name] = _values_side(table, name, "values", "offsets", ("ids", *_names(name, "ids")), quiet)
    if not sides:
        raise DataError(f"{table.path}: holds the keys {_listed([*table.entries])}; {NEEDED}")
    dims = {name: side.rows.dim for name, side in sides.items()}
    if len(set(dims.values())) > 1:
        raise DataError(f"{table.path}: mixed embedding widths: queries {dims['query']}, documents {dims['document']}")
    qrels = _qrels(table)
    _note_unknown(table, sides, qrels)
    used = {"qrels", "role", "ids"} | {key for key in table.meta if key in KNOWN}
    meta = {key: value for key, value in table.meta.items() if key not in used}
    meta["notes"] = [*table.notes, *(note for side in sides.values() for note in side.notes)]
    return Imported(table.path, sides, qrels, meta, tuple(table.notes))


def _names(role: Role, suffix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_{suffix}" for prefix in PREFIXES[role])


def _listed(keys: list[str], most: int = 12) -> str:
    return (", ".join(map(repr, keys[:most])) or "none") + (", ..." if len(keys) > most else "")


def _check_keys(table: Table) -> None:
    """Refuse what looks like a misspelt key; note keys that are not used."""
    unknown = [key for key in table.entries if key not in KNOWN]
    for key in unknown:
        near = difflib.get_close_matches(key, KNOWN - set(table.entries), n=1, cutoff=0.9)
        if near:
            raise DataError(f"{table.path}: unknown key {key!r}. Did you mean {near[0]!r}?")
    if unknown and len(unknown) < len(table.entries):
        table.notes.append(f"keys that were not used: {_listed(sorted(unknown))}")


def _one(table: Table, names: tuple[str, ...]) -> str | None:
    """The one of `names` that the file has, or None; two names for one thing are refused."""
    found = [name for name in names if table.entries.get(name) is not None]
    if len(found) > 1:
        raise DataError(f"{table.path}: {' and '.join(found)} mean the same thing, need one of them")
    return found[0] if found else None


def _role_side(table: Table, role: Role, quiet: bool) -> Side | None:
    keys = {suffix: _one(table, _names(role, suffix)) for suffix in SUFFIXES if suffix != "ids"}
    embeddings, values, offsets = keys["embeddings"], keys["values"], keys["offsets"]
    if embeddings and values:
        raise DataError(f"{table.path}: {embeddings} and {values} both hold embeddings, need one of them")
    if values or offsets:
        if not (values and offsets) or keys["lengths"] or keys["mask"]:
            given = ", ".join(key for key in keys.values() if key)
            raise DataError(f"{table.path}: found {given}, need {role}_values [T, d] together with {role}_offsets [N + 1]")
        return _values_side(table, role, values, offsets, _names(role, "ids"), quiet)
    if embeddings is None:
        stray = keys["lengths"] or keys["mask"]
        if stray:
            raise DataError(f"{table.path}: {stray}: found without embeddings, need {stray.rsplit('_', 1)[0]}_embeddings")
        return None
    where = Where(table.path, embeddings, [])
    rows = rows_from_embeddings(
        where,
        table.entries[embeddings],
        table.entries[keys["lengths"]] if keys["lengths"] else None,
        table.entries[keys["mask"]] if keys["mask"] else None,
        quiet=quiet,
    )
    return _side(table, where, role, rows, _names(role, "ids"), quiet)


def _values_side(table: Table, role: Role, values: str, offsets: str, id_names: tuple[str, ...], quiet: bool) -> Side:
    if table.entries.get(offsets) is None:
        raise DataError(f"{table.path}: {values} without {offsets}; need {offsets} [N + 1], where each row starts and ends")
    where = Where(table.path, values, [])
    rows = rows_from_values(where, table.entries[values], where.sibling(offsets), table.entries[offsets])
    return _side(table, where, role, rows, id_names, quiet)


def _side(table: Table, where: Where, role: Role, rows: TokenRows, id_names: tuple[str, ...], quiet: bool) -> Side:
    ids = _ids(table, where, id_names, len(rows))

    def name_of(row: int) -> str:
        return f"{role} {ids[row]!r} (row {row})" if ids is not None else f"{role} in row {row}"

    check_finite(where, rows, name_of, quiet)
    return Side(rows, ids, tuple(where.notes), table.files)


def _lone_role(table: Table, role: Role | None) -> Role:
    """Which role `values` + `offsets` have: what the caller says, the file says, or its name says, in that order."""
    said = table.entries.get("role", table.meta.get("role"))
    if said is not None and said not in PREFIXES:
        raise DataError(f"{table.path}: role: got {said!r}, need 'query' or 'document'")
    if role is not None or said is not None:
        return role or said  # type: ignore[return-value] # one of PREFIXES' keys
    words = set(re.split(r"[^a-z]+", table.path.stem.lower()))
    if words & {"q", "query", "queries"}:
        return "query"
    if not words & {"d", "doc", "docs", "document", "documents", "corpus", "passage", "passages"}:
        table.notes.append("values: taken as documents: neither the file nor its name says query or document")
    return "document"


def _ids(table: Table, where: Where, names: tuple[str, ...], rows: int) -> list[str] | None:
    """Ids of the rows, from the file or its `meta`; integers become text."""
    found: list[tuple[str, list[str]]] = []
    for origin, label in ((table.entries, ""), (table.meta, "meta.")):
        for name in names:
            if origin.get(name) is not None:
                here = where.sibling(f"{label}{name}")
                found.append((here.key, _id_list(here, origin[name])))
    if not found:
        return None
    key, ids = found[0]
    for other, others in found[1:]:
        if others != ids:
            raise DataError(f"{table.path}: {key} and {other} differ, need one list of ids")
    here = where.sibling(key)
    if len(ids) != rows:
        here.fail(f"got {len(ids)} ids, need {rows}, one for each row of {where.key}")
    if len(set(ids)) != rows:
        name, times = Counter(ids).most_common(1)[0]
        here.fail(f"duplicate id {name!r} (in {times} rows; {rows - len(set(ids))} rows too many), need distinct ids")
    if "" in set(ids):
        here.fail(f"row {ids.index('')} has an empty id")
    return ids


def _id_list(where: Where, value: Any) -> list[str]:
    if isinstance(value, Tensor):
        if value.dim() != 1 or value.dtype not in INTEGERS:
            where.fail(f"got {value.dtype} {list(value.shape)}, need a list of text ids or a 1-D tensor of integers")
        return [str(number) for number in value.tolist()]
    if not isinstance(value, (list, tuple)):
        where.fail(f"got {type(value).__name__}, need a list of ids")
    for row, name in enumerate(value):
        if not isinstance(name, str) and type(name) is not int:
            where.fail(f"row {row}: got {type(name).__name__}, need text (or integer) ids")
        if isinstance(name, str) and ("\0" in name or (not name.isascii() and name.encode(errors="replace").decode() != name)):
            where.fail(f"row {row}: id {name!r} holds a NUL character or half a surrogate pair")
    return [str(name) for name in value]


def _qrels(table: Table) -> dict[str, dict[str, int]] | None:
    key, value = "qrels", table.entries.get("qrels")
    if value is None:
        key, value = "meta.qrels", table.meta.get("qrels")
    if value is None:
        return None
    where = Where(table.path, key, [])
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            where.fail(f"not JSON: {error}")
    if not isinstance(value, dict):
        where.fail(f"got {type(value).__name__}, need a dict: query id -> document id -> relevance")
    qrels: dict[str, dict[str, int]] = {}
    for query, row in value.items():
        if not isinstance(row, dict):
            where.fail(f"query {query!r}: got {type(row).__name__}, need a dict: document id -> relevance")
        qrels[str(query)] = {str(document): _relevance(where, query, document, v) for document, v in row.items()}
    return qrels


def _relevance(where: Where, query: Any, document: Any, value: Any) -> int:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (int, float)) and abs(value) < 2**31 and int(value) == value:
        return int(value)
    where.fail(f"query {query!r}, document {document!r}: relevance {value!r}, need an integer")


def _note_unknown(table: Table, sides: Mapping[Role, Side], qrels: dict[str, dict[str, int]] | None) -> None:
    """Count judgements that name queries or documents the file does not have."""
    if qrels is None:
        return
    queries, documents = (sides[role].ids if role in sides else None for role in ("query", "document"))
    if queries is not None:
        known = set(queries)
        strangers = [query for query in qrels if query not in known]
        if strangers:
            table.notes.append(
                f"ImportWarning: qrels: {len(strangers)} of {len(qrels)} queries are not among the file's queries "
                f"(first: {strangers[0]!r})"
            )
    if documents is not None:
        known = set(documents)
        missing = [document for row in qrels.values() for document in row if document not in known]
        if missing:
            total = sum(map(len, qrels.values()))
            table.notes.append(
                f"ImportWarning: qrels: {len(missing)} of {total} judgements name documents that are not in the file "
                f"(first: {missing[0]!r})"
            )
