"""What docs/benchmarks.md says over all tables beside losses.py: who was not timed, the second harness, side studies, CPU."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from measure.names import FLASH, LIK, SHAPES
from tables.ages import about
from tables.cells import MISSING, Book, Cell, Table, Value, number, paper, percent, plain, ratio, times
from tables.columns import (
    Fastest,
    Getter,
    Line,
    Source,
    claim,
    each,
    faster,
    faster_bold,
    joined,
    ms,
    over,
    rows,
    value,
    within,
)
from tables.losses import measured
from tables.paper import CHUNKED, HALF, SCORERS, WIDE, at_1000, sized
from tables.rows import CPU, MAIN, PAPER, SECOND, Held, finished, row
from tables.script import of_script

COMPILED, COMPILED_CHUNKS = (Fastest(("baseline",), part) for part in ("compiled", "compiled chunks"))
REGISTRY = Path(__file__).resolve().parents[1] / "registry.toml"
SIZES = (1, 4, 16, 64, 256, 1024, 4096, 16384)


def refused(book: Book) -> Table:
    """Who was not timed, and why."""
    table = Table("not timed", "methods that failed, were wrong, too slow or missing", ["who", "why", "where"])
    places: dict[tuple[str, str], list[str]] = {}
    elsewhere = {one for one in SCORERS for _, held in measured(book) if held.ms(one)}  # the table `scorers` has them
    for name, held in measured(book):
        for method, why in (held.raw("skipped") or {}).items():
            if method not in elsewhere or not str(why).startswith("not installed"):
                places.setdefault((method, str(why)), []).append(name)
    for (method, why), names in places.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        table.rows.append([method, why.replace("|", "\\|")[:160], f"{names[0]}{more}"])
    return table


def unmeasured(book: Book) -> Table:
    """The paper's tables that nobody measured here, and what would."""
    table = Table(
        "not measured",
        "tables that are evaluations, with data that is not here",
        ["table", "question", "command, with its data"],
    )
    for name, said in tomllib.loads(REGISTRY.read_text(encoding="utf-8"))["evaluations"].items():
        command, _, more = said["run"].partition(" (")
        table.rows.append([name, said["answers"], f"`python evaluate.py {command}`" + (f" ({more}" if more else "")])
    table.notes.append(
        "What was run instead, on the collections and weights that are here: [fidelity.md](fidelity.md), [scale.md](scale.md)."
    )
    return table


# The second harness


def of_both(book: Book, name: str) -> Held | None:
    return at_1000(book, name) if book.file(SECOND) is not None else None


def again(line: Line, method: str) -> list[Value | None]:
    """What the second harness found for a method and for ours."""
    return [line.book.value(SECOND, "shapes", line.cell, "methods", one, "median_ms") for one in (method, MAIN)]


def twice(method: str) -> Getter:
    """How many times faster ours is than a method, by either harness."""
    return lambda line: joined("{} / {}", times(line.held.ms(method), line.held.ms(MAIN)), times(*again(line, method)))


def worst(line: Line) -> Cell:
    """The largest difference between the ratios of the two harnesses."""
    found: list[Value] = []
    for method in (WIDE, HALF, FLASH, LIK):
        change = ratio(ratio(*again(line, method)), ratio(line.held.ms(method), line.held.ms(MAIN)))
        if change is not None:
            found.append(Value(max(change.number, 1 / change.number) - 1, change.sources))
    return percent(max(found, key=lambda off: off.number, default=None), ".0f")


def commits(book: Book) -> Iterator[str]:
    """Whether the two harnesses measured one commit."""
    held = [one for name in SHAPES if (one := of_both(book, name)) is not None]
    firsts = sorted({str(about(book.file(one.file), list(one.keys)).get("revision")) for one in held})
    second = str(about(book.file(SECOND), []).get("revision")) if held else ""
    if held and firsts != [second]:
        yield f"Not of one commit: the first harness ran at {', '.join(firsts)}, the second at {second}."


def pauses(book: Book) -> Iterator[str]:
    if any(of_both(book, name) is not None for name in SHAPES):
        yield (
            "The second harness leaves no pause between calls: at ColPali the peers take longer in it, ours not. Clocks were "
            "not recorded."
        )


# Side studies


def compiled_chunks(line: Line) -> Cell:
    """The fastest compiled chunks of the frontier's row of the same cell: time, size, and how many times ours."""
    beside = sized(line.book, line.cell)
    label, time = beside.fastest(COMPILED_CHUNKS.kinds, COMPILED_CHUNKS.part) if beside is not None else ("", None)
    if beside is None or not label:
        return Cell(MISSING)
    entry = str(beside.raw("methods", label, "entry")).partition(" ")[0]
    return joined(f"{{}} ({entry}; {{}})", number(time), times(time, beside.ms(MAIN)))


def missing_chunks(book: Book) -> Iterator[str]:
    """Which sizes have no time, and why."""
    grid = finished(book, "chunks")
    for name, held in grid.items():
        why: dict[str, list[str]] = {}
        for size in SIZES:
            if reason := held.why(f"chunks of {size}"):
                why.setdefault(reason, []).append(str(size))
        yield from (f"{name}: no chunks of {', '.join(few)}: {reason}." for reason, few in why.items())
    if grid:
        yield "Compiled chunks (FP16, no graphs, the fastest size) are of the frontier's rows of 10,000 documents, over ours there."


