"""Inputs of the checks and their truth: plain products in float64, one query and one document at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from maxsim_kernels import Packed, pack

SEED = 20260
BOUND = 2e-6  # of sum_i |Q_i| max_j |D_j|: FP32 sums of exact products, in any order


def drawn(lengths: Sequence[int], dim: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random token matrices `[L, d]` without negative numbers: only the check meant for it lets padding win a maximum."""
    generator = torch.Generator().manual_seed(SEED + seed)
    return [(torch.randn(length, dim, generator=generator).abs() / dim**0.5).to(dtype) for length in lengths]


def packed(rows: Sequence[Tensor], device: torch.device) -> Packed:
    """Rows end to end, on the device."""
    return pack(list(rows)).to(device)


def truth(queries: Sequence[Tensor], documents: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Scores `[Nq, N]` and the size that errors are measured by, both float64; -inf where a document has no token."""
    scores = torch.zeros(len(queries), len(documents), dtype=torch.float64)
    sizes = torch.zeros_like(scores)
    for i, query in enumerate(queries):
        for n, document in enumerate(documents):
            similar = query.double() @ document.double().T
            scores[i, n] = similar.max(dim=1).values.sum() if len(document) else -torch.inf
            if len(document) and len(query):
                sizes[i, n] = query.double().norm(dim=1).sum() * document.double().norm(dim=1).max()
    return scores, sizes


def gradients(queries: Packed, documents: Packed, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `(scores * weights).sum()` with respect to both buffers, float64; no two similarities may be equal."""
    first, second = (side.values.detach().double().cpu().requires_grad_() for side in (queries, documents))
    asked, held = (list(zip(side.starts.tolist(), side.lengths.tolist(), strict=True)) for side in (queries, documents))
    with torch.enable_grad():
        total = torch.zeros((), dtype=torch.float64)
        for i, (begin, length) in enumerate(asked):
            for n, (start, size) in enumerate(held):
                similar = first[begin : begin + length] @ second[start : start + size].T
                total = total + weights[i, n] * similar.max(dim=1).values.sum()
        found = torch.autograd.grad(total, (first, second))
    return found[0], found[1]
