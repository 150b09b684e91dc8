"""Damaged scoring paths through the real commands: an evaluation of a defect, then `gate` with the committed baseline, must fail."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import damaged_scorers as scorers
from maxsim_eval.report.result_json import from_json
from maxsim_eval.report.words import verdicts
from maxsim_eval.scoring import job
from maxsim_eval.scoring.paths import PATHS, ScoringPath
from maxsim_eval.types import Run
from maxsim_kernels import Int8Tokens
from places import TESTS

GATE, DATA = 1, 3
BASELINES = TESTS / "baselines"
SCORERS = Path(scorers.__file__)


def scored_by(name: str, function: str) -> ScoringPath:
    """A path that scores by a damaged function what it scored before."""
    return replace(PATHS[name], score=getattr(scorers, function))


def with_scales(change: Callable[[torch.Tensor], torch.Tensor]) -> ScoringPath:
    """INT8 documents whose scales are not theirs."""
    path = PATHS["int8"]

    def documents(*given: Any) -> object:
        tokens = path.documents(*given)
        assert isinstance(tokens, Int8Tokens)
        return Int8Tokens(tokens.codes, change(tokens.scales), granularity=tokens.granularity)

    return replace(path, documents=documents)


# What is damaged, in which path's place, and checks of it that must fail.
DAMAGES: dict[str, tuple[str, Callable[[], ScoringPath], set[str]]] = {
    "bf16 accumulation": (
        "bf16",
        lambda: scored_by("bf16", "bf16_sums"),
        {"bf16: top-10 overlap", "bf16: max rel error", "bf16: Spearman, mean"},
    ),
    "bf16 accumulation, said to be fp16": (
        "fp16",
        lambda: scored_by("fp16", "bf16_sums"),
        {"fp16: top-10 overlap", "fp16: max rel error", "fp16: Spearman, mean"},
    ),
    "zero padding": ("fp16", lambda: scored_by("fp16", "zero_padding"), {"fp16: max rel error"}),
    "int8 with the scales of other tokens": (
        "int8",
        lambda: with_scales(lambda scales: scales.roll(1)),
        {"int8: |delta nDCG@10|", "int8: Spearman, mean", "int8: max rel error"},
    ),
    "int8 with a scale that is off by a factor": (
        "int8",
        lambda: with_scales(lambda scales: scales * 1.05),  # every ranking stays as it was
        {"int8: max rel error"},
    ),
    "shuffled ids": (
        "fp16",
        lambda: scored_by("fp16", "shuffled_ids"),
        {"fp16: |delta nDCG@10|", "fp16: |delta Recall@10|", "fp16: Spearman, mean", "fp16: top-10 overlap"},
    ),
}


@pytest.fixture(scope="module")
def home(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo collection and its embeddings."""
    return Path(demo.copy(tmp_path_factory.mktemp("gate"), "datasets", "embeddings_cache"))


@pytest.fixture
def gated(home: Path, cli: Any, tmp_path: Path) -> Callable[..., tuple[int, list[str], dict[str, Any]]]:
    """`gated(paths)`: `demo`, then `gate`; exit code, what failed, and the result."""

    def evaluate(paths: str = "fp32,fp16,int8") -> tuple[int, list[str], dict[str, Any]]:
        report = tmp_path / "report"
        cli("demo", "--paths", paths, "--quiet", "--out", report, cwd=home).fine()
        outcome = cli("gate", report / "result.json", "--baseline", BASELINES / "demo-lexical.json", cwd=home)
        assert outcome.err == ""
        assert ("gate passed" in outcome.out) == (outcome.code == 0)
        failed = [line.removeprefix("FAIL  ") for line in outcome.out.splitlines() if line.startswith("FAIL")]
        result = json.loads((report / "result.json").read_text(encoding="utf-8"))
        return outcome.code, [line.rpartition(", need")[0].rpartition(": ")[0] for line in failed], result

    return evaluate


@pytest.fixture
def importable(home: Path) -> Iterator[None]:
    """The damaged scorers as a module of the current folder."""
    target = home / "damaged_scorers_of_a_user.py"  # no name that is importable
    target.write_bytes(SCORERS.read_bytes())
    yield
    target.unlink()


