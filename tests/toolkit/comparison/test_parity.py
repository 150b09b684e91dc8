"""Parity numbers against scipy and against hand-calculated cases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata, spearmanr

from maxsim_eval.comparison import ranks
from maxsim_eval.comparison import scores as module
from maxsim_eval.comparison.parity import compare
from maxsim_eval.comparison.rankings import overlap
from maxsim_eval.comparison.ranks import spearman
from maxsim_eval.errors import DataError
from maxsim_eval.types import PathResult, Run

INF = math.inf


def path(**metrics: dict[str, float]) -> PathResult:
    return PathResult({name: sum(row.values()) / len(row) for name, row in metrics.items()}, metrics, {})


def run(name: str = "x", **rankings: str) -> Run:
    return Run(name, {query: [(document, 0.0) for document in text] for query, text in rankings.items()})


def parity(left: Run, right: Run, k: int = 5, **options: Any) -> dict[str, Any]:
    options = {"reference_scores": None, "scores": None, **options}
    return compare(path(), path(), left, right, k=k, **options)


def scored(left: list[list[float]], right: list[list[float]], **options: Any) -> dict[str, Any]:
    arrays = [np.array(rows, dtype=np.float32) for rows in (left, right)]
    return parity(run("fp32"), run("fp16"), reference_scores=arrays[0], scores=arrays[1], **options)


def test_deltas() -> None:
    reference = path(A={"q": 0.5, "r": 1.0}, B={"q": 1.0, "r": 0.0}, C={"q": 0.5, "r": 0.5})
    other = path(A={"q": 0.25, "r": 1.0}, B={"q": 0.0, "r": 1.0})
    found = compare(reference, other, run("fp32"), run(), reference_scores=None, scores=None, k=1)
    assert found["reference"] == "fp32"
    assert found["delta"] == {"A": -0.125, "B": 0.0, "C": None}
    assert found["delta_per_query"] == {
        "A": {"max_abs": 0.25, "mean_abs": 0.125, "changed": 1, "queries": 2},
        "B": {"max_abs": 1.0, "mean_abs": 1.0, "changed": 2, "queries": 2},  # the mean hides it, this does not
    }


def test_queries_without_a_value_have_not_changed() -> None:
    reference, other = path(A={"q": 0.5, "r": math.nan, "s": 0.0}), path(A={"q": 0.25, "r": 1.0, "s": math.nan})
    found = compare(reference, other, run("fp32"), run(), reference_scores=None, scores=None, k=1)
    assert found["delta_per_query"] == {"A": {"max_abs": 0.25, "mean_abs": 0.25, "changed": 1, "queries": 1}}


def test_overlap_and_order_by_hand() -> None:
    found = parity(run(q="abcdef", r="abc", s="", t=""), run(q="bacdeg", r="abcd", s="", t="a"), k=6)
    # q: 4 of 5 then 5 of 6; r: 3 of 3 (one more is found); s: both nothing; t: nothing against something
    assert found["overlap"]["@5"] == pytest.approx((5 / 5 + 3 / 3 + 1 + 0) / 4)
    assert found["overlap"]["@10"] is None  # lists are cut at 6: '@10' would be '@6' under another name
    assert found["identical_order"] == {"k": 6, "identical": 1, "queries": 4, "fraction": 0.25}
    assert overlap("abcdef", "bacdeg", 6) == pytest.approx(5 / 6)
    assert overlap("ab", "", 5) == 0.0


def test_cutoffs_beyond_k_count_when_the_whole_corpus_was_ranked() -> None:
    left, right = run(q="abc"), run(q="cba")
    assert parity(left, right, k=3)["overlap"]["@5"] is None  # the corpus may be larger
    scores = np.zeros((1, 3), dtype=np.float32)
    assert parity(left, right, k=3, reference_scores=scores, scores=scores)["overlap"]["@100"] == 1.0
    assert parity(left, right, k=4)["overlap"]["@100"] == 1.0  # shorter than k: nothing was cut off


def test_queries_of_either_run_count() -> None:
    found = parity(run(q="ab"), run(r="ab"), k=10)
    assert found["overlap"]["@5"] == 0.0
    assert found["identical_order"]["queries"] == 2


def test_no_queries_at_all() -> None:
    found = parity(run(), run())
    for entry in ("overlap", "same_order"):
        assert found[entry] == {"@1": None, "@5": None, "@10": None, "@20": None, "@50": None, "@100": None}
    assert found["identical_order"]["fraction"] is None


def test_unordered_runs_are_compared_in_trec_evals_order() -> None:
    left = Run("x", {"q": [("a", 1.0), ("b", 2.0), ("c", 2.0)]}, ordered=False)
    assert parity(left, run(q="cba"), k=3)["identical_order"]["identical"] == 1
    assert parity(left, run(q="bca"), k=3)["identical_order"]["identical"] == 0


def test_errors_by_hand() -> None:
    found = scored([[4.0, 2.0, -INF, 1.0], [0.0, 0.0, 0.0, 0.0]], [[4.5, 2.0, -INF, -INF], [0.25, 0.0, INF, 0.0]])
    assert found["max_abs_error"] == 0.5
    assert found["mean_abs_error"] == pytest.approx((0.5 + 0.25) / 5)
    assert found["max_rel_error"] == 0.5 / 4.0  # of the query's largest reference score; the zero query has none
    assert found["mean_rel_error"] == pytest.approx(0.5 / 4.0 / 2)
    assert found["mismatched_finite"] == 2


def test_one_sided_infinities_never_hide_in_the_error() -> None:
    found = scored([[1.0, INF]], [[-INF, -INF]])
    assert found["mismatched_finite"] == 2
    assert found["max_abs_error"] is found["mean_abs_error"] is found["max_rel_error"] is None


def test_long_rows_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    left = random.normal(size=(3, 100)).astype(np.float32)
    left[1, 5] = -INF
    right = left + random.normal(size=left.shape).astype(np.float32) * 0.1
    whole = scored(left.tolist(), right.tolist())
    monkeypatch.setattr("maxsim_eval.comparison.scores._COLUMNS", 7)
    blocks = scored(left.tolist(), right.tolist())
    for key in ("max_abs_error", "mean_abs_error", "max_rel_error", "mean_rel_error", "mismatched_finite"):
        assert blocks[key] == pytest.approx(whole[key], rel=1e-12)
    finite = np.isfinite(left)
    error = np.abs(right[finite].astype(np.float64) - left[finite])
    assert whole["max_abs_error"] == error.max()
    assert whole["mean_abs_error"] == pytest.approx(error.mean())


def test_spearman_by_hand() -> None:
    found = scored(
        [[1, 2, 3, 4], [1, 1, 1, 1], [1, 2, 3, 4], [5, 5, 5, 5]], [[10, 20, 30, 40], [1, 2, 3, 4], [2, 1, 3, 4], [6, 6, 6, 6]]
    )
    assert found["spearman"] == {
        "mean": pytest.approx((1.0 + 0.8) / 2),
        "min": pytest.approx(0.8),
        "percentiles": {
            at: pytest.approx(0.8 + share * 0.2) for at, share in {"1": 0.01, "5": 0.05, "25": 0.25, "50": 0.5}.items()
        },
        "queries": 2,
        "sampled": False,
        "constant": 2,
        "constant_in_one": 1,
    }


def test_spearman_is_null_when_everything_is_constant() -> None:
    found = scored([[1.0, 1.0], [-INF, -INF]], [[2.0, 2.0], [-INF, -INF]])
    assert found["spearman"]["mean"] is found["spearman"]["min"] is None
    assert found["spearman"]["constant"] == 2
    assert scored([[1.0]], [[3.0]])["spearman"]["mean"] is None
    assert scored([[]], [[]])["spearman"]["constant"] == 1


def test_documents_not_retrieved_share_the_bottom_rank() -> None:
    left, right = np.array([3.0, 1.0, -INF, -INF]), np.array([-INF, 4.0, 5.0, -INF])
    assert spearman(left, right) == pytest.approx(spearmanr([4, 3, 1.5, 1.5], [1.5, 3, 4, 1.5]).statistic)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=30))
def test_spearman_equals_scipys(pairs: list[tuple[int, int]]) -> None:
    left, right = (np.array(values, dtype=np.float32) for values in zip(*pairs, strict=True))
    found = spearman(left, right)
    if (left == left[0]).all() or (right == right[0]).all():
        assert found is None
    else:
        assert found == pytest.approx(spearmanr(left, right).statistic, abs=1e-12)


def test_equal_ranks_are_exactly_one() -> None:
    for seed in range(20):
        values = np.random.default_rng(seed).normal(size=1000).round(1)
        assert spearman(values, values * 3 + 1) == 1.0
        assert spearman(values, -values) == pytest.approx(-1.0)


def test_without_scores_the_score_entries_are_null() -> None:
    found = parity(run(q="a"), run(q="a"))
    assert found["spearman"]["mean"] is found["max_abs_error"] is found["mismatched_finite"] is None
    assert parity(run(q="a"), run(q="a"), scores=np.zeros((1, 1)))["max_abs_error"] is None
    assert set(found) == set(scored([[1.0]], [[1.0]]))


def test_memory_maps_and_samples(tmp_path: Path) -> None:
    scores = np.arange(12, dtype=np.float32).reshape(3, 4)
    mapped = np.lib.format.open_memmap(tmp_path / "s.npy", mode="w+", dtype=np.float32, shape=(3, 4))
    mapped[:] = scores
    found = parity(run(q="a"), run(q="a"), reference_scores=mapped, scores=scores, score_rows=[4, 0, 9])
    assert found["spearman"] == {
        "mean": 1.0, "min": 1.0, "percentiles": dict.fromkeys(("1", "5", "25", "50"), 1.0), "queries": 3, "sampled": True,
        "constant": 0, "constant_in_one": 0,
    }  # fmt: skip
    assert found["max_abs_error"] == 0.0


def test_nan_scores_are_refused() -> None:
    with pytest.raises(DataError, match="compared scores: query number 1, document number 0: NaN"):
        scored([[1.0], [1.0]], [[1.0], [math.nan]])
    with pytest.raises(DataError, match="reference scores: query number 7, document number 1: NaN"):
        scored([[1.0, math.nan]], [[1.0, 2.0]], score_rows=[7])


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"\[1, 2\] against the reference's \[1, 1\]"):
        scored([[1.0]], [[1.0, 2.0]])
    with pytest.raises(ValueError, match="score_rows: got 2"):
        scored([[1.0]], [[1.0]], score_rows=[0, 1])
    with pytest.raises(ValueError, match="k: got 0"):
        parity(run(), run(), k=0)


class FromDisk:
    """Rows that are made when asked for: all that score arrays must be."""

    ndim = 2

    def __init__(self, scores: np.ndarray) -> None:
        self.scores, self.shape, self.read = scores, scores.shape, 0

    def __getitem__(self, row: int) -> np.ndarray:
        self.read += 1
        return self.scores[row].copy()


def listed_and_not(seed: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Two paths' scores of 12 queries and 40 documents, -inf but for some documents of each, and which those are."""
    random = np.random.default_rng(seed)
    left = random.integers(0, 9, (12, 40)).astype(np.float32)
    right = left + random.integers(-1, 2, left.shape).astype(np.float32)
    listed = [np.sort(random.choice(40, random.integers(0, 12), replace=False)) for _ in range(12)]
    listed[3], listed[4], listed[5] = np.arange(40), np.array([], np.int64), np.array([7])
    kept = np.zeros(left.shape, bool)
    for row, columns in enumerate(listed):
        kept[row, columns] = True
    left[1, listed[1][:1]] = -INF  # an empty document, scored in both
    right[1, listed[1][:1]] = -INF
    lowest = np.float32(-INF)
    return np.where(kept, left, lowest), np.where(kept, right, lowest), listed


