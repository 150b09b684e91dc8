"""What is evaluated: the settings, the part of a task that is searched, its embeddings, the candidates."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from maxsim_eval.cache.embeddings import Embeddings, embeddings_by, query_tokens
from maxsim_eval.comparison.metrics import DEFAULT_METRICS, evaluate_run, judgements, parse_metric
from maxsim_eval.data.assembling import Part, judgement_warnings
from maxsim_eval.data.beir import Judgements, check_id, check_name
from maxsim_eval.data.loading import Unread
from maxsim_eval.data.subsets import limit_task
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.files import alone
from maxsim_eval.first_stage.names import staged
from maxsim_eval.first_stage.stage import Texts, Tokens
from maxsim_eval.processes.world import World
from maxsim_eval.scoring.candidates import Candidates, candidates_of, read_candidates
from maxsim_eval.scoring.own_functions import Chosen, find_paths
from maxsim_eval.scoring.paths import ScoringPath, our_paths
from maxsim_eval.types import Encoder, Run, Task, TokenTexts

DEFAULT_PATHS = ("fp32", "fp16", "int8")
OutDir = Path | str | None


@dataclass(frozen=True)
class Settings:
    """The arguments of an evaluation, except the task and the output folder; `evaluate` documents them."""

    encoder: Encoder | str
    encoder_options: Mapping[str, Any] = field(default_factory=dict)
    paths: Sequence[Chosen] = DEFAULT_PATHS
    k: int = 100
    cache_dir: Path | str = "embeddings_cache"
    metrics: Sequence[str] = DEFAULT_METRICS
    limit_queries: int | None = None
    limit_documents: int | None = None
    limit_seed: int = 0
    candidates: Path | str | None = None
    device: str = "auto"
    memory_budget: int | None = None
    readers: int = 8
    fresh: bool = False
    verify: bool = True
    command: Sequence[str] = ()
    quiet: bool = False

    @property
    def limits(self) -> dict[str, int | None]:
        """Both limits, as `subsets` takes them."""
        return {"queries": self.limit_queries, "documents": self.limit_documents}

    def check(self) -> dict[str, ScoringPath]:
        """The paths by name, in order; what cannot work is a `UsageError`."""
        paths = find_paths(self.paths)
        if not paths:
            raise UsageError("paths: got none, need at least one of " + ", ".join(our_paths()))
        for name in ("k", "readers", "memory_budget", "limit_queries", "limit_documents"):
            value = getattr(self, name)
            if value is None and name not in ("k", "readers"):
                continue
            kind = Real if name == "memory_budget" else Integral  # bytes may be written as 8e9
            if isinstance(value, bool) or not isinstance(value, kind):
                raise UsageError(f"{name}: got {value!r}, need a whole number")
            if value < 1 and not name.startswith("limit"):  # `subsets` says it of limits
                raise UsageError(f"{name}: got {value}, need 1 or more")
        for metric in self.metrics:
            parse_metric(metric)
        return paths


def as_tuple(what: str, given: Iterable[Any]) -> tuple[Any, ...]:
    """The names that an argument holds, as a tuple: they are read more than once, which a generator does not allow.

    Raises:
        UsageError: a single text, whose letters would be taken for names, or nothing that can be iterated.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(f"{what}: got {given!r}, need a list of names" + (f": [{given!r}]" if isinstance(given, str) else ""))
    return tuple(given)


@dataclass(frozen=True)
class Subject:
    """What is evaluated, and where its report goes. `kept` is the part of `task` that its limits leave."""

    task: Task
    kept: Task
    candidates: Candidates | None
    out_dir: Path | None
    words: Callable[[], Iterator[Sequence[str]]] | None = None  # what the documents' tokens stand for

    @functools.cached_property
    def document_ids(self) -> Sequence[str]:
        """Ids of the documents that are searched."""
        if self.candidates is None:
            return self.kept.document_ids
        return [self.kept.document_ids[row] for row in self.candidates.union().tolist()]


def embedded(
    settings: Settings,
    task: Task | Unread,
    out_dir: OutDir | Callable[[Task], OutDir],
    world: World,
    device: str,
    stack: contextlib.ExitStack,
) -> tuple[Subject, Embeddings] | None:
    """What is evaluated, and its embeddings; None except on the leader (other processes drop texts that they loaded to help)."""

    @functools.cache
    def subject() -> Subject:
        found = _subject_of(settings, task, out_dir, world)
        if world.leader and found.out_dir is not None:
            stack.enter_context(alone(found.out_dir))  # until the report is written
        return found

    def both() -> tuple[Task, Task]:
        return subject().task, subject().kept

    found = embeddings_by(
        world,
        both,
        settings.encoder,
        settings.cache_dir,
        of=task.there if isinstance(task, Unread) else (task.source, task.dataset),
        device=device,
        quiet=settings.quiet,
        **settings.encoder_options,
    )
    if found is None:
        return None
    if not settings.verify:
        found = replace(found, queries=found.queries.unchecked(), documents=found.documents.unchecked())
    named = replace(subject(), words=_words(settings, subject().kept, found.made_by))
    found = replace(found, made_by=None)  # the model's memory is for scoring now
    return _with_first_stage(settings, named, found, device), found


