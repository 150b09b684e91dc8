"""`evaluate`: a task, an encoder and scoring paths in; a Result out. What the commands and the notebooks call."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maxsim_eval.cache.embeddings import Embeddings, check_widths, embeddings, query_tokens
from maxsim_eval.cache.selection import Documents
from maxsim_eval.comparison.assessing import assess
from maxsim_eval.comparison.metrics import DEFAULT_METRICS, said_of_depth
from maxsim_eval.comparison.ranks import DEVICE_MEMORY, ranking_on
from maxsim_eval.comparison.texts import shown_texts
from maxsim_eval.data.loading import Unread
from maxsim_eval.data.subsets import idle_limits, limits_of
from maxsim_eval.data.task_facts import task_facts
from maxsim_eval.data.trec import write_trec_run
from maxsim_eval.environment import environment, resolve_device
from maxsim_eval.files import writing
from maxsim_eval.planning.costs import ALL_PAIRS as _ALL_PAIRS
from maxsim_eval.planning.costs import SAMPLED_QUERIES as _SAMPLED_QUERIES
from maxsim_eval.planning.estimating import estimate, say_estimate
from maxsim_eval.processes.world import World, joined
from maxsim_eval.report.writing import write_reports
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.candidates import Candidates
from maxsim_eval.scoring.certified import require_certifiable, require_copies
from maxsim_eval.scoring.job import (
    Division,
    Job,
    Keeping,
    Outcome,
    Searched,
    Streaming,
    divide,
    identity_of,
    new_token,
    score_job,
    sources_of,
)
from maxsim_eval.scoring.own_functions import OTHER_RUNS, Chosen, run_file, scorer_facts
from maxsim_eval.scoring.paths import REFERENCE, ScoringPath, our_paths
from maxsim_eval.scoring.records import folder_for, remove_partial
from maxsim_eval.subject import DEFAULT_PATHS, OutDir, Settings, Subject, as_tuple, embedded
from maxsim_eval.types import Encoder, Result, Run, Task
from maxsim_kernels import Packed

__all__ = ["DEFAULT_PATHS", "Embeddings", "Settings", "embeddings", "evaluate", "evaluate_settings"]

_IN_MEMORY_BYTES = 64 << 20  # kept scores of a path beyond this go to files


def evaluate(
    task: Task,
    encoder: Encoder | str,
    paths: Iterable[Chosen] = DEFAULT_PATHS,
    *,
    k: int = 100,
    cache_dir: Path | str = "embeddings_cache",
    out_dir: Path | str | None = None,
    metrics: Iterable[str] = DEFAULT_METRICS,
    limit_queries: int | None = None,
    limit_documents: int | None = None,
    limit_seed: int = 0,
    candidates: Path | str | None = None,
    encoder_options: Mapping[str, Any] | None = None,
    device: str = "auto",
    memory_budget: int | None = None,
    readers: int = 8,
    fresh: bool = False,
    verify: bool = True,
    command: Sequence[str] = (),
    quiet: bool = False,
) -> Result:
    """Score a task by several paths and compare them.

    Under torchrun every process makes the same call, with the same task. All encode what is missing and score their share, the first
    also prepares, merges and writes, and all return the same Result (`processes/world.py`).

    Args:
        encoder: an Encoder, the name of one (`lexical`, `hf:<id or path>`, ...), or the name that embeddings were imported under.
        paths: names of `scoring.paths.our_paths`, `python:<module>:<function>` for a function of your own, or a pair of a name and a
            function (docs/scorers.md); parity is against `fp32` where it is among them.
        k: documents kept for each query; clamped to the size of the corpus, with a warning. Metrics that look at more documents
            than these count the others as not found, which the Result warns of.
        out_dir: where `result.json`, `report.md` and `runs/<path>.trec` are written; None writes nothing. A long evaluation keeps
            finished parts under `.partial` there, and after an interruption the same call continues from them.
        limit_queries: score only this many judged queries, a seeded sample.
        limit_documents: search only this many documents: every one judged for these queries, the rest a seeded sample.
        limit_seed: the seed of both samples (`subsets.limit_task`); the Result says what was left out.
        candidates: a TREC run, or a first stage (`bm25`, `bm25:1000`, `single`, `fde`): only the pairs it lists are scored.
        encoder_options: for an encoder given by name (`encoders.names.get_encoder`): batch_size, dtype, prompts, lengths, revision, ...
        device: where scores are computed and the encoder's model runs: auto (a CUDA device that works, else the CPU), cpu, cuda,
            cuda:<number>; with several processes `cuda` is the GPU of each process's LOCAL_RANK.
        memory_budget: bytes of GPU memory for documents being copied or scored, and for their scores; None: up to 2 GiB.
        readers: number of threads that read the cache.
        fresh: ignore, and remove, the finished parts of an interrupted evaluation.
        verify: check every stored value by its checksum while it is read; if False, the Result carries a warning.

    Raises:
        UsageError: an argument that cannot work, or an encoder whose `encode` returns no Packed. DataError: a task with an
            id twice, with ids that a run file in `out_dir` cannot hold, or with qrels of queries that it does not have.
        MaxsimEvalError: one clear message about a bad name, dataset, cache or embedding.
    """
    settings = Settings(
        encoder=encoder,
        paths=as_tuple("paths", paths),
        k=k,
        cache_dir=cache_dir,
        metrics=as_tuple("metrics", metrics),
        limit_queries=limit_queries,
        limit_documents=limit_documents,
        limit_seed=limit_seed,
        candidates=candidates,
        encoder_options=dict(encoder_options or {}),
        device=device,
        memory_budget=memory_budget,
        readers=readers,
        fresh=fresh,
        verify=verify,
        command=command,
        quiet=quiet,
    )
    return evaluate_settings(settings, task, out_dir)


def evaluate_settings(settings: Settings, task: Task | Unread, out_dir: OutDir | Callable[[Task], OutDir]) -> Result:
    """As `evaluate`; the task may still be unread (`Unread`), and the output folder a function of the task.

    Among several processes the first loads the task; the others do so only where they help to encode documents.
    """
    paths = settings.check()
    with joined(settings.device) as world, contextlib.ExitStack() as stack:
        device = resolve_device(world.device(settings.device), quiet=settings.quiet)
        require_certifiable(paths, device, candidates=settings.candidates is not None)
        found = embedded(settings, task, out_dir, world, device, stack)
        ready = None if found is None else _prepare(settings, paths, *found, world, stack)
        job: Job = world.share(None if ready is None else ready.job)
        here = () if ready is None else (ready.documents, ready.subject.document_ids)
        words = None if ready is None else ready.subject.words
        outcomes: Iterable[Outcome] = score_job(job, world, device, *here, words=words, paths=paths)
        if ready is not None and not settings.quiet:
            _say_how_long(ready, device, world.size)
        if world.size > 1:
            outcomes = list(outcomes)  # all paths first: else every process would wait while the leader compares one
        places = world.collect(device)
        result: Result = world.share(None if ready is None else _finish(settings, ready, outcomes, device, places))
    return result


@dataclass(frozen=True)
class _Ready:
    """What the leader (the first process) holds besides the job."""

    job: Job
    paths: Mapping[str, ScoringPath]
    subject: Subject
    found: Embeddings
    documents: Documents  # those that are searched
    facts: Mapping[str, Any]  # the Result's `task`


def _prepare(
    settings: Settings,
    paths: Mapping[str, ScoringPath],
    subject: Subject,
    found: Embeddings,
    world: World,
    stack: contextlib.ExitStack,
) -> _Ready:
    """Everything between the embeddings and the first score: candidates, k, warnings, the division of the work."""
    task, kept, candidates = subject.task, subject.kept, subject.candidates
    queries = query_tokens(task, kept, found.queries)
    check_widths(found, queries)
    said = [*kept.warnings, *idle_limits(task, **settings.limits)]
    if not settings.verify:
        said.append("values not verified: stored embeddings were read without a look at their checksums (--no-verify)")
    documents, listed = found.documents, None
    if candidates is not None:
        said += candidates.warnings
        documents, listed = candidates.choose(documents), candidates.within(candidates.union())
    what = "corpus" if kept.document_ids is task.document_ids else "subset"
    said += said_of_depth(settings.k, documents.documents, settings.metrics, what if candidates is None else "candidates")
    k = min(int(settings.k), documents.documents)
    if k < settings.k:
        warnings.warn(said[-1], stacklevel=_level_of_the_caller())
    asked = _asked(paths, kept, subject.document_ids, k, listed)
    job = _job(settings, paths, queries, asked, documents, subject, world, stack)
    facts = {
        **task_facts(kept, queries.lengths.cpu().numpy(), found.documents.lengths(), said),
        "limits": limits_of(task, kept, **settings.limits, seed=settings.limit_seed),
        "candidates": None if candidates is None else candidates.facts(),
    }
    return _Ready(job, paths, subject, found, documents, facts)


def _level_of_the_caller() -> int:
    """The `stacklevel` of a warning that points at the code which called this package, by whichever of its functions."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "maxsim_eval":
        frame, level = frame.f_back, level + 1
    return level


