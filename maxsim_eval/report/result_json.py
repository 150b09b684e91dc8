"""Result to and from JSON, schema `maxsim-eval/result/1` (documented in docs/result.md). JSON holds null, never NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxsim_eval.errors import DataError
from maxsim_eval.files import read_text
from maxsim_eval.parsing import json_of
from maxsim_eval.report.plausible import check_path
from maxsim_eval.types import PathResult, Result

SCHEMA = "maxsim-eval/result/1"
TASK_FIT = ("source", "dataset", "split")  # which collection a result is of
RESULT_FILE = "result.json"
_INDENTED_LEVELS = 4  # deeper objects (one metric's queries, one overlap table) stand on one line


def jsonable(value: Any) -> Any:
    """Plain JSON values: numpy numbers become Python's, NaN and infinities null, mappings dicts, sequences lists.

    Raises:
        TypeError: a value JSON cannot hold.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.generic):
        return jsonable(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry) for entry in value]
    raise TypeError(f"a result cannot hold {type(value).__name__} {value!r}, need numbers, text, lists and mappings")


def dump_json(value: Any, level: int = 0) -> str:
    """JSON text, indented for people down to a few levels and compact below; `value` as from `jsonable`."""
    if not isinstance(value, dict) or not value or level >= _INDENTED_LEVELS:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    inner, outer = "  " * (level + 1), "  " * level
    entries = (f"{inner}{json.dumps(key, ensure_ascii=False)}: {dump_json(entry, level + 1)}" for key, entry in value.items())
    return "{\n" + ",\n".join(entries) + f"\n{outer}}}"


def _path_json(path: PathResult) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "description": path.description,
        "metrics": path.metrics,
        "seconds": path.seconds,
        "run": path.run,
        "memory": path.memory,
        "search": path.search,
        "tie_bounds": path.tie_bounds,
        "parity": path.parity,
        "per_query": path.per_query,
    }
    for name in ("memory", "search", "tie_bounds", "parity"):
        if entry[name] is None:
            del entry[name]
    return entry


def to_json(result: Result) -> str:
    """Result as JSON text (docs/result.md); non-finite numbers become null."""
    return dump_json(to_document(result)) + "\n"


def to_document(result: Result) -> dict[str, Any]:
    """As `to_json`, before it is text."""
    document: dict[str, Any] = jsonable(
        {
            "schema": SCHEMA,
            "created": result.created,
            "task": result.task,
            "encoder": result.encoder,
            "k": result.k,
            "reference": result.reference,
            "paths": {name: _path_json(path) for name, path in result.paths.items()},
            "environment": result.environment,
            "command": list(result.command),
        }
    )
    return document


def load_json(text: str | bytes, origin: str) -> Any:
    """Parse strict JSON (`json_of`), no key twice.

    Raises:
        DataError: not JSON; the message names `origin`.
    """
    try:
        return json_of(text, once=True)
    except ValueError as error:
        raise DataError(f"{origin}: not valid JSON: {error}") from None


def field(document: Mapping[str, Any], key: str, kinds: type | tuple[type, ...], where: str, need: str) -> Any:
    """Entry `key` of a parsed JSON object.

    Raises:
        DataError: missing or of another type; the message names `where`, the key, what was found and `need`.
    """
    if key not in document:
        raise DataError(f"{where}: no {key!r}, need {need}")
    value = document[key]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise DataError(f"{where}: {key!r} is {json.dumps(value)[:60]}, need {need}")
    return value


def _numbers(value: Any, where: str) -> dict[str, float]:
    """Name -> number; null (a value that was not finite) reads back as NaN."""
    if not isinstance(value, dict):
        raise DataError(f"{where} is {json.dumps(value)[:60]}, need an object of numbers")
    for key, entry in value.items():
        if entry is not None and (isinstance(entry, bool) or not isinstance(entry, int | float)):
            raise DataError(f"{where}: {key!r} is {json.dumps(entry)[:60]}, need a number or null")
    return {key: math.nan if entry is None else entry for key, entry in value.items()}


def _path_from(value: Any, where: str) -> PathResult:
    if not isinstance(value, dict):
        raise DataError(f"{where} is {json.dumps(value)[:60]}, need an object")
    run = value.get("run")
    objects = {name: value.get(name) for name in ("parity", "tie_bounds", "memory", "search")}
    if run is not None and not isinstance(run, str):
        raise DataError(f"{where}: 'run' is {json.dumps(run)[:60]}, need a file name or null")
    for name, entry in objects.items():
        if entry is not None and not isinstance(entry, dict):
            raise DataError(f"{where}: {name!r} is {json.dumps(entry)[:60]}, need an object or null")
    per_query = value.get("per_query", {})
    if not isinstance(per_query, dict):
        raise DataError(f"{where}: 'per_query' is {json.dumps(per_query)[:60]}, need an object")
    metrics = field(value, "metrics", dict, where, "an object of numbers")
    return PathResult(
        metrics=_numbers(metrics, f"{where}: 'metrics'"),
        per_query={name: _numbers(entry, f"{where}: 'per_query' {name!r}") for name, entry in per_query.items()},
        seconds=_numbers(value.get("seconds", {}), f"{where}: 'seconds'"),
        run=run,
        description=str(value.get("description", "")),
        **objects,
    )


