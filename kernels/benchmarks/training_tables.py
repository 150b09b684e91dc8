"""The Markdown tables of docs/training.md and the verdicts of the training benchmark, from one results file, without a GPU."""

from __future__ import annotations

from typing import Any

from budget import Shape, budget
from figures import Figures
from training_cases import LAYOUTS, MEMORY, STEPS, memory_name, step_name
from training_parts import ABLATION, KINDS, ablation_name, parts_name
from training_rivals import PATHS
from verdicts import FLASH, LIK

# The paper's figures: (milliseconds, peak GB), None where it ran out of memory or gives none.
STEP_PAPER = {
    ("ColPali B=64", "naive FP32 accumulation"): "81.3 / 51.8",
    ("ColPali B=64", "checkpointed FP32 accumulation"): "109.2 / 8.8",
    ("ColPali B=64", f"{FLASH} unified"): "13.4 / 0.24",
    ("ColPali B=64", f"{FLASH} csr"): "11.7 / 0.39",
    ("ColPali B=128", "naive FP32 accumulation"): "OOM",
    ("ColPali B=128", "checkpointed FP32 accumulation"): "426.6 / 17.5",
    ("ColPali B=128", f"{FLASH} unified"): "53.6 / 0.39",
    ("ColPali B=128", f"{FLASH} csr"): "46.0 / 1.03",
}
ABLATION_PAPER = {  # H100: csr, atomic, unified
    "ColBERT B=128": ("0.96 / 0.04", "3.95 / 0.03", "0.76 / 0.03"),
    "ColBERT B=512": ("5.76 / 0.43", "18.62 / 0.13", "6.21 / 0.13"),
    "ColBERT B=1024": ("21.21 / 1.56", "50.85 / 0.33", "23.53 / 0.33"),
    "ColPali B=32": ("1.87 / 0.09", "28.48 / 0.06", "1.86 / 0.06"),
    "ColPali B=64": ("5.81 / 0.27", "58.13 / 0.12", "6.05 / 0.12"),
    "ColPali B=128": ("21.02 / 0.88", "136.86 / 0.28", "22.65 / 0.28"),
}
PARTS_PAPER = {  # A100, one query: forward, csr list, gradient of queries, of documents, the three together, autograd
    "ColBERT B=128": (0.19, 0.45, 0.07, 0.08, 0.58, 0.55),
    "ColBERT B=512": (0.20, 0.49, 0.09, 0.13, 0.75, 0.63),
    "ColBERT B=1024": (0.20, 0.55, 0.15, 0.23, 1.02, 0.76),
    "ColPali B=32": (0.46, 0.51, 0.07, 0.08, 0.65, 1.33),
    "ColPali B=64": (0.46, 0.52, 0.07, 0.12, 0.70, 1.16),
    "ColPali B=128": (0.80, 0.53, 0.08, 0.19, 0.79, 1.74),
}
BUDGET_PAPER = {
    ("ColPali B=64", "vanilla"): "33.6",
    ("ColPali B=64", "csr"): "0.34",
    ("ColPali B=64", "unified"): "0.02",
    ("ColPali B=128", "vanilla"): "67.1 (off by two)",
    ("ColPali B=128", "csr"): "1.4",
    ("ColPali B=128", "unified"): "0.06",
}


# Verdicts


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


