"""First stages by name: `bm25`, `bm25(k1=0.9,b=0.4)`, `single`, `fde(repetitions=20)`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxsim_eval.errors import UnknownNameError, UsageError
from maxsim_eval.first_stage.bm25 import Bm25
from maxsim_eval.first_stage.fde import Fde
from maxsim_eval.first_stage.single import Single
from maxsim_eval.first_stage.stage import FirstStage

FIRST_STAGES: Mapping[str, type[Any]] = {"bm25": Bm25, "single": Single, "fde": Fde}
_STAGED = re.compile(r"(?P<stage>(?P<name>\w+)(?:\([^()]*\))?)(?::(?P<depth>\d{1,18}))?")
_NAME = re.compile(r"(?P<name>\w+)(?:\((?P<options>[^()]*)\))?")


_DEPTH, _MOST = 100, 999_999_999


def staged(text: str) -> tuple[FirstStage, int] | None:
    """The first stage and depth that `bm25`, `fde(bits=5)` or `bm25:1000` ask for; None of anything else, as a file's path.

    Raises:
        UsageError: options that cannot be; a file of that very name beside.
    """
    found = _STAGED.fullmatch(text.replace(" ", ""))
    if found is None or found["name"] not in FIRST_STAGES:
        return None
    depth = int(found["depth"] or _DEPTH)
    if Path(text).exists():
        raise UsageError(f"candidates {text!r}: the name of a first stage, and a file; ./{text} is the file")
    if not 1 <= depth <= _MOST:
        raise UsageError(f"candidates {text!r}: got {depth} documents a query, need a whole number from 1 to {_MOST}")
    return get_first_stage(found["stage"]), depth


def get_first_stage(text: str) -> FirstStage:
    """The first stage of that name.

    Raises:
        UnknownNameError: no such stage or option; the message offers the nearest. UsageError: a name that cannot be read.
    """
    found = _NAME.fullmatch(text.replace(" ", ""))
    if found is None:
        raise UsageError(f"first stage {text!r}: need name or name(option=value,option=value)")
    name = found["name"]
    if name not in FIRST_STAGES:
        raise UnknownNameError("first stage", name, FIRST_STAGES)
    fields = {field.name: field for field in dataclasses.fields(FIRST_STAGES[name])}
    options: dict[str, Any] = {}
    for one in filter(None, (found["options"] or "").split(",")):
        key, _, value = one.partition("=")
        if key not in fields:
            raise UnknownNameError(f"option of {name}", key, fields)
        kind = int if isinstance(fields[key].default, int) else float
        try:
            options[key] = kind(value)
        except ValueError:
            need = "a whole number" if kind is int else "a number"
            raise UsageError(f"{name}: {key} is {value!r}, need {need}") from None
    stage: FirstStage = FIRST_STAGES[name](**options)
    return stage
