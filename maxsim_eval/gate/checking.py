"""The gate: a fresh Result against a committed baseline and thresholds; any failed finding means a non-zero exit.

A bound on a value that is missing or null fails: what could not be measured has not passed. Thresholds are read in `thresholds`,
baselines in `baselines.py`; `report.py` makes what a log and a job summary show of the findings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from maxsim_eval.comparison.statistics import verdict_of
from maxsim_eval.comparison.thresholds import AT_MOST, check_thresholds, class_of, load_thresholds
from maxsim_eval.data.subsets import describe, describe_candidates, same_candidates, same_subset
from maxsim_eval.errors import UsageError
from maxsim_eval.gate.baselines import (
    COUNTS,
    ENCODER_FIT,
    TASK_FIT,
    baseline_of,
    check_baseline,
    load_baseline,
    write_baseline,
)
from maxsim_eval.types import PathResult, Result

__all__ = [
    "Finding",
    "baseline_of",
    "check",
    "check_baseline",
    "check_thresholds",
    "load_baseline",
    "load_thresholds",
    "passed",
    "update_baseline",
    "write_baseline",
]

_SLACK = 1e-12  # a difference of two means carries rounding of its own; bounds are not meant to that digit
_SAME_MEAN = 1e-9  # the same mean, from the values of the queries and from two means

Kind = Literal["fit", "count", "path", "fall", "parity"]


@dataclass(frozen=True)
class Finding:
    """One thing the gate looked at: whether it is as needed, what it is, what was found and what is needed.

    `kind` says what it is about: whether the baseline fits, a count, a path that must be there, a fall below the baseline, or a path's
    parity with the reference. A new baseline changes all but the last.
    """

    ok: bool
    what: str
    found: str
    needed: str
    kind: Kind = "parity"


def _number(value: Any) -> float | None:
    """The value as a finite float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _object(value: Any) -> Mapping[str, Any]:
    """The value as a mapping; an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def _fit(result: Result, baseline: Mapping[str, Any]) -> list[Finding]:
    """Whether the baseline is about the same thing: dataset, split, subset, candidates, encoder, k, reference."""
    pairs = [(f"task {key}", result.task.get(key), baseline["task"].get(key)) for key in TASK_FIT]
    pairs += [
        (f"encoder {key}", result.encoder.get(key), baseline["encoder"][key])
        for key in ENCODER_FIT
        if key in baseline["encoder"]
    ]
    pairs += [("k", result.k, baseline["k"]), ("reference path", result.reference, baseline["reference"])]
    limits = [task.get("limits") for task in (result.task, baseline["task"])]
    lists = [task.get("candidates") for task in (result.task, baseline["task"])]
    subset, needed_subset = (describe(entry, ids=True) for entry in limits)
    listed, needed_list = (describe_candidates(entry, ids=True) for entry in lists)
    return [
        *(Finding(found == needed, f"baseline fits: {what}", str(found), str(needed), "fit") for what, found, needed in pairs),
        Finding(same_subset(*limits), "baseline fits: task subset", subset, needed_subset, "fit"),
        Finding(same_candidates(*lists), "baseline fits: candidates", listed, needed_list, "fit"),
    ]


def _counts(result: Result, baseline: Mapping[str, Any]) -> list[Finding]:
    counts = [(key, result.task.get(key), baseline["task"][key]) for key in COUNTS if key in baseline["task"]]
    return [Finding(found == needed, f"number of {key}", str(found), str(needed), "count") for key, found, needed in counts]


def _missing_paths(result: Result, baseline: Mapping[str, Any]) -> list[Finding]:
    return [
        Finding(name in result.paths, f"path {name}", "present" if name in result.paths else "missing", "present", "path")
        for name in baseline["paths"]
    ]


def _falls(result: Result, baseline: Mapping[str, Any], bounds: Mapping[str, float]) -> list[Finding]:
    """Reference path's means against the baseline's."""
    reference = baseline["reference"]
    if reference not in result.paths:
        return []  # already a finding of its own
    findings = []
    for metric, bound in bounds.items():
        now = _number(result.paths[reference].metrics.get(metric))
        before = _number(baseline["paths"][reference].get(metric))
        what = f"{reference}: {metric} against the baseline"
        if now is None or before is None:
            side = "the result" if now is None else "the baseline"
            findings.append(Finding(False, what, f"no value in {side}", "a number", "fall"))
        else:
            needed = f">= {before - bound:.6f} ({before:.6f} - {bound:g})"
            findings.append(Finding(now >= before - bound - _SLACK, what, f"{now:.6f}", needed, "fall"))
    return findings


def _limit(what: str, value: Any, bound: float, *, least: bool = False) -> Finding:
    """A finding on one number: at most `bound`, or at least `bound`."""
    number = _number(value)
    needed = f"{'>=' if least else '<='} {bound:g}"
    if number is None:
        return Finding(False, what, "no value", needed)
    ok = number >= bound - _SLACK if least else number <= bound + _SLACK
    return Finding(ok, what, f"{number:.6g}" if not least else f"{number:.7f}", needed)


def _equivalent(name: str, metric: str, path: PathResult, reference: PathResult, bound: float) -> Finding:
    """Whether the interval of the mean difference (the Result's statistics) lies within the bound of these thresholds."""
    what, needed = f"{name}: {metric} equivalent", f"the whole interval within +-{bound:g}"
    entry = _object(_object(_object(path.parity).get("statistics")).get(metric))
    mean, low, high, queries = (_number(entry.get(key)) for key in ("mean", "low", "high", "queries"))
    mine, theirs = _number(path.metrics.get(metric)), _number(reference.metrics.get(metric))
    if mean is None or low is None or high is None or queries is None or mine is None or theirs is None:
        return Finding(False, what, "no interval", needed)
    if abs(mean - (mine - theirs)) > _SAME_MEAN:
        return Finding(False, what, f"statistics of another difference ({mean:+.6f})", f"those of {mine - theirs:+.6f}")
    verdict = verdict_of(low, high, bound, int(queries))
    return Finding(verdict == "equivalent", what, f"{verdict}: {low:+.6f} to {high:+.6f} ({queries:.0f} queries)", needed)


def _path_findings(
    name: str, path: PathResult, reference: PathResult, bounds: Mapping[str, Any], equivalent: bool
) -> list[Finding]:
    """One path against the bounds of its class."""
    parity = _object(path.parity)
    ranks, overlaps = _object(parity.get("spearman")), _object(parity.get("overlap"))
    findings = []
    for metric, bound in bounds.get("delta", {}).items():
        # From the metrics themselves, so a stale or edited delta entry cannot pass.
        mine, theirs = _number(path.metrics.get(metric)), _number(reference.metrics.get(metric))
        difference = None if mine is None or theirs is None else abs(mine - theirs)
        findings.append(_limit(f"{name}: |delta {metric}|", difference, bound))
    for metric in bounds.get("delta", {}) if equivalent else bounds.get("equivalent", ()):
        findings.append(_equivalent(name, metric, path, reference, bounds["delta"][metric]))
    for key, entry in (("spearman_mean", "mean"), ("spearman_min", "min")):
        if key in bounds:
            findings.append(_limit(f"{name}: Spearman, {entry}", ranks.get(entry), bounds[key], least=True))
    for cutoff, bound in bounds.get("overlap", {}).items():
        findings.append(_limit(f"{name}: top-{cutoff[1:]} overlap", overlaps.get(cutoff), bound, least=True))
    for key in AT_MOST:
        if key in bounds:
            findings.append(_limit(f"{name}: {key.replace('_', ' ')}", parity.get(key), bounds[key]))
    if "constant_in_one" in bounds:
        count = ranks.get("constant_in_one")
        findings.append(_limit(f"{name}: queries with constant scores in one path", count, bounds["constant_in_one"]))
    return findings


def _parity(result: Result, classes: Mapping[str, Mapping[str, Any]], equivalent: bool) -> list[Finding]:
    """Every path but the reference against its class."""
    if result.reference is None or result.reference not in result.paths:
        return [Finding(False, "reference path", "none", "a path the others are compared with")]
    reference = result.paths[result.reference]
    findings: list[Finding] = []
    for name, path in result.paths.items():
        if name == result.reference:
            continue
        found = class_of(name, classes)
        if found is None:
            needed = f"a class that lists it (classes: {', '.join(classes)})"
            findings.append(Finding(False, f"{name}: thresholds", "no class matches", needed))
        else:
            findings += _path_findings(name, path, reference, classes[found], equivalent)
    return findings


def check(
    result: Result,
    baseline: Mapping[str, Any],
    thresholds: Mapping[str, Any] | None = None,
    *,
    equivalent: bool = False,
) -> list[Finding]:
    """Check a Result against a baseline and thresholds.

    Args:
        result: the fresh evaluation.
        baseline: as from `baseline_of` or `load_baseline`.
        thresholds: as from `load_thresholds`; None takes the packaged defaults.
        equivalent: every metric that has a bound must also be shown to lie within it: the verdict `equivalent`, not only the mean.

    Returns:
        Every finding, in order: fit, counts, paths, the reference's metrics (only where the baseline fits: otherwise they
        are about something else), each path's parity. The gate passes when all are ok, see `passed`.

    Raises:
        UsageError, DataError: thresholds or baseline that are not valid.
    """
    thresholds = load_thresholds() if thresholds is None else check_thresholds(thresholds)
    baseline = check_baseline(baseline)
    fit = _fit(result, baseline)
    findings = fit + _counts(result, baseline) + _missing_paths(result, baseline)
    if all(finding.ok for finding in fit):
        findings += _falls(result, baseline, thresholds["fall"])
    return findings + _parity(result, thresholds["classes"], equivalent)


def passed(findings: Iterable[Finding]) -> bool:
    """Whether something was checked and all of it is as needed."""
    results = [finding.ok for finding in findings]
    return bool(results) and all(results)


def update_baseline(path: Path | str, result: Result, *, replace: bool = False) -> list[str]:
    """Make the Result the baseline: write the file, whole or not at all.

    Args:
        replace: also where the file there is a baseline of something else, or no baseline.

    Returns:
        What changed, a line each: paths, counts and means of the reference. Empty where nothing did; a new file is a line, too.

    Raises:
        UsageError: the file is a baseline of another dataset, split, subset, encoder, k or reference; the Result has no reference.
        DataError: the file is no baseline, a metric of the Result is no number, or the file cannot be written.
    """
    new = baseline_of(result)
    if replace or not Path(path).exists():
        write_baseline(path, result)
        return ["a new baseline"]
    old = load_baseline(path)
    other = [finding for finding in _fit(result, old) if not finding.ok]
    if other:
        first = other[0]
        more = f" (and {len(other) - 1} more differ)" if len(other) > 1 else ""
        raise UsageError(
            f"{path}: is the baseline of something else: {first.what.partition(': ')[2]} {first.needed} there, {first.found} in the "
            f"result{more}; name another file, or say --replace"
        )
    write_baseline(path, result)
    return _changes(old, new)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    lines = [
        f"number of {key}: {old['task'].get(key)} -> {new['task'].get(key)}"
        for key in COUNTS
        if old["task"].get(key) != new["task"].get(key)
    ]
    lines += [f"path {name}: gone" for name in old["paths"] if name not in new["paths"]]
    lines += [f"path {name}: new" for name in new["paths"] if name not in old["paths"]]
    name = new["reference"]
    before, after = old["paths"][name], new["paths"][name]
    for metric in dict.fromkeys([*before, *after]):
        if before.get(metric) != after.get(metric):
            values = (f"{value:.6f}" if value is not None else "none" for value in (before.get(metric), after.get(metric)))
            lines.append(f"{name}: {metric}: {' -> '.join(values)}")
    return lines