def rival(figures: Figures, row: str, key: str = "median_ms") -> str | None:
    """The fastest peer of a row."""
    return figures.fastest(row, ("peer",), key)


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines of the issue's table that the file's rows allow; a row without a timed peer gives none."""
    figures, found = Figures(report), Lines()
    for shape in STEPS:
        _step(found, figures, shape)
    for shape in ABLATION:
        row = ablation_name(shape, "random")
        for place in (row, step_name(shape)) if shape.startswith("ColPali") else ():
            if place in figures.rows:
                ratio = figures.ratio(place, "ours unified", "ours csr")
                found.add(place, "csr over unified, times faster", ratio, 1.0, 1.15)
    return found.all


def _step(found: Lines, figures: Figures, shape: str) -> None:
    row, colbert = step_name(shape), shape.startswith("ColBERT")
    if row not in figures.rows:
        return
    for key, words in (("median_ms", ""), ("busy_median_ms", ", GPU time alone")):
        peer = rival(figures, row, key)
        if peer is not None:
            asked, aim = (1.0, 2.0) if colbert else (1.35, 1.8)
            found.add(row, f"times faster than {peer}, the fastest peer{words}", figures.ratio(row, peer, key=key), asked, aim)
    floor, mine = figures.rows[row][1]["floor_ms"], figures.time(row, "ours")
    if floor and not colbert:
        found.add(row, "times the forward floor", None if mine is None else mine / floor, None, 2.0, most=True)
    peer = rival(figures, row)
    mine = figures.time(row, "ours", "peak_bytes")
    theirs = None if peer is None else figures.time(row, peer, "peak_bytes")
    if theirs is not None:
        least = 134.0 if shape == "ColPali B=128" else None
        found.add(row, f"peak MB, no more than {peer}'s", None if mine is None else mine / 1e6, theirs / 1e6, least, most=True)
    if shape == "ColPali B=128" and figures.method(row, "ours") is not None and mine is not None:
        winners = budget(_shape(figures.rows[row][1]["about"]), "unified").winners
        found.add(row, "peak MB, 16-bit winners (the default)", mine / 1e6, 70.0, winners / 1e6, most=True)


def _shape(about: dict[str, Any]) -> Shape:
    return Shape(*(about[key] for key in ("queries", "documents", "query_tokens", "document_tokens", "dim")))


def verdict_table(lines: list[dict[str, Any]], head: str = "## Asked and measured") -> list[str]:
    """The lines as Markdown."""
    shown = [head, "", "| row | what | at least | aim | measured | met | aim met |", "|---|---|---|---|---|---|---|"]
    words = {None: "", True: "yes", False: "**no**"}
    for line in lines:
        sign = "<= " if line["most"] else ""
        asked, aim = (f"{sign}{line[key]:.4g}" if line[key] is not None else "" for key in ("asked", "aim"))
        measured = "not measured" if line["measured"] is None else f"{line['measured']:.3g}"
        shown.append(
            f"| {line['row']} | {line['what']} | {asked} | {aim} | {measured} | {words[line['met']]} | {words[line['aimed']]} |"
        )
    asked_lines = [line for line in lines if line["met"] is not None]
    return [*shown, "", f"{sum(line['met'] for line in asked_lines)} of {len(asked_lines)} lines met."]


# Tables


def gigabytes(size: float | None) -> str:
    """Three digits, or a dash."""
    return "-" if size is None else f"{size / 1e9:.3g}"


def milliseconds(time: float | None) -> str:
    """Three digits, or a dash."""
    return "-" if time is None else f"{time:.3g}"


def times_and_peaks(figures: Figures, row: str, paper: dict[str, str]) -> list[str]:
    """One row of the benchmark as a table: every method's time, memory, error."""
    if row not in figures.rows:
        return []
    data = figures.rows[row][1]
    main = figures.time(row, data["main"])
    floor = "" if data["floor_ms"] is None else f" (forward floor {data['floor_ms']:.3g} ms)"
    shown = [f"### {row}{floor}", ""]
    shown += ["| method | ms | GPU alone, ms | x ours | peak GB | with gradients | row error | 1 - cosine | paper |"]
    shown += ["|" + "---|" * 9]
    for name, held in data["methods"].items():
        time = held.get("median_ms")
        ratio = f"{time / main:.2f}" if time and main else "-"
        entry = f" ({held['entry']})" if held["entry"] else ""
        error = "-" if held.get("error") is None else f"{held['error']:.1e}"
        cosine = f"{1 - held['cosine']:.1e}" if "cosine" in held else "-"
        peaks = f"{gigabytes(held['peak_bytes'])} | {gigabytes(held['strict_bytes'])}"
        clocks = f"{milliseconds(time)} | {milliseconds(held.get('busy_median_ms'))}"
        shown.append(f"| {name}{entry} | {clocks} | {ratio} | {peaks} | {error} | {cosine} | {paper.get(name, '')} |")
    shown += [f"| {name} | {why} | | | | | | | {paper.get(name, '')} |" for name, why in data["skipped"].items()]
    return [*shown, ""]


def budget_table(figures: Figures) -> list[str]:
    """Analytic bytes beside measured ones."""
    shown = ["| batch | path | S | its gradient | winners | FP32 scratch | list | total GB | measured GB | paper's total |"]
    shown += ["|" + "---|" * 10]
    measured = {"vanilla": "naive FP32 accumulation", "csr": "ours csr", "unified": "ours unified", "atomic": "ours atomic"}
    for shape in dict.fromkeys((*STEPS, *MEMORY)):
        row = next((name for name in (step_name(shape), memory_name(shape)) if name in figures.rows), None)
        if row is None:
            continue
        for path, method in measured.items():
            about = figures.rows[row][1]["about"]
            need = budget(_shape(about), path, list_bytes=about.get("list_bytes"))
            parts = (need.similarities, need.similarity_gradient, need.winners, need.scratch, need.source_list, need.total)
            cells = " | ".join(gigabytes(part) if part else "" for part in parts)
            peak = gigabytes(figures.time(row, method, "peak_bytes"))
            shown.append(f"| {shape} | {path} | {cells} | {peak} | {BUDGET_PAPER.get((shape, path), '')} |")
    return [*shown, ""] if len(shown) > 2 else []


