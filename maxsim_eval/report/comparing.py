"""The `compare` command: Results and TREC runs of any tool side by side, each against the first."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from maxsim_eval.comparison import parity
from maxsim_eval.comparison.metrics import DEFAULT_METRICS, evaluate_run, means
from maxsim_eval.comparison.ties import mean_bounds
from maxsim_eval.comparison.verdicts import canonical_name, with_statistics
from maxsim_eval.data.subsets import describe, describe_candidates
from maxsim_eval.data.trec import read_qrels, read_trec_run
from maxsim_eval.environment import environment
from maxsim_eval.errors import DataError, UnknownNameError, UsageError
from maxsim_eval.files import alone, writing
from maxsim_eval.printing import shown
from maxsim_eval.report.console import render_body
from maxsim_eval.report.result_json import RESULT_FILE, dump_json, jsonable, read_result
from maxsim_eval.report.writing import write_reports
from maxsim_eval.types import PathResult, Qrels, Result, Run

SCHEMA = "maxsim-eval/comparison/1"
SOURCE = "comparison"  # `task.source` of a comparison's Result


@dataclass(frozen=True)
class Input:
    """One thing compared: where it came from, its ranking, and the Result it is a path of (None for a plain run)."""

    label: str
    file: str
    run: Run
    result: Result | None = None
    path: PathResult | None = None
    name: str = ""  # of the path, where that is known (a run file of ours has it): its class gives the bounds


@dataclass(frozen=True)
class Compared:
    """One input with its metrics and, but for the first, its parity with the first."""

    label: str
    file: str
    path: PathResult

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metric -> mean."""
        return self.path.metrics

    @property
    def per_query(self) -> Mapping[str, Mapping[str, float]]:
        """Metric -> query id -> value."""
        return self.path.per_query

    @property
    def parity(self) -> Mapping[str, Any] | None:
        """Comparison with the first; None for the first."""
        return self.path.parity


@dataclass(frozen=True)
class Comparison:
    """Two or more inputs compared; the first is the reference."""

    inputs: tuple[Compared, ...]
    queries: int  # judged queries the means are over
    depth: int  # documents a query that the rankings are compared to
    qrels: str | None  # file of the judgements; None: the metrics stand in the results
    task: Mapping[str, Any]  # what was compared, as a Result has it
    encoder: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form (docs/result.md, schema `maxsim-eval/comparison/1`)."""
        entries = {
            entry.label: {
                "file": entry.file,
                "metrics": entry.metrics,
                **({} if entry.path.tie_bounds is None else {"tie_bounds": entry.path.tie_bounds}),
                **({} if entry.parity is None else {"parity": entry.parity}),
                "per_query": entry.per_query,
            }
            for entry in self.inputs
        }
        document = {
            "schema": SCHEMA,
            "reference": self.inputs[0].label,
            "qrels": self.qrels,
            "queries": self.queries,
            "depth": self.depth,
            "warnings": self.warnings,
            "inputs": entries,
        }
        plain: dict[str, Any] = jsonable(document)
        return plain

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return dump_json(self.to_dict()) + "\n"

    def to_result(self, command: Sequence[str] = ()) -> Result:
        """As a Result whose paths are the inputs: what every report is made from. Its run files are not beside it."""
        return Result(
            task={**self.task, "warnings": list(self.warnings)},
            encoder=self.encoder,
            k=self.depth,
            paths={entry.label: entry.path for entry in self.inputs},
            environment=environment(),
            command=list(command),
            reference=self.inputs[0].label,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def _split_selector(path: Path) -> tuple[Path, str | None]:
    """`result.json:int8` -> (result.json, "int8"); a name that is itself a file or folder has no selector."""
    text = str(path)
    if path.exists():
        return path, None
    for position, character in enumerate(text):
        if character == ":" and Path(text[:position]).exists():
            return Path(text[:position]), text[position + 1 :]
    return path, None


def _run_of_result(origin: Path, result: Result, name: str) -> Run:
    """The run file beside a result file that holds path `name`."""
    file = result.paths[name].run
    if file is None:
        raise DataError(
            f"{origin}: path {name!r} has no run file, need one to compare rankings; name its evaluation's own folder"
        )
    run_path = origin.parent / file
    if Path(file).is_absolute() or not run_path.resolve().is_relative_to(origin.parent.resolve()):
        raise DataError(f"{origin}: path {name!r} has its run at {file!r}, need a file beside the result")
    return read_trec_run(run_path)


def _read_result(origin: Path, selected: str | None) -> Input:
    result = read_result(origin)
    name = selected or result.reference
    if name is None:
        raise UsageError(f"{origin}: has no reference path; choose one: {origin}:{next(iter(result.paths), 'PATH')}")
    if name not in result.paths:
        raise UnknownNameError(f"path of {origin}", name, result.paths)
    run = _run_of_result(origin, result, name)
    folder = origin.resolve().parent.name
    return Input(f"{folder}:{name}", str(origin), run, result, result.paths[name], name)


def _looks_like_result(path: Path) -> bool:
    """Whether a file begins as JSON does. A pipe is taken for a run without a look: what is read of it is gone."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as handle:
            return handle.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def read_input(path: Path | str) -> Input:
    """Read one thing to compare.

    Args:
        path: a `result.json` (its reference path), `result.json:int8` (that path), the folder of one, or a TREC run file.

    Raises:
        DataError: missing or malformed file, a result without the run file.
        UnknownNameError: the result has no path of that name.
        UsageError: a path name after a plain run.
    """
    origin, selected = _split_selector(Path(path))
    if origin.is_dir():
        origin = origin / RESULT_FILE
    if _looks_like_result(origin):
        return _read_result(origin, selected)
    if selected is not None:
        raise UsageError(f"{path}: {origin} is a TREC run, which has no paths; leave out ':{selected}'")
    run = read_trec_run(origin)
    return Input(origin.stem, str(origin), run, name=run.name if run.ordered else "")