def test_healthy_paths_pass(gated: Any, importable: None) -> None:
    every = ",".join([*PATHS, "python:damaged_scorers_of_a_user:sound"])
    code, failed, result = gated(every)
    assert (code, failed) == (0, [])
    assert set(result["paths"]) == {*PATHS, "python:damaged_scorers_of_a_user:sound"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_path_is_caught(damage: str, gated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, make, needed = DAMAGES[damage]
    monkeypatch.setitem(PATHS, name, make())
    code, failed, _ = gated(f"fp32,fp16,int8,{name}")
    assert code == GATE
    assert needed <= set(failed), failed
    assert {line.partition(":")[0] for line in failed} == {name}, "a sound path is blamed"


@pytest.mark.parametrize("function", ["bf16_sums", "zero_padding", "shuffled_ids"])
def test_a_users_damaged_function_is_caught(function: str, gated: Any, importable: None) -> None:
    path = f"python:damaged_scorers_of_a_user:{function}"
    code, failed, result = gated(f"fp32,fp16,int8,{path}")
    assert code == GATE
    assert failed
    refused = [line for line in verdicts(from_json(json.dumps(result), "result.json")) if "the gate would fail" in line]
    assert [line.startswith(f"{path}: ") for line in refused] == [True], "and the report says it, too"
    assert all(line.startswith(f"{path}: ") for line in failed)
    assert f"{path}: max rel error" in failed


def test_ids_that_are_shuffled_for_every_path_are_caught(gated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All paths agree, so parity says nothing: the fall below the baseline does."""
    to_run = job.to_run

    def shuffled(name: str, scored: Any, plan: Any) -> Run:
        ids = [*plan.document_ids[1:], plan.document_ids[0]]
        return to_run(name, scored, replace(plan, document_ids=ids))

    monkeypatch.setattr(job, "to_run", shuffled)
    code, failed, _ = gated()
    assert code == GATE
    assert "fp32: nDCG@10 against the baseline" in failed
    assert not any(line.startswith(("fp16", "int8")) for line in failed)


def without(result: dict[str, Any], keys: tuple[str, ...], null: bool) -> dict[str, Any]:
    """The result with an entry gone, or null."""
    changed = copy.deepcopy(result)
    place = changed
    for key in keys[:-1]:
        place = place[key]
    assert keys[-1] in place, keys
    if null:
        place[keys[-1]] = None
    else:
        del place[keys[-1]]
    return changed


PARITY = (
    (),
    ("spearman",),
    ("spearman", "mean"),
    ("spearman", "constant_in_one"),
    ("overlap",),
    ("overlap", "@10"),
    ("max_rel_error",),
    ("mismatched_finite",),
)
GUARDED = (
    *(("paths", "fp16", "parity", *keys) for keys in PARITY),
    ("paths", "int8", "parity", "overlap", "@20"),
    ("paths", "fp16", "metrics", "nDCG@10"),
    ("paths", "fp16", "metrics", "Recall@10"),
    *(("paths", "fp32", "metrics", name) for name in ("nDCG@10", "Recall@10", "Recall@100", "MAP@100")),
    ("paths", "fp32"),
    ("paths", "int8"),
    ("reference",),
    ("k",),
    ("encoder", "name"),
    ("encoder", "revision"),
    *(("task", key) for key in ("source", "dataset", "split", "queries", "documents", "judged_pairs")),
)


def test_no_entry_that_is_missing_or_null_passes(demo: Any, cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ("gate", file, "--baseline", BASELINES / "demo-lexical.json", "--quiet")
    file.write_text(json.dumps(demo.result), encoding="utf-8")
    cli(*words, cwd=tmp_path).fine()
    passed = []
    for keys in GUARDED:
        for null in (False, True):
            file.write_text(json.dumps(without(demo.result, keys, null)), encoding="utf-8")
            outcome = cli(*words, cwd=tmp_path)
            assert outcome.code in (0, GATE, DATA), outcome.err
            if outcome.code == 0:
                passed.append((keys, null))
    # Without the entry the reference is fp32, as it was: docs/result.md. Everything else is guarded.
    assert passed == [(("reference",), False)]


@pytest.mark.slow
@pytest.mark.scifact
def test_damage_is_caught_on_real_data(scifact_data: Path, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SciFact's abstracts are so long that none has only negative similarities to a query token: zero padding changes nothing there."""
    limits = ("--limit-queries", "60", "--limit-documents", "600")
    given = ("beir", "scifact", "--data-dir", scifact_data, "--encoder", "lexical", *limits, "--quiet", "--out", "report")
    words = ("gate", "report/result.json", "--baseline", "baseline.json")
    cli(*given, "--paths", "fp32,fp16,int8,bf16", cwd=tmp_path).fine()
    for option in (("--update-baseline",), ()):
        cli(*words, *option, cwd=tmp_path).fine()
    for damage, (name, make, needed) in DAMAGES.items():
        if damage == "zero padding":
            continue
        with monkeypatch.context() as patched:
            patched.setitem(PATHS, name, make())
            cli(*given, "--paths", "fp32,fp16,int8,bf16", cwd=tmp_path).fine()
        outcome = cli(*words, cwd=tmp_path)
        assert outcome.code == GATE, f"{damage}: {outcome.out}"
        for what in needed:
            assert f"FAIL  {what}: " in outcome.out, f"{damage}: {outcome.out}"
