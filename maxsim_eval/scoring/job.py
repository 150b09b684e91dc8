"""What the processes of an evaluation share, and the scoring of all paths by it: units, shares, records, fingerprints.

The leader makes the job; every rank opens the cache itself, scores its share of every path and keeps finished units as records
under the output folder, where the leader reads the kept score rows for parity.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
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
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.certified import search_facts
from maxsim_eval.scoring.compressed import document_bytes, fit, fitted_path, state_digest
from maxsim_eval.scoring.own_functions import run_file
from maxsim_eval.scoring.paths import PATHS, ScoringPath, our_paths
from maxsim_eval.scoring.records import Records, ScoreRows
from maxsim_eval.scoring.scoring import Scored, score_path, to_run
from maxsim_eval.scoring.units import shares, units
from maxsim_eval.types import Run
from maxsim_kernels import Packed

FORMAT = 4  # of what is kept and how it is computed: a change of either makes earlier records useless
UNIT_SCORES = 128 << 20  # bytes of a unit's kept score rows: a few are in memory at once
_PATIENCE = PATIENCE
KeptRows = np.ndarray | ScoreRows


@dataclass(frozen=True)
class Searched:
    """Which documents are searched: every rank opens them itself, and finds the same or refuses.

    `rows` are documents of the entry (None: all), `copies` the stamps of the quantised copies that paths read, by path; `checked`
    says whether values are proven whenever they are read.
    """

    entry: Path
    rows: np.ndarray | None
    stamp: Mapping[str, Any]
    copies: Mapping[str, Mapping[str, Any]]
    checked: bool

    @classmethod
    def of(cls, documents: Documents, paths: Iterable[str]) -> Searched:
        """These documents, and their copies that these paths read."""
        rows = documents.rows if isinstance(documents, Selection) else None
        copies = {name: copy.stamp() for name, copy in find_copies(paths, documents).items()}
        return cls(documents.folder, rows, documents.stamp(), copies, documents.checked)

    def open(self) -> Documents:
        """The documents, opened by this process and proven to be the job's."""
        entry = open_entry(self.entry)
        documents: Documents = entry if self.rows is None else Selection(entry, self.rows)
        if documents.stamp() != self.stamp:
            raise CacheError(f"{self.entry}: not the entry that rank 0 has opened; all processes need the same cache")
        return documents if self.checked else documents.unchecked()

    def open_copies(self, documents: Documents) -> dict[str, Quantised]:
        """The quantised copies, opened by this process and proven to be the job's."""
        found = find_copies(self.copies, documents)
        if {name: copy.stamp() for name, copy in found.items()} != self.copies:
            raise CacheError(
                f"{self.entry}: its quantised copies are not those that rank 0 has opened; all processes need the same"
            )
        return found


@dataclass(frozen=True)
class Division:
    """How the work is divided: units of documents that are scored and kept whole, and each rank's share of them, by number."""

    units: Sequence[tuple[int, int]]
    shares: Sequence[range]

    def span(self, rank: int) -> list[tuple[int, int]]:
        """The documents (start, stop) of a rank; none where its share is empty."""
        share = self.shares[rank]
        return [(self.units[share.start][0], self.units[share.stop - 1][1])] if share else []


@dataclass(frozen=True)
class Keeping:
    """Where finished units go, and what tells this evaluation's from any other's.

    `folder` is where records go (None: nothing is kept), `in_memory` says that score rows stay with the process, `token` names a file
    in the folder that proves it shared. `identity` is what every path's records depend on, `sources` the digests of users' own
    functions (`sources_of`).
    """

    folder: Path | None
    in_memory: bool
    token: str
    identity: Mapping[str, Any]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Streaming:
    """How the corpus is streamed; no result depends on it."""

    memory_budget: int | None  # bytes of GPU memory
    readers: int  # threads
    quiet: bool


