"""Make docs/benchmarks.md from the committed results: all tables of the paper, its figures beside ours, and where ours come from.

    python benchmarks/page.py            write the page, the map of its cells, what other pages quote, and pictures (by matplotlib)
    python benchmarks/page.py --check    end with 1 where a page or the map differs from what the results give
    python benchmarks/page.py --table fwd [--files h200/paper.json=FILE]    print one table, of figures of one's own

The map, docs/results/benchmarks_cells.json, names file and key (a JSON pointer) of every figure on the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tables import ages, losses, marks, paper, paper_training, readme, script, summary
from tables import rows as page_rows
from tables.cells import FIGURES, Book, Table, cells, markdown, sources, text_of
from tables.columns import Maker, drawn

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "docs" / "results", ROOT / "docs" / "benchmarks.md"
MAP, PICTURES = RESULTS / "benchmarks_cells.json", ROOT / "docs" / "pictures"
SCALING = "scaling.png"
SECTIONS: dict[str, tuple[Maker, ...]] = {
    "Summary": (losses.fast_p, losses.losses, summary.refused, summary.unmeasured, summary.HARNESS),
    "Forward": paper.FORWARD,
    "Quantised, wide, memory traffic, precision, streaming": paper.OTHERS,
    "Training": paper_training.SOURCES,
    "The kernels' own script": script.SOURCES,
    "Side studies": summary.STUDIES,
    "What the READMEs quote": readme.SOURCES,
    "Without a GPU": (summary.cpu,),
}
INTRODUCTION = """# Benchmarks

The tables of the paper's evaluation, measured here with its protocol, the paper's figures in columns of their own; those whose
data is not here stand with their commands under [not measured](#not-measured-tables-that-are-evaluations-with-data-that-is-not-here).
This page is made of the raw results by `python benchmarks/page.py`; a test keeps it equal to them. **Older kernels**: the sources
behind a row (`benchmarks/measure/sources.py` says which count) are no longer those that were measured.
**Bold**: somebody else is faster (a time below ours in the same line, a ratio below 1).
`docs/results/benchmarks_cells.json` names the file and key of every figure. Compare ratios, not milliseconds: the paper's GPUs
are others, and files in `h100/` are of an H100, those in `h200/` of an H200. Those machines had Triton 3.6.0, not the 3.7.1 of
constraints.txt, by which CI interprets and compiles the kernels but nothing here was timed.

**Protocol.** Every method is compared with FP64 on the same inputs before it is timed: scores of all queries with the first and
last eight documents where there are more than 16 (every score must be finite), gradients of up to 16 queries and documents,
Chamfer distances over all pairs. One that is wrong, fails or runs out of memory has a reason instead of a figure (Chamfer:
whoever fails a check keeps its time, marked). Times are medians of CUDA events over 50 rounds (methods above 150 ms: 5); training,
Chamfer and the rows of forward.json took 20 (training and Chamfer methods above 60 ms: 3), streaming 3. Methods take turns whose
order changes every round, the L2 emptied before each call; those above 150 ms, or that keep the host for 3 ms, have turns of
their own. Casts and allocations of inputs are outside the timed region.

`torch.compile` in both max-autotune flavours over FP16 and FP32 stands in fwd, fwd_abs, nocg and varlen; both over FP16 in
op_abl, multiquery, int8, int8_B and the large candidate sets (ColPali 20,000 without graphs alone, for want of memory); FP16
without graphs in the wide rows, with the default mode beside it among tiny pairs. Other rows, training among them, have no
compiled rival. It is called 100 times before the clock starts (for at most 3 s), and autotunes in a process of its own. Chunked
FP16 eager takes the fastest of 64, 256 and 1024 documents, each with `max` and `amax` (training: of two block sizes); the paper's
eight sizes are in the chunk grid. Memory cells are a fresh process a method: one call for the peak, 7 for the time, no turns.
Floors and shares are of library products and plain reads that took turns with the methods. Random unit tokens, d = 128, FP16
where nothing else is said.

**Run it**: `python evaluate.py bench fwd` (`bench list` names the tables; needs a GPU and this repository), or the scripts in
`benchmarks/`. `python benchmarks/owed.py --list` says what is owed since the sources changed, and with `--seconds 1800 --out FOLDER`
runs it on a GPU, correctness first and then what is worth most a second; `--at-once 4` on four of them."""

REVISIONS = """A revision `abc+word` or `abc-dirty` is commit abc with changes that were not committed yet; digests beside it in
the file name the kernels' code: `sources` all of it, `families` what a row depends on (files without it are older than it is,
and so are their kernels). Rows of paper.json were measured at different revisions: each row's `environment` says which. Files
without a date did not keep one. At 004e48b four scripts ran at a time, each with a GPU and ten or more cores of its own: what
waits for the host takes longer there."""


def sections(book: Book) -> dict[str, list[Table]]:
    """All tables of the page."""
    held = {name: [drawn(source, book) for source in made] for name, made in SECTIONS.items()}
    for table in (table for tables in held.values() for table in tables):
        table.age = ages.said(book, table)
    return held


def named(held: dict[str, list[Table]]) -> dict[str, Table]:
    """Tables by name, in the page's order."""
    return {table.name: table for tables in held.values() for table in tables}


