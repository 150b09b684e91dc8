"""The tables of every report, made from a Result alone: rows of text that each report draws in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from maxsim_eval.comparison.bounds import NAMES
from maxsim_eval.comparison.verdicts import canonical_name
from maxsim_eval.report.values import about, entries, entry, figure, known, mapping, p_value, signed
from maxsim_eval.report.words import change_text, identical_text, metric_shown, survivors_text, verdict
from maxsim_eval.types import Result

_QUERIES, _DOCUMENTS = 5, 3  # of each path, among those that changed most; result.json names more
_MIB = 1 << 20
INTERVAL = "interval"


@dataclass(frozen=True)
class Table:
    """One table of a report: a title, column heads (first: the row names) and rows of text."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def _change(value: Any) -> str:
    return f"({signed(value)})"


def _signed(value: Any) -> str:
    """A difference; 0 says that there is none, +0.00000 (never -0.00000) that it is smaller than the digits shown."""
    if not known(value):
        return "-"
    return "0" if value == 0 else f"{round(value, 5) + 0.0:+.5f}"


def summary(result: Result) -> Table:
    """A row for each path: what most readers want to know first."""
    metric = metric_shown(result)
    recalls = [name for path in result.paths.values() for name in path.metrics if canonical_name(name).startswith("Recall@")]
    recall = "Recall@100" if "Recall@100" in recalls else next(iter(recalls[::-1]), None)
    level, rows = None, []
    for name, path in result.paths.items():
        found = mapping(path.parity, "statistics", metric or "")
        level = entry(path.parity, "statistics_settings", "level") or level
        low, high = (entry(found, end) for end in ("low", "high"))
        wide = known(low) and known(high) and (low or high)
        row = [name, *(figure(path.metrics.get(shown), ".4f") for shown in (metric,) if shown)]
        row += ["" if path.parity is None or metric is None else change_text(result, name, metric)]
        row += [f"{low:+.4f} to {high:+.4f}" if wide else ""]
        row += [figure(path.metrics.get(shown), ".4f") for shown in (recall,) if shown]
        row += [
            figure(entry(path.parity, "spearman", "mean"), ".6f", ""),
            figure(entry(path.parity, "overlap", "@10"), ".4f", ""),
        ]
        rows.append([*row, verdict(result, name)])
    interval = f"{level:.0%} interval" if known(level) else INTERVAL
    heads = [
        "path",
        *([metric] if metric else []),
        "change",
        interval,
        *([recall] if recall else []),
        "Spearman",
        "top-10",
        "verdict",
    ]
    keep = [place for place, head in enumerate(heads) if place in (0, len(heads) - 1) or any(row[place] for row in rows)]
    return Table("", [heads[place] for place in keep], [[row[place] for place in keep] for row in rows])


def _metric_table(result: Result) -> Table:
    names = list(dict.fromkeys(name for path in result.paths.values() for name in path.metrics))
    rows = []
    for name in names:
        row = [name]
        for path in result.paths.values():
            text = figure(path.metrics.get(name), ".4f")
            if path.parity is not None:
                text += " " + _change(entry(path.parity, "delta", name))
            row.append(text)
        rows.append(row)
    title = f"Metrics (change against {result.reference})" if result.reference else "Metrics"
    return Table(title, ["metric", *result.paths], rows)


def _verdict(found: Any) -> str:
    needed = entry(found, "queries_needed")
    return f"{entry(found, 'verdict') or '-'}" + (f" (needs about {about(needed)} queries)" if known(needed) else "")


def _statistics_table(result: Result) -> Table:
    rows, level = [], None
    for name, path in result.paths.items():
        level = entry(path.parity, "statistics_settings", "level") or level
        for metric, found in mapping(path.parity, "statistics").items():
            low, high = (_signed(entry(found, end)) for end in ("low", "high"))
            rows.append(
                [
                    f"{name}, {metric}",
                    _signed(entry(found, "mean")),
                    f"{low} to {high}",
                    f"{figure(entry(found, 'changed'), 'd')} of {figure(entry(found, 'queries'), 'd')}",
                    p_value(entry(found, "p_adjusted")),
                    figure(entry(found, "bound"), "g"),
                    _verdict(found),
                ]
            )
    interval = f"{level:.0%} interval" if known(level) else "interval"
    columns = ["", "change", interval, "queries changed", "p (Holm)", "bound", "verdict"]
    return Table(f"Differences from {result.reference}", columns, rows)


