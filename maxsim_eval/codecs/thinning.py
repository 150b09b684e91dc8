"""Steps that leave a document fewer tokens; queries stay as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.codecs.steps import Shape, State, is_unit, require
from maxsim_eval.errors import DataError, MissingPackageError
from maxsim_kernels import Packed, pack

By = Literal["norm", "position"]


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

    def documents(self, tokens: Packed, state: State) -> Packed:
        try:
            from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling
        except ImportError:
            raise MissingPackageError(f"pool-{self.factor}", "sentence-transformers", "encoders") from None
        pooling = HierarchicalTokenPooling(
            self.factor, num_protected_tokens=self.protected, normalize_embeddings=bool(state["unit"])
        )
        found = [pooling.pool_one(one) if len(one) else one for one in map(tokens.__getitem__, range(len(tokens)))]
        return pack(found, dim=tokens.dim, dtype=tokens.dtype).to(tokens.device)


@dataclass(frozen=True)
class Prune(Shape):
    """A part of every document's tokens, in percent, is left out; the first token that would stay if only one did always stays."""

    percent: int
    by: By = "position"

    summary = "a part of every document's tokens is left out: the last ones, or those of the smallest norm"
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

    def documents(self, tokens: Packed, state: State) -> Packed:
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
        offsets = torch.zeros(len(tokens) + 1, dtype=torch.int64, device=tokens.device)
        torch.cumsum(kept, 0, out=offsets[1:])
        return Packed(tokens.values[rank < kept[owner]], offsets)
