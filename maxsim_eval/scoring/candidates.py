"""Reranking: the (query, document) pairs of an existing run are scored, and only their documents are read.

How a path is scored with candidates:

    candidates = read_candidates("bm25.trec", task)
    documents = candidates.choose(entry)               # a Selection: every listed document once, in corpus order
    listed = candidates.within(candidates.union())     # the same pairs, numbered as in the Selection
    scores = pair_scores(path.score, queries, block, listed, first)   # in place of path.score(queries, block)

`block` holds documents `first ..` of the Selection, prepared by the path (cast or quantised) on the queries' device. What is not
listed scores -inf, which is "not retrieved" everywhere in the toolkit: exclusion, kept rows, the running top-k and its tie rule go on
as in a full evaluation. Only which documents a query lists matters: ranks and scores of the run are not used.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.cache.selection import Documents, Selection, choose
from maxsim_eval.data.trec import read_trec_run
from maxsim_eval.errors import DataError
from maxsim_eval.hashing import feed
from maxsim_eval.types import Run, Task
from maxsim_kernels import BitTokens, Fp8Tokens, Int8Tokens, Packed, ResidualTokens, maxsim, maxsim_pairs

_MOST_PAIRS = 1 << 17  # scored by one call: on a CPU each costs some 200 bytes of bookkeeping
Tokens = TypeVar("Tokens", Packed, Int8Tokens, Fp8Tokens, BitTokens, ResidualTokens)


@dataclass(frozen=True, eq=False)
class Candidates:
    """Which documents each query may retrieve.

    Args:
        name: of the run they come from.
        offsets: `[Nq + 1]` int64, from 0: query q lists `rows[offsets[q]:offsets[q + 1]]`.
        rows: `[P]` int64 document numbers, ascending within a query, each once.
        sha256: of the pairs by their ids; neither the file's place nor its order, ranks and scores change it.
        warnings: what was said while the run was read.
    """

    name: str
    offsets: np.ndarray = field(repr=False)
    rows: np.ndarray = field(repr=False)
    sha256: str = ""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        offsets, rows = self.offsets, self.rows
        if offsets.dtype != np.int64 or rows.dtype != np.int64 or offsets.ndim != 1 or rows.ndim != 1 or not offsets.size:
            raise ValueError(f"candidates: got {offsets.dtype} {offsets.shape} and {rows.dtype} {rows.shape}, need 1-D int64")
        if offsets[0] != 0 or offsets[-1] != len(rows) or (np.diff(offsets) < 0).any():
            raise ValueError(f"offsets: need numbers from 0 to the {len(rows)} pairs, never decreasing")
        falls = np.diff(rows) < 1
        falls[offsets[(offsets > 0) & (offsets < len(rows))] - 1] = False  # the next query begins anew
        if falls.any() or (rows < 0).any():
            raise ValueError("rows: need numbers from 0, ascending within a query, each once")

    @property
    def queries(self) -> int:
        """Number of queries Nq, those without candidates included."""
        return len(self.offsets) - 1

    @property
    def pairs(self) -> int:
        """Number of listed pairs P."""
        return len(self.rows)

    def union(self) -> np.ndarray:
        """`[M]` int64: every listed document once, ascending."""
        return np.unique(self.rows)

    def within(self, union: np.ndarray) -> Candidates:
        """The same pairs with the documents renumbered to their places in `union` (`[M]` int64, ascending, all listed ones)."""
        rows = places(union, self.rows)
        if (rows < 0).any():
            raise ValueError(f"union: {int((rows < 0).sum())} listed pairs are of documents it lacks")
        return replace(self, rows=rows)

    def choose(self, documents: Documents) -> Selection:
        """The listed documents alone, of an entry or a subset of one whose documents are the task's."""
        return choose(documents, self.union())

    def of(self, queries: Iterable[int]) -> list[np.ndarray]:
        """The document numbers that each of these queries lists, ascending: `listed` of `parity.compare`."""
        return [self.rows[self.offsets[query] : self.offsets[query + 1]] for query in queries]

    def facts(self) -> dict[str, Any]:
        """What a Result and a fingerprint say of them; JSON-able, without paths."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "pairs": self.pairs,
            "documents": len(self.union()),
            "queries": self.queries,
            "queries_without": int((np.diff(self.offsets) == 0).sum()),
        }

    def block(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of documents `first .. stop`, by document: query numbers `[p]`, and document numbers less `first` `[p]`."""
        queries, documents = self._by_document
        span = slice(*np.searchsorted(documents, (first, stop)))
        return queries[span], documents[span] - first

    def block_on(self, first: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`block` as int64 tensors on a device; nothing waits for a GPU."""
        row, column = _on_device(np.stack(self.block(first, stop)), device)
        return row, column

    @cached_property
    def _by_document(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.rows, kind="stable")
        return np.repeat(np.arange(self.queries), np.diff(self.offsets))[order], self.rows[order]


def places(union: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Where document numbers stand in `union` (`[M]` int64, ascending); -1 for those it lacks."""
    found = np.searchsorted(union, numbers)
    inside = found < len(union)
    inside[inside] = union[found[inside]] == numbers[inside]
    return np.where(inside, found, -1)


def read_candidates(path: Path | str, task: Task) -> Candidates:
    """The pairs that a TREC run of any tool lists for the queries of a task.

    Queries that the task lacks are left out, and queries that the run lacks retrieve nothing (they score 0 and stay in the means);
    each is said in one warning. A listed document that is not among the task's is an error, of a limited task too: leaving it out
    would give the query another list than the run's, and with the judged documents all kept, a better one.

    Raises:
        DataError: a malformed file (see `trec.read_trec_run`), a document that is not the task's, no query of the task's.
    """
    run = read_trec_run(path)
    kept = {query: [document for document, _ in run.rankings[query]] for query in task.query_ids if query in run.rankings}
    if not kept:
        raise DataError(
            f"{path}: none of its {len(run.rankings)} queries is among the {len(task.query_ids)} of {task.source} "
            f"{task.dataset} (it has {_some(run.rankings)}, the task {_some(task.query_ids)}); need a run of these queries"
        )
    number = _numbers(path, task, kept)
    said = tuple(_warnings(task, run, kept))
    for sentence in said:
        warnings.warn(sentence, stacklevel=2)
    parts = [np.sort(np.fromiter((number[name] for name in kept.get(query, ())), np.int64)) for query in task.query_ids]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(part) for part in parts], dtype=np.int64)])
    return Candidates(run.name, offsets, np.concatenate(parts), _sha256(kept), said)