def _order_text(parity: Mapping[str, Any]) -> str:
    order = mapping(parity, "identical_order")
    return f"{order.get('identical')} of {order['queries']} queries" if known(order.get("queries")) else "-"


def _spearman_queries(parity: Mapping[str, Any]) -> str:
    found = mapping(parity, "spearman")
    if not known(found.get("queries")) or not (found["queries"] or found.get("constant")):
        return "-"
    text = str(found["queries"])
    if found.get("sampled"):
        text += " sampled"
    if found.get("constant"):
        text += f", {found['constant']} constant left out"
    return text


def _same_inputs(parity: Mapping[str, Any]) -> str:
    same = entry(parity, "reference_reads_same_inputs")
    return "-" if not isinstance(same, bool) else "yes" if same else "no"


def _parity_table(result: Result) -> Table:
    compared = {name: path.parity for name, path in result.paths.items() if path.parity is not None}

    def every(*keys: str) -> list[str]:
        return list(dict.fromkeys(key for parity in compared.values() for key in mapping(parity, *keys)))

    rows: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("Spearman, mean", lambda p: figure(entry(p, "spearman", "mean"), ".6f")),
        *(
            (f"Spearman, {at}% of queries below", lambda p, at=at: figure(entry(p, "spearman", "percentiles", at), ".6f"))
            for at in every("spearman", "percentiles")
        ),
        ("Spearman, min", lambda p: figure(entry(p, "spearman", "min"), ".6f")),
        ("Spearman, queries", _spearman_queries),
        *((f"top-{cut[1:]} overlap", lambda p, cut=cut: figure(entry(p, "overlap", cut), ".4f")) for cut in every("overlap")),
        *(
            (f"top-{cut[1:]} in the same order", lambda p, cut=cut: figure(entry(p, "same_order", cut), ".4f"))
            for cut in every("same_order")
        ),
        (f"same top-{result.k} order", _order_text),
        (NAMES["max_abs_error"], lambda p: figure(entry(p, "max_abs_error"), ".3g")),
        (NAMES["mean_abs_error"], lambda p: figure(entry(p, "mean_abs_error"), ".3g")),
        (NAMES["max_rel_error"], lambda p: figure(entry(p, "max_rel_error"), ".3g")),
        (NAMES["mean_rel_error"], lambda p: figure(entry(p, "mean_rel_error"), ".3g")),
        (NAMES["mismatched_finite"], lambda p: figure(entry(p, "mismatched_finite"), "d")),
        ("reads the same embeddings", _same_inputs),
    ]
    body = [[name, *(text(parity) for parity in compared.values())] for name, text in rows] if compared else []
    body = [row for row in body if any(cell != "-" for cell in row[1:])]  # a comparison of run files has no scores
    return Table(f"Parity with {result.reference}", ["", *compared], body)


def _tie_text(found: Any) -> str:
    queries = entry(found, "queries_affected")
    if not known(queries):
        return "-"
    if not queries:
        return "no effect"
    low, high = (figure(entry(found, end), ".4f") for end in ("low", "high"))
    return f"{low} to {high} ({queries} queries)"


def _tie_table(result: Result) -> Table:
    bounds = {name: path.tie_bounds for name, path in result.paths.items() if path.tie_bounds}
    metrics = list(dict.fromkeys(metric for found in bounds.values() for metric in found))
    rows = [[metric, *(_tie_text(found.get(metric)) for found in bounds.values())] for metric in metrics]
    touched = [row for row in rows if any(cell not in ("-", "no effect") for cell in row[1:])]
    if rows and not touched:
        touched = [["all metrics", *("no effect" for _ in bounds)]]
    return Table("Equal scores: means in their worst and best order", ["", *bounds], touched)


