"""What `page.py` writes into READMEs and docs between marks, from raw results: tables, single figures, how old a file's figures are.

<!-- table: gpu --> ... <!-- end of table -->        a table with its age
<!-- lines: backward --> ... <!-- end of lines -->     a table that a script's `--show` prints too, with its age
<!-- figure: cold --> ... <!-- end of figure -->     one figure in a sentence
<!-- age: h200/masks.json --> ... <!-- end of age -->  at which commit a page's own table was measured, and whether by older kernels;
                                                       of one group of a file `h200/forward.json#/groups/host`
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
from tables.cells import Book, keys_of, plain, table_lines
from tables.columns import Maker, drawn
from tables.markdown import verdict_table
from tables.rows import CPU, FORWARD, MAIN

MARKED = re.compile(r"(<!-- (table|lines|figure|age): (\S+) -->)(?:(?!<!--).)*(<!-- end of \2 -->)", re.DOTALL)
READMES: dict[str, tuple[str, ...]] = {"README.md": ("gpu", "fidelity"), "kernels/README.md": ("CPU", "steps", "streams")}
PLACES = {**READMES, **quoted.PLACES}  # which page quotes which tables
TABLES: dict[str, Maker] = {**readme.TABLES, **readme.QUALITY, **quoted.TABLES}
COLD, REHEARSED, EAGER = "cpu/cold_start.json", "h200/rehearsal.json", "naive FP16"
COLD_SLOW = "cpu/cold_start_slow.json"  # of a host with AVX2 alone
PROVED, HOST, PARITY = "h200/proving.json", f"{FORWARD}#/groups/host", "h200/parity.json"
TESTED, SANITIZED, SOAKED = (f"h200/{name}.json" for name in ("tests", "sanitizers", "soak"))
SHOWN = "cpu/examples.json"
ASKED = {"cold": 12, "warm": 6}  # seconds of a start with an empty cache, and with a filled one


def median(book: Book, file: str, kind: str) -> float:
    """A command's seconds, from process start to report."""
    return float(statistics.median(run["seconds"] for run in book.raw(file, kind)))


def seconds(kind: str) -> Callable[[Book], str]:
    """A command's median in words."""
    return lambda book: f"{median(book, COLD, kind):.1f} s"


def verdict(book: Book, file: str) -> str:
    """Whether a host's starts took less than was asked."""
    missed = [kind for kind, most in ASKED.items() if median(book, file, kind) >= most]
    return f"{' and '.join(missed)} missed" if missed else "both held"


def started(file: str) -> Callable[[Book], str]:
    """A host's medians with an empty cache and with a filled one, and whether they hold what is asked."""
    return lambda book: f"{' and '.join(f'{median(book, file, kind):.1f}' for kind in ASKED)} s, {verdict(book, file)}"


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
    methods = book.raw(FORWARD, "groups", "host", "rows", "host textual 1K", "methods")

    def least(part: str) -> str:
        return plain(
            min(held["call_median_us"] for name, held in methods.items() if name == part or name.startswith(f"{part},"))
        )

    return f"{plain(methods[MAIN]['call_median_us'])} us ({', '.join(f'{part} {least(part)}' for part in (FLASH, LIK, EAGER))})"


def worst(method: str) -> Callable[[Book], str]:
    """A method's largest error per query token on a CPU, as a share of the largest possible score, which is 1."""
    return lambda book: f"{100 * max(case[method]['max_error'] for case in book.raw(CPU, 'cases').values()):.1g}%"


def parity(book: Book) -> str:
    """What 500 steps of ours and of naive training differ by, the paper's figures beside it."""
    drift, paper = book.raw(PARITY, "drift", f"{MAIN} - {EAGER}"), book.raw(PARITY, "paper")
    ours, theirs = (book.raw(PARITY, "runs", name) for name in (MAIN, EAGER))
    times = " against ".join(f"{one['ms_per_step']:.3g} ms and {one['peak_bytes'] / 1e9:.3g} GB" for one in (ours, theirs))
    return (
        f"The loss drifts by {drift['max']:.1e} at most (the paper: {paper['max']:.1e}) and by {drift['mean']:.1e} in the mean "
        f"({paper['mean']:.1e}). A step takes {times}: {theirs['peak_bytes'] / ours['peak_bytes']:.0f} times less memory "
        f"(the paper: {paper['memory']:.0f})"
    )


def tested(book: Book) -> str:
    """How the tests on a GPU ended."""
    files = book.raw(TESTED, "files")
    passed, failed, skipped = (sum(one[key] for one in files.values()) for key in ("passed", "failed", "skipped"))
    return f"{passed:,} cases in {len(files)} files passed, {failed or 'none'} failed, {skipped or 'none'} were skipped"


def sanitized(book: Book) -> str:
    """What each tool of the sanitizer found."""
    runs = book.raw(SANITIZED, "runs")
    tools: dict[str, list[dict[str, int]]] = {}
    for name, run in runs.items():
        tools.setdefault(name.partition(",")[0], []).append(run)
    counts = {tool: [sum(run[key] or 0 for run in held) for key in ("errors", "calls")] for tool, held in tools.items()}
    return ", ".join(f"{tool} {errors or 'no'} errors in {calls} calls" for tool, (errors, calls) in counts.items())


