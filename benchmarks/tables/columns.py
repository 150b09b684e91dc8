"""Tables as data: where the rows of a table come from, and a getter for every column; `drawn` makes any of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tables.cells import MISSING, Book, Cell, Table, Value, gigabytes, number, paper, percent, ratio, times
from tables.rows import CLOCK, MAIN, Held, point, row, tried


@dataclass(frozen=True)
class Line:
    """One row to be drawn: what its first cell says, the paper's name of it, and the measured row."""

    book: Book
    table: str
    label: str
    cell: str
    held: Held


@dataclass(frozen=True)
class Fastest:
    """Of a row's methods of these kinds (or names) the fastest whose name holds `part`."""

    kinds: tuple[str, ...] = ()
    part: str = ""
    names: tuple[str, ...] = ()


Which = str | Fastest  # a method's name, or the fastest of some
Getter = Callable[[Line], Cell | str]
Lines = Callable[[Book], Iterable[tuple[str, str, Held]]]  # label, the paper's name, measured row
Find = Callable[[Book, str], Held | None]
Note = str | Callable[[Book], Iterable[str]]
COMPILED, PEER = Fastest(("baseline",), "compiled FP"), Fastest(("peer",))


@dataclass(frozen=True)
class Source:
    """A table: `name` is the paper's label, `first` heads the column of labels."""

    name: str
    title: str
    first: str
    lines: Lines
    columns: Mapping[str, Getter]
    notes: tuple[Note, ...] = ()
    competing: tuple[str, ...] = ()  # heads of columns that compete: figures below the first one's, which is ours, are bold


Maker = Source | Callable[[Book], Table]


def drawn(source: Maker, book: Book) -> Table:
    """The table that these results give."""
    if not isinstance(source, Source):
        return source(book)
    rows: list[list[Cell | str]] = []
    for label, cell, held in source.lines(book):
        line = Line(book, source.name, label, cell, held)
        cells = {head: get(line) for head, get in source.columns.items()}
        found = {
            head: cell if head.startswith("over ") else below_one_bold(cell) for head, cell in cells.items()
        }  # columns "over ..." compare ours with ours
        found |= zip(source.competing, faster_bold([found[head] for head in source.competing]), strict=True)
        rows.append([label, *found.values()])
    notes = [text for note in source.notes for text in ([note] if isinstance(note, str) else note(book))]
    return Table(source.name, source.title, [source.first, *source.columns], rows, notes)


def faster_bold(cells: list[Cell | str]) -> list[Cell | str]:
    """Every figure below the first one, which is ours, in bold; of two clocks, `a / b`, each against ours of that clock."""
    shown, ours = list(cells), list[str]()
    for place, cell in enumerate(cells):
        if not isinstance(cell, Cell) or not cell.sources:
            continue
        clocks = cell.text.split(" / ")
        ours = clocks if place == 0 else ours
        if ours:
            text = " / ".join(
                _bold_below(one, mine) for one, mine in itertools.zip_longest(clocks, ours[: len(clocks)], fillvalue="")
            )
            shown[place] = Cell(text, cell.sources)
    return shown


def _bold_below(text: str, ours: str) -> str:
    """A figure and what stands behind it, the figure in bold where it is below ours; text without a figure as it is."""
    value, mine = (re.match(r"\d[\d.e+-]*(?= |$)", one) for one in (text, ours))
    if value is None or mine is None or float(value[0]) >= float(mine[0]):
        return text
    return f"**{value[0]}**{text[value.end() :]}"


def below_one_bold(cell: Cell | str) -> Cell | str:
    """A ratio of times that is below 1, where somebody else is faster, in bold."""
    ratio = re.match(r"(\d[\d.]*)x(?= |$)", cell.text) if isinstance(cell, Cell) and cell.sources else None
    if ratio is None or float(ratio[1]) >= 1 or not isinstance(cell, Cell):
        return cell
    return Cell(f"**{ratio[0]}**{cell.text[ratio.end() :]}", cell.sources)


# Rows


def rows(cells: Iterable[str] | Callable[[Book], Iterable[str]], find: Find, label: Callable[[str], str] = str) -> Lines:
    """Lines for those of these cells that were measured."""

    def lines(book: Book) -> Iterator[tuple[str, str, Held]]:
        for cell in cells(book) if callable(cells) else cells:
            held = find(book, cell)
            if held is not None:
                yield label(cell), cell, held

    return lines


