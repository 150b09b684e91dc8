"""Reports for people from a Result alone: console and Markdown.

Both are drawn from the same tables (`report_tables`, `verdicts`, `facts`), so they cannot disagree, and a further format is
one more function over them. JSON lives in `result_json`, CSV in `report_csv`, the HTML page in `html_report`; JSON's functions and
`environment` are public here too.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from maxsim_eval.environment import environment
from maxsim_eval.errors import DataError
from maxsim_eval.files import write_text
from maxsim_eval.markdown import cell as _cell
from maxsim_eval.markdown import table as _markdown_table
from maxsim_eval.report_csv import CSV_FILES
from maxsim_eval.report_tables import Table, about, entry, every_table, known, tables
from maxsim_eval.result_json import SCHEMA, from_json, to_json
from maxsim_eval.subsets import describe, describe_candidates
from maxsim_eval.types import Result

__all__ = [
    "SCHEMA",
    "Table",
    "environment",
    "facts",
    "from_json",
    "headline",
    "render_body",
    "render_console",
    "tables",
    "to_json",
    "to_markdown",
    "verdicts",
    "warnings",
    "write_reports",
]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def _shared(parity: Mapping[str, Any]) -> str:
    share = entry(parity, "overlap", "@10")
    return f", top-10 overlap {share:.4f}" if known(share) else ""


def verdicts(result: Result) -> list[str]:
    """A line for each compared path: whether its ranking is the reference's, what that did to nDCG@10, and the metrics' verdicts."""
    lines = []
    for name, path in result.paths.items():
        if path.parity is None:
            continue
        order = entry(path.parity, "identical_order")
        change = entry(path.parity, "delta", "nDCG@10")
        effect = f"nDCG@10 changes by {change:+.4f}" if known(change) else "change of nDCG@10 unknown"
        if change == 0:
            effect = "nDCG@10 is the same"
        if not isinstance(order, Mapping) or not all(known(order.get(key)) for key in ("k", "identical", "queries")):
            said = f"order not compared with {result.reference}"
        elif order["identical"] == order["queries"]:
            said = f"ranking identical to {result.reference} (top {order['k']}, all {order['queries']} queries)"
        else:
            changed = f"{order['queries'] - order['identical']} of {order['queries']} queries"
            said = f"order of the top {order['k']} differs from {result.reference} in {changed}{_shared(path.parity)}"
        lines.append(f"{name}: {said}; {effect}.{_judged(path.parity)}")
    return lines


def _judged(parity: Mapping[str, Any]) -> str:
    """What the statistics say of all metrics: how many are equivalent, and which are not."""
    found = entry(parity, "statistics")
    if not isinstance(found, Mapping) or not found:
        return ""
    by_verdict: dict[str, list[str]] = {}
    for metric, one in found.items():
        needed = entry(one, "queries_needed")
        more = f" (needs about {about(needed)} queries)" if known(needed) else ""
        by_verdict.setdefault(str(entry(one, "verdict")), []).append(f"{metric}{more}")
    same = len(by_verdict.pop("equivalent", []))
    if not by_verdict:
        return f" Equivalent in all {same} metrics."
    others = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in by_verdict.items())
    return f" Equivalent in {same} of {len(found)} metrics; {others}."


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


def headline(result: Result) -> list[str]:
    """What was evaluated, a line each: task and counts, subset, reranking, encoder."""
    task, encoder = result.task, result.encoder
    counts = ", ".join(
        f"{task[key]:,} {key.replace('_', ' ')}"
        for key in ("queries", "documents", "query_tokens", "document_tokens", "judged_pairs")
        if known(task.get(key))
    )
    revision = f" ({encoder['revision']})" if encoder.get("revision") else ""
    dim = f", d = {encoder['dim']}" if known(encoder.get("dim")) else ""
    limits, candidates = task.get("limits"), task.get("candidates")
    reranked = "" if candidates is None else describe_candidates(candidates)
    return [
        f"{task.get('source')}/{task.get('dataset')} {task.get('split')}: {counts}",
        *([] if limits is None else [f"SUBSET: {describe(limits)}; figures are not those of the whole collection"]),
        *([f"RERANKED: {reranked}; what a query's run does not list is not retrieved"] if reranked else []),
        f"encoder {encoder.get('name')}{revision}{dim}, top {result.k}",
    ]


def warnings(result: Result) -> list[str]:
    """The task's warnings."""
    found = result.task.get("warnings")
    return [str(line) for line in found] if isinstance(found, list | tuple) else []


def shown(text: str, style: str = "") -> Text:
    """Text for a terminal as it is: no markup, no emoji names, and characters that control a terminal as escapes."""
    return Text(_CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text), style=style)


def _rich_table(table: Table) -> RichTable:
    drawn = RichTable(title=shown(table.title, "table.title"), title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        drawn.add_column(shown(column), justify="left" if index == 0 else "right")
    for row in table.rows:
        drawn.add_row(*map(shown, row))
    return drawn


def render_console(result: Result, console: Console) -> None:
    """Print the report: task and encoder, the tables of `report_tables`, warnings, verdicts."""
    for line in headline(result):
        console.print(shown(line, "bold"))
    render_body(result, console)


def render_body(result: Result, console: Console) -> None:
    """What `render_console` prints after the headline."""
    for table in every_table(result):
        console.print(_rich_table(table))
    for warning in warnings(result):
        console.print(shown(f"warning: {warning}", "yellow"))
    for verdict in verdicts(result):
        console.print(shown(verdict))


def to_markdown(result: Result) -> str:
    """The report as one self-contained Markdown page: the console's facts, and the environment and command."""
    lines = [f"# {_cell(str(result.task.get('source')))}/{_cell(str(result.task.get('dataset')))}", ""]
    lines += [f"- {_cell(line)}" for line in headline(result)]
    lines += [f"- created {_cell(result.created)}"] if result.created else []
    lines += [""]
    if verdicts(result):
        lines += ["## Verdict", "", *(f"- {_cell(line)}" for line in verdicts(result)), ""]
    for table in every_table(result):
        lines += [f"## {_cell(table.title)}", "", *_markdown_table(table.columns, table.rows, "---:")]
    described = [(name, path.description) for name, path in result.paths.items() if path.description]
    if described:
        lines += ["## Paths", "", *_markdown_table(("path", "what it computes"), described)]
    if warnings(result):
        lines += ["## Warnings", "", *(f"- {_cell(line)}" for line in warnings(result)), ""]
    for title, entries in (("Task", result.task), ("Encoder", result.encoder), ("Environment", result.environment)):
        lines += [f"## {title}", "", *_markdown_table(("", ""), facts(entries))]
    lines += ["## Command", "", *(f"    {line}" for line in (shlex.join(result.command) or "(none)").splitlines()), ""]
    return "\n".join(lines)


def write_reports(result: Result, out_dir: Path | str) -> None:
    """Write `report.md`, `report.html`, the CSV files, then `result.json`, each whole or not at all: the last means all are complete.

    Raises:
        DataError: the folder cannot be written.
    """
    from maxsim_eval.html_report import to_html  # it draws from this module

    folder = Path(out_dir)
    try:
        write_text(folder / "report.md", to_markdown(result))
        write_text(folder / "report.html", to_html(result))
        for name, to_csv in CSV_FILES.items():
            write_text(folder / name, to_csv(result))
        write_text(folder / "result.json", to_json(result))
    except OSError as error:
        raise DataError(f"{folder}: the report cannot be written ({error.strerror})") from error
