"""Tables of docs/benchmarks.md from forward.py alone: every row with its floor, codes over FP16, dequantising first, host clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from measure.names import AFFINE, FLASH, GRANULARITIES, LIK, quantised_name
from tables.cells import MISSING, Book, Cell, number, times
from tables.columns import COMPILED, Fastest, Getter, Line, Lines, Source, each, faster_than, joined, ms, named, value
from tables.rows import EAGER, MAIN, Held, forward_rows, wide

HALF, OWN_HALF = "naive FP16", "ours FP16"


def plain_rows(book: Book) -> list[tuple[str, str, Held]]:
    """Every float row of forward.py."""
    return [(name, name, held) for group in ("dense", "many", "ragged") for name, held in forward_rows(book, group).items()]


def widths(book: Book) -> list[tuple[str, str, Held]]:
    """The widths that the paper's tables lack."""
    return [(f"wide, d = {dim}", "", held) for dim in (96, 1000) if (held := wide(book, dim)) is not None]


def coded(book: Book) -> Iterator[tuple[str, str, Held]]:
    """Rows of INT8 and of FP8 beside our own FP16."""
    for kind in ("INT8", "FP8"):
        for name, held in forward_rows(book, kind.lower()).items():
            if held.ms(OWN_HALF) is not None:
                yield name, kind, held


def scaled(granularity: str) -> Getter:
    """Our time of the row's kind of codes, and how many times faster than FP16 that is."""

    def get(line: Line) -> Cell:
        time = line.held.ms(quantised_name(line.cell, granularity))
        found = times(line.held.ms(OWN_HALF), time)
        return Cell(f"{number(time).text} ({found.text})", found.sources) if time is not None else Cell(MISSING)

    return get


def coded_peer(line: Line) -> Cell | str:
    """The peer that has such codes."""
    name, time = line.held.fastest(("peer",), line.cell)
    return named(name, time) if time is not None else "none"


def of_script(group: str, label: Callable[[str], str], part: str = "") -> Lines:
    """Rows of a group whose names hold `part`."""
    return lambda book: ((label(name), name, held) for name, held in forward_rows(book, group).items() if part in name)


def host_clocks(name: str, fastest: bool = False) -> Getter:
    """The two clocks of a method; `fastest`: of the fastest method, back to back, whose name holds `name`."""

    def get(line: Line) -> Cell:
        chosen = name
        if fastest:
            methods = line.held.raw("methods") or {}
            found = {one: data["call_median_us"] for one, data in methods.items() if name in one and "call_median_us" in data}
            if not found:
                return Cell(MISSING)
            chosen = min(found, key=found.__getitem__)
        return joined("{} / {}", *(number(line.held.value("methods", chosen, f"{key}_median_us")) for key in ("call", "idle")))

    return get


SOURCES = (
    Source("kernels", "FP16 rows of forward.py, ms", "row", lambda book: [*plain_rows(book), *widths(book)], {
        "floor": value("floor_ms"), "ours": ms(MAIN), "of floor": value("methods", MAIN, "of_floor", digits=2), **each(ms, FLASH, LIK),
        "naive FP16 (max / amax)": lambda line: joined("{} / {}", *(number(line.held.ms(one)) for one in EAGER[:2])),
        "naive FP32 acc.": ms(EAGER[2]), "chunked FP16": ms(EAGER[3]), "fastest compiled": ms(COMPILED),
        "times faster than the fastest rival": faster_than(Fastest(("baseline", "peer"))),
    }, competing=("ours", FLASH, LIK, "naive FP32 acc.", "chunked FP16", "fastest compiled")),
    Source("codes", "INT8 and FP8 over our own FP16 on the same documents, ms", "row", coded, {
        "FP16": ms(OWN_HALF), **{f"{kind} scale": scaled(kind) for kind in (*GRANULARITIES, AFFINE)}, "peer": coded_peer,
    }),
    Source("dequantise", "one ColPali query, INT8 documents: scored as they are, or dequantised first, ms", "documents",
           of_script("int8", lambda name: name.rpartition(", ")[2], "INT8 or dequantise"), {
        **{f"ours, {granularity} scale": ms(quantised_name("INT8", granularity)) for granularity in GRANULARITIES},
        **{way: ms(f"dequantise {way}") for way in ("to FP32, naive", "to FP16, naive", "to FP16, amax", "to FP16, chunked")},
    }),
    Source("host", "host clocks: us a call, back to back / from an idle GPU", "call",
           of_script("host", lambda name: name.removeprefix("host ")), {
        **each(host_clocks, MAIN, "ours, CUDA graph", FLASH, LIK), "fastest naive FP16": host_clocks(HALF, fastest=True),
        "fastest compiled": host_clocks("compiled", fastest=True),
    }, competing=(MAIN, FLASH, LIK, "fastest naive FP16", "fastest compiled")),
)  # fmt: skip
