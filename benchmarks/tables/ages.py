"""Which figures are of the sources as they are: the digests that a run recorded of its families against today's.

A row without a digest was measured before runs recorded them, by sources that have changed since.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tables.cells import Book, Table, keys_of, sources, text_of

OLDER, OLDER_CODE = "**older kernels**", "**older code**"  # the marks: of the operator's figures, and of the toolkit's
SCHEMAS = "maxsim-kernels/"  # of files whose figures are the operator's
SCRIPTS: dict[str, tuple[str, ...]] = {  # families of a script's file, by its schema, where all its groups have them
    "training": ("training",), "parity": ("step",), "step": ("step",), "chamfer": ("chamfer",), "streaming": ("streaming",),
    "libraries": ("libraries",), "coded": ("coded",), "residual": ("coded",), "search": ("search",), "search-cases": ("search-cpu",),
    "tiles": ("codes",), "stream_rows": ("codes",), "cpu": ("cpu",), "changing": ("host",), "masks": ("wide",),
}  # fmt: skip
GROUPS: dict[tuple[str, str], tuple[str, ...]] = {  # of the other scripts' groups, where it is not "forward"; "": of any script
    **{("", group): ("codes",) for group in ("int8", "int8_B", "fp8", "precision")}, ("", "wide"): ("wide",), ("", "host"): ("host",),
    ("training", "steps"): ("step",), ("training", "layouts"): ("step",),
}  # fmt: skip
TOOLKIT: dict[str, tuple[str, ...]] = {  # by schema, of files about the toolkit, the tests, or the operator on a CPU
    "encoding": ("encoding",), "encoding-waits": ("encoding",), "rehearsal": ("evaluation", "streaming"),
    "checksums": ("evaluation", "streaming"), "proving": ("proving", "forward"), "cold-start": ("evaluation", "cpu"),
    "certified": ("evaluation", "search-cpu"), "survivors": ("search-cpu",), "stages": ("search-cpu",), "pruning": ("search-cpu",),
    "reference-speed": ("reference",), "fidelity": ("evaluation", "cpu"), "scale-rates": ("codes", "streaming"),
    "atlas": ("atlas", "evaluation"), "atlas-time": ("atlas", "evaluation"), "tests": ("operator",), "sanitizers": ("operator",),
    "soak": ("operator",), "conformance": ("operator",), "runs-compared": ("evaluation", "operator"),
    "devices": ("evaluation", "operator"),
}  # fmt: skip

PARTS = ("corpora", "encoders", "files", "growth", "runs")  # keys of parts that may have been measured apart


def families(schema: str, group: str) -> tuple[str, ...]:
    """The families that a group of rows depends on; none where its figures are of no code here."""
    home, _, name = schema.partition("/")
    name = name.partition("/")[0]
    if schema and f"{home}/" != SCHEMAS:
        return TOOLKIT.get(name, ())
    return GROUPS.get((name, group)) or SCRIPTS.get(name) or GROUPS.get(("", group)) or ("forward",)


def mark_of(found: Any) -> str:
    """The mark of a file's older figures."""
    of_kernels = not isinstance(found, dict) or str(found.get("schema", SCHEMAS)).startswith(SCHEMAS)
    return OLDER if of_kernels else OLDER_CODE


def about(found: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """What a run recorded of itself, and when it was, for the row at these keys."""
    if keys[:1] not in (["groups"], ["partial"]):
        held = found.get("environment") or {}
        row = found[keys[0]][keys[1]] if keys and keys[0] in PARTS and isinstance(found[keys[0]], dict) else {}
        return {**found, **held, **(row if isinstance(row, dict) and "families" in row else {})}
    held = found[keys[0]][keys[1]]
    row = held["rows"][keys[3]] if len(keys) > 3 else {}
    named = (found.get("environments") or {}).get(row.get("environment"))
    when = row.get("measured") or held.get("measured")
    return {**(named or held.get("environment") or {}), "measured": when}


def is_older(book: Book, file: str, keys: list[str]) -> bool:
    """Whether the sources behind a row have changed since it was measured."""
    found = book.file(file)
    named = families(str(found.get("schema", "")), keys[1] if len(keys) > 1 else "")
    recorded = about(found, keys).get("families") or {}
    return any(recorded.get(name) != book.families[name] for name in named)


def said(book: Book, table: Table) -> str:
    """At which commits and on which days a table was measured, and which of its rows are of older kernels."""
    runs = [(book.file(file), keys) for file, keys in map(keys_of, dict.fromkeys(sources(table)))]
    known = {text_of(row[0]): [keys_of(place) for place in sources(Table("", "", (), [row]))] for row in table.rows}
    old = [name for name, held in known.items() if any(is_older(book, file, keys) for file, keys in held)]
    rows = "every row" if len(old) == sum(map(bool, known.values())) else "; ".join(old)
    when, mark = _when([about(*one) for one in runs]), mark_of(runs[0][0]) if runs else OLDER
    return " ".join([*([f"Measured {when}."] if when else []), *([f"Of {mark}: {rows}."] if old else [])])


def of_file(book: Book, name: str) -> str:
    """When a whole file was measured, and whether by older sources, in words for the middle of a sentence."""
    found = book.file(name)
    held = list(rows(found)) or [[]]
    old = sum(is_older(book, name, keys) for keys in held)
    mark = mark_of(found)
    when, older = _when([about(found, keys) for keys in held]), mark if old == len(held) else f"in part {mark}"
    return ", ".join([*([f"measured {when}"] if when else []), *([older] if old else [])])


def rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """Keys of every row of a file of groups, and of every part of a file of runs that each recorded their own sources."""
    for part in ("groups", "partial"):
        for name, group in (found.get(part) or {}).items():
            yield from ([part, name, "rows", row] for row in group["rows"])
    for part in PARTS:
        held = found.get(part)
        if isinstance(held, dict):
            yield from ([part, name] for name, one in held.items() if isinstance(one, dict) and "families" in one)


def _when(runs: list[dict[str, Any]]) -> str:
    """Commits and days; nothing where no commit is known."""
    commits = sorted({str(run["revision"]) for run in runs if run.get("revision")})
    days = sorted({str(run["measured"])[:10] for run in runs if run.get("measured")})
    when = f" ({', '.join(days)})" if days else ""
    return f"at {', '.join(commits)}{when}" if commits else ""
