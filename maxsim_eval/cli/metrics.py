"""The command `metrics`: metrics of TREC runs of any tool, with what was counted, and paired tests where there are several."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maxsim_eval.cli.options import AsJson, metric_names
from maxsim_eval.cli.output import answer, print_json
from maxsim_eval.errors import UsageError
from maxsim_eval.printing import printable

if TYPE_CHECKING:
    from maxsim_eval.types import PathResult, Qrels, Run

SCHEMA = "maxsim-eval/metrics/1"


def metrics(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="TREC run files; first, without --qrels, the judgements."),
    ] = None,
    qrels: Annotated[Path | None, typer.Option(help="Judgements: TREC or BEIR qrels.")] = None,
    names: Annotated[
        str | None, typer.Option("--metrics", help="Comma-separated, as nDCG@10,R@100,ndcg_cut_10,ERR@20 (--list).")
    ] = None,
    per_query: Annotated[bool, typer.Option("--per-query", help="Also every query's values.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the names of metrics.")] = False,
    as_json: AsJson = False,
) -> None:
    """Metrics of TREC runs, by trec_eval's own code; a judged query without results scores 0, and that is said.

    Below the metrics stands how many of the judged queries the run has, how many it lacks (they count 0), and how many of its
    queries nobody judged (they are left out).

    Of several runs each is compared with the first: a paired randomisation test over the queries, Holm-corrected.

    Example: python evaluate.py metrics --qrels qrels.txt run.trec other.trec --metrics nDCG@10,R@100
    """
    from maxsim_eval.comparison.metrics import DEFAULT_METRICS, evaluate_run, known_metrics, means
    from maxsim_eval.data.trec import read_qrels, read_trec_run
    from maxsim_eval.report.result_json import jsonable
    from maxsim_eval.types import PathResult

    if listed:
        for name in known_metrics():
            answer(name)
        return
    judged_in, run_files = _sides(qrels, list(files or ()))
    chosen, judged = metric_names(names), read_qrels(judged_in)
    paths: dict[str, PathResult] = {}
    counts: dict[str, dict[str, int]] = {}
    for label, file in zip(_labels(run_files), run_files, strict=True):
        run = read_trec_run(file)
        counts[label] = _count(file, judged_in, run, judged)
        values = evaluate_run(run, judged, chosen or DEFAULT_METRICS)
        paths[label] = PathResult(means(values), values, {}, parity=None if not paths else {})
    tests = _tests(paths)
    if as_json:
        runs: dict[str, dict[str, Any]] = {
            label: {"metrics": path.metrics, "queries": counts[label], **({"per_query": path.per_query} if per_query else {})}
            for label, path in paths.items()
        }
        found = {"schema": SCHEMA, "qrels": str(judged_in), "runs": runs, **({"tests": tests} if tests else {})}
        print_json(jsonable(found))  # of a single query the interval is infinite
        return
    _print(paths, counts, tests, judged if per_query else ())


def _sides(qrels: Path | None, files: list[Path]) -> tuple[Path, list[Path]]:
    """The files of judgements and of runs; a run in the place of the judgements is refused."""
    judged, runs = (files[0], files[1:]) if qrels is None and files else (qrels, files)
    if judged is None or not runs:
        raise UsageError(
            f"metrics: got {'no' if judged is None else 'only one'} file, need judgements and a run: --qrels FILE RUN..."
        )
    if _is_run(judged, piped=False) and any(not _is_run(file, piped=True) for file in runs):
        other = next(file for file in runs if not _is_run(file, piped=True))
        raise UsageError(
            f"{judged}: is a run, where the judgements are wanted; swapped with {other}? --qrels FILE RUN... says which is which"
        )
    return judged, runs


def _is_run(file: Path, *, piped: bool) -> bool:
    """Whether the first line has a run's six columns; of a pipe `piped`, without a look: what is read of it is gone."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            return piped
        with open(file, encoding="utf-8") as handle:
            fields = next((line.split() for line in handle if line.strip()), [])
    except (OSError, UnicodeDecodeError):
        return False  # what reads it says why
    return len(fields) == 6


def _labels(files: Sequence[Path]) -> list[str]:
    """A short name of each file: its own, or its path where two share one."""
    names = [file.name for file in files]
    labels = [file.name if names.count(file.name) == 1 else str(file) for file in files]
    if len(set(labels)) < len(labels):
        raise UsageError(f"metrics: the run {next(label for label in labels if labels.count(label) > 1)} is named twice")
    return labels


def _count(file: Path, qrels: Path, run: Run, judged: Qrels) -> dict[str, int]:
    """How many queries are judged, in the run, missing from it, and in it without a judgement.

    Raises:
        DataError: no judged query is in the run.
    """
    from maxsim_eval.report.comparing import missing_queries

    missing = missing_queries(file, run, qrels, judged)
    extra = [query for query in run.rankings if query not in judged]
    if missing:
        warnings.warn(
            f"{file}: {len(missing)} of {len(judged)} judged queries are not in the run, first {missing[0]!r}; they count 0 in every "
            "metric",
            stacklevel=2,
        )
    found = len(judged) - len(missing)
    return {"judged": len(judged), "in_run": found, "missing": len(missing), "not_judged": len(extra)}


def _tests(paths: Mapping[str, PathResult]) -> dict[str, Any]:
    """Run -> metric -> its difference from the first run: mean, interval, p, Holm-corrected."""
    if len(paths) < 2:
        return {}
    from maxsim_eval.comparison.verdicts import with_statistics

    first, *others = paths
    judged = with_statistics(paths, first)
    keys = ("mean", "low", "high", "p_adjusted", "changed", "queries")
    return {
        label: {
            metric: {key: found[key] for key in keys} for metric, found in (judged[label].parity or {})["statistics"].items()
        }
        for label in others
    }


def _print(
    paths: Mapping[str, PathResult], counts: Mapping[str, Any], tests: Mapping[str, Any], queries: Collection[str]
) -> None:
    """Print the metrics, what was counted, and the values of these `queries`, of which a metric may leave some out (AnyHit@k)."""
    first, *others = paths
    names = list(paths[first].metrics)
    width = max(map(len, [*names, "queries"]))
    wide = [max(len(label), 8) for label in others]
    if others:
        heads = "".join(f"  {label:>{size}} {'change':>8} {'p':>7}" for label, size in zip(others, wide, strict=True))
        answer(f"{'':{width}}  {first:>8}{heads}")
    for name in names:
        line = f"{name:{width}}  {paths[first].metrics[name]:{max(len(first), 8) if others else 1}.4f}"
        for label, size in zip(others, wide, strict=True):
            test = tests[label].get(name, {})
            line += f"  {paths[label].metrics[name]:{size}.4f} {test.get('mean', float('nan')):+8.4f} {test.get('p_adjusted', 1):7.3f}"
        answer(line)
    for label, count in counts.items():
        of = f" in {label}" if others else " in the run"
        here = f"{count['in_run']} of {count['judged']} judged queries{of}"
        counted = f"; {count['missing']} judged ones are not and count 0" if count["missing"] else ""
        ignored = f"; {count['not_judged']} of the run's are not judged and are left out" if count["not_judged"] else ""
        answer(f"{here}{counted}{ignored}")
    for label, path in paths.items():
        for query in queries:
            values = [f"{name}={path.per_query[name][query]:.4f}" for name in names if query in path.per_query[name]]
            if values:
                typer.echo("\t".join(map(printable, (label, query, " ".join(values)))))
