"""Several datasets with one encoder: `evaluate_datasets`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from maxsim_eval.api import DEFAULT_PATHS, evaluate
from maxsim_eval.data.loading import load_task
from maxsim_eval.errors import UsageError
from maxsim_eval.report.averages import Results
from maxsim_eval.report.words import METRIC
from maxsim_eval.scoring.own_functions import Chosen
from maxsim_eval.types import Encoder, Result, Task


def evaluate_datasets(
    datasets: Iterable[str | Task],
    encoder: Encoder | str,
    paths: Sequence[Chosen] = DEFAULT_PATHS,
    *,
    source: str = "beir",
    data_dir: Path | str = "datasets",
    out_dir: Path | str | None = None,
    metric: str = METRIC,
    **options: Any,
) -> Results:
    """Evaluate datasets one after the other; returns their Results, which can be shown with averages as a table, LaTeX or data frame.

    Args:
        datasets: names of `source` in `data_dir`, or tasks.
        out_dir: each report goes into a folder below it, named after its dataset; None writes nothing.
        metric: the metric that the table of averages shows.
        options: further options of `evaluate`.

    Raises:
        UsageError: no dataset, or one named twice. MaxsimEvalError: as in `evaluate`, for the first dataset that cannot be evaluated.
    """
    results: dict[str, Result] = {}
    for one in datasets:
        task = one if isinstance(one, Task) else load_task(source, one, data_dir=data_dir, quiet=options.get("quiet", False))
        if task.dataset in results:
            raise UsageError(f"datasets: {task.dataset!r} is named twice")
        folder = None if out_dir is None else Path(out_dir) / task.dataset
        results[task.dataset] = evaluate(task, encoder, paths, out_dir=folder, **options)
    if not results:
        raise UsageError("datasets: got none, need the name of one")
    return Results(results, metric)
