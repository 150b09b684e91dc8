"""The Markdown tables of the Chamfer benchmark and what it is asked to reach, from one results file, without a GPU."""

from __future__ import annotations

from typing import Any

from results.file import Figures
from tables.markdown import CELL, Lines, summary, times_and_peaks, verdict_table

COUNTS, DIMS = {"1K": 1000, "10K": 10_000, "50K": 50_000, "100K": 100_000}, (3, 128)
SHIFT, BOUND, COSINE = 1000, 1e-5, 0.99999
ERRORS = {"error": "error", "shifted_error": f"error, moved by {SHIFT}", "gradient_error": "row error of gradients"}
WORDS = f"[w]: wrong by more than {BOUND:.0e} (or a gradient's cosine below {COSINE}); [m]: only after both clouds moved by {SHIFT}."


def row_name(count: str, dim: int, *, training: bool) -> str:
    """A row's name."""
    return f"{'forward + backward' if training else 'forward'}, {count} points, d = {dim}"


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """3x flash-maxsim at 10K points and above; 100x naive autograd ("baseline") where it fits."""
    figures, found = Figures(report), Lines()
    for training in (False, True):
        for dim in DIMS:
            for count, size in COUNTS.items():
                name = row_name(count, dim, training=training)
                if size >= 10_000:
                    found.faster(figures, name, 3.0)
                if training:
                    found.faster(figures, name, 100.0, kind="baseline")
    return found.all


def markdown(report: dict[str, Any], brief: bool = False) -> list[str]:
    """The tables that docs/training_figures.md holds of a results file; without `brief` one table a row too."""
    figures = Figures(report)
    shown = ["## Chamfer distance; the paper: 77 to 152 times faster than naive autograd (A100)", "", f"{CELL} {WORDS}", ""]
    for training in (False, True):
        table = times(figures, training=training)
        shown += [f"### {'Forward and backward' if training else 'Forward'}", "", *table] if table else []
    for name in () if brief else figures.rows:
        notes = {method: text for (place, method), text in _wrong(figures).items() if place == name}
        shown += times_and_peaks(figures, name, notes, "wrong", ERRORS)
    return [*shown, "## Asked and measured", "", *verdict_table(verdicts(report))]


def _wrong(figures: Figures) -> dict[tuple[str, str], str]:
    """What a method failed, by row and method."""
    return {
        (name, method): held["wrong"]
        for name, (_, data) in figures.rows.items()
        for method, held in data["methods"].items()
        if held.get("wrong")
    }


def times(figures: Figures, *, training: bool) -> list[str]:
    """Every method and count of points; what is wrong marked, as `WORDS` says."""
    marks = {
        place: " [m]" if text.startswith("shifted_error") and "cosine" not in text else " [w]"
        for place, text in _wrong(figures).items()
    }
    names = {row_name(count, dim, training=training): f"{count}, d = {dim}" for dim in DIMS for count in COUNTS}
    return summary(figures, names, marks)
