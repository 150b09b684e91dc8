"""The tables that the README quotes: each stands on docs/benchmarks.md too, and `page.py` writes both from the same raw figures."""

from __future__ import annotations

import re
from collections.abc import Callable

from tables import rows as page_rows
from tables import summary
from tables.cells import MISSING, Book, Cell, Table, number, table_lines, times
from tables.rows import MAIN, Held
from tables.training_page import STEPS, first, with_peak

FLASH, LIK, HALF = "flash-maxsim", "late-interaction-kernels", "naive FP16"
STREAMS = "h200/streaming.json"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def _fewest(cells: list[Cell | str]) -> list[Cell | str]:
    """The least figure in bold where it is not the first one, which is ours."""
    figures = [float(cell.text.split()[0]) if isinstance(cell, Cell) and cell.sources else None for cell in cells]
    known = [figure for figure in figures if figure is not None]
    least = min(known) if known else None
    shown = list(cells)
    if figures[0] is not None and least is not None and least < figures[0]:
        place = figures.index(least)
        cell = cells[place]
        assert isinstance(cell, Cell)
        value, _, rest = cell.text.partition(" ")
        shown[place] = Cell(f"**{value}**" + (f" {rest}" if rest else ""), cell.sources)
    return shown


def gpu(book: Book) -> Table:
    """One line a kind of work."""
    table = Table(
        "gpu",
        "one H200, FP16, d = 128, ms",
        ["work", "ours", "flash-maxsim 0.3.0", "late-interaction-kernels 0.4.5", "naive FP16", "best `torch.compile`",
         "ours, of the floor"],
    )  # fmt: skip
    rows: list[tuple[str, Held | None, str, str]] = [
        ("1 query of 32 tokens, 1000 documents of 300", page_rows.shape(book, "textual", 1000), MAIN, FLASH),
        ("the same, 1000 ragged documents (HotpotQA's lengths)", page_rows.row(book, "varlen", "HotpotQA-like"), MAIN, FLASH),
        ("1 ColPali query (1024 tokens), 10,000 pages of 1024", page_rows.shape(book, "ColPali", 10000), MAIN, FLASH),
        (
            "the same, INT8, a scale a document",
            page_rows.row(book, "int8_B", "ColPali 10000"),
            "ours INT8, document scale",
            f"{FLASH}, INT8",
        ),
        (
            "256 queries of 32, 8192 documents of 128",
            page_rows.forward_rows(book, "many").get("256 queries x 8192 x 128"),
            MAIN,
            FLASH,
        ),
        (
            "the same, ragged documents of 16 to 240",
            page_rows.forward_rows(book, "ragged").get("ragged, 256 queries"),
            MAIN,
            FLASH,
        ),
        ("d = 1024: 1024 tokens, 128 documents of 1024", page_rows.wide(book, 1024), MAIN, FLASH),
        ("d = 4096, the same", page_rows.wide(book, 4096), MAIN, FLASH),
    ]
    for label, held, ours, flash in rows:
        if held is None or held.ms(ours) is None:
            continue
        half = held.ms(HALF) if ours == MAIN else None
        cells: list[Cell | str] = [number(held.ms(ours)), number(held.ms(flash)), number(held.ms(LIK)), number(half)]
        cells.append(number(held.compiled() if ours == MAIN else None))  # of INT8 rows: FP16, of documents never quantised
        # torch's INT8 product is slower than ours: no floor.
        floor = number(held.value("methods", ours, "of_floor"), 2) if ours == MAIN else MISSING
        table.rows.append([label, *_fewest(cells), floor])
    return table


def _step(held: Held, kind: str) -> Cell:
    """Of a peer's paths the fastest, with its peak memory."""
    name, value = held.fastest(("peer",), kind)
    return Cell(MISSING) if value is None else with_peak(held, name)


