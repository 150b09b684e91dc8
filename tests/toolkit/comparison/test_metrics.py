"""Metrics: names, hand-calculated values, ties, omissions, refused input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsim_eval.comparison.metrics import DEFAULT_METRICS, deeper_than, evaluate_run, means, parse_metric
from maxsim_eval.data.trec import ranked
from maxsim_eval.errors import DataError, UnknownNameError, UsageError
from maxsim_eval.types import Run


def own(**rankings: str) -> Run:
    """Our ordered run: one letter a document, all scores the same."""
    return Run("own", {query: [(document, 1.0) for document in text] for query, text in rankings.items()})


def value(run: Run, qrels: dict[str, dict[str, int]], metric: str, query: str = "q") -> float:
    return evaluate_run(run, qrels, [metric])[metric][query]


def test_default_metrics_are_the_reports() -> None:
    assert DEFAULT_METRICS == (
        "nDCG@1", "nDCG@5", "nDCG@10", "nDCG@20", "Recall@5", "Recall@10", "Recall@20", "Recall@100", "MAP@100", "MRR@10",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "canonical", "measure"),
    [
        ("nDCG@10", "nDCG@10", "ndcg_cut_10"),
        ("R@100", "Recall@100", "recall_100"),
        ("AP@100", "MAP@100", "map_cut_100"),
        ("AP", "MAP", "map"),
        ("RR", "MRR", "recip_rank"),
        ("RR@010", "MRR@10", "recip_rank"),
        ("Bpref", "Bpref", "bpref"),
        ("Success@1", "Success@1", "success_1"),
    ],
)
def test_names(name: str, canonical: str, measure: str) -> None:
    metric = parse_metric(name)
    assert (metric.name, metric.canonical, metric.measure) == (name, canonical, measure)


@pytest.mark.parametrize(
    "name", ["nDGC@10", "ndcg@10", "Recall", "P", "Bpref@10", "nDCG@", "nDCG@-1", "", "nDCG 10", "iprec_at_recall"]
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown metric"):
        parse_metric(name)


def test_unknown_names_offer_the_near_one() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'nDCG@10'"):
        parse_metric("nDGC@10")
    with pytest.raises(UnknownNameError, match=r"Known: nDCG@10\."):
        parse_metric("ndcg@10")


@pytest.mark.parametrize("name", ["nDCG@0", "R@00", "P@2147483648", "RR@99999999999999999999"])
def test_impossible_cutoffs(name: str) -> None:
    with pytest.raises(UsageError, match="need a whole number from 1"):
        parse_metric(name)


def test_hand_calculated_graded_list() -> None:
    qrels = {"q": {"a": 2, "c": 1, "e": 1, "z": 1}}
    run = own(q="abcde")
    ideal = 2 / math.log2(2) + 1 / math.log2(3) + 1 / math.log2(4) + 1 / math.log2(5)
    expected = {
        "nDCG@1": 1.0,
        "nDCG@3": (2 + 1 / math.log2(4)) / (2 + 1 / math.log2(3) + 1 / math.log2(4)),
        "nDCG@5": (2 + 1 / math.log2(4) + 1 / math.log2(6)) / ideal,
        "Recall@1": 1 / 4,
        "Recall@3": 2 / 4,
        "Recall@100": 3 / 4,
        "MAP@3": (1 / 1 + 2 / 3) / 4,
        "MAP": (1 / 1 + 2 / 3 + 3 / 5) / 4,
        "P@5": 3 / 5,
        "P@10": 3 / 10,
        "MRR": 1.0,
        "Success@1": 1.0,
        "Rprec": 2 / 4,
    }
    found = evaluate_run(run, qrels, expected)
    assert {name: row["q"] for name, row in found.items()} == pytest.approx(expected, abs=1e-12)


def test_reciprocal_rank_is_cut_although_trec_eval_ignores_the_cutoff() -> None:
    qrels = {"q": {"d": 1}}
    run = own(q="abcd")
    assert value(run, qrels, "MRR") == 0.25
    assert value(run, qrels, "MRR@4") == 0.25
    assert value(run, qrels, "MRR@3") == 0.0
    foreign = Run("foreign", {"q": [("a", 1.0), ("b", 4.0), ("d", 2.0), ("c", 2.0)]}, ordered=False)
    assert value(foreign, qrels, "RR@2") == 0.5  # b, then d before c: ties by id descending
    assert value(foreign, qrels, "RR@1") == 0.0


def test_ties_of_our_runs_keep_our_order_and_of_others_go_by_id_descending() -> None:
    qrels = {"q": {"a": 1}}
    pairs = [("a", 1.0), ("b", 1.0), ("c", 1.0)]
    assert value(Run("x", {"q": pairs}, ordered=True), qrels, "MRR") == 1.0
    assert value(Run("x", {"q": pairs}, ordered=False), qrels, "MRR") == pytest.approx(1 / 3)


def test_scores_of_other_tools_are_compared_as_float32() -> None:
    qrels = {"q": {"a": 1}}
    run = Run("x", {"q": [("a", 1.0 + 1e-12), ("b", 1.0)]}, ordered=False)
    assert value(run, qrels, "MRR") == 0.5  # equal in float32, so b comes first
    assert ranked(run, "q") == ["b", "a"]
    assert value(run, qrels, "MRR@1") == 0.0
    huge = Run("x", {"q": [("a", 1e39), ("b", 1e40), ("c", math.inf), ("d", -math.inf)]}, ordered=False)
    assert ranked(huge, "q") == ["c", "b", "a", "d"]
    assert value(huge, qrels, "MRR") == value(huge, qrels, "MRR@3") == pytest.approx(1 / 3)


def test_judged_queries_without_results_score_zero_and_stay_in_the_mean() -> None:
    qrels = {"q": {"a": 1}, "missing": {"a": 1}, "empty": {"a": 1}}
    run = Run("x", {"q": [("a", 1.0)], "empty": [], "unjudged": [("a", 1.0)]})
    found = evaluate_run(run, qrels)
    assert all(list(row) == ["q", "missing", "empty"] for row in found.values())
    assert found["nDCG@10"] == {"q": 1.0, "missing": 0.0, "empty": 0.0}
    assert means(found) == pytest.approx(dict.fromkeys(DEFAULT_METRICS, 1 / 3))


def test_a_run_without_any_result() -> None:
    found = evaluate_run(Run("x", {}), {"q": {"a": 1}}, ["nDCG@10", "MRR@10"])
    assert found == {"nDCG@10": {"q": 0.0}, "MRR@10": {"q": 0.0}}


def test_queries_with_only_nonrelevant_judgements_count_as_trec_eval_counts_them() -> None:
    qrels = {"q": {"a": 0, "b": -1}, "r": {"a": 1}, "unjudged": {}}
    found = evaluate_run(own(q="ab", r="ab"), qrels)
    assert found["nDCG@10"] == {"q": 0.0, "r": 1.0}  # a query with no judgement at all is not judged
    assert means(found)["nDCG@10"] == 0.5


def test_negative_relevance_is_not_relevant() -> None:
    qrels = {"q": {"a": -2, "b": 1}}
    found = evaluate_run(own(q="ab"), qrels, ["nDCG@10", "P@1", "Recall@10", "MAP", "MRR"])
    assert {name: row["q"] for name, row in found.items()} == pytest.approx(
        {"nDCG@10": 1 / math.log2(3), "P@1": 0.0, "Recall@10": 1.0, "MAP": 0.5, "MRR": 0.5}
    )


def test_very_long_rankings_keep_their_order() -> None:
    count = 200_000
    documents = [str(number) for number in range(count)]
    run = Run("x", {"q": [(document, 0.0) for document in documents]})
    assert value(run, {"q": {documents[-1]: 1}}, "MRR") == 1 / count
    assert value(run, {"q": {documents[123_456]: 1}}, f"P@{123_456}") == 0.0
    assert value(run, {"q": {documents[123_456]: 1}}, f"P@{123_457}") > 0.0


def test_aliases_are_returned_under_the_name_asked_for() -> None:
    found = evaluate_run(own(q="ab"), {"q": {"b": 1}}, ["R@2", "Recall@2", "AP", "MAP"])
    assert list(found) == ["R@2", "Recall@2", "AP", "MAP"]
    assert found["AP"] == found["MAP"] == {"q": 0.5}


def test_numpy_relevance_is_accepted() -> None:
    qrels: dict[str, Any] = {"q": {"a": np.int64(1)}}
    assert value(own(q="a"), qrels, "nDCG@10") == 1.0


@pytest.mark.parametrize(
    ("qrels", "message"),
    [
        ({}, "no query has a judgement"),
        ({"q": {}}, "no query has a judgement"),
        ({"q": {"a": 10**6}}, "document 'a': relevance 1000000"),  # trec_eval would walk over a million levels
        ({"q": {"a": 0.5}}, "relevance 0.5"),
        ({"q": {"a": float("nan")}}, "relevance nan"),
        ({"q": {"a": float("inf")}}, "relevance inf"),
        ({"q": {"a": None}}, "relevance None"),
        ({"q": {"a"}}, "query 'q': got set, need a dict"),
        ({"q": {"a\ud800": 1}}, "not valid Unicode"),  # pytrec_eval would crash
        ({"q": {"a\0b": 1}}, "NUL"),  # pytrec_eval would take it for 'a'
        ({1: {"a": 1}}, "need text"),
    ],
)
def test_refused_judgements(qrels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        evaluate_run(own(q="a"), qrels)


def test_metrics_that_look_below_a_depth() -> None:
    names = ["nDCG@5", "R@20", "ndcg_cut_10", "MAP", "map_cut_6", "AnyHit@7", "nDCG-exp@3", "RR@9"]
    assert deeper_than(5, names) == {"R@20": 20, "ndcg_cut_10": 10, "map_cut_6": 6, "AnyHit@7": 7, "RR@9": 9}
    pytest.importorskip("ir_measures")
    assert deeper_than(5, ["ERR@20", "AP(rel=2)@100", "RBP(p=0.8,rel=1)", "Judged@5"]) == {"ERR@20": 20, "AP(rel=2)@100": 100}


@pytest.mark.parametrize(
    ("ranking", "message"),
    [
        ([("a", 1.0), ("b", math.nan)], "query 'q', document 'b': the score is NaN"),
        ([("a", 1.0), ("b", 0.5), ("a", 0.1)], "lists document 'a' twice"),
        ([("a\ud800", 1.0)], "not valid Unicode"),
    ],
)
@pytest.mark.parametrize("ordered", [True, False])
def test_refused_runs(ranking: list[tuple[str, float]], message: str, ordered: bool) -> None:
    with pytest.raises(DataError, match=message):
        evaluate_run(Run("x", {"q": ranking}, ordered), {"q": {"a": 1}})


def brute_force(documents: list[str], judged: dict[str, int], k: int) -> dict[str, float]:
    """The textbook formulas, written for this test."""
    gains = [max(judged.get(document, 0), 0) for document in documents]
    ideal = sorted((max(relevance, 0) for relevance in judged.values()), reverse=True)
    relevant = sum(relevance > 0 for relevance in judged.values())

    def dcg(values: list[int]) -> float:
        return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(values[:k], start=1))

    hits = [rank for rank, gain in enumerate(gains[:k], start=1) if gain > 0]
    return {
        f"nDCG@{k}": dcg(gains) / dcg(ideal) if relevant else 0.0,
        f"Recall@{k}": len(hits) / relevant if relevant else 0.0,
        f"P@{k}": len(hits) / k,
        f"MRR@{k}": 1 / hits[0] if hits else 0.0,
        f"MAP@{k}": sum(found / rank for found, rank in enumerate(hits, start=1)) / relevant if relevant else 0.0,
        f"Success@{k}": float(bool(hits)),
    }


DOCUMENTS = [f"d{letter}" for letter in "abcdefghijé"]


@settings(max_examples=60, deadline=None)
@given(
    scores=st.dictionaries(st.sampled_from(DOCUMENTS), st.sampled_from([0.0, -0.0, 1.0, 1.0 + 1e-9, 2.5, -3.0]), min_size=1),
    judged=st.dictionaries(st.sampled_from(DOCUMENTS), st.integers(-1, 3), min_size=1),
    k=st.integers(1, 12),
    ordered=st.booleans(),
)
def test_brute_force(scores: dict[str, float], judged: dict[str, int], k: int, ordered: bool) -> None:
    run = Run("x", {"q": list(scores.items())}, ordered)
    documents = list(scores)
    if not ordered:  # a stable sort by id, then by float32 score
        documents.sort(reverse=True)
        documents.sort(key=lambda document: float(np.float32(scores[document])), reverse=True)
    expected = brute_force(documents, judged, k)
    found = evaluate_run(run, {"q": judged}, expected)
    assert {name: row["q"] for name, row in found.items()} == pytest.approx(expected, abs=1e-9)
