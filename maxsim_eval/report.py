"""Reports for people from a Result alone: console and Markdown.

Both are drawn from the same tables (`tables`, `verdicts`, `facts`), so they cannot disagree, and a further format is
one more function over them. JSON lives in `result_json`; its functions and `environment` are public here too.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from maxsim_eval.environment import environment
from maxsim_eval.errors import DataError
from maxsim_eval.files import write_text
from maxsim_eval.result_json import SCHEMA, from_json, to_json
from maxsim_eval.subsets import describe, describe_candidates
from maxsim_eval.types import Result

__all__ = [
    "SCHEMA",
    "Table",
    "environment",
    "facts",
    "from_json",
    "render_console",
    "tables",
    "to_json",
    "to_markdown",
    "verdicts",
    "write_reports",
]


@dataclass(frozen=True)
class Table:
    """One table of a report: a title, column heads (first: the row names) and rows of text."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _form(value: Any, form: str) -> str:
    return format(value, form) if _known(value) else "-"


def _change(value: Any) -> str:
    if not _known(value):
        return "(?)"
    return "(=)" if value == 0 else f"({value:+.4f})"


def _entry(parity: Mapping[str, Any] | None, *keys: str) -> Any:
    value: Any = parity
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _metric_table(result: Result) -> Table:
    names = list(dict.fromkeys(name for path in result.paths.values() for name in path.metrics))
    rows = []
    for name in names:
        row = [name]
        for path in result.paths.values():
            text = _form(path.metrics.get(name), ".4f")
            if path.parity is not None:
                text += " " + _change(_entry(path.parity, "delta", name))
            row.append(text)
        rows.append(row)
    title = f"Metrics (change against {result.reference})" if result.reference else "Metrics"
    return Table(title, ["metric", *result.paths], rows)


def _order_text(parity: Mapping[str, Any]) -> str:
    order = _entry(parity, "identical_order")
    if not isinstance(order, Mapping) or not _known(order.get("queries")):
        return "-"
    return f"{order.get('identical')} of {order['queries']} queries"


def _spearman_queries(parity: Mapping[str, Any]) -> str:
    found = _entry(parity, "spearman")
    if not isinstance(found, Mapping) or not _known(found.get("queries")):
        return "-"
    text = str(found["queries"])
    if found.get("sampled"):
        text += " sampled"
    if found.get("constant"):
        text += f", {found['constant']} constant left out"
    return text


def _overlap_cutoffs(parity: Mapping[str, Any]) -> list[str]:
    found = _entry(parity, "overlap")
    return [str(cutoff) for cutoff in found] if isinstance(found, Mapping) else []


def _parity_table(result: Result) -> Table:
    compared = {name: path.parity for name, path in result.paths.items() if path.parity is not None}
    cutoffs = list(dict.fromkeys(cut for parity in compared.values() for cut in _overlap_cutoffs(parity)))
    rows: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("Spearman, mean", lambda p: _form(_entry(p, "spearman", "mean"), ".6f")),
        ("Spearman, min", lambda p: _form(_entry(p, "spearman", "min"), ".6f")),
        ("Spearman, queries", _spearman_queries),
        *((f"top-{cut[1:]} overlap", lambda p, cut=cut: _form(_entry(p, "overlap", cut), ".4f")) for cut in cutoffs),
        (f"same top-{result.k} order", _order_text),
        ("score error, max", lambda p: _form(_entry(p, "max_abs_error"), ".3g")),
        ("score error, mean", lambda p: _form(_entry(p, "mean_abs_error"), ".3g")),
        ("relative error, max", lambda p: _form(_entry(p, "max_rel_error"), ".3g")),
        ("retrieved by one only", lambda p: _form(_entry(p, "mismatched_finite"), "d")),
    ]
    body = [[name, *(text(parity) for parity in compared.values())] for name, text in rows] if compared else []
    return Table(f"Parity with {result.reference}", ["", *compared], body)


def _seconds_table(result: Result) -> Table:
    names = list(dict.fromkeys(name for path in result.paths.values() for name in path.seconds))
    rows = [[name, *(_form(path.seconds.get(name), ".3f") for path in result.paths.values())] for name in names]
    return Table("Seconds", ["", *result.paths], rows)


def tables(result: Result) -> list[Table]:
    """Tables of every report: metrics by path, parity, seconds; empty ones left out."""
    return [table for table in (_metric_table(result), _parity_table(result), _seconds_table(result)) if table.rows]


def _shared(parity: Mapping[str, Any]) -> str:
    share = _entry(parity, "overlap", "@10")
    return f", top-10 overlap {share:.4f}" if _known(share) else ""


