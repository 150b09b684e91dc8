"""`evaluate`: a task, an encoder and scoring paths in; a Result out. What the commands and the notebooks call."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maxsim_eval.cache import content_hash, embed, find_entry, find_imported
from maxsim_eval.encoders import get_encoder
from maxsim_eval.entries import Entry
from maxsim_eval.environment import environment
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.files import writing
from maxsim_eval.metrics import DEFAULT_METRICS, evaluate_run, means, parse_metric
from maxsim_eval.parity import compare
from maxsim_eval.report import write_reports
from maxsim_eval.runs import write_trec_run
from maxsim_eval.scoring import PATHS, REFERENCE, Corpus, Plan, Scored, check_paths, score_path, to_run
from maxsim_eval.selection import Documents, Selection
from maxsim_eval.subsets import idle_limits, limit_task, limits_of, rows_of
from maxsim_eval.types import Encoder, PathResult, Result, Role, Run, Task
from maxsim_kernels import Packed

DEFAULT_PATHS = ("fp32", "fp16", "int8")
_ALL_PAIRS = 10**9  # more (query, document) pairs than this: Spearman and score errors on a sample of queries
_SAMPLED_QUERIES = 200
_IN_MEMORY_BYTES = 64 << 20  # kept scores beyond this go to a scratch file


@dataclass(frozen=True)
class Embeddings:
    """The token embeddings of an evaluation in the cache, and what the report says of the encoder."""

    queries: Entry
    documents: Documents
    encoder: Mapping[str, Any]


def evaluate(
    task: Task,
    encoder: Encoder | str,
    paths: Sequence[str] = DEFAULT_PATHS,
    *,
    k: int = 100,
    cache_dir: Path | str = "embeddings_cache",
    out_dir: Path | str | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    limit_queries: int | None = None,
    limit_documents: int | None = None,
    limit_seed: int = 0,
    device: str = "cpu",
    command: Sequence[str] = (),
    quiet: bool = False,
) -> Result:
    """Score a task by several paths and compare them.

    Args:
        encoder: an Encoder, the name of one (`lexical`, `hf:<id or path>`), or the name embeddings were imported under.
        paths: names from `scoring.PATHS`; parity is against `fp32` where it is among them.
        k: documents kept for each query; clamped to the corpus, said once.
        out_dir: where `result.json`, `report.md` and `runs/<path>.trec` are written; None writes nothing.
        limit_queries: score only this many judged queries, a seeded sample.
        limit_documents: search only this many documents: every one judged for these queries, the rest a seeded sample.
        limit_seed: of both samples (`subsets.limit_task`); the Result says what was left out.
        device: where scores are computed.

    Raises:
        MaxsimEvalError: one clear message for bad names, data, caches and embeddings.
    """
    names = check_paths(paths)
    if not names:
        raise UsageError("paths: got none, need at least one of " + ", ".join(PATHS))
    if k < 1:
        raise UsageError(f"k: got {k}, need 1 or more")
    for metric in metrics:
        parse_metric(metric)
    check_device(device)
    asked = {"queries": limit_queries, "documents": limit_documents}
    kept = limit_task(task, **asked, seed=limit_seed)
    limits = limits_of(task, kept, **asked, seed=limit_seed)
    found = embeddings(task, encoder, cache_dir, kept=kept, device=device, quiet=quiet)
    queries = _query_tokens(task, kept, found.queries)
    _check_widths(found, queries)
    said = [*kept.warnings, *idle_limits(task, **asked)]
    if k > len(kept.document_ids):
        k = len(kept.document_ids)
        said.append(
            f"k was clamped to the {k} documents of the {'corpus' if kept.document_ids is task.document_ids else 'subset'}"
        )
        warnings.warn(said[-1], stacklevel=2)
    plan = _plan(kept, k, device, quiet)
    results, runs = _score_paths(names, queries, Corpus(found.documents, quiet), plan, kept, metrics)
    result = Result(
        task={**_task_facts(kept, queries, found.documents, said), "limits": limits},
        encoder=found.encoder,
        k=k,
        paths={
            name: PathResult(
                metrics=path.metrics,
                per_query=path.per_query,
                seconds=path.seconds,
                run=f"runs/{name}.trec" if out_dir is not None else None,
                description=path.description,
                parity=path.parity,
            )
            for name, path in results.items()
        },
        environment=environment(device),
        command=list(command),
        reference=REFERENCE if REFERENCE in names else None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if out_dir is not None:
        _write(result, runs, Path(out_dir))
    return result


def _write(result: Result, runs: Mapping[str, Run], folder: Path) -> None:
    """Replace a report: `result.json` goes first and comes last, so where it exists the rest belongs to it."""
    with writing(folder):
        (folder / "result.json").unlink(missing_ok=True)
        shutil.rmtree(folder / "runs", ignore_errors=True)  # runs of an earlier evaluation
    for name, run in runs.items():
        write_trec_run(folder / "runs" / f"{name}.trec", run)
    write_reports(result, folder)


def check_device(device: str) -> None:
    """Refuse a device torch does not know, this machine does not have, or that holds no data."""
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} cannot be used: need 'cpu', 'cuda' or 'cuda:<number>'")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def embeddings(
    task: Task,
    encoder: Encoder | str,
    cache_dir: Path | str,
    *,
    kept: Task | None = None,
    device: str = "cpu",
    quiet: bool = False,
    **options: Any,
) -> Embeddings:
    """Token embeddings of a task through the cache: cached, imported, or encoded now.

    A name this version can run goes through `cache.embed`. Any other name must have been imported for exactly these texts;
    else the error of `get_encoder` says what is missing and what to do.

    `kept` is the task itself or a subset of it (`subsets.limit_task`). Its documents are rows of the whole corpus's entry
    where that is complete or imported; else they alone are encoded, into an entry of their own, whose key their ids and
    texts make. The queries are always those of the whole task, and an encoder that counts the corpus is offered all of it:
    what a query or document is encoded to does not depend on what was left out.
    """
    kept = task if kept is None else kept
    if isinstance(encoder, str):
        imported = _imported(task, kept, encoder, cache_dir)
        if imported is not None:
            return imported
        encoder = get_encoder(encoder, device=device, **options)
    documents: Documents
    whole = None if kept.document_ids is task.document_ids else find_entry(task, "document", encoder, cache_dir)
    if whole is None:
        documents = embed(kept, "document", encoder, cache_dir, quiet=quiet)
    else:
        documents = _rows(whole, task, kept)
    queries = embed(task, "query", encoder, cache_dir, quiet=quiet)
    return Embeddings(queries, documents, _encoder_facts(encoder.name, encoder.revision, documents))


def _rows(entry: Entry, task: Task, kept: Task) -> Documents:
    """The kept documents of the whole corpus's entry."""
    if kept.document_ids is task.document_ids:
        return entry
    return Selection(entry, rows_of(task.document_ids, kept.document_ids))


