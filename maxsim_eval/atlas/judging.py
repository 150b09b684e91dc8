"""Verdicts over the whole grid, Pareto fronts, and the smallest storage that loses nothing that matters."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxsim_eval.atlas.attribution import Loss
from maxsim_eval.atlas.running import Finished
from maxsim_eval.comparison.statistics import Difference, judge_paths
from maxsim_eval.types import PathResult

LEVEL = 0.95  # for all intervals together
RESAMPLES = 20_000


@dataclass(frozen=True)
class Row:
    """One entry of an atlas.

    Args:
        name, kind, description: what it is.
        metrics: means over queries; empty where `error` says why there are none.
        changes: metric -> its Difference from the reference (interval, verdict); empty for the reference.
        document_bytes: mean bytes of a document; None: not known.
        seconds: `search` and `store`, for all queries.
        fronts: the Pareto fronts it is on: "bytes", "seconds".
        losses: by metric, where an entry that reranks all of this one's documents was evaluated too (as for every run of another
            engine); else none.
    """

    name: str
    kind: str
    description: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    changes: Mapping[str, Difference] = field(default_factory=dict)
    document_bytes: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    fronts: tuple[str, ...] = ()
    losses: Sequence[Loss] = ()
    error: str = ""
    control: bool = False

    @property
    def verdict(self) -> str:
        """`equivalent` in all metrics, `different` in any, else `inconclusive`; without changes `reference` or `failed`."""
        found = {change.verdict for change in self.changes.values()}
        if not found:
            return "failed" if self.error else "reference"
        return "different" if "different" in found else "equivalent" if found == {"equivalent"} else "inconclusive"


@dataclass(frozen=True, repr=False)
class Atlas:
    """What every way of storing costs, for one task and one encoder; the first row is the reference.

    `level` is the coverage of each interval, so wide that all of them hold together in 95% of samples (Bonferroni).
    """

    task: Mapping[str, Any]
    encoder: Mapping[str, Any]
    rows: Sequence[Row]
    metrics: Sequence[str]
    within: float
    k: int
    level: float
    environment: Mapping[str, Any]
    command: Sequence[str] = ()
    created: str = ""

    def smallest(self) -> Row | None:
        """The row of the fewest bytes a document among those equivalent in every metric, controls aside; None: there is none."""
        good = [row for row in self.rows if row.verdict == "equivalent" and row.document_bytes is not None and not row.control]
        return min(good, key=lambda row: row.document_bytes or 0.0, default=None)

    def to_dataframe(self) -> Any:
        """A pandas DataFrame, one row an entry; needs pandas."""
        return importlib.import_module("pandas").DataFrame(*self._frame())

    def _frame(self) -> tuple[list[list[Any]], None, list[str]]:
        page = importlib.import_module("maxsim_eval.atlas.page")
        columns, rows = page.figures(self)
        return rows, None, columns

    def report(self, folder: Path | str) -> Path:
        """Write atlas.html, atlas.md, atlas.csv, atlas.svg and atlas.json into a folder; returns the page's path."""
        importlib.import_module("maxsim_eval.atlas.writing").write_atlas(self, folder)
        return Path(folder) / "atlas.html"

    def __repr__(self) -> str:
        page = importlib.import_module("maxsim_eval.atlas.page")
        return f"Atlas({self.task.get('dataset')}, {self.encoder.get('name')}, {len(self.rows)} rows: {page.headline(self)})"


def verdicts(
    reference: str, done: Mapping[str, Finished], metrics: Sequence[str], within: float
) -> tuple[dict[str, dict[str, Difference]], float]:
    """Every entry's differences from the reference, and the level of their intervals."""
    others = {name: _as_path(found) for name, found in done.items() if name != reference}
    bounds = {name: dict.fromkeys(metrics, within) for name in others}
    level = 1 - (1 - LEVEL) / max(1, len(others) * len(metrics))
    return judge_paths(_as_path(done[reference]), others, bounds, level=level, resamples=RESAMPLES), level


def _as_path(found: Finished) -> PathResult:
    return PathResult(metrics=found.metrics, per_query=found.per_query, seconds={})


def front(rows: Sequence[Row], cost: Callable[[Row], float | None], metric: str) -> set[str]:
    """Names of the rows that no other beats: none is as good in the metric for less, or better for as little."""
    known = [(cost(row), row) for row in rows if cost(row) is not None and metric in row.metrics and not row.control]
    found, best = set(), float("-inf")
    for _, row in sorted(known, key=lambda one: (one[0] or 0.0, -one[1].metrics[metric])):
        if row.metrics[metric] > best:
            found.add(row.name)
            best = row.metrics[metric]
    return found
