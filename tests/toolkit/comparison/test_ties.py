"""Bounds over ties: by hand, and against every order there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsim_eval.comparison.metrics import evaluate_run
from maxsim_eval.comparison.ties import mean_bounds, tie_bounds, tie_orders
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.types import Run

METRICS = ("nDCG@3", "nDCG", "Recall@2", "MAP@4", "MAP", "MRR@2", "MRR", "P@3", "Success@1", "Rprec", "Bpref", "AnyHit@2", "nDCG-exp@3", "SetP", "SetAP")  # fmt: skip


def run(*scores: float, ordered: bool = False) -> Run:
    """One query `q`; documents a, b, c, ... with these scores."""
    return Run("r", {"q": [(chr(97 + i), score) for i, score in enumerate(scores)]}, ordered)


def test_by_hand() -> None:
    # a alone, then b, c, d tied: the relevant d is second at best and fourth at worst.
    found = tie_bounds(run(2.0, 1.0, 1.0, 1.0), {"q": {"d": 1}}, ["nDCG@10", "MRR", "AP", "R@2", "nDCG@1"])
    assert found["nDCG@10"]["q"] == pytest.approx((1 / math.log2(5), 1 / math.log2(3)))
    assert found["MRR"]["q"] == pytest.approx((1 / 4, 1 / 2))
    assert found["AP"]["q"] == pytest.approx((1 / 4, 1 / 2))
    assert found["R@2"]["q"] == (0.0, 1.0)
    assert found["nDCG@1"]["q"] == (0.0, 0.0)


def test_grades_order_a_group() -> None:
    best, worst = tie_orders(run(1.0, 1.0, 1.0, 1.0), {"q": {"a": 1, "b": -1, "d": 3}})
    assert [document for document, _ in best.rankings["q"]] == ["d", "a", "c", "b"]
    assert [document for document, _ in worst.rankings["q"]] == ["b", "c", "a", "d"]
    assert best.ordered
    assert worst.ordered


def test_scores_that_float32_cannot_tell_are_ties_as_for_trec_eval() -> None:
    qrels = {"q": {"b": 1}}
    assert tie_bounds(run(1.0, 1.0 - 1e-12), qrels, ["MRR"])["MRR"]["q"] == (0.5, 1.0)
    assert tie_bounds(run(1.0, 1.0 - 1e-6), qrels, ["MRR"])["MRR"]["q"] == (0.5, 0.5)
    assert tie_bounds(run(1e300, 2e300), qrels, ["MRR"])["MRR"]["q"] == (0.5, 1.0)


def test_our_runs_keep_their_order_but_for_ties() -> None:
    qrels = {"q": {"a": 1}}
    assert tie_bounds(run(1.0, 2.0, ordered=True), qrels, ["MRR"])["MRR"]["q"] == (1.0, 1.0)
    assert tie_bounds(run(1.0, 2.0), qrels, ["MRR"])["MRR"]["q"] == (0.5, 0.5)
    assert tie_bounds(run(1.0, 1.0, ordered=True), qrels, ["MRR"])["MRR"]["q"] == (0.5, 1.0)


def test_every_judged_query_has_bounds() -> None:
    found = tie_bounds(run(1.0), {"q": {"a": 1}, "empty": {"a": 1}}, ["MRR"])["MRR"]
    assert found == {"q": (1.0, 1.0), "empty": (0.0, 0.0)}


def orders(scores: list[float]) -> Iterator[Run]:
    """Every order that these scores allow."""
    for places in itertools.permutations(range(len(scores))):
        if all(scores[left] >= scores[right] for left, right in itertools.pairwise(places)):
            yield Run("r", {"q": [(chr(97 + i), scores[i]) for i in places]})


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_order_lies_within_and_the_ends_are_reached(data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=1, max_size=5))
    judged = {chr(97 + i): data.draw(st.sampled_from([None, -1, 0, 1, 1, 2])) for i in range(6)}
    qrels = {"q": {name: grade for name, grade in judged.items() if grade is not None} | {"unfound": 1}}
    bounds = tie_bounds(run(*scores), qrels, METRICS)
    values = [evaluate_run(order, qrels, METRICS) for order in orders(scores)]
    for metric in METRICS:
        found = [value[metric]["q"] for value in values]
        assert bounds[metric]["q"] == (min(found), max(found)), metric


def test_means_are_those_of_every_query_evaluated_again() -> None:
    rankings = {
        "tied": [("a", 1.0), ("b", 1.0), ("c", 0.5)],
        "tied but alike": [("a", 1.0), ("b", 1.0)],
        "apart": [("a", 2.0), ("b", 1.0)],
        "empty": [],
        "not judged": [("a", 1.0), ("b", 1.0)],
    }
    qrels = {"tied": {"b": 1}, "tied but alike": {"c": 1}, "apart": {"b": 1}, "empty": {"a": 1}, "left out": {"a": 0}}
    found_run = Run("r", rankings)
    for metrics in (METRICS, ("nDCG@3",)):
        per_query = evaluate_run(found_run, qrels, [*metrics, "infAP"])
        whole = tie_bounds(found_run, qrels, metrics)
        found = mean_bounds(found_run, qrels, per_query)
        assert list(found) == list(metrics), "infAP has no known bounds"
        for metric, entry in found.items():
            ends = list(whole[metric].values())
            assert entry["low"] == pytest.approx(sum(low for low, _ in ends) / len(ends))
            assert entry["high"] == pytest.approx(sum(high for _, high in ends) / len(ends))
            assert entry["queries_affected"] == sum(low != high for low, high in ends)
            mean = sum(per_query[metric].values()) / len(ends)
            assert entry["low"] - 1e-12 <= mean <= entry["high"] + 1e-12
    assert found["nDCG@3"]["queries_affected"] == 1
    assert mean_bounds(found_run, {"x": {"a": 0}}, evaluate_run(found_run, {"x": {"a": 0}}, ["AnyHit@1"])) == {}


def test_refusals() -> None:
    with pytest.raises(UsageError, match="'infAP': its bounds over ties are not known"):
        tie_bounds(run(1.0), {"q": {"a": 1}}, ["infAP"])
    with pytest.raises(DataError, match="NaN"):
        tie_bounds(run(math.nan), {"q": {"a": 1}})
    with pytest.raises(DataError, match="twice"):
        tie_orders(Run("r", {"q": [("a", 1.0), ("a", 1.0)]}), {})
