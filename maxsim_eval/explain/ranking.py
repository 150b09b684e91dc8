"""Why a query's ranking is as it is: its top hit, its best relevant document and the first relevant one that it misses, explained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxsim_eval.cache.embeddings import check_widths
from maxsim_eval.data.subsets import limit_task
from maxsim_eval.explain.explaining import Explanation, Opened, path_with_winners, place_of
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.finite import one_row
from maxsim_eval.scoring.scoring import score_path
from maxsim_eval.types import Encoder, Task

SCHEMA = "maxsim-eval/explain-query/1"
CUTOFF = 10


@dataclass(frozen=True)
class Ranked:
    """A document of a query's ranking: why it is shown, its rank (from 1 on; None: not retrieved), its score explained."""

    why: str
    rank: int | None
    explanation: Explanation


@dataclass(frozen=True)
class QueryExplanation:
    """A query's ranking by one path: `documents` explained, how many are `relevant`, and how many of these are among the first 10."""

    query: str
    documents: tuple[Ranked, ...]
    relevant: int
    found: int

    def as_json(self) -> dict[str, Any]:
        """JSON-able."""
        documents = [{"why": one.why, "rank": one.rank, **one.explanation.as_json()} for one in self.documents]
        counts = {"relevant": self.relevant, f"relevant_in_first_{CUTOFF}": self.found}
        return {"schema": SCHEMA, "query": self.query, **counts, "documents": documents}


def explain_query(
    task: Task,
    encoder: Encoder | str,
    query: str,
    *,
    path: str = "fp32",
    cache_dir: Path | str = "embeddings_cache",
    device: str = "auto",
    encoder_options: Mapping[str, Any] | None = None,
    limit_queries: int | None = None,
    limit_documents: int | None = None,
    limit_seed: int = 0,
    quiet: bool = False,
) -> QueryExplanation:
    """Rank all documents for one query by a path, and explain three of them; embeddings come from the cache.

    Arguments and errors are those of `explain_pair`.
    """
    how = path_with_winners(path)
    kept = limit_task(task, queries=limit_queries, documents=limit_documents, seed=limit_seed)
    row = place_of("query", query, task.query_ids)
    opened = Opened.of(task, kept, path, how, encoder, cache_dir, device=device, options=encoder_options, quiet=quiet)
    tokens = one_row(opened.found.queries, row)
    check_widths(opened.found, tokens)
    own = next((place for place, name in enumerate(kept.document_ids) if name == query), -1) if task.exclude_same_id else -1
    asked = Asked((query,), kept.document_ids, 1, np.array([own]), np.zeros(1, np.int64), paths={path: opened.how})
    scores = np.full((1, opened.found.documents.documents), -np.inf, np.float32)
    score_path(path, tokens, opened.corpus, asked, scores)
    order = [int(place) for place in np.argsort(-scores[0], kind="stable") if scores[0, place] != -np.inf]
    relevant = {name for name, grade in task.qrels.get(query, {}).items() if grade > 0}
    ranks = {kept.document_ids[place]: rank for rank, place in enumerate(order, 1)}
    held = kept.document_ids if relevant else ()
    there = sorted((name for name in held if name in relevant), key=lambda name: ranks.get(name, len(held) + 1))
    documents = tuple(
        Ranked(why, ranks.get(name), opened.pair(row, place_of("document", name, kept.document_ids)))
        for name, why in _shown(kept.document_ids[order[0]] if order else None, there, ranks).items()
    )
    return QueryExplanation(query, documents, len(relevant), sum(ranks.get(name, CUTOFF + 1) <= CUTOFF for name in relevant))


def _shown(top: str | None, relevant: list[str], ranks: Mapping[str, int]) -> dict[str, str]:
    """Document -> why it is shown; one with several reasons is shown once, with all of them."""
    shown: dict[str, str] = {}
    missed = next((name for name in relevant if ranks.get(name, CUTOFF + 1) > CUTOFF), None)
    best = next(iter(relevant), None)
    for name, why in (
        (top, "top hit"),
        (best, "best relevant document"),
        (missed, f"first relevant document beyond rank {CUTOFF}"),
    ):
        if name is not None:
            shown[name] = f"{shown[name]}, {why}" if name in shown else why
    return shown
