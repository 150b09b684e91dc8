"""What the bounds of a path's class (`thresholds.py`) say of it: findings, which the gate counts and the verdicts name.

A bound on a value that is missing or null fails: what could not be measured is not within it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from maxsim_eval.comparison.statistics import verdict_of
from maxsim_eval.comparison.thresholds import AT_MOST, class_of, load_thresholds
from maxsim_eval.comparison.verdicts import STRICTEST, canonical_name
from maxsim_eval.types import PathResult, Result

SLACK = 1e-12  # a difference of two means carries rounding of its own; bounds are not meant to that digit
_SAME_MEAN = 1e-9  # how far the mean of differences and the difference of means may be apart
NO_VALUE = "no value"
NAMES = {
    "max_rel_error": "max rel error",
    "mean_rel_error": "mean rel error",
    "max_abs_error": "max abs error",
    "mean_abs_error": "mean abs error",
    "mismatched_finite": "finite in one only",
}
"""Keys of a path's parity -> the name that every report and the gate have for it."""

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


def number_of(value: Any) -> float | None:
    """The value as a finite float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def value_of(values: Mapping[str, Any], metric: str) -> Any:
    """What stands under a metric's name, or under another name of the same metric (`R@10` for `Recall@10`); None: nothing does."""
    if metric in values:
        return values[metric]
    wanted = canonical_name(metric)
    return next((value for name, value in values.items() if canonical_name(name) == wanted), None)


def _object(value: Any) -> Mapping[str, Any]:
    """The value as a mapping; an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def _limit(what: str, value: Any, bound: float, *, least: bool = False) -> Finding:
    """A finding on one number: at most `bound`, or at least `bound`."""
    number = number_of(value)
    needed = f"{'>=' if least else '<='} {bound:g}"
    if number is None:
        return Finding(False, what, NO_VALUE, needed)
    ok = number >= bound - SLACK if least else number <= bound + SLACK
    return Finding(ok, what, f"{number:.6g}" if not least else f"{number:.7f}", needed)


def _equivalent(name: str, metric: str, path: PathResult, reference: PathResult, bound: float) -> Finding:
    """Whether the interval of the mean difference (the Result's statistics) lies within the bound of these thresholds."""
    what, needed = f"{name}: {metric} equivalent", f"the whole interval within +-{bound:g}"
    entry = _object(value_of(_object(_object(path.parity).get("statistics")), metric))
    mean, low, high, queries = (number_of(entry.get(key)) for key in ("mean", "low", "high", "queries"))
    mine, theirs = (number_of(value_of(one.metrics, metric)) for one in (path, reference))
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
        mine, theirs = (number_of(value_of(one.metrics, metric)) for one in (path, reference))
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
            findings.append(_limit(f"{name}: {NAMES[key]}", parity.get(key), bounds[key]))
    if "constant_in_one" in bounds:
        count = ranks.get("constant_in_one")
        findings.append(_limit(f"{name}: queries with constant scores in one path", count, bounds["constant_in_one"]))
    return findings


def parity_findings(result: Result, classes: Mapping[str, Mapping[str, Any]], equivalent: bool) -> list[Finding]:
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


def outside(result: Result) -> dict[str, list[Finding]]:
    """Compared path -> its findings outside the packaged bounds of its class, of values that were measured.

    A path of no class (a function under a name given in Python, a codec) is held to the strictest, as its statistics are. It is
    left out where scores were not compared, as in a comparison of run files: the statistics say all there is to say of it.
    """
    if result.reference is None or result.reference not in result.paths:
        return {}
    classes, reference = load_thresholds()["classes"], result.paths[result.reference]
    found = {}
    for name, path in result.paths.items():
        held = class_of(name, classes) or (STRICTEST if _scores_compared(path) else None)
        if path.parity is not None and held is not None:
            all_of_it = _path_findings(name, path, reference, classes[held], equivalent=False)
            found[name] = [finding for finding in all_of_it if not finding.ok and finding.found != NO_VALUE]
    return found


def _scores_compared(path: PathResult) -> bool:
    return any(number_of(_object(path.parity).get(key)) is not None for key in NAMES)