def _asked(
    paths: Mapping[str, ScoringPath], task: Task, document_ids: Sequence[str], k: int, candidates: Candidates | None
) -> Asked:
    """The `Asked` that is sent to every rank: without document ids and paths, which every rank adds itself."""
    excluded = np.full(len(task.query_ids), -1, np.int64)
    if task.exclude_same_id:
        place = {document: number for number, document in enumerate(document_ids)}
        excluded[:] = [place.get(query, -1) for query in task.query_ids]
    compared = REFERENCE in paths and len(paths) > 1
    rows = np.arange(len(task.query_ids) if compared else 0, dtype=np.int64)
    if len(rows) * len(document_ids) > _ALL_PAIRS and len(rows) > _SAMPLED_QUERIES:
        rows = np.sort(np.random.default_rng(0).choice(len(rows), _SAMPLED_QUERIES, replace=False))
    return Asked(task.query_ids, (), k, excluded, rows, candidates, paths={})


def _job(
    settings: Settings,
    paths: Mapping[str, ScoringPath],
    queries: Packed,
    asked: Asked,
    documents: Documents,
    subject: Subject,
    world: World,
    stack: contextlib.ExitStack,
) -> Job:
    searched = Searched.of(documents, paths)  # first: a damaged copy raises before the folder is touched
    encoder = settings.encoder if isinstance(settings.encoder, str) else settings.encoder.name
    require_copies(
        paths, searched.copies, f"evaluate.py convert {subject.task.source} {subject.task.dataset} --encoder {encoder}"
    )
    division = Division(*divide(documents, len(asked.kept_rows), world.size))
    in_memory = world.size == 1 and len(asked.kept_rows) * documents.documents * 4 <= _IN_MEMORY_BYTES
    in_files = len(asked.kept_rows) > 0 and not in_memory
    folder = folder_for(subject.out_dir, len(division.units), in_files, settings.fresh, world, stack)
    return Job(
        names=tuple(paths),
        queries=queries,
        asked=asked,
        searched=searched,
        division=division,
        keeping=Keeping(
            folder=folder,
            in_memory=in_memory,
            token=new_token(folder) if folder is not None and world.size > 1 else "",
            identity=identity_of(documents, queries, asked),
            sources=sources_of(paths),
        ),
        streaming=Streaming(settings.memory_budget, settings.readers, settings.quiet),
    )


