"""Two run files of the same evaluation, as by a CPU and a GPU: equal rankings, but for ties within the error of a score.

    python benchmarks/alone/runs.py cpu/runs/fp16.trec gpu/runs/fp16.trec [--query-tokens 32 | --bound B] [--json FILE]

A path computes a score within B of the truth, so two files of the same embeddings differ by 2 B at most in a score, and put two
documents in different order only where each file has them within 4 B. The operator's B is 2e-6 times the sum of the norms of a
query's tokens, times the largest norm of a document's token: for unit tokens 2e-6 times `--query-tokens`, those of the longest
query. `--bound` gives B itself (other paths, other norms). A document that one file alone lists must be within 2 B of the other's
last score. Queries are counted whose order is the same, differs by ties alone, or is not explained by ties; the first of the last
are named. Exit status: 0 no more than ties, 1 more, 2 not comparable.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from maxsim_eval.data.trec import read_trec_run
from maxsim_eval.errors import MaxsimEvalError
from maxsim_eval.types import Run
from measure.names import OTHER, SAME, TIES
from measure.session import kernels
from results.file import write

SCHEMA = "maxsim-eval/runs-compared/1"
OPERATOR_BOUND = 2e-6  # most error of a score, over the norms of its tokens
Ranking = list[tuple[str, float]]


@dataclass
class Found:
    """What was counted over all queries."""

    counts: Counter[str] = field(default_factory=lambda: Counter({SAME: 0, TIES: 0, OTHER: 0}))
    moved: int = 0  # places with another document
    exchanged: int = 0  # documents of one file alone
    difference: float = 0.0  # the largest of a score
    top_10: int = 0  # queries whose first ten are the same documents
    first: list[str] = field(default_factory=list)  # what was not explained


def why_other(one: Ranking, other: Ranking, bound: float) -> str:
    """Why two rankings are not the same but for ties; empty where they are."""
    if len(one) != len(other):
        return f"{len(one)} documents in one file, {len(other)} in the other"
    scores, theirs = dict(one), dict(other)
    for document in scores.keys() & theirs.keys():
        apart = abs(scores[document] - theirs[document])
        if not apart <= 2 * bound:
            return f"{document}: scores {scores[document]:.7g} and {theirs[document]:.7g}, {apart:.2g} apart, {2 * bound:.2g} allowed"
    for mine, yours in ((one, other), (other, one)):
        held, last = dict(yours), yours[-1][1] if yours else float("-inf")
        for document, score in mine:
            if document not in held and not score <= last + 2 * bound:
                return f"{document}: score {score:.7g} in one file alone, whose last is {last:.7g} in the other"
        lowest = float("inf")
        for document, _ in mine:  # in one file's order the other's scores may rise by ties alone
            if document in held:
                if held[document] > lowest + 4 * bound:
                    return f"{document}: behind a document that the other file has {held[document] - lowest:.2g} below it"
                lowest = min(lowest, held[document])
    return ""


def rankings(run: Run) -> dict[str, Ranking]:
    """A run's rankings; those of another tool are ordered by trec_eval's rule."""
    order = {query: list(held) for query, held in run.rankings.items()}
    return (
        order
        if run.ordered
        else {query: sorted(held, key=lambda pair: (pair[1], pair[0]), reverse=True) for query, held in order.items()}
    )


def compared(one: dict[str, Ranking], other: dict[str, Ranking], bound: float | Mapping[str, float], named: int = 5) -> Found:
    """Compare all queries of two runs, by one bound or each by its own; names up to `named` queries that ties do not explain."""
    found = Found()
    for query in sorted(one.keys() | other.keys()):
        mine, yours = one.get(query, []), other.get(query, [])
        orders = [[document for document, _ in ranking] for ranking in (mine, yours)]
        scores = dict(yours)
        apart = [abs(score - scores[document]) for document, score in mine if document in scores]
        found.difference = max([found.difference, *apart])
        found.moved += sum(a != b for a, b in zip(*orders, strict=False)) + abs(len(mine) - len(yours))
        found.exchanged += len(set(orders[0]) ^ set(orders[1]))
        found.top_10 += set(orders[0][:10]) == set(orders[1][:10])
        why = why_other(mine, yours, bound[query] if isinstance(bound, Mapping) else bound)
        found.counts[OTHER if why else SAME if orders[0] == orders[1] else TIES] += 1
        if why and len(found.first) < named:
            found.first.append(f"{query}: {why}")
    return found


def described(found: Found, bound: float) -> dict[str, Any]:
    """What was counted, as JSON holds it."""
    return {
        "bound": bound, "queries": sum(found.counts.values()), "counts": dict(found.counts), "moved": found.moved,
        "exchanged": found.exchanged, "same_top_10": found.top_10, "largest_difference": found.difference, "first": found.first,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", type=Path, help="a run file")
    parser.add_argument("other", type=Path, help="a run file of the same embeddings")
    parser.add_argument("--query-tokens", type=int, default=32, help="unit tokens of the longest query (default 32)")
    parser.add_argument("--bound", type=float, help="what a score may be off, in place of the operator's for so many tokens")
    parser.add_argument("--json", type=Path, help="write the counts here")
    options = parser.parse_args(arguments)
    bound = options.bound if options.bound is not None else OPERATOR_BOUND * options.query_tokens
    if not bound >= 0:
        parser.error(f"--bound: got {bound}, need 0 or more")
    try:
        runs = [read_trec_run(path) for path in (options.one, options.other)]
    except MaxsimEvalError as problem:
        print(problem, file=sys.stderr)
        return 2
    one, other = map(rankings, runs)
    found = compared(one, other, bound)
    total = sum(found.counts.values())
    print(f"{total} queries: " + ", ".join(f"{count} {name}" for name, count in found.counts.items()))
    print(
        f"{found.moved} places with another document, {found.exchanged} documents in one file alone, the same first ten in "
        f"{found.top_10}; largest difference of a score {found.difference:.2g}, {2 * bound:.2g} allowed"
    )
    print("".join(f"{line}\n" for line in found.first), end="")
    names = {str(n): run.name for n, run in enumerate(runs)}
    write(options.json, {"schema": SCHEMA, "runs": names, **kernels(), **described(found, bound)})
    return 1 if found.counts[OTHER] else 0


if __name__ == "__main__":
    sys.exit(main())
