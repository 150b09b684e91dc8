"""Subsets of a task: a seeded sample of its queries, then of its documents, and how a Result says that it is of one.

What is drawn depends on the seed and on ids alone: neither the order of the files nor the machine nor Python's random module
changes it, and with one seed a smaller subset lies within a larger one. Every document that was judged for a kept query stays,
as in the paper's 500K documents of HotpotQA. Kept queries and documents keep their order, so ties are broken as in the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from maxsim_eval.data.items import take
from maxsim_eval.errors import UsageError
from maxsim_eval.hashing import feed
from maxsim_eval.types import Task

WHOLE = "the whole collection"


def limit_queries(task: Task, n: int, seed: int = 0) -> Task:
    """A seeded sample of `n` of the task's queries (those with a judgement), in their order, with the qrels restricted to them.

    With `n` at or above the number of queries the task is returned as it is.

    Raises:
        UsageError: n below 1.
    """
    _require_positive("queries", n)
    judged = _judged_queries(task)
    if n >= len(judged):
        return task
    order = sorted(judged, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())
    kept = set(order[:n])
    rows = [row for row, name in enumerate(task.query_ids) if name in kept]
    names = [task.query_ids[row] for row in rows]
    return replace(
        task,
        query_ids=names,
        queries=take(task.queries, rows),
        qrels={name: task.qrels[name] for name in names},
        provenance={**task.provenance, "limit_queries": n, "limit_seed": seed},
    )


def limit_documents(task: Task, n: int, seed: int = 0) -> Task:
    """`n` documents, in corpus order: all that were judged (whatever their grade), the rest drawn without replacement.

    Queries and qrels stay as they are: judgements of documents the corpus lacks stay too. With `n` at or above the number of
    documents the task is returned as it is.

    Raises:
        UsageError: n below 1, or below the number of judged documents in the corpus; the message names both.
    """
    _require_positive("documents", n)
    if n >= len(task.document_ids):
        return task
    chosen = _judged_mask(task)
    judged = int(chosen.sum())
    if n < judged:
        raise UsageError(
            f"limit of documents: got {n}, need {judged} or more: the {len(task.query_ids)} queries have {judged} judged "
            "documents in the corpus, and all of them are kept (fewer queries have fewer)"
        )
    others = np.flatnonzero(~chosen)
    drawn = _draw([task.document_ids[row] for row in others.tolist()], n - judged, seed)
    chosen[others[drawn]] = True
    rows = np.flatnonzero(chosen).tolist()
    return replace(
        task,
        document_ids=[task.document_ids[row] for row in rows],
        documents=take(task.documents, rows),
        provenance={**task.provenance, "limit_documents": n, "limit_seed": seed},
    )


def limit_task(task: Task, *, queries: int | None = None, documents: int | None = None, seed: int = 0) -> Task:
    """`limit_queries`, then `limit_documents`; None limits nothing, and a task nothing is left out of is returned as it is."""
    if queries is not None:
        task = limit_queries(task, queries, seed)
    return task if documents is None else limit_documents(task, documents, seed)


def _require_positive(what: str, n: int) -> None:
    if n < 1:
        raise UsageError(f"limit of {what}: got {n}, need 1 or more")


def _judged_queries(task: Task) -> list[str]:
    """The queries an evaluation is over: those with a judgement (all queries of a task from `load_task`)."""
    return [name for name in task.query_ids if task.qrels.get(name)]


def _judged_mask(task: Task) -> np.ndarray:
    """`[N]` bool: which documents were judged for a query of the task."""
    judged = {name for query in task.query_ids for name in task.qrels.get(query, ())}
    return np.fromiter((name in judged for name in task.document_ids), bool, len(task.document_ids))


def _draw(names: Sequence[str], count: int, seed: int) -> np.ndarray:
    """`[count]` places of the names with the smallest seeded hashes: a draw that no order of the names changes."""
    if count == 0:
        return np.empty(0, np.int64)
    hashes = np.fromiter((_hash(name, seed) for name in names), np.uint64, len(names))
    last = np.partition(hashes, count - 1)[count - 1]
    below = np.flatnonzero(hashes < last)
    # 64 bits can be equal for two of very many names: the names themselves decide then.
    level = sorted(np.flatnonzero(hashes == last).tolist(), key=lambda place: names[place])
    return np.concatenate([below, np.asarray(level[: count - len(below)], np.int64)])


def _hash(name: str, seed: int) -> int:
    # "document": one whose id is a query's id must not be drawn because the query was.
    text = f"{seed}:document:{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def rows_of(whole: Sequence[str], kept: Iterable[str]) -> np.ndarray:
    """`[M]` int64: places in `whole` of the ids that were kept, ascending."""
    names = set(kept)
    return np.fromiter((row for row, name in enumerate(whole) if name in names), np.int64)


def limits_of(
    task: Task, kept: Task, *, queries: int | None, documents: int | None, seed: int
) -> dict[str, dict[str, Any] | int | str] | None:
    """The `limits` entry of a Result (docs/result.md); None where nothing was left out.

    Args:
        task, kept: the whole task and what `limit_task` made of it.
        queries, documents, seed: as `limit_task` was given them.
    """
    if kept is task:
        return None
    return {
        "seed": seed,
        "queries": {"limit": queries, "before": len(task.query_ids), "after": len(kept.query_ids)},
        "documents": {
            "limit": documents,
            "before": len(task.document_ids),
            "after": len(kept.document_ids),
            "judged": int(_judged_mask(kept).sum()),
        },
        "judged_pairs": {"before": task.judged_pairs, "after": kept.judged_pairs},
        "ids_sha256": _ids_hash(kept),
    }


def _ids_hash(task: Task) -> str:
    """SHA-256 of which queries and documents there are, in whatever order."""
    digest = hashlib.sha256()
    for kind, names in ((b"queries", task.query_ids), (b"documents", task.document_ids)):
        feed(digest, [kind, str(len(names)).encode()])
        feed(digest, (name.encode("utf-8", "surrogatepass") for name in sorted(names)))
    return digest.hexdigest()


def idle_limits(task: Task, *, queries: int | None, documents: int | None) -> Iterator[str]:
    """A sentence for every limit that leaves nothing out, so that nobody takes the whole for a subset."""
    for what, limit, count in (
        ("queries", queries, len(_judged_queries(task))),
        ("documents", documents, len(task.document_ids)),
    ):
        if limit is not None and limit >= count:
            yield f"the limit of {limit} {what} leaves none out: there are {count}"


def same_subset(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two `limits` entries are of one subset of equally large collections (None: the whole collection)."""
    if one is None or other is None:
        return one is other
    return _identity(one) == _identity(other)


def _identity(limits: Mapping[str, Any]) -> tuple[Any, ...]:
    sizes = (limits[side][when] for side in ("queries", "documents") for when in ("before", "after"))
    return (limits["ids_sha256"], *sizes)


def same_candidates(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two `candidates` entries list the same pairs (None: everything was searched)."""
    if one is None or other is None:
        return one is other
    return bool(one["sha256"] == other["sha256"])


def describe_candidates(candidates: Mapping[str, Any] | None, *, ids: bool = False) -> str:
    """What a `candidates` entry says, in words; with `ids` so that two lists never read the same."""
    if candidates is None:
        return "all documents"
    text = f"{candidates['pairs']:,} candidates of run {candidates['name']!r}"
    return f"{text} ({candidates['sha256'][:12]})" if ids else text


def describe(limits: Mapping[str, Any] | None, *, ids: bool = False) -> str:
    """What a `limits` entry says, in words; with `ids` so that two subsets never read the same."""
    if limits is None:
        return WHOLE
    counts = (f"{limits[side]['after']:,} of {limits[side]['before']:,} {side}" for side in ("queries", "documents"))
    return f"{' and '.join(counts)} (seed {limits['seed']}{', ids ' + limits['ids_sha256'][:12] if ids else ''})"
