"""The line about the expected time: only before long work, counted from what will be scored, and never from users' functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maxsim_eval.api import evaluate
from maxsim_eval.cache.embeddings import cached_embeddings
from maxsim_eval.planning import estimating, rates
from maxsim_eval.planning.costs import PathRates, Rate, Sizes
from maxsim_eval.planning.estimating import estimate
from maxsim_eval.quantities import about_text
from maxsim_eval.scoring.candidates import Candidates
from maxsim_eval.scoring.own_functions import find_paths
from maxsim_eval.scoring.stream import UnitScores
from maxsim_eval.types import Task
from maxsim_kernels import Packed


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A machine of 10^6 operations a second, 10^5 for fp32; which paths were measured."""
    measured: list[list[str]] = []

    def measure(sizes: Any, names: Any, *_: Any) -> Any:
        measured.append(list(names))
        return {name: PathRates(Rate(1e5 if name == "fp32" else 1e6)) for name in names}, Rate(1e12), None

    monkeypatch.setattr(estimating, "path_rates", measure)
    monkeypatch.setattr(estimating, "LEAST_OPERATIONS", {"cpu": 1, "cuda": 1})
    return measured


def never(queries: Packed, documents: Packed) -> torch.Tensor:
    raise AssertionError("run for an estimate")


def test_a_small_job_is_not_measured_and_nothing_is_said(
    demo_home: Path, demo_task: Task, capfd: pytest.CaptureFixture[str]
) -> None:
    evaluate(demo_task, "lexical", ["fp32", "fp16"], cache_dir=demo_home / "cache", quiet=False)
    assert "scoring takes" not in capfd.readouterr().err


def test_the_line_is_arithmetic_over_the_rates(demo_home: Path, demo_task: Task, slow: list[list[str]]) -> None:
    found = cached_embeddings(demo_task, "lexical", demo_home / "cache")
    queries = found.queries.load()
    seconds = 2 * int(queries.lengths.sum()) * found.documents.tokens * 128 / 1e5
    line = estimate(find_paths(["fp32", "int8", ("mine", never)]), queries, found.documents, device="cpu", k=10)
    assert line is not None
    assert slow == [["fp32", "int8"]]
    assert line.startswith(
        f"scoring takes about {about_text(seconds * 1.1)} at the rates measured now (fp32 {about_text(seconds)}, int8 "
    )
    assert "; mine not counted)" in line
    resumed = estimate(find_paths(["fp32"]), queries, found.documents, device="cpu", k=10, resumed=True)
    assert resumed is not None
    assert resumed.startswith("scoring takes less than ")
    # Reranking: a hundredth of the pairs, of documents of every length.
    rows = np.arange(0, 300, 100, dtype=np.int64)
    few = Candidates("few", np.arange(0, 3 * 40 + 1, 3, dtype=np.int64), np.tile(rows, 40))
    lengths = found.documents.lengths()
    part = int(lengths[rows].sum()) / int(lengths.sum())
    listed = estimate(find_paths(["fp32"]), queries, found.documents, device="cpu", k=10, candidates=few)
    assert listed is not None
    assert f"fp32 {about_text(seconds * part)}" in listed
    assert estimate(find_paths([("mine", never)]), queries, found.documents, device="cpu", k=10) is None


@pytest.mark.usefixtures("every_bar")
def test_it_comes_once_before_scoring_on_stderr_and_not_when_quiet(
    demo_home: Path, demo_task: Task, slow: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    evaluate(demo_task, "lexical", ["fp32", "fp16"], cache_dir=demo_home / "cache", quiet=True)
    said = capfd.readouterr()
    assert (said.out, said.err, slow) == ("", "", [])
    evaluate(demo_task, "lexical", ["fp32", "fp16"], cache_dir=demo_home / "cache")
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("scoring takes about") == 1
    assert said.err.index("scoring takes about") < said.err.index("fp32:")


def test_measured_rates_give_a_line_too(demo_home: Path, demo_task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "LEAST_OPERATIONS", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(estimating, "LEAST_SECONDS", 0)
    found = cached_embeddings(demo_task, "lexical", demo_home / "cache")
    line = estimate(find_paths(["fp32", "int8"]), found.queries.load(), found.documents, device="cpu", k=10)
    assert line is not None
    assert re.fullmatch(
        r"scoring takes about [\d.e-]+ s at the rates measured now \(fp32 [\d.e-]+ s, int8 [\d.e-]+ s\), .*", line
    )
    monkeypatch.setattr(estimating, "LEAST_SECONDS", 1e9)
    assert estimate(find_paths(["int8"]), found.queries.load(), found.documents, device="cpu", k=10) is None


def test_real_queries_are_scored_where_there_are_some(
    demo_home: Path, demo_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a lexical encoder repeat their tokens, which a CPU scores once; 512 of them at most, evenly chosen."""
    asked = []

    def units(name: str, queries: Packed, corpus: Any, asked_of: Any, spans: Any, *, keep: bool) -> Any:
        asked.append(queries)
        yield UnitScores(0, 0, np.zeros(0), None, {"read": 0.5, "prepare": 0.125, "score": 0.25, "topk": 1.0, "total": 2.0})

    monkeypatch.setattr(rates, "score_units", units)
    found = cached_embeddings(demo_task, "lexical", demo_home / "cache")
    few, documents = found.queries.load(), found.documents
    sizes = Sizes(2000, documents.documents, 2000, documents.tokens, documents.dim, "float32")
    rates.path_rates(sizes, ["fp16"], documents, "cpu", 5, few)
    assert all(queries is few for queries in asked)
    many = Packed(torch.arange(2000.0)[:, None].expand(2000, documents.dim), torch.arange(2001))
    rates.path_rates(sizes, ["fp16"], documents, "cpu", 5, many)
    assert len(asked[-1]) == 512
    assert asked[-1].values[[0, 1, -1], 0].tolist() == [0, 3, 1999]
    rates.path_rates(sizes, ["fp16"], documents, "cpu", 5)
    assert len(asked[-1]) == 512
    assert (asked[-1].lengths == 1).all(), "made up, of the mean length"
