"""Results of several datasets as one table: a column each and their average, as papers on BEIR print it; also in LaTeX and JSON."""

from __future__ import annotations

import html
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from maxsim_eval.data.irds import SOURCE as IRDS
from maxsim_eval.errors import UsageError
from maxsim_eval.report.tables import Table
from maxsim_eval.report.values import entry, figure, known, number
from maxsim_eval.report.words import METRIC
from maxsim_eval.types import Result

SCHEMA = "maxsim-eval/datasets/1"
AVERAGE = "Avg"
LEVEL = 0.05
_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


@dataclass(frozen=True, repr=False)
class Results:
    """Results by the names of their datasets, all of one encoder and the same paths.

    `Avg` is the mean over datasets, where the path has a value for each of them. The parts of a collection of source `beir`
    (`cqadupstack/android`, ...) count as one dataset, their mean. `*` marks a difference from the reference with p < 0.05 (the Result's
    paired randomisation test, Holm-corrected within its dataset).

    Raises:
        UsageError: no result has the metric under that name.
    """

    results: Mapping[str, Result]
    metric: str = METRIC

    def __post_init__(self) -> None:
        there = dict.fromkeys(name for one in self.results.values() for path in one.paths.values() for name in path.metrics)
        if self.metric not in there:  # a table of nothing but "-" would not say why
            raise UsageError(f"metric: no result holds {self.metric!r}, they hold: {', '.join(there) or 'none'}")

    def __getitem__(self, dataset: str) -> Result:
        return self.results[dataset]

    def __len__(self) -> int:
        return len(self.results)

    def values(self) -> dict[str, dict[str, float | None]]:
        """Path -> dataset (collections as one), then `Avg` -> mean of the metric; None where it is not known."""
        paths = list(dict.fromkeys(path for result in self.results.values() for path in result.paths))
        return {path: self._of_path(path) for path in paths}

    def _of_path(self, path: str) -> dict[str, float | None]:
        groups: dict[str, list[float | None]] = {}
        for dataset, result in self.results.items():
            value = result.paths[path].metrics.get(self.metric) if path in result.paths else None
            groups.setdefault(_column(dataset, result), []).append(value if known(value) else None)
        found = {name: _mean(values) for name, values in groups.items()}
        return found | {AVERAGE: _mean(list(found.values()))}

    def _differs(self, path: str, dataset: str) -> bool:
        result = self.results.get(dataset)  # the mean of a collection's parts has no test
        if result is None or path not in result.paths:
            return False
        tested = number(entry(result.paths[path].parity, "statistics", self.metric, "p_adjusted"))
        return tested is not None and tested < LEVEL

    @property
    def mark(self) -> str | None:
        """What `*` means; None where no result has a reference, so that nothing is marked."""
        reference = next((result.reference for result in self.results.values() if result.reference), None)
        tested = f"p < {LEVEL:g}, paired randomisation test, Holm-corrected within a dataset"
        return None if reference is None else f"* differs from {reference} ({tested})"

    def table(self) -> Table:
        """A row a path."""
        found = self.values()
        heads = list(next(iter(found.values()), {}))
        rows = [
            [path, *(figure(value, ".4f") + ("*" if self._differs(path, name) else "") for name, value in row.items())]
            for path, row in found.items()
        ]
        return Table(self.metric, ["path", *heads], rows)

    def to_latex(self) -> str:
        """A table for a paper (package booktabs): the best of a column bold, ties too."""
        found = self.values()
        heads = list(next(iter(found.values()), {}))
        best = {name: max(round(row[name] or 0.0, 4) for row in found.values()) for name in heads}

        def cell(path: str, name: str, value: float | None) -> str:
            text = figure(value, ".4f", "--")
            text = rf"\textbf{{{text}}}" if value is not None and round(value, 4) == best[name] else text
            return text + (r"$^{*}$" if self._differs(path, name) else "")

        rows = [
            " & ".join([_tex(path), *(cell(path, name, value) for name, value in row.items())]) for path, row in found.items()
        ]
        note = "; ".join(filter(None, (self.metric, self.mark)))
        return "\n".join(
            [
                rf"\begin{{tabular}}{{l{'r' * len(heads)}}}  % {note}",
                r"\toprule",
                " & ".join(["path", *map(_tex, heads)]) + r" \\",
                r"\midrule",
                *(row + r" \\" for row in rows),
                r"\bottomrule",
                r"\end{tabular}",
            ]
        )

    def to_json(self, jsonable: Callable[[Result], Any]) -> dict[str, Any]:
        """Every result and the averages."""
        results = {name: jsonable(result) for name, result in self.results.items()}
        return {"schema": SCHEMA, "metric": self.metric, "averages": self.values(), "results": results}

    def to_dataframe(self) -> Any:
        """A pandas DataFrame, one row a dataset, path and metric (`Result.to_dataframe`).

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        frames = {name: result.to_dataframe() for name, result in self.results.items()}
        return importlib.import_module("pandas").concat(frames, names=["dataset", None]).reset_index(level=0)

    def __repr__(self) -> str:
        table = self.table()
        rows = (f"{row[0]}: {', '.join(map(' '.join, zip(table.columns[1:], row[1:], strict=True)))}" for row in table.rows)
        return f"Results({self.metric}; {'; '.join(rows)})"

    def _repr_html_(self) -> str:
        table = self.table()
        heads = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.columns)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
        return f"<p>{html.escape(table.title)}</p><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def name_of(source: str, dataset: str, asked: str) -> str:
    """The name of a dataset among several, for its results and their folder; `asked` is the one it was loaded by.

    Of ir_datasets it is the id: ids that differ in their split have one dataset, and one would take the other's place.
    """
    return asked if source == IRDS else dataset


def _column(dataset: str, result: Result) -> str:
    """The column that a result counts in. Of other sources a slash is part of the name, as in ir_datasets' `beir/scifact/test`."""
    return dataset.partition("/")[0] if result.task.get("source") == "beir" else dataset


def _mean(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if len(numbers) == len(values) and values else None


def _tex(text: str) -> str:
    return re.sub(r"[\\~^&%$#_{}]", lambda found: _TEX.get(found[0], "\\" + found[0]), text)
