"""Every file of a report: Markdown here; JSON, CSV and the HTML page by their modules; each written whole."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.files import alone, write_text
from maxsim_eval.printing import printable
from maxsim_eval.report.csv_files import CSV_FILES
from maxsim_eval.report.html import to_html
from maxsim_eval.report.markdown import cell as _cell
from maxsim_eval.report.markdown import table as _markdown_table
from maxsim_eval.report.result_json import RESULT_FILE, read_result, to_document, to_json
from maxsim_eval.report.tables import every_table
from maxsim_eval.report.words import facts, headline, verdicts, warnings
from maxsim_eval.types import Result


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
    command = (shlex.join(result.command) or "(none)").splitlines()
    lines += ["## Command", "", *(f"    {printable(line)}" for line in command), ""]
    return "\n".join(lines)


def write_reports(result: Result, out_dir: Path | str) -> None:
    """Write `report.md`, `report.html`, the CSV files, then `result.json`, each whole or not at all: the last means all are complete.

    Raises:
        DataError: the folder cannot be written.
    """
    folder = Path(out_dir)
    try:
        write_text(folder / "report.md", to_markdown(result))
        write_text(folder / "report.html", to_html(result))
        for name, to_csv in CSV_FILES.items():
            write_text(folder / name, to_csv(result))
        write_text(folder / "result.json", to_json(result))
    except OSError as error:
        raise DataError(f"{folder}: the report cannot be written ({error.strerror})") from error


def write_again(result: Result, out_dir: Path | str) -> None:
    """`write_reports` of a Result that exists already, without run files.

    In the folder of its own evaluation the runs stay and the report names them; elsewhere it names none.

    Raises:
        UsageError: the folder holds runs of another evaluation. DataError: it cannot be written, or another process writes there.
    """
    folder = Path(out_dir)
    written = _without_runs(result)
    with alone(folder):
        if any((folder / "runs").glob("*.trec")):
            there = read_result(folder) if (folder / RESULT_FILE).is_file() else None
            if there is None or to_document(_without_runs(there)) != to_document(written):
                raise UsageError(
                    f"{folder}: holds runs of another evaluation, which would be taken for this one's; choose another folder"
                )
            written = there
        write_reports(written, folder)


def _without_runs(result: Result) -> Result:
    return replace(result, paths={name: replace(path, run=None) for name, path in result.paths.items()})