def _labels(inputs: Sequence[Input]) -> list[str]:
    """One label each: the name, and a number where two would be the same."""
    labels: list[str] = []
    for entry in inputs:
        label, number = entry.label, 2
        while label in labels:
            label, number = f"{entry.label} ({number})", number + 1
        labels.append(label)
    return labels


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    return {canonical_name(name): value for name, value in values.items()}


def _stored(inputs: Sequence[Input]) -> list[PathResult]:
    """Metrics as the results hold them; only over the same judged queries are they comparable."""
    found: list[PathResult] = []
    for entry in inputs:
        if entry.path is None:
            raise UsageError(f"{entry.file} is a plain run and has no metrics; give the judgements: --qrels FILE")
        per_query = _canonical(entry.path.per_query)
        bounds = None if entry.path.tie_bounds is None else _canonical(entry.path.tie_bounds)
        found.append(PathResult(_canonical(entry.path.metrics), per_query, {}, tie_bounds=bounds))
    first = {query for values in found[0].per_query.values() for query in values}
    for entry, values in zip(inputs[1:], found[1:], strict=True):
        queries = {query for row in values.per_query.values() for query in row}
        if queries != first or not queries:
            raise DataError(
                f"{entry.file}: its means are over {len(queries)} judged queries, those of {inputs[0].file} over "
                f"{len(first)}, and {len(queries & first)} are the same; give the judgements: --qrels FILE"
            )
    return found


def _evaluated(inputs: Sequence[Input], qrels: Qrels, metrics: Iterable[str]) -> list[PathResult]:
    names = list(metrics)
    found = []
    for entry in inputs:
        per_query = evaluate_run(entry.run, qrels, names)
        found.append(PathResult(means(per_query), per_query, {}, tie_bounds=mean_bounds(entry.run, qrels, per_query)))
    return found


def _task_set(task: Mapping[str, Any]) -> str:
    limits, candidates = task.get("limits"), task.get("candidates")
    parts = [f"{task['dataset']} {task['split']}"]
    parts += [] if limits is None else [describe(limits, ids=True)]
    parts += [] if candidates is None else [describe_candidates(candidates, ids=True)]
    return ", ".join(parts)


def missing_queries(file: Path | str, run: Run, qrels: Path | str, judged: Qrels) -> list[str]:
    """The judged queries that a run has no results for.

    Raises:
        DataError: it has results for none of them: every metric would be 0, and two such runs equivalent.
    """
    missing = [query for query in judged if not run.rankings.get(query)]
    if len(missing) == len(judged):
        raise DataError(
            f"{file}: none of its {len(run.rankings)} queries (first {next(iter(run.rankings))!r}) is among the {len(judged)} judged "
            f"ones of {qrels} (first {next(iter(judged))!r}): they belong to different sets"
        )
    return missing


def _warnings(inputs: Sequence[Input], judged: int, missing: Sequence[Sequence[str]], depths: Sequence[int]) -> tuple[str, ...]:
    found = []
    if len(set(depths)) > 1:
        each = ", ".join(f"{entry.file} {depth}" for entry, depth in zip(inputs, depths, strict=True))
        found.append(f"rankings end at different depths ({each}): beyond the shortest, overlap and order say that and no more")
    sets = {_task_set(entry.result.task) for entry in inputs if entry.result is not None}
    if len(sets) > 1:
        found.append(f"the results are of different task sets: {', '.join(sorted(sets))}")
    for entry, queries in zip(inputs, missing, strict=True):
        if queries:
            found.append(f"{entry.file}: no results for {len(queries)} of {judged} judged queries; they score 0")
    return tuple(found)


