"""Grades below 0: not relevant, unjudged for Bpref and infAP. In a process of its own: what goes wrong here is a crash."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow

METRICS = ["nDCG@10", "nDCG", "Recall@10", "MAP", "MAP@3", "MRR", "MRR@2", "P@5", "Success@1", "Rprec"]
METRICS += ["Bpref", "infAP", "SetP", "SetR", "SetF", "SetAP"]
CHILD = """
import json, sys
from maxsim_eval.comparison.metrics import evaluate_run
from maxsim_eval.types import Run
cases, metrics = json.load(sys.stdin)
found = []
for qrels, rankings in cases:
    run = Run("own", {query: [(document, 1.0) for document in documents] for query, documents in rankings.items()})
    found.append(evaluate_run(run, qrels, metrics))
print(json.dumps(found))
"""


def computed(*cases: Any) -> list[dict[str, dict[str, float]]]:
    """Metrics of (qrels, query id -> ranked documents), each case after the one before, in a fresh process."""
    words, text = [sys.executable, "-c", CHILD], json.dumps([cases, METRICS])
    done = subprocess.run(words, check=False, input=text, capture_output=True, text=True)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-500:]}"
    return list(json.loads(done.stdout))


def test_a_query_without_a_relevant_document_is_zero_whatever_its_grades() -> None:
    cases = []
    for grades in ((-1,), (-2,), (-2, -3), (-10_000,), (0,), (0, -2)):
        rows = {"q": dict(zip("ab", grades, strict=False)), "r": {"a": 1, "b": 0}}
        cases += [[{query: rows[query] for query in order}, {query: ["b", "a"] for query in order}] for order in ("qr", "rq")]
    for found in computed(*cases):
        assert {name: row["q"] for name, row in found.items()} == dict.fromkeys(METRICS, 0.0)
        assert found["MRR"]["r"] == 0.5


def test_no_query_has_a_relevant_document() -> None:
    (found,) = computed([{"q": {"a": -2}, "r": {"a": 0}}, {"q": ["a"], "r": ["a"]}])
    assert found == {name: {"q": 0.0, "r": 0.0} for name in METRICS}


def bpref(documents: list[str], judged: dict[str, int]) -> float:
    """Buckley and Voorhees 2004, over judged documents: those of a grade below 0 are not."""
    relevant, others = sum(grade > 0 for grade in judged.values()), sum(grade == 0 for grade in judged.values())
    above, value = 0, 0.0
    for document in documents:
        grade = judged.get(document, -1)
        above += grade == 0
        if grade > 0:
            value += 1 - min(above, relevant) / min(others, relevant) if above else 1.0
    return value / relevant


def inferred_ap(documents: list[str], judged: dict[str, int]) -> float:
    """Yilmaz and Aslam 2006, with trec_eval's epsilon: a grade below 0 is in the pool and unjudged."""
    found, others, pooled, value, epsilon = 0, 0, 0, 0.0, 0.00001
    for rank, document in enumerate(documents, start=1):
        if judged.get(document, -1) > 0:
            before = rank - 1
            share = (found + epsilon) / (found + others + 2 * epsilon)
            value += 1 / rank + (before / rank * ((found + others + pooled) / before) * share if before else 0.0)
            found += 1
        elif document in judged:
            others, pooled = others + (judged[document] == 0), pooled + (judged[document] < 0)
    return value / sum(grade > 0 for grade in judged.values())


def test_measures_of_judged_documents_take_grades_below_0_for_unjudged() -> None:
    draw, cases = random.Random(5), []
    for _ in range(60):
        documents = draw.sample("abcdefghij", 8)
        judged = {document: draw.choice([-7, -2, -1, 0, 1, 3]) for document in draw.sample("abcdefghij", 7)}
        cases.append([{"q": {**judged, "z": 1}}, {"q": documents}])
    for (qrels, rankings), found in zip(cases, computed(*cases), strict=True):
        judged, documents = qrels["q"], rankings["q"]
        assert found["Bpref"]["q"] == pytest.approx(bpref(documents, judged), abs=1e-12)
        assert found["infAP"]["q"] == pytest.approx(inferred_ap(documents, judged), abs=1e-9)
        hits = [rank for rank, document in enumerate(documents, start=1) if judged.get(document, 0) > 0]
        assert found["MRR"]["q"] == (1 / hits[0] if hits else 0.0)
        assert found["SetR"]["q"] == pytest.approx(len(hits) / sum(grade > 0 for grade in judged.values()))


@pytest.mark.parametrize("name", ["no_query", "no query"])
def test_names_that_trec_eval_has_for_no_query_are_queries_like_others(name: str) -> None:
    """It took one for the query that it had just computed, and gave what lay in freed memory."""
    case = [{name: {"a": 1, "b": 0}, "r": {"b": 1}}, {name: ["b", "a"], "r": ["a", "b"]}]
    for found in computed(case, case, case):
        assert found["MRR"] == {name: 0.5, "r": 0.5}
        assert found["nDCG"][name] == found["nDCG"]["r"] == pytest.approx(0.6309297535714575)