def provenance(book: Book, held: dict[str, list[Table]]) -> list[str]:
    """Which machine, software and commits the figures of the page are of."""
    shown = ["## Where the figures come from", ""]
    used = {source.partition("#")[0] for tables in held.values() for table in tables for source in sources(table)}
    for name in sorted(used):
        said = runs(book.file(name))
        shown.append(f"- [{name}](results/{name}): {said}" if said else f"- [{name}](results/{name})")
    return [*shown, "", REVISIONS, ""]


def runs(found: Any) -> str:
    """Machine, software, revisions and dates of a results file, of those runs alone that its rows name."""
    if not isinstance(found, dict):
        return ""
    held = ages.runs_of(found)
    about = held[0]
    said = [str(about["gpu"])] if "gpu" in about else [f"CPU, {about['threads']} threads"] if "threads" in about else []
    said += [f"{label} {about[key]}" for key, label in (("torch", "torch"), ("triton", "Triton")) if about.get(key)]
    for label, names in (("revision", ages.commits(held)), ("measured", ages.days(held))):
        said += [f"{label} {', '.join(names)}"] if names else []
    return ", ".join(part for part in said if part)


def places(book: Book) -> dict[str, str]:
    """How the page names each file given by the caller: by its path and its machine; empty for the committed results."""
    found = {}
    for name, path in book.given.items():
        here = page_rows.environments(book.file(name))
        found[name] = f"{path} ({here[0]['gpu']})" if here and here[0].get("gpu") else str(path)
    return found


def page(book: Book, held: dict[str, list[Table]]) -> str:
    """The text of the page."""
    shown = [INTRODUCTION, ""]
    for name, tables in held.items():
        shown += [f"## {name}", ""]
        for table in tables:
            shown += markdown(table)
            if table.name == "mem" and table.rows:
                shown += [f"![peak memory and time by number of documents](pictures/{SCALING})", ""]
    return "\n".join([*shown, *provenance(book, held)]).rstrip() + "\n"


def mapped(held: dict[str, list[Table]]) -> str:
    """The map of cells, as JSON."""
    return json.dumps(cells([table for tables in held.values() for table in tables]), indent=1, ensure_ascii=False) + "\n"


def as_json(table: Table, given: dict[str, str]) -> str:
    """A table for programs; `given`: where files of the caller's own lie."""
    rows = [[text_of(cell) for cell in row] for row in table.rows]
    held = {"table": table.name, "title": table.title, "heads": list(table.heads), "rows": rows, "notes": table.notes}
    held |= {"files": given} if given else {}
    held |= {"age": table.age} if table.age else {}
    return json.dumps(held | {"cells": cells([table]).get(table.name, {})}, indent=1, ensure_ascii=False)


def draw(book: Book, path: Path) -> bool:
    """Draw the corpus-scaling picture; returns whether there was anything to draw."""
    rows = book.raw(page_rows.PAPER, "groups", "memory", "rows")
    if not rows:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for name, row in rows.items():
        points = {
            int(cell.partition(" ")[2]): data for cell, data in row.get("cells", {}).items() if cell.startswith("ColPali ")
        }
        for axis, key, scale in ((left, "peak_bytes", 1e-9), (right, "median_ms", 1.0)):
            fits = {count: data[key] * scale for count, data in points.items() if key in data}
            (line,) = axis.plot(list(fits), list(fits.values()), marker="o", markersize=3, label=name)
            broke = [count for count, data in points.items() if "failed" in data]
            if broke and fits:
                axis.plot([broke[0]], [max(fits.values())], marker="x", color=line.get_color())
    for axis, title in ((left, "peak GB"), (right, "ms a call")):
        axis.set(xscale="log", yscale="log", xlabel="documents (ColPali, 1024 x 1024 tokens)", ylabel=title)
        axis.grid(alpha=0.3)
    left.legend(fontsize=7)
    right.set_title("x: the first size that did not run (out of memory, or a fault)", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return True


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where something differs")
    parser.add_argument("--table", default="", help="print one table and end")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of results (default: docs/results)")
    parser.add_argument(
        "--files", default="", help="with --table: read these files only, NAME=PATH by comma (h200/paper.json=FILE)"
    )
    parser.add_argument("--as-json", action="store_true", help="with --table: heads, rows and sources as JSON")
    parser.add_argument("--no-pictures", dest="pictures", action="store_false")
    options = parser.parse_args(arguments)
    given = {name: Path(path) for name, _, path in (part.partition("=") for part in options.files.split(",") if part)}
    book = Book(options.results, FIGURES, given)
    held = sections(book)
    if options.table:
        known = named(held)
        if options.table not in known:
            parser.error(f"--table: got {options.table!r}, need one of {', '.join(known)}")
        table, where = known[options.table], places(book)
        print(as_json(table, where) if options.as_json else "\n".join(markdown(table, where)))
        return
    made = {PAGE: page(book, held), MAP: mapped(held)}
    for path in marks.pages(ROOT):
        made[path] = marks.written(book, path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    if options.check:
        stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
        for path in stale:
            print(f"{path.relative_to(ROOT)}: not what the results give; run benchmarks/page.py", file=sys.stderr)
        raise SystemExit(bool(stale))
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} written")
    if options.pictures and draw(book, PICTURES / SCALING):
        print(f"{(PICTURES / SCALING).relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
