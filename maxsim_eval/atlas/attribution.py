"""What a ranking loses, part by part, and the parts add up: by its length, its candidates, its scores; and what its ties leave open.

    reference                                          the exact ranking
    reference cut to as many documents as the ranking  -> lost by length (truncation)
    the ranking's own documents, ranked exactly        -> lost by candidates: what was never found
    the ranking as it is                               -> lost by scores: what was found and ranked wrong (a codec)

Ties: how far the metric lies from its worst and its best order of equal scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from maxsim_eval.atlas.running import Finished
from maxsim_eval.comparison.metrics import evaluate_run, means
from maxsim_eval.types import Qrels, Run


@dataclass(frozen=True)
class Loss:
    """One metric of one ranking: `total = truncation + candidates + scores`, each what is lost (below 0: won)."""

    metric: str
    total: float
    truncation: float
    candidates: float
    scores: float
    ties: tuple[float, float]  # what the worst and the best order of ties would change


def losses(reference: Finished, ranking: Finished, reranked: Finished, qrels: Qrels) -> list[Loss]:
    """The loss of every metric of `ranking`; `reranked` holds all of its documents in the reference's order."""
    lengths = {query: len(found) for query, found in ranking.run.rankings.items()}
    cut = {query: list(found)[: lengths.get(query, 0)] for query, found in reference.run.rankings.items()}
    shortened = means(evaluate_run(Run("cut", cut, ordered=True), qrels, list(reference.metrics)))
    found = []
    for metric, exact in reference.metrics.items():
        short, ranked, own = shortened[metric], reranked.metrics[metric], ranking.metrics[metric]
        bounds: Mapping[str, float] = (ranking.ties or {}).get(metric) or {"low": own, "high": own}
        ties = (float(bounds["low"]) - own, float(bounds["high"]) - own)
        found.append(Loss(metric, exact - own, exact - short, short - ranked, ranked - own, ties))
    return found
