"""What a first stage takes and gives, and the best of a matrix of scores: score descending, ties by the smaller index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.cache.selection import Documents
from maxsim_eval.errors import DataError
from maxsim_kernels import Packed
from maxsim_kernels.topk import TopK, of_keys


@dataclass(frozen=True)
class Texts:
    """Queries and documents as they are in the task, in its order."""

    queries: Sequence[Any]
    documents: Sequence[Any]


@dataclass(frozen=True)
class Tokens:
    """Token embeddings of queries (float, CPU) and of the documents in the cache."""

    queries: Packed
    documents: Documents


@dataclass(frozen=True)
class Found:
    """What a first stage found.

    Args:
        scores, indices: `[Nq, n]` float32 and int64, the best first; index -1 (score -inf) where a query found fewer.
        stored_bytes: of the index, for the whole corpus.
        seconds: `index` (making it) and `search`, for all queries.
    """

    scores: np.ndarray
    indices: np.ndarray
    stored_bytes: int
    seconds: dict[str, float]


@runtime_checkable
class FirstStage(Protocol):
    """A first stage: a frozen dataclass whose fields are its options."""

    reads: str  # "texts" or "embeddings"

    @property
    def description(self) -> str:
        """What it does, in one line."""
        ...

    def search(self, source: Any, n: int, *, device: str, quiet: bool) -> Found:
        """The best `n` documents of every query. `source` is a `Texts` or a `Tokens` ."""
        ...


def best_of(queries: Tensor, documents: Tensor, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The best `n` of the dot products of two matrices of vectors, `[Nq, w]` and `[N, w]` float32."""
    best = TopK(len(queries), n, queries.device)
    step = max(1, (1 << 26) // max(1, len(queries)))
    for first in range(0, len(documents), step):
        best.add(queries @ documents[first : first + step].T)
    if bool(torch.isnan(queries).any()):
        raise DataError("first stage: a query's vector is NaN")
    scores, indices = of_keys(best.keys.cpu())
    return scores.numpy(), indices.numpy()