def soaked(book: Book) -> str:
    """How many random calls were compared."""
    runs = book.raw(SOAKED, "runs").values()
    calls, seconds = (sum(run.get(key, 0) for run in runs) for key in ("cases", "seconds"))
    wrong = sum(run.get("wrong", "no report") is not None for run in runs)
    return f"{calls:,} calls of {len(runs)} seeds in {seconds / 60:.0f} minutes, {wrong or 'none'} wrong"


def examples(book: Book) -> str:
    """How far the two results of each script of examples/ are apart."""
    trained, ranked = (
        book.raw(SHOWN, "examples", f"{name}.py", "found") for name in ("train_sentence_transformers", "rerank_pylate")
    )
    own, ours = (run["losses"] for run in trained.values())
    apart = max(abs(a - b) / abs(a) for a, b in zip(own, ours, strict=True))
    return (
        f"the losses of {len(own)} steps on SciFact's pairs differ by at most {apart:.1e}, relative; {ranked['same_rankings']} of "
        f"{ranked['queries']} rankings of {ranked['candidates']} candidates are the same, and scores differ by at most "
        f"{ranked['scores_apart']:.1e}"
    )


FIGURES: dict[str, tuple[str, Callable[[Book], str]]] = {  # with their files or rows, whose age stands in the same section
    "cold": (COLD, seconds("cold")),
    "warm": (COLD, seconds("warm")),
    "start": (COLD, lambda book: f"asked: below {' and '.join(map(str, ASKED.values()))} s, {verdict(book, COLD)}"),
    "start-slow": (COLD_SLOW, started(COLD_SLOW)),
    "hotpotqa": (REHEARSED, rehearsed),
    "host": (HOST, host),
    "numkong-error": (CPU, worst("numkong 7.8.6")),
    "int8-error": (CPU, worst("ours INT8, token scale")),
    "proof-fp16": (PROVED, quoted.proof("fp16")),
    "proof-int8": (PROVED, quoted.proof("int8")),
    "parity": (PARITY, parity),
    "gpu-tests": (TESTED, tested),
    "sanitizers": (SANITIZED, sanitized),
    "soak": (SOAKED, soaked),
    "examples": (SHOWN, examples),
}
STEPS, BACKWARD, CHAMFER = ("h200/training_steps.json", "h200/training_backward.json", "h200/chamfer.json")
LAYOUTS = "h200/training_layouts_alone.json"
WHOLE, BEHIND, APART = ("step ", "memory "), ("backward ",), ("d = 768", "FP32 inputs")
Shown = Callable[[dict[str, Any]], list[str]]
LINES: dict[str, tuple[str, tuple[str, ...], Shown]] = {  # with their files, and how the names of their rows begin
    "steps": (STEPS, WHOLE, lambda found: training.step_summary(Figures(found))),
    "backward": (BACKWARD, BEHIND, lambda found: training.ablation_table(Figures(found))),
    "layouts": (LAYOUTS, ("distillation", "pairs", "packed"), lambda found: training.layouts(Figures(found), usual=True)),
    "own-layouts": (LAYOUTS, APART, lambda found: training.layouts(Figures(found), usual=False)),
    "asked-of-steps": (STEPS, WHOLE, lambda found: verdict_table(training.verdicts(found))),
    "asked-of-backward": (BACKWARD, BEHIND, lambda found: verdict_table(training.verdicts(found))),
    "chamfer-forward": (CHAMFER, ("forward, ",), lambda found: training.chamfer_times(Figures(found), training=False)),
    "chamfer-training": (CHAMFER, ("forward + ",), lambda found: training.chamfer_times(Figures(found), training=True)),
    "asked-of-chamfer": (CHAMFER, ("forward",), lambda found: verdict_table(training.chamfer_verdicts(found))),
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
        if kind == "age" and book.raw(keys_of(name)[0], *keys_of(name)[1]) is None:
            raise ValueError(f"{place}: got a mark of {name!r}, need a file below docs/results, or FILE#/groups/NAME of one")
        made = {
            "table": lambda: _table(book, name),
            "lines": lambda: _lines(book, name),
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


def _lines(book: Book, name: str) -> str:
    """The lines of a script's table, a line about its age below."""
    file, begin, shown = LINES[name]
    found = book.file(file)
    held = sorted(ages.rows(found), key=lambda keys: keys[0] == "groups")  # a finished row goes before one that was cut short
    age = ages.of_rows(book, {keys[-1]: [(file, keys)] for keys in held if keys[-1].startswith(begin)})
    return "\n".join(["", *"\n".join(shown(found)).strip().splitlines(), "", age, ""])


def pages(root: Path) -> list[Path]:
    """Pages that quote tables, and every page of docs with a mark."""
    docs = sorted((root / "docs").glob("*.md"))
    marked = (path for path in docs if MARKED.search(path.read_text(encoding="utf-8")))
    return list(dict.fromkeys((*(root / name for name in PLACES), *marked)))