def steps(book: Book) -> Table:
    """Training."""
    table = Table(
        "steps",
        "training steps: forward and backward of in-batch negatives, ms (peak GB beyond inputs and gradients)",
        ["batch", "ours", "flash-maxsim, best path", "late-interaction-kernels, best path", "naive FP16", "checkpointed FP16"],
    )
    shown = {
        "B = 64, 1024 x 1024": "ColPali B=64",
        "B = 128, 1024 x 1024": "ColPali B=128",
        "B = 1024, 32 x 180": "ColBERT B=1024",
        "B = 128, 32 x 180 (bound by the host)": "ColBERT B=128",
    }
    for label, name in shown.items():
        held = first(book, STEPS, "steps", f"step {name}")
        if held is None:
            continue
        row: list[Cell | str] = [with_peak(held, MAIN), _step(held, FLASH), _step(held, LIK)]
        row += [with_peak(held, one) for one in (HALF, "checkpointed FP16")]
        table.rows.append([label, *_fewest(row)])
    held = first(book, STEPS, "steps", "step ColBERT B=128")
    if held is not None:
        busy: list[Cell | str] = [number(held.value("methods", MAIN, "busy_median_ms"))]
        for peer in (FLASH, LIK):
            names = [name for name, data in (held.raw("methods") or {}).items() if peer in name and "busy_median_ms" in data]
            values = [value for name in names if (value := held.value("methods", name, "busy_median_ms")) is not None]
            busy.append(number(min(values, key=lambda value: value.number, default=None)))
        busy += [number(held.value("methods", one, "busy_median_ms")) for one in (HALF, "checkpointed FP16")]
        table.rows.append(["the same, GPU time alone (as behind an encoder)", *_fewest(busy)])
    return table


def streams(book: Book) -> Table:
    """Out of core."""
    table = Table(
        "streams",
        "500 queries of 32 tokens against 500,000 ragged documents (15.4 GB) that do not lie on the GPU, exact top-100",
        ["documents lie in", "seconds", "times the floor (copying or in-memory scoring, the longer)"],
    )
    rows = {
        "pinned host memory": ("hotpotqa", "pinned"),
        "warm page cache (HDF5)": ("stored", "8 readers"),
        "the same, a corpus of NQ's size (116 GB)": ("nq", "2680000 documents"),
    }
    for label, (group, name) in rows.items():
        held = Held(book, STREAMS, ("groups", group, "rows", name))
        if held.value("median_s") is not None:
            table.rows.append([label, number(held.value("median_s")), number(held.value("ratio"))])
    held = Held(book, "h200/streaming_ooc.json", ("groups", "colpali", "rows", "750000 documents"))
    if held.value("median_s") is not None:
        row: list[Cell | str] = ["one ColPali query, 750,000 pages (197 GB)", number(held.value("median_s"))]
        table.rows.append([*row, number(held.value("ratio"))])
    for count, file in ((2, STREAMS), (4, "h200/streaming_4.json")):
        held = Held(book, file, ("groups", f"ranks {count}", "rows", f"500 queries, {count} GPUs"))
        alone = Held(book, file, ("groups", f"ranks {count}", "rows", "500 queries, one GPU"))
        if held.value("median_s") is not None:
            faster = times(alone.value("median_s"), held.value("median_s"))
            shown = Cell(faster.text.removesuffix("x") + " times one GPU", faster.sources)
            table.rows.append([f"pinned, {count} H200s", number(held.value("median_s")), shown])
    return table


TABLES: dict[str, Callable[[Book], Table]] = {"gpu": gpu, "steps": steps, "streams": streams, "CPU": summary.cpu}


def tables(book: Book) -> list[Table]:
    """Those that stand on the page for the README's sake."""
    return [make(book) for name, make in TABLES.items() if name != "CPU"]


def readme(book: Book, text: str) -> str:
    """The README with its tables written anew between their marks.

    Raises:
        ValueError: a mark names no table, or a table has no mark.
    """
    found = [name for _, name, _ in MARKED.findall(text)]
    if sorted(found) != sorted(TABLES):
        raise ValueError(f"README.md: got marks of {found}, need one of each: {', '.join(TABLES)}")

    def written(match: re.Match[str]) -> str:
        return match[1] + "\n".join(table_lines(TABLES[match[2]](book))) + "\n" + match[3]

    return MARKED.sub(written, text)