def candidates_of(name: str, indices: np.ndarray, task: Task) -> Candidates:
    """Candidates from what a first stage found: `indices` `[Nq, n]` int64 documents for the task's queries (-1: fewer than n)."""
    parts = [np.sort(row[row >= 0]) for row in indices]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(part) for part in parts], dtype=np.int64)])
    kept = {query: [task.document_ids[row] for row in part.tolist()] for query, part in zip(task.query_ids, parts, strict=True)}
    found = Candidates(name, offsets, np.concatenate(parts) if parts else np.zeros(0, np.int64), _sha256(kept))
    if not found.pairs:
        raise DataError(
            f"candidates {name!r}: nothing was found for any of the {len(parts)} queries, so there is nothing to rerank"
        )
    said = tuple(_warnings(task, Run(name, kept), {query: names for query, names in kept.items() if names}))
    for sentence in said:
        warnings.warn(sentence, stacklevel=2)
    return replace(found, warnings=said)


def _numbers(path: Path | str, task: Task, kept: Mapping[str, list[str]]) -> dict[str, int]:
    """The number of every listed document in the task; `DataError` names the first that is not there."""
    wanted = {name for names in kept.values() for name in names}
    number = {name: place for place, name in enumerate(task.document_ids) if name in wanted}
    if len(number) == len(wanted):
        return number
    query, document = next((query, name) for query, names in kept.items() for name in names if name not in number)
    limited = task.provenance.get("limit_documents")
    need = "need a run over this collection"
    if limited is not None:
        need = f"need a run over the same subset (documents were limited to {limited}), or no limit of documents"
    raise DataError(
        f"{path}: query {query!r} lists document {document!r}, which is not among the {len(task.document_ids)} documents of "
        f"{task.source} {task.dataset} ({len(wanted) - len(number)} of {len(wanted)} listed documents are not); {need}"
    )


