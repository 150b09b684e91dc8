"""How far a scoring path is from the reference path: metric deltas, rank correlation, top-k overlap, score error.

Everything is computed one query at a time (long rows: a few at a time), so score arrays may lie on disk and memory stays at a few rows.
Source: paper, sections 'Numerical Correctness' and 'REAL-MM-RAG: Per-Subset Breakdown'.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy.stats import rankdata

from maxsim_eval.errors import DataError
from maxsim_eval.runs import ranked
from maxsim_eval.types import PathResult, Run

OVERLAPS = (5, 10, 20, 100)
_COLUMNS = 1 << 20  # documents compared at once, so the float64 copies of a long row stay at some megabytes
_LONG_ROW = 1 << 16  # from here on rows are ranked in threads (sorting leaves Python's lock alone)
_THREADS = 8
_RANKING_BYTES = 128 << 20  # for each processor, of all rows that are being ranked, at 64 bytes a document


class Rows(Protocol):
    """Scores `[queries, documents]` float32 that are read a row at a time: an array, a memory map, rows kept on disk."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def ndim(self) -> int: ...  # noqa: D102
    def __getitem__(self, row: int, /) -> np.ndarray: ...


def check_scores(scores: np.ndarray, query_ids: Sequence[str], document_ids: Sequence[str], path: str) -> None:
    """Refuse NaN scores.

    Args:
        scores: `[queries, documents]` float32; -inf (not retrieved) is allowed.
        query_ids: id of every row.
        document_ids: id of every column.
        path: name of the scoring path, for the message.

    Raises:
        DataError: a NaN; the message names path, query, document and how many more there are.
    """
    for row, query_id in enumerate(query_ids):
        bad = np.flatnonzero(np.isnan(scores[row]))
        if bad.size:
            more = f" (and {bad.size - 1} more documents of that query)" if bad.size > 1 else ""
            raise DataError(
                f"path {path!r}: query {query_id!r}, document {document_ids[bad[0]]!r}{more}: the score is NaN, need a "
                "number; are there NaN values in the token embeddings?"
            )


def spearman(reference: np.ndarray, other: np.ndarray) -> float | None:
    """Spearman's rank correlation of two score rows `[documents]`, ties averaged; None when either row is constant.

    -inf counts as the lowest score, so documents that were not retrieved share the bottom rank.
    """
    if len(reference) < 2:
        return None
    left, right = _ranks(reference), _ranks(other)
    left -= left.mean()
    right -= right.mean()
    variance = math.sqrt(float(left @ left)) * math.sqrt(float(right @ right))
    if variance == 0.0:
        return None
    if np.array_equal(left, right):
        return 1.0  # exactly: the quotient below may round to 0.9999999999999999
    return max(-1.0, min(1.0, float(left @ right) / variance))


def _ranks(scores: np.ndarray) -> np.ndarray:
    """`scipy.stats.rankdata` of scores without NaN; of float32 in half its time and memory."""
    count = len(scores)
    if scores.dtype != np.float32 or not 0 < count < 1 << 30:
        return np.asarray(rankdata(scores))
    # A score's bits in the order of integers above its place: sorting the keys sorts the scores and carries their places along.
    bits = (scores + np.float32(0)).view(np.int32)  # -0.0 becomes 0.0, which it equals
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = bits.astype(np.int64) << 32
    del bits
    keys |= np.arange(count, dtype=np.uint32)
    keys.sort()
    level = keys >> 32
    ends = np.append(np.flatnonzero(level[1:] != level[:-1]) + 1, count).astype(np.int32)  # of runs of equal scores
    del level
    size = np.diff(ends, prepend=np.int32(0))
    keys &= 0xFFFFFFFF
    twice = np.empty(count, np.int32)  # a mean of whole numbers may end in a half
    twice[keys] = np.repeat(2 * ends - size + 1, size)
    del keys
    return twice * 0.5


def overlap(reference: Sequence[str], other: Sequence[str], cutoff: int) -> float:
    """Share of the reference's first `cutoff` documents that are among the other's; 1.0 when both retrieved nothing."""
    kept, found = reference[:cutoff], other[:cutoff]
    if not kept:
        return 0.0 if found else 1.0
    return len(set(kept) & set(found)) / len(kept)


