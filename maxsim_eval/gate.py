"""The gate: a fresh Result against a committed baseline and thresholds; any failed finding means a non-zero exit.

A bound on a value that is missing or null fails: what could not be measured has not passed.
"""

from __future__ import annotations

import fnmatch
import importlib.resources
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxsim_eval.errors import DataError, UnknownNameError, UsageError
from maxsim_eval.files import write_text, writing
from maxsim_eval.metrics import parse_metric
from maxsim_eval.parity import OVERLAPS
from maxsim_eval.result_json import check_candidates, check_limits, dump_json, field, jsonable, load_json
from maxsim_eval.subsets import describe, describe_candidates, same_candidates, same_subset
from maxsim_eval.types import PathResult, Result

BASELINE_SCHEMA = "maxsim-eval/baseline/1"
THRESHOLDS_SCHEMA = "maxsim-eval/thresholds/1"
DEFAULT_THRESHOLDS = "thresholds.toml"

_SLACK = 1e-12  # a difference of two means carries rounding of its own; bounds are not meant to that digit
_AT_MOST = ("max_rel_error", "max_abs_error", "mismatched_finite")
_COUNTS = ("queries", "documents", "judged_pairs")
_TASK_FIT = ("source", "dataset", "split")
_ENCODER_FIT = ("name", "revision", "dim")
_CLASS_KEYS = ("paths", "delta", "overlap", "spearman_mean", "spearman_min", "constant_in_one", *_AT_MOST)


@dataclass(frozen=True)
class Finding:
    """One thing the gate looked at: whether it is as needed, what it is, what was found and what is needed."""

    ok: bool
    what: str
    found: str
    needed: str