def _imported(task: Task, kept: Task, name: str, cache_dir: Path | str) -> Embeddings | None:
    sides: tuple[tuple[Role, Sequence[str], Sequence[Any]], ...] = (
        ("query", task.query_ids, task.queries),
        ("document", task.document_ids, task.documents),
    )
    entries = {}
    for role, ids, items in sides:
        entries[role] = find_imported(cache_dir, task.source, task.dataset, name, role, content_hash(ids, items))
    missing = [role for role, entry in entries.items() if entry is None]
    queries, documents = entries["query"], entries["document"]
    if queries is None or documents is None:
        if len(missing) == 1 and name.partition(":")[0] not in ("lexical", "hf"):
            raise DataError(
                f"encoder {name!r}: the {missing[0]} embeddings of {task.source} {task.dataset} were not imported, the other "
                f"side was; import them too (evaluate.py import {task.source} {task.dataset} FILE --encoder {name})"
            )
        return None
    facts = _encoder_facts(name, documents.manifest["provenance"].get("revision", ""), documents)
    return Embeddings(queries, _rows(documents, task, kept), facts)


def _encoder_facts(name: str, revision: str, documents: Documents) -> dict[str, Any]:
    return {
        "name": name,
        "revision": revision,
        "dim": documents.dim,
        "dtype": str(documents.dtype).removeprefix("torch."),
        "origin": documents.manifest["provenance"].get("origin", ""),
    }


def _query_tokens(task: Task, kept: Task, entry: Entry) -> Packed:
    """Tokens of the kept queries, in their order."""
    tokens = entry.load()
    if kept.query_ids is task.query_ids:
        return tokens
    return tokens.select(torch.from_numpy(rows_of(task.query_ids, kept.query_ids))).compact()


