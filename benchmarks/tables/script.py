"""Tables of docs/benchmarks.md from forward.py alone: every row with its floor, codes over FP16, dequantising first, host clocks."""

from __future__ import annotations

from collections.abc import Iterable

from tables.cells import MISSING, Book, Cell, Table, Value, number, times
from tables.rows import BEFORE, EAGER, MAIN, Held, forward_rows, wide

FLASH, LIK = "flash-maxsim", "late-interaction-kernels"
GRANULARITIES = ("token", "document", "corpus")


def _before(rows: Iterable[tuple[str, Held]]) -> str:
    """Rows of the run before, which the newest one did not reach."""
    names = [name for name, held in rows if held.file == BEFORE]
    return f"; of the run before the last: {', '.join(names)}" if names else ""


def _slashed(values: Iterable[Value | None]) -> Cell:
    """Several figures in one cell."""
    shown = [number(value) for value in values]
    return Cell(" / ".join(one.text for one in shown), tuple(place for one in shown for place in one.sources))


def kernels(book: Book) -> Table:
    """One run: everybody of every float row."""
    table = Table(
        "kernels",
        "FP16 rows of forward.py in one run, ms",
        ["row", "floor", "ours", "of floor", FLASH, LIK, "naive FP16 (max / amax)", "naive FP32 acc.", "chunked FP16",
         "fastest compiled", "times faster than the fastest rival"],
    )  # fmt: skip
    newer = [pair for group in ("dense", "many", "ragged") for pair in forward_rows(book, group).items()]
    older = [(f"wide, d = {dim}", held) for dim in (96, 1000) if (held := wide(book, dim)) is not None]
    for name, held in (*newer, *older):
        ours = held.ms(MAIN)
        rival, theirs = held.fastest(("baseline", "peer"))
        row: list[Cell | str] = [name, number(held.value("floor_ms")), number(ours)]
        row += [number(held.value("methods", MAIN, "of_floor"), 2), number(held.ms(FLASH)), number(held.ms(LIK))]
        row.append(_slashed(held.ms(one) for one in EAGER[:2]))
        row += [number(held.ms(one)) for one in EAGER[2:]]
        row.append(number(held.compiled()))
        faster = times(theirs, ours)
        table.rows.append([*row, Cell(f"{faster.text} ({rival})", faster.sources) if faster.sources else MISSING])
    if older:
        table.notes.append(f"The two wide rows are of older runs and states of the kernels{_before(newer)}.")
    return table


def codes(book: Book) -> Table:
    """INT8 and FP8 over our own FP16, and the peer that has them."""
    table = Table(
        "codes",
        "INT8 and FP8 over our own FP16 on the same documents, ms",
        ["row", "FP16", *(f"{granularity} scale" for granularity in GRANULARITIES), "peer"],
    )
    for kind in ("INT8", "FP8"):
        for name, held in forward_rows(book, kind.lower()).items():
            half = held.ms("ours FP16")
            if half is None:
                continue
            row: list[Cell | str] = [name, number(half)]
            for granularity in GRANULARITIES:
                value = held.ms(f"ours {kind}, {granularity} scale")
                faster = times(half, value)
                row.append(Cell(f"{number(value).text} ({faster.text})", faster.sources) if value is not None else MISSING)
            peer, theirs = held.fastest(("peer",), kind)
            table.rows.append([*row, Cell(f"{number(theirs).text} ({peer})", theirs.sources) if theirs is not None else "none"])
    return table


def dequantised(book: Book) -> Table:
    """INT8 against dequantising first."""
    ways = ("to FP32, naive", "to FP16, naive", "to FP16, amax", "to FP16, chunked")
    table = Table(
        "dequantise",
        "one ColPali query, INT8 documents: scored as they are, or dequantised first, ms",
        ["documents", *(f"ours, {granularity} scale" for granularity in GRANULARITIES), *ways],
    )
    for name, held in forward_rows(book, "int8").items():
        if not name.startswith("INT8 or dequantise"):
            continue
        row: list[Cell | str] = [name.rpartition(", ")[2]]
        row += [number(held.ms(f"ours INT8, {granularity} scale")) for granularity in GRANULARITIES]
        table.rows.append([*row, *(number(held.ms(f"dequantise {way}")) for way in ways)])
    return table


def host(book: Book) -> Table:
    """What a call costs its caller."""
    shown = (MAIN, "ours, CUDA graph", FLASH, LIK)
    table = Table(
        "host",
        "host clocks: us a call, back to back / from an idle GPU",
        ["call", *shown, "fastest naive FP16", "fastest compiled"],
    )
    for name, held in forward_rows(book, "host").items():
        methods = held.raw("methods") or {}

        def both(name: str, held: Held = held) -> Cell:
            return _slashed(held.value("methods", name, f"{key}_median_us") for key in ("call", "idle"))

        row: list[Cell | str] = [name.removeprefix("host "), *(both(one) for one in shown)]
        for part in ("naive FP16", "compiled"):
            found = {one: data["call_median_us"] for one, data in methods.items() if part in one and "call_median_us" in data}
            row.append(both(min(found, key=found.__getitem__)) if found else MISSING)
        table.rows.append(row)
    return table


def tables(book: Book) -> list[Table]:
    """All of forward.py's."""
    return [make(book) for make in (kernels, codes, dequantised, host)]