@pytest.mark.parametrize("seed", range(5))
def test_candidates_are_compared_by_listed_documents_alone(seed: int) -> None:
    left, right, listed = listed_and_not(seed)
    sources = FromDisk(left), FromDisk(right)
    found = parity(run("fp32"), run("int8"), reference_scores=sources[0], scores=sources[1], listed=listed)
    assert [source.read for source in sources] == [12, 12]
    finite = np.isfinite(left)
    errors = np.abs(right[finite] - left[finite])
    assert found["max_abs_error"] == errors.max()
    assert found["mean_abs_error"] == pytest.approx(errors.mean())
    assert found["mismatched_finite"] == 0
    values = [spearman(left[n, columns], right[n, columns]) for n, columns in enumerate(listed)]
    numbers = [value for value in values if value is not None]
    assert values[4] is values[5] is None, "fewer than two documents have no correlation"
    assert found["spearman"]["queries"] == len(numbers)
    assert found["spearman"]["mean"] == pytest.approx(np.mean(numbers), rel=1e-12)
    assert found["spearman"]["constant"] == 12 - len(numbers)
    whole = parity(run("fp32"), run("int8"), reference_scores=left, scores=right)
    assert whole["spearman"]["mean"] > found["spearman"]["mean"], "documents nobody scored would agree at the bottom"
    assert whole["max_abs_error"] == found["max_abs_error"]


