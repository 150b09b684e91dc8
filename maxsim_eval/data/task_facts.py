"""What a Result says of its task: where it is from, how much of it there is, what was warned of, how long its rows are in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from maxsim_eval.types import Task

_BINS = 40  # of equal width, up to the 99th percentile


def task_facts(task: Task, queries: np.ndarray, documents: np.ndarray, said: Sequence[str]) -> dict[str, Any]:
    """The Result's `task`, but for its limits and candidates.

    Args:
        task: what was evaluated: all of it, or the subset that was kept.
        queries, documents: `[n]` int64 each, their lengths in tokens.
        said: warnings; each is listed once.
    """
    return {
        "source": task.source,
        "dataset": task.dataset,
        "split": task.split,
        "queries": len(task.query_ids),
        "documents": len(task.document_ids),
        "document_tokens": int(documents.sum()),
        "query_tokens": int(queries.sum()),
        "judged_pairs": task.judged_pairs,
        "exclude_same_id": task.exclude_same_id,
        "warnings": list(dict.fromkeys(said)),
        "lengths": {"queries": length_histogram(queries), "documents": length_histogram(documents)},
    }


def length_histogram(lengths: np.ndarray) -> dict[str, Any]:
    """Histogram of whole lengths `[n]`: `edges`, ascending, and `counts` of the lengths from each edge to below the next.

    Bins start at 0 and have one width: the smallest of 1, 2, 5, 10, 20, 50, ... by which 40 of them reach past the 99th percentile.
    Where lengths go further, one more bin holds the rest: a few very long documents do not squeeze all others into one.
    """
    if not len(lengths):
        return {"edges": [0, 1], "counts": [0]}
    most = int(np.quantile(lengths, 0.99, method="inverted_cdf"))
    width = next(size for power in count() for size in (10**power, 2 * 10**power, 5 * 10**power) if most < size * _BINS)
    bins, longest = most // width + 1, int(lengths.max())
    edges = [width * number for number in range(bins + 1)]
    counts = np.bincount(np.minimum(np.asarray(lengths) // width, bins), minlength=bins + 1).tolist()
    if longest >= edges[-1]:
        return {"edges": [*edges, longest + 1], "counts": counts}
    return {"edges": edges, "counts": counts[:bins]}
