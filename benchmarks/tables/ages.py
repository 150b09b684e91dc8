"""Which figures are of the sources as they are: the digests that a run recorded of its families against today's.

A row without a digest was measured before runs recorded them, by sources that have changed since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tables.cells import Book, Table, keys_of, sources, text_of

OLDER, OLDER_CODE = "**older kernels**", "**older code**"  # the marks: of the operator's figures, and of the toolkit's
SCHEMAS = "maxsim-kernels/"  # of files whose figures are the operator's
SCRIPTS: dict[str, tuple[str, ...]] = {  # families of a script's file, by its schema, where all its groups have them
    "training": ("training",), "parity": ("step",), "step": ("step",), "chamfer": ("chamfer",), "streaming": ("streaming",),
    "libraries": ("libraries",), "coded": ("coded",), "residual": ("coded",), "search": ("search",), "search-cases": ("search-cpu",),
    "tiles": ("codes",), "stream_rows": ("codes",), "cpu": ("cpu",), "changing": ("host",), "masks": ("wide",),
    "limits": ("kernels",),
}  # fmt: skip
GROUPS: dict[tuple[str, str], tuple[str, ...]] = {  # of the other scripts' groups, where it is not "forward"; "": of any script
    **{("", group): ("codes",) for group in ("int8", "int8_B", "fp8", "precision")}, ("", "wide"): ("wide",), ("", "host"): ("host",),
    ("training", "steps"): ("step",), ("training", "layouts"): ("step",),
}  # fmt: skip
TOOLKIT: dict[str, tuple[str, ...]] = {  # by schema (and part), of files about the toolkit, the tests, or the operator on a CPU
    "encoding": ("encoding",), "encoding-waits": ("encoding",), "rehearsal": ("evaluation", "streaming", "reference"),
    "checksums": ("evaluation", "streaming", "reference"), "proving": ("proving", "forward"), "cold-start": ("evaluation", "cpu"),
    "certified": ("evaluation", "search-cpu"), "survivors": ("search-cpu",), "stages": ("search-cpu",), "pruning": ("search-cpu",),
    "reference-speed": ("reference",), "fidelity": ("evaluation", "cpu"), "scale-rates": ("codes", "streaming"),
    "atlas": ("atlas", "evaluation"), "atlas-time": ("atlas", "evaluation"), "tests": ("scoring",),
    **{f"tests/test_gpu_{name}": ("device",) for name in ("search", "certified", "evaluate", "plan")},  # those that search
    "tests/test_gpu_proving": ("device", "proving"), "sanitizers": ("device", "proving"),
    "sanitizers/racecheck": ("kernels", "proving"),  # which looks at what happens within a launch
    "soak": ("scoring",), "conformance": ("scoring",), "runs-compared": ("evaluation", "operator"),
    "devices": ("evaluation", "operator"), "plan-accuracy": ("planning", "evaluation", "cpu"), "examples": ("libraries", "cpu"),
}  # fmt: skip
UNAGED = {  # schemas of files whose figures are of one state for good, and why
    "attack": "what stopped processes, damaged files and wrong input did to one commit, which the file names",
}

PARTS = ("corpora", "encoders", "examples", "files", "growth", "runs")  # keys of parts that may have been measured apart


def families(schema: str, group: str) -> tuple[str, ...]:
    """The families that a group of rows depends on; none where its figures are of no code here."""
    home, _, name = schema.partition("/")
    name = name.partition("/")[0]
    if schema and f"{home}/" != SCHEMAS:
        return TOOLKIT.get(f"{name}/{group.partition(',')[0]}") or TOOLKIT.get(name, ())
    return GROUPS.get((name, group)) or SCRIPTS.get(name) or GROUPS.get(("", group)) or ("forward",)


def mark_of(found: Any) -> str:
    """The mark of a file's older figures."""
    of_kernels = not isinstance(found, dict) or str(found.get("schema", SCHEMAS)).startswith(SCHEMAS)
    return OLDER if of_kernels else OLDER_CODE


def about(found: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """What a run recorded of itself, and when it was, for the row at these keys."""
    if keys[:1] not in (["groups"], ["partial"]):
        row = found[keys[0]][keys[1]] if keys and keys[0] in PARTS and isinstance(found[keys[0]], dict) else {}
        if isinstance(row, dict) and "families" in row:
            return row
        return {**found, **(found.get("environment") or {})}
    held = found[keys[0]][keys[1]]
    row = held["rows"][keys[3]] if len(keys) > 3 else {}
    here = (found.get("environments") or {}).get(row.get("environment")) or held.get("environment") or {}
    return {**here, "measured": row.get("measured") or held.get("measured") or here.get("measured")}


def is_older(book: Book, file: str, keys: list[str]) -> bool:
    """Whether the sources behind a row have changed since it was measured."""
    found = book.file(file)
    named = families(str(found.get("schema", "")), keys[1] if len(keys) > 1 else "")
    recorded = about(found, keys).get("families") or {}
    return any(recorded.get(name) != book.families[name] for name in named)


def said(book: Book, table: Table) -> str:
    """At which commits and on which days a table was measured, and which of its rows are of older kernels."""
    return of_rows(book, {text_of(row[0]): map(keys_of, sources(Table("", "", (), [row]))) for row in table.rows})


def of_rows(book: Book, places: Mapping[str, Iterable[tuple[str, list[str]]]]) -> str:
    """The same of rows by name, each with the files and keys of its figures."""
    known = {name: list(held) for name, held in places.items()}
    older = {name: [book.file(file) for file, keys in held if is_older(book, file, keys)] for name, held in known.items()}
    old = {name: mark_of(files[0]) for name, files in older.items() if files}
    named = "every row" if len(old) == sum(map(bool, known.values())) else "; ".join(old)
    when = when_of([about(book.file(file), keys) for held in known.values() for file, keys in held])
    return " ".join([*([f"Measured {when}."] if when else []), *([f"Of {next(iter(old.values()))}: {named}."] if old else [])])


def of_file(book: Book, place: str) -> str:
    """When a file, or the rows below a pointer into it, was measured, and whether by older sources: words within a sentence."""
    name, within = keys_of(place)
    found = book.file(name)
    held = [keys for keys in rows(found) if keys[: len(within)] == within] or [within]
    old = sum(is_older(book, name, keys) for keys in held)
    mark = mark_of(found)
    when, older = when_of([about(found, keys) for keys in held]), mark if old == len(held) else f"in part {mark}"
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


def runs_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What the runs behind a file's rows recorded of themselves."""
    return [about(found, keys) for keys in list(rows(found)) or [[]]]


def days(runs: Sequence[dict[str, Any]]) -> list[str]:
    """On which days runs ended, where they say so; a study's own file calls it `created`."""
    dates = (run.get("measured") or run.get("created") for run in runs)
    return sorted({date[:10] for date in dates if isinstance(date, str)})


def commits(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Of which commits runs were."""
    return sorted({str(run["revision"]) for run in runs if run.get("revision")})


def when_of(runs: Sequence[dict[str, Any]]) -> str:
    """Commits and days; nothing where no commit is known."""
    at, on = (", ".join(names) for names in (commits(runs), days(runs)))
    return f"at {at} ({on})" if at and on else f"at {at}" if at else ""
