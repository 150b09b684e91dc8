"""What the tests of `bench` share."""

from __future__ import annotations

import pytest
import typer

from maxsim_eval.cli import bench


@pytest.fixture
def app() -> typer.Typer:
    """A command line that has `bench`."""
    made = typer.Typer(pretty_exceptions_enable=False)
    made.command(context_settings=bench.SETTINGS)(bench.bench)
    made.command("other")(lambda: None)  # alone, a command would have no name
    return made
