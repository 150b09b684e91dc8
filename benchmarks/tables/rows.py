"""Rows of the results files as the page reads them: methods by name, the fastest of a kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from results.paper_file import NOT_TRIED
from tables.cells import Book, Value

PAPER, FORWARD, SECOND = "h200/paper.json", "h200/forward.json", "h200/second.json"
CPU = "cpu/forward.json"
MAIN = "ours"
CLOCK, BUSY = "median_ms", "busy_median_ms"  # with what the host takes; GPU time alone
COUNTS = {1000: "1K", 10000: "10K"}
EAGER = ("naive FP16", "naive FP16, amax", "naive FP32 accumulation", "chunked FP16")


def environments(found: Any) -> list[dict[str, Any]]:
    """Machines and software that a results file names: of all rows, of groups, of the whole."""
    if not isinstance(found, dict):
        return []
    here = list((found.get("environments") or {}).values())
    here += [group.get("environment") for group in (found.get("groups") or {}).values()]
    return [one for one in (*here, found.get("environment")) if isinstance(one, dict)]


@dataclass(frozen=True)
class Held:
    """One measured row: its file and where it stands there."""

    book: Book
    file: str
    keys: tuple[str, ...]

    def value(self, *keys: str) -> Value | None:
        """A number of the row."""
        return self.book.value(self.file, *self.keys, *keys)

    def raw(self, *keys: str) -> Any:
        """Anything of the row."""
        return self.book.raw(self.file, *self.keys, *keys)

    def ms(self, method: str, clock: str = CLOCK) -> Value | None:
        """A method's median, with the host or (`BUSY`) by GPU time alone."""
        return self.value("methods", method, clock)

    def fastest(
        self, kinds: tuple[str, ...] = (), part: str = "", names: tuple[str, ...] = (), clock: str = CLOCK
    ) -> tuple[str, Value | None]:
        """The fastest method of these kinds (or names) whose name holds `part`; "" and None where there is none."""
        methods: dict[str, Any] = self.raw("methods") or {}
        times = {
            name: data[clock]
            for name, data in methods.items()
            if data.get(clock) is not None and part in name and ((not names and data["kind"] in kinds) or name in names)
        }
        if not times:
            return "", None
        name = min(times, key=times.__getitem__)
        return name, self.ms(name, clock)

    def compiled(self) -> Value | None:
        """The fastest flavour of `torch.compile` over the whole corpus."""
        return self.fastest(("baseline",), "compiled FP")[1]

    def why(self, method: str) -> str:
        """Why a method has no time here."""
        return str((self.raw("skipped") or {}).get(method, ""))


def row(book: Book, group: str, name: str, file: str = PAPER) -> Held | None:
    """A finished row of a file."""
    keys = ("groups", group, "rows", name)
    return Held(book, file, keys) if book.raw(file, *keys) is not None else None


def finished(book: Book, group: str, file: str = PAPER) -> dict[str, Held]:
    """A file's finished rows of a group by name."""
    keys = ("groups", group, "rows")
    return {name: Held(book, file, (*keys, name)) for name in book.raw(file, *keys) or {}}


def forward_rows(book: Book, group: str) -> dict[str, Held]:
    """Rows of a group of forward.py."""
    return finished(book, group, FORWARD)


def shape(book: Book, name: str, documents: int) -> Held | None:
    """One query against so many documents: the campaign's row, or an older run's."""
    for group in ("shapes", "frontier"):
        found = row(book, group, f"{name} {documents}")
        if found is not None:
            return found
    return forward_rows(book, "dense").get(f"{name} {COUNTS.get(documents, '')}")


def wide(book: Book, dim: int) -> Held | None:
    """A width's row, or an older run's."""
    return row(book, "wide", f"d = {dim}") or forward_rows(book, "wide").get(f"wide, d = {dim}")


def point(book: Book, method: str, cell: str) -> Held | None:
    """What the process that measures a method's memory found for a cell."""
    places = [("groups", group, "rows", method, "cells", cell) for group in ("memory", "memory_compiled")]
    return next((Held(book, PAPER, keys) for keys in places if isinstance(book.raw(PAPER, *keys), dict)), None)


def tried(point: Held | None) -> str:
    """In a word or two why a cell has no figure: "OOM (42 GiB asked for)", "wrong scores", or an empty text."""
    if point is None:
        return ""
    if point.raw("wrong"):
        return "wrong scores"
    text = str(point.raw("failed") or "")
    if "OutOfMemory" in text or "out of memory" in text:
        size = text.partition("Tried to allocate ")[2].partition(". ")[0]
        return f"OOM ({size} asked for)" if size else "OOM"
    if text.startswith(NOT_TRIED):
        return NOT_TRIED
    return f"failed: {text[:60]}" if text else ""