def compare_inputs(
    paths: Sequence[Path | str],
    qrels: Path | str | None = None,
    metrics: Iterable[str] = DEFAULT_METRICS,
    k: int | None = None,
) -> Comparison:
    """Compare two or more Results or TREC runs with the first of them.

    Scores are not compared (other tools' scores mean other things), so Spearman and score errors are null. Statistics are over all
    inputs and metrics; a difference is held to the bounds of the path's name (`verdicts`), that of another tool's run to the strictest.

    Args:
        paths: see `read_input`.
        qrels: judgements; without them all inputs must be Results over the same judged queries, and the metrics are theirs.
        metrics: metrics to compute from `qrels`.
        k: depth the rankings are compared to, at most the longest ranking there is; None takes that one.

    Raises:
        UsageError: fewer than two inputs, k below 1, a plain run without qrels.
        DataError: missing, malformed or incomparable files; a run of which no query is judged.
    """
    if len(paths) < 2:
        raise UsageError(f"compare: got {len(paths)} input, need two or more results or runs")
    if k is not None and k < 1:
        raise UsageError(f"k: got {k}, need 1 or more")
    inputs = [read_input(path) for path in paths]
    judged = None if qrels is None else read_qrels(qrels)
    missing = [[] if judged is None else missing_queries(entry.file, entry.run, str(qrels), judged) for entry in inputs]
    values = _stored(inputs) if judged is None else _evaluated(inputs, judged, metrics)
    longest = [max(map(len, entry.run.rankings.values())) for entry in inputs]
    depth = min(k or max(longest), max(longest))  # deeper, '@20' of runs to depth 10 would be '@10' under another name
    paths_by_label = _judged(dict(zip(_labels(inputs), inputs, strict=True)), values, judged, depth)
    queries = {query for row in values[0].per_query.values() for query in row}
    return Comparison(
        tuple(Compared(label, entry.file, path) for (label, path), entry in zip(paths_by_label.items(), inputs, strict=True)),
        len(queries),
        depth,
        None if qrels is None else str(qrels),
        _task(inputs, len(queries), judged),
        _encoder(inputs),
        _warnings(inputs, len(judged or ()), missing, [min(one, depth) for one in longest]),
    )


def _judged(
    inputs: Mapping[str, Input], values: Sequence[PathResult], qrels: Qrels | None, depth: int
) -> dict[str, PathResult]:
    """Every input's values with its parity with the first; statistics are over all of them."""
    reference = next(iter(inputs))
    first = Run(reference, inputs[reference].run.rankings, inputs[reference].run.ordered)
    found = {}
    for (label, entry), value in zip(inputs.items(), values, strict=True):
        about = "" if entry.path is None else entry.path.description
        path = replace(value, description=": ".join(filter(None, (entry.file, about))))
        if label != reference:
            against = parity.compare(
                values[0], value, first, entry.run, reference_scores=None, scores=None, k=depth, qrels=qrels
            )
            path = replace(path, parity=against)
        found[label] = path
    return with_statistics(found, reference, {label: entry.name for label, entry in inputs.items()})


def _task(inputs: Sequence[Input], queries: int, qrels: Qrels | None) -> dict[str, Any]:
    """What was compared, as a Result's `task`; of plain runs nobody knows how many documents were searched."""
    tasks = [entry.result.task for entry in inputs if entry.result is not None]
    same = len({_task_set(task) for task in tasks}) == 1
    retrieved = {document for entry in inputs for ranking in entry.run.rankings.values() for document, _ in ranking}
    found: dict[str, Any] = {"source": SOURCE, "dataset": "runs", "split": "", "queries": queries, "documents": len(retrieved)}
    if qrels is not None:
        found["judged_pairs"] = sum(map(len, qrels.values()))
    if same:
        known = ("dataset", "split", "documents", "document_tokens", "exclude_same_id", "limits", "candidates")
        return {**found, **{key: tasks[0][key] for key in known if key in tasks[0]}}
    return {**found, "documents_counted": "those that the inputs retrieve"}


def _encoder(inputs: Sequence[Input]) -> dict[str, Any]:
    """The one encoder of all inputs, or the names of those that are known."""
    known = [dict(entry.result.encoder) for entry in inputs if entry.result is not None]
    if len(known) == len(inputs) and all(one == known[0] for one in known):
        return known[0]
    return {"name": ", ".join(dict.fromkeys(str(one.get("name")) for one in known)) or "unknown"}


def render_comparison(comparison: Comparison, console: Console, *, verbose: bool = False) -> None:
    """Print what was compared, then what `render_console` prints."""
    judged = f"judgements {comparison.qrels}" if comparison.qrels else "metrics as in the results"
    first = comparison.inputs[0]
    console.print(shown(f"{comparison.queries} judged queries, {judged}; compared with {first.label}", "bold"))
    render_body(comparison.to_result(), console, verbose=verbose)


def write_comparison(comparison: Comparison, folder: Path | str, command: Sequence[str] = ()) -> None:
    """Write the reports of a comparison into a folder of its own: the files that `write_reports` writes.

    Raises:
        UsageError: the folder holds the report of an evaluation. DataError: it cannot be written.
    """
    file = Path(folder) / RESULT_FILE
    if file.exists() and _looks_like_result(file) and read_result(file).task.get("source") != SOURCE:
        raise UsageError(f"{folder}: holds the report of an evaluation, which would be replaced; choose another --out")
    with alone(folder):
        with writing(folder):
            file.unlink(missing_ok=True)  # where it exists the rest belongs to it
        write_reports(comparison.to_result(command), folder)