def _check_widths(found: Embeddings, queries: Packed) -> None:
    if found.documents.dim != queries.dim:
        raise DataError(
            f"{found.queries.folder}: query embeddings have d = {queries.dim}, the documents in {found.documents.folder} "
            f"d = {found.documents.dim}; both must come from one encoder"
        )


def _plan(task: Task, k: int, device: str, quiet: bool) -> Plan:
    excluded = np.full(len(task.query_ids), -1, np.int64)
    if task.exclude_same_id:
        place = {document: number for number, document in enumerate(task.document_ids)}
        excluded[:] = [place.get(query, -1) for query in task.query_ids]
    rows = np.arange(len(task.query_ids))
    if len(rows) * len(task.document_ids) > _ALL_PAIRS and len(rows) > _SAMPLED_QUERIES:
        rows = np.sort(np.random.default_rng(0).choice(len(rows), _SAMPLED_QUERIES, replace=False))
    return Plan(task.query_ids, task.document_ids, k, excluded, rows, device, quiet)


def _score_paths(
    names: Sequence[str], queries: Packed, corpus: Corpus, plan: Plan, task: Task, metrics: Sequence[str]
) -> tuple[dict[str, PathResult], dict[str, Run]]:
    results: dict[str, PathResult] = {}
    runs: dict[str, Run] = {}
    shape = (len(plan.kept_rows), corpus.entry.documents)
    with _scores(shape) as reference_scores, _scores(shape) as scores:
        for name in names:
            kept = reference_scores if name == REFERENCE else scores
            scored = score_path(name, queries, corpus, plan, kept if REFERENCE in names else None)
            runs[name] = to_run(name, scored, plan)
            results[name] = _path_result(name, runs[name], scored, task, metrics)
            if REFERENCE in names and name != REFERENCE:
                parity = compare(
                    results[REFERENCE],
                    results[name],
                    runs[REFERENCE],
                    runs[name],
                    reference_scores=reference_scores,
                    scores=scores,
                    k=plan.k,
                    score_rows=None if len(plan.kept_rows) == len(plan.query_ids) else plan.kept_rows.tolist(),
                )
                results[name] = _with_parity(results[name], _about_inputs(parity, name, corpus.entry))
    return results, runs


def _about_inputs(parity: Mapping[str, Any], name: str, entry: Documents) -> dict[str, Any]:
    """Whether the reference read the same rounded embeddings as this path: then only arithmetic can differ."""
    stored = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name)
    same = name == "fused-fp32" or (stored is not None and entry.dtype == stored)
    return {**parity, "reference_reads_same_inputs": same}


def _with_parity(path: PathResult, parity: Mapping[str, Any]) -> PathResult:
    return PathResult(path.metrics, path.per_query, path.seconds, path.run, path.description, parity)


def _path_result(name: str, run: Run, scored: Scored, task: Task, metrics: Sequence[str]) -> PathResult:
    per_query = evaluate_run(run, task.qrels, metrics)
    seconds = {part: round(value, 6) for part, value in scored.seconds.items()}
    return PathResult(means(per_query), per_query, seconds, None, PATHS[name].description)


@contextmanager
def _scores(shape: tuple[int, int]) -> Iterator[np.ndarray]:
    """Room for full score rows: in memory when small, else a scratch file that is gone afterwards."""
    if shape[0] * shape[1] * 4 <= _IN_MEMORY_BYTES:
        yield np.full(shape, -np.inf, np.float32)
        return
    with tempfile.TemporaryFile() as scratch:
        scratch.truncate(shape[0] * shape[1] * 4)
        yield np.memmap(scratch, dtype=np.float32, mode="r+", shape=shape)


def _task_facts(task: Task, queries: Packed, documents: Documents, said: Sequence[str]) -> dict[str, Any]:
    """What was evaluated: the task, or the subset of it that was kept."""
    return {
        "source": task.source,
        "dataset": task.dataset,
        "split": task.split,
        "queries": len(task.query_ids),
        "documents": len(task.document_ids),
        "document_tokens": documents.tokens,
        "query_tokens": int(queries.lengths.sum()),
        "judged_pairs": task.judged_pairs,
        "exclude_same_id": task.exclude_same_id,
        "warnings": list(dict.fromkeys(said)),
    }
