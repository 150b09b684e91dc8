"""The forward tables of docs/benchmarks.md, each with the paper's figures beside ours."""

from __future__ import annotations

from tables import rows as page_rows
from tables.cells import MISSING, Book, Cell, Table, Value, gigabytes, number, paper, percent, times
from tables.rows import MAIN, PAPER, point, point_value, tried

SHAPES = {
    "textual": (32, 300), "long-doc": (32, 1024), "medium": (128, 1024), "visual": (512, 1024), "ColPali": (1024, 1024)
}  # fmt: skip
WIDE, HALF = "naive FP32 accumulation", "naive FP16"
PLAIN, GRAPHS = "compiled FP16, max-autotune-no-cudagraphs", "compiled FP32, max-autotune"
CHUNKED = "chunked FP16, 1024 documents"
EAGER, PEERS = page_rows.EAGER, ("peer",)
SCORERS = ("PyLate", "colpali-engine")


def named(name: str, value: Value | None) -> Cell:
    """A time with who it belongs to."""
    cell = number(value)
    return Cell(f"{cell.text} ({name})", cell.sources) if name and value is not None else cell


def peak(book: Book, method: str, cell: str) -> Cell:
    """A peak in GB, or why there is none."""
    held = point(book, method, cell)
    found = point_value(book, method, cell, "peak_bytes")
    return gigabytes(found) if found is not None and not (held or {}).get("wrong") else Cell(tried(held) or MISSING)


def fwd(book: Book) -> Table:
    """Times faster at 1000 documents."""
    table = Table(
        "fwd",
        "one query, 1000 documents: times faster than",
        ["shape (Lq, Ld)", "naive FP32 acc.", "paper A100", "paper H100", "compiled FP32, graphs", "paper A100, compiled",
         "fastest eager", "fastest compiled", "flash-maxsim", "late-interaction-kernels"],
    )  # fmt: skip
    for name, (rows, tokens) in SHAPES.items():
        held = page_rows.shape(book, name, 1000)
        if held is None:
            continue
        ours = held.ms(MAIN)
        row: list[Cell | str] = [f"{name} ({rows}, {tokens})", times(held.ms(WIDE), ours)]
        row += [paper(book, "fwd", name, "a100"), paper(book, "fwd", name, "h100")]
        row += [times(held.ms(GRAPHS), ours), paper(book, "fwd", name, "compiled")]
        row.append(times(held.fastest(names=EAGER)[1], ours))
        row.append(times(held.fastest(("baseline",), "compiled")[1], ours))
        row += [times(held.ms(peer), ours) for peer in ("flash-maxsim", "late-interaction-kernels")]
        table.rows.append(row)
    table.notes.append(
        "'Fastest eager' is the best of naive FP16 (`max` and `amax`), naive FP32 accumulation and chunked FP16 (chunk size swept)."
    )
    return table


def fwd_abs(book: Book) -> Table:
    """Milliseconds and peaks at 1000 documents."""
    table = Table(
        "fwd_abs",
        "the same in ms, and peak GB of a process of its own, inputs included",
        ["shape", "ours", "IQR", "of floor", "naive FP32 acc.", "naive FP16", "chunked FP16", "compiled FP32, graphs",
         "compiled FP16, no graphs", "flash-maxsim", "late-interaction-kernels", "peak ours", "peak naive FP32 acc.",
         "paper A100: naive, MA, nocg, Flash; peaks"],
    )  # fmt: skip
    for name in SHAPES:
        held = page_rows.shape(book, name, 1000)
        if held is None:
            continue
        row: list[Cell | str] = [name, number(held.ms(MAIN)), number(held.value("methods", MAIN, "iqr_ms"), 2)]
        row.append(number(held.value("methods", MAIN, "of_floor"), 2))
        shown = (WIDE, HALF, "chunked FP16", GRAPHS, PLAIN, "flash-maxsim", "late-interaction-kernels")
        row += [number(held.ms(method)) for method in shown]
        row += [peak(book, method, f"{name} 1000") for method in (MAIN, WIDE)]
        keys = ("naive", "graphs", "plain", "flash", "naive_peak", "flash_peak")
        row.append(paper(book, "fwd_abs", name, *keys, form="{}, {}, {}, {}; {}, {}"))
        table.rows.append(row)
    return table


