"""`atlas`: a task, an encoder and a grid of ways to store its embeddings in; an Atlas out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from maxsim_eval.atlas.attribution import losses
from maxsim_eval.atlas.grid import Grid, GridEntry, load_grid
from maxsim_eval.atlas.judging import Atlas, Row, front, verdicts
from maxsim_eval.atlas.picture import check_picture
from maxsim_eval.atlas.running import FOREIGN, Finished, Setting, finished, foreign, read_foreign
from maxsim_eval.atlas.writing import write_atlas
from maxsim_eval.bars import Bar
from maxsim_eval.cache.embeddings import check_widths, embeddings, query_tokens
from maxsim_eval.comparison.metrics import said_of_depth
from maxsim_eval.data.subsets import idle_limits, limit_task, limits_of
from maxsim_eval.data.task_facts import task_facts
from maxsim_eval.environment import environment, resolve_device
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.files import alone
from maxsim_eval.scoring.paths import REFERENCE
from maxsim_eval.types import Encoder, Run, Task


def atlas(
    task: Task,
    encoder: Encoder | str,
    *,
    out_dir: Path | str,
    grid: Path | str | None = None,
    entries: Iterable[str] | None = None,
    within: float | None = None,
    runs: Sequence[Path | str] = (),
    k: int = 100,
    cache_dir: Path | str = "embeddings_cache",
    encoder_options: Mapping[str, Any] | None = None,
    limit_queries: int | None = None,
    limit_documents: int | None = None,
    limit_seed: int = 0,
    device: str = "auto",
    command: Sequence[str] = (),
    quiet: bool = False,
) -> Atlas:
    """Evaluate every entry of a grid against the FP32 reference, and judge them together.

    Embeddings are taken from the cache, or encoded first. What is finished is kept under `out_dir`: the same call goes on after an
    interruption, and evaluates anew what changed.

    Args:
        out_dir: where atlas.html, .md, .csv, .svg and .json go, and `entries/`.
        grid: a TOML file (docs/atlas.md); None: the default grid.
        entries: names instead of the grid's: paths, codecs, first stages, `<entry>+rerank-<n>`.
        within: the largest change of a metric that does not matter, instead of the grid's.
        runs: TREC runs of other engines; the loss of each is split by its causes (`attribution.py`).
        k: documents kept for each query.
        encoder, cache_dir, encoder_options, limit_queries, limit_documents, limit_seed, device: as of `evaluate`.

    Raises:
        MaxsimEvalError: invalid names, options or data, or no matplotlib, at once; later only where the reference cannot be
            evaluated. Any other entry that fails becomes a row that says why.
    """
    plan = load_grid(grid).changed(entries, within)
    if k < 1:
        raise UsageError(f"k: got {k}, need 1 or more")
    limits = {"queries": limit_queries, "documents": limit_documents}
    kept = limit_task(task, **limits, seed=limit_seed)
    check_picture()  # this and what follows: before hours of work
    others = read_foreign(runs, kept)
    device = resolve_device(device, quiet=quiet)
    folder = Path(out_dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(alone(folder))
        found = embeddings(task, encoder, cache_dir, kept=kept, device=device, quiet=quiet, **dict(encoder_options or {}))
        queries = query_tokens(task, kept, found.queries)
        check_widths(found, queries)
        options: dict[str, Any] = {"cache_dir": cache_dir, "encoder_options": dict(encoder_options or {})}
        options |= {"limit_queries": limit_queries, "limit_documents": limit_documents, "limit_seed": limit_seed}
        setting = Setting(
            whole=task,
            task=kept,
            queries=queries,
            encoder=encoder,
            found=replace(found, made_by=None),
            metrics=plan.metrics,
            k=min(k, found.documents.documents),
            folder=folder,
            device=device,
            options=options,
            quiet=quiet,
        )
        given, errors = _evaluate(plan, others, setting)
        what = "corpus" if kept.document_ids is task.document_ids else "subset"
        said = [*kept.warnings, *idle_limits(task, **limits)]
        said += said_of_depth(k, found.documents.documents, plan.metrics, what)
        facts = {
            **task_facts(kept, queries.lengths.cpu().numpy(), found.documents.lengths(), said),
            "limits": limits_of(task, kept, **limits, seed=limit_seed),
        }
        made = Atlas(
            task=facts,
            encoder=found.encoder,
            rows=(),
            metrics=plan.metrics,
            within=plan.within,
            k=setting.k,
            level=0.0,
            environment=environment(device),
            command=command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        made = _judged(made, plan, given, errors, setting)
        write_atlas(made, folder)
    return made


def _evaluate(plan: Grid, runs: Sequence[Run], setting: Setting) -> tuple[list[GridEntry], dict[str, str]]:
    """Evaluate the reference, then all entries, runs first: gives the entries in order, and name -> why of those that failed."""
    reference = finished(GridEntry(REFERENCE, "path"), setting)
    if isinstance(reference, str):
        raise DataError(reference)
    given: list[GridEntry] = []
    for run in runs:
        entry, found = foreign(run, setting)
        given += [entry, GridEntry(f"{entry.name}+rerank-{found.depth}", "reranked", entry.name, found.depth)]
    given += plan.entries
    errors: dict[str, str] = {}
    with Bar(total=len(given), desc="atlas", unit=" entries", disable=setting.quiet) as bar:
        for entry in given:
            bar.set_postfix_str(entry.name)
            if entry.name not in setting.done:
                answer = finished(entry, setting)
                if isinstance(answer, str):
                    errors[entry.name] = answer
            bar.update(1)
    return given, errors


def _judged(made: Atlas, plan: Grid, given: Sequence[GridEntry], errors: Mapping[str, str], setting: Setting) -> Atlas:
    done = setting.done
    changes, level = verdicts(REFERENCE, done, plan.metrics, plan.within)
    rows = [_row(GridEntry(REFERENCE, "path"), done[REFERENCE], {})]
    for entry in given:
        if entry.name in errors:
            rows.append(Row(entry.name, entry.kind, "", error=errors[entry.name], control=entry.control))
            continue
        ranking = done[entry.name]
        row = _row(entry, ranking, changes[entry.name])
        # What a rerank of fewer documents leaves out, the ranking itself has not lost.
        whole = (other for other in given if other.base == entry.name and other.depth >= ranking.depth and other.name in done)
        again = next(whole, None)
        if again is not None:
            row = replace(row, losses=losses(done[REFERENCE], ranking, done[again.name], setting.task.qrels))
        rows.append(row)
    main = plan.metrics[0]
    by = {
        "bytes": front(rows, lambda row: row.document_bytes, main),
        "seconds": front(rows, lambda row: row.seconds.get("search"), main),
    }
    rows = [replace(row, fronts=tuple(name for name, names in by.items() if row.name in names)) for row in rows]
    return replace(made, rows=tuple(rows), level=level)


def _row(entry: GridEntry, found: Finished, changes: Mapping[str, Any]) -> Row:
    kind = "run" if entry.name.startswith(FOREIGN) and not entry.base else entry.kind
    return Row(
        entry.name,
        kind,
        found.description,
        metrics=found.metrics,
        changes=changes,
        document_bytes=found.document_bytes,
        seconds=found.seconds,
        control=entry.control,
    )
