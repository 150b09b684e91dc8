"""Figures and tables of Results for notebooks: each is one call on a list of Results, and shows itself where it ends a cell.

Nothing here evaluates: the numbers are the Result's own (docs/result.md), the paper's come from the dataset cards. What a Result lacks
(statistics of an older version, scores of a comparison of runs) is left out of a figure, and said in it when nothing is left.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxsim_eval.comparison.thresholds import class_of, load_thresholds
from maxsim_eval.data.cards import PaperFigure, load_card
from maxsim_eval.errors import MissingPackageError, UnknownNameError
from maxsim_eval.files import atomic_path, writing
from maxsim_eval.report import markdown, words
from maxsim_eval.report.html_data import histogram
from maxsim_eval.report.tables import Table
from maxsim_eval.report.tables import tables as report_tables
from maxsim_eval.report.values import entry, known
from maxsim_eval.scoring.paths import PATHS
from maxsim_eval.studies.fidelity import token_bytes
from maxsim_eval.types import PathResult, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#3b76af", "#c8702a", "#4d8f4f", "#b5584a", "#7b62a3", "#85604f", "#c46fa5", "#6f6f6f")
_PAPER, _BOUND = "#111111", "#8884"
_CUTOFFS = ("@1", "@5", "@10", "@20", "@50", "@100")
_SMALLEST = 1e-8  # where 1 - Spearman of 0 stands on a logarithmic axis
_EXACT_PAPER, _INT8_PAPER = "fused", "int8"  # the paper's names of its FP16 and INT8 kernels
_ROW = 0.32  # inches


class Picture:
    """A matplotlib figure that a notebook shows, as SVG, and that can be saved."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    def _repr_svg_(self) -> str:
        return self._written("svg").decode("utf-8")

    def _written(self, kind: str) -> bytes:
        from matplotlib import rc_context

        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "maxsim-eval"}), io.BytesIO() as written:
            about = {"Date": None} if kind == "svg" else {}
            self.figure.savefig(written, format=kind, metadata=about, dpi=150)
            return written.getvalue()

    def save(self, path: Path | str) -> None:
        """Write it whole or not at all; the suffix says how: .svg, .png, .pdf."""
        with writing(path), atomic_path(path) as temporary:
            temporary.write_bytes(self._written(Path(path).suffix.lstrip(".").lower()))


class Page:
    """Markdown that a notebook shows."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_markdown_(self) -> str:
        return self.text


# Tables -----------------------------------------------------------------------------------------------------------------


def headline(results: Sequence[Result]) -> Page:
    """What was evaluated, and the verdict on every path."""
    lines = []
    for result in results:
        lines += [f"- {markdown.cell(line)}" for line in words.headline(result)]
        lines += [f"  - {markdown.cell(line)}" for line in (*words.warnings(result), *words.verdicts(result))]
    return Page("\n".join(lines))


def tables(results: Sequence[Result]) -> Page:
    """The tables of the report."""
    return Page("\n".join(line for result in results for table in report_tables(result) for line in _lines(result, table)))


def _lines(result: Result, table: Table) -> list[str]:
    title = f"**{markdown.cell(_label(result))}: {markdown.cell(table.title)}**"
    return [title, "", *markdown.table(table.columns, table.rows, "---:")]


def paper_table(results: Sequence[Result]) -> Page:
    """The paper's figures of these datasets beside ours, and how to read them; says so where the paper has none."""
    lines = []
    for result in results:
        figures, caveat = _paper(result)
        if not figures:
            lines += [f"The paper gives no figure of {markdown.cell(_label(result))}.", ""]
            continue
        rows = [
            [one.metric, one.encoder, one.path, f"{one.value:.4f}", _ours(result, one), str(one.queries or "-"), one.table]
            for one in figures
        ]
        heads = (
            "metric",
            "the paper's encoder",
            "path",
            "paper",
            f"here: {result.encoder.get('name')}",
            "its queries",
            "table",
        )
        title = f"**{markdown.cell(_label(result))}**"
        lines += [title, "", *markdown.table(heads, rows), markdown.cell(caveat), ""]
    return Page("\n".join(lines))


def _ours(result: Result, one: PaperFigure) -> str:
    found = [(name, path) for name, path in result.paths.items() if _paper_path(name) == one.path]
    said = [f"{path.metrics[one.metric]:.4f} ({name})" for name, path in found if known(path.metrics.get(one.metric))]
    return ", ".join(said) or "-"


# Figures ----------------------------------------------------------------------------------------------------------------