def nocg(book: Book) -> Table:
    """Against the strongest compiled form of each cell."""
    table = Table(
        "nocg",
        "every compile flavour at 1000 documents, ms; times faster than the strongest",
        [
            "shape",
            "ours",
            "FP16, no graphs",
            "FP16, graphs",
            "FP32, no graphs",
            "FP32, graphs",
            "strongest",
            "paper A100: no graphs",
        ],
    )
    modes = ("max-autotune-no-cudagraphs", "max-autotune")
    for name in SHAPES:
        held = page_rows.shape(book, name, 1000)
        if held is None:
            continue
        row: list[Cell | str] = [name, number(held.ms(MAIN))]
        row += [number(held.ms(f"compiled {precision}, {mode}")) for precision in ("FP16", "FP32") for mode in modes]
        row.append(times(held.compiled(), held.ms(MAIN)))
        row.append(paper(book, "nocg", name, "times", form="{}x"))
        table.rows.append(row)
    return table


def scorers(book: Book) -> Table:
    """The scorers of the libraries that people use."""
    table = Table(
        "scorers",
        "scorers of PyLate and colpali-engine at 1000 documents, ms",
        ["shape", "ours", *SCORERS, *(f"times faster than {name}" for name in SCORERS)],
    )
    for name in SHAPES:
        held = page_rows.shape(book, name, 1000)
        if held is None or not any(held.ms(one) for one in SCORERS):
            continue
        ours, theirs = held.ms(MAIN), [held.ms(one) for one in SCORERS]
        table.rows.append([name, number(ours), *(number(one) for one in theirs), *(times(one, ours) for one in theirs)])
        apart = ", ".join(one for one in SCORERS if held.raw("methods", one, "apart"))
        if apart and not table.notes:
            table.notes.append(
                f"Rounds of its own, because it keeps the host for milliseconds and would delay the others: {apart}."
            )
    return table


def fwd_chunked(book: Book) -> Table:
    """The frontier."""
    table = Table(
        "fwd_chunked",
        "large candidate sets: times faster than chunked FP16 (best chunk), and peak GB",
        ["shape, documents", "times", "paper A100", "ours ms", "chunked ms (chunk)", "peak ours", "peak chunked", "peak whole FP16",
         "paper: ours, chunked, whole"],
    )  # fmt: skip
    for cell, held in page_rows.shapes_of(book, book.paper["fwd_chunked"]):
        entry = str(held.raw("methods", "chunked FP16", "entry") or "").partition(" ")[0]
        row: list[Cell | str] = [cell, times(held.ms("chunked FP16"), held.ms(MAIN)), paper(book, "fwd_chunked", cell, "times")]
        row += [number(held.ms(MAIN)), named(entry, held.ms("chunked FP16"))]
        row += [peak(book, method, cell) for method in (MAIN, CHUNKED, HALF)]
        row.append(paper(book, "fwd_chunked", cell, "flash", "chunked", "whole", form="{}, {}, {}"))
        table.rows.append(row)
    return table


def chunked_sweep(book: Book) -> Table:
    """Whole, chunked and fused FP16 at every cell."""
    table = Table(
        "chunked_sweep",
        "FP16 eager whole and in chunks, ms",
        ["shape, documents", "ours", "naive FP16", "naive FP16, amax", "chunked (best)", "times faster than chunked",
         "fastest compiled", "x compiled", "fastest peer", "paper A100: whole, chunked, Flash, times"],
    )  # fmt: skip
    for cell, held in page_rows.shapes_of(book, book.paper["chunked_sweep"]):
        row: list[Cell | str] = [cell, *(number(held.ms(name)) for name in (MAIN, HALF, "naive FP16, amax", "chunked FP16"))]
        row += [times(held.ms("chunked FP16"), held.ms(MAIN)), number(held.compiled()), times(held.compiled(), held.ms(MAIN))]
        row.append(named(*held.fastest(PEERS)))
        row.append(paper(book, "chunked_sweep", cell, "whole", "chunked", "flash", "times", form="{}, {}, {}, {}x"))
        table.rows.append(row)
    return table