def _moved_text(moved: Any) -> str:
    texts = []
    for found in entries(moved):
        before, after = (entry(found, key) for key in ("reference_rank", "rank"))
        relevance = entry(found, "relevance")
        judged = f", relevance {relevance}" if known(relevance) else ""
        texts.append(f"{entry(found, 'document')} ({figure(before, 'd')} to {figure(after, 'd')}{judged})")
    return "; ".join(texts[:_DOCUMENTS]) + ("; ..." if len(texts) > _DOCUMENTS else "")


def _changed_tables(result: Result) -> list[Table]:
    found = []
    for name, path in result.paths.items():
        changed = entry(path.parity, "most_changed")
        rows = [
            [
                str(entry(one, "query")),
                str(entry(one, "metric")),
                figure(entry(one, "reference"), ".4f"),
                f"{figure(entry(one, 'value'), '.4f')} {_change(entry(one, 'delta'))}",
                _moved_text(entry(one, "moved")),
            ]
            for one in entries(changed)[:_QUERIES]
        ]
        columns = ["query", "metric", str(result.reference), name, "documents that moved (from rank to rank)"]
        found.append(Table(f"Queries that changed most: {name}", columns, rows))
    return found


def _seconds_table(result: Result) -> Table:
    names = list(dict.fromkeys(name for path in result.paths.values() for name in path.seconds))
    rows = [[name, *(figure(path.seconds.get(name), ".3f") for path in result.paths.values())] for name in names]
    return Table("Seconds", ["", *result.paths], rows)


def _search_table(result: Result) -> Table:
    """The work of certified paths, and which run files they equal."""
    found = {name: path.search for name, path in result.paths.items() if path.search is not None}
    rows: list[tuple[str, Callable[[str, Mapping[str, Any]], str]]] = [
        ("documents scored exactly, a query", lambda _, search: survivors_text(search)),
        (
            "MiB read: codes, full precision",
            lambda _, search: " + ".join(_mib(search, key) for key in ("code_bytes", "row_bytes")),
        ),
        ("MiB of full precision", lambda _, search: _mib(search, "stored_bytes")),
        (
            "pieces by brute force",
            lambda _, search: " of ".join(figure(entry(search, key), "d") for key in ("brute_pieces", "pieces")),
        ),
        ("run file", lambda _, search: identical_text(search) or "-"),
        ("seconds beside that path", lambda name, search: _beside(result, name, search)),
    ]
    body = [[title, *(text(name, search) for name, search in found.items())] for title, text in rows] if found else []
    return Table("Certified search", ["", *found], body)


def _mib(found: Mapping[str, Any], key: str) -> str:
    size = entry(found, key)
    return f"{size / _MIB:,.1f}" if known(size) else "-"


def _beside(result: Result, name: str, search: Mapping[str, Any]) -> str:
    others = [other for other in mapping(search, "identical_to") if other in result.paths]
    return " beside ".join(figure(result.paths[path].seconds.get("total"), ".3f") for path in (name, *others[:1]))


def _memory_table(result: Result) -> Table:
    rows = []
    for key, name in (("host_peak_bytes", "process"), ("device_peak_bytes", "device")):
        sizes = [entry(path.memory, key) for path in result.paths.values()]
        if any(map(known, sizes)):
            rows.append([name, *(f"{size / _MIB:,.0f}" if known(size) else "-" for size in sizes)])
    return Table("Peak memory (MiB)", ["", *result.paths], rows)


def tables(result: Result) -> list[Table]:
    """Tables of figures by path, empty ones left out: metrics, parity, certified search, ties, seconds, memory."""
    kinds = (_metric_table, _parity_table, _search_table, _tie_table, _seconds_table, _memory_table)
    found = [kind(result) for kind in kinds]
    return [table for table in found if table.rows]


def every_table(result: Result) -> list[Table]:
    """`tables`, and after the metrics the differences with their verdicts and the queries that changed most."""
    metrics, *others = tables(result) or [Table("", [], [])]
    found = [metrics, _statistics_table(result), *_changed_tables(result), *others]
    return [table for table in found if table.rows]
