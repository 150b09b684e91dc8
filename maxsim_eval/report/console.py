"""A Result on a terminal: one table and a sentence a path; on demand every table."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from maxsim_eval.printing import shown
from maxsim_eval.report.tables import INTERVAL, Table, every_table, summary
from maxsim_eval.report.words import headline, verdicts, warnings
from maxsim_eval.types import Result


def _rich_table(table: Table) -> RichTable:
    drawn = RichTable(title=shown(table.title, "table.title"), title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        drawn.add_column(shown(column), justify="left" if index == 0 else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(shown, row))
    return drawn


def _summary(result: Result, width: int) -> RichTable:
    """The summary as wide as there is room: without the interval (the sentences have it), then with names on several lines."""
    table = summary(result)
    for gap in (2, 1):
        if _width(table, gap) <= width:
            break
    else:
        kept = [place for place, head in enumerate(table.columns) if not head.endswith(INTERVAL)]
        table = Table("", [table.columns[place] for place in kept], [[row[place] for place in kept] for row in table.rows])
        gap = 2 if _width(table, 2) <= width else 1
    drawn = RichTable(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for place, head in enumerate(table.columns):
        text = place in (0, len(table.columns) - 1)
        drawn.add_column(shown(head), justify="left" if text else "right", no_wrap=place > 0, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(shown, row))
    return drawn


def _width(table: Table, gap: int) -> int:
    return sum(max(map(len, column)) + gap for column in zip(table.columns, *table.rows, strict=True)) - gap


def render_table(table: Table, console: Console) -> None:
    """Print one table."""
    console.print(_rich_table(table))


def render_console(result: Result, console: Console, *, verbose: bool = False) -> None:
    """Print the report: task and encoder, a row a path, warnings, a sentence a path; `verbose`: every table of `tables.py`."""
    for line in headline(result, brief=not verbose):
        console.print(shown(line, "bold"))
    render_body(result, console, verbose=verbose)


def render_body(result: Result, console: Console, *, verbose: bool = False) -> None:
    """What `render_console` prints after the headline."""
    if verbose:
        for table in every_table(result):
            console.print(_rich_table(table))
    elif result.paths:
        console.print(_summary(result, console.width))
    for warning in warnings(result):
        console.print(shown(f"warning: {warning}", "yellow"))
    for verdict in verdicts(result):
        console.print(shown(verdict))
