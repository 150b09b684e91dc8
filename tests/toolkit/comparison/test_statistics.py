"""Intervals, tests and verdicts: hand-computed cases, scipy's own answers, simulated coverage, properties, refusals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from maxsim_eval.comparison import statistics
from maxsim_eval.comparison.statistics import (
    MIN_QUERIES,
    bootstrap_interval,
    changed_at_most,
    holm,
    judge,
    judge_paths,
    paired_differences,
    paired_queries,
    queries_needed,
    randomisation_test,
    verdict_of,
)
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.types import PathResult

NORMAL = np.random.default_rng(0).normal(0.01, 0.05, 60)
some_differences = st.lists(st.sampled_from([0.0, 0.0, 0.13, -0.13, 0.37, -0.5, 1.0]), min_size=1, max_size=40)


def one(differences: object, bound: float = 0.1):  # type: ignore[no-untyped-def]
    return judge({"m": np.asarray(differences)}, {"m": bound})["m"]


# Interval


def test_two_queries_by_hand() -> None:
    # Resamples of (0, 1) have means 0, 1/2, 1 with chances 1/4, 1/2, 1/4: their quartiles are 0 to 1/2 and 1/2 to 1.
    assert bootstrap_interval([0.0, 1.0]).tolist() == [0.0, 1.0]
    # 1 of 3 queries gained 3: means 0, 1, 2, 3 with chances 8/27, 12/27, 6/27, 1/27 = 3.7%; the expanded tail of 3 queries is smaller.
    assert bootstrap_interval([0.0, 3.0, 0.0]).tolist() == [0.0, 3.0]


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_agrees_with_scipys_percentiles(level: float) -> None:
    queries = len(NORMAL)
    tail = stats.norm.cdf(math.sqrt(queries / (queries - 1)) * stats.t.ppf((1 - level) / 2, queries - 1))
    theirs = stats.bootstrap((NORMAL,), np.mean, n_resamples=40_000, confidence_level=1 - 2 * tail, method="percentile", rng=1)
    ours = bootstrap_interval(NORMAL, level, resamples=40_000, seed=1)  # scipy happens to draw the same queries
    assert ours == pytest.approx(list(theirs.confidence_interval), abs=0.02 * NORMAL.std() / math.sqrt(queries))
    assert ours[0] < NORMAL.mean() < ours[1]


def test_close_to_students_interval_of_normal_differences() -> None:
    half = stats.t.ppf(0.975, len(NORMAL) - 1) * NORMAL.std(ddof=1) / math.sqrt(len(NORMAL))
    assert bootstrap_interval(NORMAL) == pytest.approx([NORMAL.mean() - half, NORMAL.mean() + half], abs=0.08 * half)


def sparse(rng: np.random.Generator, samples: int, queries: int) -> tuple[np.ndarray, float]:
    """Rankings of two good paths: 3% of the queries change, either way."""
    return (rng.random((queries, samples)) < 0.03) * rng.choice([-0.37, -0.13, 0.13, 0.37], (queries, samples)), 0.0


def skewed(rng: np.random.Generator, samples: int, queries: int) -> tuple[np.ndarray, float]:
    return rng.exponential(0.05, (queries, samples)), 0.05


def normal(rng: np.random.Generator, samples: int, queries: int) -> tuple[np.ndarray, float]:
    return rng.normal(0, 0.05, (queries, samples)), 0.0


@pytest.mark.parametrize(
    ("draw", "queries", "least"), [(normal, 20, 0.93), (normal, 300, 0.93), (skewed, 50, 0.92), (sparse, 300, 0.89)]
)
def test_coverage(draw, queries: int, least: float) -> None:  # type: ignore[no-untyped-def]
    samples = 1500  # a standard error of 0.6%
    values, mean = draw(np.random.default_rng(5), samples, queries)
    low, high = bootstrap_interval(values, resamples=1000)
    covered = np.mean((low <= mean) & (mean <= high))
    assert least <= covered <= 0.975
    assert np.mean(mean < low) < 0.08
    assert np.mean(high < mean) < 0.08


def test_the_expanded_tails_are_what_saves_few_queries() -> None:
    values, _ = normal(np.random.default_rng(5), 1500, 10)
    low, high = bootstrap_interval(values, resamples=1000)
    assert 0.925 <= np.mean((low <= 0) & (high >= 0)) <= 0.975  # plain percentiles: 0.90 to 0.92


def test_seeds() -> None:
    first = bootstrap_interval(NORMAL, seed=3)
    assert first.tolist() == bootstrap_interval(NORMAL, seed=3).tolist()
    assert first.tolist() != bootstrap_interval(NORMAL, seed=4).tolist()
    assert first == pytest.approx(bootstrap_interval(NORMAL, seed=4), abs=0.003)


def test_comparisons_share_the_resamples() -> None:
    both = bootstrap_interval(np.stack([NORMAL, 2 * NORMAL], axis=1))
    assert both.shape == (2, 2)
    assert both[:, 1] == pytest.approx(2 * both[:, 0], rel=1e-12)
    assert both[:, 0] == pytest.approx(bootstrap_interval(NORMAL), rel=1e-12)


@pytest.mark.parametrize("batch", [1, 64, 1000])
def test_batches_change_nothing(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bootstrap_interval(NORMAL, resamples=500)
    monkeypatch.setattr(statistics, "_BATCH", batch)
    assert bootstrap_interval(NORMAL, resamples=500) == pytest.approx(whole, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(some_differences, st.integers(0, 5))
def test_interval_properties(differences: list[float], seed: int) -> None:
    values = np.asarray(differences)
    low, high = bootstrap_interval(values, resamples=400, seed=seed)
    minus_high, minus_low = -bootstrap_interval(-values, resamples=400, seed=seed)
    assert (minus_low, minus_high) == pytest.approx((low, high), abs=1e-12)
    if len(values) == 1:
        assert (low, high) == (-math.inf, math.inf)
    else:
        assert values.min() - 1e-12 <= low <= high <= values.max() + 1e-12
        if np.ptp(values) == 0:
            assert low == high == values[0]


# Test


def test_sign_flips_by_hand() -> None:
    # |+-1 +-2 +-4| is 7 or more in 2 of 8 patterns, and 5 or more in 4 of 8; zeros change nothing.
    assert randomisation_test([1.0, 2.0, 4.0]) == 2 / 8
    assert randomisation_test([-1.0, 2.0, 4.0]) == 4 / 8
    assert randomisation_test([0.0, 1.0, 0.0, 2.0, 4.0]) == 2 / 8
    assert randomisation_test([0.1] * 10) == 2 / 1024
    assert randomisation_test([0.0] * 7) == 1.0
    assert randomisation_test([0.3]) == 1.0  # one query shows nothing


@pytest.mark.parametrize("count", [2, 5, 9, 12])
def test_exact_as_scipy(count: int) -> None:
    values = np.random.default_rng(count).normal(0.02, 0.05, count)
    theirs = stats.permutation_test((values,), np.mean, permutation_type="samples", vectorized=True, n_resamples=2**count)
    assert randomisation_test(values) == pytest.approx(theirs.pvalue, rel=1e-12)


def test_drawn_patterns_agree_with_scipy() -> None:
    values = NORMAL[:40]
    theirs = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", vectorized=True, n_resamples=20_000, rng=1
    ).pvalue
    ours = randomisation_test(values, resamples=20_000)
    assert ours == pytest.approx(theirs, abs=4 * math.sqrt(theirs * (1 - theirs) / 10_000))
    assert ours == randomisation_test(values, resamples=20_000)
    assert randomisation_test(values + 10, resamples=200) == 1 / 201  # never 0


def test_p_values_are_uniform_where_nothing_differs() -> None:
    draws = np.random.default_rng(2).normal(0, 1, (300, 12))
    p_values = [randomisation_test(values) for values in draws]
    assert stats.kstest(p_values, "uniform").pvalue > 0.001
    assert np.mean(np.asarray(p_values) <= 0.05) < 0.09


@settings(max_examples=40, deadline=None)
@given(some_differences)
def test_sign_flip_properties(differences: list[float]) -> None:
    values = np.asarray(differences)
    p = randomisation_test(values, resamples=200)
    assert 0 < p <= 1
    assert randomisation_test(-values, resamples=200) == p
    if len(values) <= 10:
        sums = [abs(sum(signs * values)) for signs in itertools.product((-1, 1), repeat=len(values))]
        assert p == pytest.approx(np.mean(np.asarray(sums) >= abs(sum(values)) - 1e-9))


# Several comparisons


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 are 0.04, 0.06, 0.06, 0.04; never below the one before.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]).tolist() == [1.0, 1.0]
    assert holm([0.2]).tolist() == [0.2]
    assert holm([]).tolist() == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_properties(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert (adjusted >= p_values).all()
    assert (adjusted <= np.minimum(1, len(p_values) * np.asarray(p_values)) + 1e-15).all()  # never worse than Bonferroni
    assert (np.diff(adjusted[np.argsort(p_values)]) >= 0).all()  # the order stays
    assert holm(p_values[::-1]) == pytest.approx(adjusted[::-1])


@pytest.mark.parametrize("p_values", [[math.nan], [-0.1], [1.1], 0.5, [[0.1]]])
def test_holm_refuses(p_values: object) -> None:
    with pytest.raises(DataError, match="p-values"):
        holm(p_values)  # type: ignore[arg-type]


# Verdicts


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.1, 0.1, "equivalent"),
        (0.0, 0.0, "equivalent"),
        (0.05, 0.1000001, "inconclusive"),  # surely not 0, yet perhaps small enough
        (-0.5, 0.5, "inconclusive"),
        (0.1, 0.2, "inconclusive"),
        (0.1000001, 0.2, "different"),
        (-0.3, -0.2, "different"),
    ],
)
def test_verdicts(low: float, high: float, expected: str) -> None:
    assert verdict_of(low, high, 0.1, 300) == expected
    assert verdict_of(-high, -low, 0.1, 300) == expected
    assert verdict_of(low, high, 0.1, MIN_QUERIES - 1) == "inconclusive"


def test_not_significant_is_not_the_same() -> None:
    values = np.random.default_rng(1).normal(0, 0.3, 30)
    found = one(values, bound=4e-4)
    assert found.p_value > 0.05
    assert found.verdict == "inconclusive"


def test_significant_is_not_different_enough() -> None:
    found = one(np.random.default_rng(1).normal(0.01, 0.01, 200), bound=0.02)
    assert found.p_value < 0.001
    assert found.verdict == "equivalent"


def test_queries_needed_by_hand() -> None:
    # (1.960 + 1.282)^2 = 10.507 times (0.02 / 4e-4)^2 = 2500
    assert queries_needed(0.0013, 0.02, 4e-4, 300) == 26269
    # 30,000 there are already: 1.96^2 * (0.02 / 1e-4)^2 for the mean to clear the bound by its distance of 1e-4
    assert queries_needed(5e-4, 0.02, 4e-4, 30_000) == 153_659
    assert queries_needed(0.1, 0.02, 0.0, 300) == 301
    assert queries_needed(0.0, 0.02, 0.0, 300) is None
    assert queries_needed(0.0, math.nan, 0.1, 1) is None
    assert queries_needed(0.0, 0.0, 0.1, 3) == MIN_QUERIES


@pytest.mark.parametrize(
    ("mean", "bound"),
    [(math.nextafter(5e-4, 0), 5e-4), (1e-17, 0.0), (5e-324, 0.0), (0.0, 1e-200), (0.01, 5e-324)],
)
def test_no_number_of_queries_that_nobody_has(mean: float, bound: float) -> None:
    assert queries_needed(mean, 0.01, bound, 400_000) is None


def test_that_many_queries_do_tell() -> None:
    needed = one(np.random.default_rng(3).normal(0, 0.05, 50), bound=0.005).queries_needed
    assert needed is not None
    rng = np.random.default_rng(4)
    values = rng.normal(0, 0.05, (needed, 150))
    low, high = bootstrap_interval(values, resamples=400)
    assert np.mean((low >= -0.005) & (high <= 0.005)) > 0.6  # 0.8 for the true sd; this one was estimated from 50 queries


def test_changes_that_were_not_seen() -> None:
    assert changed_at_most(0, 300) == pytest.approx(1 - 0.05 ** (1 / 300))
    assert changed_at_most(0, 300) == pytest.approx(3 / 300, rel=0.01)  # the rule of three
    assert changed_at_most(300, 300) == 1.0
    limit = changed_at_most(4, 50)
    assert stats.binom.cdf(4, 50, limit) == pytest.approx(0.05)
    with pytest.raises(UsageError, match="got 5 of 4"):
        changed_at_most(5, 4)


@pytest.mark.parametrize("value", [0.0, 0.05, -0.05, 0.3, -0.3])
def test_equal_differences(value: float) -> None:
    found = one([value] * 32)
    assert (found.mean, found.sd, found.low, found.high) == (value, 0.0, value, value)
    assert found.verdict == ("equivalent" if abs(value) <= 0.1 else "different")
    assert found.changed == (32 if value else 0)
    assert found.queries_needed is None


def test_one_query_tells_nothing() -> None:
    found = one([0.0])
    assert (found.low, found.high, found.p_value, found.verdict) == (-math.inf, math.inf, 1.0, "inconclusive")
    assert math.isnan(found.sd)
    assert found.queries_needed is None


def test_all_fields_of_one_case() -> None:
    found = one([0.0] * 16 + [0.25] * 4, bound=0.02)
    assert found.to_dict() == {
        "queries": 20,
        "changed": 4,
        "changed_share_at_most": pytest.approx(0.4010, abs=1e-4),  # tables of the binomial limit for 4 of 20
        "mean": 0.05,
        "sd": pytest.approx(math.sqrt(4 * 0.25**2 * 0.8 / 19)),
        "low": pytest.approx(0.0125, abs=1e-12),  # 1 of 20 drawn, or fewer: 6.9% of resamples, none 1.2%
        "high": pytest.approx(0.1, abs=1e-12),  # 8 or more: 3.2%, 9 or more 1.0%
        "p_value": 2 / 16,
        "p_adjusted": 2 / 16,
        "bound": 0.02,
        "verdict": "inconclusive",
        "queries_needed": 277,
    }


# Tables of values


def path(**values: dict[str, float]) -> PathResult:
    return PathResult({}, values, {})


def test_paths_against_their_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsim_eval.comparison.statistics.MIN_QUERIES", 10)  # so that all sign patterns can be counted by hand
    queries = [f"q{i}" for i in range(12)]
    reference = path(a=dict.fromkeys(queries, 0.5), b=dict.fromkeys(queries[:11], 0.5))
    up = path(a=dict.fromkeys(reversed(queries), 0.75), b=dict.fromkeys(queries[:11], 0.5))
    found = judge_paths(reference, {"same": reference, "up": up}, {key: {"a": 0.1, "b": 0.1} for key in ("same", "up")})
    assert {name: {metric: entry.verdict for metric, entry in row.items()} for name, row in found.items()} == {
        "same": {"a": "equivalent", "b": "equivalent"},
        "up": {"a": "different", "b": "equivalent"},
    }
    assert found["up"]["a"].mean == 0.25
    assert found["up"]["a"].p_value == 2 / 2**12
    assert found["up"]["a"].p_adjusted == 4 * 2 / 2**12  # of four comparisons the smallest
    assert [found["up"][metric].queries for metric in ("a", "b")] == [12, 11]
    assert found["same"]["a"].p_adjusted == 1.0
    with pytest.raises(DataError, match=r"path 'up': metric 'c' has no values"):
        judge_paths(reference, {"up": up}, {"up": {"c": 0.1}})
    with pytest.raises(UsageError, match=r"'up: b' has nan"):
        judge_paths(reference, {"up": up}, {"up": {"a": 0.1, "b": math.nan}})
    own = judge_paths(reference, {"same": reference, "up": up}, {"up": {"a": 0.3}})
    assert own["up"]["a"].verdict == "equivalent", "a path's own bound"
    assert own["up"]["a"].p_adjusted == 2 / 2**12, "of what was judged, one comparison"


def test_refusals() -> None:
    with pytest.raises(DataError, match=r"compared values: query number 1 \(and 0 more\): nan"):
        paired_differences([0.0, 1.0], [0.0, math.nan])
    with pytest.raises(DataError, match="2 and 3 queries"):
        paired_differences([0.0, 1.0], [0.0, 1.0, 2.0])
    for empty in ([], [[1.0]], 3.0):
        with pytest.raises(DataError, match=r"need \[queries\], 1 or more"):
            paired_differences(empty, empty)
    with pytest.raises(DataError, match=r"R@5: query 'b' \(and 0 more\) has a value in one"):
        paired_queries({"a": 0.0}, {"a": 0.0, "b": 0.0}, "R@5")
    for bad in ([math.nan, 0.0], [math.inf]):
        with pytest.raises(DataError, match="need a finite number"):
            bootstrap_interval(bad)
        with pytest.raises(DataError, match="need a finite number"):
            randomisation_test(bad)
    with pytest.raises(DataError, match="need the same in each"):
        judge({"a": [0.0], "b": [0.0, 0.0]}, {"a": 1, "b": 1})
    for bounds in ({}, {"a": -1.0}, {"a": math.nan}):
        with pytest.raises(UsageError, match="bounds: 'a'"):
            judge({"a": [0.0]}, bounds)
    for level in (0.0, 1.0, 95.0):
        with pytest.raises(UsageError, match="level"):
            bootstrap_interval([0.0], level)
    with pytest.raises(UsageError, match="resamples: got 99"):
        randomisation_test([0.0], resamples=99)
    assert judge({}, {}) == {}


def test_pairs_follow_the_ids() -> None:
    assert paired_queries({"a": 0.0, "b": 1.0}, {"b": 1.5, "a": 0.25}).tolist() == [0.25, 0.5]
