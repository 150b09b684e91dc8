"""Scoring a corpus block by block with a running exact top-k (paper section 'Out-of-core').

The order is fixed: score descending, then document index ascending, on every path and for every cut of the corpus.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from maxsim_kernels.api import maxsim
from maxsim_kernels.checks import Documents
from maxsim_kernels.tokens import Packed


class TopK:
    """A running top-k over documents that arrive in index order: `[Nq, k]` scores and indices.

    `add` takes scores `[Nq, n]` of the next n documents. -inf is "not retrieved"; a NaN score is a `ValueError` that names the
    query and the document. Rows short of k end in score -inf, index -1.
    """

    def __init__(self, queries: int, k: int, device: torch.device | str = "cpu") -> None:
        if k < 1:
            raise ValueError(f"k: got {k}, need 1 or more")
        self.k = k
        self.seen = 0
        self.scores = torch.full((queries, k), -torch.inf, device=device)
        self.indices = torch.full((queries, k), -1, dtype=torch.int64, device=device)

    def add(self, scores: Tensor) -> None:
        """Merge the scores `[Nq, n]` of the next n documents."""
        bad = torch.isnan(scores)
        if bool(bad.any()):
            query, document = bad.nonzero()[0].tolist()
            raise ValueError(f"scores: NaN for query {query}, document {self.seen + document}; need finite embeddings")
        count = scores.shape[1]
        if count > self.k:
            scores, numbers = self._best_of_block(scores)
        else:
            numbers = torch.arange(count, device=scores.device).expand(scores.shape[0], count)
        indices = torch.where(torch.isneginf(scores), -1, numbers + self.seen)
        self.seen += count
        # Held entries come first and have smaller indices, so a stable sort keeps ties in index order.
        joined = torch.cat([self.scores, scores], 1)
        order = torch.argsort(joined, dim=1, descending=True, stable=True)[:, : self.k]
        self.scores = joined.gather(1, order)
        self.indices = torch.cat([self.indices, indices], 1).gather(1, order)

    def _best_of_block(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The block's own top-k in index order; ties at the k-th score are settled by index, which `topk` does not promise."""
        least = scores.topk(self.k, dim=1).values[:, -1:]
        above = scores > least
        tied = scores == least
        room = self.k - above.sum(1, keepdim=True)
        keep = above | (tied & (tied.cumsum(1) <= room))
        numbers = keep.nonzero()[:, 1].view(scores.shape[0], self.k)  # exactly k a row
        return scores.gather(1, numbers), numbers


def stream_topk(
    queries: Tensor | Packed,
    blocks: Iterable[Documents],
    k: int,
    *,
    query_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    quantize_queries: bool = True,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Exact top-k documents of each query over blocks of documents that need not fit in memory together.

    Args:
        queries: `[Lq, d]`, `[Nq, Lq, d]` or `Packed`, with mask and lengths as in `maxsim`.
        blocks: documents in index order: `Packed`, `[b, Ld, d]`, `Int8Tokens` or `Fp8Tokens`; indices count over all blocks.
        k: at least 1.

    Returns:
        scores float32 and indices int64, `[Nq, k]` (`[k]` for one query), score descending, ties by index ascending; rows short of
        k end in -inf and -1.
    """
    single = isinstance(queries, Tensor) and queries.dim() == 2
    count = 1 if single else len(queries)
    best = TopK(count, k, queries.device)
    for block in blocks:
        scores = maxsim(
            queries,
            block,
            query_mask=query_mask,
            query_lengths=query_lengths,
            quantize_queries=quantize_queries,
            impl=impl,
        )
        assert isinstance(scores, Tensor)
        best.add(scores.unsqueeze(0) if single else scores)
    return (best.scores[0], best.indices[0]) if single else (best.scores, best.indices)
