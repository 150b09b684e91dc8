"""What docs/benchmarks.md says over all tables: fast_p, every loss, the second harness, side studies, CPU tables."""

from __future__ import annotations

from collections.abc import Iterator

import page_rows
from page_cells import MISSING, Book, Cell, Table, Value, number, paper, plain, times
from page_forward import HALF, SHAPES, WIDE
from page_rows import FORWARD, MAIN, PAPER, SECOND, Held

GROUPS = ("shapes", "frontier", "op_abl", "multiquery", "varlen", "int8", "int8_B", "wide")
CPU = "cpu/forward.json"
SAME_RATE = "bound by reading the documents, which every kernel does at the same rate; the difference is within the spread"
REASONS = (  # part of a row's name, down to which ratio the reason covers, the reason
    ("pairs", 0.9, "launch-bound: a few hundredths of the floor; the kernels differ by tenths of a microsecond"),
    ("varlen", 0.8, "few documents: the time hardly falls with the tokens; it is that of the longest, which one program reads"),
    ("textual", 0.97, SAME_RATE),
    ("long-doc", 0.97, SAME_RATE),
    ("d = 4096", 0.9, "cuBLAS's product with a separate maximum: writing S is cheap beside a product of this depth"),
    (
        "step ColBERT B=128",
        0.6,
        "bound by the host: the GPU is busy for a fifth of the step; the peer fuses loss and gradients",
    ),
)
UNKNOWN = "no reason established"


def _again(book: Book, name: str) -> bool:
    """Whether the campaign has a row of an older file ("visual 10K", "wide, d = 768") too."""
    shape, _, count = name.partition(" ")
    number = {"1K": "1000", "10K": "10000"}.get(count, "")
    return any(
        page_rows.row(book, group, one) is not None
        for group, one in (
            ("shapes", f"{shape} {number}"),
            ("frontier", f"{shape} {number}"),
            ("wide", name.removeprefix("wide, ")),
        )
    )


def measured(book: Book) -> Iterator[tuple[str, Held]]:
    """(name, row) of every timed cell: the campaign's, and of older files the rows that the campaign has no counterpart of."""
    for group in GROUPS:
        for name in book.raw(PAPER, "groups", group, "rows") or {}:
            held = page_rows.row(book, group, name)
            assert held is not None
            yield f"{group}: {name}", held
    for group in ("dense", "wide", "many", "ragged", "pairs"):
        for name in book.raw(FORWARD, "groups", group, "rows") or {}:
            if not _again(book, name):
                yield f"{group}: {name}", Held(book, FORWARD, ("groups", group, "rows", name))
    for file, group in (("h200/training_steps.json", "steps"), ("h200/chamfer.json", "training")):
        for name in book.raw(file, "groups", group, "rows") or {}:
            yield f"{group}: {name}", Held(book, file, ("groups", group, "rows", name))


def ratios(book: Book, *, peers: bool) -> Iterator[tuple[str, str, Value]]:
    """(row, strongest rival, times faster than it) wherever somebody else was measured right."""
    kinds = ("baseline", "peer") if peers else ("baseline",)
    for name, held in measured(book):
        main = held.raw("main") or MAIN
        methods = held.raw("methods") or {}
        right = tuple(key for key, data in methods.items() if data["kind"] in kinds and not data.get("wrong"))
        rival, theirs = held.fastest(names=right) if right else ("", None)
        ours = held.ms(main)
        if theirs is not None and ours is not None:
            yield name, rival, theirs / ours


def fast_p(book: Book) -> Table:
    """Shares of cells."""
    table = Table(
        "fast_p",
        "share of cells at least p times faster than the strongest of",
        ["against", "cells", "fast_1", "fast_1.5", "fast_2", "fast_3", "paper: cells, fast_1, fast_2, fast_3"],
    )
    claim = paper(book, "fast_p", "all", "cells", "fast1", "fast2", "fast3", form="{}, {}%, {}%, {}%")
    for words, peers in (("eager, chunked and every compile flavour", False), ("the same and the peers", True)):
        found = [value for _, _, value in ratios(book, peers=peers)]
        if not found:
            continue
        sources = tuple(source for value in found for source in value.sources)
        row: list[Cell | str] = [words, str(len(found))]
        for least in (1.0, 1.5, 2.0, 3.0):
            share = sum(value.number >= least for value in found) / len(found)
            row.append(Cell(f"{100 * share:.0f}%", sources))
        table.rows.append([*row, claim if not peers else MISSING])
    return table


