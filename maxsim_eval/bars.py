"""Progress bars: one that moves on a terminal; elsewhere (a log, a CI) a plain line every half minute, and none for shorter work."""

from __future__ import annotations

import sys
from typing import Any

import tqdm

SECONDS = 30.0
_LINE = "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt}, {elapsed} so far, {remaining} left, {rate_fmt}{postfix}"


class _Lines:
    """A stream that turns each redrawing of a bar into a line of its own."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        """Write the visible text of one drawing as a line."""
        line = text.strip("\r\n ")
        if line:
            self.stream.write(line + "\n")

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()


class Bar(tqdm.tqdm):
    """A bar with a total, for every stream; arguments are those of `tqdm.tqdm`."""

    def __init__(self, *iterable: Any, **options: Any) -> None:
        stream = options.get("file") or sys.stderr
        terminal = getattr(stream, "isatty", bool)()
        if not terminal and not options.get("disable"):
            options |= {"file": _Lines(stream), "mininterval": SECONDS, "maxinterval": SECONDS, "miniters": 1}
            options |= {"delay": SECONDS, "bar_format": _LINE}
        self._terminal = terminal
        super().__init__(*iterable, **options)

    def moveto(self, n: int) -> None:
        """Move to the line of this bar, where there are lines to move between."""
        if self._terminal:
            super().moveto(n)