def deltas(results: Sequence[Result], metrics: Sequence[str] = ("nDCG@10", "Recall@10", "AnyHit@10", "nDCG-exp@10")) -> Picture:
    """Change of each metric against the reference, by path: mean, interval, the bound that matters, and the paper's (diamonds).

    The paper's change is its value of the path minus its FP32 value, of its own encoder, where the dataset's card has both.
    """
    rows = list(_compared(results))
    names = [name for name in metrics if any(name in path.metrics for _, _, path in rows)] or list(metrics[:1])
    figure = _new(max(6.0, 4.2 * len(names)), 1.3 + _ROW * len(rows))
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    drawn_paper = False
    for axes, metric in zip(panels, names):
        drawn = 0
        for place, (result, name, path) in enumerate(rows):
            found = entry(path.parity, "statistics", metric)
            mean = entry(found, "mean") if found is not None else entry(path.parity, "delta", metric)
            if known(entry(found, "bound")):
                axes.barh(place, 2 * found["bound"], left=-found["bound"], height=0.8, color=_BOUND, zorder=0)
            if known(mean):
                low, high = entry(found, "low"), entry(found, "high")
                ends = [[mean - low], [high - mean]] if known(low) and known(high) else None
                axes.errorbar(mean, place, xerr=ends, fmt="o", color=_colour(name), capsize=3, markersize=5)
                drawn += 1
            for value in _paper_deltas(result, name, metric):
                axes.plot(value, place + 0.28, marker="D", color=_PAPER, markersize=4, linestyle="none")
                drawn_paper = True
        axes.axvline(0, color="black", linewidth=0.8)
        _finish(axes, metric, "path minus reference" + ("" if drawn else ": not in these results"))
        axes.use_sticky_edges = False  # the widest bound is not cut at the edge
        axes.margins(x=0.1)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 2))
        axes.xaxis.get_offset_text().set_fontsize(8)
    _name_rows(panels[0], [f"{_label(result)}  {name}" if len(results) > 1 else name for result, name, _ in rows])
    paper = "; diamonds: the paper's, of its encoders" if drawn_paper else ""
    figure.suptitle(f"Change of the metrics: mean, 95% interval, shaded: the bound{paper}", fontsize=10)
    return Picture(figure)


def spearman(results: Sequence[Result]) -> Picture:
    """1 - Spearman of each path, over queries: mean (dot), from the median to the worst query (line), and the gate's bound."""
    rows = list(_compared(results))
    figure = _new(8.0, 1.3 + _ROW * len(rows))
    axes = figure.subplots()
    classes = load_thresholds()["classes"]
    drawn = 0
    for place, (_, name, path) in enumerate(rows):
        found = entry(path.parity, "spearman")
        bound = entry(classes.get(class_of(name, classes) or ""), "spearman_mean")
        if known(bound):
            axes.plot([1 - bound] * 2, [place - 0.4, place + 0.4], color=_PAPER, linewidth=1.5)
        if not known(entry(found, "mean")):
            continue
        best = entry(found, "percentiles", "50")
        ends = [max(1 - value, _SMALLEST) for value in (best, entry(found, "min")) if known(value)]
        axes.plot(ends, [place] * len(ends), color=_colour(name), linewidth=2, alpha=0.5, solid_capstyle="butt")
        axes.plot(max(1 - found["mean"], _SMALLEST), place, "o", color=_colour(name))
        drawn += 1
    axes.set_xscale("log")
    _finish(
        axes, "", f"1 - Spearman over all documents; {_SMALLEST:g} stands for 0" + ("" if drawn else ": not in these results")
    )
    _name_rows(axes, [f"{_label(result)}  {name}" if len(results) > 1 else name for result, name, _ in rows])
    figure.suptitle("Rank correlation: mean, median to worst query, and the gate's bound on the mean (black)", fontsize=10)
    return Picture(figure)


def overlaps(results: Sequence[Result]) -> Picture:
    """Top-k overlap as sets (lines) and queries whose top k is the same in the same order (dashed), by depth."""

    def draw(axes: Axes, name: str, path: PathResult) -> bool:
        drawn = False
        for key, line in (("overlap", "-"), ("same_order", "--")):
            found = [(cut[1:], entry(path.parity, key, cut)) for cut in _CUTOFFS]
            points = [(at, value) for at, value in found if known(value)]
            if points:
                label = name if line == "-" else None
                axes.plot(*zip(*points), marker="o", markersize=3, linestyle=line, color=_colour(name), label=label)
                drawn = True
        return drawn

    return _panels(results, draw, "k", "Top-k overlap (line) and share of queries with the same order (dashed)")


def score_errors(results: Sequence[Result]) -> Picture:
    """Score differences by size: the share of (query, document) pairs in each power of two."""

    def draw(axes: Axes, name: str, path: PathResult) -> bool:
        found = histogram(entry(path.parity, "error_histogram"))
        if found is None or found["edges"][0] <= 0:
            return False
        total = sum(found["counts"]) + found["zeros"] + found["below"] + found["above"]
        if not total:
            return False
        same = found["zeros"] / total
        none = f", the same score in {same:.0%}" if same >= 0.005 else ""
        held = [place for place, count in enumerate(found["counts"]) if count]
        if held:  # empty bins at both ends would only press the others together
            first, stop = held[0], held[-1] + 1
            shares = [count / total for count in found["counts"][first:stop]]
            axes.stairs(shares, found["edges"][first : stop + 1], color=_colour(name), linewidth=1.3)
            axes.set_xscale("log")
        axes.plot([], [], color=_colour(name), label=f"{name}{none}")
        return True

    return _panels(results, draw, "|score - reference score|", "Score errors: share of all pairs, by size")