def twoaxis(book: Book) -> Table:
    """Time and memory, which are two things."""
    table = Table(
        "twoaxis",
        "ColPali, one call, ms (peak GB); the paper's GPU has 40 GB",
        ["documents", "ours", "naive FP16", "us a candidate, ours", "us a candidate, naive", "paper A100-40GB: Flash, naive"],
    )
    for cell in book.paper["twoaxis"]:
        count = cell.partition(" ")[2]
        if point(book, MAIN, cell) is None:
            continue
        row: list[Cell | str] = [count]
        each: list[Cell | str] = []
        for method in (MAIN, HALF):
            time = point_value(book, method, cell, "median_ms")
            size = peak(book, method, cell)
            shown = number(time)
            row.append(Cell(f"{shown.text} ({size.text})", shown.sources + size.sources) if time is not None else size)
            each.append(number(time * (1e3 / int(count)) if time is not None else None))
        table.rows.append([*row, *each, paper(book, "twoaxis", cell, "flash", "naive", form="{}, {}")])
    return table


def mem(book: Book) -> Table:
    """Peaks by number of documents."""
    table = Table(
        "mem",
        "ColPali corpus scaling: peak GB of a process of its own, inputs included",
        ["documents", "ours", "documents alone", "naive FP16", "naive FP32 acc.", CHUNKED, "flash-maxsim", "late-interaction-kernels",
         "paper: naive FP16 (40 GB), FP32 (80 GB), Flash"],
    )  # fmt: skip
    cells = book.raw(PAPER, "groups", "memory", "rows", MAIN, "cells") or {}
    for cell in cells:
        if not cell.startswith("ColPali "):
            continue
        row: list[Cell | str] = [cell.partition(" ")[2], peak(book, MAIN, cell)]
        row.append(gigabytes(point_value(book, MAIN, cell, "inputs_bytes")))
        row += [peak(book, method, cell) for method in (HALF, WIDE, CHUNKED, "flash-maxsim", "late-interaction-kernels")]
        row.append(paper(book, "mem", cell, "half", "wide", "flash", form="{}, {}, {}"))
        table.rows.append(row)
    for method, held in (book.raw(PAPER, "groups", "memory", "rows") or {}).items():
        for cell, found in held.get("cells", {}).items():
            if "lost" in found:
                table.notes.append(f"{method} at {cell}: {found['lost'][:76]}; larger cells were not tried.")
    table.notes.append(
        "'Asked for' is the allocation that failed: S, or, where not even those fit, the documents (for FP32 accumulation their FP32 "
        "copy)."
    )
    return table


def compiled_memory(book: Book) -> Table:
    """What compiled methods hold: peaks of the allocator, and what it has reserved."""
    methods = (GRAPHS, PLAIN)
    table = Table(
        "compiled_memory",
        "compiled naive: peak GB of a process of its own, inputs included, and reserved GB, since graph pools are not in the peak",
        ["shape, documents", *(f"{kind} of {name}" for name in methods for kind in ("peak", "reserved")), "peak of ours",
         "paper, 80 GB: FP32 graphs, FP16 no graphs"],
    )  # fmt: skip
    rows = book.raw(PAPER, "groups", "memory_compiled", "rows") or {}
    for cell in dict.fromkeys(cell for name in methods for cell in rows.get(name, {}).get("cells", {})):
        row: list[Cell | str] = [cell]
        for name in methods:
            row.append(peak(book, name, cell))
            row.append(gigabytes(point_value(book, name, cell, "reserved_bytes")))
        row += [peak(book, MAIN, cell), paper(book, "compiled_memory", cell, "graphs", "plain", form="{}, {}")]
        table.rows.append(row)
    return table


