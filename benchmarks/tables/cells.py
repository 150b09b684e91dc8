"""Cells of docs/benchmarks.md: numbers that remember where they come from.

`Book` opens the committed results; a look-up gives a `Value` with its file and JSON pointer, arithmetic keeps the pointers of all
operands, and a `Cell` is what the page shows of it. So every figure on the page can be traced (docs/results/benchmarks_cells.json).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from measure import sources as sources_of

MISSING = "-"
FIGURES = Path(__file__).with_name("paper_tables.toml")
OPERATOR = Path(__file__).resolve().parents[2] / "kernels" / sources_of.PACKAGE
Claims = dict[str, dict[str, dict[str, Any]]]  # table, row, key: figure


@dataclass(frozen=True)
class Value:
    """A number and the places it was made of."""

    number: float
    sources: tuple[str, ...]

    def _with(self, other: Value | float, made: Callable[[float, float], float]) -> Value:
        if isinstance(other, Value):
            return Value(made(self.number, other.number), (*self.sources, *other.sources))
        return Value(made(self.number, float(other)), self.sources)

    def __truediv__(self, other: Value | float) -> Value:
        return self._with(other, lambda left, right: left / right)

    def __mul__(self, other: Value | float) -> Value:
        return self._with(other, lambda left, right: left * right)

    def __add__(self, other: Value | float) -> Value:
        return self._with(other, lambda left, right: left + right)


@dataclass(frozen=True)
class Cell:
    """Text of a table's cell and the places of its figures."""

    text: str
    sources: tuple[str, ...] = ()