def storage(results: Sequence[Result]) -> Picture:
    """Bytes that a stored token takes for each path, beside what the path changes at nDCG@10; users' own functions are left out."""
    rows = [
        (result, name, path, token_bytes(name, result.encoder["dim"], _mean_tokens(result)))
        for result in results
        for name, path in result.paths.items()
        if name in PATHS and name != "fused-fp32" and known(result.encoder.get("dim")) and _mean_tokens(result) > 0
    ]
    figure = _new(8.0, 1.3 + _ROW * len(rows))
    axes = figure.subplots()
    for place, (result, name, path, size) in enumerate(rows):
        axes.barh(place, size, color=_colour(name), alpha=0.8)
        change = entry(path.parity, "delta", "nDCG@10")
        said = f"{2 * result.encoder['dim'] / size:.2f}x smaller than FP16" if size < 2 * result.encoder["dim"] else ""
        shown = [f"{size:.0f}", said, "" if not known(change) else f"nDCG@10 {change:+.4f}" if change else "nDCG@10 the same"]
        axes.annotate(
            "  ".join(filter(None, shown)), (size, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.margins(x=0.5)
    _finish(axes, "", "bytes a token, with its scales" + ("" if rows else ": not known of these results"))
    _name_rows(axes, [f"{_label(result)}  {name}" if len(results) > 1 else name for result, name, _, _ in rows])
    figure.suptitle("Storage", fontsize=10)
    return Picture(figure)


# Pieces -----------------------------------------------------------------------------------------------------------------


def _new(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackageError("a figure of a notebook", "matplotlib", "pictures") from None
    return Figure(figsize=(width, max(height, 1.8)), layout="constrained")  # no pyplot: nothing global, nothing to close


def _panels(results: Sequence[Result], draw: Callable[[Axes, str, PathResult], bool], label: str, title: str) -> Picture:
    """One panel a Result, a line a compared path."""
    figure = _new(max(6.0, 4.5 * len(results)), 3.4)
    for axes, result in zip(figure.subplots(1, max(1, len(results)), squeeze=False)[0], results):
        drawn = [draw(axes, name, path) for _, name, path in _compared([result])]
        _finish(axes, _label(result), label if any(drawn) else f"{label}: not in this result")
        if any(drawn):
            for text in axes.legend(fontsize=8, frameon=False).get_texts():
                text.set_parse_math(False)
    figure.suptitle(title, fontsize=10)
    return Picture(figure)


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=9, parse_math=False)
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _name_rows(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _compared(results: Sequence[Result]) -> Iterator[tuple[Result, str, PathResult]]:
    """Every path that has parity, in order."""
    return ((result, name, path) for result in results for name, path in result.paths.items() if path.parity is not None)


def _colour(name: str) -> str:
    """A path has the same colour in every figure."""
    known_paths = [path for path in PATHS if path != "fp32"]
    return _COLOURS[known_paths.index(name) % len(_COLOURS)] if name in known_paths else _COLOURS[-1]


def _label(result: Result) -> str:
    return f"{result.task.get('source')}/{result.task.get('dataset')}"


def _mean_tokens(result: Result) -> float:
    tokens, documents = result.task.get("document_tokens"), result.task.get("documents")
    return tokens / documents if known(tokens) and known(documents) and documents else 0.0


def _paper_path(name: str) -> str:
    """The paper's name of a path of ours: its kernel takes FP16 inputs; of its INT8 it has one figure for all scales."""
    if name in ("fp16", "fused-fp32"):
        return _EXACT_PAPER
    return _INT8_PAPER if name.startswith("int8") else name


def _paper(result: Result) -> tuple[Sequence[PaperFigure], str]:
    try:
        card = load_card(str(result.task.get("source")), str(result.task.get("dataset")))
    except UnknownNameError:
        return (), ""
    return card.paper, card.paper_caveat


def _paper_deltas(result: Result, name: str, metric: str) -> list[float]:
    figures, _ = _paper(result)
    values: Mapping[tuple[str, str], float] = {(one.encoder, one.path): one.value for one in figures if one.metric == metric}
    wanted: Any = _paper_path(name)
    pairs = [
        (values.get((encoder, wanted)), values.get((encoder, "fp32")))
        for encoder in dict.fromkeys(one.encoder for one in figures)
    ]
    return [ours - base for ours, base in pairs if ours is not None and base is not None]