def op_abl(book: Book) -> Table:
    """Query tiles of their own programs, or one program a pair."""
    table = Table(
        "op_abl",
        "operator design, ms: naive FP32 accumulation, a program a (query, document) pair, query tiles of programs of their own",
        ["shape, documents", "naive", "a program a pair", "query tiles (ours)", "naive over pair", "naive over ours", "pair over ours",
         "fastest compiled", "x compiled", "paper A100: naive, fused, +chunk; times"],
    )  # fmt: skip
    for cell, held in page_rows.rows_of(book, "op_abl"):
        naive, pair, ours = (held.ms(name) for name in (WIDE, "ours, a program a pair", MAIN))
        row: list[Cell | str] = [cell, number(naive), number(pair), number(ours)]
        row += [
            times(naive, pair),
            times(naive, ours),
            times(pair, ours),
            number(held.compiled()),
            times(held.compiled(), ours),
        ]
        keys = ("naive", "fused", "chunk", "fused_times", "chunk_times", "delta")
        row.append(paper(book, "op_abl", cell, *keys, form="{}, {}, {}; {}, {}, {}"))
        table.rows.append(row)
    table.notes.append(
        "textual: 180 document tokens. Up to 64 query tokens 'ours' is the streaming kernel, which has no query tiles."
    )
    return table


def multiquery(book: Book) -> Table:
    """Several queries at once."""
    table = Table(
        "multiquery",
        "several queries in one call, ms; textbook naive: true FP32, its casts inside the call",
        ["shape, documents, queries", "ours", "queries/s", "textbook", "x textbook", "best eager", "x best eager", "fastest compiled",
         "x compiled", "flash-maxsim", "late-interaction-kernels", "paper A100: Flash, QPS, naive, times"],
    )  # fmt: skip
    for cell, held in page_rows.rows_of(book, "multiquery"):
        ours, count = held.ms(MAIN), held.value("shape", "queries")
        text = held.ms("textbook FP32, cast inside")
        name, eager = held.fastest(names=EAGER)
        rate = count / ours * 1e3 if count is not None and ours is not None else None
        row: list[Cell | str] = [cell, number(ours), number(rate), number(text), times(text, ours), named(name, eager)]
        row += [times(eager, ours), number(held.compiled()), times(held.compiled(), ours)]
        row += [number(held.ms(peer)) for peer in ("flash-maxsim", "late-interaction-kernels")]
        row.append(paper(book, "multiquery", cell, "flash", "qps", "naive", "times", form="{}, {}, {}, {}x"))
        table.rows.append(row)
    return table


def varlen(book: Book) -> Table:
    """Packed against padded."""
    table = Table(
        "varlen",
        "1000 documents of up to 512 tokens, one query of 32, ms",
        ["lengths", "fill", "mean tokens", "ours, packed", "naive FP32 acc., padded", "x naive", "naive FP16, padded",
         "fastest compiled, padded", "x compiled", "flash-maxsim, packed", "late-interaction-kernels, varlen",
         "paper A100: fill, naive, Flash, times"],
    )  # fmt: skip
    for cell, held in page_rows.rows_of(book, "varlen"):
        ours, compiled = held.ms(MAIN), held.compiled()
        row: list[Cell | str] = [cell, percent(held.value("shape", "fill")), number(held.value("shape", "mean_tokens"))]
        row += [number(ours), number(held.ms(WIDE)), times(held.ms(WIDE), ours), number(held.ms(HALF)), number(compiled)]
        row += [times(compiled, ours), *(number(held.ms(peer)) for peer in ("flash-maxsim", "late-interaction-kernels"))]
        row.append(paper(book, "varlen", cell, "fill", "naive", "flash", "times", form="{}, {}, {}, {}x"))
        table.rows.append(row)
    return table


def tables(book: Book) -> list[Table]:
    """In the paper's order."""
    makers = (
        fwd,
        fwd_abs,
        nocg,
        scorers,
        fwd_chunked,
        chunked_sweep,
        twoaxis,
        mem,
        compiled_memory,
        op_abl,
        multiquery,
        varlen,
    )
    return [make(book) for make in makers]
