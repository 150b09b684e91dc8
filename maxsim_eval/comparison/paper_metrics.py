"""Metrics as the paper's own scripts define them, beside trec_eval's and under names of their own.

A figure of the paper can only be compared with one of the same definition:

`AnyHit@k`    1 when any relevant document is among the first k, else 0. A query without a relevant document has no value and is
              left out of the mean (trec_eval's `Success@k` counts it as 0). The paper calls the mean "recall".
`nDCG-exp@k`  DCG with gain 2^rel - 1 and discount log2(rank + 1), over that of the best possible ranking. For judgements of 0 and
              1 it equals trec_eval's nDCG, whose gain is rel itself. A query without a relevant document counts 0, as there.

Judgements of 0 and below are not relevant and gain nothing, as in trec_eval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from maxsim_eval.errors import DataError

MAX_RELEVANCE = 60  # gains are then below 2^60, and sums of them far from overflow

Row = Mapping[str, int]


def any_hit(ranking: Sequence[str], row: Row, k: int) -> float | None:
    """`AnyHit@k` of one query: `ranking` best first, `row` document id -> relevance; None for a query without a relevant one."""
    if not any(relevance > 0 for relevance in row.values()):
        return None
    return float(any(row.get(document, 0) > 0 for document in ranking[:k]))


def exponential_ndcg(ranking: Sequence[str], row: Row, k: int) -> float:
    """`nDCG-exp@k` of one query: `ranking` best first, `row` document id -> relevance.

    Raises:
        DataError: a relevance above 60, whose gain would drown every other.
    """
    highest = max(row.values(), default=0)
    if highest > MAX_RELEVANCE:
        raise DataError(f"nDCG-exp: relevance {highest}, need {MAX_RELEVANCE} or less (its gain is 2^relevance - 1)")
    ideal = _dcg(sorted(row.values(), reverse=True)[:k])
    return _dcg([row.get(document, 0) for document in ranking[:k]]) / ideal if ideal else 0.0


def _dcg(relevances: Sequence[int]) -> float:
    gains = (2.0**relevance - 1.0 if relevance > 0 else 0.0 for relevance in relevances)
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))


PAPER_METRICS: dict[str, Callable[[Sequence[str], Row, int], float | None]] = {
    "AnyHit": any_hit,
    "nDCG-exp": exponential_ndcg,
}
