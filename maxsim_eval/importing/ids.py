"""Ids and judgements as embedding files hold them: lists, integer tensors, files of ids, dicts; checked against the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from maxsim_eval.errors import DataError
from maxsim_eval.importing.formats import FileTable, read_id_file
from maxsim_eval.importing.rows import INTEGERS, Where
from maxsim_eval.parsing import json_of

Judgements = dict[str, dict[str, int]]


IdList = tuple[Where, list[str]]  # where a list of ids stands (for messages), and the ids


def ids_of(table: FileTable, where: Where, names: tuple[str, ...], rows: int, beside: Path | None = None) -> list[str] | None:
    """Ids of the rows, from the file, its `meta` or a file of ids, which must agree; integers become text; None: no ids."""
    lists = id_lists(table, where, names)
    if beside is not None:
        lists.append(listed_in(beside))
    return one_list(where, lists, rows) if lists else None


def listed_in(path: Path) -> IdList:
    """The ids that a file of its own lists, with their place."""
    return checked_ids(Where(path, "ids", []), read_id_file(path))


def checked_ids(where: Where, ids: list[str]) -> IdList:
    """Ids with the place they stand in; `DataError` for what no cache and no run could hold."""
    return where, _id_list(where, ids)


def one_list(where: Where, lists: Sequence[IdList], rows: int) -> list[str]:
    """The ids that all lists hold; `DataError` where they differ, repeat one, or are not one for each row."""
    here, ids = lists[0]
    for other, others in lists[1:]:
        if others != ids:
            name = other.key if other.path == here.path else f"{other.path}: {other.key}"
            raise DataError(f"{here.path}: {here.key} and {name} differ, need one list of ids")
    if len(ids) != rows:
        here.fail(f"got {len(ids)} ids, need {rows}, one for each row of {where.key}")
    if len(set(ids)) != rows:
        name, times = Counter(ids).most_common(1)[0]
        here.fail(f"duplicate id {name!r} (in {times} rows; {rows - len(set(ids))} rows too many), need distinct ids")
    if "" in set(ids):
        here.fail(f"row {ids.index('')} has an empty id")
    return ids


def id_lists(table: FileTable, where: Where, names: tuple[str, ...]) -> list[IdList]:
    """The lists of ids that a table holds under these names, in `meta` or beside it."""
    found = []
    for origin, label in ((table.entries, ""), (table.meta, "meta.")):
        for name in names:
            if origin.get(name) is not None:
                here = where.sibling(f"{label}{name}")
                found.append((here, _id_list(here, origin[name])))
    return found


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


def qrels_of(table: FileTable) -> Judgements | None:
    """The judgements of a table or of its `meta`, ids as text and relevances as integers."""
    key, value = "qrels", table.entries.get("qrels")
    if value is None:
        key, value = "meta.qrels", table.meta.get("qrels")
    if value is None:
        return None
    where = Where(table.path, key, [])
    if isinstance(value, str):
        try:
            value = json_of(value)
        except ValueError as error:
            where.fail(f"not JSON: {error}")
    if not isinstance(value, dict):
        where.fail(f"got {type(value).__name__}, need a dict: query id -> document id -> relevance")
    qrels: Judgements = {}
    for query, row in value.items():
        if not isinstance(row, dict):
            where.fail(f"query {query!r}: got {type(row).__name__}, need a dict: document id -> relevance")
        named = {str(document): _relevance(where, query, document, v) for document, v in row.items()}
        if str(query) in qrels or len(named) < len(row):
            where.fail(f"query {query!r}: it, or a document of its, stands there as a number and as text, need one of the two")
        qrels[str(query)] = named
    return qrels


def _relevance(where: Where, query: Any, document: Any, value: Any) -> int:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (int, float)) and abs(value) < 2**31 and int(value) == value:
        return int(value)
    where.fail(f"query {query!r}, document {document!r}: relevance {value!r}, need an integer")


def note_unknown(
    notes: list[str],
    queries: Sequence[str] | None,
    documents: Sequence[str] | None,
    qrels: Mapping[str, Mapping[str, int]] | None,
) -> None:
    """Count judgements that name queries or documents that the ids lack."""
    if qrels is None:
        return
    if queries is not None:
        known = set(queries)
        strangers = [query for query in qrels if query not in known]
        if strangers:
            notes.append(
                f"ImportWarning: qrels: {len(strangers)} of {len(qrels)} queries are not among the file's queries "
                f"(first: {strangers[0]!r})"
            )
    if documents is not None:
        known = set(documents)
        missing = [document for row in qrels.values() for document in row if document not in known]
        if missing:
            total = sum(map(len, qrels.values()))
            notes.append(
                f"ImportWarning: qrels: {len(missing)} of {total} judgements name documents that are not in the file "
                f"(first: {missing[0]!r})"
            )
