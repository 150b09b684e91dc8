"""`conform`: every check on one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from maxsim_eval.conformance.checks import CHECKS, Scored, Verdict
from maxsim_eval.errors import ProgramExit
from maxsim_eval.printing import text_of
from maxsim_kernels import Packed


@dataclass(frozen=True)
class Row:
    """One check: what was found, and whether it is a bug."""

    check: str
    verdict: Verdict
    found: str


class _ShapeError(Exception):
    """What the function returned is no scores."""


def conform(function: Callable[[Packed, Packed], Tensor], device: str = "cpu") -> list[Row]:
    """Run every check on `function(queries, documents) -> [Nq, N]`; an exception that it raises is what the check's row says."""
    place = torch.device(device)

    def scores(queries: Packed, documents: Packed) -> Tensor:
        found = function(queries, documents)
        need = (len(queries), len(documents))
        if not isinstance(found, Tensor) or tuple(found.shape) != need or not found.is_floating_point():
            got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise _ShapeError(f"returned {got}, need floats {list(need)}")
        return found

    rows = []
    for name, check in CHECKS.items():
        try:
            with torch.no_grad():
                verdict, found = check(Scored(scores, place))
        except _ShapeError as error:
            verdict, found = "bug", str(error)
        except (KeyboardInterrupt, ProgramExit):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises is what the row says
            verdict, found = "refused", _raised(error)
        except BaseException as error:  # noqa: BLE001 - no way to refuse: it would end the program that calls the function
            verdict, found = "bug", _raised(error)
        rows.append(Row(name, verdict, found))
    return rows


def _raised(error: BaseException) -> str:
    first = text_of(error).splitlines()[0]
    return f"raised {type(error).__name__}: {first}"[:200]