def losses(book: Book) -> Table:
    """Every cell below 1."""
    table = Table(
        "losses",
        "every cell where somebody else was faster",
        ["row", "who", "ours is so many times faster", "why"],
    )
    for name, rival, value in ratios(book, peers=True):
        if value.number < 1:
            why = next((why for part, least, why in REASONS if part in name and value.number >= least), UNKNOWN)
            table.rows.append([name, rival, Cell(f"{value.number:.3f}x", value.sources), why])
    return table


def refused(book: Book) -> Table:
    """Who was not timed, and why."""
    table = Table("not timed", "methods that failed, were wrong, too slow or missing", ["who", "why", "where"])
    places: dict[tuple[str, str], list[str]] = {}
    for name, held in measured(book):
        for method, why in (held.raw("skipped") or {}).items():
            places.setdefault((method, str(why)), []).append(name)
    for (method, why), names in places.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        table.rows.append([method, why.replace("|", "\\|")[:160], f"{names[0]}{more}"])
    return table


def second(book: Book) -> Table:
    """Both harnesses."""
    table = Table(
        "second harness",
        "times faster than, at 1000 documents, by the first harness / by the second (`second.py`: graphs and the host's clock)",
        ["shape", "naive FP32 acc.", "naive FP16", "flash-maxsim", "late-interaction-kernels", "largest difference"],
    )
    if book.file(SECOND) is None:
        return table
    for name in SHAPES:
        held = page_rows.shape(book, name, 1000)
        if held is None:
            continue
        row: list[Cell | str] = [name]
        worst: Value | None = None
        for method in (WIDE, HALF, "flash-maxsim", "late-interaction-kernels"):
            pair = [book.value(SECOND, "shapes", name, "methods", one, "median_ms") for one in (method, MAIN)]
            first = times(held.ms(method), held.ms(MAIN))
            again = times(*pair)
            row.append(Cell(f"{first.text} / {again.text}", first.sources + again.sources))
            mine, theirs = held.ms(MAIN), held.ms(method)
            if pair[0] is None or pair[1] is None or mine is None or theirs is None:
                continue
            change = (pair[0] / pair[1]) / (theirs / mine)
            off = Value(max(change.number, 1 / change.number) - 1, change.sources)
            worst = off if worst is None or off.number > worst.number else worst
        row.append(Cell(f"{100 * worst.number:.0f}%", worst.sources) if worst is not None else MISSING)
        table.rows.append(row)
    return table


# Side studies


def chunks(book: Book) -> Table:
    """Every chunk size."""
    sizes = (1, 4, 16, 64, 256, 1024, 4096, 16384)
    table = Table(
        "chunk grid",
        "naive FP16 by chunk size, ms",
        ["shape, documents", "ours", *(str(size) for size in sizes), "compiled chunks (size)", "paper: compiled chunks"],
    )
    for name in book.raw(PAPER, "groups", "chunks", "rows") or {}:
        held = page_rows.row(book, "chunks", name)
        assert held is not None
        row: list[Cell | str] = [name, number(held.ms(MAIN))]
        row += [number(held.ms(f"chunks of {size}")) for size in sizes]
        shape, _, count = name.partition(" ")
        beside = page_rows.shape(book, shape, int(count))
        label, value = beside.fastest(("baseline",), "compiled chunks") if beside is not None else ("", None)
        entry = str(beside.raw("methods", label, "entry")) if beside is not None and label else ""
        shown = number(value)
        row.append(Cell(f"{shown.text} ({entry.partition(' ')[0]})", shown.sources) if label else MISSING)
        row.append(paper(book, "chunked_compile", name, "ms"))
        table.rows.append(row)
    return table


