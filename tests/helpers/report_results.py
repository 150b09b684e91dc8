"""Results to draw pages from: one with every entry, a small old one, a hostile one, many queries."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from maxsim_eval.types import PathResult, Result

METRICS = ("nDCG@10", "Recall@100", "MRR@10")
# Each would run where a page takes text for markup, ends its script element, or gives plotly a link to follow.
HOSTILE = (
    "<script>window.broken = 1</script>",
    "</script><script>window.broken = 2</script>",
    "<img src=x onerror='window.broken = 3'>",
    '"><svg onload="window.broken = 4">',
    "<!--<script>",
    "<a href='javascript:window.broken = 5'>click</a>",
    "{{ 7 * 7 }} ${window.broken = 6} %{fullData.name}",
    "' onmouseover='window.broken = 7",
    "\u2028\u2029 line ends of JavaScript",
    "\u202egnp.elif right to left",
)


def _statistics(verdict: str, metric: int) -> dict[str, Any]:
    """The statistics entry of a metric with that verdict."""
    mean = {"equivalent": 0.0001, "different": -0.02, "inconclusive": -0.002}[verdict] * (1 + metric / 10)
    width = {"equivalent": 0.0002, "different": 0.004, "inconclusive": 0.006}[verdict]
    return {
        "queries": 40, "changed": 7, "changed_share_at_most": 0.3, "mean": mean, "sd": 0.05, "low": mean - width, "high": mean + width,
        "p_value": 0.02, "p_adjusted": 0.0004 if verdict == "different" else 0.12, "bound": 0.003, "verdict": verdict,
        "queries_needed": 1234 if verdict == "inconclusive" else None,
    }  # fmt: skip


def _parity(place: int, ids: list[str]) -> dict[str, Any]:
    """Everything a parity object may hold."""
    verdicts = ("equivalent", "different", "inconclusive")
    errors = [max(0, 100 - 10 * abs(i - 8 - 3 * place)) for i in range(30)]
    return {
        "reference": "fp32",
        "delta": dict.fromkeys(METRICS, -0.01),
        "delta_per_query": {},
        "spearman": {"mean": 0.9999, "min": 0.99, "queries": len(ids), "sampled": False, "constant": 0, "constant_in_one": 0,
                     "percentiles": {"1": 0.991, "5": 0.995, "25": 0.999, "50": 0.9999}},
        "overlap": {f"@{k}": 1 - k / 10_000 for k in (1, 5, 10, 20, 50, 100)},
        "same_order": {f"@{k}": 1 - k / 200 for k in (1, 5, 10, 20, 50, 100)},
        "identical_order": {"k": 100, "identical": 3, "queries": len(ids), "fraction": 3 / len(ids)},
        "max_abs_error": 0.01, "mean_abs_error": 0.001, "max_rel_error": 0.001, "mean_rel_error": 0.0001, "mismatched_finite": 0,
        "statistics": {metric: _statistics(verdicts[(i + place) % 3], i) for i, metric in enumerate(METRICS)},
        "statistics_settings": {"level": 0.95, "resamples": 10_000, "seed": 0, "correction": "holm", "comparisons": 6},
        "error_histogram": {"edges": [2.0 ** (i - 20) for i in range(31)], "counts": errors, "zeros": 12, "below": 0, "above": 0},
        "rank_shifts": {"k": 100, "counts": [*([rank, rank, 40] for rank in range(1, 101)), [7, 8, 3], [8, 7, 3], [99, 0, 2], [0, 99, 2]]},
        "most_changed": [
            {"query": ids[i], "metric": "nDCG@10", "reference": 0.8, "value": 0.6 - i / 100, "delta": -0.2 - i / 100,
             "moved": [{"document": f"doc{j}", "reference_rank": j + 1, "rank": None if j == 3 else j + 2, "relevance": None if j else 1}
                       for j in range(4)]}
            for i in range(3)
        ],
    }  # fmt: skip


def full(queries: int = 40, share: float = 0.2, shifts: bool = False) -> Result:
    """A Result of three paths with every entry docs/result.md knows.

    Args:
        queries: how many; their ids are q0, q1, ... and sort by number.
        share: of the queries that change on a path.
        shifts: True: documents move from every rank to every rank.
    """
    chance = random.Random(0)
    ids = [f"q{i}" for i in range(queries)]
    base = {metric: {query: chance.choice((0.0, 1.0, chance.random())) for query in ids} for metric in METRICS}

    def path(place: int) -> PathResult:
        values = {
            metric: {
                query: min(1.0, max(0.0, value + chance.gauss(0, 0.1))) if place and chance.random() < share else value
                for query, value in found.items()
            }
            for metric, found in base.items()
        }
        parity = _parity(place, ids) if place else None
        if parity is not None and shifts:
            parity["rank_shifts"]["counts"] = [[a, b, 1 + a % 9] for a in range(101) for b in range(101) if a or b]
        return PathResult(
            metrics={metric: math.fsum(found.values()) / queries for metric, found in values.items()},
            per_query=values,
            seconds={"read": 0.1, "prepare": 0.2 * place, "score": 3.0 / (1 + place), "topk": 0.05, "total": 3.2 / (1 + place)},
            run=f"runs/{place}.trec",
            description=f"path number {place}",
            parity=parity,
            tie_bounds={metric: {"low": 0.5, "high": 0.6, "queries_affected": place} for metric in METRICS},
            memory={"host_peak_bytes": (place + 1) << 29, "device_peak_bytes": None if place == 2 else 1 << 30},
        )

    return Result(
        task={
            "source": "beir", "dataset": "scifact", "split": "test", "queries": queries, "documents": 5183, "query_tokens": 2681,
            "document_tokens": 468_756, "judged_pairs": 339, "exclude_same_id": False, "warnings": ["2 judged documents are missing"],
            "limits": None, "candidates": None,
            "lengths": {"queries": {"edges": [0, 4, 8, 12], "counts": [5, 30, 5]},
                        "documents": {"edges": [0, 100, 200, 300], "counts": [2000, 3000, 183]}},
        },
        encoder={"name": "lexical", "revision": "1", "dim": 128},
        k=100,
        paths={"fp32": path(0), "fp16": path(1), "int8": path(2)},
        environment={"python": "3.11.7", "torch": "2.13.0", "threads": 2},
        command=["evaluate.py", "beir", "scifact", "--paths", "fp32,fp16,int8"],
        created="2026-01-02T03:04:05+00:00",
    )  # fmt: skip


def bare() -> Result:
    """What a comparison of two runs, or a file of the first version, may hold: no scores, no statistics, no times, no lengths."""
    spearman = {"mean": None, "min": None, "queries": 0, "sampled": False, "constant": 0, "constant_in_one": 0}
    parity = {
        "reference": "a",
        "delta": {"nDCG@10": -0.25},
        "spearman": spearman,
        "max_abs_error": None,
        "error_histogram": None,
    }
    values = {"nDCG@10": {"q1": 1.0, "q2": 0.5}}
    other = {"nDCG@10": {"q1": 0.5, "q2": 0.5}}
    return Result(
        task={"source": "comparison", "dataset": "a", "split": "test", "queries": 2, "documents": 4},
        encoder={"name": "-"},
        k=10,
        paths={
            "a": PathResult({"nDCG@10": 0.75}, values, {}),
            "b.trec": PathResult({"nDCG@10": 0.5}, other, {}, parity=parity),
        },
        environment={},
        command=[],
        reference="a",
    )


# Properties that every object of JavaScript has, a number (which objects put before other names), white space that a form changes.
INHERITED = ("__proto__", "constructor", "toString", "hasOwnProperty", "7", "two  spaces\r\nand a line")


def renamed(made: Result, names: Mapping[str, str]) -> Result:
    """The result with other names for its paths and metrics."""

    def again(value: Any) -> Any:
        if isinstance(value, dict):
            return {names.get(key, key): again(entry) for key, entry in value.items()}
        return (
            [again(entry) for entry in value]
            if isinstance(value, list)
            else names.get(value, value)
            if isinstance(value, str)
            else value
        )

    paths = {
        names.get(name, name): replace(
            path,
            metrics=again(path.metrics),
            per_query=again(path.per_query),
            parity=again(path.parity),
            tie_bounds=again(path.tie_bounds),
        )
        for name, path in made.paths.items()
    }
    return replace(made, paths=paths, reference=names.get(made.reference or "", made.reference))


def hostile() -> Result:
    """Every text of a Result is something that must not be taken for markup."""
    made = full(len(HOSTILE))
    names = dict(zip((f"q{i}" for i in range(len(HOSTILE))), HOSTILE, strict=True))
    paths = {}
    for (name, path), odd in zip(made.paths.items(), ("fp32", *HOSTILE), strict=False):
        parity = None if path.parity is None else {**path.parity}
        if parity is not None:
            parity["reference"] = "fp32"
            parity["most_changed"] = [
                {"query": text, "metric": HOSTILE[0], "reference": 0.5, "value": 0.1, "delta": -0.4,
                 "moved": [{"document": text, "reference_rank": 1, "rank": 2, "relevance": 1}]}
                for text in HOSTILE
            ]  # fmt: skip
            parity["statistics"] = {**parity["statistics"], HOSTILE[2]: {**_statistics("different", 0), "verdict": HOSTILE[1]}}
        per_query = {
            metric: {names[query]: value for query, value in found.items()} for metric, found in path.per_query.items()
        }
        per_query[HOSTILE[2]] = per_query[HOSTILE[5]] = per_query["MRR@10"]
        paths[odd if name != "fp32" else "fp32"] = PathResult(
            {**path.metrics, HOSTILE[2]: 0.5, HOSTILE[5]: 0.5}, per_query, {**path.seconds, HOSTILE[3]: 1.0}, HOSTILE[4], HOSTILE[5], parity,
            path.tie_bounds, path.memory,
        )  # fmt: skip
    texts = {text: text for text in HOSTILE}
    return Result(
        task={
            **made.task,
            "source": HOSTILE[0],
            "dataset": HOSTILE[1],
            "split": HOSTILE[2],
            "warnings": list(HOSTILE),
            **texts,
        },
        encoder={"name": HOSTILE[3], "revision": HOSTILE[4], **texts},
        k=100,
        paths=paths,
        environment=texts,
        command=["evaluate.py", *HOSTILE],
        created=HOSTILE[0],
    )