def tiles(book: Book, cell: str = "") -> Held | None:
    return row(book, "tiles", "ColPali 1000")


def tried_tiles(book: Book) -> list[str]:
    """The chosen tile, then its neighbours by time."""
    held = tiles(book)
    times = {name: data.get("median_ms", 0.0) for name, data in held.raw("methods").items()} if held is not None else {}
    return [MAIN, *sorted((name for name in times if name != MAIN), key=times.__getitem__)]


def unfit(book: Book) -> Iterator[str]:
    held = tiles(book)
    names = [name for name in held.raw("skipped") if name.startswith("tiles")] if held is not None else []
    if names:
        yield f"{len(names)} more do not fit a multiprocessor."


def a_million(method: str) -> Getter:
    """Seconds for a million candidates."""
    return lambda line: ms(method, scale=1e3 / int(line.label.rpartition(" ")[2]))(line)


def claimed_cost(book: Book) -> Iterator[str]:
    held = book.paper["cost"]["ColPali"]
    yield (
        f"The paper's {held['flash']} and {held['chunked']} us a candidate are as many seconds a million. Beside them it prints "
        f"{held['flash_printed']} and {held['chunked_printed']} 'GPU-seconds per million candidates': those are GPU-hours a billion, "
        "and its dollars follow from the wrong unit."
    )


def cpu(book: Book) -> Table:
    """Without a GPU."""
    cases: dict[str, dict[str, dict[str, float]]] = book.raw(CPU, "cases") or {}
    title = "1000 documents of 180 tokens, d = 128, 32 query tokens, ms (times faster than padded einsum + max)"
    table = Table("CPU", title, ["method", *cases])
    for method in dict.fromkeys(name for held in cases.values() for name in held):
        row: list[Cell | str] = [method]
        for case in cases:
            time, faster = (book.value(CPU, "cases", case, method, key) for key in ("median_ms", "times_max"))
            if time is None or faster is None:
                row.append(MISSING)
            else:
                cell = Cell(f"{plain(time.number)} ({faster.number:.2f})", time.sources + faster.sources)
                ours = number(book.value(CPU, "cases", case, "ours FP32", "median_ms"))
                row.append(cell if method.startswith("our") else faster_bold([ours, cell])[1])
        table.rows.append(row)
    table.notes = [f"{book.raw(CPU, 'threads')} threads, torch {book.raw(CPU, 'torch')} (`make bench-cpu`)."]
    table.notes += [f"{name}: {why}." for name, why in (book.raw(CPU, "skipped") or {}).items()]
    return table


HARNESS = Source(
    "second harness", "times faster than, at 1000 documents, by the first harness / by the second (`second.py`: graphs and the host's "
    "clock)", "shape", rows(SHAPES, of_both), {
        "naive FP32 acc.": twice(WIDE), "naive FP16": twice(HALF), **each(twice, FLASH, LIK), "largest difference": worst,
    }, (commits, pauses),
)  # fmt: skip

STUDIES = (
    Source("chunk grid", "FP16 eager by chunk size, ms, in the form with `max` (fwd_chunked takes the faster of `max` and `amax`)",
           "shape, documents", rows(lambda book: finished(book, "chunks"), within("chunks", PAPER)), {
        "ours": ms(MAIN), **{str(size): ms(f"chunks of {size}") for size in SIZES},
        "compiled chunks (size; over ours)": compiled_chunks,
        "paper: compiled chunks (over Flash)": claim("ms", "times", form="{} ({}x)", table="chunked_compile"),
    }, (missing_chunks,), competing=("ours", *map(str, SIZES))),
    Source("tile table", "ColPali, 1000 documents: neighbours of the chosen row, ms", "tile (rows x tokens, warps, stages)",
           rows(tried_tiles, tiles, lambda name: "as chosen" if name == MAIN else name.removeprefix("tiles ")), {
        "ms": lambda line: ms(line.cell)(line),
        "over the chosen": lambda line: faster(line.cell)(line) if line.cell != MAIN else MISSING,
    }, (unfit,)),
    Source("roofline and cost", "one query: operations a byte of documents, what bounds, how close, and GPU-seconds a million "
           "candidates", "shape, documents", rows([f"{name} {count}" for name in SHAPES for count in (1000, 10000)], sized), {
        "operations a byte": over(("operations",), ("bytes",)), "bound by": lambda line: str(line.held.raw("bound_by")),
        "ours, of floor": value("methods", MAIN, "of_floor", digits=2), "ours, s a million": a_million(MAIN),
        "chunked FP16, s a million": a_million(CHUNKED),
        "paper A100: Flash, chunked, s a million": lambda line:
            paper(line.book, "cost", line.cell.removesuffix(" 10000"), "flash", "chunked", form="{}, {}"),
    }, ("Dollars follow from any hourly price: seconds a million candidates / 3600 x price.", claimed_cost)),
    Source("tiny pairs", "N independent pairs, us of GPU time", "N x tokens",
           of_script("pairs", lambda name: name.removeprefix("pairs ")), {
        "ours": ms(MAIN, scale=1e3), "compiled (fastest)": ms(COMPILED, scale=1e3), "naive FP16": ms(HALF, scale=1e3),
        **each(ms, FLASH, LIK, scale=1e3), "x compiled": faster(COMPILED),
    }, competing=("ours", "compiled (fastest)", "naive FP16", FLASH, LIK)),
)  # fmt: skip
