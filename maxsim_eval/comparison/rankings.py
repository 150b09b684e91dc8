"""How far a path's rankings are from the reference's: overlap, order, where documents moved, which queries changed most."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from maxsim_eval.data.trec import ranked
from maxsim_eval.types import PathResult, Qrels, Run

OVERLAPS = (1, 5, 10, 20, 50, 100)
SHIFT_DEPTH = 100  # ranks up to which moves are counted
MOST_CHANGED, MOST_MOVED = 20, 10  # queries that are named, and documents of each
FIRST = 10  # ranks of these queries that are listed, moved or not
SHOWN_METRIC = "nDCG@10"


def overlap(reference: Sequence[str], other: Sequence[str], cutoff: int) -> float:
    """Share of the reference's first `cutoff` documents that are among the other's; 1.0 when both retrieved nothing."""
    kept, found = reference[:cutoff], other[:cutoff]
    if not kept:
        return 0.0 if found else 1.0
    return len(set(kept) & set(found)) / len(kept)


def _queries(reference: Run, other: Run) -> list[str]:
    return list(dict.fromkeys([*reference.rankings, *other.rankings]))


def compare_rankings(reference: Run, other: Run, k: int, documents: int | None) -> dict[str, Any]:
    """Overlap, order and rank shifts over the queries of either run.

    Args:
        reference, other: rankings, of which the first `k` documents count.
        documents: how many a query could retrieve; None where that is not known.
    """
    queries = _queries(reference, other)
    sums = dict.fromkeys(OVERLAPS, 0.0)
    same = dict.fromkeys(OVERLAPS, 0)
    shifts: Counter[tuple[int, int]] = Counter()
    depth = min(k, SHIFT_DEPTH)
    identical = longest = 0
    for query in queries:
        left, right = ranked(reference, query)[:k], ranked(other, query)[:k]
        longest = max(longest, len(left), len(right))
        identical += left == right
        shifts.update(_moves(left[:depth], right[:depth]))
        for cutoff in OVERLAPS:
            sums[cutoff] += overlap(left, right, cutoff)
            same[cutoff] += left[:cutoff] == right[:cutoff]
    # A list cut at k knows nothing of places beyond k: '@20' of a run to depth 10 would be '@10' under another name.
    unknown = (documents is None or documents > k) and longest >= k

    def shares(found: Mapping[int, float]) -> dict[str, float | None]:
        return {
            f"@{cutoff}": None if not queries or (cutoff > k and unknown) else found[cutoff] / len(queries)
            for cutoff in OVERLAPS
        }

    return {
        "overlap": shares(sums),
        "same_order": shares(same),
        "identical_order": {
            "k": k,
            "identical": identical,
            "queries": len(queries),
            "fraction": identical / len(queries) if queries else None,
        },
        "rank_shifts": {"k": depth, "counts": [[*ranks, count] for ranks, count in sorted(shifts.items())]},
    }


def _moves(left: Sequence[str], right: Sequence[str]) -> list[tuple[int, int]]:
    """(rank in the reference, rank in the other) of every document of either list, from 1; 0: not in that list."""
    if left == right:
        return [(rank, rank) for rank in range(1, len(left) + 1)]
    places = {document: rank for rank, document in enumerate(right, 1)}
    moves = [(rank, places.pop(document, 0)) for rank, document in enumerate(left, 1)]
    return moves + [(0, rank) for rank in places.values()]


def most_changed(
    reference: PathResult, other: PathResult, reference_run: Run, run: Run, k: int, qrels: Qrels | None = None
) -> list[dict[str, Any]]:
    """The queries whose nDCG@10 changed most (then: with most moved documents), and the documents that moved.

    Where the two lack nDCG@10 it is the first metric that both have. Queries without a value in both are left out, as are those where
    nothing changed. Documents are those among the first 100 of either list; the most relevant come first, then those ranked best.

    Args:
        k: depth of the rankings.
        qrels: for the documents' relevance; None: not known.
    """
    names = [name for name in reference.per_query if name in other.per_query]
    if not names:
        return []
    metric = SHOWN_METRIC if SHOWN_METRIC in names else names[0]
    before, after = reference.per_query[metric], other.per_query[metric]
    depth = min(k, SHIFT_DEPTH)
    changes = []
    for place, query in enumerate(before):
        if not (math.isfinite(before[query]) and math.isfinite(after.get(query, math.nan))):
            continue
        left, right = ranked(reference_run, query)[:depth], ranked(run, query)[:depth]
        moved = 0 if left == right else sum(one != two for one, two in _moves(left, right))
        delta = after[query] - before[query]
        if moved or delta != 0:
            changes.append((-abs(delta), -moved, place, query))
    return [
        {
            "query": query,
            "metric": metric,
            "reference": before[query],
            "value": after[query],
            "delta": after[query] - before[query],
            "moved": _moved(ranked(reference_run, query)[:k], ranked(run, query)[:k], depth, (qrels or {}).get(query, {})),
            "first": _first(ranked(reference_run, query), ranked(run, query), (qrels or {}).get(query, {})),
        }
        for _, _, _, query in heapq.nsmallest(MOST_CHANGED, changes)
    ]


def _first(left: Sequence[str], right: Sequence[str], judged: Mapping[str, int]) -> list[dict[str, Any]]:
    """Both lists' first documents, rank by rank (None: the list ends before), with their relevance (None: not judged)."""
    rows = list(itertools.zip_longest(left[:FIRST], right[:FIRST]))
    return [
        {"reference": one, "document": two, "reference_relevance": judged.get(one), "relevance": judged.get(two)}
        for one, two in rows
    ]


def _moved(left: Sequence[str], right: Sequence[str], depth: int, judged: Mapping[str, int]) -> list[dict[str, Any]]:
    places = [{document: rank for rank, document in enumerate(ranking, 1)} for ranking in (left, right)]
    found = []
    for document in dict.fromkeys([*left[:depth], *right[:depth]]):
        before, after = (place.get(document) for place in places)
        if before != after:
            relevance = judged.get(document)
            best = min(rank for rank in (before, after) if rank is not None)
            entry = {"document": document, "reference_rank": before, "rank": after, "relevance": relevance}
            found.append((-(relevance or 0), best, document, entry))
    return [entry for _, _, _, entry in heapq.nsmallest(MOST_MOVED, found, key=lambda one: one[:3])]
