"""Input that is odd rather than broken: it is said, or refused by name, and never changes a figure in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.printing import printable

USAGE, DATA = 2, 3
LEXICAL = ("--encoder", "lexical", "--paths", "fp32", "--k", "3", "--quiet")


def local(folder: Path, name: str = "mine") -> Path:
    return folder / "datasets" / "local" / name


def test_queries_judged_by_negative_grades_are_evaluated(collection: Callable[..., Path], start: Any, tmp_path: Path) -> None:
    qrels = (("q1", "d1", -2), ("q1", "d5", -3), ("q2", "d4", 1), ("q3", "d6", 1))
    collection(local(tmp_path), qrels=qrels)
    script = Path(__file__).resolve().parents[2] / "evaluate.py"
    process = start([script, "local", "mine", *LEXICAL], tmp_path)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    (file,) = tmp_path.rglob("result.json")
    result = json.loads(file.read_text())
    assert result["paths"]["fp32"]["per_query"]["nDCG@10"] == {"q1": 0.0, "q2": 1.0, "q3": 1.0}
    assert any("1 of 3 judged queries have no relevant document, first 'q1'" in line for line in result["task"]["warnings"])


def test_judgements_without_a_relevant_document(collection: Callable[..., Path], cli: Any, clean: Any, tmp_path: Path) -> None:
    collection(local(tmp_path), qrels=(("q1", "d1", 0), ("q2", "d4", -1)))
    said = ("test.tsv: none of the 2 judged queries has a relevant document", "no metric would be above 0")
    cli("local", "mine", *LEXICAL, cwd=tmp_path).refused(DATA, *said)
    clean(tmp_path)
    run = tmp_path / "x.trec"
    run.write_text("q1 Q0 d1 1 2.0 x\n")
    qrels = tmp_path / "datasets" / "local" / "mine" / "qrels" / "test.tsv"
    cli("metrics", qrels, run, cwd=tmp_path).refused(DATA, *said)


def test_one_rule_for_conflicting_judgements(collection: Callable[..., Path], cli: Any, tmp_path: Path) -> None:
    folder = collection(local(tmp_path), qrels=(("q1", "d1", 1), ("q1", "d2", 3), ("q1", "d2", 0), ("q1", "d5", 0)))
    cli("local", "mine", *LEXICAL, cwd=tmp_path).fine()
    (file,) = tmp_path.rglob("result.json")
    result = json.loads(file.read_text())
    (run,) = tmp_path.rglob("fp32.trec")
    found = cli("metrics", folder / "qrels" / "test.tsv", run, "--metrics", "nDCG@10", "--json", cwd=tmp_path).fine()
    assert (
        json.loads(found.out)["runs"]["fp32.trec"]["metrics"]["nDCG@10"] == result["paths"]["fp32"]["metrics"]["nDCG@10"] == 1.0
    )
    sentence = "1 pairs are judged twice with different scores; the later score was taken"
    assert sentence in found.err
    assert any(sentence in line for line in result["task"]["warnings"])


@pytest.mark.parametrize("names", [",,", " ", "", ","])
def test_metrics_without_a_name(names: str, demo: Any, cli: Any, tmp_path: Path) -> None:
    cli("demo", "--metrics", names, cwd=tmp_path).refused(USAGE, f"--metrics: got {names!r}, which names none")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["cpu:99", "cpu:", "cuda:x", "cuda:-1", "cuda:0:1", "cuda:99999999999999999999", "CPU"])
def test_devices_that_are_none(device: str, cli: Any, tmp_path: Path) -> None:
    cli("demo", "--device", device, cwd=tmp_path).refused(USAGE, repr(device), "need auto, cpu, cuda or cuda:<number>")


@pytest.mark.parametrize("name", ["scifact\n::error::x", "a\x1b[31m", "a\rb"])
def test_names_that_no_dataset_has(name: str, cli: Any, tmp_path: Path) -> None:
    cli("beir", name, "--encoder", "lexical", cwd=tmp_path).refused(USAGE, "holds the control character", printable(name))
