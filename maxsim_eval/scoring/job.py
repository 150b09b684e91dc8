"""What the processes of an evaluation share, and the scoring of all paths by it: units, shares, records, fingerprints.

The leader makes the job; every rank opens the cache itself, scores its share of every path and keeps finished units as records
under the output folder, where the leader reads the kept score rows for parity.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.cache.copies import Quantised, quantised
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.entries import open_entry
from maxsim_eval.cache.selection import Documents, Selection
from maxsim_eval.errors import CacheError, DataError, UsageError
from maxsim_eval.hashing import canonical, feed
from maxsim_eval.processes import peak_memory
from maxsim_eval.processes.agreement import PATIENCE, blind_ranks, machine_of, require_same_machines
from maxsim_eval.processes.world import World
from maxsim_eval.scoring.candidates import Candidates
from maxsim_eval.scoring.own_functions import run_file
from maxsim_eval.scoring.paths import PATHS, ScoringPath
from maxsim_eval.scoring.records import Records, ScoreRows
from maxsim_eval.scoring.scoring import Scored, score_path, to_run
from maxsim_eval.scoring.stream import Plan
from maxsim_eval.scoring.units import shares, units
from maxsim_eval.types import Run
from maxsim_kernels import Packed

FORMAT = 1  # of what is kept and how it is computed: a change of either makes records of before worthless
UNIT_SCORES = 128 << 20  # bytes of a unit's kept score rows: a few are in memory at once
_PATIENCE = PATIENCE
Rows = np.ndarray | ScoreRows


@dataclass(frozen=True)
class Job:
    """An evaluation's scoring, in what every rank needs to know of it.

    `rows` are the documents of the entry that are searched (None: all), `kept_rows` the queries whose score rows are kept (empty:
    none), `folder` is where records go (None: nothing is kept), `in_memory` says that score rows stay with the process, `token` names
    a file in the folder that proves it shared, `copies` are the stamps of the quantised copies that paths read, by path, `sources`
    the digests of users' own functions (`sources_of`).
    """

    names: tuple[str, ...]
    queries: Packed
    query_ids: Sequence[str]
    entry: Path
    rows: np.ndarray | None
    stamp: Mapping[str, Any]
    identity: Mapping[str, Any]
    k: int
    excluded: np.ndarray
    kept_rows: np.ndarray
    candidates: Candidates | None
    units: Sequence[tuple[int, int]]
    shares: Sequence[range]
    folder: Path | None
    in_memory: bool
    token: str
    memory_budget: int | None
    readers: int
    quiet: bool
    copies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def keeps(self) -> bool:
        """Whether score rows are kept."""
        return len(self.kept_rows) > 0

    def open(self) -> Documents:
        """The documents, opened by this process and proven to be the job's."""
        entry = open_entry(self.entry)
        documents: Documents = entry if self.rows is None else Selection(entry, self.rows)
        if documents.stamp() != self.stamp:
            raise CacheError(f"{self.entry}: not the entry that rank 0 has opened; all processes need the same cache")
        return documents

    def open_copies(self, documents: Documents) -> dict[str, Quantised]:
        """The quantised copies, opened by this process and proven to be the job's."""
        found = find_copies(self.copies, documents)
        if {name: copy.stamp() for name, copy in found.items()} != self.copies:
            raise CacheError(
                f"{self.entry}: its quantised copies are not those that rank 0 has opened; all processes need the same"
            )
        return found


@dataclass(frozen=True)
class Outcome:
    """What a path gave: its ranking, where the time went, the kept score rows (None: not kept), and its peaks of memory."""

    run: Run
    seconds: Mapping[str, float]
    rows: Rows | None
    memory: Mapping[str, int | None] = field(default_factory=dict)


def find_copies(names: Iterable[str], documents: Documents) -> dict[str, Quantised]:
    """The quantised copies in the cache that these paths read instead of the documents, by path."""
    found = {}
    for name in names:
        kind = PATHS[name].copy if name in PATHS else None  # a user's function reads what is stored
        copy = None if kind is None else quantised(documents, kind)
        if copy is not None:
            found[name] = copy
    return found


def sources_of(paths: Mapping[str, ScoringPath]) -> dict[str, str]:
    """Digests of users' functions, which their records depend on; one that fits nothing where it is not known what a function does."""
    return {name: path.source or f"once {uuid.uuid4().hex}" for name, path in paths.items() if path.own}


