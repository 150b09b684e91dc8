"""The evaluating commands, one a source of data: `beir`, `local`, `real-mm-rag`, `irds`, `demo`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maxsim_eval.cli.options import (
    MODEL,
    PLACES,
    RESULTS,
    SCORING,
    SOURCES,
    Split,
    command_line,
    encoder_option,
    loading_options,
    metric_names,
    model_options,
    names_of,
    require_counts,
    with_options,
)
from maxsim_eval.cli.output import answer, console, say, say_last, write_json
from maxsim_eval.cli.sources import COMMANDS
from maxsim_eval.errors import MaxsimEvalError, UsageError

if TYPE_CHECKING:
    from maxsim_eval.types import Result, Task

_OUT = {
    "out": (
        Annotated[
            Path | None,
            typer.Option(help="Where the report goes. Default: results/<source>-<dataset>-<encoder>/, with what was chosen."),
        ],
        None,
    )
}

_SEVERAL = {
    "every": (Annotated[bool, typer.Option("--all", help="Every public dataset of this source.")], False),
    "latex": (Annotated[bool, typer.Option("--latex", help="Print the table of averages in LaTeX (booktabs).")], False),
}


def register(app: typer.Typer) -> None:
    """Give the app a command for every source of data."""
    for source in COMMANDS:
        app.command(source)(_command_of(source))


def _command_of(source: str) -> Callable[..., None]:
    default, about, encoder, text = COMMANDS[source]

    def command(**given: Any) -> None:
        evaluate_tasks(source, **given)

    command.__doc__ = text
    about = f"{about} Several: one after the other, with their averages." if source != "demo" else about
    datasets = {"datasets": (Annotated[list[str] | None, typer.Argument(help=about)], default)}
    groups = (
        PLACES,
        _OUT,
        encoder_option(encoder),
        SCORING,
        {"split": (Split, None)},
        SOURCES[source],
        MODEL,
        _SEVERAL,
        RESULTS,
    )
    return with_options(command, datasets, *groups)


def evaluate_tasks(
    source: str,
    *,
    datasets: list[str] | None,
    every: bool,
    data_dir: Path,
    out: Path | None,
    encoder: str,
    split: str | None,
    latex: bool,
    as_json: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Run an evaluating command; `given` are the options of `SCORING`, `MODEL`, of the source, the cache folder and `quiet`."""
    from maxsim_eval.api import Settings, evaluate_settings
    from maxsim_eval.comparison.metrics import DEFAULT_METRICS
    from maxsim_eval.data.loading import Unread
    from maxsim_eval.environment import resolve_device
    from maxsim_eval.processes.world import joined, several
    from maxsim_eval.quantities import bytes_of
    from maxsim_eval.report.averages import name_of
    from maxsim_eval.scoring.own_functions import check_paths

    if latex and as_json:
        raise UsageError("--latex: not with --json, one answer goes to stdout")
    names = _datasets(source, datasets or [], every)
    loading = loading_options(given, SOURCES[source])
    require_counts(given, "k", "readers", "limit_queries", "limit_documents")
    budget = given.pop("memory_budget")
    settings = Settings(
        encoder=encoder,
        encoder_options=model_options(given),
        paths=check_paths(names_of(given.pop("paths"))),
        metrics=metric_names(given.pop("metrics")) or DEFAULT_METRICS,
        memory_budget=None if budget is None else bytes_of(budget),
        command=command_line(),
        **given,
    )
    if not several():
        resolve_device(settings.device, quiet=settings.quiet)  # before anything is loaded
    named = split is not None or any(value is not None for value in loading.values())
    places: dict[str, Path] = {}
    results: dict[str, Result] = {}

    def folder_of(asked: str, task: Task) -> Path:
        name = name_of(source, task.dataset, asked)
        if name in results:
            raise UsageError(f"datasets: {name!r} is named twice")
        chosen = settings.limit_queries, settings.limit_documents, settings.candidates is not None
        folder = folder_name(source, name, task.split if named else "", encoder, *chosen)
        places[name] = Path("results") / folder if out is None else out / folder if len(names) > 1 else out
        return places[name]

    failed = 0
    with joined(settings.device, say_last) as world, warnings.catch_warnings():
        if not (settings.quiet or as_json or latex):
            warnings.filterwarnings("ignore", "k was clamped")  # the report says it
        for asked in names:
            task = Unread(source, asked, {"data_dir": data_dir, "split": split, "quiet": settings.quiet, **loading})
            try:
                result = evaluate_settings(settings, task, partial(folder_of, asked))
            except MaxsimEvalError as error:
                if len(names) == 1 or world.size > 1:
                    raise
                say(f"error: {asked}: {error}", "red")
                failed = max(failed, error.exit_code)
                continue
            name = name_of(source, result.task["dataset"], asked)
            results[name] = result
            if world.leader and not as_json and not latex and (len(names) == 1 or verbose):
                _show(result, places[name], quiet=settings.quiet, verbose=verbose)
        if world.leader and results and (as_json or latex or len(names) > 1):
            _show_all(results, places, as_json=as_json, latex=latex, quiet=settings.quiet, alone=len(names) == 1)
    if failed:
        raise typer.Exit(failed)


