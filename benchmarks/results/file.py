"""What is done with measured figures, without a GPU: the results file, look-ups, tables of wins and losses.

The results file holds one entry a group of rows, each with its own environment, ceilings and number of runs. A group that was stopped
half-way stands under `partial`. Files of another machine or of other kernels are never mixed.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA = "maxsim-kernels/forward/2"
IDENTITY = ("gpu", "capability", "torch", "cuda", "triton", "sources")


# The results file


def empty(environment: dict[str, Any], schema: str = SCHEMA) -> dict[str, Any]:
    """A results document without groups."""
    return {"schema": schema, "identity": {key: environment[key] for key in IDENTITY}, "groups": {}, "partial": {}}


def parsed(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file holds none, such as one that was cut.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path}: got no whole JSON ({problem}), need a results file; --fresh replaces it") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got a JSON {type(found).__name__}, need a results file's object; --fresh replaces it")
    return found


def read(path: Path, schema: str = SCHEMA) -> dict[str, Any]:
    """A results file.

    Raises:
        ValueError: it is no file of this schema.
    """
    found = parsed(path)
    if found.get("schema") != schema:
        raise ValueError(
            f"{path}: schema {found.get('schema')!r}, need {schema!r}; name another file, or --fresh to replace it"
        )
    return found


def shown(path: Path, schema: str = SCHEMA) -> dict[str, Any]:
    """`read` for a command that only shows a file: ends the program with the reason where it is none."""
    try:
        return read(path, schema)
    except ValueError as problem:
        raise SystemExit(str(problem)) from None


def added_to(path: Path | None, schema: str, **parts: Any) -> dict[str, Any]:
    """The file that a call adds its part to, or a new document with these parts; ends the program where it is no such file."""
    return {"schema": schema, **parts} if path is None or not path.exists() else shown(path, schema)


def opened(path: Path | None, environment: dict[str, Any], fresh: bool, schema: str = SCHEMA) -> dict[str, Any]:
    """The document to add to: the file's when it is of this machine and these kernels, a new one when there is none.

    Raises:
        ValueError: the file is another's (and `fresh` does not say to replace it).
    """
    if path is None or fresh or not path.exists():
        return empty(environment, schema)
    found = read(path, schema)
    here = empty(environment, schema)["identity"]
    other = [
        f"{key} {found['identity'].get(key)!r}, here {here[key]!r}"
        for key in IDENTITY
        if found["identity"].get(key) != here[key]
    ]
    if other:
        raise ValueError(f"{path} was measured elsewhere ({'; '.join(other)}); name another file, or --fresh to replace it")
    return found


def merge(report: dict[str, Any], name: str, group: dict[str, Any], *, complete: bool) -> None:
    """Put a group in, with the time: a complete one replaces its predecessor, a half-done one never does."""
    group["measured"] = datetime.now(UTC).isoformat(timespec="seconds")
    if complete:
        report["groups"][name] = group
        report["partial"].pop(name, None)
    else:
        report["partial"][name] = group


def short(value: Any) -> Any:
    """Numbers of six digits, which is more than a clock knows."""
    if isinstance(value, dict):
        return {key: short(held) for key, held in value.items()}
    if isinstance(value, list):
        return [short(held) for held in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write(path: Path | None, report: dict[str, Any]) -> None:
    """Write the file, or leave the old one whole."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(short(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


# Reading figures


