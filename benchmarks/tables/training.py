"""The Markdown tables of docs/training_figures.md, and verdicts of the training and Chamfer benchmarks, without a GPU."""

from __future__ import annotations

from typing import Any

from measure.byte_budget import Shape, budget
from measure.names import (
    ABLATION,
    FLASH,
    LAYOUTS,
    LIK,
    MEMORY_STEPS,
    STEPS,
    WINNERS,
    ablation_name,
    memory_name,
    parts_name,
    step_name,
)
from results.file import Figures
from rivals.training import PATHS
from tables.cells import claimed
from tables.markdown import (
    CELL,
    Lines,
    cell,
    gigabytes,
    grid,
    kernel_name,
    milliseconds,
    reason,
    summary,
    times_and_peaks,
    verdict_table,
)

PAPER = claimed()
# The paper's names of methods (A100), and of the parts of one query's step.
PAPER_METHODS = {"naive": "naive FP32 accumulation", "recompute": "checkpointed FP32 accumulation", "unified": f"{FLASH} unified",
                 "csr": f"{FLASH} csr"}  # fmt: skip
PAPER_PARTS = {"forward": "forward", "build": "csr list", "dq": "gradient of queries", "dd": "gradient of documents",
               "pieces": "three stages", "step": "autograd"}  # fmt: skip
COUNTS, DIMS = {"1K": 1000, "10K": 10_000, "50K": 50_000, "100K": 100_000}, (3, 128)
SHIFT, BOUND, COSINE = 1000, 1e-5, 0.99999
ERRORS = {"error": "error", "shifted_error": f"error, moved by {SHIFT}", "gradient_error": "row error of gradients"}
WORDS = f"[w]: wrong by more than {BOUND:.0e} (or a gradient's cosine below {COSINE}); [m]: only after both clouds moved by {SHIFT}."


def paper_step(table: str, shape: str, key: str) -> str:
    """Milliseconds (peak GB) as the paper prints them, or OOM."""
    held = PAPER[table].get(shape, {})
    return "" if key not in held else "OOM" if held[key] == "OOM" else f"{held[key]} ({held[f'{key}_peak']})"


def paper_total(shape: str, path: str) -> str:
    """GB that the paper counts."""
    held = PAPER["bwd_mem"].get(f"{shape.removeprefix('ColPali B=')} {path}", {})
    return held.get("total", "") + (" (off by two)" if (shape, path) == ("ColPali B=128", "vanilla") else "")


# Verdicts


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines of what was asked that the file's rows allow; a row without a timed peer gives none."""
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
    found.faster(figures, row, *((1.0, 2.0) if colbert else (1.35, 1.8)))
    floor, mine = figures.rows[row][1]["floor_ms"], figures.time(row, "ours")
    if floor and not colbert:
        found.add(row, "times the forward floor", None if mine is None else mine / floor, None, 2.0, most=True)
    peer = figures.fastest(row, ("peer",))
    mine = figures.time(row, "ours", "peak_bytes")
    theirs = None if peer is None else figures.time(row, peer, "peak_bytes")
    if theirs is not None:
        least = 134.0 if shape == "ColPali B=128" else None
        what = f"peak MB, no more than {peer}'s, the fastest peer's with the host"
        found.add(row, what, None if mine is None else mine / 1e6, theirs / 1e6, least, most=True)
    if shape == "ColPali B=128" and figures.method(row, "ours") is not None and mine is not None:
        winners = budget(Shape.of(figures.rows[row][1]["about"]), "unified").winners
        found.add(row, "peak MB, 16-bit winners (the default)", mine / 1e6, 70.0, winners / 1e6, most=True)


# Tables


def step_summary(figures: Figures) -> list[str]:
    """Every step and method in one table; batches whose memory alone was measured give that; then the paper's figures."""
    columns = {step_name(shape): shape for shape in STEPS}
    columns |= {memory_name(shape): f"{shape}, memory" for shape in MEMORY_STEPS if shape not in STEPS}
    paper = [
        (f"the paper (A100): {name}", {shape: paper_step("train", shape, key) for shape in PAPER["train"]})
        for key, name in PAPER_METHODS.items()
    ]
    return summary(figures, columns, below=paper)