def _datasets(source: str, names: list[str], every: bool) -> list[str]:
    """The datasets that are meant; one that is named twice is refused, as `evaluate_datasets` does."""
    from maxsim_eval.data.cards import public

    if every and names:
        raise UsageError(f"--all: got {names[0]!r} too; name datasets, or say --all")
    found = public(source) if every else names
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"datasets: {twice!r} is named twice")
    if not found:
        known = ", ".join(public(source)[:5])
        more = f": {known}, ... (--all: each of them)" if known else f"; source {source!r} has no public ones"
        raise UsageError(f"datasets: got none, need the name of one{more}")
    return found


def _show(result: Result, folder: Path, *, quiet: bool, verbose: bool) -> None:
    from maxsim_eval.report.console import render_console
    from maxsim_eval.report.words import brief

    if quiet:
        for line in brief(result):
            answer(line)
        return
    render_console(result, console(), verbose=verbose)
    answer(f"report: {folder}/report.html")


def _show_all(
    results: dict[str, Result], places: dict[str, Path], *, as_json: bool, latex: bool, quiet: bool, alone: bool
) -> None:
    """Print one answer over all datasets: JSON, LaTeX, or the table of averages."""
    from maxsim_eval.report.averages import Results
    from maxsim_eval.report.console import render_table
    from maxsim_eval.report.result_json import dump_json, to_document, to_json
    from maxsim_eval.report.words import metric_shown

    first = next(iter(results.values()))
    together = Results(results, metric_shown(first) or "")
    if as_json:
        write_json(to_json(first) if alone else dump_json(together.to_json(to_document)) + "\n")
    elif latex:
        for line in together.to_latex().splitlines():
            answer(line)
    elif quiet:
        for path, *cells in together.table().rows:
            answer(f"{path}: {', '.join(map(' '.join, zip(together.table().columns[1:], cells, strict=True)))}")
    else:
        for name, result in results.items():
            for line in result.task["warnings"]:
                say(f"warning: {name}: {line}", "yellow")
            answer(f"report: {places[name]}/report.html")
        render_table(together.table(), console())
        if together.mark is not None:
            answer(together.mark)


def folder_name(
    source: str, dataset: str, part: str, encoder: str, queries: int | None, documents: int | None, reranked: bool = False
) -> str:
    """A name for the report's folder that tells evaluations of one dataset apart; `queries`, `documents`: the limits, if any."""
    prefix, _, model = encoder.partition(":")
    model = Path(model).name if model.startswith((".", "~", "/")) else model
    limits = [f"{letter}{limit}" for letter, limit in (("q", queries), ("d", documents)) if limit]
    parts = [source, dataset, part, prefix, model, *limits, "reranked" if reranked else ""]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(filter(None, parts)))
