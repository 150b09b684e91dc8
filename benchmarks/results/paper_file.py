"""The results file of the paper's tables: which rows it has, which are measured again, which methods lost the GPU.

Rows of several kernels stand side by side, each with its environment; rows of another GPU, torch or Triton are refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measure import installed
from measure.session import DeviceLostError
from results.file import parsed, write

IDENTITY = ("gpu", "capability", "torch", "cuda", "triton")
NOT_TRIED, ABSENT = "not tried", "not installed"  # how reasons begin
LINEUP = 1  # who takes part in a row where its plan says nothing else
Findings = dict[str, Any]


def identity(here: Findings) -> Findings:
    """What all rows of a file share."""
    return {key: here[key] for key in IDENTITY}


def opened(path: Path | None, here: Findings, fresh: bool, schema: str) -> Findings:
    """The document to add to: the file's, or a new one.

    Raises:
        ValueError: the file is no JSON, or of another schema, GPU or software.
    """
    new: Findings = {"schema": schema, "identity": identity(here), "environments": {}, "groups": {}, "partial": {}}
    if path is None or fresh or not path.exists():
        return new
    found: Findings = parsed(path)
    for key, mine in (("schema", schema), ("identity", new["identity"])):
        if found.get(key) != mine:
            raise ValueError(f"{path}: {key} {found.get(key)}, here {mine}; name another file, or --fresh to replace it")
    return found


def environment_key(here: Findings) -> str:
    """The name under which a run's environment stands in the file: another version of a peer is another environment."""
    versions = "".join(f" {name} {version}" for name, version in sorted(here.get("peers", {}).items()))
    return f"{here['revision']} {here['sources']}{versions}"


def there(report: Findings, group: str, name: str, here: Findings, options: argparse.Namespace, lineup: int = LINEUP) -> bool:
    """Whether the file already has a whole row of the same kernels, with as many rounds and all that would take part now."""
    row = report["groups"].get(group, {}).get("rows", {}).get(name)
    if row is None or row["runs"] < options.runs:
        return False
    if options.compile and (not row["compile"] or row.get("lineup", LINEUP) < lineup):
        return False
    same = report["environments"][row["environment"]]["sources"] == here["sources"]
    return bool(same and set(options.peers) <= set(row["peers"]) and whole(name, row, options.peers))


def whole(name: str, row: Findings, asked: Sequence[str]) -> bool:
    """Whether measuring a row again could add nothing: its main method has a time, every cell is known, and no peer came since."""
    main, skipped = row.get("main"), row.get("skipped", {})
    lacks = main is not None and "median_ms" not in row.get("methods", {}).get(main, {})
    if lacks and not skipped.get(main, "").startswith(NOT_TRIED):
        return False
    absent = {method for method, why in skipped.items() if why.startswith(ABSENT)}
    for cell in row.get("cells", {}).values():
        why = cell.get("failed", "")
        if why.startswith(ABSENT):
            absent.add(name)  # of a memory row: the method
        elif why and "lost" not in cell and not why.startswith(NOT_TRIED) and "out of memory" not in why.lower():
            return False
    came = [name for name in (*asked, *installed.SCORERS) if any(method.startswith(name) for method in absent)]
    return all(isinstance(installed.load(name), str) for name in came)


def remember(report: Findings, name: str, lost: DeviceLostError, here: Findings, options: argparse.Namespace) -> None:
    """Note which method of a row lost the GPU ("" when that is not known), and write the file."""
    found = {"why": f"{NOT_TRIED}: it lost the GPU ({lost})"[:220], "environment": environment_key(here)}
    report["environments"][found["environment"]] = here
    report.setdefault("lost", {}).setdefault(name, {})[lost.method] = found
    write(options.json, report)


def losers(report: Findings, name: str, here: Findings) -> dict[str, str]:
    """Methods of a row that lost the GPU with these kernels and peers, and the reasons."""

    def same(key: str) -> bool:
        then = report["environments"][key]
        versions = [{name: one.get("peers", {}).get(name) for name in installed.PEERS} for one in (then, here)]
        return bool(then["sources"] == here["sources"] and versions[0] == versions[1])

    return {
        method: found["why"] for method, found in report.get("lost", {}).get(name, {}).items() if same(found["environment"])
    }


def add(
    report: Findings,
    group: str,
    name: str,
    data: Findings,
    here: Findings,
    options: argparse.Namespace,
    lineup: int = LINEUP,
) -> None:
    """Put a row in and write the file."""
    key = environment_key(here)
    report["environments"][key] = here
    rows = report["groups"].setdefault(group, {"rows": {}})["rows"]
    asked = {"runs": options.runs, "compile": options.compile, "peers": list(options.peers), "lineup": lineup}
    when = datetime.now(UTC).isoformat(timespec="seconds")
    rows[name] = {**data, "environment": key, "measured": when, **asked}
    write(options.json, report)
