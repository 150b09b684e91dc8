"""Every metric we expose against trec_eval's own expected outputs (NIST's quick test), overall and per query, to 4 decimals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxsim_eval.comparison.metrics import evaluate_run, means
from maxsim_eval.data.trec import ranked, read_qrels, read_trec_run, write_trec_run
from maxsim_eval.types import Run

CUTOFFS = (5, 10, 15, 20, 30, 100, 200, 500, 1000)
MEASURES = {
    **{f"nDCG@{k}": f"ndcg_cut_{k}" for k in CUTOFFS},
    **{f"Recall@{k}": f"recall_{k}" for k in CUTOFFS},
    **{f"MAP@{k}": f"map_cut_{k}" for k in CUTOFFS},
    **{f"P@{k}": f"P_{k}" for k in CUTOFFS},
    **{f"Success@{k}": f"success_{k}" for k in (1, 5, 10)},
    "nDCG": "ndcg",
    "MAP": "map",
    "MRR": "recip_rank",
    "MRR@1000": "recip_rank",  # 500 results a query, so this cut takes nothing away
    "Rprec": "Rprec",
    "Bpref": "bpref",
    "infAP": "infAP",
    "SetP": "set_P",
    "SetR": "set_recall",
    "SetF": "set_F",
    "SetAP": "set_map",
}


def expected(folder: Path, name: str) -> dict[tuple[str, str], str]:
    """(query id or "all", measure) -> the printed value."""
    found = {}
    for line in (folder / name).read_text().splitlines():
        measure, query, value = line.split()
        found[query, measure] = value
    return found


def assert_printed(values: dict[str, dict[str, float]], outputs: dict[tuple[str, str], str], queries: list[str]) -> int:
    """Compare with what trec_eval prints, digit for digit; the number of comparisons made."""
    compared = 0
    for metric, measure in MEASURES.items():
        averages = means({metric: values[metric]})
        for query in [*queries, "all"]:
            printed = outputs.get((query, measure))
            if printed is None:
                continue
            value = averages[metric] if query == "all" else values[metric][query]
            assert f"{value:.4f}" == printed, (metric, query, value, printed)
            compared += 1
    return compared


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> Path:
    return shared_data / "trec_eval"


@pytest.fixture(scope="module")
def qrels(folder: Path) -> dict[str, dict[str, int]]:
    return read_qrels(folder / "qrels.test")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return read_trec_run(folder / "results.test")


def test_names_cover_every_exposed_measure() -> None:
    bases = {re.sub("@.*", "", name) for name in MEASURES}
    assert bases == {"nDCG", "Recall", "MAP", "MRR", "P", "Success", "Rprec", "Bpref", "infAP", "SetP", "SetR", "SetF", "SetAP"}


@pytest.mark.parametrize(("outputs", "least"), [("out.test", 13), ("out.test.a", 49), ("out.test.aq", 49 * 4)])
def test_equal_to_trec_eval(folder: Path, run: Run, qrels: dict[str, dict[str, int]], outputs: str, least: int) -> None:
    assert len(run.rankings) == 3
    values = evaluate_run(run, qrels, MEASURES)
    assert assert_printed(values, expected(folder, outputs), list(qrels)) >= least


def test_truncated_run_averaged_over_all_judged_queries(folder: Path, qrels: dict[str, dict[str, int]]) -> None:
    """trec_eval -c: a judged query without results counts as 0, which is our only rule."""
    run = read_trec_run(folder / "results.trunc")  # also: more columns after the tag
    assert set(run.rankings) < set(qrels)
    values = evaluate_run(run, qrels, MEASURES)
    assert assert_printed(values, expected(folder, "out.test.aqc"), list(run.rankings)) >= 100


def test_same_values_through_our_ordered_form(run: Run, qrels: dict[str, dict[str, int]], tmp_path: Path) -> None:
    scores = {query: dict(ranking) for query, ranking in run.rankings.items()}
    rankings = {query: [(doc, scores[query][doc]) for doc in ranked(run, query)] for query in run.rankings}
    write_trec_run(tmp_path / "own.trec", Run("own", rankings, ordered=True))
    own = read_trec_run(tmp_path / "own.trec")
    assert own.ordered
    assert evaluate_run(own, qrels, MEASURES) == evaluate_run(run, qrels, MEASURES)


def test_reciprocal_rank_cut(folder: Path, run: Run, qrels: dict[str, dict[str, int]]) -> None:
    """Against the uncut values trec_eval prints: 1/rank when the rank is within the cut, else 0."""
    outputs = expected(folder, "out.test.aq")
    for k in (1, 2, 5, 10, 100):
        values = evaluate_run(run, qrels, [f"RR@{k}"])[f"RR@{k}"]
        for query, value in values.items():
            uncut = float(outputs[query, "recip_rank"])
            assert value == pytest.approx(uncut if round(1 / uncut) <= k else 0.0, abs=5e-5)


_NEGATIVE = """
import json, sys
from maxsim_eval.comparison.metrics import evaluate_run
from maxsim_eval.types import Run
qrels, names = json.loads(sys.argv[1]), sys.argv[2].split(",")
run = Run("x", {query: [("a", 2.0), ("b", 1.0), ("c", 0.5)] for query in qrels})
print(json.dumps(evaluate_run(run, qrels, names)))
"""


@pytest.mark.parametrize("grade", [-1, -2, -3, -10_000])
def test_queries_judged_by_negative_grades_alone(grade: int) -> None:
    """In a process of its own: pytrec_eval dies of them, by signal."""
    names = ["nDCG@10", "Recall@5", "MAP", "MRR@2", "Bpref", "infAP", "P@5", "Success@1", "Rprec", "SetP", "SetF", "AnyHit@5"]
    qrels = {"q": {"a": grade, "b": grade}, "z": {"b": 1, "c": grade}, "n": {"a": 0, "b": grade}}
    words = [sys.executable, "-c", _NEGATIVE, json.dumps(qrels), ",".join(names)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in names[:-1]:
        assert found[name]["q"] == 0.0, "nothing relevant"
        assert found[name]["n"] == 0.0
        assert list(found[name]) == ["q", "z", "n"]
    assert found["AnyHit@5"] == {"z": 1.0}
    assert found["MRR@2"]["z"] == 0.5
