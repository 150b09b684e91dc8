"""Small tasks, made of texts that stand in the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from maxsim_eval.types import Task


def small_task(queries: Sequence[Any], documents: Sequence[Any], /, **more: Any) -> Task:
    """Queries q0, q1, ... and documents d0, d1, ..., of which d0 is relevant to all; `more` are fields of the task, in place of these."""
    query_ids = more.get("query_ids", [f"q{n}" for n in range(len(queries))])
    chosen: dict[str, Any] = {
        "source": "local",
        "dataset": "small",
        "split": "test",
        "query_ids": query_ids,
        "queries": list(queries),
        "document_ids": [f"d{n}" for n in range(len(documents))],
        "documents": list(documents),
        "qrels": {query: {"d0": 1} for query in query_ids},
    }
    return Task(**{**chosen, **more})