@dataclass(frozen=True)
class Job:
    """An evaluation's scoring, in what every rank needs to know of it.

    Ids of documents and paths do not travel: every rank puts its own into `asked`.
    """

    names: tuple[str, ...]
    queries: Packed
    asked: Asked
    searched: Searched
    division: Division
    keeping: Keeping
    streaming: Streaming

    @property
    def keeps(self) -> bool:
        """Whether score rows are kept."""
        return len(self.asked.kept_rows) > 0


@dataclass(frozen=True)
class Outcome:
    """What a path gave: its ranking, where the time went, the kept score rows (None: not kept), peaks of memory and bytes stored."""

    run: Run
    seconds: Mapping[str, float]
    rows: KeptRows | None
    memory: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] | None = None  # of a certified path: the work of certifying


def find_copies(names: Iterable[str], documents: Documents) -> dict[str, Quantised]:
    """The quantised copies in the cache that these paths read instead of the documents, by path."""
    found, paths = {}, our_paths()
    for name in names:
        kind = paths[name].copy if name in paths else None  # a user's function reads what is stored
        copy = None if kind is None else quantised(documents, kind)
        if copy is not None:
            found[name] = copy
    return found


def sources_of(paths: Mapping[str, ScoringPath]) -> dict[str, str]:
    """Digests of users' functions, which their records depend on; where a function's source is not known, one that never fits."""
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


def identity_of(documents: Documents, queries: Packed, asked: Asked) -> dict[str, Any]:
    """What the records of every path depend on, as JSON."""
    candidates = asked.candidates
    return {
        "documents": documents.stamp(),
        "checked": documents.checked,
        "queries": digest(queries.values, queries.lengths),
        "k": asked.k,
        "excluded": digest(asked.excluded),
        "kept_rows": digest(asked.kept_rows),
        "candidates": None if candidates is None else digest(candidates.offsets, candidates.rows),
    }