def budget_table(figures: Figures) -> list[str]:
    """Analytic bytes beside measured ones."""
    heads = [
        "batch",
        "path",
        "S",
        "its gradient",
        "winners",
        "FP32 scratch",
        "list",
        "total GB",
        "measured GB",
        "paper's total",
    ]
    measured = {"vanilla": "naive FP32 accumulation", "csr": "ours csr", "unified": "ours unified", "atomic": "ours atomic"}
    rows = []
    for shape in dict.fromkeys((*STEPS, *MEMORY_STEPS)):
        row = next((name for name in (step_name(shape), memory_name(shape)) if name in figures.rows), None)
        if row is None:
            continue
        for path, method in measured.items():
            about = figures.rows[row][1]["about"]
            need = budget(Shape.of(about), path, list_bytes=about.get("list_bytes"))
            parts = (need.similarities, need.similarity_gradient, need.winners, need.scratch, need.source_list, need.total)
            cells = [gigabytes(part) if part else "" for part in parts]
            peak = gigabytes(figures.time(row, method, "peak_bytes"))
            rows.append([shape, path, *cells, peak, paper_total(shape, path)])
    return grid(heads, rows) if rows else []


def parts_table(figures: Figures, one: bool) -> list[str]:
    """Every part of a step, a column a shape; GPU time with the host ahead."""
    shapes = [shape for shape in ABLATION if parts_name(shape, one) in figures.rows]
    if not shapes:
        return []
    places = [parts_name(shape, one) for shape in shapes]
    rows = []
    for name in dict.fromkeys(name for place in places for name in figures.rows[place][1]["methods"]):
        times = [(figures.time(place, name, "busy_median_ms"), figures.time(place, name)) for place in places]
        shown = "whole step" if name == "ours" else name
        rows.append([shown, *(milliseconds(plain if alone is None else alone) for alone, plain in times)])
    rows += _kernels(figures, "gradient of documents, csr", places)
    if one:
        for key, head in PAPER_PARTS.items():
            rows.append([f"the paper (A100): {head}", *(f"{float(PAPER['bwd_breakdown'][shape][key]):g}" for shape in shapes)])
    return grid(["part, ms", *shapes], rows)


def _kernels(figures: Figures, name: str, rows: list[str]) -> list[list[str]]:
    """What a part's kernels take, one line each: the csr list and the sums from it."""
    held: list[dict[str, float]] = []
    for row in rows:
        times: dict[str, float] = {}
        for kernel, time in (figures.method(row, name) or {}).get("kernels_ms", {}).items():
            times[kernel_name(kernel)] = times.get(kernel_name(kernel), 0.0) + time
        held.append(times)
    kernels = dict.fromkeys(kernel for times in held for kernel in times)
    return [[f"of {name}: {kernel}", *(milliseconds(times.get(kernel)) for times in held)] for kernel in kernels]


def ablation_table(figures: Figures) -> list[str]:
    """The backward alone: three paths, three kinds of winners."""
    columns = (*(f"ours {path}" for path in PATHS), *(f"{FLASH} {path}" for path in PATHS), f"{LIK} unified", f"{LIK} lowmem")
    heads = ["shape", "winners", *columns, "csr over unified", "paper (H100): csr, atomic, unified"]
    rows = []
    for shape in ABLATION:
        for kind in WINNERS:
            row = ablation_name(shape, kind)
            if row not in figures.rows:
                continue
            methods, skipped = (figures.rows[row][1][part] for part in ("methods", "skipped"))
            cells = [
                cell(methods[name]) if name in methods else reason(skipped[name]) if name in skipped else "-"
                for name in columns
            ]
            ratio = figures.ratio(row, "ours unified", "ours csr")
            paper = (
                ", ".join(paper_step("bwd_abl", shape, key) for key in ("csr", "atomic", "unified")) if kind == "random" else ""
            )
            rows.append([shape, kind, *cells, milliseconds(ratio), paper])
    return grid(heads, rows) if rows else []


