"""Scoring a corpus block by block with a running exact top-k (paper section 'Out-of-core').

The order is fixed: score descending, then document index ascending, on every path and for every cut of the corpus (`topk.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from maxsim_kernels.api import maxsim
from maxsim_kernels.checks import Documents
from maxsim_kernels.tokens import Packed
from maxsim_kernels.topk import TopK


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