def _words(settings: Settings, kept: Task, encoder: Encoder | None) -> Callable[[], Iterator[Sequence[str]]] | None:
    """A function that gives each document's token texts; None unless a codec reads them, as it keeps the encoder in memory."""
    codecs = [path.codec for path in settings.check().values() if path.codec is not None]
    if not isinstance(encoder, TokenTexts) or not any(shape.reads_words for codec in codecs for shape in codec.shapes):
        return None
    return lambda: (encoder.token_texts(document, "document") or () for document in kept.documents)


def _with_first_stage(settings: Settings, subject: Subject, found: Embeddings, device: str) -> Subject:
    """Add the candidates that a first stage finds, where `settings.candidates` names one instead of a run."""
    asked = None if settings.candidates is None else staged(str(settings.candidates))
    if asked is None:
        return subject
    stage, depth = asked
    source: Texts | Tokens = Texts(subject.kept.queries, subject.kept.documents)
    if stage.reads == "embeddings":
        source = Tokens(query_tokens(subject.task, subject.kept, found.queries), found.documents)
    depth = min(depth, len(subject.kept.document_ids))
    indices = stage.search(source, depth, device=device, quiet=settings.quiet).indices
    name = re.sub(r"\s", "", str(settings.candidates))
    return replace(subject, candidates=candidates_of(name, indices, subject.kept))


def _subject_of(settings: Settings, given: Task | Unread, place: OutDir | Callable[[Task], OutDir], world: World) -> Subject:
    task = given() if isinstance(given, Unread) else given
    out_dir = place(task) if callable(place) else place
    if world.size > 1 and out_dir is None:
        raise UsageError("out_dir: got None, need a folder that all processes see: what they find is handed over there")
    for what, name in (("source", task.source), ("dataset", task.dataset), ("split", task.split)):
        check_name(what, name)
    for what, found in (("documents", task.documents), ("queries", task.queries)):
        if len(found) == 0:
            raise DataError(f"{task.source} {task.dataset}: holds no {what}, need at least one to evaluate")
    if task is given:  # what is read here was checked by its loader
        task = _checked(settings, task, written=out_dir is not None)
    kept = limit_task(task, **settings.limits, seed=settings.limit_seed)
    if settings.metrics:  # refuses judgements that a metric cannot use before anything is scored
        evaluate_run(Run("none", {}), kept.qrels, settings.metrics)
    candidates = None
    if settings.candidates is not None and world.leader and staged(str(settings.candidates)) is None:
        candidates = read_candidates(settings.candidates, kept)
    return Subject(task, kept, candidates, None if out_dir is None else Path(out_dir))


def _checked(settings: Settings, task: Task, *, written: bool) -> Task:
    """A task made in Python, checked as loaders check their files; what a loader would only warn of is added to its warnings.

    Raises:
        DataError: ids that are no texts, occur twice or, where runs are `written`, cannot be in a run file; judgements of unknown
            queries, of unknown documents only, or without a relevant document.
    """
    for what, ids in (("query_ids", task.query_ids), ("document_ids", task.document_ids)):
        _check_ids(what, ids, written)
    if not settings.metrics:  # then judgements decide nothing
        return task
    judged, queries = judgements(task.qrels), set(task.query_ids)
    unknown = [query for query in judged if query not in queries]
    if unknown:
        raise DataError(
            f"qrels: {len(unknown)} of {len(judged)} judged queries are not among the {len(queries)} query_ids, first {unknown[0]!r}; "
            "need judgements of these queries alone: any other would count 0 in every mean"
        )
    sides = Part(task.query_ids, (), "query_ids"), Part(task.document_ids, (), "document_ids")
    said = list(judgement_warnings("qrels", Judgements(judged), *sides))
    unjudged = [query for query in task.query_ids if query not in judged]
    if unjudged:
        said.append(
            f"qrels: {len(unjudged)} of {len(queries)} queries have no judgement, first {unjudged[0]!r}; they are searched, and no "
            "metric counts them"
        )
    # A loader gives the same warnings in the same words, with the names of its files: those are not repeated.
    parts = {line: line.removeprefix("qrels").split("document_ids") for line in said}
    new = [line for line in said if not any(all(part in old for part in parts[line]) for old in task.warnings)]
    return replace(task, warnings=(*task.warnings, *new)) if new else task


def _check_ids(what: str, ids: Sequence[str], written: bool) -> None:
    for name in ids:
        if not isinstance(name, str):
            raise DataError(f"{what}: got {name!r}, a {type(name).__name__}, need texts")
        if written:
            check_id("out_dir", what.removesuffix("s").replace("_", " "), name)
    hashes = np.sort(np.fromiter(map(hash, ids), np.int64, len(ids)))  # a set of five million ids takes a third of a gigabyte
    if bool((hashes[1:] == hashes[:-1]).any()):
        name, times = Counter(ids).most_common(1)[0]
        if times > 1:
            raise DataError(f"{what}: {name!r} stands there {times} times, need each id once")
