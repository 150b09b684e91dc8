"""Which bound a difference is held to, and that a Result's statistics are those of its own per-query values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from maxsim_eval.comparison.thresholds import class_of, load_thresholds
from maxsim_eval.comparison.verdicts import bounds_of, with_statistics
from maxsim_eval.report.result_json import jsonable
from maxsim_eval.types import PathResult

QUERIES = [f"q{number}" for number in range(40)]


def path(values: Mapping[str, Any], compared: bool = True) -> PathResult:
    table = {metric: dict(zip(QUERIES, row, strict=False)) for metric, row in values.items()}
    return PathResult({}, table, {}, parity={"reference": "fp32", "delta": {}} if compared else None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp16", "exact"),
        ("fused-fp32", "exact"),
        ("python:my.module:score", "exact"),
        ("bf16", "bf16"),
        ("int8", "int8"),
        ("int8-corpus", "int8"),
        ("fp8", "fp8"),
        ("bm25", None),
    ],
)
def test_the_class_of_a_path(name: str, expected: str | None) -> None:
    assert class_of(name, load_thresholds()["classes"]) == expected


def test_the_bound_of_a_metric() -> None:
    metrics = [
        "nDCG@10",
        "nDCG@1",
        "MAP@100",
        "RR@10",
        "Bpref",
        "Recall@10",
        "R@100",
        "Success@5",
        "AnyHit@10",
        "Rprec",
        "Mine",
    ]
    assert bounds_of("fp16", metrics) == {
        "nDCG@10": 5e-4, "nDCG@1": 5e-4, "MAP@100": 5e-4, "RR@10": 5e-4, "Bpref": 5e-4, "Recall@10": 1.2e-3, "R@100": 1.2e-3,
        "Success@5": 1.2e-3, "AnyHit@10": 1.2e-3, "Rprec": 1.2e-3, "Mine": 5e-4,
    }  # fmt: skip
    assert set(bounds_of("int8-document", metrics).values()) == {3e-3}, "that class lists nDCG@10 alone"
    assert bounds_of("bf16", ["R@20", "P@5"]) == {"R@20": 2e-3, "P@5": 2e-3}
    assert bounds_of("some other tool", metrics) == bounds_of("fp16", metrics), "the strictest"


def test_every_class_of_the_packaged_thresholds_has_a_bound_for_any_metric() -> None:
    for entry in load_thresholds()["classes"].values():
        assert "nDCG@10" in entry["delta"]
    assert "Recall@10" in load_thresholds()["classes"]["exact"]["delta"]


def test_fixed_case_against_scipy_and_by_hand() -> None:
    base = np.linspace(0.2, 0.9, 40)
    shift = np.zeros(40)
    shift[:5] = (0.1, 0.2, -0.05, 0.1, 0.3)
    paths = {
        "fp32": path({"nDCG@10": base, "R@10": base}, compared=False),
        "fp16": path({"nDCG@10": base, "R@10": base}),
        "int8": path({"nDCG@10": base + shift, "R@10": base - 0.25}),
    }
    found = with_statistics(paths, "fp32")
    assert found["fp32"].parity is None
    settings = {"level": 0.95, "resamples": 10_000, "seed": 0, "correction": "holm", "comparisons": 4}
    entries = {}
    for name in ("fp16", "int8"):
        parity = found[name].parity
        assert parity is not None
        assert parity["reference"] == "fp32", "what was there stays"
        assert parity["statistics_settings"] == settings
        entries[name] = parity["statistics"]
    same = entries["fp16"]["nDCG@10"]
    assert (same["changed"], same["mean"], same["low"], same["high"], same["p_value"]) == (0, 0.0, 0.0, 0.0, 1.0)
    assert (same["bound"], same["verdict"]) == (5e-4, "equivalent")
    assert same["changed_share_at_most"] == pytest.approx(1 - 0.05 ** (1 / 40))

    moved = entries["int8"]["nDCG@10"]
    differences = (base + shift) - base
    assert moved["mean"] == pytest.approx(differences.mean())
    assert moved["sd"] == pytest.approx(np.std(differences, ddof=1))
    exact = stats.permutation_test((differences[:5],), np.mean, permutation_type="samples", n_resamples=32, vectorized=True)
    assert moved["p_value"] == pytest.approx(exact.pvalue)  # of 32 patterns: the other queries did not change
    tail = stats.norm.cdf(math.sqrt(40 / 39) * stats.t.ppf(0.025, 39))
    theirs = stats.bootstrap(
        (differences,), np.mean, n_resamples=10_000, confidence_level=1 - 2 * tail, method="percentile", rng=3
    )
    assert [moved["low"], moved["high"]] == pytest.approx(list(theirs.confidence_interval), abs=0.002)
    assert (moved["bound"], moved["verdict"]) == (3e-3, "inconclusive")
    assert moved["queries_needed"] > 40

    fell = entries["int8"]["R@10"]
    assert fell["verdict"] == "different"
    assert fell["low"] == pytest.approx(fell["high"]) == pytest.approx(-0.25)
    # Holm over all four: p in order, times 4, 3, 2, 1, never falling.
    ordered = sorted((one for table in entries.values() for one in table.values()), key=lambda one: one["p_value"])
    assert ordered[0] == fell
    assert fell["p_adjusted"] == pytest.approx(4 * fell["p_value"])
    assert ordered[1]["p_adjusted"] == pytest.approx(max(4 * fell["p_value"], 3 * moved["p_value"]))
    assert [one["p_adjusted"] for one in ordered[2:]] == [1.0, 1.0]


def test_what_cannot_be_paired_is_left_out() -> None:
    base = np.full(40, 0.5)
    paths = {
        "fp32": path({"A": base, "B": base, "C": base, "D": base, "E": []}, compared=False),
        "fp16": path({"A": base, "B": base[:39], "C": [*base[:39], math.nan], "E": []}),
    }
    parity = with_statistics(paths, "fp32")["fp16"].parity
    assert parity is not None
    assert list(parity["statistics"]) == ["A"]
    assert parity["statistics_settings"]["comparisons"] == 1
    nothing = with_statistics({"fp32": path({}, compared=False), "fp16": path({})}, "fp32")["fp16"].parity
    assert nothing is not None
    assert nothing["statistics"] == {}
    assert nothing["statistics_settings"]["comparisons"] == 0


def test_a_single_query_has_an_interval_without_ends() -> None:
    paths = {"fp32": path({"A": [0.5]}, compared=False), "fp16": path({"A": [0.25]})}
    parity = jsonable(with_statistics(paths, "fp32")["fp16"].parity)
    entry = parity["statistics"]["A"]
    assert (entry["low"], entry["high"], entry["sd"], entry["verdict"]) == (None, None, None, "inconclusive")
    assert entry["mean"] == -0.25


def test_bounds_by_another_name() -> None:
    base = np.full(40, 0.5)
    paths = {"one": path({"A": base}, compared=False), "two": path({"A": base + 0.002})}
    verdicts = []
    for kinds in (None, {"two": "int8"}):
        parity = with_statistics(paths, "one", kinds)["two"].parity
        assert parity is not None
        verdicts.append(parity["statistics"]["A"]["verdict"])
    assert verdicts == ["different", "equivalent"]
