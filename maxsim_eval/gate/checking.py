"""The gate: a fresh Result against a committed baseline and thresholds; any failed finding means a non-zero exit.

Thresholds are read in `comparison/thresholds.py`, a path is held against them in `comparison/bounds.py`, baselines are read in
`baselines.py`; `report.py` makes what a log and a job summary show of the findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from maxsim_eval.comparison.bounds import SLACK, Finding, number_of, parity_findings, value_of
from maxsim_eval.comparison.thresholds import check_thresholds, load_thresholds
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
from maxsim_eval.types import Result

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
    return [
        Finding(found == needed, f"number of {_words(key)}", str(found), str(needed), "count") for key, found, needed in counts
    ]


def _words(key: str) -> str:
    return key.replace("_", " ")


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
        now = number_of(value_of(result.paths[reference].metrics, metric))
        before = number_of(value_of(baseline["paths"][reference], metric))
        what = f"{reference}: {metric} against the baseline"
        if now is None or before is None:
            side = "the result" if now is None else "the baseline"
            findings.append(Finding(False, what, f"no value in {side}", "a number", "fall"))
        else:
            needed = f">= {before - bound:.6f} ({before:.6f} - {bound:g})"
            findings.append(Finding(now >= before - bound - SLACK, what, f"{now:.6f}", needed, "fall"))
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
    return findings + parity_findings(result, thresholds["classes"], equivalent)


def passed(findings: Iterable[Finding]) -> bool:
    """Whether something was checked and all of it is as needed."""
    results = [finding.ok for finding in findings]
    return bool(results) and all(results)


def check_update(
    path: Path | str, result: Result, thresholds: Mapping[str, Any], *, equivalent: bool = False, replace: bool = False
) -> list[Finding]:
    """Check, as `check` does, whether the Result may become the baseline: against the present one or, without one, its parity.

    A baseline of something else counts as none here; `update_baseline` refuses it.
    """
    old = None if replace or not Path(path).exists() else load_baseline(path)
    if old is None or not all(finding.ok for finding in _fit(result, old)):
        old = baseline_of(result)
    return check(result, old, thresholds, equivalent=equivalent)


def update_baseline(path: Path | str, result: Result, *, replace: bool = False) -> list[str]:
    """Make the Result the baseline: write the file, whole or not at all.

    Args:
        replace: also where the file there is a baseline of something else, or no baseline.

    Returns:
        What changed, a line each: paths, counts and means of the reference. Empty where nothing did; a new file is a line, too.

    Raises:
        UsageError: the file is a baseline of another dataset, split, subset, encoder, k or reference; or is a link; the Result has no
            reference.
        DataError: the file is no baseline, a metric of the Result is no number, or the file cannot be written.
    """
    new = baseline_of(result)
    if Path(path).is_symlink():  # renaming a new file over it would leave the old one where others read it
        raise UsageError(f"{path}: is a link, need the file itself: {Path(path).resolve()}")
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
        f"number of {_words(key)}: {old['task'].get(key)} -> {new['task'].get(key)}"
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
