"""The gate's thresholds: the TOML file, packaged (`thresholds.toml`) or one's own, and which class of bounds a path belongs to."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from maxsim_eval.comparison.metrics import parse_metric
from maxsim_eval.comparison.rankings import OVERLAPS
from maxsim_eval.errors import UnknownNameError, UsageError
from maxsim_eval.parsing import settings_of

THRESHOLDS_SCHEMA = "maxsim-eval/thresholds/1"
DEFAULT_THRESHOLDS = "thresholds.toml"
AT_MOST = ("max_rel_error", "max_abs_error", "mismatched_finite")
_CLASS_KEYS = ("paths", "delta", "equivalent", "overlap", "spearman_mean", "spearman_min", "constant_in_one", *AT_MOST)


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
    for key in ("constant_in_one", *AT_MOST):
        if key in entry:
            _bound(entry[key], f"{where}: {key}", 0.0, 1e300)
    shown = entry.get("equivalent", [])
    if not isinstance(shown, list) or not all(isinstance(metric, str) for metric in shown):
        raise UsageError(f"{where}: equivalent is {shown!r}, need a list of metrics, such as ['nDCG@10']")
    for metric in shown:
        if metric not in entry.get("delta", {}):
            raise UsageError(
                f"{where}: equivalent names {metric!r}, which has no bound in delta; need one to be equivalent within"
            )


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
    found = settings_of("thresholds", path, "maxsim_eval", DEFAULT_THRESHOLDS)
    return check_thresholds(found, str(path or DEFAULT_THRESHOLDS))


def class_of(path: str, classes: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Name of the first class of the thresholds whose patterns a path's name matches; None: of no class."""
    matching = (name for name, entry in classes.items() if any(fnmatch.fnmatchcase(path, text) for text in entry["paths"]))
    return next(matching, None)
