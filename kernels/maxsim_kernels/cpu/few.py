"""Smaller tiles for few documents, where this machine's matrix library gives them the bits of whole tiles.

A whole tile has up to 16384 document tokens, so that a document's bits depend on the queries alone; a call of a few hundred tokens then
spends its time on products that nobody reads. A library may add in another order in a product of another shape, so whether it does is
tried, once for each pair of shapes, and never assumed. Numbers do not matter to that choice: what it hangs on is in the key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

LEVELS = (256, 1024, 2048, 4096, 8192)  # document tokens of a smaller tile
Multiply = Callable[[Tensor, Tensor, Tensor], None]


def tile_for(tokens: int, whole: int, multiple: int, parts: Iterable[int], dim: int, across: bool, multiply: Multiply) -> int:
    """Document tokens of the tile for a group of so many: a smaller one that holds them all and gives the same bits, else `whole`.

    `multiple`: of how many tokens tiles are; `parts`: query rows of each product; `across`: tokens are the product's rows.
    """
    for level in LEVELS:
        small = level // multiple * multiple
        if tokens <= small < whole:
            threads = torch.get_num_threads()
            same = all(same_bits(rows, dim, small, whole, across, threads, multiply) for rows in dict.fromkeys(parts))
            return small if same else whole
    return whole


@functools.lru_cache(maxsize=4096)
def same_bits(rows: int, dim: int, small: int, whole: int, across: bool, threads: int, multiply: Multiply) -> bool:
    """Whether the products of `rows` query tokens with `small` and with `whole` document tokens have the same bits, by trying both."""
    drawn = torch.Generator().manual_seed(0)
    queries = torch.rand(rows, dim, generator=drawn) - 0.5
    tokens = torch.zeros(whole, dim)
    tokens[:small] = torch.rand(small, dim, generator=drawn) - 0.5
    tokens[whole - small :] = tokens[:small].clone()  # at both ends of the whole tile
    one, other = (_product(queries, part, across, multiply) for part in (tokens, tokens[:small].clone()))
    return torch.equal(one[:small], other) and torch.equal(one[whole - small :], one[:small].clone())


def _product(queries: Tensor, tokens: Tensor, across: bool, multiply: Multiply) -> Tensor:
    """Similarities `[tokens, rows]`, computed as `tiles.py` computes them."""
    if across:
        out = torch.empty(tokens.shape[0], queries.shape[0])
        multiply(tokens, queries.t(), out)
        return out
    out = torch.empty(queries.shape[0], tokens.shape[0])
    multiply(queries, tokens.t(), out)
    return out.t()
