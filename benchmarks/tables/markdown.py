"""Markdown of the training and Chamfer benchmarks: what was asked, one table a row, and summaries with methods as lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from measure.clocks import BUSY
from results.file import Figures

HOST = 0.9  # GPU time below this share of the measured time is shown too: the rest waits for the host
CELL = (
    "Milliseconds; behind a stroke GPU time alone, where it is more than a tenth shorter (the host ahead of the GPU); in brackets "
    "peak GB of a call beyond inputs and gradients."
)
ROW_ERROR = {"error": "row error"}
KINDS = {"ours": 0, "peer": 1, "baseline": 2}  # the order of lines; a method that took part nowhere comes last
NO_NOTES: Mapping[str, str] = {}
KERNELS = (  # patterns of a profiler's names, first match; templates of torch and cub are long
    ("FillFunctor", "zero"),
    ("vectorized_elementwise_kernel<4, at::native$", "zero"),  # as older files cut the name
    ("DeviceScanInit", "cumulative sum (init)"),
    ("DeviceScan", "cumulative sum"),
)


class Lines:
    """Collects 'asked, aim, measured, met'."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def add(
        self, row: str, what: str, measured: float | None, asked: float | None, aim: float | None = None, *, most: bool = False
    ) -> None:
        """`measured` is to reach `asked` (`most`: to stay at or below it); None: ours was not measured, so not met."""

        def holds(limit: float | None) -> bool | None:
            if limit is None:
                return None
            return measured is not None and (measured <= limit if most else measured >= limit)

        line = {"row": row, "what": what, "asked": asked, "aim": aim, "measured": measured, "most": most}
        self.all.append({**line, "met": holds(asked), "aimed": holds(aim)})

    def faster(self, figures: Figures, row: str, asked: float, aim: float | None = None, kind: str = "peer") -> None:
        """Ours is to be faster than the fastest of a kind: with the host, and by GPU time alone where ours was measured so."""
        other = figures.fastest(row, (kind,))
        if other is None:
            return
        self.add(row, f"times faster than {other}, the fastest {kind}", figures.ratio(row, other), asked, aim)
        mine = figures.time(row, "ours", "busy_median_ms")
        if mine is not None:
            methods = figures.rows[row][1]["methods"]
            times = {name: alone(held) for name, held in methods.items() if held["kind"] == kind}
            known = [(time, name) for name, time in times.items() if time is not None]
            for theirs, name in sorted(known)[:1]:
                self.add(row, f"times faster than {name}, the fastest {kind}, GPU time alone", theirs / mine, asked, aim)


def verdict_table(lines: list[dict[str, Any]]) -> list[str]:
    """The lines as Markdown."""
    words = {None: "", True: "yes", False: "**no**"}
    rows = []
    for line in lines:
        sign = "<= " if line["most"] else ""
        asked, aim = (f"{sign}{line[key]:.4g}" if line[key] is not None else "" for key in ("asked", "aim"))
        measured = "not measured" if line["measured"] is None else f"{line['measured']:.3g}"
        rows.append([line["row"], line["what"], asked, aim, measured, words[line["met"]], words[line["aimed"]]])
    asked_lines = [line for line in lines if line["met"] is not None]
    shown = grid(["row", "what", "at least", "aim", "measured", "met", "aim met"], rows)
    return [*shown, "", f"{sum(line['met'] for line in asked_lines)} of {len(asked_lines)} lines met."]


# Cells


def alone(held: Mapping[str, Any]) -> float | None:
    """GPU time alone; of a call too long to be timed so its median, which hides the host's part."""
    time = held.get("median_ms")
    return held.get("busy_median_ms", time if time is not None and time > BUSY else None)


def gigabytes(size: float | None) -> str:
    """Three digits, or a dash."""
    return "-" if size is None else f"{size / 1e9:.3g}"


def milliseconds(time: float | None) -> str:
    """Three digits, or a dash."""
    return "-" if time is None else f"{time:.3g}"


def gap(held: Mapping[str, Any]) -> str:
    """1 - cosine; a file without it holds six digits of the cosine, which say less."""
    if held.get("cosine_gap") is not None:
        return f"{held['cosine_gap']:.1e}" if held["cosine_gap"] >= 1e-12 else "< 1e-12"
    if held.get("cosine") is None:
        return "-"
    return f"{1 - held['cosine']:.0e}" if held["cosine"] < 1 else "< 5e-07"


