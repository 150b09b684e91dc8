"""How an evaluation of several processes ends early: which rank failed, why, and with which exit code (`world.py`)."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from typing import Any

from maxsim_eval.ending import ending_of
from maxsim_eval.errors import EXIT_DATA, EXIT_INTERRUPTED, MaxsimEvalError, ProgramExit

CONTINUES = "finished parts are kept, the same command continues"
LOST = f"the connection to it was lost: its process, or torchrun, has ended; {CONTINUES}"


@dataclass(frozen=True)
class Failure:
    """Why an evaluation of several processes ended: which rank, what it said and its exit code."""

    rank: int
    text: str  # as it is printed
    code: int


class RankError(MaxsimEvalError):
    """Another process of this evaluation failed."""

    def __init__(self, failure: Failure, size: int) -> None:
        who = f"rank {failure.rank} of {size}" if failure.rank >= 0 else f"one of {size} processes"
        super().__init__(f"{who}: {failure.text}")
        self.exit_code = failure.code
        self.many_lines = True  # what the other printed, as it printed it


class JoinError(MaxsimEvalError):
    """The processes do not find each other."""


class Ended(ProgramExit):
    """The exit of a process that failed, or saw another fail, after the message was printed."""


class Terminated(ProgramExit):
    """SIGTERM: torchrun ends the ranks that live on when one has died."""


def first_failure(store: Any, failure: Failure) -> Failure:
    """Record in the store why the evaluation ends, unless another rank was first; the failure that is recorded."""
    return Failure(**json.loads(store.compare_set("failed", "", json.dumps(asdict(failure)))))


def failure_of(error: BaseException, rank: int) -> Failure:
    """What the others are told of an error that ends this rank."""
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == EXIT_INTERRUPTED):
        return Failure(rank, f"interrupted; {CONTINUES}", EXIT_INTERRUPTED)
    if isinstance(error, Terminated):
        text = f"stopped from outside (SIGTERM), as torchrun does when another process has died (it says which); {CONTINUES}"
        return Failure(rank, text, 128 + signal.SIGTERM)
    if isinstance(error, SystemExit):
        return Failure(rank, f"ended with exit code {error.code}", error.code if isinstance(error.code, int) else EXIT_DATA)
    return Failure(rank, *ending_of(error))


def line_of(error: BaseException) -> str:
    """The first line of an error."""
    return (str(error).splitlines() or [type(error).__name__])[0]