@dataclass
class Table:
    """A table of the page: `name` is the paper's label, `notes` stand below it."""

    name: str
    title: str
    heads: Sequence[str]
    rows: list[list[Cell | str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    age: str = ""  # when it was measured, and which of its rows by older kernels (`ages.py`)


def pointer(file: str, keys: Sequence[str]) -> str:
    """`file#/a/b`, as JSON pointers escape."""
    return file + "#" + "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in keys)


def keys_of(place: str) -> tuple[str, list[str]]:
    """A pointer's file and keys."""
    file, _, path = place.partition("#")
    return file, [key.replace("~1", "/").replace("~0", "~") for key in path.split("/")[1:]]


def claimed(path: Path = FIGURES) -> Claims:
    """The paper's figures as printed: 2.60 stays 2.60."""
    return tomllib.loads(path.read_text(encoding="utf-8"), parse_float=str)


class Book:
    """The committed results and the paper's figures; with `given` (name: file) those files and no others."""

    def __init__(self, folder: Path, paper: Path, given: Mapping[str, Path] | None = None, operator: Path = OPERATOR) -> None:
        self.folder, self.given, self.operator = folder, dict(given or {}), operator
        self.paper = claimed(paper)
        self._files: dict[str, Any] = {}

    def file(self, name: str) -> Any:
        """A results file; None where it was not measured yet."""
        if name not in self._files:
            path = self.given.get(name, self.folder / "not given") if self.given else self.folder / name
            self._files[name] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return self._files[name]

    @cached_property
    def families(self) -> dict[str, str]:
        """What the operator's sources are today, for `ages.py`."""
        return sources_of.digests(self.operator)

    def raw(self, file: str, *keys: str) -> Any:
        """What a file holds at these keys, or None."""
        found = self.file(file)
        for key in keys:
            if isinstance(found, list):
                found = found[int(key)] if int(key) < len(found) else None
            elif not isinstance(found, dict) or key not in found:
                return None
            else:
                found = found[key]
        return found

    def value(self, file: str, *keys: str) -> Value | None:
        """A number and its place, or None."""
        found = self.raw(file, *keys)
        if isinstance(found, bool) or not isinstance(found, int | float):
            return None
        return Value(float(found), (pointer(file, keys),))


# Cells


def number(value: Value | None, digits: int = 3, unit: str = "") -> Cell:
    """Significant digits, thousands without an exponent."""
    return Cell(MISSING) if value is None else Cell(plain(value.number, digits) + unit, value.sources)


def plain(figure: float, digits: int = 3) -> str:
    """As a reader wants it: 0.0247, 4.53, 16.0, 44700."""
    if figure == 0:
        return "0"
    if abs(figure) < 1e-4:
        return f"{figure:.{digits - 1}e}"
    shown = f"{figure:.{digits}g}"
    if "e" in shown:
        return f"{float(shown):.0f}"
    whole = len(shown.lstrip("-").partition(".")[0].lstrip("0"))
    places = max(0, digits - whole) if abs(figure) >= 1 else len(shown.partition(".")[2])
    return f"{float(shown):.{places}f}"


def ratio(above: Value | None, below: Value | None, by: float = 1.0) -> Value | None:
    """One over the other, `by` times."""
    return above / below * by if above is not None and below is not None else None


def times(over: Value | None, ours: Value | None, *, digits: int = 2) -> Cell:
    """How many times faster ours is than `over`."""
    found = ratio(over, ours)
    return Cell(MISSING) if found is None else Cell(f"{found.number:.{digits}f}x", found.sources)


def gigabytes(value: Value | None) -> Cell:
    """Bytes as GB."""
    return Cell(MISSING) if value is None else number(value / 1e9, 3)


def percent(value: Value | None, form: str = ".4g") -> Cell:
    """A share."""
    return Cell(MISSING) if value is None else Cell(f"{100 * value.number:{form}}%", value.sources)


def paper(book: Book, table: str, row: str, *keys: str, form: str = "{}") -> str:
    """The paper's figures for a row, joined; a dash where it has none."""
    held = book.paper.get(table, {}).get(row, {})
    return form.format(*(held.get(key, MISSING) for key in keys)) if any(key in held for key in keys) else MISSING


# Markdown


def text_of(cell: Cell | str) -> str:
    """What a cell shows."""
    return cell if isinstance(cell, str) else cell.text


def sources(table: Table) -> list[str]:
    """Every place that a table's figures come from."""
    return [source for row in table.rows for cell in row if isinstance(cell, Cell) for source in cell.sources]


def table_lines(table: Table) -> list[str]:
    """A table alone; columns of figures are aligned to the right."""
    if any(len(row) != len(table.heads) for row in table.rows):
        raise ValueError(f"{table.name}: a row has another number of cells than the table of columns")
    columns = [[text_of(row[place]) for row in table.rows] for place in range(len(table.heads))]
    figures = [all(text == MISSING or text.lstrip("*")[:1].isdigit() for text in column) for column in columns[1:]]
    shown = ["| " + " | ".join(table.heads) + " |", "|---|" + "".join("---:|" if one else "---|" for one in figures)]
    return [*shown, *("| " + " | ".join(text_of(cell) for cell in row) + " |" for row in table.rows)]


def markdown(table: Table, given: Mapping[str, str] | None = None) -> list[str]:
    """A table with its title and notes; `given`: names of files that are not the committed ones."""
    shown = [f"### {table.name}: {table.title}", ""]
    if not table.rows:
        return [*shown, "Not measured yet.", "", *table.notes, ""]
    shown += [*table_lines(table), ""]
    files = sorted({source.partition("#")[0] for source in sources(table)})
    if files:
        names = [(given or {}).get(name, f"[{name}](results/{name})") for name in files]
        shown += [f"Raw figures: {', '.join(names)}. {table.age}".rstrip(), ""]
    for note in table.notes:
        shown += [note, ""]
    return shown


def cells(tables: Sequence[Table]) -> dict[str, Any]:
    """Every figure of the page: table, row, column, what it shows, and the files and keys it was made of."""
    found: dict[str, Any] = {}
    for table in tables:
        held: dict[str, Any] = {}
        for row in table.rows:
            for head, cell in zip(table.heads, row, strict=True):
                if isinstance(cell, Cell) and cell.sources:
                    key = f"{text_of(row[0])} | {head}"
                    if key in held:
                        raise ValueError(f"{table.name}: got two cells {key!r}, need names of their own")
                    held[key] = {"shows": cell.text, "from": list(cell.sources)}
        if held:
            found[table.name] = held
    return found