def cell(held: Mapping[str, Any]) -> str:
    """A method in one cell, as `CELL` says."""
    time, busy = held.get("median_ms"), held.get("busy_median_ms")
    shown = "" if time is None else milliseconds(time)
    if time is not None and busy is not None and busy < HOST * time:
        shown += f" / {milliseconds(busy)}"
    return f"{shown} ({gigabytes(held['peak_bytes'])})".strip() if held.get("peak_bytes") is not None else shown or "-"


def reason(why: str) -> str:
    """Why a method does not take part, in a word or two."""
    words = {"wrong": "wrong", "too slow": "too slow", "OutOfMemory": "out of memory", "not installed": "not installed"}
    return next(
        (shown for part, shown in words.items() if part in why), "failed" if "failed" in why else why.partition(" (")[0]
    )


def kernel_name(name: str) -> str:
    """A kernel's name as a reader knows it."""
    known = next((shown for pattern, shown in KERNELS if re.search(pattern, name)), None)
    return known or re.sub(r"^_?(.*?)(_kernel)?$", r"\1", name)[:60]


# Tables


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table without the columns that say nothing; a row of two cells runs over the whole width."""
    full = [row for row in rows if len(row) == len(heads)]
    keep = [place for place in range(len(heads)) if place < 2 or any(row[place] not in ("", "-") for row in full)]
    shown = ["| " + " | ".join(heads[place] for place in keep) + " |", "|" + "---|" * len(keep)]
    for row in rows:
        held = [row[place] for place in keep] if len(row) == len(heads) else [*row, *[""] * (len(keep) - len(row))]
        shown.append("| " + " | ".join(held) + " |")
    return [*shown, ""]


def times_and_peaks(
    figures: Figures,
    row: str,
    notes: Mapping[str, str] = NO_NOTES,
    note: str = "paper",
    errors: Mapping[str, str] = ROW_ERROR,
) -> list[str]:
    """One row of the benchmark as a table: every method's time, memory, errors (key in the file: heading), a note."""
    if row not in figures.rows:
        return []
    data = figures.rows[row][1]
    main = figures.time(row, data["main"])
    floor = "" if data["floor_ms"] is None else f" (forward floor {data['floor_ms']:.3g} ms)"
    clocks = ["ms", "GPU alone, ms", "x ours"] if any("median_ms" in held for held in data["methods"].values()) else []
    heads = ["method", *clocks, "peak GB", "peak GB with gradients", *errors.values(), "1 - cosine", note]
    rows: list[list[str]] = []
    for name, held in data["methods"].items():
        time = held.get("median_ms")
        cells = [milliseconds(time), milliseconds(held.get("busy_median_ms")), f"{time / main:.2f}" if time and main else "-"]
        found = ["-" if held.get(key) is None else f"{held[key]:.1e}" for key in errors]
        peaks = [gigabytes(held["peak_bytes"]), gigabytes(held["strict_bytes"])]
        entry = f" ({held['entry']})" if held["entry"] else ""
        rows.append([f"{name}{entry}", *cells[: len(clocks)], *peaks, *found, gap(held), notes.get(name, "")])
    for name, why in data["skipped"].items():
        rows.append([name, why + (f" ({note}: {notes[name]})" if name in notes else "")])
    return [f"### {row}{floor}", "", *grid(heads, rows)]


def summary(
    figures: Figures,
    columns: Mapping[str, str],
    notes: Mapping[tuple[str, str], str] | None = None,
    below: Sequence[tuple[str, Mapping[str, str]]] = (),
) -> list[str]:
    """Methods as lines, rows as columns (row: heading); (row, method) -> words behind a cell; more lines `below` by heading."""
    held = {row: head for row, head in columns.items() if row in figures.rows}
    if not held:
        return []
    data = {row: figures.rows[row][1] for row in held}
    kinds = {name: "" for row in held for part in ("methods", "skipped") for name in data[row][part]}
    kinds |= {name: method["kind"] for row in held for name, method in data[row]["methods"].items()}
    rows = []
    for name in sorted(kinds, key=lambda name: KINDS.get(kinds[name], len(KINDS))):
        cells = []
        for row in held:
            methods, skipped = data[row]["methods"], data[row]["skipped"]
            shown = cell(methods[name]) if name in methods else reason(skipped[name]) if name in skipped else ""
            cells.append(shown + (notes or {}).get((row, name), ""))
        rows.append([name, *cells])
    rows += [[name, *(cells.get(head, "") for head in held.values())] for name, cells in below]
    return grid(["method", *held.values()], rows)
