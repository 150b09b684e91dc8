"""What a command that fails says, in one line, and its exit code; the traceback of what nobody foresaw goes into a file.

Exit code 1 is an answer (`errors.py`), so no failure may use it; Python itself ends with 1 after an exception that nobody caught.
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
    """What to print of an error that ends a command, without the prefix `error: `, and the exit code.

    One line, except for errors that carry a user's own traceback (`many_lines`) or list ways out (`NoModelError`). Of an
    unforeseen error the line names the file that its traceback was written to.
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
    # The end is kept too: it says what is needed.
    return f"{text[: _LONGEST // 2]} ... ({len(text):,} characters) ... {text[-_LONGEST // 4 :]}"


def _first_line(error: BaseException) -> str:
    lines = text_of(error).strip().splitlines()
    return printable(lines[0][:300] if lines else "")


def _log(error: BaseException) -> str:
    """Write the traceback to a temporary file; a sentence that says where it is."""
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