def _refuse_unknown(keys: Iterable[str], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in keys:
        if key not in known:
            raise UnknownNameError(f"threshold in {where}:", key, known)


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: got {value!r}, need a table")
    return value


def _bound(value: Any, where: str, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UsageError(f"{where}: got {value!r}, need a number from {low:g} to {high:g}")


def _check_class(entry: Mapping[str, Any], where: str) -> None:
    _refuse_unknown(entry, _CLASS_KEYS, where)
    names = entry.get("paths")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"{where}: paths is {names!r}, need a list of path names, such as ['fp16']")
    for metric, bound in _table(entry.get("delta", {}), f"{where}: delta").items():
        parse_metric(metric)
        _bound(bound, f"{where}: delta {metric!r}", 0.0, 1.0)
    for cutoff, bound in _table(entry.get("overlap", {}), f"{where}: overlap").items():
        _refuse_unknown([cutoff], [f"@{known}" for known in OVERLAPS], f"{where}: overlap")
        _bound(bound, f"{where}: overlap {cutoff!r}", 0.0, 1.0)
    for key in ("spearman_mean", "spearman_min"):
        if key in entry:
            _bound(entry[key], f"{where}: {key}", -1.0, 1.0)
    for key in ("constant_in_one", *_AT_MOST):
        if key in entry:
            _bound(entry[key], f"{where}: {key}", 0.0, 1e300)


def check_thresholds(thresholds: Mapping[str, Any], origin: str = "thresholds") -> Mapping[str, Any]:
    """Validate thresholds (the parsed TOML, see `thresholds.toml`) and return them.

    Raises:
        UnknownNameError: a key, metric or overlap cutoff that does not exist; the message offers near names.
        UsageError: a value of the wrong type or range, no `fall`, no `classes`, or a file of another schema.
    """
    _refuse_unknown(thresholds, ("schema", "fall", "classes"), origin)
    if thresholds.get("schema", THRESHOLDS_SCHEMA) != THRESHOLDS_SCHEMA:
        raise UsageError(f"{origin}: schema is {thresholds['schema']!r}, need {THRESHOLDS_SCHEMA!r}")
    for key in ("fall", "classes"):
        if not _table(thresholds.get(key, {}), f"{origin}: {key}"):
            raise UsageError(f"{origin}: no [{key}] entries, so nothing would be guarded; need at least one")
    for metric, bound in thresholds["fall"].items():
        parse_metric(metric)
        _bound(bound, f"{origin}: fall {metric!r}", 0.0, 1.0)
    for name, entry in thresholds["classes"].items():
        _check_class(_table(entry, f"{origin}: class {name!r}"), f"{origin}: class {name!r}")
    return thresholds


def load_thresholds(path: Path | str | None = None) -> Mapping[str, Any]:
    """Read and validate a thresholds TOML file; None reads the packaged defaults.

    Raises:
        UsageError: unreadable, not TOML, or not valid (see `check_thresholds`).
    """
    try:
        if path is None:
            text = importlib.resources.files("maxsim_eval").joinpath(DEFAULT_THRESHOLDS).read_text(encoding="utf-8")
        else:
            text = Path(path).read_text(encoding="utf-8")
        return check_thresholds(tomllib.loads(text), str(path or DEFAULT_THRESHOLDS))
    except OSError as error:
        raise UsageError(f"thresholds {path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"thresholds {path}: not valid TOML: {error}") from error


def baseline_of(result: Result) -> dict[str, Any]:
    """The baseline to commit for a Result: task, encoder, k, reference and each path's mean metrics.

    Raises:
        UsageError: the Result has no reference path.
        DataError: one of its metrics is not a finite number.
    """
    if result.reference is None or result.reference not in result.paths:
        raise UsageError("baseline: the result has no reference path; evaluate with one, such as --paths fp32,fp16")
    for name, path in result.paths.items():
        for metric, value in path.metrics.items():
            if not math.isfinite(value):
                raise DataError(f"baseline: path {name!r} has no value for {metric}, need a number")
    baseline: dict[str, Any] = {
        "schema": BASELINE_SCHEMA,
        "task": {key: result.task[key] for key in (*_TASK_FIT, *_COUNTS) if key in result.task},
        "encoder": {key: result.encoder[key] for key in _ENCODER_FIT if key in result.encoder},
        "k": result.k,
        "reference": result.reference,
        "paths": {name: dict(path.metrics) for name, path in result.paths.items()},
    }
    for key in ("limits", "candidates"):
        if result.task.get(key) is not None:
            baseline["task"][key] = result.task[key]
    plain: dict[str, Any] = jsonable(baseline)
    return plain


def write_baseline(path: Path | str, result: Result) -> None:
    """Write `baseline_of(result)` to `path`, whole or not at all."""
    with writing(path):
        write_text(path, dump_json(baseline_of(result)) + "\n")


def check_baseline(baseline: Any, origin: str = "baseline") -> Mapping[str, Any]:
    """Validate a parsed baseline and return it.

    Raises:
        DataError: another schema, or an entry missing or of the wrong type.
    """
    if not isinstance(baseline, Mapping) or baseline.get("schema") != BASELINE_SCHEMA:
        found = baseline.get("schema") if isinstance(baseline, Mapping) else baseline
        raise DataError(f"{origin}: schema is {str(found)[:60]!r}, need {BASELINE_SCHEMA!r}")
    task = field(baseline, "task", Mapping, origin, "an object")
    for key in _TASK_FIT:
        field(task, key, str, f"{origin}: 'task'", "text")
    for key in ("queries", "documents"):
        field(task, key, int, f"{origin}: 'task'", "a whole number")
    check_limits(task, f"{origin}: 'task'")
    check_candidates(task, f"{origin}: 'task'")
    field(field(baseline, "encoder", Mapping, origin, "an object"), "name", str, f"{origin}: 'encoder'", "text")
    field(baseline, "k", int, origin, "a whole number")
    reference = field(baseline, "reference", str, origin, "a path name")
    paths = field(baseline, "paths", Mapping, origin, "an object")
    for name in paths:
        field(paths, name, Mapping, f"{origin}: 'paths'", "an object of metrics")
        for metric in paths[name]:
            field(paths[name], metric, (int, float), f"{origin}: path {name!r}", "a number")
    if reference not in paths:
        raise DataError(f"{origin}: reference {reference!r} is not among its paths: {', '.join(paths) or 'none'}")
    return baseline


def load_baseline(path: Path | str) -> Mapping[str, Any]:
    """Read and validate a baseline file.

    Raises:
        DataError: unreadable, not JSON, another schema, or not valid.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"baseline {path}: cannot be read ({error})") from error
    return check_baseline(load_json(text, str(path)), str(path))


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
    pairs = [(f"task {key}", result.task.get(key), baseline["task"].get(key)) for key in _TASK_FIT]
    pairs += [
        (f"encoder {key}", result.encoder.get(key), baseline["encoder"][key])
        for key in _ENCODER_FIT
        if key in baseline["encoder"]
    ]
    pairs += [("k", result.k, baseline["k"]), ("reference path", result.reference, baseline["reference"])]
    limits = [task.get("limits") for task in (result.task, baseline["task"])]
    subset = Finding(same_subset(*limits), "baseline fits: task subset", *(describe(entry, ids=True) for entry in limits))
    lists = [task.get("candidates") for task in (result.task, baseline["task"])]
    texts = (describe_candidates(entry, ids=True) for entry in lists)
    return [
        *(Finding(found == needed, f"baseline fits: {what}", str(found), str(needed)) for what, found, needed in pairs),
        subset,
        Finding(same_candidates(*lists), "baseline fits: candidates", *texts),
    ]


def _counts(result: Result, baseline: Mapping[str, Any]) -> list[Finding]:
    counts = [(key, result.task.get(key), baseline["task"][key]) for key in _COUNTS if key in baseline["task"]]
    return [Finding(found == needed, f"number of {key}", str(found), str(needed)) for key, found, needed in counts]


def _missing_paths(result: Result, baseline: Mapping[str, Any]) -> list[Finding]:
    return [
        Finding(name in result.paths, f"path {name}", "present" if name in result.paths else "missing", "present")
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
            findings.append(Finding(False, what, f"no value in {side}", "a number"))
        else:
            needed = f">= {before - bound:.6f} ({before:.6f} - {bound:g})"
            findings.append(Finding(now >= before - bound - _SLACK, what, f"{now:.6f}", needed))
    return findings


def _limit(what: str, value: Any, bound: float, *, least: bool = False) -> Finding:
    """A finding on one number: at most `bound`, or at least `bound`."""
    number = _number(value)
    needed = f"{'>=' if least else '<='} {bound:g}"
    if number is None:
        return Finding(False, what, "no value", needed)
    ok = number >= bound - _SLACK if least else number <= bound + _SLACK
    return Finding(ok, what, f"{number:.6g}" if not least else f"{number:.7f}", needed)


def _path_findings(name: str, path: PathResult, reference: PathResult, bounds: Mapping[str, Any]) -> list[Finding]:
    """One path against the bounds of its class."""
    parity = _object(path.parity)
    ranks, overlaps = _object(parity.get("spearman")), _object(parity.get("overlap"))
    findings = []
    for metric, bound in bounds.get("delta", {}).items():
        # From the metrics themselves, so a stale or edited delta entry cannot pass.
        mine, theirs = _number(path.metrics.get(metric)), _number(reference.metrics.get(metric))
        difference = None if mine is None or theirs is None else abs(mine - theirs)
        findings.append(_limit(f"{name}: |delta {metric}|", difference, bound))
    for key, entry in (("spearman_mean", "mean"), ("spearman_min", "min")):
        if key in bounds:
            findings.append(_limit(f"{name}: Spearman, {entry}", ranks.get(entry), bounds[key], least=True))
    for cutoff, bound in bounds.get("overlap", {}).items():
        findings.append(_limit(f"{name}: top-{cutoff[1:]} overlap", overlaps.get(cutoff), bound, least=True))
    for key in _AT_MOST:
        if key in bounds:
            findings.append(_limit(f"{name}: {key.replace('_', ' ')}", parity.get(key), bounds[key]))
    if "constant_in_one" in bounds:
        count = ranks.get("constant_in_one")
        findings.append(_limit(f"{name}: queries with constant scores in one path", count, bounds["constant_in_one"]))
    return findings


def _parity(result: Result, classes: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Every path but the reference against its class."""
    if result.reference is None or result.reference not in result.paths:
        return [Finding(False, "reference path", "none", "a path the others are compared with")]
    reference = result.paths[result.reference]
    findings: list[Finding] = []
    for name, path in result.paths.items():
        if name == result.reference:
            continue
        matching = (
            bounds for bounds in classes.values() if any(fnmatch.fnmatchcase(name, pattern) for pattern in bounds["paths"])
        )
        bounds = next(matching, None)
        if bounds is None:
            needed = f"a class that lists it (classes: {', '.join(classes)})"
            findings.append(Finding(False, f"{name}: thresholds", "no class matches", needed))
        else:
            findings += _path_findings(name, path, reference, bounds)
    return findings


def check(result: Result, baseline: Mapping[str, Any], thresholds: Mapping[str, Any] | None = None) -> list[Finding]:
    """Check a Result against a baseline and thresholds.

    Args:
        result: the fresh evaluation.
        baseline: as from `baseline_of` or `load_baseline`.
        thresholds: as from `load_thresholds`; None takes the packaged defaults.

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
    return findings + _parity(result, thresholds["classes"])


def passed(findings: Iterable[Finding]) -> bool:
    """Whether something was checked and all of it is as needed."""
    results = [finding.ok for finding in findings]
    return bool(results) and all(results)


def render(findings: Iterable[Finding], *, every: bool = False) -> str:
    """Lines for a CI log: what failed (and, with `every`, what passed), then one line of summary."""
    findings = list(findings)
    failed = [finding for finding in findings if not finding.ok]
    shown = failed + ([finding for finding in findings if finding.ok] if every else [])
    lines = [f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what}: {finding.found}, need {finding.needed}" for finding in shown]
    if passed(findings):
        lines.append(f"gate passed: {len(findings)} checks")
    else:
        lines.append(f"gate FAILED: {len(failed)} of {len(findings)} checks")
    return "\n".join(lines)
