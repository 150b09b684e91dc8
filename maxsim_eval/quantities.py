"""Sizes and times as people write and read them: 8GB, 1.2 GB, 3.4 min."""

from __future__ import annotations

import re

from maxsim_eval.errors import UsageError

_TIMES = (("days", 86400.0), ("h", 3600.0), ("min", 60.0))
_MOST = 2**63  # no file and no memory is larger
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def bytes_of(text: str, what: str = "memory budget", *, rate: bool = False) -> int:
    """`8GB`, `500 MB`, `2GiB`, `1000000` as bytes; as a rate `3GB/s` too. `what` names the argument in messages.

    Raises:
        UsageError: anything else, less than 1, or 2^63 and more.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?" + (r"(?:/S)?" if rate else "") + r"\s*", text.upper())
    size = float(found[1]) * _UNITS.get(found[2], 0) if found else 0.0
    if not 1 <= size < _MOST:
        raise UsageError(f"{what}: got {text[:60]!r}, need {'a rate as 3GB/s' if rate else 'a size as 8GB, 500MB or 2GiB'}")
    return int(size)


def size_text(count: float | None) -> str:
    """Bytes as people read them, in powers of 1000."""
    if count is None:
        return "unknown"
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def time_text(seconds: float | None) -> str:
    """Seconds as people read them: ms, s, min or h."""
    if seconds is None:
        return "unknown"
    if seconds >= 7200:
        return f"{seconds / 3600:,.1f} h"
    if seconds >= 300:
        return f"{seconds / 60:.1f} min"
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1e3:.3g} ms"


def about_text(seconds: float | None, more: float = 0.0) -> str:
    """Estimated seconds to two digits: `42 s`, `2.2 min`; a range (`30 to 42 s`) where their uncertainty `more` is above 15%."""
    if seconds is None:
        return "unknown"
    low, high = seconds * seconds / (seconds + more) if seconds else 0.0, seconds + more
    name, size = next(((name, size) for name, size in _TIMES if high >= 2 * size), ("s", 1.0))
    if more > 0.15 * seconds and (texts := (_two_digits(low / size), _two_digits(high / size)))[0] != texts[1]:
        return f"{texts[0]} to {texts[1]} {name}"
    return f"{_two_digits(seconds / size)} {name}"


def _two_digits(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"
