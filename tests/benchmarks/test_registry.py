"""The registry of tables says of the scripts, the page and the results what they are."""

from __future__ import annotations

import functools
import importlib
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import page
from maxsim_eval.cli import bench
from tables.cells import Book, Table

REGISTRY = bench.opened(bench.FOLDER)
HELD = tomllib.loads((bench.FOLDER / bench.REGISTRY).read_text(encoding="utf-8"))
ENDS_EARLY = ("--help", "--json", "--only", "--show", "--draw", "--brief", "--list", "--compile-only", "--ranks", "--quiet")


def shown(book: Book) -> dict[str, Table]:
    return {table.name: table for tables in page.sections(book).values() for table in tables}


def test_every_script_exists_and_measures_a_table() -> None:
    assert {held.script for held in REGISTRY.tables.values()} == set(HELD["scripts"])
    for script in HELD["scripts"]:
        assert (bench.FOLDER / script).is_file()


def test_every_table_says_in_one_sentence_what_it_answers() -> None:
    for part in ("tables", "computed", "evaluations"):
        for name, said in HELD[part].items():
            assert said["answers"][0].isupper(), name
            assert said["answers"].endswith("?"), name
            assert said["answers"].count("?") == 1, name
    assert len(set(REGISTRY.answers.values())) == len(REGISTRY.answers), "two tables that answer the same are one"


def test_entries_name_tables_of_the_page() -> None:
    names = set(shown(Book(page.RESULTS, page.FIGURES)))
    assert set(REGISTRY.computed.values()) <= names
    commands = {*REGISTRY.tables, *REGISTRY.computed, *REGISTRY.aliases}
    assert names <= commands, "every name on the page is a command"
    assert set(REGISTRY.aliases.values()) <= commands
    for name, held in REGISTRY.tables.items():
        assert held.shows in names, name


def command(script: str) -> Callable[[list[str]], None]:
    module = importlib.import_module(script.removesuffix(".py"))
    return functools.partial(module.main, module.TOOL) if hasattr(module, "TOOL") else module.main


@pytest.mark.parametrize("name", [name for name, held in REGISTRY.tables.items() if held.arguments])
def test_scripts_know_what_they_are_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for what they do not know they end with a usage message, which is 2; here they only miss a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    held = REGISTRY.tables[name]
    with pytest.raises(SystemExit, match="measures a CUDA GPU, and torch sees none here"):
        command(held.script)(list(held.arguments))


def test_every_entry_gives_rows_from_its_own_file(tmp_path: Path) -> None:
    for file in REGISTRY.files:
        out = tmp_path / file
        out.mkdir()
        for name in (file, *(["paper.json"] if file == "second.json" else [])):
            shutil.copyfile(page.RESULTS / REGISTRY.on_page(name), out / name)
        tables = shown(Book(page.RESULTS, page.FIGURES, REGISTRY.results(out)))
        for name, held in REGISTRY.tables.items():
            if held.file == file:
                assert tables[held.shows].rows, f"{name} of {file}"


@pytest.mark.parametrize("script", HELD["scripts"])
def test_options_are_the_scripts_own(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        command(script)(["--help"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  -")]
    has = {word.rstrip(",") for words in lines for word in words[:2] if word.startswith("--")}
    assert has - set(ENDS_EARLY) == set(REGISTRY.options(script))