def test_a_listed_document_that_one_path_lost_is_a_mismatch() -> None:
    left, right = [[1.0, 2.0, -INF, 4.0]], [[1.0, -INF, -INF, 4.0]]
    assert scored(left, right, listed=[np.array([0, 1, 2])])["mismatched_finite"] == 1
    assert scored(left, right, listed=[np.array([0, 2, 3])])["mismatched_finite"] == 0


def test_cutoffs_beyond_k_count_when_all_candidates_were_ranked() -> None:
    left, right, scores = run(q="abc"), run(q="cba"), np.zeros((1, 9), np.float32)
    options: dict[str, Any] = {"k": 3, "reference_scores": scores, "scores": scores}
    assert parity(left, right, **options)["overlap"]["@5"] is None
    assert parity(left, right, **options, listed=[np.array([1, 2, 8])])["overlap"]["@5"] == 1.0
    assert parity(left, right, **options, listed=[np.array([1, 2, 5, 8])])["overlap"]["@5"] is None
    # In a sample of the queries, one that was left out may have had more candidates.
    assert parity(left, right, **options, listed=[np.array([1, 2, 8])], score_rows=[0])["overlap"]["@5"] is None


def test_nan_is_refused_by_its_own_column_among_candidates() -> None:
    with pytest.raises(DataError, match="compared scores: query number 3, document number 2: NaN"):
        scored([[-INF, 1.0, 2.0]], [[-INF, 1.0, math.nan]], listed=[np.array([1, 2])], score_rows=[3])
    with pytest.raises(ValueError, match="listed: got 2 entries, need one for each of 1 rows"):
        scored([[1.0]], [[1.0]], listed=[np.array([0])] * 2)


