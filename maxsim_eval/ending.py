"""What a command that fails says, in one line, and its exit code; the traceback of what nobody foresaw goes into a file.

An exit code of 1 is an answer (`errors.py`), so no failure may end with it, which is how Python ends a program by itself.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import tempfile
import traceback

from maxsim_eval.errors import EXIT_DATA, EXIT_UNFORESEEN, MaxsimEvalError, NoModelError
from maxsim_eval.printing import printable, text_of

# What torch's and Python's own RuntimeErrors say when the machine has no more to give.
_EXHAUSTED = ("can't allocate memory", "not enough memory", "out of memory", "can't start new thread")
_LONGEST = 4000  # characters of a line: a name in it may be as long as a file


def ending_of(error: BaseException) -> tuple[str, int]:
    """What to print of an error that ends a command, without `error: ` before it, and the exit code.

    One line, but for errors that bring a user's own traceback, or several things that can be done. What no part of the toolkit foresaw
    is named with the file that holds its traceback.
    """
    if isinstance(error, MaxsimEvalError):
        if isinstance(error, NoModelError):
            lines = [f"{error.reason}.", "What can be done, the likeliest first:", *(f"  {way}" for way in error.ways)]
            return "\n".join(map(_line, lines)), error.exit_code
        text = str(error)
        return ("\n".join(map(_line, text.splitlines())) if error.many_lines else _line(text)), error.exit_code
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in text_of(error) for sign in _EXHAUSTED)
    ):
        return f"not enough memory ({_first_line(error)})", EXIT_DATA
    if isinstance(error, OSError):  # the system's own words and the file's name
        return _line(text_of(error)), EXIT_DATA
    name, line = type(error).__name__, _first_line(error)
    said = line if line.startswith(name) else f"{name}: {line}"
    return f"unforeseen: {said}. {_log(error)}", EXIT_UNFORESEEN


def _line(text: str) -> str:
    text = printable(text)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} ... ({len(text):,} characters) ... {text[-_LONGEST // 4 :]}"  # what is needed stands last


def _first_line(error: BaseException) -> str:
    lines = text_of(error).strip().splitlines()
    return printable(lines[0][:300] if lines else "")


def _log(error: BaseException) -> str:
    """Where the traceback is now."""
    version = importlib.metadata.version("maxsim-eval")
    head = f"maxsim-eval {version}, Python {platform.python_version()}, {platform.platform()}\n{sys.argv}\n\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="maxsim-eval-", suffix=".log", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(head + "".join(traceback.format_exception(error)))
    except OSError as problem:
        return f"Its traceback could not be written ({printable(str(problem))})"
    return f"Please report it with its traceback, which is in {printable(file.name)}"
