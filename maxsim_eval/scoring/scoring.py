"""Scoring a corpus by one path: finished units are taken from their records, the others scored, every rank's top-k merged.

The answer, to the last bit of the run file, is the same for every cut into blocks, number of readers and ranks, memory budget and
point of resumption: a score's bits do not depend on its block, and the merge of keys is exact in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.processes.progress import Progress
from maxsim_eval.processes.world import World
from maxsim_eval.scoring import finite
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.certified import certified_units, meets
from maxsim_eval.scoring.records import Records
from maxsim_eval.scoring.stream import PHASES, UnitScores, score_units
from maxsim_eval.types import Run
from maxsim_kernels import Packed
from maxsim_kernels.topk import TopK, merge_topk, of_keys

_MERGED, _MERGED_BYTES = 17, 64 << 20  # most parts of keys that are held unmerged, and their bytes


@dataclass(frozen=True)
class Scored:
    """One path's outcome: top-k `[Nq, k]` (score descending, index ascending; -1 where short), where time went, what was counted."""

    scores: np.ndarray
    indices: np.ndarray
    seconds: Mapping[str, float]
    counts: Mapping[str, float]


def score_path(
    name: str,
    queries: Packed,
    corpus: Corpus,
    asked: Asked,
    kept: np.ndarray | None = None,
    *,
    units: Sequence[tuple[int, int]] | None = None,
    share: range | None = None,
    records: Records | None = None,
    keep: bool = False,
    world: World | None = None,
) -> Scored | None:
    """Run one path over this rank's share of the corpus and merge what all ranks found.

    Args:
        queries: the queries' tokens, as stored.
        kept: `[len(asked.kept_rows), N]` float32, filled with the kept rows' scores of this share (-inf: not retrieved).
        units: how the corpus is divided; default: not at all.
        share: the units of this rank, by number; default: all.
        records: finished units are taken from here and new ones kept here.
        keep: keep the rows' scores in `records`.
        world: the processes that share the work.

    Returns:
        The merged top-k, on the leader; None elsewhere.

    Raises:
        DataError: a score that is NaN or infinite, named by query and document. RankError: another rank failed.
    """
    world = world or World()
    units = [(0, corpus.entry.documents)] if units is None else units
    mine = list(units) if share is None else [units[number] for number in share]
    total = _Total(len(asked.query_ids), asked.k)
    missing = []
    for start, stop in mine:
        unit = None if records is None else _finished(records, start, stop, kept)
        if unit is None:
            missing.append((start, stop))
        else:
            finite.refuse(name, torch.from_numpy(unit.keys), None, queries, corpus, asked)
            total.add(unit)
        world.check()
    with Progress(name, corpus.entry.documents, _documents(mine) - _documents(missing), world, corpus.quiet) as progress:
        given = (name, queries, corpus, asked, missing)
        scored: Iterable[UnitScores] = ()
        if asked.paths[name].certified and (missing or meets(world, corpus.device)):
            scored = certified_units(*given, known=total.keys, tick=progress.tick, world=world)
        elif missing:
            scored = score_units(*given, keep=kept is not None or keep, tick=progress.tick)
        for unit in scored:
            total.add(unit)
            progress.spent(unit.cost.get("read", 0.0), unit.cost.get("total", 0.0))
            _keep(unit, kept, records, keep)
        if records is not None:
            records.close()
        cost = _added(world.collect(dict(total.cost)))
        keys = world.reduce(total.keys, merge_topk)
    return None if keys is None else _found(keys, cost)


def _found(keys: torch.Tensor, cost: dict[str, float]) -> Scored:
    """The merged top-k, and what it took."""
    scores, indices = of_keys(keys.cpu())
    seconds = {name: cost.pop(name) for name in (*PHASES, "total")}
    return Scored(scores.numpy(), indices.numpy(), seconds, cost)


def _finished(records: Records, start: int, stop: int, kept: np.ndarray | None) -> UnitScores | None:
    """A unit that an earlier process finished, if one did; its rows' scores go into `kept`."""
    record = records.get(start, stop)
    if record is None:
        return None
    if kept is not None and record.scores is not None:
        record.scores.read(0, kept[:, start:stop])
    return UnitScores(start, stop, record.keys, None, record.cost)


def _keep(unit: UnitScores, kept: np.ndarray | None, records: Records | None, with_scores: bool) -> None:
    """A unit that was scored now: its rows' scores into `kept`, itself into `records`."""
    if kept is not None:
        assert unit.scores is not None
        kept[:, unit.start : unit.stop] = unit.scores
    if records is not None:
        records.put(unit.start, unit.stop, unit.keys, unit.scores if with_scores else None, unit.cost)


def _documents(units: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in units)


class _Total:
    """The top-k and the cost of the units so far, in any order."""

    def __init__(self, queries: int, k: int) -> None:
        self.parts = [TopK(queries, k).keys]  # of no documents
        self.cost = dict.fromkeys((*PHASES, "total"), 0.0)

    def add(self, unit: UnitScores) -> None:
        self.parts.append(torch.from_numpy(unit.keys))
        if len(self.parts) == _MERGED or len(self.parts) * unit.keys.nbytes > _MERGED_BYTES:
            self.parts = [self.keys]
        for name, value in unit.cost.items():
            self.cost[name] = self.cost.get(name, 0.0) + value

    @property
    def keys(self) -> torch.Tensor:
        """`[Nq, k]` int64 keys of all units so far."""
        return merge_topk(self.parts)


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Summed over ranks; the total is that of the slowest."""
    found = {
        name: sum(part.get(name, 0.0) for part in parts) for name in dict.fromkeys(name for part in parts for name in part)
    }
    return {**found, "total": max(part["total"] for part in parts)}


def to_run(name: str, scored: Scored, asked: Asked) -> Run:
    """Name the documents of a top-k; -inf entries are not retrieved."""
    rankings = {}
    for row, query in enumerate(asked.query_ids):
        found = scored.indices[row] >= 0
        documents = (asked.document_ids[index] for index in scored.indices[row][found])
        rankings[query] = list(zip(documents, scored.scores[row][found].tolist(), strict=True))
    return Run(name, rankings, ordered=True)
