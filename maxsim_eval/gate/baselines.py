"""The gate's baseline: what a Result must not fall below, as a small JSON file that is committed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxsim_eval.errors import DataError, UsageError, did_you_mean
from maxsim_eval.files import read_text, write_text, writing
from maxsim_eval.report.plausible import check_means
from maxsim_eval.report.result_json import TASK_FIT, check_task, dump_json, field, jsonable, load_json
from maxsim_eval.types import Result

BASELINE_SCHEMA = "maxsim-eval/baseline/1"
COUNTS = ("queries", "documents", "judged_pairs")
ENCODER_FIT = ("name", "revision", "dim")
_KEYS = ("schema", "task", "encoder", "k", "reference", "paths")
_TASK_KEYS = (*TASK_FIT, *COUNTS, "limits", "candidates")


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
        "task": {key: result.task[key] for key in (*TASK_FIT, *COUNTS) if key in result.task},
        "encoder": {key: result.encoder[key] for key in ENCODER_FIT if key in result.encoder},
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


def _refuse_unknown(entry: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """A misspelt key would silently drop its check."""
    for key in entry:
        if key not in known:
            raise DataError(f"{where}: holds {key!r}. {did_you_mean(key, known)}Known: {', '.join(known)}")


def check_baseline(baseline: Any, origin: str = "baseline") -> Mapping[str, Any]:
    """Validate a parsed baseline and return it.

    Raises:
        DataError: another schema, an entry that is missing, unknown or of the wrong type, or a mean that cannot be.
    """
    if not isinstance(baseline, Mapping) or baseline.get("schema") != BASELINE_SCHEMA:
        found = baseline.get("schema") if isinstance(baseline, Mapping) else baseline
        raise DataError(f"{origin}: schema is {str(found)[:60]!r}, need {BASELINE_SCHEMA!r}")
    _refuse_unknown(baseline, _KEYS, origin)
    task = field(baseline, "task", Mapping, origin, "an object")
    _refuse_unknown(task, _TASK_KEYS, f"{origin}: 'task'")
    check_task(task, f"{origin}: 'task'")
    encoder = field(baseline, "encoder", Mapping, origin, "an object")
    _refuse_unknown(encoder, ENCODER_FIT, f"{origin}: 'encoder'")
    field(encoder, "name", str, f"{origin}: 'encoder'", "text")
    field(baseline, "k", int, origin, "a whole number")
    reference = field(baseline, "reference", str, origin, "a path name")
    paths = field(baseline, "paths", Mapping, origin, "an object")
    for name in paths:
        field(paths, name, Mapping, f"{origin}: 'paths'", "an object of metrics")
        for metric in paths[name]:
            field(paths[name], metric, (int, float), f"{origin}: path {name!r}", "a number")
        check_means(paths[name], f"{origin}: path {name!r}:")
    if reference not in paths:
        raise DataError(f"{origin}: reference {reference!r} is not among its paths: {', '.join(paths) or 'none'}")
    return baseline


def load_baseline(path: Path | str) -> Mapping[str, Any]:
    """Read and validate a baseline file.

    Raises:
        DataError: unreadable, not JSON, another schema, or not valid.
    """
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise DataError(f"baseline {path}: cannot be read (no such file; gate --update-baseline makes it)") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"baseline {path}: cannot be read ({error})") from error
    return check_baseline(load_json(text, str(path)), str(path))
