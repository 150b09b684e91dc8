"""The command `conform`: whether a function that scores keeps the contract, bugs told from conventions."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from maxsim_eval.cli.options import AsJson
from maxsim_eval.cli.output import console, print_json
from maxsim_eval.errors import EXIT_GATE, UsageError
from maxsim_eval.printing import printable

SCHEMA = "maxsim-eval/conform/1"
COLOURS = {"pass": "green", "convention": "yellow", "refused": "yellow", "bug": "bold red", "skipped": "dim"}


def conform(
    scorer: Annotated[str, typer.Argument(help="The function: python:<module>:<function>.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Run the contract of a scorer against a function: dtypes, empty rows, NaN, ties, strides, parts, gradients.

    A bug ends with exit code 1, and so does a function that passes no check. A convention is a choice that others made differently;
    refused is what the function raised at.

    Example: python evaluate.py conform python:my_kernels:score
    """
    from maxsim_eval.conformance.conforming import conform as run
    from maxsim_eval.scoring.own_functions import own_function

    if device != "cpu":
        import torch

        if device != "cuda" or not torch.cuda.is_available():
            raise UsageError(
                f"--device: got {device!r}, need cpu{', or cuda' if torch.cuda.is_available() else '; there is no CUDA GPU'}"
            )
    rows = run(own_function(scorer), device)
    counted = Counter(row.verdict for row in rows)
    if as_json:
        print_json({"schema": SCHEMA, "scorer": scorer, "device": device, "checks": [asdict(row) for row in rows]})
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table("check", "verdict", "found", title=printable(f"{scorer} on {device}"))
        for row in rows:
            table.add_row(row.check, Text(row.verdict, COLOURS[row.verdict]), Text(printable(row.found)))
        console().print(table)
        nothing = "" if counted["pass"] else "; nothing passed"
        console().print(", ".join(f"{number} {verdict}" for verdict, number in counted.items()) + nothing)
    if counted["bug"] or not counted["pass"]:
        raise typer.Exit(EXIT_GATE)
