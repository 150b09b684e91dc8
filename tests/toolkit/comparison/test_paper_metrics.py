"""The paper's own metrics: hand-calculated values, an independent nDCG, and how they stand beside trec_eval's."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from maxsim_eval.comparison.metrics import evaluate_run, means, parse_metric
from maxsim_eval.errors import DataError, UnknownNameError, UsageError
from maxsim_eval.types import Run


def own(**rankings: str) -> Run:
    """Our ordered run: one letter a document."""
    return Run("own", {query: [(document, 1.0) for document in text] for query, text in rankings.items()})


def test_names():
    metric = parse_metric("nDCG-exp@10")
    assert (metric.canonical, metric.measure, metric.truncate) == ("nDCG-exp@10", "nDCG-exp", 10)
    assert parse_metric("AnyHit@005").canonical == "AnyHit@5"
    for name in ("AnyHit", "nDCG-exp", "nDCG-exp@", "anyhit@5", "P-exp@5"):
        with pytest.raises(UnknownNameError):
            parse_metric(name)
    with pytest.raises(UnknownNameError, match="AnyHit@5"):
        parse_metric("AnyHits@5")
    with pytest.raises(UsageError, match="cutoff is 0"):
        parse_metric("AnyHit@0")


def test_any_hit_by_hand_and_who_is_left_out():
    qrels = {"two": {"a": 1, "b": 2}, "none": {"a": 0, "b": -1}, "late": {"c": 1}, "empty": {"c": 1}}
    run = own(two="xab", none="ab", late="abc")
    values = evaluate_run(run, qrels, ["AnyHit@2", "AnyHit@3", "Success@2", "Recall@2"])
    assert values["AnyHit@2"] == {"two": 1.0, "late": 0.0, "empty": 0.0}  # "none" is not answerable: no value
    assert values["AnyHit@3"] == {"two": 1.0, "late": 1.0, "empty": 0.0}
    assert values["Success@2"] == {"two": 1.0, "none": 0.0, "late": 0.0, "empty": 0.0}
    assert values["Recall@2"]["two"] == 0.5
    assert list(values) == ["AnyHit@2", "AnyHit@3", "Success@2", "Recall@2"]
    assert means(values)["AnyHit@2"] == pytest.approx(1 / 3)
    assert means(values)["Success@2"] == pytest.approx(1 / 4)


def test_any_hit_of_nothing_answerable_has_no_mean():
    assert math.isnan(means(evaluate_run(own(q="a"), {"q": {"a": 0}}, ["AnyHit@1"]))["AnyHit@1"])


def test_exponential_gain_by_hand():
    qrels = {"q": {"a": 3, "b": 1, "c": 2, "d": 0, "e": -2}}
    # ranking b d a: gains 1, 0, 7 at discounts 1, log2(3), 2; best possible 7, 3, 1
    best = 7 + 3 / math.log2(3) + 1 / 2
    values = evaluate_run(own(q="bdae"), qrels, ["nDCG-exp@3", "nDCG-exp@1", "nDCG@3"])
    assert values["nDCG-exp@3"]["q"] == pytest.approx((1 + 7 / 2) / best, abs=1e-12)
    assert values["nDCG-exp@1"]["q"] == pytest.approx(1 / 7, abs=1e-12)
    linear = (1 + 3 / 2) / (3 + 2 / math.log2(3) + 1 / 2)  # trec_eval's gain is the relevance itself
    assert values["nDCG@3"]["q"] == pytest.approx(linear, abs=1e-6)


def reference(ranking: list[str], row: dict[str, int], k: int) -> float:
    """Written another way: the best ranking is found by trying every one, gains and discounts are arrays."""

    def dcg(documents):
        gains = np.array([2 ** max(row.get(name, 0), 0) - 1 for name in documents[:k]], float)
        return float((gains * np.log(2) / np.log(np.arange(2, len(gains) + 2))).sum())

    best = max(dcg(order) for order in itertools.permutations(row))
    return dcg(ranking) / best if best else 0.0


def test_exponential_gain_against_another_implementation():
    rng = random.Random(5)
    for _ in range(60):
        row = {name: rng.randint(-1, 4) for name in "abcdef"[: rng.randint(1, 6)]}
        ranking = rng.sample("abcdefxyz", rng.randint(1, 9))
        for k in (1, 3, 5, 20):
            found = evaluate_run(own(q="".join(ranking)), {"q": row}, [f"nDCG-exp@{k}"])[f"nDCG-exp@{k}"]["q"]
            assert found == pytest.approx(reference(ranking, row, k), abs=1e-12)


def test_for_binary_judgements_it_is_trec_evals_ndcg():
    rng = random.Random(6)
    qrels = {f"q{n}": {name: rng.randint(0, 1) for name in "abcdefgh"} for n in range(40)}
    run = own(**{query: "".join(rng.sample("abcdefghxyz", 7)) for query in qrels})
    values = evaluate_run(run, qrels, ["nDCG@5", "nDCG-exp@5"])
    for query in qrels:
        assert values["nDCG-exp@5"][query] == pytest.approx(values["nDCG@5"][query], abs=1e-6)


def test_foreign_runs_keep_trec_evals_order():
    run = Run("foreign", {"q": [("a", 1.0), ("b", 2.0), ("c", 2.0)]}, ordered=False)  # ties: c before b
    values = evaluate_run(run, {"q": {"c": 1}}, ["AnyHit@1", "nDCG-exp@1"])
    assert values["AnyHit@1"]["q"] == values["nDCG-exp@1"]["q"] == 1.0


def test_a_relevance_whose_gain_drowns_all_others_is_refused():
    with pytest.raises(DataError, match="relevance 61, need 60 or less"):
        evaluate_run(own(q="a"), {"q": {"a": 61}}, ["nDCG-exp@5"])
