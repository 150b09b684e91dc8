"""What equal scores hide: the best and the worst value of a metric over every order of documents that a run scores alike.

A run that gives two documents one score has not ranked them; some rule did (ours: place in the corpus, trec_eval's: document id).
Where both ends agree no rule matters. Source: McSherry and Najork 2008, 'Computing Information Retrieval Performance Measures
Efficiently in the Presence of Tied Scores', whose means over all orders lie between these ends.

Putting a more relevant document before a less relevant one never lowers the metrics listed here, so within every group of equal scores
the order by relevance, falling or rising, gives the two ends; trec_eval then computes them as it does any run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np

from maxsim_eval.comparison.metrics import DEFAULT_METRICS, evaluate_run, parse_metric
from maxsim_eval.data.trec import check_ranking, trec_order
from maxsim_eval.errors import UsageError
from maxsim_eval.types import Qrels, Run

# infAP is left out: it estimates from judged documents, and a better order can lower it.
TIE_METRICS = (
    "nDCG",
    "Recall",
    "MAP",
    "MRR",
    "P",
    "Success",
    "Rprec",
    "Bpref",
    "SetP",
    "SetR",
    "SetF",
    "SetAP",
    "AnyHit",
    "nDCG-exp",
)


def tie_orders(run: Run, qrels: Qrels) -> tuple[Run, Run]:
    """The run with every group of equal scores in its best, and in its worst, order for these judgements.

    Scores are equal if their float32 values are, as for trec_eval. Of an ordered run only neighbours in its order are one group. A
    run that was cut at k documents says nothing of documents beyond, which may have had the last score too. Queries without
    judgements stay as they are.

    Returns:
        (best, worst): ordered runs over the same queries and documents.

    Raises:
        DataError: a NaN score, a document twice in a query.
    """
    best: dict[str, list[tuple[str, float]]] = {}
    worst: dict[str, list[tuple[str, float]]] = {}
    for query, ranking in run.rankings.items():
        check_ranking(run, query)
        relevance = qrels.get(query, {})
        pairs = list(ranking) if run.ordered else trec_order(list(ranking))
        scores = _float32(pairs).tolist()
        best[query], worst[query] = [], []
        for _, places in groupby(range(len(pairs)), key=scores.__getitem__):
            group = sorted((pairs[place] for place in places), key=lambda pair: relevance.get(pair[0], 0))
            worst[query] += group
            best[query] += sorted(group, key=lambda pair: -relevance.get(pair[0], 0))
    return Run(run.name, best), Run(run.name, worst)


def tie_bounds(run: Run, qrels: Qrels, metrics: Iterable[str] = DEFAULT_METRICS) -> dict[str, dict[str, tuple[float, float]]]:
    """Smallest and largest value of each metric over all orders of tied documents.

    Args:
        run: rankings with their true scores.
        qrels: query id -> document id -> relevance.
        metrics: names, see `metrics.parse_metric`; those of `TIE_METRICS`.

    Returns:
        metric -> query id -> (lowest, highest), both from 0 to 1; the queries are those of `evaluate_run`.

    Raises:
        UsageError: a metric without known bounds. Else as `evaluate_run`.
    """
    names = list(metrics)
    for name in names:
        if not _bounded(name):
            raise UsageError(f"metric {name!r}: its bounds over ties are not known; known: {', '.join(TIE_METRICS)}")
    high, low = (evaluate_run(order, qrels, names) for order in tie_orders(run, qrels))
    return {name: {query: (low[name][query], value) for query, value in high[name].items()} for name in names}


def mean_bounds(run: Run, qrels: Qrels, per_query: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | int]]:
    """Means over queries with every group of equal scores in its worst and in its best order: `tie_bounds` of a Result.

    Args:
        per_query: the run's own values (`evaluate_run`) by metric: only queries in which an order matters are evaluated again.

    Returns:
        metric -> `low`, `high`, `queries_affected` (those whose two ends differ), of metrics with known bounds and any value.
    """
    names = [name for name, values in per_query.items() if values and _bounded(name)]
    tied = {query: run.rankings[query] for query in qrels if _repeats(run.rankings.get(query, ()))}
    best, worst = tie_orders(Run(run.name, tied, run.ordered), qrels)
    matter = [query for query in tied if best.rankings[query] != worst.rankings[query]]
    ends: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in names}
    if matter and names:
        judged = {query: qrels[query] for query in matter}
        high, low = (evaluate_run(order, judged, names) for order in (best, worst))
        ends = {name: {query: (low[name][query], value) for query, value in high[name].items()} for name in names}
    found: dict[str, dict[str, float | int]] = {}
    for name in names:
        pairs = [ends[name].get(query, (value, value)) for query, value in per_query[name].items()]
        low_mean, high_mean = (math.fsum(pair[side] for pair in pairs) / len(pairs) for side in (0, 1))
        affected = sum(one != other for one, other in pairs)
        found[name] = {"low": low_mean, "high": high_mean, "queries_affected": affected}
    return found


def _float32(ranking: Sequence[tuple[str, float]]) -> np.ndarray:
    with np.errstate(over="ignore"):  # beyond float32 a score is infinite, as in trec_eval
        return np.asarray([score for _, score in ranking], dtype=np.float64).astype(np.float32)


def _repeats(ranking: Sequence[tuple[str, float]]) -> bool:
    """Whether any score occurs twice."""
    return len(set(_float32(ranking).tolist())) < len(ranking)


def _bounded(name: str) -> bool:
    return parse_metric(name).canonical.partition("@")[0] in TIE_METRICS
