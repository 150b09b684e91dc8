"""The words and tables of an Atlas, for its pages, the console and CSV."""

from __future__ import annotations

from typing import Any

from maxsim_eval.atlas.judging import Atlas, Row
from maxsim_eval.data.subsets import describe
from maxsim_eval.quantities import size_text
from maxsim_eval.report.tables import Table
from maxsim_eval.report.values import about

FIGURES = ["change", "low", "high", "verdict", "p_adjusted", "queries_needed"]
NONE = "-"


def headline(atlas: Atlas) -> str:
    """The answer in one sentence: the smallest storage that is equivalent."""
    names = " and ".join(atlas.metrics)
    first = atlas.rows[0] if atlas.rows else None
    best = atlas.smallest()
    if best is None or first is None:
        return f"no entry is equivalent within {atlas.within:g} in {names}{_would_tell(atlas)}"
    ratio = _ratio(atlas, best)
    smaller = f", {ratio:.1f}x smaller than FP16" if ratio is not None else ""
    return (
        f"{best.name} is the smallest storage that is equivalent within {atlas.within:g} in {names}: "
        f"{size_text(round(best.document_bytes or 0))} a document{smaller}"
    )


def _would_tell(atlas: Atlas) -> str:
    needed = [change.queries_needed for row in atlas.rows for change in row.changes.values() if change.queries_needed]
    return f"; about {about(min(needed))} queries would decide the nearest" if needed else ""


def warnings(atlas: Atlas) -> list[str]:
    """What a reader must know before believing the table."""
    found = [str(line) for line in atlas.task.get("warnings", ())]
    for row in atlas.rows:
        if row.control and row.verdict != "different":
            found.append(
                f"the negative control {row.name} is not found different: these queries cannot tell a broken codec from a good one"
            )
    return found


def _fp16_bytes(atlas: Atlas) -> float | None:
    tokens, documents, dim = atlas.task.get("document_tokens"), atlas.task.get("documents"), atlas.encoder.get("dim")
    return 2.0 * tokens / documents * dim if tokens and documents and dim else None


def _ratio(atlas: Atlas, row: Row) -> float | None:
    whole = _fp16_bytes(atlas)
    return None if whole is None or not row.document_bytes else whole / row.document_bytes


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _interval(low: float, high: float) -> str:
    return "no change" if low == high == 0 else f"{low:+.4f} to {high:+.4f}"


def main_table(atlas: Atlas) -> Table:
    """A row an entry, smallest first, the reference on top."""
    main = atlas.metrics[0]
    rest = list(atlas.metrics[1:])
    heads = ["entry", "bytes a document", "smaller than FP16", main, "change", f"interval ({atlas.level:.2%})"]
    heads += [f"{metric}, change" for metric in rest] + ["search s", "verdict", "Pareto front"]
    rows = []
    for row in [*atlas.rows[:1], *sorted(atlas.rows[1:], key=_by_size)]:
        if row.error:
            rows.append([row.name, *[NONE] * (len(heads) - 3), "failed", ""])
            continue
        changes = [row.changes.get(metric) for metric in atlas.metrics]
        first = changes[0]
        cells = [row.name, _number(row.document_bytes, ",.0f"), _times(_ratio(atlas, row)), f"{row.metrics[main]:.4f}"]
        cells += ["", ""] if first is None else [f"{first.mean:+.4f}", _interval(first.low, first.high)]
        cells += ["" if change is None else f"{change.mean:+.4f}" for change in changes[1:]]
        rows.append([*cells, _number(row.seconds.get("search"), ".2f"), _verdict(row), ", ".join(row.fronts)])
    return Table("Every way of storing", heads, rows)


def _verdict(row: Row) -> str:
    """The verdict; where it is inconclusive, with the number of queries that would decide, if known."""
    if row.control:
        return f"{row.verdict} (control)"
    open_ = [change.queries_needed for change in row.changes.values() if change.verdict == "inconclusive"]
    if row.verdict != "inconclusive" or not all(open_):
        return row.verdict
    return f"inconclusive ({about(max(filter(None, open_)))} queries)"


