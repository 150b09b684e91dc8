"""The evaluating commands, one a source of data: `beir`, `local`, `real-mm-rag`, `demo`."""

from __future__ import annotations

import re
import sys
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
    encoder_option,
    loading_options,
    model_options,
    require_counts,
    with_options,
)
from maxsim_eval.cli.output import answer, console, write_json
from maxsim_eval.cli.sources import COMMANDS
from maxsim_eval.errors import UsageError

if TYPE_CHECKING:
    from maxsim_eval.api import Settings

_OUT = {
    "out": (
        Annotated[
            Path | None,
            typer.Option(help="Where the report goes. Default: results/<source>-<dataset>-<encoder>/, with what was chosen."),
        ],
        None,
    )
}


def register(app: typer.Typer) -> None:
    """Give the app a command for every source of data."""
    for source in COMMANDS:
        app.command(source)(_command_of(source))


def _command_of(source: str) -> Callable[..., None]:
    default, about, encoder, text = COMMANDS[source]

    def command(**given: Any) -> None:
        evaluate_task(source, **given)

    command.__doc__ = text
    dataset = {"dataset": (Annotated[str, typer.Argument(help=about)], default)}
    split = {"split": (Split, None)}
    return with_options(
        command, dataset, PLACES, _OUT, encoder_option(encoder), SCORING, split, SOURCES[source], MODEL, RESULTS
    )


def evaluate_task(
    source: str,
    *,
    dataset: str,
    data_dir: Path,
    out: Path | None,
    encoder: str,
    split: str | None,
    as_json: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Every evaluating command; `given` are the options of `SCORING`, `MODEL`, of the source, the cache folder and `quiet`."""
    from maxsim_eval.api import Settings, evaluate_settings
    from maxsim_eval.comparison.metrics import DEFAULT_METRICS
    from maxsim_eval.data.loading import load_task
    from maxsim_eval.environment import resolve_device
    from maxsim_eval.processes.world import joined, several
    from maxsim_eval.quantities import bytes_of
    from maxsim_eval.report.console import render_console
    from maxsim_eval.report.result_json import to_json
    from maxsim_eval.report.words import brief
    from maxsim_eval.scoring.scoring import check_paths

    loading = loading_options(given, SOURCES[source])
    require_counts(given, "k", "readers", "limit_queries", "limit_documents")
    budget = given.pop("memory_budget")
    settings = Settings(
        encoder=encoder,
        encoder_options=model_options(given),
        paths=check_paths(_names(given.pop("paths"))),
        metrics=metric_names(given.pop("metrics")) or DEFAULT_METRICS,
        memory_budget=None if budget is None else bytes_of(budget),
        command=command_line(),
        **given,
    )
    if not several():
        resolve_device(settings.device, quiet=settings.quiet)  # before anything is loaded
    load = partial(load_task, source, dataset, data_dir=data_dir, split=split, quiet=settings.quiet, **loading)
    named = split is not None or any(value is not None for value in loading.values())

    def folder_of(dataset: str, split: str) -> Path:
        return out or Path("results") / _folder_name(source, dataset, split if named else "", encoder, settings)

    with joined(settings.device, say_last) as world:
        result = evaluate_settings(settings, load, lambda task: folder_of(task.dataset, task.split))
        if not world.leader:
            return
        if as_json:
            write_json(to_json(result))
        elif settings.quiet:
            for line in brief(result):
                answer(line)
        else:
            render_console(result, console(), verbose=verbose)
            answer(f"report: {folder_of(result.task['dataset'], result.task['split'])}/report.html")


def _folder_name(source: str, dataset: str, part: str, encoder: str, settings: Settings) -> str:
    """A name for the report's folder that tells evaluations of one dataset apart."""
    prefix, _, model = encoder.partition(":")
    model = Path(model).name if model.startswith((".", "~", "/")) else model
    limits = [f"{letter}{limit}" for letter, limit in (("q", settings.limit_queries), ("d", settings.limit_documents)) if limit]
    reranked = ["reranked"] if settings.candidates is not None else []
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(filter(None, [source, dataset, part, prefix, model, *limits, *reranked])))


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def metric_names(text: str | None) -> tuple[str, ...]:
    """The names of `--metrics`; none where the option was not given."""
    names = _names(text)
    if text is not None and not names:
        raise UsageError(f"--metrics: got {text!r}, which names none; need some, as nDCG@10,R@100,AP,RR@10")
    return names


def say_last(line: str) -> None:
    """The one message of a failure of several processes; a follower's stderr is closed to anything else."""
    print(line, file=sys.__stderr__, flush=True)


def command_line() -> list[str]:
    """The command as it was given, without the folder the program lies in."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
