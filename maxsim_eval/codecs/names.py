"""Codecs by name: `step+step(option=value)+coder`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from maxsim_eval.codecs.codec import Codec
from maxsim_eval.codecs.scalar import Control, Fp16, Int8, Sign, Uniform
from maxsim_eval.codecs.shaping import Dims, Pca, Rotate
from maxsim_eval.codecs.steps import Coder, Shape, Step
from maxsim_eval.codecs.thinning import Pool, Prune
from maxsim_eval.codecs.trained import Pq, Residual
from maxsim_eval.errors import UnknownNameError, UsageError

# name -> the step, and options that the name itself gives
STEPS: Mapping[str, tuple[type[Step], Mapping[str, Any]]] = {
    "rotate": (Rotate, {}),
    "dims": (Dims, {}),
    "pca": (Pca, {}),
    "pool": (Pool, {}),
    "prune": (Prune, {}),
    "fp16": (Fp16, {}),
    "int8": (Int8, {}),
    "int4": (Uniform, {"bits": 4}),
    "int2": (Uniform, {"bits": 2}),
    "sign": (Sign, {}),
    "residual": (Residual, {}),
    "pq": (Pq, {}),
    "control": (Control, {"bits": 4}),
}
_STEP = re.compile(r"(?P<name>[a-z]+\d*)(?:-(?P<number>\d+))?(?:\((?P<options>[^()]*)\))?")
_BEGIN = re.compile(r"(?P<name>[a-z]+\d*)(?:-\d+)?(?:\(|$)")
_KINDS = {"int": (int, r"-?\d{1,18}"), "Scale": (str, r"\w+"), "Query": (str, r"\w+"), "By": (str, r"\w+")}


def codec_of(text: str) -> Codec:
    """The codec of that name.

    Raises:
        UnknownNameError: no such step or option; the message offers the nearest.
        UsageError: a name that cannot be read, a step without its number, a coder that is not the last step.
    """
    text = text.replace(" ", "")
    steps = [_step(part, text) for part in _parts(text)]
    *before, last = steps
    for step, part in zip(before, _parts(text), strict=False):
        if isinstance(step, Coder):
            raise UsageError(f"codec {text!r}: {part} stores numbers, so that no step can follow it")
    shapes = tuple(step for step in steps if isinstance(step, Shape))
    return Codec(text, shapes, last if isinstance(last, Coder) else Fp16())


def names_step(text: str) -> bool:
    """Whether any part of a name begins as a step of a codec does, even if the rest of it is wrong."""
    found = (_BEGIN.match(part) for part in _parts(text.replace(" ", "")))
    return any(one is not None and one["name"] in STEPS for one in found)


def _parts(text: str) -> list[str]:
    """The steps of a name: what is between `+` outside parentheses."""
    return re.split(r"\+(?![^(]*\))", text)


def _step(part: str, text: str) -> Step:
    found = _STEP.fullmatch(part)
    if found is None:
        raise UsageError(f"codec {text!r}: cannot read {part!r}, need name, name-number or name(option=value,option=value)")
    name = found["name"]
    if name not in STEPS:
        raise UnknownNameError("codec step", part, STEPS)
    kind, given = STEPS[name]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    options = dict(given)
    for one in filter(None, (found["options"] or "").split(",")):
        key, _, value = one.partition("=")
        if key not in fields or key in given:
            raise UnknownNameError(f"option of {name}", key, fields.keys() - given.keys())
        if key in options:
            raise UsageError(f"codec {text!r}: {key} is given twice")
        options[key] = _value(name, key, value, str(fields[key].type))
    first = next((field for field in fields.values() if field.name not in given), None)
    numbered = first is not None and first.default is dataclasses.MISSING
    if found["number"] is not None:
        if not numbered or first is None or first.name in options:
            raise UsageError(f"codec {text!r}: {name} takes no number, got {part!r}")
        options[first.name] = int(found["number"])
    elif numbered and first is not None and first.name not in options:
        raise UsageError(f"codec {text!r}: {name} needs a number, as {name}-{_EXAMPLES[name]}")
    return kind(**options)


_EXAMPLES = {"dims": 64, "pca": 64, "pool": 2, "prune": 50, "residual": 2}


def _value(name: str, key: str, value: str, kind: str) -> Any:
    convert, form = _KINDS[kind]
    if not re.fullmatch(form, value):
        raise UsageError(f"{name}: {key} is {value!r}, need {'a whole number' if convert is int else 'one word'}")
    return convert(value)
