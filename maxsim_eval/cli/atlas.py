"""`evaluate.py atlas`: what every way of storing a dataset's embeddings costs, with verdicts, in one table and one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from maxsim_eval.cli.evaluate import folder_name
from maxsim_eval.cli.options import (
    ANSWERS,
    LIMITS,
    MODEL,
    OF_SOURCES,
    PLACES,
    SCORING,
    SOURCES,
    Split,
    collection,
    command_line,
    encoder_option,
    loading_options,
    model_options,
    names_of,
    require_counts,
    with_options,
)
from maxsim_eval.cli.output import answer, say, write_json
from maxsim_eval.cli.sources import default_encoder
from maxsim_eval.errors import DataError, UnknownNameError, UsageError

_GRID = {
    **encoder_option(),
    "grid": (
        Annotated[Path | None, typer.Option(help="A TOML file of entries (docs/atlas.md). Default: the packaged grid.")],
        None,
    ),
    "entries": (
        Annotated[str | None, typer.Option(help="Comma-separated, instead of the grid's: int8,pool-2+int4,bm25+rerank-100.")],
        None,
    ),
    "within": (
        Annotated[
            float | None, typer.Option(help="The largest change of a metric that does not matter. Default: the grid's, 0.003.")
        ],
        None,
    ),
    "run": (Annotated[list[Path] | None, typer.Option(help="A TREC run of another engine: what it loses, and by what.")], None),
    "out": (
        Annotated[
            Path | None,
            typer.Option(help="Where it goes. Default: results/atlas-<source>-<dataset>-<encoder>/, with what was chosen."),
        ],
        None,
    ),
    "split": (Split, None),
    **{name: SCORING[name] for name in ("k", "device", *LIMITS)},
}


def atlas(source: str, dataset: str, as_json: bool, quiet: bool, **given: Any) -> None:
    """Compare every way of storing a dataset's embeddings: bytes and time against quality, with verdicts over the whole grid.

    Goes on where it was interrupted. Entries are paths (int8), codecs (int4, pool-2+residual-2(centroids=1024)), first stages (bm25,
    single, fde) and any of them reranked (bm25+rerank-100).

    Example: python evaluate.py atlas beir scifact --encoder lexical

    Example: python evaluate.py atlas beir scifact --encoder lexical --entries int8,rotate+sign --within 0.005
    """
    from maxsim_eval.atlas import atlas as make
    from maxsim_eval.data.loading import load_task
    from maxsim_eval.report.averages import name_of

    if source not in SOURCES:
        raise UnknownNameError("source", source, SOURCES)
    loading = {name: value for name, value in loading_options(given).items() if value is not None}
    require_counts(given, "k", "limit_queries", "limit_documents")
    encoder = given["encoder"] or default_encoder(source)
    task = load_task(source, dataset, data_dir=given["data_dir"], split=given["split"], quiet=quiet, **loading)
    part = task.split if loading or given["split"] is not None else ""
    chosen = name_of(source, task.dataset, dataset), part, encoder, given["limit_queries"], given["limit_documents"]
    folder = given["out"] or Path("results") / folder_name(f"atlas-{source}", *chosen)
    made = make(
        task,
        encoder,
        out_dir=folder,
        grid=given["grid"],
        entries=_split(given["entries"]),
        within=given["within"],
        runs=given["run"] or (),
        encoder_options=model_options(given),
        command=command_line(),
        quiet=quiet,
        **{option: given[option] for option in ("k", "cache_dir", "device", *LIMITS)},
    )
    _show(made, folder, as_json=as_json, quiet=quiet)
    failed = [row for row in made.rows if row.error]
    if failed and len(failed) == len(made.rows) - 1:  # all but the reference
        raise DataError(
            f"atlas: none of its entries could be evaluated; the first, {failed[0].name}: {failed[0].error.splitlines()[0]}"
        )


with_options(atlas, collection("small"), PLACES, _GRID, OF_SOURCES, MODEL, ANSWERS)


def _split(text: str | None) -> Sequence[str] | None:
    if text is None:
        return None
    names = names_of(text)
    if not names:
        raise UsageError(f"--entries: got {text!r}, which names none; need some, as int8,rotate+sign,bm25+rerank-100")
    return names


def _show(made: Any, folder: Path, *, as_json: bool, quiet: bool) -> None:
    from maxsim_eval.atlas import page
    from maxsim_eval.atlas.writing import to_json

    if as_json:
        write_json(to_json(made))
        return
    for line in (*page.warnings(made), *page.error_lines(made)):
        say(f"warning: {line}", "yellow")
    if not quiet:
        answer(page.facts_line(made))
        for line in page.brief_lines(made):
            answer(line)
    answer(f"{page.headline(made)}.")
    answer(f"atlas: {folder}/atlas.html")
