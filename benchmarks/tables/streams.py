"""The table of docs/scale.md: streams of larger corpora than a GPU holds, each with what was asked of it, its floor and its time."""

from __future__ import annotations

from collections.abc import Callable

from tables.cells import MISSING, Book, Cell, Table, Value, number, ratio, times

ONE, FOUR, TMPFS = (f"h200/streaming{name}.json" for name in ("", "_4", "_tmpfs"))
OURS = (ONE, "reference", "ours, pinned")
ASKED: dict[str, tuple[float, float | None]] = {  # by group: at least (or most) so much, and the aim
    "hotpotqa": (1.3, 1.1), "stored": (1.6, 1.2), "reference": (20.0, None), "nq": (8.0, 4.0), "colpali": (0.9, 0.97),
    "int8": (1.7, 1.9), "ranks 2": (1.8, 1.95), "ranks 4": (3.4, 3.8),
}  # fmt: skip
Place = tuple[str, str, str]  # file, group, row
Last = Callable[[Book, Place], Cell]


def held(book: Book, place: Place, key: str) -> Value | None:
    """A figure of a row."""
    file, group, row = place
    return book.value(file, "groups", group, "rows", row, key)


def said(found: Cell, words: str) -> Cell:
    """A number or a ratio, and what it counts."""
    return Cell(f"{found.text.removesuffix('x')} {words}", found.sources)


def asked(group: str, words: str) -> str:
    """What was asked of a group, and the aim."""
    limit, aim = ASKED[group]
    return f"{limit:g} {words}" + ("" if aim is None else f" ({aim:g})")


def of_floor(book: Book, place: Place) -> Cell:
    """How many times the floor the wall is."""
    return said(number(held(book, place, "ratio")), "x the floor")


def of_link(book: Book, place: Place) -> Cell:
    """Which share of the rate of pinned copies a stream reaches."""
    share = ratio(held(book, place, "floor_s"), held(book, place, "median_s"))
    return Cell(MISSING) if share is None else Cell(f"{share.number:.3f} of the rate", share.sources)


def slower_than_ours(book: Book, place: Place) -> Cell:
    """How many times our pinned stream's wall something takes; the widest difference of a score."""
    found = said(times(held(book, place, "whole_s"), held(book, OURS, "median_s")), "x ours")
    furthest = held(book, place, "max_difference")
    if furthest is None:
        return found
    return Cell(f"{found.text}; largest difference {furthest.number:.1e}", (*found.sources, *furthest.sources))


def over_half(book: Book, place: Place) -> Cell:
    """How many times faster codes stream than FP16 by as many queries."""
    queries = place[2].partition(",")[0]
    half = held(book, (ONE, "int8", f"{queries}, FP16"), "median_s")
    return said(times(half, held(book, place, "median_s")), "x FP16")


def over_one(book: Book, place: Place) -> Cell:
    """How many times faster several GPUs are than one."""
    return said(number(held(book, place, "times_faster")), "x one")


ROWS: tuple[tuple[str, str, Place, Last], ...] = (
    ("pinned host memory", asked("hotpotqa", "x the floor"), (ONE, "hotpotqa", "pinned"), of_floor),
    ("pageable host memory, 8 readers", "", (ONE, "pageable", "8 readers"), of_floor),
    ("warm page cache (HDF5), 8 readers, the default", asked("stored", "x the floor"), (ONE, "stored", "8 readers"), of_floor),
    *((f"warm page cache, {count} reader{'s' * (count > 1)}", "", (ONE, "stored", f"{count} readers"), of_floor)
      for count in (4, 2, 1)),
    ("tmpfs of another host, 8 readers", asked("stored", "x the floor"), (TMPFS, "stored", "8 readers"), of_floor),
    ("our FP32 reference, which is no rival", asked("reference", "x slower (the paper: 4.0)"), (ONE, "reference", "FP32 reference"),
     slower_than_ours),
    ("padded FP32 einsum", asked("reference", "x slower"), (ONE, "reference", "padded FP32 einsum"), slower_than_ours),
    ("NQ's volume, 116 GB: 2.68M documents of 169 tokens, a tenth kept and cycled", asked("nq", "s"),
     (ONE, "nq", "2680000 documents"), of_floor),
    ("one ColPali query, 750,000 pages, 197 GB: 65,536 kept and cycled", asked("colpali", "of the rate of pinned copies"),
     (ONE, "colpali", "750000 documents"), of_link),
    *((f"INT8, {queries} queries (bound by the {bound}), a scale a {scale}", limits,
       (ONE, "int8", f"{queries} queries, INT8, a scale a {scale}"), over_half)
      for queries, bound, limits in ((32, "link", asked("int8", "x FP16")), (500, "matrix units", ""))
      for scale in ("token", "document")),
    ("two H200s, 500 queries", asked("ranks 2", "x one"), (ONE, "ranks 2", "500 queries, 2 GPUs"), over_one),
    ("two H200s, 32 queries", asked("ranks 2", "x one"), (ONE, "ranks 2", "32 queries, 2 GPUs"), over_one),
    ("four H200s, 500 queries", asked("ranks 4", "x one"), (FOUR, "ranks 4", "500 queries, 4 GPUs"), over_one),
    ("four H200s, 32 queries", "", (FOUR, "ranks 4", "32 queries, 4 GPUs"), over_one),
)  # fmt: skip


def streamed(book: Book) -> Table:
    """Every row's floor and wall; a reference that scored a part stands with what the whole would take."""
    rows: list[list[Cell | str]] = []
    for label, limits, place, last in ROWS:
        whole = held(book, place, "whole_s") or held(book, place, "median_s")
        part = held(book, place, "documents") if held(book, place, "whole_s") else None
        named = label if part is None else f"{label}, by {part.number:,.0f} documents"
        rows.append([named, limits, number(held(book, place, "floor_s"), 3, " s"), number(whole, 3, " s"), last(book, place)])
    return Table("streamed", "streams of larger corpora", ["work", "required (target)", "floor", "measured", ""], rows)
