"""Overlap, order, rank shifts and the queries that changed most, by hand; error histograms against numpy's; rows are let go."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from maxsim_eval.comparison.parity import compare
from maxsim_eval.comparison.rankings import most_changed
from maxsim_eval.comparison.scores import compare_scores
from maxsim_eval.types import PathResult, Run

INF = math.inf


def path(metric: str = "nDCG@10", /, **values: float) -> PathResult:
    return PathResult({}, {metric: values}, {})


def run(**rankings: str) -> Run:
    return Run("x", {query: [(document, 0.0) for document in text] for query, text in rankings.items()})


def parity(left: Run, right: Run, k: int) -> dict[str, Any]:
    return compare(PathResult({}, {}, {}), PathResult({}, {}, {}), left, right, reference_scores=None, scores=None, k=k)


def test_sets_and_exact_order_at_every_cutoff() -> None:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # 52
    found = parity(run(q=letters, r=letters), run(q="ba" + letters[2:], r=letters[:10] + "?" + letters[11:]), k=52)
    # q: its first two change places; r: the document at rank 11 is another one.
    assert found["overlap"] == {
        "@1": 0.5,
        "@5": 1.0,
        "@10": 1.0,
        "@20": (1 + 19 / 20) / 2,
        "@50": (1 + 49 / 50) / 2,
        "@100": None,  # lists were cut at 52
    }
    assert found["same_order"] == {"@1": 0.5, "@5": 0.5, "@10": 0.5, "@20": 0.0, "@50": 0.0, "@100": None}
    assert found["identical_order"]["identical"] == 0


def test_queries_without_results_have_the_same_order() -> None:
    assert parity(run(q=""), run(q=""), k=3)["same_order"]["@5"] == 1.0
    assert parity(run(q=""), run(q="a"), k=3)["same_order"]["@1"] == 0.0


def test_rank_shifts_count_every_document_of_either_list() -> None:
    found = parity(run(q="abc", r="xy", s=""), run(q="bad", r="xy", s="z"), k=3)["rank_shifts"]
    # q: a 1->2, b 2->1, c 3->none, d none->3; r: both stay; s: z none->1
    assert found == {"k": 3, "counts": [[0, 1, 1], [0, 3, 1], [1, 1, 1], [1, 2, 1], [2, 1, 1], [2, 2, 1], [3, 0, 1]]}


def test_rank_shifts_go_to_rank_100() -> None:
    names = [f"d{number}" for number in range(130)]
    left = Run("x", {"q": [(name, 0.0) for name in names]})
    right = Run("x", {"q": [(name, 0.0) for name in [*names[:99], *names[100:], names[99]]]})
    found = parity(left, right, k=130)["rank_shifts"]
    assert found["k"] == 100
    assert [entry for entry in found["counts"] if entry[0] != entry[1]] == [[0, 100, 1], [100, 0, 1]]
    assert sum(count for _, _, count in found["counts"]) == 101


def test_the_largest_change_comes_first_then_the_most_moved() -> None:
    before = path(a=0.5, b=0.5, c=0.5, d=0.5, e=0.5)
    after = path(a=0.5, b=0.25, c=0.75, d=0.5, e=0.5)
    rankings = {"a": "xyz", "b": "xy", "c": "xyz", "d": "xyz", "e": "xyz"}
    changed = {"a": "yxz", "b": "yx", "c": "zyx", "d": "yzx", "e": "xyz"}
    found = most_changed(before, after, run(**rankings), run(**changed), 3, {"b": {"y": 2, "x": 0}})
    # c and b changed as much, c moved as many as b (two documents each): the one that stands first in the metric comes first
    assert [(entry["query"], entry["delta"]) for entry in found] == [("b", -0.25), ("c", 0.25), ("d", 0.0), ("a", 0.0)]
    assert found[0] == {
        "query": "b",
        "metric": "nDCG@10",
        "reference": 0.5,
        "value": 0.25,
        "delta": -0.25,
        "moved": [
            {"document": "y", "reference_rank": 2, "rank": 1, "relevance": 2},
            {"document": "x", "reference_rank": 1, "rank": 2, "relevance": 0},
        ],
        "first": [
            {"reference": "x", "document": "y", "reference_relevance": 0, "relevance": 2},
            {"reference": "y", "document": "x", "reference_relevance": 2, "relevance": 0},
        ],
    }
    assert found[1]["moved"][0] == {"document": "x", "reference_rank": 1, "rank": 3, "relevance": None}


def test_documents_that_only_one_lists_have_no_rank_in_the_other() -> None:
    (entry,) = most_changed(path(q=0.0), path(q=1.0), run(q="ab"), run(q="ca"), 2)
    assert [(moved["document"], moved["reference_rank"], moved["rank"]) for moved in entry["moved"]] == [
        ("a", 1, 2),
        ("c", None, 1),
        ("b", 2, None),
    ]


def test_at_most_twenty_queries_and_ten_documents() -> None:
    queries = [f"q{number}" for number in range(30)]
    names = [f"d{number}" for number in range(40)]
    left = Run("x", {query: [(name, 0.0) for name in names] for query in queries})
    right = Run("x", {query: [(name, 0.0) for name in reversed(names)] for query in queries})
    before = path(**dict.fromkeys(queries, 0.0))
    after = path(**{query: number / 100 for number, query in enumerate(queries)})
    found = most_changed(before, after, left, right, 40)
    assert [entry["query"] for entry in found] == [f"q{number}" for number in range(29, 9, -1)]
    assert {len(entry["moved"]) for entry in found} == {10}
    assert [moved["document"] for moved in found[0]["moved"][:4]] == ["d0", "d39", "d1", "d38"], "those ranked best come first"


def test_queries_that_cannot_be_compared_are_left_out() -> None:
    left, right = run(q="ab", r="ab", s="ab"), run(q="ba", r="ba", s="ba")
    assert most_changed(path(q=0.0, r=math.nan), path(q=0.0, r=0.0), left, right, 2)[0]["query"] == "q"
    assert len(most_changed(path(q=0.0, r=math.nan), path(q=0.0, r=0.0), left, right, 2)) == 1
    assert most_changed(path(q=0.0), path("MAP@100", q=0.0), left, right, 2) == []
    (entry,) = most_changed(path("MAP@100", q=0.0), path("MAP@100", q=0.5), left, right, 2)
    assert entry["metric"] == "MAP@100", "where nDCG@10 is not there"


def scored(left: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    return compare_scores(left, right, None, None)


def test_the_error_histogram_is_numpys() -> None:
    random = np.random.default_rng(0)
    left = random.normal(size=(5, 2000)).astype(np.float32)
    right = left + (2.0 ** random.uniform(-30, 3, left.shape)).astype(np.float32)
    right[:, ::7] = left[:, ::7]
    left[0, :5], right[1, 1] = -INF, INF
    found = scored(left, right)["error_histogram"]
    finite = np.isfinite(left) & np.isfinite(right)
    errors = np.abs(right[finite].astype(np.float64) - left[finite])
    nonzero = errors[errors > 0]
    counts, _ = np.histogram(nonzero, found["edges"])
    assert found["counts"] == counts.tolist()
    assert sum(count > 0 for count in found["counts"]) > 15
    assert found["zeros"] == int((errors == 0).sum()) > 500
    assert found["below"] == found["above"] == 0
    ratios = np.diff(np.log2(found["edges"]))
    assert (ratios == 1).all(), "edges are spaced evenly on a logarithmic axis"


def test_errors_beyond_the_edges_are_counted_beside_them() -> None:
    left = np.array([[0.0, 0.0, 0.0, 0.0, 0.0]], np.float32)
    right = np.array([[2.0**-41, -(2.0**-40), 2.0**10, 1023.0, -3e38]], np.float32)
    found = scored(left, right)["error_histogram"]
    assert (found["below"], found["above"], found["zeros"]) == (1, 2, 0)
    assert found["counts"][0] == 1, "an edge belongs to the bin above it"
    assert found["counts"][-1] == 1
    assert sum(found["counts"]) == 2


def test_blocks_of_a_row_change_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    left = random.normal(size=(2, 100)).astype(np.float32)
    right = left + random.normal(size=left.shape).astype(np.float32) * 0.01
    whole = scored(left, right)["error_histogram"]
    monkeypatch.setattr("maxsim_eval.comparison.scores._COLUMNS", 7)
    assert scored(left, right)["error_histogram"] == whole


def test_spearman_percentiles_are_numpys_of_scipys_correlations() -> None:
    random = np.random.default_rng(2)
    left = random.integers(0, 8, (60, 30)).astype(np.float32)  # many ties
    right = left + random.integers(-2, 3, left.shape).astype(np.float32)
    theirs = [spearmanr(one, other).statistic for one, other in zip(left, right, strict=True)]
    found = scored(left, right)["spearman"]
    assert found["mean"] == pytest.approx(np.mean(theirs), abs=1e-12)
    assert found["min"] == pytest.approx(np.min(theirs), abs=1e-12)
    for at, value in found["percentiles"].items():
        assert value == pytest.approx(np.percentile(theirs, int(at)), abs=1e-12)
    assert list(found["percentiles"]) == ["1", "5", "25", "50"]


class Rows:
    """Score rows, asked for one at a time, that exist only while somebody holds them."""

    ndim = 2

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape, self.alive, self.most = shape, 0, 0

    def __getitem__(self, rows: slice) -> np.ndarray:
        assert rows.stop - rows.start == 1
        made = np.random.default_rng(rows.start).random((1, self.shape[1]), dtype=np.float32)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(made, self._gone)
        return made

    def _gone(self) -> None:
        self.alive -= 1


def test_one_row_after_the_other_is_in_memory() -> None:
    left, right = Rows((200, 50)), Rows((200, 50))
    assert compare_scores(left, right, None, None)["spearman"]["mean"] == 1.0
    assert left.most <= 2
    assert right.most <= 2