def score_job(
    job: Job,
    world: World,
    device: str,
    documents: Documents | None = None,
    document_ids: Sequence[str] | None = None,
    *,
    words: Callable[[], Iterator[Sequence[str]]] | None = None,
    paths: Mapping[str, ScoringPath] = PATHS,
) -> Iterator[Outcome]:
    """Score every path; yields outcomes on the leader, and nothing on other ranks, which must iterate it all the same.

    What ranks must have in common is checked by the call itself, before anything is scored.

    Args:
        device: of this rank.
        documents, document_ids: the job's, where this process has them already.
        words: what the documents' tokens stand for, document by document; None: not known.
        paths: the job's by name, as this process knows them (`own_functions.find_paths`).

    Raises:
        DataError: a score that is no finite number, or an output folder that ranks do not share. CacheError: a cache file that is not
            what it was, records that cannot be written. UsageError: ranks whose hardware, versions or users' functions differ.
            RankError: another rank failed.
    """
    prove_shared(job.keeping, world)
    _require_same_functions(job.keeping.sources, world, paths)
    documents = documents or job.searched.open()
    machine = machine_of(device)
    require_same_machines(world.collect(machine), "scores")
    spans, scaled = job.division.span(world.rank), None
    if job.asked.candidates is not None and isinstance(documents, Selection):
        scaled = documents.entry
        spans = [(scaled.documents * world.rank // world.size, scaled.documents * (world.rank + 1) // world.size)]
    corpus = Corpus(
        documents,
        quiet=job.streaming.quiet or not world.leader,
        device=device,
        memory_budget=job.streaming.memory_budget,
        readers=job.streaming.readers,
        spans=spans,
        agree=world.largest,
        copies=job.searched.open_copies(documents),
        scaled=scaled,
        words=words,
    )
    asked = replace(job.asked, document_ids=_Names(documents) if document_ids is None else document_ids, paths=paths)
    return _score_all(replace(job, asked=asked), world, corpus, machine)


def _score_all(job: Job, world: World, corpus: Corpus, machine: Mapping[str, Any]) -> Iterator[Outcome]:
    for name in job.names:
        watched = peak_memory.start(corpus.device)
        outcome = _score(name, job, world, corpus, machine)
        memory = peak_memory.largest(world.collect(watched()))
        if outcome is not None:
            yield replace(outcome, memory={**outcome.memory, **memory})


def _score(name: str, job: Job, world: World, corpus: Corpus, machine: Mapping[str, Any]) -> Outcome | None:
    asked, division, keeping = job.asked, job.division, job.keeping
    path, learned, memory = asked.paths[name], None, dict[str, Any]()
    if path.codec is not None:  # one process learns, so that all have the same
        state = world.share(fit(path.codec, corpus) if world.leader else None)
        asked = replace(asked, paths={**asked.paths, name: fitted_path(path, state)})
        learned, memory = state_digest(state), {"document_bytes": document_bytes(path.codec, state, corpus.entry)}
    # All ranks agree on the scale here, before any of them finds that its units are done.
    scale = corpus.scale(name) if path.corpus_scale else None
    kept, keeps = None, job.keeps and not path.certified
    if keeps and keeping.in_memory:
        kept = np.full((len(asked.kept_rows), corpus.entry.documents), -np.inf, np.float32)
    score = partial(
        score_path, name, job.queries, corpus, asked, kept, units=division.units, share=division.shares[world.rank], world=world
    )
    if keeping.folder is None:
        return _outcome(name, score(), asked, kept, memory, corpus)
    identity = {
        **keeping.identity,
        "format": FORMAT,
        "path": name,
        "description": path.description,
        "scale": scale,
        "codec": learned,
        "copy": job.searched.copies.get(name),
        "machine": machine,
    }
    if name in keeping.sources:
        identity["source"] = keeping.sources[name]
    with Records(keeping.folder / run_file(name).removesuffix(".trec"), identity) as records:
        scored = score(records=records, keep=keeps)
    from_files = world.leader and keeps and kept is None
    return _outcome(name, scored, asked, records.rows(division.units) if from_files else kept, memory, corpus)


def _outcome(
    name: str, scored: Scored | None, asked: Asked, rows: KeptRows | None, memory: Mapping[str, Any], corpus: Corpus
) -> Outcome | None:
    if scored is None:
        return None
    run, search = to_run(name, scored, asked), None
    if asked.paths[name].certified:
        counted = scored.counts, len(asked.query_ids), corpus.entry, corpus.copies[name]
        search, memory = search_facts(*counted, corpus.device, asked.paths[name].precision)
        run = replace(run, tag=search["certifies"][0])
    return Outcome(run, scored.seconds, rows, memory, search)


def new_token(folder: Path) -> str:
    """Write a file into the folder that other ranks must find there."""
    token = f"token-{uuid.uuid4().hex}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / token).touch()
    return token


def prove_shared(keeping: Keeping, world: World) -> None:
    """Refuse an output folder that not every rank sees: score rows are handed over there."""
    folder = keeping.folder
    if world.size == 1 or folder is None:
        return
    blind = blind_ranks(folder / keeping.token, world, _PATIENCE)
    if world.leader:
        (folder / keeping.token).unlink(missing_ok=True)
    if blind:
        raise DataError(
            f"{folder}: not seen by rank {', '.join(map(str, blind))}; with several processes the output folder must lie on a "
            "file system that all of them see (--out)"
        )


def _require_same_functions(sources: Mapping[str, str], world: World, paths: Mapping[str, ScoringPath]) -> None:
    """Refuse users' functions, which every rank imports itself, whose source is known to differ between ranks."""
    mine = {name: paths[name].source for name in sources}
    for rank, theirs in enumerate(world.collect(mine) if sources else ()):
        for name, source in theirs.items():
            if source is not None and source != sources[name]:
                raise UsageError(f"path {name}: its source on rank {rank} is another than on rank 0; all need the same file")


@dataclass(frozen=True)
class _Names(Sequence[str]):
    """Ids of documents, read from the cache when one is asked for: other ranks than the leader need them only for messages."""

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
