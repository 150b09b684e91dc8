"""Standard streams that may be closed, full or read by nobody: messages are dropped then, an answer that cannot be given is an error.

A pipe whose reader is gone (`| head`) is no error: the command ends without a word, with the exit code that SIGPIPE would give.
The work is done and its files are written before an answer is printed, so neither costs a report.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from maxsim_eval.errors import EXIT_PIPE, DataError, ProgramExit

_replaced: list[Any] = []  # an old stream would close its descriptor when nobody holds it any more


class _Stream(io.TextIOWrapper):
    """Stays open: a user's function that closes it must not cost the answer."""

    def close(self) -> None:
        self.flush()


class _Buffer(io.BufferedWriter):
    """Stays open, as `_Stream`."""

    def close(self) -> None:
        self.flush()


class _Raw(io.FileIO):
    """Stays open, as `_Stream`; the descriptor is not its own."""

    def close(self) -> None: ...


class _Messages(_Raw):
    """Where stderr goes: what cannot be written is lost."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


class ClosedPipe(ProgramExit):
    """Whoever read the answer has closed the pipe: the command ends quietly."""


class _Answers(_Raw):
    """Where stdout goes: the first failure raises `DataError`, or `ClosedPipe` for a closed pipe; anything later is lost."""

    broken = False

    def write(self, data: Any) -> int:
        if not self.broken and memoryview(data).nbytes:  # typer writes nothing, to see whether it can
            try:
                return super().write(data)
            except OSError as error:
                self.broken = True
                if isinstance(error, BrokenPipeError):
                    raise ClosedPipe(EXIT_PIPE) from None
                raise DataError(f"standard output: cannot be written ({error.strerror or error})") from error
        return memoryview(data).nbytes


def guard_streams() -> None:
    """Replace this process's own stdout and stderr by streams that fail as this module says; those that a test has set stay."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file that is opened would get its number, and whatever is printed there
            os.open(os.devnull, os.O_RDWR)
    for name, descriptor, kind in (("stdout", 1, _Answers), ("stderr", 2, _Messages)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for as long as the process runs
        elif type(stream) is io.TextIOWrapper and not _guarded(stream, kind) and stream.fileno() == descriptor:
            setattr(sys, name, _like(stream, kind(descriptor, "wb", closefd=False)))
            _replaced.append(stream)
        else:
            continue
        if name == "stderr":
            setattr(sys, "__stderr__", sys.stderr)  # noqa: B010 - processes that speak for others print there; mypy takes it for fixed


def _guarded(stream: io.TextIOWrapper, kind: type[io.FileIO]) -> bool:
    return isinstance(getattr(stream.buffer, "raw", stream.buffer), kind)


def _like(stream: io.TextIOWrapper, raw: io.FileIO) -> io.TextIOWrapper:
    return _Stream(
        raw if isinstance(stream.buffer, io.RawIOBase) else _Buffer(raw),  # python -u has no buffer
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