def _say_how_long(ready: _Ready, device: str, processes: int) -> None:
    job = ready.job
    folder = job.keeping.folder
    say_estimate(
        estimate(
            ready.paths,
            job.queries,
            ready.documents,
            device=device,
            k=job.asked.k,
            processes=processes,
            candidates=job.asked.candidates,
            resumed=folder is not None and any(folder.glob("*/[0-9]*.h5")),
        )
    )


def _finish(settings: Settings, ready: _Ready, outcomes: Iterable[Outcome], device: str, places: Sequence[str]) -> Result:
    """Compute metrics and parity, make the Result, write the report, and remove what was kept for an interruption."""
    job, out_dir, found = ready.job, ready.subject.out_dir, ready.found
    qrels, stored = ready.subject.kept.qrels, found.documents.dtype
    ranking = ranking_on(device, settings.memory_budget or DEVICE_MEMORY)
    results, runs = assess(outcomes, job.asked, ready.paths, job.searched.copies, qrels, stored, settings.metrics, ranking)
    asked = torch.device(device).type if settings.device == "auto" else settings.device
    machine = {**environment(device), "device": asked, **scorer_facts(ready.paths)}
    lengths = found.documents.lengths()
    tokens = float(lengths.mean()) if len(lengths) else 0.0
    for name, path in results.items():
        each = ready.paths[name].document_bytes(tokens, found.documents.dim)
        stored_bytes = None if each is None else round(each, 3)
        results[name] = replace(path, memory={"document_bytes": stored_bytes, **(path.memory or {})})
    if len(places) > 1:
        machine |= {"processes": len(places), "devices": list(places)}
    result = Result(
        task={**ready.facts, "texts": shown_texts(ready.subject.kept, results)},
        encoder=found.encoder,
        k=job.asked.k,
        paths={name: replace(path, run=f"runs/{run_file(name)}" if out_dir else None) for name, path in results.items()},
        environment=machine,
        command=list(settings.command),
        reference=REFERENCE if REFERENCE in job.names else None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if out_dir is not None:
        _write(result, runs, out_dir)
        remove_partial(out_dir)
    return result


def _write(result: Result, runs: Mapping[str, Run], folder: Path) -> None:
    """Replace a report: `result.json` is deleted first and written last, so where it exists, the other files belong to it."""
    with writing(folder):
        (folder / "result.json").unlink(missing_ok=True)
        earlier = [folder / "runs" / f"{name}.trec" for name in our_paths()]  # only files that we may have written
        for path in (*earlier, *(found for form in OTHER_RUNS for found in (folder / "runs").glob(form))):
            path.unlink(missing_ok=True)
    for name, found in runs.items():
        write_trec_run(folder / "runs" / run_file(name), found)
    write_reports(result, folder)