class Figures:
    """Look-ups in a results document; None where something was not measured."""

    def __init__(self, report: dict[str, Any]) -> None:
        self._groups = {**report["partial"], **report["groups"]}
        self.rows = {row: (group, data) for group in self._groups.values() for row, data in group["rows"].items()}

    def method(self, row: str, name: str) -> dict[str, Any] | None:
        """Everything recorded about a timed method."""
        return self.rows[row][1]["methods"].get(name) if row in self.rows else None

    def time(self, row: str, name: str, key: str = "median_ms") -> float | None:
        """A method's median, or what else `key` names."""
        found = self.method(row, name)
        return None if found is None else found.get(key)

    def ceiling(self, row: str, unit: str) -> float | None:
        """A ceiling of the run that measured the row."""
        if row not in self.rows:
            return None
        group, held = self.rows[row]
        return held.get("ceilings", group["ceilings"]).get(unit)

    def of_matrix(self, row: str, unit: str) -> float | None:
        """Our operations/s over the library product's of the same run."""
        return self._share(row, "operations", unit)

    def of_read(self, row: str) -> float | None:
        """Our document bytes/s over the plain read's of the same run."""
        return self._share(row, "bytes", "read")

    def _share(self, row: str, work: str, unit: str) -> float | None:
        time, ceiling = self.time(row, "ours"), self.ceiling(row, unit)
        return None if time is None or ceiling is None else self.rows[row][1][work] / time * 1e3 / ceiling

    def ratio(self, row: str, other: str, name: str = "ours", key: str = "median_ms") -> float | None:
        """How many times faster `name` is than `other`."""
        mine, theirs = self.time(row, name, key), self.time(row, other, key)
        return None if mine is None or theirs is None else theirs / mine

    def fastest(
        self, row: str, kinds: tuple[str, ...] = ("baseline", "peer"), key: str = "median_ms", part: str = ""
    ) -> str | None:
        """The fastest method of these kinds whose name holds `part`."""
        if row not in self.rows:
            return None
        methods = self.rows[row][1]["methods"]
        names = [name for name, data in methods.items() if data["kind"] in kinds and key in data and part in name]
        return min(names, key=lambda name: methods[name][key], default=None)


# Tables


def row_lines(name: str, row: dict[str, Any]) -> list[str]:
    """One row with all its methods."""
    lines = [f"\n{name}: floor {row['floor_ms']:.4f} ms ({row['bound_by']})"]
    main = row["methods"].get(row["main"])
    key, unit = ("call_median_us", "us") if row["host"] else ("median_ms", "ms")
    for method, data in row["methods"].items():
        ratio = f"{data[key] / main[key]:6.2f}x ours" if main else " " * 11
        entry = f"  [{data['entry']}]" if data["entry"] else ""
        spread = data[key.replace("median", "iqr")]
        kept = data["extra_bytes"] / 1e6
        if row["host"]:
            more = f"enqueue {data['enqueue_median_us']:8.1f}  from idle {data['idle_median_us']:8.1f}"
        else:
            more = f"{data['of_floor']:5.3f} of floor {kept:10.1f} MB"
        lines.append(
            f"  {method:40} {data[key]:10.4f} {unit}  IQR {spread:8.4f} {ratio}  {more}  error {data['error']:.1e}{entry}"
        )
    lines += [f"  {method:40} {reason}" for method, reason in row["skipped"].items()]
    return lines


def standing(figures: Figures) -> list[str]:
    """Wins and losses: every row's main method of ours against its fastest rival."""
    lines = [f"\n{'row':34} {'ours':>13} {'of floor':>8}  {'fastest rival':44} {'':>13}  times faster"]
    for name, (_, row) in figures.rows.items():
        key, unit = ("call_median_us", "us") if row["host"] else ("median_ms", "ms")
        rival = figures.fastest(name, key=key)
        mine = figures.time(name, row["main"], key)
        if mine is None:
            lines.append(f"{name:34} {'-':>13}           {row['skipped'].get(row['main'], 'not measured')[:90]}")
            continue
        share = f"{row['methods'][row['main']]['of_floor']:8.3f}" if not row["host"] else " " * 8
        if rival is None:
            lines.append(f"{name:34} {mine:10.4f} {unit} {share}  no rival")
            continue
        theirs = figures.time(name, rival, key) or 0.0
        word = "win" if theirs >= mine else "LOSS"
        lines.append(f"{name:34} {mine:10.4f} {unit} {share}  {rival:44} {theirs:10.4f} {unit}  {theirs / mine:6.2f}  {word}")
    return lines
