"""What `page.py` writes into READMEs and docs between marks, from raw results: tables, single figures, how old a file's figures are.

<!-- table: gpu --> ... <!-- end of table -->        a table with its age
<!-- lines: backward --> ... <!-- end of lines -->     a table that a script's `--show` prints too
<!-- figure: cold --> ... <!-- end of figure -->     one figure in a sentence
<!-- age: h200/masks.json --> ... <!-- end of age -->  at which commit a page's own table was measured, and whether by older kernels
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure.names import FLASH, LIK
from results.file import Figures
from tables import ages, quoted, readme, training
from tables.cells import Book, plain, table_lines
from tables.columns import Maker, drawn
from tables.markdown import verdict_table
from tables.rows import CPU, FORWARD, MAIN, forward_rows

MARKED = re.compile(r"(<!-- (table|lines|figure|age): (\S+) -->)(?:(?!<!--).)*(<!-- end of \2 -->)", re.DOTALL)
READMES: dict[str, tuple[str, ...]] = {"README.md": ("gpu", "fidelity"), "kernels/README.md": ("CPU", "steps", "streams")}
PLACES = {**READMES, **quoted.PLACES}  # which page quotes which tables
TABLES: dict[str, Maker] = {**readme.TABLES, **readme.QUALITY, **quoted.TABLES}
COLD, REHEARSED, EAGER = "cpu/cold_start.json", "h200/rehearsal.json", "naive FP16"
PROVED = "h200/proving.json"


def seconds(kind: str) -> Callable[[Book], str]:
    """A command's median, from process start to report."""
    return lambda book: f"{statistics.median(run['seconds'] for run in book.raw(COLD, kind)):.1f} s"


def rehearsed(book: Book) -> str:
    """The whole of a collection by its rehearsal's phases.

    Raises:
        ValueError: one of its two runs is not in the file, and its phases are missing from the sum.
    """
    lacks = [name for name in ("encoded", "scored") if not (book.file(REHEARSED) or {}).get(name)]
    if lacks:
        raise ValueError(f"{REHEARSED}: lacks the run {' and '.join(lacks)}, need both (benchmarks/rehearsal.py)")
    return f"{sum(row['full'] for row in book.raw(REHEARSED, 'rows')) / 60:.0f} minutes"


def host(book: Book) -> str:
    """Microseconds that a small call costs its caller, back to back: ours, the peers', the fastest naive form's."""
    methods = forward_rows(book, "host")["host textual 1K"].raw("methods")

    def least(part: str) -> str:
        return plain(
            min(held["call_median_us"] for name, held in methods.items() if name == part or name.startswith(f"{part},"))
        )

    return f"{plain(methods[MAIN]['call_median_us'])} us ({', '.join(f'{part} {least(part)}' for part in (FLASH, LIK, EAGER))})"


def worst(method: str) -> Callable[[Book], str]:
    """A method's largest error per query token on a CPU, as a share of the largest possible score, which is 1."""
    return lambda book: f"{100 * max(case[method]['max_error'] for case in book.raw(CPU, 'cases').values()):.1g}%"


FIGURES: dict[str, tuple[str, Callable[[Book], str]]] = {  # with their files, whose age stands in the same section
    "cold": (COLD, seconds("cold")),
    "warm": (COLD, seconds("warm")),
    "hotpotqa": (REHEARSED, rehearsed),
    "host": (FORWARD, host),
    "numkong-error": (CPU, worst("numkong 7.8.6")),
    "int8-error": (CPU, worst("ours INT8, token scale")),
    "proof-fp16": (PROVED, quoted.proof("fp16")),
    "proof-int8": (PROVED, quoted.proof("int8")),
}
STEPS, BACKWARD, CHAMFER = ("h200/training_steps.json", "h200/training_backward.json", "h200/chamfer.json")
LAYOUTS = "h200/training_layouts_alone.json"
LINES: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]]]] = {  # with their files, as FIGURES
    "steps": (STEPS, lambda found: training.step_summary(Figures(found))),
    "backward": (BACKWARD, lambda found: training.ablation_table(Figures(found))),
    "layouts": (LAYOUTS, lambda found: training.layouts(Figures(found), peers=True)),
    "own-layouts": (LAYOUTS, lambda found: training.layouts(Figures(found), peers=False)),
    "asked-of-steps": (STEPS, lambda found: verdict_table(training.verdicts(found))),
    "asked-of-backward": (BACKWARD, lambda found: verdict_table(training.verdicts(found))),
    "chamfer-forward": (CHAMFER, lambda found: training.chamfer_times(Figures(found), training=False)),
    "chamfer-training": (CHAMFER, lambda found: training.chamfer_times(Figures(found), training=True)),
    "asked-of-chamfer": (CHAMFER, lambda found: verdict_table(training.chamfer_verdicts(found))),
}


def written(book: Book, text: str, place: str) -> str:
    """A page with what stands between its marks written anew.

    Raises:
        ValueError: a mark names nothing that is known, or a README lacks one of its tables.
    """
    tables = [name for _, kind, name, _ in MARKED.findall(text) if kind == "table"]
    if sorted(tables) != sorted(PLACES.get(place, ())):
        raise ValueError(
            f"{place}: got marks of tables {tables}, need one of each: {', '.join(PLACES.get(place, ())) or 'none'}"
        )

    def filled(match: re.Match[str]) -> str:
        begin, kind, name, end = match.groups()
        if kind == "figure" and name not in FIGURES:
            raise ValueError(f"{place}: got a mark of the figure {name!r}, need one of {', '.join(FIGURES)}")
        if kind == "lines" and name not in LINES:
            raise ValueError(f"{place}: got a mark of the lines {name!r}, need one of {', '.join(LINES)}")
        if kind == "age" and book.file(name) is None:
            raise ValueError(f"{place}: got a mark of {name!r}, need a file below docs/results")
        made = {
            "table": lambda: _table(book, name),
            "lines": lambda: "\n".join(["", *LINES[name][1](book.file(LINES[name][0])), ""]),
            "figure": lambda: FIGURES[name][1](book),
            "age": lambda: ages.of_file(book, name),
        }
        return begin + made[kind]() + end

    return MARKED.sub(filled, text)


def _table(book: Book, name: str) -> str:
    """A table as Markdown, a line about its age below."""
    table = drawn(TABLES[name], book)
    age = ages.said(book, table)
    return "\n".join(["", *table_lines(table), *(["", age] if age else []), ""])


def pages(root: Path) -> list[Path]:
    """Pages that quote tables, and every page of docs with a mark of age."""
    docs = sorted((root / "docs").glob("*.md"))
    marked = (path for path in docs if "<!-- age: " in path.read_text(encoding="utf-8"))
    return list(dict.fromkeys((*(root / name for name in PLACES), *marked)))
