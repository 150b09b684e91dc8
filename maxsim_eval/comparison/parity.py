"""How far a scoring path is from the reference path: the `parity` object of a Result.

Scores are compared in `scores.py`, rankings in `rankings.py`, means over queries by intervals and tests in `verdicts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxsim_eval.comparison.rankings import compare_rankings, most_changed
from maxsim_eval.comparison.ranks import Ranking, ranks_of
from maxsim_eval.comparison.scores import Rows, compare_scores, without_scores
from maxsim_eval.types import PathResult, Qrels, Run


def _delta(reference: PathResult, other: PathResult) -> dict[str, float | None]:
    """Metric -> other minus reference; None where the other path lacks the metric."""
    return {name: other.metrics[name] - value if name in other.metrics else None for name, value in reference.metrics.items()}


def _delta_per_query(reference: PathResult, other: PathResult) -> dict[str, dict[str, float | int]]:
    """Metric -> largest absolute and mean absolute difference over queries with a value in both, and how many of them changed."""
    found: dict[str, dict[str, float | int]] = {}
    for name, values in reference.per_query.items():
        others: Mapping[str, float] = other.per_query.get(name, {})
        every = (abs(others[query] - value) for query, value in values.items() if query in others)
        differences = [difference for difference in every if math.isfinite(difference)]  # a null in a file is no value
        if differences:
            found[name] = {
                "max_abs": max(differences),
                "mean_abs": math.fsum(differences) / len(differences),
                "changed": sum(difference != 0.0 for difference in differences),
                "queries": len(differences),
            }
    return found


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
    qrels: Qrels | None = None,
    ranking: Ranking = ranks_of,
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
        qrels: judgements, for the relevance of documents that moved; None: not known.
        ranking: how score rows are ranked (`ranks.ranking_on`).

    Returns:
        JSON-able dict; null where nothing can be said (no scores, constant scores, a cutoff beyond k). Without `statistics`: those
        are over all paths (`verdicts.with_statistics`).

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
        **(compare_scores(reference_scores, scores, score_rows, listed, ranking) if both else without_scores()),  # type: ignore[arg-type]
        **compare_rankings(reference_run, run, k, documents),
        "most_changed": most_changed(reference, other, reference_run, run, k, qrels),
    }
