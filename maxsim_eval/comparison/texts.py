"""The texts of the queries and documents that a report shows, shortened: ids alone tell nobody what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxsim_eval.types import PathResult, Task

MOST = 200  # letters


def shown_texts(task: Task, paths: Mapping[str, PathResult]) -> dict[str, dict[str, str]]:
    """`queries` and `documents`, id -> text, of the queries that changed most and the documents listed for them; pages have none."""
    queries, documents = set(), set()
    for path in paths.values():
        for entry in (path.parity or {}).get("most_changed") or ():
            queries.add(entry["query"])
            documents |= {moved["document"] for moved in entry["moved"]}
            documents |= {row[side] for row in entry["first"] for side in ("reference", "document")} - {None}
    return {
        "queries": dict(_texts(task.query_ids, task.queries, queries)),
        "documents": dict(_texts(task.document_ids, task.documents, documents)),
    }


def _texts(ids: Sequence[str], items: Sequence[Any], wanted: set[str]) -> Iterator[tuple[str, str]]:
    if not wanted:
        return
    for place, name in enumerate(ids):
        if name in wanted:
            item = items[place]
            if isinstance(item, str):
                yield name, shortened(item)


def shortened(text: str) -> str:
    """At most 200 letters, whole words, on one line."""
    line = " ".join(text[: 4 * MOST].split())
    return line if len(line) <= MOST else line[: MOST - 4].rpartition(" ")[0] + " ..."
