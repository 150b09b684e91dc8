"""Steps that leave a document fewer tokens; queries stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.codecs.pooling import PoolOne, pooled
from maxsim_eval.codecs.steps import Shape, State, is_unit, require
from maxsim_eval.errors import DataError, MissingPackageError
from maxsim_kernels import Packed

By = Literal["norm", "idf", "position"]


@dataclass(frozen=True)
class Pool(Shape):
    """Similar tokens of a document become their mean: sentence-transformers' hierarchical pooling, the first token kept as it is."""

    factor: int
    protected: int = 1

    summary = "hierarchical token pooling: clusters of similar tokens become their mean"
    source = "Clavie, Chaffin and Adams 2024, Reducing the Footprint of Multi-Vector Retrieval; sentence-transformers' code"

    def check(self, dim: int) -> None:
        require(f"pool-{self.factor}", self.factor, self.factor >= 2, "2 or more")
        require("protected", self.protected, self.protected >= 0, "0 or more")

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        """At most: tokens that are equal may end in fewer clusters than were asked for."""
        rest = np.maximum(lengths - self.protected, 0)
        pooled = np.where(rest > 0, np.maximum(rest // self.factor, 1), 0)
        return np.minimum(lengths, self.protected) + pooled

    def fit(self, sample: Packed, tokens: int) -> dict[str, Tensor]:
        return {"unit": torch.tensor(is_unit(sample))}

    def sample_tokens(self, dim: int, tokens: int) -> int:
        return 1024

    def documents(self, tokens: Packed, state: State, first: int | None = None) -> Packed:
        most = self.lengths(tokens.lengths.cpu().numpy().astype(np.int64))
        return pooled(_pool_one(self.factor, self.protected, bool(state["unit"])), tokens, most)


@lru_cache(maxsize=1)
def _pool_one(factor: int, protected: int, unit: bool) -> PoolOne:
    """Sentence-transformers' pooling of one document's tokens; the same function for the same options."""
    try:
        from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling
    except ImportError:
        raise MissingPackageError(f"pool-{factor}", "sentence-transformers", "encoders") from None
    found: PoolOne = HierarchicalTokenPooling(factor, num_protected_tokens=protected, normalize_embeddings=unit).pool_one
    return found


@dataclass(frozen=True)
class Prune(Shape):
    """Leave out `percent` of every document's tokens; the number that stays is rounded up, so that one stays at least."""

    percent: int
    by: By = "position"

    summary = (
        "a part of every document's tokens is left out: the last ones, those of the smallest norm, or of the commonest words"
    )
    source = "Lassance et al. 2021, A Study on Token Pruning for ColBERT"

    def check(self, dim: int) -> None:
        require(f"prune-{self.percent}", self.percent, 1 <= self.percent <= 99, "1 to 99 percent")
        require("by", self.by, self.by in get_args(By), " or ".join(get_args(By)))

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        found: np.ndarray = -(-lengths * (100 - self.percent) // 100)
        return found

    def sample_tokens(self, dim: int, tokens: int) -> int:
        return 1024 if self.by == "norm" else 0

    def fit(self, sample: Packed, tokens: int) -> dict[str, Tensor]:
        if self.by == "norm" and is_unit(sample):
            raise DataError(
                f"prune-{self.percent}(by=norm): all tokens have length 1, so that none is the smallest; need embeddings that are not "
                "normalised, or by=position"
            )
        return {}

    @property
    def reads_words(self) -> bool:
        return self.by == "idf"

    def fit_words(self, words: Iterator[Sequence[str]]) -> dict[str, Tensor]:
        """`ranks`: of every token of the corpus, its rank in its document by how few documents hold its word, then by position.

        `begins`: where each document's tokens begin, and where the last one's end.
        """
        numbers: dict[str, int] = {}
        rows = [np.fromiter((numbers.setdefault(word, len(numbers)) for word in row), np.int64) for row in words]
        frequencies = np.zeros(len(numbers), np.int64)
        for row in rows:
            frequencies[np.unique(row)] += 1
        ranks = [np.argsort(np.argsort(frequencies[row], kind="stable"), kind="stable").astype(np.int32) for row in rows]
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(row) for row in rows], dtype=np.int64)])
        whole = np.concatenate(ranks) if ranks else np.zeros(0, np.int32)
        return {"ranks": torch.from_numpy(whole), "begins": torch.from_numpy(begins)}

    def documents(self, tokens: Packed, state: State, first: int | None = None) -> Packed:
        tokens = tokens.compact()
        assert tokens.offsets is not None
        kept = torch.from_numpy(self.lengths(tokens.lengths.cpu().numpy().astype(np.int64))).to(tokens.device)
        owner, starts = tokens.document_of_token(), tokens.offsets[:-1].long()
        rank = torch.arange(len(owner), device=tokens.device) - starts[owner]
        if self.by == "norm":
            norms = torch.linalg.vector_norm(tokens.values, dim=1)
            order = torch.argsort(norms, descending=True, stable=True)
            order = order[torch.argsort(owner[order], stable=True)]  # within each document: the longest first
            rank = torch.empty_like(order).scatter_(0, order, rank)
        if self.by == "idf" and first is not None:
            begins = state["begins"]
            rank = state["ranks"][int(begins[first]) : int(begins[first + len(tokens)])].long()
        offsets = torch.zeros(len(tokens) + 1, dtype=torch.int64, device=tokens.device)
        torch.cumsum(kept, 0, out=offsets[1:])
        return Packed(tokens.values[rank < kept[owner]], offsets)