def check_task(task: Mapping[str, Any], where: str) -> None:
    """Validate a parsed `task` object, of a Result or of a baseline.

    Raises:
        DataError: an entry that is missing, of the wrong type or not as docs/result.md says.
    """
    for key in TASK_FIT:
        field(task, key, str, where, "text")
    for key in ("queries", "documents"):
        field(task, key, int, where, "a whole number")
    _check_limits(task, where)
    _check_candidates(task, where)


def _check_limits(task: Mapping[str, Any], where: str) -> None:
    """Validate the `limits` entry of a parsed `task` object; a file without one is of the whole collection.

    Raises:
        DataError: not null and not as docs/result.md says.
    """
    if task.get("limits") is None:
        return
    limits = field(task, "limits", dict, where, "null or an object")
    where = f"{where}: 'limits'"
    field(limits, "seed", int, where, "a whole number")
    for key in ("queries", "documents", "judged_pairs"):
        counts = field(limits, key, dict, where, "an object")
        before, after = (field(counts, when, int, f"{where}: {key!r}", "a whole number") for when in ("before", "after"))
        if not 0 <= after <= before:
            raise DataError(f"{where}: {key!r} is {after} of {before}, need no more after than before")
    field(limits, "ids_sha256", str, where, "text")


def _check_candidates(task: Mapping[str, Any], where: str) -> None:
    """Validate the `candidates` entry of a parsed `task` object; in a file without one everything was searched.

    Raises:
        DataError: not null and not as docs/result.md says.
    """
    if task.get("candidates") is None:
        return
    candidates = field(task, "candidates", dict, where, "null or an object")
    where = f"{where}: 'candidates'"
    for key in ("name", "sha256"):
        field(candidates, key, str, where, "text")
    for key in ("pairs", "documents", "queries", "queries_without"):
        field(candidates, key, int, where, "a whole number")


def from_json(text: str, origin: str = "result") -> Result:
    """Read a Result; entries this version does not know are ignored.

    Args:
        text: JSON.
        origin: file name for messages.

    Raises:
        DataError: not JSON, another schema version, an entry missing or of the wrong type, figures that cannot be.
    """
    document = load_json(text, origin)
    if not isinstance(document, dict):
        raise DataError(f"{origin}: holds {json.dumps(document)[:60]}, need a result object")
    if document.get("schema") != SCHEMA:
        raise DataError(f"{origin}: schema is {json.dumps(document.get('schema'))[:60]}, need {SCHEMA!r}")
    task = field(document, "task", dict, origin, "an object")
    check_task(task, f"{origin}: 'task'")
    encoder = field(document, "encoder", dict, origin, "an object")
    field(encoder, "name", str, f"{origin}: 'encoder'", "text")
    k = field(document, "k", int, origin, "a whole number of 1 or more")
    if k < 1:
        raise DataError(f"{origin}: 'k' is {k}, need a whole number of 1 or more")
    entries = field(document, "paths", dict, origin, "an object")
    paths = {name: _path_from(entry, f"{origin}: path {name!r}") for name, entry in entries.items()}
    reference = document.get("reference", "fp32" if "fp32" in paths else None)
    if reference is not None and (not isinstance(reference, str) or reference not in paths):
        raise DataError(f"{origin}: 'reference' is {json.dumps(reference)[:60]}, need null or one of: {', '.join(paths)}")
    for name, path in paths.items():
        check_path(path, reference, f"{origin}: path {name!r}")
    return Result(
        task=task,
        encoder=encoder,
        k=k,
        paths=paths,
        environment=field(document, "environment", dict, origin, "an object"),
        command=[str(part) for part in field(document, "command", list, origin, "a list")],
        reference=reference,
        created=str(document.get("created", "")),
    )


def read_result(path: Path | str) -> Result:
    """The Result of a `result.json`, or of the folder that holds one.

    Raises:
        DataError: unreadable, or not such a file.
    """
    path = Path(path)
    if path.is_dir():
        path = path / RESULT_FILE
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a result ({error})") from error
    return from_json(text, origin=str(path))