def brief_lines(atlas: Atlas) -> list[str]:
    """What fits a terminal, aligned: size, change of the first metric, verdict; smallest first."""
    lines = [("", "bytes", atlas.metrics[0], "")]
    for row in [*atlas.rows[:1], *sorted(atlas.rows[1:], key=_by_size)]:
        change = row.changes.get(atlas.metrics[0])
        shown = _number(row.metrics.get(atlas.metrics[0]), ".4f") if change is None else f"{change.mean:+.4f}"
        lines.append(
            (row.name, _number(row.document_bytes, ",.0f"), shown, f"{row.verdict} (control)" if row.control else row.verdict)
        )
    wide = [max(len(line[place]) for line in lines) for place in range(3)]
    return [
        f"{name:<{wide[0]}}  {size:>{wide[1]}}  {change:>{wide[2]}}  {verdict}".rstrip()
        for name, size, change, verdict in lines
    ]


def _times(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.1f}x"


def _by_size(row: Row) -> tuple[bool, float]:
    return (row.document_bytes is None, row.document_bytes or 0.0)


def loss_table(atlas: Atlas) -> Table | None:
    """Losses by cause, of the rows that have them; None: no row has."""
    rows = [
        [row.name, loss.metric, *(_part(-part) for part in (loss.total, loss.truncation, loss.candidates, loss.scores)),
         "no effect" if loss.ties == (0.0, 0.0) else f"{loss.ties[0]:+.4f} to {loss.ties[1]:+.4f}"]
        for row in atlas.rows
        for loss in row.losses
    ]  # fmt: skip
    heads = ["entry", "metric", "change", "by length", "by candidates", "by scores", "order of ties"]
    return Table("Where it is lost", heads, rows) if rows else None


def _part(change: float) -> str:
    return f"{change:+.4f}" if abs(change) >= 5e-5 else "0"


def error_lines(atlas: Atlas) -> list[str]:
    """Entries that failed, and why."""
    return [f"{row.name}: {row.error}" for row in atlas.rows if row.error]


def definitions(atlas: Atlas) -> Table:
    """What each entry is."""
    return Table("Entries", ["entry", "what it is"], [[row.name, row.description] for row in atlas.rows if not row.error])


def facts_line(atlas: Atlas) -> str:
    """The task, the encoder, the depth of the rankings and, where there are limits, what they left, in one line."""
    task, encoder = atlas.task, atlas.encoder
    limits = task.get("limits")
    subset = "" if limits is None else f"; SUBSET: {describe(limits)}, figures are not those of the whole collection"
    return (
        f"{task.get('source')}/{task.get('dataset')} {task.get('split')}: {task.get('queries'):,} queries, {task.get('documents'):,} "
        f"documents; {encoder.get('name')}, d = {encoder.get('dim')}, {encoder.get('dtype')}; top {atlas.k}{subset}"
    )


def reading() -> list[str]:
    """How the table is to be read."""
    return [
        "Bytes: the mean of a document as it is stored, codebooks included; of a reranked entry also the tokens that it reranks with.",
        "Intervals hold together: each is so wide that all of them cover their true values in 95% of samples (Bonferroni).",
        "Verdict: equivalent where the whole interval of every metric lies within the bound, different where one lies outside; else "
        "about how many queries would tell.",
        "Search: seconds for all queries on this machine, scores and the best of them; storing and reading back are not in it.",
    ]


def figures(atlas: Atlas) -> tuple[list[str], list[list[Any]]]:
    """Every figure of every row: column names and rows of plain values."""
    columns = [
        "entry",
        "kind",
        "document_bytes",
        "search_seconds",
        "store_seconds",
        "verdict",
        "control",
        "bytes_front",
        "seconds_front",
        "error",
    ]
    for metric in atlas.metrics:
        columns += [metric, *(f"{metric} {name}" for name in FIGURES)]
    rows = []
    for row in atlas.rows:
        cells: list[Any] = [
            row.name,
            row.kind,
            row.document_bytes,
            row.seconds.get("search"),
            row.seconds.get("store"),
            row.verdict,
        ]
        cells += [row.control, "bytes" in row.fronts, "seconds" in row.fronts, row.error]
        for metric in atlas.metrics:
            change = row.changes.get(metric)
            values = (
                [None] * len(FIGURES) if change is None else [change.mean, *(getattr(change, name) for name in FIGURES[1:])]
            )
            cells += [row.metrics.get(metric), *values]
        rows.append(cells)
    return columns, rows
