"""A Result on a terminal: the headline, the tables, the warnings and the verdicts."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from maxsim_eval.printing import shown
from maxsim_eval.report.tables import Table, every_table
from maxsim_eval.report.words import headline, verdicts, warnings
from maxsim_eval.types import Result


def _rich_table(table: Table) -> RichTable:
    drawn = RichTable(title=shown(table.title, "table.title"), title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        drawn.add_column(shown(column), justify="left" if index == 0 else "right")
    for row in table.rows:
        drawn.add_row(*map(shown, row))
    return drawn


def render_console(result: Result, console: Console) -> None:
    """Print the report: task and encoder, the tables of `tables.py`, warnings, verdicts."""
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