def verdicts(result: Result) -> list[str]:
    """One sentence a compared path: whether its ranking is the reference's, and what that did to nDCG@10."""
    lines = []
    for name, path in result.paths.items():
        if path.parity is None:
            continue
        order = _entry(path.parity, "identical_order")
        change = _entry(path.parity, "delta", "nDCG@10")
        effect = f"nDCG@10 changes by {change:+.4f}" if _known(change) else "change of nDCG@10 unknown"
        if change == 0:
            effect = "nDCG@10 is the same"
        if not isinstance(order, Mapping) or not all(_known(order.get(key)) for key in ("k", "identical", "queries")):
            lines.append(f"{name}: order not compared with {result.reference}; {effect}.")
        elif order["identical"] == order["queries"]:
            lines.append(
                f"{name}: ranking identical to {result.reference} (top {order['k']}, all {order['queries']} queries); {effect}."
            )
        else:
            lines.append(
                f"{name}: order of the top {order['k']} differs from {result.reference} in "
                f"{order['queries'] - order['identical']} of {order['queries']} queries{_shared(path.parity)}; {effect}."
            )
    return lines


def _scalar(value: Any) -> str | None:
    if isinstance(value, bool) or value is None:
        return None if value is None else str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return format(value, "g") if isinstance(value, float) else value if isinstance(value, str) and value else None


def facts(entries: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of every number and text of a mapping, in order; nested entries are left to result.json."""
    found = ((str(key).replace("_", " "), _scalar(value)) for key, value in entries.items())
    return [(key, text) for key, text in found if text is not None]


def _headline(result: Result) -> list[str]:
    task, encoder = result.task, result.encoder
    counts = ", ".join(
        f"{task[key]:,} {key.replace('_', ' ')}"
        for key in ("queries", "documents", "query_tokens", "document_tokens", "judged_pairs")
        if _known(task.get(key))
    )
    revision = f" ({encoder['revision']})" if encoder.get("revision") else ""
    dim = f", d = {encoder['dim']}" if _known(encoder.get("dim")) else ""
    limits, candidates = task.get("limits"), task.get("candidates")
    reranked = "" if candidates is None else describe_candidates(candidates)
    return [
        f"{task.get('source')}/{task.get('dataset')} {task.get('split')}: {counts}",
        *([] if limits is None else [f"SUBSET: {describe(limits)}; figures are not those of the whole collection"]),
        *([f"RERANKED: {reranked}; what a query's run does not list is not retrieved"] if reranked else []),
        f"encoder {encoder.get('name')}{revision}{dim}, top {result.k}",
    ]


def _warnings(result: Result) -> list[str]:
    found = result.task.get("warnings")
    return [str(line) for line in found] if isinstance(found, list | tuple) else []


def _rich_table(table: Table) -> RichTable:
    drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        drawn.add_column(Text(column), justify="left" if index == 0 else "right")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def render_console(result: Result, console: Console) -> None:
    """Print the report: task and encoder, metrics, parity, seconds, warnings, verdicts."""
    for line in _headline(result):
        console.print(Text(line, style="bold"))
    for table in tables(result):
        console.print(_rich_table(table))
    for warning in _warnings(result):
        console.print(Text(f"warning: {warning}", style="yellow"))
    for verdict in verdicts(result):
        console.print(Text(verdict))


def _cell(text: str) -> str:
    """Text safe inside a Markdown table cell: no column or line break, no HTML, no markup."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\").replace("|", "\\|")
    return " ".join(text.replace("`", "\\`").replace("*", "\\*").replace("_", "\\_").split())


def _markdown_table(columns: Iterable[str], rows: Iterable[Iterable[str]], align: str = "---") -> list[str]:
    heads = [_cell(column) for column in columns]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + f" {align} |" * (len(heads) - 1)]
    return [*lines, *("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows), ""]


def to_markdown(result: Result) -> str:
    """The report as one self-contained Markdown page: the console's facts, and the environment and command."""
    lines = [f"# {_cell(str(result.task.get('source')))}/{_cell(str(result.task.get('dataset')))}", ""]
    lines += [f"- {_cell(line)}" for line in _headline(result)]
    lines += [f"- created {_cell(result.created)}"] if result.created else []
    lines += [""]
    if verdicts(result):
        lines += ["## Verdict", "", *(f"- {_cell(line)}" for line in verdicts(result)), ""]
    for table in tables(result):
        lines += [f"## {_cell(table.title)}", "", *_markdown_table(table.columns, table.rows, "---:")]
    described = [(name, path.description) for name, path in result.paths.items() if path.description]
    if described:
        lines += ["## Paths", "", *_markdown_table(("path", "what it computes"), described)]
    if _warnings(result):
        lines += ["## Warnings", "", *(f"- {_cell(line)}" for line in _warnings(result)), ""]
    for title, entries in (("Task", result.task), ("Encoder", result.encoder), ("Environment", result.environment)):
        lines += [f"## {title}", "", *_markdown_table(("", ""), facts(entries))]
    lines += ["## Command", "", *(f"    {line}" for line in (shlex.join(result.command) or "(none)").splitlines()), ""]
    return "\n".join(lines)


def write_reports(result: Result, out_dir: Path | str) -> None:
    """Write `report.md`, then `result.json`, each whole or not at all: a `result.json` means the reports are complete.

    Raises:
        DataError: the folder cannot be written.
    """
    folder = Path(out_dir)
    try:
        write_text(folder / "report.md", to_markdown(result))
        write_text(folder / "result.json", to_json(result))
    except OSError as error:
        raise DataError(f"{folder}: the report cannot be written ({error.strerror})") from error
