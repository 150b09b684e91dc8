"""Do two paths differ, and by how much at most: intervals, tests and verdicts on per-query metric values.

Everything here is about *paired* values: entry i of both arrays belongs to query i, and what is resampled is the difference of a query.
A verdict is about an interval and a bound that says which difference matters, never about a test: a test that finds nothing has
not shown that there is nothing.

    equivalent     the whole interval of the mean difference lies within +-bound
    different      the whole interval lies outside, on one side
    inconclusive   anything else: `queries_needed` says how many queries would tell

Interval: percentile bootstrap over queries (Efron 1979) with Hesterberg's expanded tails (2015, 'What Teachers Should Know About the
Bootstrap'), which widen it as a t-interval is wider than a normal one. Not BCa (Efron 1987): rankings of two good paths differ in few
queries, most differences are exactly 0, and its bias correction rests on the share of resamples below the observed mean, which then
jumps. Simulated coverage of 95% intervals, 1000 samples each (`tests/toolkit/comparison/test_statistics.py` holds smaller ones):

    300 queries, 3% of them change, by +-0.05 to 0.37    BCa 84%   percentile 92%   Student's t 96%
    300 queries, 10% change, mostly down                 BCa 92%   percentile 93%   Student's t 92%
     20 queries, normal differences                      BCa 92%   percentile 93%, expanded 95%

What no resampling can know: changes rarer than one in the queries seen. Where no query changed the interval is exactly [0, 0];
`changed_at_most` is the share of all queries that may change all the same (Clopper and Pearson 1934; 1% where none of 300 did).
Test: paired randomisation (Fisher 1935; Smucker, Allan and Carterette 2007 on retrieval): signs of the differences flipped at random.
Several comparisons: Holm (1979).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import special  # not scipy.stats, which gives the same bits and takes half a second to import

from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.types import PathResult

LEVEL = 0.95
POWER = 0.8
RESAMPLES = 10_000
# With fewer no verdict: 95% intervals of 5 skewed differences hold the mean in 87% of samples, and of 10 queries none may change
# although 5% of all do (60% of samples), which leaves an interval without width.
MIN_QUERIES = 30
_BATCH = 1 << 20  # numbers drawn at once
_EXACT = 14  # changed queries up to which all sign patterns are counted
_MOST_QUERIES = 10**9  # a number of queries beyond this helps nobody

Verdict = Literal["equivalent", "different", "inconclusive"]


@dataclass(frozen=True)
class Difference:
    """One metric of one path against the reference.

    For a single query `low` and `high` are infinite and `sd` is NaN. `queries_needed` is None unless inconclusive, and where no number
    helps.
    """

    queries: int
    changed: int  # queries with another value
    changed_share_at_most: float  # upper limit of the share of such queries, 0 to 1
    mean: float  # path minus reference
    sd: float  # of a query's difference
    low: float
    high: float
    p_value: float  # of the randomisation test, two-sided
    p_adjusted: float  # Holm's, over what was judged together
    bound: float
    verdict: Verdict
    queries_needed: int | None

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; `result_json.jsonable` makes JSON of them."""
        return asdict(self)


def paired_differences(reference: ArrayLike, other: ArrayLike) -> np.ndarray:
    """`other - reference`, `[queries]` float64.

    Raises:
        DataError: no query, other than one number a query, unequal counts, NaN or infinity.
    """
    left, right = _per_query(reference, "reference values"), _per_query(other, "compared values")
    if len(left) != len(right):
        raise DataError(f"paired values: got {len(left)} and {len(right)} queries, need the same")
    return right - left


def paired_queries(reference: Mapping[str, float], other: Mapping[str, float], metric: str = "metric") -> np.ndarray:
    """`paired_differences` of two tables query id -> value, in the order of the first.

    Raises:
        DataError: a query that only one of them has.
    """
    lonely = sorted(reference.keys() ^ other.keys())
    if lonely:
        raise DataError(
            f"{metric}: query {lonely[0]!r} (and {len(lonely) - 1} more) has a value in one of the two alone, need pairs"
        )
    return paired_differences(list(reference.values()), [other[query] for query in reference])


