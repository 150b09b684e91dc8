"""The one reader of JSON and TOML: whatever the text holds, it is a value or a `ValueError` that says what is wrong and on which line.

Python's own readers also end in `RecursionError`, or in advice about `sys.set_int_max_str_digits`, and take NaN and Infinity.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxsim_eval.errors import UsageError
from maxsim_eval.files import read_text

_LEVELS = 100  # callers walk through values by recursion
_DIGITS = 300  # a double holds numbers of up to 309
_LONG = re.compile(r"[0-9][0-9_]{4300,}")


def _refuse(constant: str) -> float:
    raise ValueError(f"holds {constant}, which is not JSON")


def _number(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"holds {digits[:60]}{'...' if len(digits) > 60 else ''}, which is too large a number")
    return value


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        _number(digits)
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"holds the key {twice[:60]!r} twice in one object")
    return found


_STRICT = json.JSONDecoder(parse_constant=_refuse, parse_float=_number, parse_int=_whole)
_ONCE = json.JSONDecoder(parse_constant=_refuse, parse_float=_number, parse_int=_whole, object_pairs_hook=_object)
_LINES = json.JSONDecoder()


def json_of(text: str | bytes, *, once: bool = False) -> Any:
    """The value of a JSON text (bytes: UTF-8), strictly: no NaN, no Infinity, no number that overflows, at most 100 levels.

    `once`: no key twice in an object either (only the later one would count).

    Raises:
        ValueError: anything else.
    """
    text = text.decode() if isinstance(text, bytes) else text
    value = _parsed(text, (_ONCE if once else _STRICT).decode)
    _require_flat(value)
    return value


def json_line(text: str) -> Any:
    """The value of one line of many, less strictly than `json_of`: fields that nobody reads may hold NaN, Infinity or overflow.

    Raises:
        ValueError: no JSON, or nested too deeply for Python.
    """
    return _parsed(text, _LINES.decode)


def toml_of(text: str) -> dict[str, Any]:
    """The tables of a TOML text; whole numbers that no double can hold are refused, and more than 100 levels.

    Raises:
        ValueError: anything else.
    """
    value: dict[str, Any] = _parsed(text, tomllib.loads)
    _require_flat(value)
    return value


def settings_of(what: str, path: Path | str | None, package: str, packaged: str) -> dict[str, Any]:
    """The tables of the TOML file at `path`; None: those of the file `packaged` inside `package`.

    Raises:
        UsageError: unreadable, or not TOML; `what` says what the file should be.
    """
    try:
        if path is not None:
            return toml_of(read_text(path).replace("\r\n", "\n"))
        return toml_of(importlib.resources.files(package).joinpath(packaged).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{what} {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"{what} {path}: not valid TOML: {error}") from error


def _parsed(text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError):
        raise  # they name the line
    except ValueError as error:
        found = _LONG.search(text)
        if found is None:
            raise
        place = f" on line {1 + text.count(chr(10), 0, found.start())}" if "\n" in text.strip() else ""
        raise ValueError(f"holds a number of {len(found[0]):,} digits{place}, which is too large") from error


def _require_flat(value: Any) -> None:
    """`ValueError` for values nested too deeply, and for whole numbers beyond a double (TOML also has them in base 16)."""
    level: list[Any] = [[value]]
    depth = -1  # of the value itself: 0
    while level:
        depth += 1
        if depth > _LEVELS:
            raise ValueError(f"nested more than {_LEVELS} levels deep")
        below = []
        for entry in level:
            for one in entry.values() if isinstance(entry, dict) else entry:
                if isinstance(one, dict | list):
                    below.append(one)
                elif type(one) is int and one.bit_length() > 1023:
                    raise ValueError("holds a whole number that is too large")
        level = below
