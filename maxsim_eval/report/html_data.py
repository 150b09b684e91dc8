"""What the HTML page's scripts draw from: one compact JSON-able object made from a Result (see `html.py`).

What a Result does not hold as docs/result.md says is left out, and the page says that it is missing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from scipy import special

from maxsim_eval.report.values import entries, mapping, number, statistics
from maxsim_eval.types import PathResult, Result

LEVEL = 0.95
_DIGITS = 6  # of values in the page; whether a query changed is decided before rounding
METRIC = "nDCG@10"  # the metric shown first, where a result has it


def _all_numbers(value: Any) -> list[float]:
    """`value` where it is a list of finite numbers, else an empty one."""
    found = [kept for entry in entries(value) if (kept := number(entry)) is not None]
    return found if len(found) == len(entries(value)) else []


def _rounded(value: Any) -> float | None:
    found = number(value)
    return None if found is None else round(found, _DIGITS)


def metric_names(result: Result) -> list[str]:
    """Metrics with values per query in any path, in order."""
    return list(dict.fromkeys(name for path in result.paths.values() for name in path.per_query))


def base_path(result: Result) -> str | None:
    """The path the others are stored as changes of: the reference, or the first where there is none."""
    return result.reference if result.reference in result.paths else next(iter(result.paths), None)


def _changes(base: Sequence[Any], values: Sequence[Any]) -> dict[str, list[Any]]:
    """Where `values` differ from `base`: places and values. Paths that should be equal change few queries, so this is short."""
    places = [i for i, (left, right) in enumerate(zip(base, values, strict=True)) if left != right]
    return {"at": places, "value": [_rounded(values[i]) for i in places]}


def _per_query(result: Result) -> tuple[list[str], dict[str, Any]]:
    """Query ids, and metric -> `base` (values of the base path) and `paths` (the others' changes)."""
    base = base_path(result)
    names = metric_names(result)
    ids = list(
        dict.fromkeys(query for path in result.paths.values() for name in names for query in path.per_query.get(name, {}))
    )
    found: dict[str, Any] = {}
    for name in names:
        columns = {
            path: [number(value) for value in map(entry.per_query.get(name, {}).get, ids)]
            for path, entry in result.paths.items()
            if name in entry.per_query
        }
        of_base = columns.get(base or "", [None] * len(ids))
        found[name] = {
            "base": [_rounded(value) for value in of_base],
            "paths": {path: _changes(of_base, values) for path, values in columns.items() if path != base},
        }
    return ids, found


def _mean(path: PathResult, metric: str) -> dict[str, Any] | None:
    """Mean of a metric and Student's t interval over its queries (None for one query, or without values per query)."""
    mean = number(path.metrics.get(metric))
    if mean is None:
        return None
    values = [value for value in map(number, path.per_query.get(metric, {}).values()) if value is not None]
    if len(values) < 2:
        return {"mean": mean, "half": None}
    try:
        centre = math.fsum(values) / len(values)
        variance = math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)
    except OverflowError:  # values near the largest double
        return {"mean": mean, "half": None}
    half = float(special.stdtrit(len(values) - 1, (1 + LEVEL) / 2)) * math.sqrt(variance / len(values))
    return {"mean": mean, "half": number(half)}


def histogram(value: Any) -> dict[str, Any] | None:
    """A histogram entry with `edges` (n + 1 ascending numbers) and `counts` (n numbers of 0 or more), else None."""
    found = mapping(value)
    edges, counts = (_all_numbers(found.get(key)) for key in ("edges", "counts"))
    if not counts or len(edges) != len(counts) + 1 or min(counts) < 0:
        return None
    if any(right <= left for left, right in itertools.pairwise(edges)):
        return None
    others = {key: number(found.get(key)) or 0 for key in ("zeros", "below", "above")}
    return {"edges": edges, "counts": counts, **others}


def _shifts(path: PathResult) -> list[list[float]] | None:
    """`[reference rank, rank, pairs]` of every cell of a path's rank shifts."""
    rows = [_all_numbers(row) for row in entries(mapping(path.parity, "rank_shifts").get("counts"))]
    return rows if rows and all(len(row) == 3 for row in rows) else None


def _errors(path: PathResult) -> dict[str, Any] | None:
    found = histogram(mapping(path.parity).get("error_histogram"))
    return found if found is not None and found["edges"][0] > 0 else None  # the axis is logarithmic


def _bytes(path: PathResult) -> dict[str, float | None] | None:
    found = mapping(path.memory)
    kept = {key: number(found.get(key)) for key in ("host_peak_bytes", "device_peak_bytes")}
    return kept if any(value is not None for value in kept.values()) else None


def _costs(result: Result) -> dict[str, dict[str, float]]:
    """What quality is weighed against, by kind and path: `seconds` of scoring, `bytes` a document; kinds that tell paths apart."""
    seconds = {name: number(path.seconds.get("total")) for name, path in result.paths.items()}
    size = {name: number(mapping(path.memory).get("document_bytes")) for name, path in result.paths.items()}
    found = {}
    for kind, values in (("seconds", seconds), ("bytes", size)):
        known = {name: value for name, value in values.items() if value is not None}
        if len(set(known.values())) > 1 and any(_differences(result.paths[name]) for name in known):
            found[kind] = known
    return found


def _differences(path: PathResult) -> dict[str, Any] | None:
    kept = {}
    for metric, entry in statistics(path).items():
        found: dict[str, Any] = {key: number(entry.get(key)) for key in ("mean", "low", "high", "bound")}
        if found["mean"] is not None:
            kept[metric] = {**found, "verdict": str(entry.get("verdict"))}
    return kept or None


def _by_path(result: Result, draw: Callable[[PathResult], Any]) -> dict[str, Any]:
    found = {name: draw(path) for name, path in result.paths.items()}
    return {name: entry for name, entry in found.items() if entry is not None}


def page_data(result: Result) -> dict[str, Any]:
    """Everything that tables and plots of the page need, without NaN: see the scripts in `templates/`.

    Plots that a Result has nothing for have an empty entry.
    """
    ids, values = _per_query(result)
    means = {
        metric: {name: mean for name, path in result.paths.items() if (mean := _mean(path, metric)) is not None}
        for metric in dict.fromkeys(name for path in result.paths.values() for name in path.metrics)
    }
    lengths = mapping(result.task.get("lengths"))
    phases = {name: {key: number(value) for key, value in path.seconds.items()} for name, path in result.paths.items()}
    return {
        "reference": result.reference if result.reference in result.paths else None,
        "base": base_path(result),
        "paths": list(result.paths),
        "metrics": list(values),
        "metric": METRIC if METRIC in values else next(iter(values), None),
        "level": LEVEL,
        "queries": ids,
        "values": values,
        "means": means,
        "differences": _by_path(result, _differences),
        "errors": _by_path(result, _errors),
        "shifts": _by_path(result, _shifts),
        "seconds": {name: kept for name, kept in phases.items() if any(value is not None for value in kept.values())},
        "memory": _by_path(result, _bytes),
        "costs": _costs(result),
        "lengths": {role: drawn for role in ("queries", "documents") if (drawn := histogram(lengths.get(role))) is not None},
    }
