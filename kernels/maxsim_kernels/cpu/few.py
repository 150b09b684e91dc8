"""One tile for few documents, where this machine's matrix library gives it the bits of whole tiles.

A whole tile has up to 16128 document tokens, and one of many queries is made by one thread, so that a document's bits depend on the
queries alone; a call of a few hundred tokens then spends its time on products that nobody reads, and on waiting for that thread. A
library may add in another order in a product of another shape, or of more threads, so whether it does is tried, once for each pair of
shapes, and never assumed. The numbers multiplied do not matter to the order: all that does is in the cache's key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from maxsim_kernels.turns import alone

LEVELS = (240, 1008, 2016, 4032, 8064)  # document tokens of a tile
Multiply = Callable[[Tensor, Tensor, Tensor], None]


def tile_for(tokens: int, whole: int, multiple: int) -> int:
    """Document tokens of the one tile, no larger than a `whole` one, that holds `tokens` of them; 0 where none does.

    `multiple`: a tile holds document tokens in multiples of this.
    """
    return next((level for level in LEVELS if tokens <= level // multiple * multiple and level <= whole), 0)


@functools.lru_cache(maxsize=4096)
def same_bits(
    rows: int, dim: int, small: int, whole: int, across: bool, threads: int, by_one: bool, multiply: Multiply
) -> bool:
    """Whether products of `rows` query tokens with `small` document tokens, by all threads together, have the bits of `whole` ones.

    `by_one`: one thread makes the whole ones.
    """
    drawn = torch.Generator().manual_seed(0)
    queries = torch.rand(rows, dim, generator=drawn, dtype=torch.float32, device="cpu") - 0.5
    few = torch.rand(small, dim, generator=drawn, dtype=torch.float32, device="cpu").sub_(0.5)
    tokens = torch.zeros(whole, dim, dtype=torch.float32, device="cpu")
    tokens[:small] = few
    tokens[whole - small :] = few  # at both ends of the whole tile
    other = _product(queries, few, across, multiply)
    given = queries, tokens, across, multiply
    one = alone(_product, *given) if by_one else _product(*given)
    return torch.equal(one[whole - small :], other) and (2 * small > whole or torch.equal(one[:small], other))


def _product(queries: Tensor, tokens: Tensor, across: bool, multiply: Multiply) -> Tensor:
    """Similarities `[tokens, rows]`, computed as `tiles.py` computes them."""
    if across:
        out = torch.empty(tokens.shape[0], queries.shape[0], dtype=torch.float32, device="cpu")
        multiply(tokens, queries.t(), out)
        return out
    out = torch.empty(queries.shape[0], tokens.shape[0], dtype=torch.float32, device="cpu")
    multiply(queries, tokens.t(), out)
    return out.t()
