"""Values of a Result, found where they may be missing or of another form, and written the same way by every report.

A Result may come from an older version or another program, so nothing that reads one trusts the shape of `parity` or of a task's
entries: what is not as docs/result.md says is not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxsim_eval.types import PathResult


def number(value: Any) -> float | None:
    """`value` where it is a finite number (numpy's become Python's), else None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def known(value: Any) -> bool:
    """Whether this is a finite number."""
    return number(value) is not None


def entry(value: Any, *keys: str) -> Any:
    """What lies under these keys, one in the other; None where something is missing or of another form."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def mapping(value: Any, *keys: str) -> Mapping[str, Any]:
    """The mapping that lies under these keys; an empty one where there is none."""
    found = entry(value, *keys)
    return found if isinstance(found, Mapping) else {}


def entries(value: Any) -> Sequence[Any]:
    """`value` where it is a list, else an empty one."""
    return value if isinstance(value, list | tuple) else ()


def statistics(path: PathResult) -> dict[str, Mapping[str, Any]]:
    """Metric -> its entry in the path's statistics; empty in results without them."""
    return {str(key): mapping(found) for key, found in mapping(path.parity, "statistics").items() if mapping(found)}


def figure(value: Any, form: str, none: str = "-") -> str:
    """A number as text, whole ones (`d`) also where JSON holds 3 as 3.0; `none` where it is not known."""
    found = number(value)
    return none if found is None else format(round(found) if form.endswith("d") else found, form)


def signed(change: Any, none: str = "?") -> str:
    """A difference of two means as every report writes it: `=`, `+0.0012`; `none` where it is not known."""
    return "=" if known(change) and change == 0 else figure(change, "+.4f", none)


def p_value(value: Any, none: str = "-") -> str:
    """A p-value as text, no more exact than means anything."""
    found = number(value)
    return "< 0.001" if found is not None and found < 0.001 else figure(value, ".3f", none)


def about(count: float) -> str:
    """A number of queries, rounded up to two digits: the standard deviation it rests on is known no better."""
    whole = round(count)
    scale = 10 ** max(0, len(str(whole)) - 2)
    return f"{-(-whole // scale) * scale:,}"