@dataclass
class _Errors:
    """Running score error over (query, document) pairs that are finite in both paths.

    Relative error divides by the query's largest absolute reference score: that is the scale on which its documents are
    told apart, and unlike each pair's own score it is never near zero while others are not.
    """

    pairs: int = 0
    worst: float = 0.0
    total: float = 0.0
    relative_pairs: int = 0
    relative_worst: float = 0.0
    relative_total: float = 0.0
    mismatched: int = 0

    def add(self, reference: np.ndarray, other: np.ndarray) -> None:
        """Take in one query: two rows `[documents]`."""
        worst, total, pairs, scale = 0.0, 0.0, 0, 0.0
        for start in range(0, len(reference), _COLUMNS):
            left, right = reference[start : start + _COLUMNS], other[start : start + _COLUMNS]
            finite = np.isfinite(left)
            scale = max(scale, float(np.abs(left[finite]).max(initial=0.0)))
            finite &= np.isfinite(right)
            self.mismatched += int(np.count_nonzero(~finite & (left != right)))
            error = np.abs(right[finite].astype(np.float64) - left[finite])
            worst = max(worst, float(error.max(initial=0.0)))
            total += float(error.sum())
            pairs += error.size
        self.pairs += pairs
        self.worst = max(self.worst, worst)
        self.total += total
        if scale > 0.0:
            self.relative_pairs += pairs
            self.relative_worst = max(self.relative_worst, worst / scale)
            self.relative_total += total / scale

    def as_dict(self) -> dict[str, Any]:
        return {
            "max_abs_error": self.worst if self.pairs else None,
            "mean_abs_error": self.total / self.pairs if self.pairs else None,
            "max_rel_error": self.relative_worst if self.relative_pairs else None,
            "mean_rel_error": self.relative_total / self.relative_pairs if self.relative_pairs else None,
            "mismatched_finite": self.mismatched,
        }


def _without_scores() -> dict[str, Any]:
    spearman_entry = {"mean": None, "min": None, "queries": 0, "sampled": False, "constant": 0, "constant_in_one": 0}
    return {"spearman": spearman_entry, **dict.fromkeys(_Errors().as_dict())}