def detailed(figures: Figures) -> list[str]:
    """One table a row: of steps and of memory."""
    shown = []
    for shape in STEPS:
        paper = {name: paper_step("train", shape, key) for key, name in PAPER_METHODS.items() if shape in PAPER["train"]}
        shown += times_and_peaks(figures, step_name(shape), paper, "paper (A100)")
    for shape in MEMORY_STEPS:
        shown += times_and_peaks(figures, memory_name(shape))
    return shown


def layouts(figures: Figures, *, usual: bool) -> list[str]:
    """Other layouts of a step: those of the usual tokens, or those of wide and FP32 ones."""
    names = [LAYOUTS[name] for name in ("distillation", "pairs short", "pairs long", "packed")]
    return summary(figures, {row: row for row in LAYOUTS.values() if (row in names) == usual})


def markdown(report: dict[str, Any], brief: bool = False) -> list[str]:
    """Everything that docs/training_figures.md holds of a results file; without `brief` one table a row too."""
    figures = Figures(report)
    sections = {
        "Training steps (forward and backward)": step_summary(figures),
        "Steps and memory, row by row": [] if brief else detailed(figures),
        "The backward alone": ablation_table(figures),
        "Parts of a step, in the batch; GPU time": parts_table(figures, False),
        "Parts of a step, one query; GPU time": parts_table(figures, True),
        "Byte budget, GB": budget_table(figures),
        "Other layouts": layouts(figures, usual=True),
        "Other layouts: wide tokens, and FP32 inputs": layouts(figures, usual=False),
        "Other layouts, row by row": []
        if brief
        else [line for row in LAYOUTS.values() for line in times_and_peaks(figures, row)],
    }
    shown = [CELL, ""]
    for head, table in sections.items():
        shown += [f"## {head}", "", *table] if table else []
    return [*shown, "## Asked and measured", "", *verdict_table(verdicts(report))]


# Chamfer distance


def chamfer_name(count: str, dim: int, *, training: bool) -> str:
    """A row's name."""
    return f"{'forward + backward' if training else 'forward'}, {count} points, d = {dim}"


def chamfer_verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """3x flash-maxsim at 10K points and above; 100x naive autograd ("baseline") where it fits."""
    figures, found = Figures(report), Lines()
    for training in (False, True):
        for dim in DIMS:
            for count, size in COUNTS.items():
                name = chamfer_name(count, dim, training=training)
                if size >= 10_000:
                    found.faster(figures, name, 3.0)
                if training:
                    found.faster(figures, name, 100.0, kind="baseline")
    return found.all


def chamfer_markdown(report: dict[str, Any], brief: bool = False) -> list[str]:
    """The tables that docs/training_figures.md holds of a results file; without `brief` one table a row too."""
    figures = Figures(report)
    shown = ["## Chamfer distance; the paper: 77 to 152 times faster than naive autograd (A100)", "", f"{CELL} {WORDS}", ""]
    for training in (False, True):
        table = chamfer_times(figures, training=training)
        shown += [f"### {'Forward and backward' if training else 'Forward'}", "", *table] if table else []
    for name in () if brief else figures.rows:
        notes = {method: text for (place, method), text in _wrong(figures).items() if place == name}
        shown += times_and_peaks(figures, name, notes, "wrong", ERRORS)
    return [*shown, "## Asked and measured", "", *verdict_table(chamfer_verdicts(report))]


def _wrong(figures: Figures) -> dict[tuple[str, str], str]:
    """What a method failed, by row and method."""
    return {
        (name, method): held["wrong"]
        for name, (_, data) in figures.rows.items()
        for method, held in data["methods"].items()
        if held.get("wrong")
    }


def chamfer_times(figures: Figures, *, training: bool) -> list[str]:
    """Every method and count of points; what is wrong marked, as `WORDS` says."""
    marks = {
        place: " [m]" if text.startswith("shifted_error") and "cosine" not in text else " [w]"
        for place, text in _wrong(figures).items()
    }
    names = {chamfer_name(count, dim, training=training): f"{count}, d = {dim}" for dim in DIMS for count in COUNTS}
    return summary(figures, names, marks)