def of_paper(table: str, *more: str) -> Callable[[Book], Iterable[str]]:
    """The cells of a table of the paper."""
    return lambda book: [*book.paper[table], *more]


def within(group: str, file: str, form: str = "{}") -> Find:
    """Finds a group's row by the name of its cell."""
    return lambda book, cell: row(book, group, form.format(cell), file)


def joined(form: str, *cells: Cell) -> Cell:
    """Several figures in one cell."""
    return Cell(form.format(*(cell.text for cell in cells)), tuple(place for cell in cells for place in cell.sources))


def picked(held: Held, which: Which, clock: str = CLOCK) -> tuple[str, Value | None]:
    """A method's name and time."""
    if isinstance(which, str):
        return which, held.ms(which, clock)
    return held.fastest(which.kinds, which.part, which.names, clock)


# Getters


def value(*keys: str, digits: int = 3) -> Getter:
    """A number of the row."""
    return lambda line: number(line.held.value(*keys), digits)


def share(*keys: str) -> Getter:
    """A share of 1."""
    return lambda line: percent(line.held.value(*keys))


def size(*keys: str) -> Getter:
    """Bytes as GB."""
    return lambda line: gigabytes(line.held.value(*keys))


def over(above: tuple[str, ...], below: tuple[str, ...], shown: Callable[[Value | None], Cell] = number) -> Getter:
    """One number of the row over another."""
    return lambda line: shown(ratio(line.held.value(*above), line.held.value(*below)))


def ms(which: Which, clock: str = CLOCK, scale: float = 1.0) -> Getter:
    """A method's time."""

    def get(line: Line) -> Cell:
        time = picked(line.held, which, clock)[1]
        return number(time if time is None or scale == 1.0 else time * scale)

    return get


def each(get: Callable[..., Getter], *heads: str, **more: Any) -> dict[str, Getter]:
    """Columns whose heads are the methods' names."""
    return {head: get(head, **more) for head in heads}


def faster(which: Which, ours: str = MAIN, digits: int = 2) -> Getter:
    """How many times faster ours is."""
    return lambda line: times(picked(line.held, which)[1], line.held.ms(ours), digits=digits)


def faster_than(which: Which) -> Getter:
    """How many times faster ours is, and than whom."""

    def get(line: Line) -> Cell:
        name, theirs = picked(line.held, which)
        found = times(theirs, line.held.ms(MAIN))
        return Cell(f"{found.text} ({name})", found.sources) if found.sources else found

    return get


def named(name: str, time: Value | None) -> Cell:
    """A time with who it belongs to."""
    cell = number(time)
    return Cell(f"{cell.text} ({name})", cell.sources) if name and time is not None else cell


def who(which: Which, prefix: str = "") -> Getter:
    """A time and its method."""

    def get(line: Line) -> Cell:
        name, time = picked(line.held, which)
        return named(name.removeprefix(prefix), time)

    return get


def claim(*keys: str, form: str = "{}", table: str = "", row: str = "") -> Getter:
    """The paper's figures."""
    return lambda line: paper(line.book, table or line.table, row or line.cell, *keys, form=form)


def claims(line: Line) -> str:
    """All that the paper says of a row, key by key."""
    return ", ".join(f"{key} {figure}" for key, figure in line.book.paper[line.table].get(line.cell, {}).items())


def with_peak(held: Held | None, method: str) -> Cell:
    """Milliseconds and peak GB beyond inputs and gradients, or why there are none."""
    if held is None:
        return Cell(MISSING)
    time, peak = number(held.ms(method)), gigabytes(held.value("methods", method, "peak_bytes"))
    return joined("{} ({})", time, peak) if time.sources else Cell(held.why(method)[:40] or MISSING)


def step(which: Which) -> Getter:
    """A method's time and memory; with its name where it is the fastest of some."""

    def get(line: Line) -> Cell:
        name, _ = picked(line.held, which)
        shown = with_peak(line.held, name)
        return shown if isinstance(which, str) or not name else Cell(f"{shown.text} {name}", shown.sources)

    return get


# Of processes that measure one method's memory


def peak_of(held: Held | None) -> Cell:
    """A peak in GB, or why there is none."""
    found = held.value("peak_bytes") if held is not None and not held.raw("wrong") else None
    return gigabytes(found) if found is not None else Cell(tried(held) or MISSING)


def peak(method: str, form: str = "{}") -> Getter:
    """The peak of a cell whose name is the row's in `form`."""
    return lambda line: peak_of(point(line.book, method, form.format(line.cell)))
