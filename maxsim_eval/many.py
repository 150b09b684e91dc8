"""Several datasets with one encoder: `evaluate_datasets`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from maxsim_eval.api import DEFAULT_PATHS, evaluate
from maxsim_eval.comparison.metrics import DEFAULT_METRICS, parse_metric
from maxsim_eval.data.loading import load_task
from maxsim_eval.errors import UsageError
from maxsim_eval.report.averages import Results, name_of
from maxsim_eval.report.words import METRIC
from maxsim_eval.scoring.own_functions import Chosen
from maxsim_eval.subject import as_tuple
from maxsim_eval.types import Encoder, Result, Task


def evaluate_datasets(
    datasets: Iterable[str | Task],
    encoder: Encoder | str,
    paths: Iterable[Chosen] = DEFAULT_PATHS,
    *,
    source: str = "beir",
    data_dir: Path | str = "datasets",
    out_dir: Path | str | None = None,
    metric: str | None = None,
    **options: Any,
) -> Results:
    """Evaluate datasets one after the other; returns their Results, which can be shown with averages as a table, LaTeX or data frame.

    Args:
        datasets: names of `source` in `data_dir`, or tasks.
        out_dir: each report goes into a folder below it, of its dataset's name (`name_of`); None writes nothing.
        metric: the metric that the table of averages shows, one of `metrics`; None: nDCG@10 where that is among them, else the first.
        options: further options of `evaluate`.

    Raises:
        UsageError: no list of datasets, none in it, or one named twice; a metric that is not computed. MaxsimEvalError: as in
            `evaluate`, for the first dataset that cannot be evaluated.
    """
    if isinstance(datasets, str | Task):  # a text would be taken letter by letter
        name = datasets if isinstance(datasets, str) else datasets.dataset
        raise UsageError(f"datasets: got {name!r} by itself, need a list: [{name!r}]")
    options["metrics"] = as_tuple("metrics", options.get("metrics", DEFAULT_METRICS))
    paths, shown = as_tuple("paths", paths), _shown(metric, options["metrics"])
    results: dict[str, Result] = {}
    for one in datasets:
        task = one if isinstance(one, Task) else load_task(source, one, data_dir=data_dir, quiet=options.get("quiet", False))
        name = name_of(task.source, task.dataset, str(task.provenance.get("id", task.dataset)))
        if name in results:
            raise UsageError(f"datasets: {name!r} is named twice")
        folder = None if out_dir is None else Path(out_dir) / name
        results[name] = evaluate(task, encoder, paths, out_dir=folder, **options)
    if not results:
        raise UsageError("datasets: got none, need the name of one")
    return Results(results, shown)


def _shown(metric: str | None, metrics: Sequence[str]) -> str:
    """The name, as it is in the results, of the metric that the table shows."""
    computed = {parse_metric(name).canonical: name for name in metrics}
    if not computed:
        raise UsageError("metrics: got none, need one or more for the table of averages")
    if metric is None:
        return computed.get(METRIC, metrics[0])
    canonical = parse_metric(metric).canonical
    if canonical not in computed:
        raise UsageError(f"metric: got {metric!r}, need one of those that are computed (metrics=): {', '.join(metrics)}")
    return computed[canonical]
