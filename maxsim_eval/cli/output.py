"""What commands print: answers to stdout, everything else to stderr, colours only where somebody looks at them."""

from __future__ import annotations

import codecs
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import IO, Any

import typer
from rich.console import Console
from rich.text import Text

from maxsim_eval.printing import printable, printable_json

PIPE_WIDTH = 200  # a pipe has no width to keep to
_ESCAPES = "maxsim_eval.escapes"
_ENDS = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$", re.MULTILINE)  # spaces at the end of a line, and the colours that end there
_INDENT = 2
EXAMPLES = """\b
Examples:
  python evaluate.py demo
  python evaluate.py beir scifact --encoder lexical --paths fp32,fp16,int8
  python evaluate.py COMMAND --help"""
EXIT_CODES = """\b
Exit codes:
  0    fine
  1    the answer is no: gate: quality fell; plan: it does not fit; conform: a bug, or no check passed; bench: rows are missing
  2    a wrong name, option or value, or a scoring function of yours that failed
  3    data, cache or output that is missing, damaged or cannot be written; too little memory
  4    a fault of this program; the message names the file with its traceback
  130  interrupted (143: by SIGTERM); the same command continues
  141  whatever read the answer closed the pipe (| head)

Answers go to stdout, progress and messages to stderr. Colours are left out in a pipe and where NO_COLOR is set."""


class _Screen(Console):
    """Lines without spaces at their ends; a text that is too long goes on in indented lines."""

    def print(self, *objects: Any, sep: str = " ", **named: Any) -> None:
        """As rich's, but where only `Text`s are given, each is printed on a line of its own."""
        with self.capture() as held:
            if objects and not named and all(isinstance(one, Text) for one in objects):
                for text in objects:
                    super().print(self._folded(text), soft_wrap=True)
            else:
                super().print(*objects, sep=sep, **named)
        self.file.write(_ENDS.sub(r"\1", held.get()))
        self.file.flush()

    def _folded(self, text: Text) -> Text:
        """A text that is too wide, broken between words, its further lines indented."""
        room = self.width - _INDENT
        if text.cell_len <= self.width or room <= _INDENT:
            return text
        first, *rest = text.wrap(self, room)
        for line in rest:
            line.pad_left(_INDENT)
        return Text("\n").join([first, *rest])


def console() -> Console:
    """Standard output, for tables: as wide as COLUMNS says, or the terminal is; wide in a pipe; colours by rich's rules (NO_COLOR)."""
    found = _Screen()
    return (
        found if found.is_terminal or os.environ.get("COLUMNS", "").isdecimal() else _Screen(width=max(found.width, PIPE_WIDTH))
    )


def coloured(stream: IO[Any]) -> bool:
    """Whether colours belong on a stream: a terminal, and no NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def answer(line: str) -> None:
    """Print one line on stdout, made printable."""
    typer.echo(printable(line))


def say(text: str, colour: str | None = None) -> None:
    """Print a message of one line on stderr, in colour where somebody looks at it."""
    say_lines(printable(text), colour)


def say_lines(text: str, colour: str | None = None) -> None:
    """As `say`, for one or more lines that are printable already."""
    typer.echo(typer.style(text, fg=colour) if colour and coloured(sys.stderr) else text, err=True)


def say_last(line: str) -> None:
    """The one message of a failure of several processes; a follower's stderr is closed to anything else."""
    print(line, file=sys.__stderr__, flush=True)


def print_json(value: Any) -> None:
    """An answer as JSON: no NaN, no infinity, letters as they are."""
    write_json(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_json(text: str) -> None:
    """Print JSON on stdout: the same value, with whatever a terminal or a CI's log would obey escaped."""
    sys.stdout.write(printable_json(text))


def escape_unwritable() -> None:
    """Write letters that standard output cannot hold (it is not always UTF-8) as JSON's escapes: so no id can end a command."""
    codecs.register_error(_ESCAPES, _escaped)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ESCAPES)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


_TYPES = {"str": "text", "int": "number", "float": "number", "Path": "path"}


def with_plain_types(commands: Iterable[Any]) -> None:
    """Show types in the help of commands as people name them: `<text>`, `<path>`; not `<str>`, `<list[Path]>`."""
    for command in commands:
        with_plain_types(getattr(command, "commands", {}).values())
        for param in command.params:
            named = getattr(param, "display_type", None)  # older versions of typer have none
            if named is not None:
                setattr(param, "display_type", partial(_plain_type, named))  # noqa: B010 - mypy takes it for fixed


def _plain_type(named: Callable[[Any], str], ctx: Any) -> str:
    return re.sub(r"\w+", lambda found: _TYPES.get(found[0], found[0]), re.sub(r"list\[(\w+)\]", r"\1", named(ctx)))


def with_examples(apps: list[typer.Typer]) -> None:
    """Set the commands' help from their docstrings, examples on lines of their own that are never wrapped."""
    for app in apps:
        for command in app.registered_commands:
            assert command.callback is not None
            text = inspect.cleandoc(command.callback.__doc__ or "")
            command.help = re.sub(r"^Examples?: *(.+)$", "\b\nExample:\n  \\1", text, flags=re.MULTILINE)
