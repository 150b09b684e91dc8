"""What docs/benchmarks.md says over all tables beside page_losses.py: who was not timed, the second harness, side studies, CPU."""

from __future__ import annotations

from tables import rows
from tables.cells import MISSING, Book, Cell, Table, Value, number, paper, plain, times
from tables.losses import fast_p, losses, measured
from tables.paper import HALF, SCORERS, SHAPES, WIDE
from tables.rows import CPU, MAIN, PAPER, SECOND, forward_rows


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
        held = rows.shape(book, name, 1000)
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
    if table.rows:
        table.notes.append(
            "The second harness leaves no pause between calls: at ColPali every method takes longer in it, the peers most. Clocks were "
            "not recorded."
        )
    return table


# Side studies


def chunks(book: Book) -> Table:
    """Every chunk size."""
    sizes = (1, 4, 16, 64, 256, 1024, 4096, 16384)
    table = Table(
        "chunk grid",
        "FP16 eager by chunk size, ms, in the form with `max` (fwd_chunked takes the faster of `max` and `amax`)",
        ["shape, documents", "ours", *(str(size) for size in sizes), "compiled chunks (size; over ours)",
         "paper: compiled chunks (over Flash)"],
    )  # fmt: skip
    for name in book.raw(PAPER, "groups", "chunks", "rows") or {}:
        held = rows.row(book, "chunks", name)
        assert held is not None
        row: list[Cell | str] = [name, number(held.ms(MAIN))]
        row += [number(held.ms(f"chunks of {size}")) for size in sizes]
        shape, _, count = name.partition(" ")
        beside = rows.shape(book, shape, int(count))
        label, value = beside.fastest(("baseline",), "compiled chunks") if beside is not None else ("", None)
        entry = str(beside.raw("methods", label, "entry")) if beside is not None and label else ""
        shown, over = number(value), times(value, beside.ms(MAIN) if beside is not None else None)
        said = f"{shown.text} ({entry.partition(' ')[0]}; {over.text})"
        row.append(Cell(said, shown.sources + over.sources) if label else MISSING)
        row.append(paper(book, "chunked_compile", name, "ms", "times", form="{} ({}x)"))
        table.rows.append(row)
        why: dict[str, list[str]] = {}
        for size in sizes:
            if held.why(f"chunks of {size}"):
                why.setdefault(held.why(f"chunks of {size}"), []).append(str(size))
        table.notes += [f"{name}: no chunks of {', '.join(few)}: {reason}." for reason, few in why.items()]
    if table.rows:
        table.notes.append(
            "Compiled chunks (FP16, no graphs, the fastest size) are of the frontier's rows of 10,000 documents, over ours there."
        )
    return table


def tile_table(book: Book) -> Table:
    """How flat the tile table is."""
    table = Table(
        "tile table",
        "ColPali, 1000 documents: neighbours of the chosen row, ms",
        ["tile (rows x tokens, warps, stages)", "ms", "over the chosen"],
    )
    held = rows.row(book, "tiles", "ColPali 1000")
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
         "paper A100: Flash, chunked, s a million"],
    )  # fmt: skip
    for name in SHAPES:
        for count in (1000, 10000):
            held = rows.shape(book, name, count)
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
    claim = book.paper["cost"]["ColPali"]
    table.notes.append(
        f"The paper's {claim['flash']} and {claim['chunked']} us a candidate are as many seconds a million. Beside them it prints "
        f"{claim['flash_printed']} and {claim['chunked_printed']} 'GPU-seconds per million candidates': those are GPU-hours a billion, "
        "and its dollars follow from the wrong unit."
    )
    return table


def pairs(book: Book) -> Table:
    """Tiny independent pairs."""
    table = Table(
        "tiny pairs",
        "N independent pairs, us of GPU time",
        ["N x tokens", "ours", "compiled (fastest)", "naive FP16", "flash-maxsim", "late-interaction-kernels", "x compiled"],
    )
    for name, held in forward_rows(book, "pairs").items():
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