SCORES = st.sampled_from([-INF, -2.5, -1e-45, -0.0, 0.0, 1e-45, 1.0, 1.0000001, 3e38, INF])


@settings(max_examples=100, deadline=None)
@given(st.lists(SCORES, max_size=40))
def test_ranks_are_scipys_to_the_bit(values: list[float]) -> None:
    scores = np.array(values, np.float32)
    expected = rankdata(scores).astype(np.float64).tobytes()
    assert ranks.ranks_of(scores).tobytes() == expected
    assert not len(scores) or ranks.sorted_by("cpu", scores).tobytes() == expected  # as on a GPU


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_rows_ranked_in_threads_give_the_same_numbers(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    left = random.normal(size=(11, 500)).astype(np.float32)
    right = left + random.normal(size=left.shape).astype(np.float32) * 0.1
    left[4], right[6] = 1.0, 2.0
    alone = scored(left.tolist(), right.tolist())
    monkeypatch.setattr(module, "_threads", lambda *documents: threads)
    assert scored(left.tolist(), right.tolist()) == alone
    assert alone["spearman"]["constant_in_one"] == 2
    right[7, 3] = math.nan
    with pytest.raises(DataError, match="query number 7, document number 3: NaN"):
        scored(left.tolist(), right.tolist())


def test_threads_are_for_long_rows_and_bounded_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert [module._threads(size, size) for size in (1, 1000, 1 << 16, 2_680_000, 1 << 24, 1 << 40)] == [1, 1, 8, 8, 1, 1]
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert [module._threads(size, size) for size in (1 << 16, 2_680_000)] == [2, 1]
    assert module._threads(1 << 17, 100_000_000) == 1, "few of them are compared, all are read"
