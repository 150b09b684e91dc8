"""Measures that trec_eval lacks, by ir-measures where it is installed: `ERR@20`, `RBP(p=0.8)`, `Judged@10`, `Compat(p=0.95)`, ...

ir-measures parses the name and chooses the tool that computes it. `pip install 'maxsim-eval[measures]'`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from subprocess import SubprocessError
from typing import Any

from maxsim_eval.errors import DataError, UsageError

EXTRA = "measures"
MAX_CUTOFF = 2**31 - 1


def library() -> Any | None:
    """The package ir-measures; None where it is not installed."""
    try:
        return importlib.import_module("ir_measures")
    except ModuleNotFoundError:
        return None


def measure_of(name: str) -> Any | None:
    """The measure of a name as ir-measures writes it; None where it is not installed, or cannot compute that.

    RBP is binary there and wants to be told from which relevance on: 1, as everywhere else here, unless the name says.
    """
    found = library()
    if found is None:
        return None
    try:
        measure = found.parse_measure(name)
        if not found.DefaultPipeline.supports(measure) and "rel" in measure.SUPPORTED_PARAMS and "rel" not in measure.params:
            measure = measure(rel=1)
        return measure if found.DefaultPipeline.supports(measure) else None
    except (
        ValueError,
        NameError,
        AssertionError,
        SyntaxError,
        TypeError,
        AttributeError,
        KeyError,
    ):  # its parser's ways to say no
        return None


def forms() -> dict[str, str]:
    """Ways to write ir-measures' measures, bare or with `@k` for a cutoff -> the same with a number, to try whether it works.

    Which of them can be computed depends on the measure and on the tools that are installed. Parameters that a measure cannot do
    without (`max_rel`, the highest grade) are written out, with 2 for their value.
    """
    found = library()
    if found is None:
        return {}
    written: dict[str, str] = {}
    for name, one in sorted(vars(found.measures).items()):
        if name.startswith("_") or not isinstance(one, found.measures.Measure):
            continue
        needed = [key for key, told in one.SUPPORTED_PARAMS.items() if told.required and key != one.AT_PARAM]
        bare = f"{name}({','.join(f'{key}=2' for key in needed)})" if needed else name
        if one.AT_PARAM == "cutoff":
            written |= {bare: bare, f"{bare}@k": f"{bare}@10"}
        else:  # IPrec: what follows is a share of the relevant documents
            written |= {f"{bare}@0.1": f"{bare}@0.1"}
    return written


@functools.cache
def _toy_fails(name: str) -> str:
    try:
        values_of(measure_of(name), {"q": {"a": 0, "b": 1, "c": 2}}, {"q": {"a": 3.0, "b": 2.0, "c": 1.0}})
    except DataError as error:
        return str(error).partition("compute it ")[2]
    return ""


def require_computable(name: str, measure: Any) -> None:
    """Compute a measure for one query of three documents: what its name asks for may be more than the tool behind it can do.

    Raises:
        UsageError: it cannot.
    """
    cutoff = measure.params.get("cutoff", 1)
    if isinstance(cutoff, int) and not 1 <= cutoff <= MAX_CUTOFF:  # trec_eval ends the process at 0
        raise UsageError(f"metric {name!r}: the cutoff is {cutoff}, need a whole number from 1 to {MAX_CUTOFF}")
    if why := _toy_fails(name):
        raise UsageError(f"metric {name!r}: ir-measures cannot compute it {why}")


def values_of(
    measure: Any, judged: Mapping[str, Mapping[str, int]], scores: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Query id -> value, of the queries the measure gives one for. Queries are passed by number: gdeval (ERR) takes no other ids.

    Raises:
        DataError: the tool behind the measure failed.
    """
    found = library()
    assert found is not None  # `measure` is one of its own
    ids = {str(number): query for number, query in enumerate(judged, start=1)}
    rows = {number: judged[query] for number, query in ids.items()}
    run = {number: scores[query] for number, query in ids.items() if query in scores}
    try:
        return {ids[one.query_id]: float(one.value) for one in found.iter_calc([measure], rows, run)}
    # pytrec_eval says TypeError for numbers it has no room for, OverflowError for gains.
    except (OSError, RuntimeError, ValueError, TypeError, ArithmeticError, AssertionError, SubprocessError) as error:
        raise DataError(f"metric {measure}: ir-measures could not compute it ({type(error).__name__}: {error})") from error
