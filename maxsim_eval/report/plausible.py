"""What the figures of a Result can be: shares within their range, errors not below 0, means those of their queries, one reference.

A file that says otherwise was damaged or edited, and no verdict may rest on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from maxsim_eval.comparison.bounds import NAMES, number_of
from maxsim_eval.comparison.metrics import within_one
from maxsim_eval.errors import DataError
from maxsim_eval.types import PathResult

_ROUNDING = 1e-9  # of sums in another order
_COUNTS = ("queries", "constant", "constant_in_one")


def check_path(path: PathResult, reference: str | None, where: str) -> None:
    """Refuse figures that cannot be.

    Raises:
        DataError: one that is out of its range, a mean that its queries do not have, or a comparison with another path than
            `reference` (None: not known).
    """
    check_means(path.metrics, f"{where}: 'metrics'")
    for name, values in path.per_query.items():
        if within_one(name):
            for query, value in values.items():
                _within(value, 0.0, 1.0, f"{where}: 'per_query' {name!r}: {query!r}")
        finite = [value for value in values.values() if math.isfinite(value)]  # a null is no value
        mean = path.metrics.get(name, math.nan)
        if not finite or not math.isfinite(mean):
            continue
        found = math.fsum(value / len(finite) for value in finite)  # 1e308 is a number, and two of them have no sum
        if abs(mean - found) > _ROUNDING * max(1.0, abs(found)):
            raise DataError(f"{where}: 'metrics' {name!r} is {mean:g}, and the mean of its queries is {found:g}; need the same")
    if path.parity is not None:
        _check_parity(path.parity, reference, f"{where}: 'parity'")


def check_means(metrics: Mapping[str, float], where: str) -> None:
    """Refuse means outside the range of their metric; metrics whose range is not known are not checked."""
    for name, value in metrics.items():
        if within_one(name):
            _within(value, 0.0, 1.0, f"{where} {name!r}")


def _check_parity(parity: Mapping[str, Any], reference: str | None, where: str) -> None:
    named = parity.get("reference")
    if named is not None and reference is not None and named != reference:
        raise DataError(f"{where}: 'reference' is {json.dumps(named)[:60]}, need the result's, {reference!r}")
    ranks = _object(parity, "spearman")
    for key, value in {**ranks, **_object(ranks, "percentiles")}.items():
        if key in _COUNTS:
            _within(value, 0.0, math.inf, f"{where}: 'spearman' {key!r}")
        else:
            _within(value, -1.0, 1.0, f"{where}: 'spearman' {key!r}")
    for key in ("overlap", "same_order"):
        for cutoff, value in _object(parity, key).items():
            _within(value, 0.0, 1.0, f"{where}: {key!r} {cutoff!r}")
    for key in NAMES:
        _within(parity.get(key), 0.0, math.inf, f"{where}: {key!r}")


def _object(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key)
    return found if isinstance(found, Mapping) else {}


def _within(value: Any, low: float, high: float, where: str) -> None:
    number = number_of(value)
    if number is None or low - _ROUNDING <= number <= high + _ROUNDING:
        return
    raise DataError(
        f"{where} is {number:g}, need a number {'of 0 or more' if math.isinf(high) else f'from {low:g} to {high:g}'}"
    )
