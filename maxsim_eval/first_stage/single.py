"""One vector a document: the mean of its tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from maxsim_eval.first_stage.stage import Found, Tokens, best_of
from maxsim_kernels import Packed

_BLOCK = 64 << 20


@dataclass(frozen=True)
class Single:
    """The mean of the token vectors, at length 1, of documents and queries: one vector each, stored as FP16."""

    reads: ClassVar[str] = "embeddings"

    @property
    def description(self) -> str:
        """What it does."""
        return "one vector a document, the mean of its tokens at length 1 (FP16)"

    def search(self, source: Tokens, n: int, *, device: str, quiet: bool) -> Found:
        """The best `n` documents of every query; a document without tokens is not found."""
        started = time.perf_counter()
        parts = [_mean(block.to(device)).half() for block in source.documents.blocks(_BLOCK)]
        vectors = torch.cat(parts) if parts else torch.empty(0, source.queries.dim, dtype=torch.float16, device=device)
        indexed = time.perf_counter()
        scores, indices = best_of(_mean(source.queries.to(device)), vectors.float(), n)
        seconds = {"index": indexed - started, "search": time.perf_counter() - indexed}
        return Found(scores, indices, vectors.numel() * 2, seconds)


def sums(tokens: Packed, values: Tensor) -> Tensor:
    """Sums of `values` `[T, w]` float32 over each row of `tokens`: `[N, w]`."""
    owner = tokens.document_of_token()
    return torch.zeros(len(tokens), values.shape[1], device=values.device).index_add_(0, owner, values)


def _mean(tokens: Packed) -> Tensor:
    tokens = tokens.compact()
    return torch.nn.functional.normalize(sums(tokens, tokens.values.float()), dim=1)
