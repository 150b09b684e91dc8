"""Every error the toolkit raises on purpose, and the exit code the command line gives it.

A message names the file or argument, what was found and what is needed; the command line prints it alone, without a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

EXIT_GATE = 1  # quality or parity fell: the run worked, the answer is "no"
EXIT_USAGE = 2  # a wrong name, option or value
EXIT_DATA = 3  # data, cache or embeddings that are missing, damaged or foreign
EXIT_UNFORESEEN = 4  # a fault of the toolkit itself; its traceback is in a file (`ending.py`)
EXIT_INTERRUPTED = 130  # Ctrl-C, as shells report it
EXIT_TERMINATED = 143  # SIGTERM, the same
EXIT_PIPE = 141  # whoever read the answer (`| head`) has closed the pipe: SIGPIPE, the same


class MaxsimEvalError(Exception):
    """Base of all deliberate errors; `exit_code` is what `evaluate.py` returns for it.

    Its message is one line; `many_lines`: it also holds the traceback of code that is the user's own.
    """

    exit_code = EXIT_DATA
    many_lines = False


class ProgramExit(SystemExit):
    """A `SystemExit` that the program itself raises; any other comes from code that it called, and is a failure of that code."""


class UsageError(MaxsimEvalError):
    """An argument has a value that cannot work."""

    exit_code = EXIT_USAGE


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`Did you mean 'scifact'? ` for names near enough to one that is known; empty where there are none."""
    near = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(map(repr, near))}? " if near else ""


class UnknownNameError(UsageError):
    """A dataset, encoder, path or metric that does not exist; the message offers the nearest names."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.known = sorted(set(known))  # once each: fp16 is both a path and a codec
        super().__init__(f"unknown {kind} {name!r}. {did_you_mean(name, self.known)}Known: {', '.join(self.known) or 'none'}.")


class DataError(MaxsimEvalError):
    """A dataset, run or embedding file that is missing or does not hold what it must."""


class CacheError(MaxsimEvalError):
    """A cache file that is damaged, truncated, partial, foreign, of another version or locked by another process."""


class NoModelError(DataError):
    """An encoder's model is not here, or cannot be used. `ways` are what else can be done, the likeliest first; printed a line each."""

    def __init__(self, reason: str, ways: Sequence[str]) -> None:
        super().__init__(f"{reason}. Options: {'; '.join(ways)}.")
        self.reason, self.ways = reason, tuple(ways)


class MissingPackageError(MaxsimEvalError):
    """An optional package is needed; the message names the pip command."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs the package {package!r}. Install it with: pip install 'maxsim-eval[{extra}]'")
