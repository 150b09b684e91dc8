"""One command in this process, with a time limit and what it printed."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxsim_eval.errors import ProgramExit

LIMIT = 10.0  # seconds that one command may take


class HungError(ProgramExit):
    """The command did not end in time; as an end that is meant, no net of the command line holds it."""


@dataclass(frozen=True)
class Outcome:
    """What a command gave."""

    code: int
    out: str
    err: str


@contextlib.contextmanager
def limited(seconds: float = LIMIT) -> Iterator[None]:
    """Raise `HungError` in the block after so many seconds; a timer of somebody else (pytest's) goes on after it."""

    def stop(*_: Any) -> None:
        raise HungError

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 0.01) if left else 0)
        signal.signal(signal.SIGALRM, handler)


def run(words: Sequence[str | Path], cwd: Path, seconds: float = LIMIT) -> Outcome:
    """The command line in folder `cwd`; `HungError` when it does not end."""
    from maxsim_eval.cli.app import main

    arguments = [str(word) for word in words]
    out, err, saved, code = io.StringIO(), io.StringIO(), (sys.argv, sys.excepthook, warnings.showwarning), 0
    sys.argv = ["evaluate.py", *arguments]
    try:
        with (
            limited(seconds),
            contextlib.chdir(cwd),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("default")
            main(arguments)
            code = 70  # it must exit
    except HungError:
        raise
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException as error:  # noqa: BLE001 (the last net has a hole: the case says so)
        err.write(f"Traceback: {error!r}\n")
        code = 71
    finally:
        sys.argv, sys.excepthook, warnings.showwarning = saved
    return Outcome(code, out.getvalue(), err.getvalue())
