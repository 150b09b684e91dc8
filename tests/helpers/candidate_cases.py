"""A small awkward corpus of which queries list some documents, and a path's scores of these in blocks, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.selection import Selection
from maxsim_eval.scoring.candidates import Candidates, pair_scores
from maxsim_eval.scoring.paths import PATHS
from maxsim_kernels import Packed, pack
from scoring_cases import drawn, of_sets
from stored_cases import filled

QUERIES, DOCUMENTS = 7, 60


@dataclass(frozen=True)
class Data:
    """Queries, the stored documents, and which of them each query lists; `grid`: numbers that are exact everywhere."""

    queries: Packed
    entry: Entry
    candidates: Candidates
    grid: bool


def listed_data(folder: Path, *, grid: bool) -> Data:
    """Ragged documents up to 59 tokens, some empty or equal; queries up to 33 tokens, one empty, one without candidates."""
    tokens = partial(drawn, width=48, grid=grid)
    documents = [tokens((n * 17) % DOCUMENTS if n % 9 else 0, n) for n in range(DOCUMENTS)]
    for copy, original in ((2, 1), (12, 1), (59, 1), (30, 26), (31, 26)):
        documents[copy] = documents[original]
    ids = [f"d{n:02d}" for n in range(DOCUMENTS)]
    entry = filled(folder, documents, ids=ids, documents_per_shard=13)
    queries = pack([tokens(size, 100 + size) for size in (32, 5, 0, 33, 1, 17, 8)])
    rng = np.random.default_rng(0)
    sets = [set(rng.choice(DOCUMENTS, size, replace=False).tolist()) for size in (30, 1, 9, 20, 60, 0, 5)]
    sets[0] |= {1, 2, 12, 59, 26, 30, 31, 0, 9}
    return Data(queries, entry, of_sets(sets), grid)


def cuts(size: int) -> Iterator[list[tuple[int, int]]]:
    """Ways to cut so many documents into blocks: each alone, few, many, all together."""
    for step in (1, 7, 20, size):
        yield [(start, min(start + step, size)) for start in range(0, size, step)]


def scores_of(name: str, data: Data, spans: Sequence[tuple[int, int]], device: str = "cpu") -> Tensor:
    """`[Nq, M]`: a path's scores of the listed pairs, a block of the union's documents after the other."""
    path, corpus = PATHS[name], Corpus(data.entry, quiet=True)
    chosen, listed = data.candidates.choose(data.entry), data.candidates.within(data.candidates.union())
    everything, queries = whole_of(chosen), path.queries(data.queries).to(device)
    parts: list[Tensor] = []
    for start, stop in spans:
        block: Any = path.documents(everything.select(range(start, stop)).compact().to(device), corpus)
        part = pair_scores(path.score, queries, block, listed, start)
        assert part.shape == (QUERIES, stop - start)
        assert part.dtype == torch.float32
        parts.append(part)
    return torch.cat(parts, 1)


def whole_of(chosen: Selection) -> Packed:
    """The chosen documents, read together."""
    return pack([block[n] for block in chosen.blocks(1 << 30) for n in range(len(block))])
