"""Which difference matters, by path and metric, and what the statistics say of every compared path.

The bounds are those of the gate (`thresholds.toml`). A path belongs to the first class that its name matches; one of no class (a run
of another tool) is held to class `exact`. The bound of a metric that its class does not list is

    Recall, Success, AnyHit, P, SetP, SetR, SetF and Rprec (what was found, not in which order)   that of Recall@10, where it is listed
    any other                                                                                     that of nDCG@10
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from maxsim_eval.comparison.metrics import parse_metric
from maxsim_eval.comparison.statistics import LEVEL, RESAMPLES, judge_paths
from maxsim_eval.comparison.thresholds import class_of, load_thresholds
from maxsim_eval.errors import UsageError
from maxsim_eval.types import PathResult

STRICTEST = "exact"
SEED = 0
_FOUND = ("Recall", "Success", "AnyHit", "P", "SetP", "SetR", "SetF", "Rprec")
_RANKED_BOUND, _FOUND_BOUND = "nDCG@10", "Recall@10"


def canonical_name(metric: str) -> str:
    """A metric's canonical name (`R@100`: `Recall@100`); one that this version does not know is left as it is."""
    try:
        return parse_metric(metric).canonical
    except UsageError:
        return metric


def bounds_of(path: str, metrics: Iterable[str]) -> dict[str, float]:
    """Metric -> the largest difference of means that does not matter for this path, by the packaged thresholds."""
    classes = load_thresholds()["classes"]
    listed = classes[class_of(path, classes) or STRICTEST]["delta"]
    found = {}
    for metric in metrics:
        name = canonical_name(metric)
        like = _FOUND_BOUND if name.partition("@")[0] in _FOUND and _FOUND_BOUND in listed else _RANKED_BOUND
        found[metric] = float(listed[name if name in listed else like])
    return found


def with_statistics(
    paths: Mapping[str, PathResult], reference: str, kinds: Mapping[str, str] | None = None
) -> dict[str, PathResult]:
    """All paths, with `statistics` and `statistics_settings` in the parity of those that are compared (docs/result.md).

    A metric is judged if the path and the reference have finite values of it for the same queries. Holm's correction is over all
    judged metrics of all paths: `p_adjusted` depends on which paths and metrics were compared.

    Args:
        paths: by name, with per-query values; those with parity are compared.
        reference: name of the one they are compared with.
        kinds: path -> the name whose class gives the bounds; default: the path's own.
    """
    first = paths[reference]
    compared = {name: path for name, path in paths.items() if path.parity is not None}
    bounds = {
        name: bounds_of((kinds or {}).get(name, name), [metric for metric in first.per_query if _paired(metric, first, path)])
        for name, path in compared.items()
    }
    judged = judge_paths(first, compared, bounds, LEVEL, RESAMPLES, SEED)
    settings = {
        "level": LEVEL,
        "resamples": RESAMPLES,
        "seed": SEED,
        "correction": "holm",
        "comparisons": sum(map(len, bounds.values())),
    }
    found = dict(paths)
    for name, path in compared.items():
        entries = {metric: entry.to_dict() for metric, entry in judged[name].items()}
        found[name] = replace(path, parity={**(path.parity or {}), "statistics": entries, "statistics_settings": settings})
    return found


def _paired(metric: str, first: PathResult, path: PathResult) -> bool:
    values, others = first.per_query[metric], path.per_query.get(metric, {})
    numbers = (*values.values(), *others.values())
    return bool(values) and values.keys() == others.keys() and all(map(math.isfinite, numbers))