def _row_pairs(
    reference: Rows, other: Rows, score_rows: Sequence[int] | None, listed: Sequence[np.ndarray] | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The two rows of every query, only the listed columns of them; NaN anywhere is refused."""
    for row in range(reference.shape[0]):
        pair = np.asarray(reference[row]), np.asarray(other[row])
        for name, values in zip(("reference", "compared"), pair, strict=True):
            if np.isnan(values).any():
                column = int(np.flatnonzero(np.isnan(values))[0])
                query = row if score_rows is None else score_rows[row]
                raise DataError(f"{name} scores: query number {query}, document number {column}: NaN, need a number")
        left, right = pair
        yield (left, right) if listed is None else (left[listed[row]], right[listed[row]])


def _in_threads(
    work: Callable[[np.ndarray, np.ndarray], float | None], pairs: Iterable[tuple[np.ndarray, np.ndarray]], threads: int
) -> Iterator[float | None]:
    """`work` of every pair of rows, in order, in that many threads; one pair more than threads is held."""
    if threads < 2:
        yield from (work(*pair) for pair in pairs)
        return
    with ThreadPoolExecutor(threads) as pool:
        begun: deque[Future[float | None]] = deque()
        for pair in pairs:
            if len(begun) == threads:
                yield begun.popleft().result()
            begun.append(pool.submit(work, *pair))
        while begun:
            yield begun.popleft().result()


def _threads(documents: int) -> int:
    """How many rows are ranked at once: one where rows are short, or so long that several would need much memory."""
    processors = os.cpu_count() or 1
    return 1 if documents < _LONG_ROW else min(_THREADS, processors, max(1, processors * _RANKING_BYTES // (64 * documents)))


def _compare_scores(
    reference: Rows, other: Rows, score_rows: Sequence[int] | None, listed: Sequence[np.ndarray] | None
) -> dict[str, Any]:
    """Spearman and score error of two `[queries, documents]` arrays, row by row."""
    if tuple(reference.shape) != tuple(other.shape) or reference.ndim != 2:
        raise ValueError(
            f"scores: got {list(other.shape)} against the reference's {list(reference.shape)}, need two arrays "
            "[queries, documents] of one shape"
        )
    for name, entries in (("score_rows", score_rows), ("listed", listed)):
        if entries is not None and len(entries) != reference.shape[0]:
            raise ValueError(f"{name}: got {len(entries)} entries, need one for each of {reference.shape[0]} rows")
    errors = _Errors()
    one_sided: list[bool] = []

    def noted() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for left, right in _row_pairs(reference, other, score_rows, listed):
            errors.add(left, right)
            one_sided.append(bool((left == left[:1]).all()) != bool((right == right[:1]).all()))
            yield left, right

    longest = reference.shape[1] if listed is None else max(map(len, listed), default=0)
    values = list(_in_threads(spearman, noted(), _threads(longest)))
    correlations = [value for value in values if value is not None]
    # One row says nothing and the other does: the paths disagree, although no correlation exists.
    disagree = sum(one for value, one in zip(values, one_sided, strict=True) if value is None)
    return {
        "spearman": {
            "mean": math.fsum(correlations) / len(correlations) if correlations else None,
            "min": min(correlations, default=None),
            "queries": len(correlations),
            "sampled": score_rows is not None,
            "constant": len(values) - len(correlations),
            "constant_in_one": disagree,
        },
        **errors.as_dict(),
    }


def _delta(reference: PathResult, other: PathResult) -> dict[str, float | None]:
    """Metric -> other minus reference; None where the other path lacks the metric."""
    return {name: other.metrics[name] - value if name in other.metrics else None for name, value in reference.metrics.items()}


def _delta_per_query(reference: PathResult, other: PathResult) -> dict[str, dict[str, float | int]]:
    """Metric -> largest absolute and mean absolute difference over queries, and the number of queries that changed."""
    found: dict[str, dict[str, float | int]] = {}
    for name, values in reference.per_query.items():
        others: Mapping[str, float] = other.per_query.get(name, {})
        differences = [abs(others[query] - value) for query, value in values.items() if query in others]
        if differences:
            found[name] = {
                "max_abs": max(differences),
                "mean_abs": math.fsum(differences) / len(differences),
                "changed": sum(difference != 0.0 for difference in differences),
                "queries": len(differences),
            }
    return found


def _compare_rankings(reference: Run, other: Run, k: int, documents: int | None) -> dict[str, Any]:
    """Top-k overlap and identical order over the queries of either run."""
    queries = list(dict.fromkeys([*reference.rankings, *other.rankings]))
    sums = dict.fromkeys(OVERLAPS, 0.0)
    identical = 0
    cut = documents is None or documents > k  # documents beyond k exist (or may exist)
    longest = 0
    for query in queries:
        left, right = ranked(reference, query)[:k], ranked(other, query)[:k]
        longest = max(longest, len(left), len(right))
        identical += left == right
        for cutoff in OVERLAPS:
            sums[cutoff] += overlap(left, right, cutoff)
    # A list cut at k knows nothing of places beyond k: '@20' of a run to depth 10 would be '@10' under another name.
    unknown = cut and longest >= k
    return {
        "overlap": {
            f"@{cutoff}": None if not queries or (cutoff > k and unknown) else sums[cutoff] / len(queries)
            for cutoff in OVERLAPS
        },
        "identical_order": {
            "k": k,
            "identical": identical,
            "queries": len(queries),
            "fraction": identical / len(queries) if queries else None,
        },
    }


def compare(
    reference: PathResult,
    other: PathResult,
    reference_run: Run,
    run: Run,
    *,
    reference_scores: Rows | None,
    scores: Rows | None,
    k: int,
    score_rows: Sequence[int] | None = None,
    listed: Sequence[np.ndarray] | None = None,
) -> dict[str, Any]:
    """Compare one path with the reference path: the `parity` object of `docs/result.md`.

    Args:
        reference: metrics of the reference path.
        other: metrics of the path.
        reference_run: its ranking; its name becomes the `reference` entry.
        run: the path's ranking.
        reference_scores: `[queries, documents]` float32, -inf = not retrieved, read row by row; None when not kept.
        scores: the path's, of the same shape; None when not kept.
        k: depth of both rankings.
        score_rows: when the score arrays hold a sample of the queries, the task's row number of each array row.
        listed: when only candidates were scored, the ascending column numbers of each array row's: Spearman and errors are over
            these documents alone.

    Returns:
        JSON-able dict; null where nothing can be said (no scores, constant scores, a cutoff beyond k).

    Raises:
        DataError: a NaN score.
        ValueError: score arrays of different shapes, other numbers of `score_rows` or `listed` than rows, k below 1.
    """
    if k < 1:
        raise ValueError(f"k: got {k}, need 1 or more")
    documents = None if scores is None else scores.shape[1]
    if listed is not None:  # a query's own documents are fewer; in a sample of queries the most of any are not known
        documents = max(map(len, listed), default=0) if score_rows is None else None
    both = reference_scores is not None and scores is not None
    return {
        "reference": reference_run.name,
        "delta": _delta(reference, other),
        "delta_per_query": _delta_per_query(reference, other),
        **(_compare_scores(reference_scores, scores, score_rows, listed) if both else _without_scores()),  # type: ignore[arg-type]
        **_compare_rankings(reference_run, run, k, documents),
    }