def _warnings(task: Task, run: Run, kept: Mapping[str, list[str]]) -> Iterator[str]:
    known = set(task.query_ids)
    foreign = [query for query in run.rankings if query not in known]
    if foreign:
        yield (
            f"candidates {run.name!r}: {len(foreign)} of {len(run.rankings)} queries are not scored, the task lacks them "
            f"({_some(foreign)})"
        )
    missing = [query for query in task.query_ids if query not in kept]
    if missing:
        yield (
            f"candidates {run.name!r}: {len(missing)} of the task's {len(known)} queries have none ({_some(missing)}): they "
            "retrieve nothing and score 0"
        )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


def _sha256(kept: Mapping[str, list[str]]) -> str:
    digest = hashlib.sha256()
    for query in sorted(kept):
        feed(digest, [query.encode(), str(len(kept[query])).encode()])
        feed(digest, (name.encode() for name in sorted(kept[query])))
    return digest.hexdigest()


def pair_scores(
    score: Callable[..., object], queries: Packed, documents: Tokens, candidates: Candidates, first: int = 0
) -> Tensor:
    """Scores of the listed pairs of a block of documents.

    Pairs are independent of each other: the cut into blocks changes no score, and each is the path's own full score within the
    operator's contract. With the fused operator nothing here waits for a GPU; the reference does, as it always does.

    Args:
        score: the path's operator: `maxsim`, whose pairs go through `maxsim_pairs` together, or another with the same arguments
            (the reference), which is called for one query at a time, with the documents it lists.
        queries: all Nq queries, prepared.
        documents: n packed documents `first .. first + n` of the numbering of `candidates`, prepared, on the queries' device.

    Returns:
        `[Nq, n]` float32; -inf where a pair is not listed.
    """
    if len(queries) != candidates.queries:
        raise ValueError(f"queries: got {len(queries)}, need the {candidates.queries} of the candidates")
    scores = torch.full((len(queries), len(documents)), -torch.inf, device=queries.device)
    rows, columns = candidates.block(first, first + len(documents))
    together = _pairs_of(score)
    if together is not None:
        for start in range(0, len(rows), _MOST_PAIRS):
            span = slice(start, start + _MOST_PAIRS)
            row, column = _on_device(np.stack([rows[span], columns[span]]), queries.device)
            scores[row, column] = _tensor(together(_view(queries, row), _view(documents, column)))
        return scores
    order = np.argsort(rows, kind="stable")
    rows, columns = rows[order], columns[order]
    row, column = _on_device(np.stack([rows, columns]), queries.device)
    starts: list[int] = np.flatnonzero(np.diff(rows, prepend=-1)).tolist()
    for start, stop in pairwise([*starts, len(rows)]):
        several = column[start:stop]
        scores[int(rows[start]), several] = _tensor(score(_view(queries, row[start : start + 1]), _view(documents, several)))[0]
    return scores


def _pairs_of(score: Callable[..., object]) -> Callable[..., object] | None:
    """`maxsim_pairs` for `maxsim`, with the same options where it has some; None for another operator."""
    if isinstance(score, partial) and score.func is maxsim and not score.args:
        return partial(maxsim_pairs, **score.keywords)
    return maxsim_pairs if score is maxsim else None


def _tensor(scores: object) -> Tensor:
    assert isinstance(scores, Tensor)
    return scores


def _on_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Numbers on a device; to a GPU they are copied asynchronously, from pinned memory that torch keeps until then."""
    held = torch.from_numpy(numbers)
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held


def _view(tokens: Tokens, numbers: Tensor) -> Tokens:
    """`tokens.select(numbers)` without its check of the numbers, for which it would wait for a GPU."""
    if isinstance(tokens, Packed):
        return _rows(tokens, numbers)  # type: ignore[return-value]  # no class is two of them
    if not isinstance(tokens.codes, Packed):
        raise ValueError("documents: got dense codes, need packed ones")
    codes = _rows(tokens.codes, numbers)
    if isinstance(tokens, BitTokens | ResidualTokens):
        return replace(tokens, codes=codes)
    return tokens.over(codes, (lambda one: one[numbers]) if tokens.granularity == "document" else None)


def _rows(packed: Packed, numbers: Tensor) -> Packed:
    return Packed.view(packed.values, packed.starts[numbers], packed.lengths[numbers])
