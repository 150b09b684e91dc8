"""How far a path's scores are from the reference's: rank correlation, score errors and their histogram.

Everything is computed one query at a time (long rows: a few at a time), so score arrays may lie on disk and memory stays at a few rows.
Source: paper, sections 'Numerical Correctness' and 'REAL-MM-RAG: Per-Subset Breakdown'.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from maxsim_eval.comparison.ranks import Ranking, ranks_of, spearman
from maxsim_eval.errors import DataError

PERCENTILES = (1, 5, 25, 50)
_COLUMNS = 1 << 20  # documents compared at once, so the float64 copies of a long row stay at some megabytes
_LONG_ROW = 1 << 16  # from here on rows are read and compared in threads (numpy leaves Python's lock alone)
_THREADS = 8
_RANKING_BYTES = 128 << 20  # of all rows that are being compared, for each processor (`_threads`)
# The error histogram's edges are powers of two: a float64's exponent is its bin, so counting is a shift, whatever the number of pairs.
_LOWEST, _HIGHEST = -40, 10
_BIAS, _EXPONENTS, _MANTISSA = 1023, 2048, 52  # of a float64


class Rows(Protocol):
    """Scores `[queries, documents]` float32 that are read some rows at a time: an array, a memory map, rows kept on disk."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def ndim(self) -> int: ...  # noqa: D102
    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


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
    exponents: np.ndarray = field(default_factory=lambda: np.zeros(_EXPONENTS, np.int64))  # pairs by their error's exponent

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
            self.exponents += np.bincount(error.view(np.int64) >> _MANTISSA, minlength=_EXPONENTS)
            pairs += error.size
        self.pairs += pairs
        self.worst = max(self.worst, worst)
        self.total += total
        if scale > 0.0:
            self.relative_pairs += pairs
            self.relative_worst = max(self.relative_worst, worst / scale)
            self.relative_total += total / scale

    def join(self, other: _Errors) -> None:
        """Take in the errors of the queries that come next."""
        self.pairs += other.pairs
        self.worst = max(self.worst, other.worst)
        self.total += other.total
        self.relative_pairs += other.relative_pairs
        self.relative_worst = max(self.relative_worst, other.relative_worst)
        self.relative_total += other.relative_total
        self.mismatched += other.mismatched
        self.exponents += other.exponents

    def as_dict(self) -> dict[str, Any]:
        return {
            "max_abs_error": self.worst if self.pairs else None,
            "mean_abs_error": self.total / self.pairs if self.pairs else None,
            "max_rel_error": self.relative_worst if self.relative_pairs else None,
            "mean_rel_error": self.relative_total / self.relative_pairs if self.relative_pairs else None,
            "mismatched_finite": self.mismatched,
            "error_histogram": self._histogram(),
        }

    def _histogram(self) -> dict[str, Any]:
        low, high = _LOWEST + _BIAS, _HIGHEST + _BIAS
        return {
            "edges": [2.0**power for power in range(_LOWEST, _HIGHEST + 1)],
            "counts": self.exponents[low:high].tolist(),
            "zeros": int(self.exponents[0]),  # no two float32 differ by less than 2^-149: a float64's subnormals do not occur
            "below": int(self.exponents[1:low].sum()),
            "above": int(self.exponents[high:].sum()),
        }


def without_scores() -> dict[str, Any]:
    """What `compare_scores` gives, for scores that were not kept: null."""
    return {"spearman": _spearman_entry([], 0, sampled=False), **dict.fromkeys(_Errors().as_dict())}


def _spearman_entry(values: Sequence[float | None], disagree: int, *, sampled: bool) -> dict[str, Any]:
    found = [value for value in values if value is not None]
    percentiles = np.percentile(found, PERCENTILES).tolist() if found else []
    return {
        "mean": math.fsum(found) / len(found) if found else None,
        "min": min(found, default=None),
        "percentiles": {str(at): value for at, value in zip(PERCENTILES, percentiles, strict=True)} if found else None,
        "queries": len(found),
        "sampled": sampled,
        "constant": len(values) - len(found),
        "constant_in_one": disagree,
    }


_Compared = tuple[float | None, _Errors, bool]


