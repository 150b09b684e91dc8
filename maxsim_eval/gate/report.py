"""What people see of the gate: a few lines in a CI's log, and the Markdown of a job summary (GitHub's `GITHUB_STEP_SUMMARY`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from maxsim_eval.comparison.bounds import NAMES
from maxsim_eval.files import writing
from maxsim_eval.gate.checking import Finding, passed
from maxsim_eval.printing import printable
from maxsim_eval.report.markdown import cell, table
from maxsim_eval.report.values import entry, figure, known, signed
from maxsim_eval.report.words import headline
from maxsim_eval.types import PathResult, Result

_SHOWN = "nDCG@10"
_COLUMNS = ("path", _SHOWN, "change", "Spearman", "top-10 overlap", "top-20 overlap", NAMES["max_rel_error"])
_ACCEPT = "to accept this as the new baseline, on purpose: the same command with --update-baseline --accept"
_TEXT_BYTES = 900 << 10  # GitHub refuses a step's summary above 1 MiB as a whole


def _metric(result: Result) -> str:
    """nDCG@10; where the result lacks it, its first metric."""
    names = list(dict.fromkeys(name for path in result.paths.values() for name in path.metrics))
    return _SHOWN if _SHOWN in names or not names else names[0]


def _rows(result: Result, metric: str) -> list[list[str]]:
    reference = result.paths.get(result.reference or "", PathResult({}, {}, {})).metrics.get(metric)
    rows = []
    for name, path in result.paths.items():
        value = path.metrics.get(metric)
        row = [name, figure(value, ".4f")]
        if name == result.reference:
            rows.append([*row, "reference", *[""] * 4])
            continue
        change = value - reference if known(value) and known(reference) else math.nan  # type: ignore[operator]
        row += [signed(change, "-"), figure(entry(path.parity, "spearman", "mean"), ".6f")]
        row += [figure(entry(path.parity, "overlap", cutoff), ".4f") for cutoff in ("@10", "@20")]
        rows.append([*row, figure(entry(path.parity, "max_rel_error"), ".1e")])
    return rows


def overview(result: Result) -> str:
    """Lines for a log: what was evaluated, and a row of figures a path."""
    metric = _metric(result)
    rows = [["", *_COLUMNS[1:]], *_rows(result, metric)]
    rows[0][1] = metric
    rows = [[printable(text) for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    drawn = (
        "  ".join(
            text.ljust(width) if place == 0 else text.rjust(width) for place, (text, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )
    return "\n".join([*map(printable, headline(result)), *(line.rstrip() for line in drawn)])


def render(findings: Iterable[Finding], *, every: bool = False) -> str:
    """Lines for a log: what failed (and, with `every`, what passed), then one line of summary; how to accept it where one can."""
    findings = list(findings)
    failed = [finding for finding in findings if not finding.ok]
    shown = failed + ([finding for finding in findings if finding.ok] if every else [])
    lines = [_line(finding) for finding in shown]
    lines.append(verdict(findings))
    if _acceptable(failed):
        lines.append(_ACCEPT)
    return "\n".join(map(printable, lines))


def _line(finding: Finding) -> str:
    """A finding as a log line; one that passed shows what is needed only where that differs from what was found."""
    if not finding.ok:
        return f"FAIL  {finding.what}: {finding.found}, need {finding.needed}"
    return f"ok    {finding.what}: {finding.found}" + ("" if finding.found == finding.needed else f"; bound: {finding.needed}")


def verdict(findings: Iterable[Finding]) -> str:
    """One line: whether the gate passed, and how many checks failed of how many."""
    findings = list(findings)
    failed = sum(not finding.ok for finding in findings)
    return f"gate passed: {len(findings)} checks" if passed(findings) else f"gate FAILED: {failed} of {len(findings)} checks"


def _acceptable(failed: list[Finding]) -> bool:
    """Whether a new baseline of the same thing would make the gate pass."""
    return bool(failed) and all(finding.kind in ("count", "path", "fall") for finding in failed)


def to_summary(result: Result, findings: Iterable[Finding]) -> str:
    """The job summary: verdict, what failed, the figures, and every check folded away."""
    findings = list(findings)
    failed = [finding for finding in findings if not finding.ok]
    metric = _metric(result)
    name = f"{result.task.get('source')}/{result.task.get('dataset')} {result.task.get('split')}, {result.encoder.get('name')}"
    sign = "\N{WHITE HEAVY CHECK MARK}" if passed(findings) else "\N{CROSS MARK}"
    lines = [f"## {sign} {cell(verdict(findings))}: {cell(name)}", "", *(f"- {cell(line)}" for line in headline(result)), ""]
    if failed:
        lines += table(("failed", "found", "needed"), ([finding.what, finding.found, finding.needed] for finding in failed))
    if _acceptable(failed):
        lines += [cell(_ACCEPT), ""]
    lines += table((_COLUMNS[0], metric, *_COLUMNS[2:]), _rows(result, metric), "---:")
    heads = ("", "check", "found", "needed")
    rows = (["ok" if finding.ok else "FAIL", finding.what, finding.found, finding.needed] for finding in findings)
    folded = ["<details>", f"<summary>All {len(findings)} checks</summary>", "", *table(heads, rows), "</details>", ""]
    text = "\n".join([*lines, *folded])
    return (text if len(text.encode()) <= _TEXT_BYTES else "\n".join(lines)) + "\n"


def append_summary(path: Path | str, text: str) -> None:
    """Add the text to a summary file, as GitHub's steps do: one file takes the summaries of several gates.

    Raises:
        DataError: the file cannot be written.
    """
    with writing(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")


def to_json(findings: Iterable[Finding]) -> Mapping[str, Any]:
    """What `--json` prints."""
    findings = list(findings)
    return {
        "passed": passed(findings),
        "checks": len(findings),
        "failed": sum(not finding.ok for finding in findings),
        "findings": [vars(finding) for finding in findings],
    }
