"""Exact scores of a few documents, with the very bits that scoring all queries against all documents gives.

The CPU path's score of a (query, document) pair is a function of its products' cells, and a cell's bits are the same wherever in a
product it stands (the contract of docs/kernels.md). Here a query is scored alone and in shorter tiles, so products have other shapes.
Matrix libraries could add in another order then. Whether this machine's does is looked at, once a shape: `same_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from maxsim_kernels.checks import Call, Options, validate
from maxsim_kernels.cpu.forward import FEW_ROWS, FEW_TOKENS, check_values, one_query, query_blocks, score_few
from maxsim_kernels.cpu.tiles import Queries, product_of, product_shapes
from maxsim_kernels.tokens import Packed

_ROWS = 32  # of the product, of `FEW_TOKENS` document tokens, that others are compared with


def packed_queries(call: Call) -> Packed:
    """The valid tokens of every query, end to end, as the CPU path takes them."""
    check_values(call)
    if call.query_starts is not None:
        assert call.query_lengths is not None
        return Packed.view(call.queries.detach(), call.query_starts, call.query_lengths).compact()
    count, size = call.queries.shape[:2]
    valid = torch.ones(count, size, dtype=torch.bool) if call.query_mask is None else call.query_mask != 0
    if call.query_lengths is not None:
        valid = valid & (torch.arange(size) < call.query_lengths[:, None])
    offsets = torch.zeros(count + 1, dtype=torch.int64)
    torch.cumsum(valid.sum(1), 0, out=offsets[1:])
    return Packed(call.queries.detach()[valid], offsets)


class Alone:
    """Queries that are scored one by one, each made ready once: of few documents that would take longer than their products."""

    def __init__(self, queries: Packed) -> None:
        nothing = Packed(queries.values[:0], torch.zeros(1, dtype=torch.int64))
        self.call = validate(queries, nothing, Options())
        self.ready: dict[int, Queries] = {}

    def scores(self, query: int, documents: Packed, chosen: Tensor) -> Tensor:
        """Exact scores `[c]` of a query with documents `chosen` `[c]` int64, whose starts and lengths were checked (`check_rows`)."""
        if query not in self.ready:
            self.ready[query] = one_query(self.call, query)
        starts, lengths = documents.starts[chosen], documents.lengths[chosen]
        few = replace(self.call, documents=documents.values, document_starts=starts, document_lengths=lengths)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return score_few(few, self.ready[query])


def why_not_alone(queries: Packed, dim: int) -> str:
    """Why scores of single queries would not have the bits of a call with all of them; empty when they do."""
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    asked = torch.backends.fp32_precision if precision == "none" else precision  # type: ignore[attr-defined]
    if asked not in ("none", "ieee"):
        return f"products of float32 may be rounded to {asked} (torch.backends.mkldnn), which the bounds do not cover"
    nothing = Packed(torch.empty(0, dim, dtype=queries.dtype), torch.zeros(1, dtype=torch.int64))
    call = validate(queries, nothing, Options())
    shapes: set[tuple[int, int]] = set()
    for _, block in query_blocks(call):
        shapes |= product_shapes(block)
    longest = int(queries.lengths.max()) if len(queries) else 0
    alone = {(rows, FEW_TOKENS) for rows in range(FEW_ROWS, min(512, longest + FEW_ROWS) + 1, FEW_ROWS)}
    other = _first_of_another_order(shapes | alone, queries.dim, False) or _first_of_another_order(alone, queries.dim, True)
    return "" if other is None else f"the matrix library adds in another order for products of {other[0]} x {other[1]} tokens"


def each(work: Callable[[int], None], queries: list[int]) -> None:
    """`work` for every query, several at a time, each by one thread: of small products a team would mostly wait for itself."""
    threads = torch.get_num_threads()
    if min(threads, len(queries)) < 2:
        for query in queries:
            work(query)
        return
    try:
        with ThreadPoolExecutor(min(threads, len(queries)), "maxsim-rescore", torch.set_num_threads, (1,)) as pool:
            for _ in pool.map(work, queries):
                pass
    finally:
        torch.set_num_threads(threads)  # what threads that begin later take is torch's own, not one thread's


def _first_of_another_order(shapes: Iterable[tuple[int, int]], width: int, by_one: bool) -> tuple[int, int] | None:
    threads = torch.get_num_threads()
    return next((shape for shape in sorted(shapes) if not same_order(shape, width, threads, by_one)), None)


@lru_cache(maxsize=1024)
def same_order(shape: tuple[int, int], width: int, threads: int, by_one: bool = False) -> bool:
    """Whether every cell of a product of this shape (`by_one`: made by one thread) has the bits it has in one of 32 x 512 by `threads`.

    Random numbers, whose sums differ in some bit of thousands of cells as soon as the order of addition does; the same tokens
    again and again, so that every place of the large product is compared.
    """
    rows, tokens = shape
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(_ROWS, width, generator=random), torch.randn(FEW_TOKENS, width, generator=random)
    expected = product_of(left, right).clone()
    if by_one:
        torch.set_num_threads(1)
    found = product_of(left.repeat(-(-rows // _ROWS), 1)[:rows], right.repeat(-(-tokens // FEW_TOKENS), 1)[:tokens])
    torch.set_num_threads(threads)
    repeated = expected.repeat(-(-rows // _ROWS), -(-tokens // FEW_TOKENS))[:rows, :tokens]
    return torch.equal(found, repeated)