def _per_query(values: ArrayLike, what: str = "differences") -> np.ndarray:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not found.size:
        raise DataError(f"{what}: got {list(found.shape)}, need [queries], 1 or more")
    _check_finite(found, what)
    return found


def _check_finite(values: np.ndarray, what: str) -> None:
    bad = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
    if bad.size:
        raise DataError(f"{what}: query number {bad[0]} (and {bad.size - 1} more): {values[bad[0]]}, need a finite number")


def _check_draws(level: float, resamples: int) -> None:
    if not 0 < level < 1:
        raise UsageError(f"level: got {level}, need a number between 0 and 1, as 0.95")
    if resamples < 100:
        raise UsageError(f"resamples: got {resamples}, need 100 or more")


def bootstrap_interval(differences: ArrayLike, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Confidence interval of the mean by resampling queries: percentile, expanded tails.

    Args:
        differences: `[queries]`, or `[queries, comparisons]`: all comparisons then share the resampled queries.
        level: of the two-sided interval, 0 to 1.
        resamples: how often as many queries are drawn, with replacement.
        seed: the same seed, numbers and order of queries give the same interval.

    Returns:
        float64 `[2]` or `[2, comparisons]`: low and high. Equal differences give exactly that value; one query gives -inf, inf.

    Raises:
        DataError: no query, NaN or infinity. UsageError: a level or number of resamples that cannot work.
    """
    _check_draws(level, resamples)
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim not in (1, 2) or not len(values):
        raise DataError(f"differences: got {list(values.shape)}, need [queries] or [queries, comparisons] of 1 query or more")
    _check_finite(values, "differences")
    columns = values.reshape(len(values), -1)
    queries = len(columns)
    if queries == 1:
        found = np.full((2, columns.shape[1]), math.inf)
        found[0] = -math.inf
    else:
        tail = special.ndtr(math.sqrt(queries / (queries - 1)) * special.stdtrit(queries - 1, (1 - level) / 2))
        found = np.quantile(_resampled_means(columns, resamples, seed), [tail, 1 - tail], axis=0)
        constant = (columns == columns[0]).all(axis=0)
        found[:, constant] = columns[0, constant]  # the mean of equal numbers may round to a neighbour
    return found.reshape(2, *values.shape[1:])


def _resampled_means(columns: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Means `[resamples, comparisons]` of as many queries as there are, drawn with replacement."""
    rng = np.random.default_rng(seed)
    queries, comparisons = columns.shape
    summands = _exact_summands(columns)
    batch = max(1, _BATCH // queries)
    parts = []
    for start in range(0, resamples, batch):
        rows = min(batch, resamples - start)
        drawn = rng.integers(0, queries, (rows, queries))
        drawn += np.arange(rows)[:, None] * queries
        times = np.bincount(drawn.ravel(), minlength=rows * queries).reshape(rows, queries)
        sums = times.astype(np.float64) @ summands
        parts.append((sums[:, :comparisons] + sums[:, comparisons:]) / queries)
    return np.concatenate(parts)


def _exact_summands(columns: np.ndarray) -> np.ndarray:
    """Every number as two, `[queries, 2 * comparisons]`: the first halves of all comparisons, then the second ones.

    Each half lies on a grid so coarse that sums of as many of them as there are queries are exact. So the order in which a matrix
    product adds them, which depends on the threads and on how many columns there are, changes no bit.
    """
    bits = 52 - len(columns).bit_length()
    _, exponents = np.frexp(np.abs(columns).max(axis=0))
    coarse = np.ldexp(1.0, np.maximum(exponents, -900) - bits)  # below that grids would underflow
    high = np.rint(columns / coarse) * coarse
    fine = np.ldexp(coarse, -bits)
    return np.concatenate([high, np.rint((columns - high) / fine) * fine], axis=1)


def randomisation_test(differences: ArrayLike, resamples: int = RESAMPLES, seed: int = 0) -> float:
    """Two-sided p-value of a paired randomisation (sign-flip) test that the differences' distribution is symmetric about 0.

    Exact, over all sign patterns, where at most 14 queries changed; else from `resamples` drawn patterns and the observed one.
    Differences of 0 are the same under either sign and are left out. All 0: the p-value is 1.

    Args:
        differences: `[queries]`.
        resamples: drawn sign patterns; the smallest p-value is 1 / (resamples + 1).
        seed: of the patterns.

    Raises:
        DataError: no query, NaN or infinity. UsageError: too few resamples.
    """
    _check_draws(LEVEL, resamples)
    values = _per_query(differences)
    moved = np.abs(values[values != 0])
    if not moved.size:
        return 1.0
    whole = float(moved.sum())
    edge = abs(float(values.sum())) - 1e-12 * whole  # sums that are equal but for the order of their terms are ties
    if moved.size <= _EXACT:
        patterns = np.arange(1 << moved.size)
        positive = (patterns[:, None] >> np.arange(moved.size) & 1).astype(np.float64)
        return float(np.mean(np.abs(2 * (positive @ moved) - whole) >= edge))
    rng = np.random.default_rng(seed)
    batch = max(1, _BATCH // moved.size)
    extreme = 0
    for start in range(0, resamples, batch):
        positive = rng.integers(0, 2, (min(batch, resamples - start), moved.size), dtype=np.int8).astype(np.float64)
        extreme += int(np.count_nonzero(np.abs(2 * (positive @ moved) - whole) >= edge))
    return (extreme + 1) / (resamples + 1)


def holm(p_values: ArrayLike) -> np.ndarray:
    """Holm's adjusted p-values `[comparisons]`, in the order given: rejecting those below 0.05 errs anywhere with 5% at most.

    Raises:
        DataError: not one row of numbers from 0 to 1.
    """
    values = np.asarray(p_values, dtype=np.float64)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
        raise DataError(f"p-values: got {values.tolist()}, need numbers from 0 to 1")
    order = np.argsort(values, kind="stable")
    stepped = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def verdict_of(low: float, high: float, bound: float, queries: int) -> Verdict:
    """What an interval says about +-bound; with fewer than `MIN_QUERIES` queries nothing."""
    if queries < MIN_QUERIES:
        return "inconclusive"
    if -bound <= low and high <= bound:
        return "equivalent"
    return "different" if low > bound or high < -bound else "inconclusive"


def queries_needed(mean: float, sd: float, bound: float, queries: int, level: float = LEVEL) -> int | None:
    """About how many queries would tell, by the normal approximation, from the standard deviation of the differences.

    Enough for a path without any true difference to be found equivalent with probability `POWER`. Where there are that many
    already (the mean lies near the bound, or the bound is 0): enough for the interval to clear the bound if mean and sd stay as
    they are. None where 10^9 are not enough, and for an unknown (NaN) sd.
    """
    if math.isnan(sd):
        return None
    half = float(special.ndtri((1 + level) / 2))
    planned = 0 if bound == 0 else _whole_square((half + float(special.ndtri((1 + POWER) / 2))) * sd / bound)
    if planned is None:
        return None
    if planned > queries or queries < MIN_QUERIES:
        return max(planned, MIN_QUERIES)
    gap = abs(bound - abs(mean))
    needed = None if gap == 0 else _whole_square(half * sd / gap)
    return None if needed is None else max(queries + 1, needed)


def _whole_square(ratio: float) -> int | None:
    """The square, rounded up; None where it is beyond every number of queries (infinite, even)."""
    return math.ceil(ratio * ratio) if ratio * ratio <= _MOST_QUERIES else None


def changed_at_most(changed: int, queries: int, level: float = LEVEL) -> float:
    """Upper confidence limit (one-sided, Clopper-Pearson) of the share of queries that change, where `changed` of `queries` did."""
    if not 0 <= changed <= queries or queries < 1:
        raise UsageError(f"changed: got {changed} of {queries} queries, need 0 to all of 1 or more")
    return 1.0 if changed == queries else float(special.betaincinv(changed + 1, queries - changed, level))


def judge(
    differences: Mapping[str, ArrayLike],
    bounds: Mapping[str, float],
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Difference]:
    """Interval, test and verdict of several comparisons on the same queries; Holm's correction is over all of them.

    Args:
        differences: name -> `[queries]`, path minus reference, query i the same in each.
        bounds: name -> the largest difference of means that does not matter, 0 or more.
        level, resamples, seed: see `bootstrap_interval`.

    Raises:
        DataError: unequal numbers of queries, NaN or infinity. UsageError: a bound that is missing, negative or NaN.
    """
    for name in differences:
        if not bounds.get(name, math.nan) >= 0:
            raise UsageError(f"bounds: {name!r} has {bounds.get(name)}, need a number of 0 or more")
    arrays = {name: _per_query(values, f"differences of {name!r}") for name, values in differences.items()}
    if len({len(values) for values in arrays.values()}) > 1:
        raise DataError(f"differences: got {[len(values) for values in arrays.values()]} queries, need the same in each")
    if not arrays:
        return {}
    intervals = bootstrap_interval(np.stack(list(arrays.values()), axis=1), level, resamples, seed)
    p_values = [randomisation_test(values, resamples, seed) for values in arrays.values()]
    adjusted = holm(p_values)
    return {
        name: _difference(values, intervals[:, i], (p_values[i], float(adjusted[i])), float(bounds[name]), level)
        for i, (name, values) in enumerate(arrays.items())
    }


def _difference(
    values: np.ndarray, interval: np.ndarray, p_values: tuple[float, float], bound: float, level: float
) -> Difference:
    queries, changed = len(values), int(np.count_nonzero(values))
    constant = bool((values == values[0]).all())
    mean = float(values[0]) if constant else math.fsum(values.tolist()) / queries
    sd = math.nan if queries == 1 else 0.0 if constant else float(values.std(ddof=1))
    low, high = (float(end) for end in interval)
    verdict = verdict_of(low, high, bound, queries)
    needed = queries_needed(mean, sd, bound, queries, level) if verdict == "inconclusive" else None
    share = changed_at_most(changed, queries, level)
    return Difference(queries, changed, share, mean, sd, low, high, *p_values, bound, verdict, needed)


def judge_paths(
    reference: PathResult,
    others: Mapping[str, PathResult],
    bounds: Mapping[str, Mapping[str, float]],
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, dict[str, Difference]]:
    """Paths of one evaluation against its reference: path -> metric -> Difference, Holm's correction over all of them.

    Args:
        bounds: path -> metric -> bound, see `judge`; what has a bound is judged.

    Raises:
        DataError: a metric that a path lacks, or queries that differ. Else as `judge`.
    """
    # Metrics may leave queries out (AnyHit@k): resampled together are those over the same queries.
    groups: dict[tuple[str, ...], dict[tuple[str, str], np.ndarray]] = {}
    for path, metrics in bounds.items():
        for metric in metrics:
            if metric not in reference.per_query or metric not in others[path].per_query:
                raise DataError(f"path {path!r}: metric {metric!r} has no values per query in both paths, need them")
            values = reference.per_query[metric]
            differences = paired_queries(values, others[path].per_query[metric], f"path {path!r}, {metric}")
            groups.setdefault(tuple(values), {})[path, metric] = differences
    found: dict[tuple[str, str], Difference] = {}
    for group in groups.values():
        keys = {f"{path}: {metric}": (path, metric) for path, metric in group}
        judged = judge(
            {name: group[key] for name, key in keys.items()},
            {name: bounds[path][metric] for name, (path, metric) in keys.items()},
            level,
            resamples,
            seed,
        )
        found |= {keys[name]: entry for name, entry in judged.items()}
    everything = list(found)
    for key, adjusted in zip(everything, holm([found[key].p_value for key in everything]), strict=True):
        found[key] = replace(found[key], p_adjusted=float(adjusted))
    return {path: {metric: found[path, metric] for metric in metrics} for path, metrics in bounds.items()}
