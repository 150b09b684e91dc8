"""The FP64 truth for gradients: winners and gradients of a few queries and documents, by arithmetic that shares nothing with a kernel.

With winner t*(i, j, s) of query token s of query i in document j and upstream gradient g[i, j]: `dQ[i, s] = sum_j g[i, j] D[j, t*]`
and `dD[j, t]` is the sum of `g[i, j] Q[i, s]` over all (i, s) with t* = t. A query's rows need all documents and a document's rows all
queries, so both are made for the first and last few only, one at a time.

Where a second token comes within rounding of the maximum, either may win. Gradient rows that such a tie could change are left out of
the comparison and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from measure.session import RefusedError

MARGIN = 2e-6  # two similarities closer than this, times the norms, may change places in FP32
CELLS, MOST = 1 << 30, 16  # similarities of a side in all, and queries or documents at most


@dataclass(frozen=True)
class Bound:
    """How far a gradient may be from the truth: cosine over all rows, largest error of a row over its norm (None: not asked)."""

    cosine: float
    error: float | None


HALF = Bound(0.9999, 1e-2)  # FP16 and BF16 inputs
FULL = Bound(0.99999, 1e-5)  # FP32 inputs
# Similarities rounded to FP16 tie in about one maximum of a hundred, and each moves a contribution to another row.
ROUNDED = Bound(0.99, None)


@dataclass(frozen=True)
class _Side:
    """One query against all its documents, or one document against all queries."""

    number: int
    winners: Tensor  # [others, Lq] int64
    unsure: Tensor  # rows of its gradient that a near tie could change
    unsure_documents: Tensor | None = None  # per-query layout: the same of its documents [K, Ld]


def chosen(count: int, cells: int) -> list[int]:
    """Numbers of the first and last few of `count` queries or documents, the fewer the more similarities (`cells`) one has."""
    size = min(count, MOST, max(2, CELLS // max(1, cells)))
    half = (size + 1) // 2
    return sorted({*range(half), *range(count - (size - half), count)})


class Truth:
    """Winners in FP64, from which gradients for any upstream gradient follow.

    Args:
        queries: `[Nq, Lq, d]`.
        documents: `[N, Ld, d]` shared by all queries, or `[Nq, K, Ld, d]` of each query.
        lengths: `[N]` valid tokens of shared documents.
    """

    def __init__(self, queries: Tensor, documents: Tensor, lengths: Tensor | None = None) -> None:
        self.queries, self.documents, self.lengths = queries.detach(), documents.detach(), lengths
        self.shared = documents.dim() == 3
        self.margin = MARGIN * _longest(self.queries) * _longest(self.documents)
        tokens, rows = documents.shape[-2], queries.shape[1]
        few = documents.shape[0 if self.shared else 1]
        self.of_queries = [self._query(n) for n in chosen(queries.shape[0], rows * few * tokens)]
        self.of_documents: list[_Side] = []
        if self.shared:
            count = queries.shape[0]
            self.of_documents = [self._document(n) for n in chosen(documents.shape[0], rows * count * tokens)]

    def _candidates(self, number: int) -> Tensor:
        return (self.documents if self.shared else self.documents[number]).double()

    def _query(self, number: int) -> _Side:
        documents = self._candidates(number)
        found = documents @ self.queries[number].double().t()  # [N, Ld, Lq]
        if self.lengths is not None:
            places = torch.arange(found.shape[1], device=found.device)
            found.masked_fill_((places >= self.lengths[:, None])[:, :, None], -torch.inf)
        best, winners = found.max(1)
        near = found >= best.unsqueeze(1) - self.margin
        several = near.sum(1) > 1
        touched = None if self.shared else (near & several.unsqueeze(1)).any(2)
        return _Side(number, winners, several.any(0), touched)

    def _document(self, number: int) -> _Side:
        size = self.documents.shape[1] if self.lengths is None else int(self.lengths[number])
        rows = self.queries.reshape(-1, self.queries.shape[-1]).double()
        found = rows @ self.documents[number, :size].double().t()
        best, winners = found.max(1)
        near = found >= best.unsqueeze(1) - self.margin
        several = near.sum(1) > 1
        unsure = torch.zeros(self.documents.shape[1], dtype=torch.bool, device=rows.device)
        unsure[:size] = near[several].any(0)
        return _Side(number, winners.view(self.queries.shape[:2]), unsure)

    def pieces(self, grad: Tensor) -> Iterator[tuple[bool, tuple[int, ...], Tensor, Tensor]]:
        """For upstream `grad` `[Nq, N]`: (of a query?, its number or numbers, gradient rows `[L, d]`, rows to leave out)."""
        grad = grad.double()
        for side in self.of_queries:
            documents, weights = self._candidates(side.number), grad[side.number]
            others = torch.arange(documents.shape[0], device=grad.device).unsqueeze(1)
            yield True, (side.number,), torch.einsum("n,nld->ld", weights, documents[others, side.winners]), side.unsure
            if side.unsure_documents is not None:
                tokens = self.queries[side.number].double()
                for n in range(documents.shape[0]):
                    rows = torch.zeros_like(documents[n]).index_add_(0, side.winners[n], weights[n] * tokens)
                    yield False, (side.number, n), rows, side.unsure_documents[n]
        for side in self.of_documents:
            parts = grad[:, side.number, None, None] * self.queries.double()
            rows = torch.zeros(self.documents.shape[1:], dtype=torch.float64, device=grad.device)
            rows.index_add_(0, side.winners.flatten(), parts.flatten(0, 1))
            yield False, (side.number,), rows, side.unsure

    def compare(self, grad: Tensor, query_grad: Tensor | None, document_grad: Tensor | None, bound: Bound) -> dict[str, Any]:
        """Cosine and largest row error of gradients shaped as the inputs (None: not asked), and the share of rows left out.

        Raises:
            RefusedError: outside `bound`; a value anywhere is not finite; a row is not zero that must be.
        """
        cosine, worst, rows_out, rows_all = 1.0, 0.0, 0, 0
        for made, of_query in ((query_grad, True), (document_grad, False)):
            if made is None:
                continue
            if not bool(torch.isfinite(made).all()):
                raise RefusedError(
                    f"wrong: the gradient of the {'queries' if of_query else 'documents'} is not finite everywhere"
                )
            product, mine, true = (torch.zeros((), dtype=torch.float64, device=made.device) for _ in range(3))
            for kind, numbers, rows, unsure in self.pieces(grad):
                if kind != of_query:
                    continue
                got, need = made[numbers].double()[~unsure], rows[~unsure]
                product, mine, true = product + (got * need).sum(), mine + got.square().sum(), true + need.square().sum()
                worst = max(worst, _row_error(got, need))
                rows_out, rows_all = rows_out + int(unsure.sum()), rows_all + unsure.numel()
            cosine = min(cosine, _cosine(product, mine, true))
        found: dict[str, Any] = {"cosine": cosine, "cosine_gap": 1 - cosine, "error": worst}  # files keep six digits of each
        found["left_out"] = rows_out / max(1, rows_all)
        if bound.error is None:
            found["error"] = None  # rows that a moved winner leaves empty have no relative error
        if not cosine >= bound.cosine or (bound.error is not None and not worst <= bound.error):
            asked = f"{bound.cosine}" + ("" if bound.error is None else f", {bound.error:.0e}")
            raise RefusedError(f"wrong: cosine {cosine:.7f}, largest row error {worst:.1e} of the norm (need {asked})")
        return found


def _cosine(product: Tensor, mine: Tensor, true: Tensor) -> float:
    """From the sums of products and squares; two zero gradients agree."""
    if float(mine) > 0 and float(true) > 0:
        return float(product / (mine * true).sqrt())
    return float(float(mine) == float(true))


def _row_error(got: Tensor, need: Tensor) -> float:
    """Largest element error over the row's norm; infinite where a row must be zero and is not."""
    if not got.numel():
        return 0.0
    difference, norms = (got - need).abs().amax(-1), need.norm(dim=-1)
    zero = norms == 0
    if bool((difference[zero] > 0).any()):
        return float("inf")
    return float((difference[~zero] / norms[~zero]).max()) if bool((~zero).any()) else 0.0


def _longest(tokens: Tensor) -> float:
    return float(tokens.float().norm(dim=-1).max())