def _compared(reference: np.ndarray, other: np.ndarray, ranking: Ranking) -> _Compared:
    """Compare two rows: Spearman's correlation, errors, and whether exactly one of them is constant."""
    errors = _Errors()
    errors.add(reference, other)
    constant = [bool((row == row[:1]).all()) for row in (reference, other)]
    return spearman(reference, other, ranking), errors, constant[0] != constant[1]


def _in_threads(
    work: Callable[[int, np.ndarray, np.ndarray], _Compared], pair: tuple[Rows, Rows], threads: int
) -> Iterator[_Compared]:
    """`work(row number, reference row, other row)` of every row, in order, in `threads` threads, while the next rows are read."""
    starts = range(0, pair[0].shape[0], threads)

    def read(first: int, rows: Rows) -> np.ndarray:
        return np.asarray(rows[first : first + threads])

    if threads < 2:
        for row in starts:
            yield work(row, *(read(row, rows)[0] for rows in pair))
        return
    with ThreadPoolExecutor(threads) as pool, ThreadPoolExecutor(len(pair)) as reading:
        coming = [reading.submit(read, 0, rows) for rows in pair]
        begun: deque[Future[_Compared]] = deque()
        for first in starts:
            here = [rows.result() for rows in coming]
            if first + threads < pair[0].shape[0]:
                coming = [reading.submit(read, first + threads, rows) for rows in pair]
            for row in range(len(here[0])):
                if len(begun) > threads:
                    yield begun.popleft().result()
                begun.append(pool.submit(work, first + row, *(rows[row] for rows in here)))
        while begun:
            yield begun.popleft().result()


def _threads(compared: int, read: int) -> int:
    """How many rows to compare at once: one if few documents of each are compared, else as many as memory allows.

    Of `read` documents in a row, `compared` at most are compared.
    """
    processors = os.cpu_count() or 1
    # 56 bytes a document for its ranks; 24 for six float32 rows a thread: two are compared, two wait, and two are being read.
    fitting = processors * _RANKING_BYTES // max(56 * compared + 24 * read, 1)
    return 1 if compared < _LONG_ROW else min(_THREADS, processors, max(1, fitting))


def compare_scores(
    reference: Rows,
    other: Rows,
    score_rows: Sequence[int] | None,
    listed: Sequence[np.ndarray] | None,
    ranking: Ranking = ranks_of,
) -> dict[str, Any]:
    """Spearman and score error of two `[queries, documents]` arrays, row by row.

    Args:
        reference, other: float32, -inf = not retrieved.
        score_rows: the task's row number of each array row, when they are a sample of the queries.
        listed: ascending column numbers of each row, when these alone are compared.
        ranking: how rows are ranked (`ranks.ranking_on`).

    Raises:
        DataError: a NaN score. ValueError: shapes or numbers of entries that do not fit.
    """
    if tuple(reference.shape) != tuple(other.shape) or reference.ndim != 2:
        raise ValueError(
            f"scores: got {list(other.shape)} against the reference's {list(reference.shape)}, need two arrays "
            "[queries, documents] of one shape"
        )
    for name, entries in (("score_rows", score_rows), ("listed", listed)):
        if entries is not None and len(entries) != reference.shape[0]:
            raise ValueError(f"{name}: got {len(entries)} entries, need one for each of {reference.shape[0]} rows")

    def work(row: int, left: np.ndarray, right: np.ndarray) -> _Compared:
        for name, values in (("reference", left), ("compared", right)):
            if np.isnan(values).any():
                column = int(np.flatnonzero(np.isnan(values))[0])
                query = row if score_rows is None else score_rows[row]
                raise DataError(f"{name} scores: query number {query}, document number {column}: NaN, need a number")
        if listed is not None:
            left, right = left[listed[row]], right[listed[row]]
        return _compared(left, right, ranking)

    longest = reference.shape[1] if listed is None else max(map(len, listed), default=0)
    errors, values, disagree = _Errors(), list[float | None](), 0
    for value, here, one_sided in _in_threads(work, (reference, other), _threads(longest, reference.shape[1])):
        errors.join(here)
        values.append(value)
        disagree += value is None and one_sided  # the paths disagree, although no correlation exists
    return {"spearman": _spearman_entry(values, disagree, sampled=score_rows is not None), **errors.as_dict()}