def tile_table(book: Book) -> Table:
    """How flat the tile table is."""
    table = Table(
        "tile table",
        "ColPali, 1000 documents: neighbours of the chosen row, ms",
        ["tile (rows x tokens, warps, stages)", "ms", "over the chosen"],
    )
    held = page_rows.row(book, "tiles", "ColPali 1000")
    if held is None:
        return table
    ours = held.ms(MAIN)
    table.rows.append(["as chosen", number(ours), MISSING])
    methods = {name: held.ms(name) for name in held.raw("methods") if name != MAIN}
    for name, value in sorted(methods.items(), key=lambda pair: pair[1].number if pair[1] is not None else 0.0):
        table.rows.append([name.removeprefix("tiles "), number(value), times(value, ours)])
    unfit = [name for name in held.raw("skipped") if name.startswith("tiles")]
    if unfit:
        table.notes.append(f"{len(unfit)} more do not fit a multiprocessor.")
    return table


def roofline(book: Book) -> Table:
    """Intensity, floors, cost."""
    table = Table(
        "roofline and cost",
        "one query: operations a byte of documents, what bounds, how close, and GPU-seconds a million candidates",
        ["shape, documents", "operations a byte", "bound by", "ours, of floor", "ours, s a million", "chunked FP16, s a million",
         "paper A100: Flash, chunked"],
    )  # fmt: skip
    for name in SHAPES:
        for count in (1000, 10000):
            held = page_rows.shape(book, name, count)
            if held is None:
                continue
            operations, size = held.value("operations"), held.value("bytes")
            intensity = operations / size if operations is not None and size is not None else None
            row: list[Cell | str] = [f"{name} {count}", number(intensity), str(held.raw("bound_by"))]
            row.append(number(held.value("methods", MAIN, "of_floor"), 2))
            for method in (MAIN, "chunked FP16"):
                value = held.ms(method)
                row.append(number(value * (1e3 / count) if value is not None else None))
            row.append(paper(book, "cost", name, "flash", "chunked", form="{}, {}") if count == 10000 else MISSING)
            table.rows.append(row)
    table.notes.append("Dollars follow from any hourly price: seconds a million candidates / 3600 x price.")
    return table


def pairs(book: Book) -> Table:
    """Tiny independent pairs."""
    table = Table(
        "tiny pairs",
        "N independent pairs, us of GPU time",
        ["N x tokens", "ours", "compiled (fastest)", "naive FP16", "flash-maxsim", "late-interaction-kernels", "x compiled"],
    )
    for name in book.raw(FORWARD, "groups", "pairs", "rows") or {}:
        held = Held(book, FORWARD, ("groups", "pairs", "rows", name))
        compiled = held.fastest(("baseline",), "compiled")[1]
        shown = (held.ms(MAIN), compiled, held.ms(HALF), held.ms("flash-maxsim"), held.ms("late-interaction-kernels"))
        row: list[Cell | str] = [name.removeprefix("pairs ")]
        row += [number(value * 1e3 if value is not None else None) for value in shown]
        table.rows.append([*row, times(compiled, held.ms(MAIN))])
    return table


def cpu(book: Book) -> Table:
    """Without a GPU."""
    table = Table(
        "CPU",
        "1000 documents of 180 tokens, d = 128, 32 query tokens, ms (times faster than padded einsum + max)",
        ["method"],
    )
    cases: dict[str, dict[str, dict[str, float]]] = book.raw(CPU, "cases") or {}
    table.heads = ["method", *cases]
    for method in dict.fromkeys(name for held in cases.values() for name in held):
        row: list[Cell | str] = [method]
        for case in cases:
            value, faster = (book.value(CPU, "cases", case, method, key) for key in ("median_ms", "times_max"))
            if value is None or faster is None:
                row.append(MISSING)
                continue
            row.append(Cell(f"{plain(value.number)} ({faster.number:.2f})", value.sources + faster.sources))
        table.rows.append(row)
    threads = book.raw(CPU, "threads")
    table.notes.append(f"{threads} threads, torch {book.raw(CPU, 'torch')} (`make bench-cpu`).")
    skipped = book.raw(CPU, "skipped") or {}
    table.notes += [f"{name}: {why}." for name, why in skipped.items()]
    return table


def summaries(book: Book) -> list[Table]:
    """Over all tables."""
    return [fast_p(book), losses(book), refused(book), second(book)]


def studies(book: Book) -> list[Table]:
    """Beside the tables."""
    return [chunks(book), tile_table(book), roofline(book), pairs(book)]