def divide(documents: Documents, kept_rows: int, ranks: int) -> tuple[list[tuple[int, int]], list[range]]:
    """Units of a corpus and each rank's share of them; units depend on the corpus and the number of kept score rows alone."""
    lengths = documents.lengths()
    found = []
    for start, stop in units(lengths, documents.dim * documents.dtype.itemsize):
        parts = -(-(stop - start) * kept_rows * 4 // UNIT_SCORES) or 1
        step = -(-(stop - start) // parts)
        found += [(first, min(first + step, stop)) for first in range(start, stop, step)]
    tokens = [int(lengths[start:stop].sum()) for start, stop in found]
    return found, shares(found, tokens, ranks)


def digest(*arrays: np.ndarray | Tensor) -> str:
    """SHA-256 of arrays or CPU tensors: shapes, dtypes and bytes."""
    found = hashlib.sha256()
    for array in arrays:
        held = array.contiguous() if isinstance(array, Tensor) else np.ascontiguousarray(array)
        content = held.reshape(-1).view(torch.uint8).numpy() if isinstance(held, Tensor) else held
        feed(found, [canonical([list(held.shape), str(held.dtype)]), content.tobytes()])
    return found.hexdigest()


def score_job(
    job: Job,
    world: World,
    device: str,
    documents: Documents | None = None,
    document_ids: Sequence[str] | None = None,
    *,
    paths: Mapping[str, ScoringPath] = PATHS,
) -> Iterator[Outcome]:
    """Score every path; outcomes come on the leader, elsewhere nothing does (but it must be iterated all the same).

    What ranks must have in common is proven at once, before anything is scored.

    Args:
        device: of this rank.
        documents, document_ids: the job's, where this process has them already.
        paths: the job's by name, as this process knows them (`scorers.find_paths`).

    Raises:
        DataError: a NaN score or an output folder that ranks do not share. CacheError: a cache file that is not what it was, records
            that cannot be written. UsageError: ranks whose hardware, versions or users' functions differ. RankError: another rank
            failed.
    """
    prove_shared(job, world)
    _require_same_functions(job, world, paths)
    documents = documents or job.open()
    machine = machine_of(device)
    require_same_machines(world.collect(machine), "scores")
    share = job.shares[world.rank]
    spans = [(job.units[share.start][0], job.units[share.stop - 1][1])] if share else []
    scaled = None
    if job.candidates is not None and isinstance(documents, Selection):
        scaled = documents.entry
        spans = [(scaled.documents * world.rank // world.size, scaled.documents * (world.rank + 1) // world.size)]
    copies = job.open_copies(documents)
    corpus = Corpus(
        documents, job.quiet or not world.leader, device, job.memory_budget, job.readers, spans, world.largest, copies, scaled
    )  # fmt: skip
    plan = Plan(
        query_ids=job.query_ids,
        document_ids=_Names(documents) if document_ids is None else document_ids,
        k=job.k,
        excluded=job.excluded,
        kept_rows=job.kept_rows,
        device=device,
        quiet=job.quiet,
        memory_budget=job.memory_budget,
        readers=job.readers,
        candidates=job.candidates,
        paths=paths,
    )
    return _score_all(job, world, corpus, plan, machine, device)


def _score_all(
    job: Job, world: World, corpus: Corpus, plan: Plan, machine: Mapping[str, Any], device: str
) -> Iterator[Outcome]:
    for name in job.names:
        watched = peak_memory.start(device)
        outcome = _score(name, job, world, corpus, plan, machine)
        memory = peak_memory.largest(world.collect(watched()))
        if outcome is not None:
            yield replace(outcome, memory=memory)


def _score(name: str, job: Job, world: World, corpus: Corpus, plan: Plan, machine: Mapping[str, Any]) -> Outcome | None:
    # All ranks agree on the scale here, before any of them finds that its units are done.
    scale = corpus.scale(name) if plan.paths[name].corpus_scale else None
    kept = None
    if job.keeps and job.in_memory:
        kept = np.full((len(job.kept_rows), corpus.entry.documents), -np.inf, np.float32)
    share = job.shares[world.rank]
    if job.folder is None:
        scored = score_path(name, job.queries, corpus, plan, kept, units=job.units, share=share, world=world)
        return _outcome(name, scored, plan, kept)
    path = {"format": FORMAT, "path": name, "description": plan.paths[name].description, "scale": scale}
    path["copy"] = job.copies.get(name)
    if name in job.sources:
        path["source"] = job.sources[name]
    with Records(job.folder / run_file(name).removesuffix(".trec"), {**job.identity, **path, "machine": machine}) as records:
        scored = score_path(
            name, job.queries, corpus, plan, kept, units=job.units, share=share, records=records, keep=job.keeps, world=world
        )  # fmt: skip
    from_files = world.leader and job.keeps and kept is None
    return _outcome(name, scored, plan, records.rows(job.units) if from_files else kept)


def _outcome(name: str, scored: Scored | None, plan: Plan, rows: Rows | None) -> Outcome | None:
    return None if scored is None else Outcome(to_run(name, scored, plan), scored.seconds, rows)


def new_token(folder: Path) -> str:
    """Write a file into the folder that other ranks must find there."""
    token = f"token-{uuid.uuid4().hex}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / token).touch()
    return token


def prove_shared(job: Job, world: World) -> None:
    """Every rank must see the leader's output folder: score rows are handed over there."""
    if world.size == 1 or job.folder is None:
        return
    blind = blind_ranks(job.folder / job.token, world, _PATIENCE)
    if world.leader:
        (job.folder / job.token).unlink(missing_ok=True)
    if blind:
        raise DataError(
            f"{job.folder}: not seen by rank {', '.join(map(str, blind))}; with several processes the output folder must lie on a "
            "file system that all of them see (--out)"
        )


def _require_same_functions(job: Job, world: World, paths: Mapping[str, ScoringPath]) -> None:
    """Every rank imports a user's function itself: from the same source, where that is known."""
    mine = {name: paths[name].source for name in job.sources}
    for rank, theirs in enumerate(world.collect(mine) if job.sources else ()):
        for name, source in theirs.items():
            if source is not None and source != job.sources[name]:
                raise UsageError(f"path {name}: its source on rank {rank} is another than on rank 0; all need the same file")


@dataclass(frozen=True)
class _Names(Sequence[str]):
    """Ids of documents, read from the cache when one is asked for: other ranks than the leader need them for a failure alone."""

    documents: Documents = field(repr=False)

    def __len__(self) -> int:
        return self.documents.documents

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._all[index]

    @cached_property
    def _all(self) -> list[str]:
        if isinstance(self.documents, Selection):
            names = self.documents.entry.ids()
            return [names[row] for row in self.documents.rows.tolist()]
        return self.documents.ids()
