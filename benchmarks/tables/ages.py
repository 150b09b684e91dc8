"""Which figures are of the operator as it is: the digest that a run recorded of its family's sources against today's.

A row without a digest was measured before runs recorded them, by kernels that have changed since.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tables.cells import Book, Table, keys_of, sources, text_of

OLDER = "**older kernels**"  # the mark
SCHEMAS = "maxsim-kernels/"  # of files whose figures are the operator's
SCRIPTS = {  # the family of a script's file, by its schema, where all its groups have one
    "training": "training", "parity": "training", "chamfer": "chamfer", "streaming": "streaming", "libraries": "libraries",
    "coded": "coded", "residual": "coded", "search": "search", "search-cases": "search", "tiles": "codes", "stream_rows": "codes",
    "cpu": "cpu", "changing": "host", "step": "training",
}  # fmt: skip
GROUPS = {  # of the other scripts, where it is not "forward"
    "int8": "codes", "int8_B": "codes", "fp8": "codes", "precision": "codes", "wide": "wide", "host": "host",
}  # fmt: skip


def family(schema: str, group: str) -> str:
    """The family that a group of rows depends on."""
    return SCRIPTS.get(schema.removeprefix(SCHEMAS).partition("/")[0]) or GROUPS.get(group, "forward")


def about(found: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """What a run recorded of itself and of its time, for the row that holds these keys."""
    if keys[:1] not in (["groups"], ["partial"]):
        return {**found, **(found.get("environment") or {})}
    held = found[keys[0]][keys[1]]
    row = held["rows"][keys[3]] if len(keys) > 3 else {}
    named = (found.get("environments") or {}).get(row.get("environment"))
    when = row.get("measured") or held.get("measured")
    return {**(named or held.get("environment") or {}), "measured": when}


def is_older(book: Book, file: str, keys: list[str]) -> bool:
    """Whether the sources behind a row have changed since it was measured."""
    found = book.file(file)
    name = family(str(found.get("schema", "")), keys[1] if len(keys) > 1 else "")
    return bool((about(found, keys).get("families") or {}).get(name) != book.families[name])


def said(book: Book, table: Table) -> str:
    """At which commits and on which days a table was measured, and which of its rows are of older kernels."""
    runs = [(book.file(file), keys) for file, keys in map(keys_of, dict.fromkeys(sources(table)))]
    known = {text_of(row[0]): [keys_of(place) for place in sources(Table("", "", (), [row]))] for row in table.rows}
    old = [name for name, held in known.items() if any(is_older(book, file, keys) for file, keys in held)]
    rows = "every row" if len(old) == sum(map(bool, known.values())) else "; ".join(old)
    when = _when([about(*one) for one in runs])
    return " ".join([*([f"Measured {when}."] if when else []), *([f"Of {OLDER}: {rows}."] if old else [])])


def of_file(book: Book, name: str) -> str:
    """The same of a whole file, in a few words for the middle of a sentence."""
    found = book.file(name)
    rows = list(_rows(found)) or [[]]
    old = sum(is_older(book, name, keys) for keys in rows)
    when, mark = _when([about(found, keys) for keys in rows]), OLDER if old == len(rows) else f"in part {OLDER}"
    return ", ".join([*([f"measured {when}"] if when else []), *([mark] if old else [])])


def _rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """Keys of every row of a file of groups."""
    for part in ("groups", "partial"):
        for name, group in (found.get(part) or {}).items():
            yield from ([part, name, "rows", row] for row in group["rows"])


def _when(runs: list[dict[str, Any]]) -> str:
    """Commits and days; nothing where no commit is known."""
    commits = sorted({str(run["revision"]) for run in runs if run.get("revision")})
    days = sorted({str(run["measured"])[:10] for run in runs if run.get("measured")})
    when = f" ({', '.join(days)})" if days else ""
    return f"at {', '.join(commits)}{when}" if commits else ""
