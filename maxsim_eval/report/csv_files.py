"""CSV of a Result: `metrics.csv`, one row for each path and metric, and `per_query.csv`, one for each path, metric and query.

Comma-separated UTF-8 with a header; lines end in a line feed, numbers are written so that they read back as they were, and what does
not exist is empty. Columns may be added at the end. Ids come from datasets: one that a spreadsheet would run as a formula has an
apostrophe before it, which makes it text there.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from maxsim_eval.report.values import entry
from maxsim_eval.types import PathResult, Result

_STATISTICS = ("low", "high", "p_value", "p_adjusted", "bound", "verdict", "queries_needed", "queries", "changed")
_TIES = {"tie_low": "low", "tie_high": "high", "tie_queries": "queries_affected"}
# Of those that begin with a sign or @ only what calls or joins something: "-1", "-x_9" and "@name" are ids of real datasets.
_FORMULA = re.compile(r"[=\t\r]|[-+@].*[^\w.+@-]", re.DOTALL)


def _cell(value: Any) -> Any:
    """None and numbers that are not finite are empty; the writer gives numbers their shortest exact form; no text is a formula."""
    if isinstance(value, str):
        return f"'{value}" if _FORMULA.match(value) else value
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


class _Lines(list[str]):
    """Rows of a CSV writer, their CR LF cut to LF: Python before 3.13 quotes a CR in a cell only where rows end in CR LF."""

    def write(self, row: str) -> None:
        self.append(row.removesuffix("\r\n") + "\n")


def _text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = _Lines()
    writer = csv.writer(lines, lineterminator="\r\n")
    writer.writerow(head)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return "".join(lines)


def metrics_csv(result: Result) -> str:
    """A row for each path and metric: mean, change against the reference, its interval, test and verdict, bounds over ties."""
    rows = []
    for name, path in result.paths.items():
        for metric, mean in path.metrics.items():
            judged = [entry(path.parity, "statistics", metric, key) for key in _STATISTICS]
            ties = [entry(path.tie_bounds, metric, key) for key in _TIES.values()]
            rows.append([name, metric, mean, entry(path.parity, "delta", metric), *judged, *ties])
    return _text(("path", "metric", "mean", "delta", *_STATISTICS, *_TIES), rows)


def per_query_csv(result: Result) -> str:
    """A row for each path, metric and query: the value, and its change against the reference."""
    reference = result.paths.get(result.reference or "")
    return _text(
        ("path", "metric", "query", "value", "delta"),
        (row for name, path in result.paths.items() for row in _query_rows(name, path, reference)),
    )


def _query_rows(name: str, path: PathResult, reference: PathResult | None) -> Iterator[Sequence[Any]]:
    for metric, values in path.per_query.items():
        others: Mapping[str, float] = {} if reference is None or reference is path else reference.per_query.get(metric, {})
        for query, value in values.items():
            yield name, metric, query, value, value - others[query] if query in others else None


CSV_FILES: dict[str, Callable[[Result], str]] = {"metrics.csv": metrics_csv, "per_query.csv": per_query_csv}
