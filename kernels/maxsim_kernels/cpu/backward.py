"""MaxSim gradients on the CPU from saved winners: a gather for queries, a scatter for documents, accumulated in FP32.

With winner t*(q, n, i) of query token i in document n: `dQ[q, i] = sum_n g[q, n] D[n, t*]` and
`dD[n, t] = sum of g[q, n] Q[q, i] over (q, i) with t* = t` (paper section 'Inverse-Grid Update'). Contributions are added in one
fixed order (query, document, query token), so every `backward=` path gives the same bits here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maxsim_kernels.checks import Layout

_CELLS = 1 << 22  # gathered floats at once: 16 MB


def backward(
    grad: Tensor,
    argmax: Tensor,
    queries: Tensor,
    query_starts: Tensor | None,
    documents: Tensor,
    document_starts: Tensor | None,
    layout: Layout,
    need_queries: bool,
    need_documents: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients in the inputs' dtypes and shapes (empty tensors where not needed).

    Args:
        grad: `[Nq, N]` (pairs: `[N]`) float32.
        argmax: grad's shape + `[W]`, int32, -1 where there is no winner.
    """
    width = queries.shape[-1]
    flat_queries, flat_documents = queries.reshape(-1, width), documents.reshape(-1, width)
    query_grad = torch.zeros(flat_queries.shape if need_queries else (0, width), dtype=torch.float32, device="cpu")
    document_grad = torch.zeros(flat_documents.shape if need_documents else (0, width), dtype=torch.float32, device="cpu")
    per_query = 1 if layout == "pairs" else argmax.shape[1]
    query_base = _bases(query_starts, argmax.shape[0], queries)
    document_base = _bases(document_starts, argmax.shape[0] * per_query if layout != "shared" else per_query, documents)
    step = max(1, _CELLS // max(1, width * argmax.shape[-1]))
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for query in range(argmax.shape[0]):
            winners = argmax[query].unsqueeze(0) if layout == "pairs" else argmax[query]
            weights = grad[query].reshape(-1)
            shift = 0 if layout == "shared" else query * per_query
            for first in range(0, per_query, step):
                block = winners[first : first + step]
                document, place = (block >= 0).nonzero(as_tuple=True)
                if not document.numel():
                    continue
                number = document + first
                rows = document_base[number + shift] + block[document, place]
                query_rows = query_base[query] + place
                weight = weights[number].float().unsqueeze(1)
                if need_queries:
                    query_grad.index_add_(0, query_rows, weight * flat_documents[rows])
                if need_documents:
                    document_grad.index_add_(0, rows, weight * flat_queries[query_rows])
    query_out = query_grad.to(queries.dtype).view(queries.shape) if need_queries else queries.new_empty(0)
    document_out = document_grad.to(documents.dtype).view(documents.shape) if need_documents else documents.new_empty(0)
    return query_out, document_out


def _bases(starts: Tensor | None, count: int, values: Tensor) -> Tensor:
    """Row of the flattened buffer where each query or document begins."""
    if starts is not None:
        return starts.long()
    return torch.arange(count, device="cpu") * values.shape[-2]
