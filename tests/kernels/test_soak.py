"""The soak (`tests/gpu/soak.py`) on small cases of the CPU: what it draws, what it says, and that it sees a wrong score."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import soak_cases
import truth
from places import TESTS

SCRIPT = TESTS / "gpu" / "soak.py"
OPERATORS = set(soak_cases.MAKERS)


def test_a_seed_says_everything() -> None:
    first, again = (soak_cases.case_of(11, "cpu", soak_cases.SMALL) for _ in range(2))
    assert str(first) == str(again)
    assert str(soak_cases.case_of(12, "cpu", soak_cases.SMALL)) != str(first)


def test_every_kind_is_drawn() -> None:
    cases = [soak_cases.case_of(seed, "cpu", soak_cases.SMALL) for seed in range(400)]
    assert {case.about[0] for case in cases} == OPERATORS
    assert {case.about[1] for case in cases if case.about[0] == "scores"} == set(soak_cases.LAYOUTS)
    said = {word for case in cases for word in case.about}
    assert {"winners", "NaN", "float queries", "query_mask", "document_lengths", "int8 token affine", "fp8 document"} <= said
    assert {"float16", "bfloat16", "float32", "auto", "csr", "atomic", "unified"} <= said
    assert any(" 0 queries" in word or " 0 documents" in word or word.startswith("0 x") or " x 0 " in word for word in said)


@pytest.mark.parametrize("size", [soak_cases.SMALL, soak_cases.LARGE], ids=["small", "large"])
def test_no_case_is_larger_than_its_size(size) -> None:
    for seed in range(2000):
        draw = soak_cases.Draw(seed, "cpu", size)
        for own in (False, True):
            (count, asked), (documents, tokens) = draw.shapes(own, winners=True)
            assert count * asked * documents * tokens <= size.cells
            assert (count if own else 1) * documents * tokens * draw.d <= size.values
            assert count * documents * asked <= size.winners
            assert count * documents * asked * draw.d <= size.gathered


@pytest.mark.slow
def test_a_short_soak_on_the_cpu(tmp_path) -> None:
    out = tmp_path / "soak.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--device",
        "cpu",
        "--cases",
        "150",
        "--threads",
        "2",
        "--seed",
        "5",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert (found["cases"], found["seed"], found["wrong"]) == (150, 5, None)
    assert sum(found["counts"].values()) == 150
    assert {kind.split(", ")[0] for kind in found["counts"]} == OPERATORS
    assert [one.name for one in tmp_path.iterdir()] == ["soak.json"]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("MAXSIM_CACHE", "")
    spec.loader.exec_module(module)
    with warnings.catch_warnings():
        yield module


def _wrong_in_the_last(*given: Any, **options: Any) -> Any:
    """Scores whose last document is one unit too much."""
    found = _right(*given, **options)
    scores = found[0] if isinstance(found, tuple) else found
    if scores.numel():
        scores.view(-1)[-1] += 1.0
    return found


_right = truth.maxsim


@pytest.mark.slow
def test_a_wrong_score_stops_it_and_its_seed_repeats_it(soak, monkeypatch, tmp_path, capsys) -> None:
    out: Path = tmp_path / "soak.json"
    monkeypatch.setattr(truth, "maxsim", _wrong_in_the_last)
    assert soak.main(["--device", "cpu", "--cases", "200", "--threads", "2", "--out", str(out)]) == 1
    found = json.loads(out.read_text())
    seed = found["wrong"]["seed"]
    assert found["wrong"]["case"].startswith(f"seed {seed}: ")
    assert found["wrong"]["error"].startswith("AssertionError: ")
    assert found["cases"] < 200  # it stopped
    assert f"again: --only {seed}" in capsys.readouterr().out
    assert soak.main(["--device", "cpu", "--only", str(seed)]) == 1
    monkeypatch.setattr(truth, "maxsim", _right)
    assert soak.main(["--device", "cpu", "--only", str(seed)]) == 0


def test_a_case_without_memory_is_run_again(soak, monkeypatch) -> None:
    monkeypatch.setattr(soak, "PAUSE_SECONDS", 0.0)
    left = [2]

    def run(most: int) -> str:
        left[0] -= 1
        if left[0] + most >= 0:
            raise torch.OutOfMemoryError("no room")
        return "done"

    assert soak.with_room(lambda: run(0)) == "done"
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        soak.with_room(lambda: run(1000))


def test_without_a_gpu_it_says_so(soak, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert soak.main(["--minutes", "1"]) == 2
    assert capsys.readouterr().out == "needs an NVIDIA GPU, or --device cpu\n"
