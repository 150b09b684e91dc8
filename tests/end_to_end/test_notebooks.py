"""The notebooks run from top to bottom offline, on small data and on a Result they are pointed at, and are committed without outputs."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest

from places import ROOT

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]
# matplotlib logs that it builds its list of fonts, where it does so for the first time and that takes a while.
QUIET = """
import logging, warnings, torch
warnings.simplefilter("error")
logging.getLogger("matplotlib").setLevel("ERROR")
torch.set_num_threads(1)
"""


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def execute(path: Path, monkeypatch: pytest.MonkeyPatch, **environment: str) -> list[Any]:
    """The outputs of each of a notebook's code cells; warnings are errors in it, and anything on stderr fails."""
    from nbclient import NotebookClient

    for name in ("MAXSIM_RESULT", "MAXSIM_TEST_DATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    notebook = read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(QUIET))  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [cell.outputs for cell in notebook.cells[1:] if cell.cell_type == "code"]
    said = [part.text for parts in outputs for part in parts if part.output_type == "stream"]
    assert said == [], "cells print nothing, and nothing is written to stderr"
    return outputs


def shown(outputs: list[Any]) -> list[dict[str, str]]:
    """What each cell shows, by MIME type."""
    assert all(len(parts) == 1 and parts[0].output_type == "execute_result" for parts in outputs)
    return [dict(parts[0].data) for parts in outputs]


def test_the_three_notebooks_are_there() -> None:
    assert NAMES == ["beir_parity", "int8_fidelity", "real_mm_rag_parity"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_no_outputs_are_committed(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [], f"{path.name}: cell {cell.id} has outputs; CONTRIBUTING.md says how to clear them"
            assert cell.execution_count is None, f"{path.name}: cell {cell.id} has an execution count"
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert set(notebook.metadata.get("language_info", {})) <= {"name"}, "a Python version of somebody's machine"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_notebooks_hold_no_logic(path: Path) -> None:
    """Imports, calls and assignments; what is more belongs into the package, where it is tested."""
    for cell in read(path).cells:
        if cell.cell_type == "code":
            kinds = {type(statement) for statement in ast.parse(cell.source).body}
            assert kinds <= {ast.Import, ast.ImportFrom, ast.Expr, ast.Assign}, cell.source
            assert len(cell.source.splitlines()) <= 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_notebooks_run_offline_on_small_data(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = shown(execute(path, monkeypatch, MAXSIM_TEST_DATA=str(tmp_path)))
    pictures = [data["image/svg+xml"] for data in found if "image/svg+xml" in data]
    pages = [data["text/markdown"] for data in found if "text/markdown" in data]
    assert len(pictures) + len(pages) == len(found)
    assert len(pictures) >= 4
    drawn = "".join(pictures)
    assert "1 - Spearman" in drawn
    assert "not in th" not in drawn, "a figure found nothing to draw"
    assert "generated" in pages[0] if path.stem == "real_mm_rag_parity" else "demo/small" in pages[0]
    if path.stem == "real_mm_rag_parity":
        assert pages[0].count("Equivalent in all 11 metrics") == 4, "its text says so of both paths of both sets"


def test_a_notebook_draws_the_result_it_is_pointed_at(demo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file and a folder, one of them said to be ArguAna: the paper has figures of that."""
    result = demo.result
    result["task"] |= {"source": "beir", "dataset": "arguana"}
    for path in result["paths"].values():
        path["metrics"]["nDCG-exp@10"] = 0.123456
    (tmp_path / "mine.json").write_text(json.dumps(result), encoding="utf-8")
    named = os.pathsep.join([str(tmp_path / "mine.json"), str(demo.results)])
    (path,) = (path for path in NOTEBOOKS if path.stem == "beir_parity")
    found = shown(execute(path, monkeypatch, MAXSIM_RESULT=named))
    assert "beir/arguana test: 40 queries" in found[0]["text/markdown"]
    assert "demo/small test: 40 queries" in found[0]["text/markdown"]
    assert "| nDCG-exp@10 | ColBERTv2 | fused | 0.3308 | 0.1235 (fp16) | 1406 |" in found[2]["text/markdown"]
    assert "diamonds: the paper" in found[3]["image/svg+xml"]


@pytest.mark.scifact
@pytest.mark.usefixtures("minilm")
def test_the_fidelity_notebook_takes_scifact_where_it_is(scifact_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = (path for path in NOTEBOOKS if path.stem == "int8_fidelity")
    found = shown(execute(path, monkeypatch, MAXSIM_TEST_DATA=str(scifact_data.parent)))
    assert "beir/scifact test: 30 queries, 100 documents" in found[0]["text/markdown"]
    assert "d = 384" in found[0]["text/markdown"]
