"""What equal scores hide: the best and the worst value of a metric over every order of documents that a run scores alike.

A run that gives two documents one score has not ranked them; some rule did (ours: place in the corpus, trec_eval's: document id).
Where both ends agree no rule matters. Source: McSherry and Najork 2008, 'Computing Information Retrieval Performance Measures
Efficiently in the Presence of Tied Scores', whose means over all orders lie between these ends.

Putting a more relevant document before a less relevant one never lowers the metrics listed here, so within every group of equal scores
the order by relevance, falling or rising, gives the two ends; trec_eval then computes them as it does any run.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import numpy as np

from maxsim_eval.errors import UsageError
from maxsim_eval.metrics import DEFAULT_METRICS, evaluate_run, parse_metric
from maxsim_eval.runs import check_ranking, trec_order
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
        with np.errstate(over="ignore"):  # beyond float32 a score is infinite, as in trec_eval
            scores = np.asarray([score for _, score in pairs], dtype=np.float64).astype(np.float32).tolist()
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
        base = parse_metric(name).canonical.partition("@")[0]
        if base not in TIE_METRICS:
            raise UsageError(f"metric {name!r}: its bounds over ties are not known; known: {', '.join(TIE_METRICS)}")
    high, low = (evaluate_run(order, qrels, names) for order in tie_orders(run, qrels))
    return {name: {query: (low[name][query], value) for query, value in high[name].items()} for name in names}