def parts_table(figures: Figures, one: bool) -> list[str]:
    """Every part of a step, a column a shape; GPU time with the host ahead."""
    shapes = [shape for shape in ABLATION if parts_name(shape, one) in figures.rows]
    if not shapes:
        return []
    names = list(dict.fromkeys(name for shape in shapes for name in figures.rows[parts_name(shape, one)][1]["methods"]))
    shown = ["| part, ms | " + " | ".join(shapes) + " |", "|---" * (len(shapes) + 1) + "|"]
    for name in names:
        cells = []
        for shape in shapes:
            time = figures.time(parts_name(shape, one), name, "busy_median_ms")
            cells.append(milliseconds(time if time is not None else figures.time(parts_name(shape, one), name)))
        shown.append(f"| {name} | " + " | ".join(cells) + " |")
    shown += _kernels(figures, "gradient of documents, csr", [parts_name(shape, one) for shape in shapes])
    if one:
        heads = ("forward", "csr list", "gradient of queries", "gradient of documents", "three stages", "autograd")
        for place, head in enumerate(heads):
            shown.append(f"| paper (A100): {head} | " + " | ".join(f"{PARTS_PAPER[shape][place]}" for shape in shapes) + " |")
    return [*shown, ""]


def _kernels(figures: Figures, name: str, rows: list[str]) -> list[str]:
    """What a part's kernels take, one line each: the csr list and the sums from it."""
    held = [(figures.method(row, name) or {}).get("kernels_ms", {}) for row in rows]
    kernels = dict.fromkeys(kernel for found in held for kernel in found)
    return [
        f"| of {name}: `{kernel}` | " + " | ".join(milliseconds(found.get(kernel)) for found in held) + " |"
        for kernel in kernels
    ]


def ablation_table(figures: Figures) -> list[str]:
    """The backward alone: three paths, three kinds of winners, milliseconds / peak GB."""
    columns = (*(f"ours {path}" for path in PATHS), *(f"{FLASH} {path}" for path in PATHS), f"{LIK} unified", f"{LIK} lowmem")
    shown = ["| shape | winners | " + " | ".join(columns) + " | csr over unified | paper (H100): csr, atomic, unified |"]
    shown += ["|" + "---|" * (len(columns) + 4)]
    for shape in ABLATION:
        for kind in KINDS:
            row = ablation_name(shape, kind)
            if row not in figures.rows:
                continue
            cells = []
            for name in columns:
                held = figures.method(row, name)
                cells.append("-" if held is None else f"{milliseconds(held['median_ms'])} / {gigabytes(held['peak_bytes'])}")
            ratio = figures.ratio(row, "ours unified", "ours csr")
            paper = ", ".join(ABLATION_PAPER[shape]) if kind == "random" else ""
            shown.append(f"| {shape} | {kind} | " + " | ".join(cells) + f" | {milliseconds(ratio)} | {paper} |")
    return [*shown, ""] if len(shown) > 2 else []


def markdown(report: dict[str, Any]) -> list[str]:
    """Everything that docs/training.md holds of a results file."""
    figures = Figures(report)
    shown = ["## Training steps (forward and backward); the paper's column: A100, ms / peak GB", ""]
    for shape in STEPS:
        paper = {name: text for (place, name), text in STEP_PAPER.items() if place == shape}
        shown += times_and_peaks(figures, step_name(shape), paper)
    shown += ["## Peak memory alone", ""]
    for shape in MEMORY:
        shown += times_and_peaks(figures, memory_name(shape), {})
    shown += ["## Byte budget, GB", "", *budget_table(figures)]
    shown += ["## Parts of a step, in the batch", "", *parts_table(figures, False)]
    shown += ["## Parts of a step, one query", "", *parts_table(figures, True)]
    shown += ["## The backward alone, ms / peak GB", "", *ablation_table(figures)]
    shown += ["## Other layouts", ""]
    for row in LAYOUTS.values():
        shown += times_and_peaks(figures, row, {})
    return [*shown, *verdict_table(verdicts(report))]
