"""Exact scores of a few documents, with the very bits that scoring all queries against all documents gives.

The CPU path's score of a (query, document) pair is a function of its products' cells, and a cell's bits are the same wherever in a
product it stands (the contract of docs/kernels.md). Here tiles are shorter and meet some of the query tokens.
Matrix libraries could add in another order then. Whether this machine's does is looked at, once a shape: `same_order`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from maxsim_kernels.checks import Call, Options, check_rows, validate
from maxsim_kernels.cpu.batches import LONGEST
from maxsim_kernels.cpu.forward import check_values, forward, query_blocks
from maxsim_kernels.cpu.some import score_some
from maxsim_kernels.cpu.tiles import STEP, Queries, product_of, product_shapes
from maxsim_kernels.tokens import Packed
from maxsim_kernels.turns import alone


def packed_queries(call: Call) -> Packed:
    """The valid tokens of every query, end to end, as the CPU path takes them."""
    check_values(call)
    if call.query_starts is not None:
        assert call.query_lengths is not None
        return Packed.view(call.queries.detach(), call.query_starts, call.query_lengths).compact()
    count, size = call.queries.shape[:2]
    valid = torch.ones(count, size, dtype=torch.bool, device="cpu") if call.query_mask is None else call.query_mask != 0
    if call.query_lengths is not None:
        valid = valid & (torch.arange(size, device="cpu") < call.query_lengths[:, None])
    offsets = torch.zeros(count + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(valid.sum(1), 0, out=offsets[1:])
    return Packed(call.queries.detach()[valid], offsets)


class Some:
    """Queries, prepared once, that score some of their pairs with documents, again and again."""

    def __init__(self, queries: Packed) -> None:
        nothing = Packed(queries.values[:0], torch.zeros(1, dtype=torch.int64, device="cpu"))
        self.call = validate(queries, nothing, Options())
        self.blocks: list[tuple[int, Queries]] | None = None

    def score(self, documents: Packed, wanted: Tensor, scores: Tensor) -> None:
        """Write exact scores `[Nq, N]` float32 of the pairs `wanted` `[Nq, N]` bool."""
        check_rows("document", documents.starts, documents.lengths, documents.values.shape[0])
        if self.blocks is None:
            self.blocks = list(query_blocks(self.call))
        some = replace(
            self.call, documents=documents.values, document_starts=documents.starts, document_lengths=documents.lengths
        )
        if not all(score_some(some, first, block, wanted, scores) for first, block in self.blocks):
            torch.where(wanted, brute_force(self.call, documents), scores, out=scores)


def brute_force(call: Call, documents: Packed) -> Tensor:
    """Scores `[Nq, N]` as a call with these queries, padded or packed as they are, gives them."""
    check_rows("document", documents.starts, documents.lengths, documents.values.shape[0])
    asked = replace(
        call, documents=documents.values, document_starts=documents.starts, document_lengths=documents.lengths, winners=False
    )
    return forward(asked)[0]


def why_not_some(queries: Packed, dim: int, call: Call | None = None) -> str:
    """Why scores of some pairs would not have the bits of a call with all of them; empty when they do.

    `call`: that call, where its queries are not packed: padding decides how many of them a product takes.
    """
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    asked = torch.backends.fp32_precision if precision == "none" else precision  # type: ignore[attr-defined]
    if asked not in ("none", "ieee"):
        return f"products of float32 may be rounded to {asked} (torch.backends.mkldnn), which the bounds do not cover"
    nothing = Packed(torch.empty(0, dim, dtype=queries.dtype, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu"))
    shapes: set[tuple[int, int, bool]] = set()  # query rows, document tokens, whether one thread makes the product
    for _, block in query_blocks(call or validate(queries, nothing, Options())):
        shapes |= product_shapes(block)
    threads = torch.get_num_threads()
    other = next((shape for shape in sorted(shapes) if not same_order(*shape, queries.dim, threads)), None)
    return "" if other is None else f"the matrix library adds in another order for products of {other[0]} x {other[1]} tokens"


@lru_cache(maxsize=1024)
def same_order(rows: int, tokens: int, by_one: bool, width: int, threads: int) -> bool:
    """Whether every cell of a product of this shape, by one thread or by all, has the bits it has in one of 48 x 240 by one thread.

    Random numbers, whose sums differ in some bit of thousands of cells as soon as the order of addition does; the same tokens
    again and again, so that every place of the large product is compared.
    """
    random = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(STEP, width, generator=random, dtype=torch.float32, device="cpu"),
        torch.randn(LONGEST, width, generator=random, dtype=torch.float32, device="cpu"),
    )
    expected = alone(product_of, left, right).repeat(-(-rows // STEP), -(-tokens // LONGEST))[:rows, :tokens]
    asked = left.repeat(-(-rows // STEP), 1)[:rows], right.repeat(-(-tokens // LONGEST), 1)[:tokens]
    return torch.equal(alone(product_of, *asked) if by_one else product_of(*asked), expected)
