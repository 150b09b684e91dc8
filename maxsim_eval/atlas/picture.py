"""The picture of an Atlas: change of the first metric with its interval, against bytes a document and against time. By matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from maxsim_eval.atlas.judging import Atlas, Row
from maxsim_eval.errors import MissingPackageError
from maxsim_eval.printing import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"equivalent": "#2f7d4f", "inconclusive": "#8a8a8a", "different": "#b5473c", "reference": "#222222"}
_PLACES = [
    (7 * way, step * up, side) for step in range(0, 64, 8) for up in (1, -1) for way, side in ((1, "left"), (-1, "right"))
]
_MARKS = {"path": "s", "codec": "o", "first stage": "^", "reranked": "D", "run": "v"}


def check_picture() -> None:
    """Refuse a picture that cannot be drawn, before anything is done for it.

    Raises:
        MissingPackageError: no matplotlib.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingPackageError("the picture of an atlas", "matplotlib", "atlas") from None


def to_svg(atlas: Atlas) -> str:
    """The picture as SVG; errors as of `check_picture`."""
    check_picture()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "maxsim-eval", "svg.fonttype": "path", "font.size": 8.5}):
        figure = Figure(figsize=(12.5, 11.5))
        upper, lower = figure.subplots(2, 1)
        figure.subplots_adjust(left=0.06, right=0.99, top=0.99, bottom=0.05, hspace=0.13)
        _draw(upper, atlas, lambda row: row.document_bytes, "bytes", "bytes a document, mean")
        _draw(lower, atlas, lambda row: row.seconds.get("search"), "seconds", "seconds for all queries, this machine")
        _legend(upper)
        held = io.StringIO()
        figure.savefig(held, format="svg", metadata={"Date": None})
    text = held.getvalue()
    return text[text.index("<svg") :]


def _draw(axes: Axes, atlas: Atlas, cost: Callable[[Row], float | None], front: str, label: str) -> None:
    main = atlas.metrics[0]
    axes.axhspan(-atlas.within, atlas.within, color="#2f7d4f", alpha=0.10, lw=0)
    axes.axhline(0, color="#999999", lw=0.7)
    shown: list[tuple[float, float, Row]] = []
    for row in atlas.rows:
        change, at = row.changes.get(main), cost(row)
        if not at or (change is None and row.verdict != "reference"):
            continue
        mean = 0.0 if change is None else change.mean
        colour = _COLOURS[row.verdict]
        if change is not None:
            axes.plot([at, at], [change.low, change.high], color=colour, lw=1.0, alpha=0.55, solid_capstyle="butt")
        inner = "white" if row.control else colour
        axes.plot([at], [mean], _MARKS[row.kind], color=colour, ms=5.5, markerfacecolor=inner)
        shown.append((at, mean, row))
    axes.set_yscale("symlog", linthresh=atlas.within, linscale=0.6)  # near the bound is where it matters
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")
    axes.set_ylabel(f"{main}, change from {atlas.rows[0].name}")
    best = sorted((at, mean) for at, mean, row in shown if front in row.fronts)
    axes.plot(*zip(*best, strict=True) if best else ([], []), color="#3b76af", lw=0.9, ls=(0, (4, 3)), zorder=1)
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.grid(alpha=0.25, lw=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    ends = [at for at, _, _ in shown] or [1.0]
    axes.set_xlim(min(ends) / 1.6, max(ends) * 3)
    _label(axes, shown)


def _label(axes: Axes, shown: list[tuple[float, float, Row]]) -> None:
    """Write names beside their marks, each where it covers the fewest other names and marks."""
    from matplotlib.transforms import Bbox

    dots: Any = axes.transData.transform([(at, height) for at, height, _ in shown]) if shown else []
    taken: list[Any] = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in dots]
    inside = axes.get_window_extent()
    for at, height, row in sorted(shown, key=lambda one: -one[1]):
        name = re.sub(r"\([^()]*\)", "", row.name)
        name = printable(name).encode("ascii", "replace").decode()  # what the font has
        best: tuple[int, Any] | None = None
        for x, y, side in _PLACES:
            text = axes.annotate(
                name, (at, height), (x, y), textcoords="offset points", fontsize=7, va="center", ha=side, parse_math=False,
                color="#333333", bbox={"facecolor": "white", "alpha": 0.75, "lw": 0, "pad": 0.4},
                arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "#999999", "shrinkB": 3} if abs(y) > 8 else None,
            )  # fmt: skip
            box = text.get_window_extent()
            on = sum(box.overlaps(other) for other in taken) + 9 * (
                not inside.contains(*box.min) or not inside.contains(*box.max)
            )
            if best is None or on < best[0]:
                if best is not None:
                    best[1].remove()
                best = on, text
            else:
                text.remove()
            if not on:
                break
        if best is not None:
            taken.append(best[1].get_window_extent())


def _legend(axes: Axes) -> None:
    from matplotlib.lines import Line2D

    def mark(shape: str, colour: str, name: str) -> Line2D:
        return Line2D([], [], marker=shape, color=colour, lw=0, ms=5, label=name)

    handles = [mark("o", colour, verdict) for verdict, colour in _COLOURS.items()]
    handles += [mark(shape, "#666666", kind) for kind, shape in _MARKS.items() if kind != "run"]
    handles.append(Line2D([], [], color="#3b76af", lw=0.9, ls=(0, (4, 3)), label="Pareto front"))
    axes.legend(handles=handles, fontsize=7, loc="lower right", frameon=False, ncols=2)
