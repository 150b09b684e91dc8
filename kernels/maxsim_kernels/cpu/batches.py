"""Maxima of some query tokens over some document tokens on the CPU: batched products of a few shapes, each item with rows of its own.

An item is a document, or a piece of a long one, with the query tokens that want it. Items whose rows and tokens round up to the same
shape are one batched product. Padding repeats a token that is there, so maxima need no mask. Every shape is compared with a plain
product, bit for bit, before it is taken: `same_bits`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from maxsim_kernels.cpu.corpus import Corpus, spans
from maxsim_kernels.cpu.tiles import INNER, STEP, Queries, product_of
from maxsim_kernels.turns import alone, in_turns

# Shapes of which MKL's kernels add every cell in one order: other sizes, and 8 or 32 rows, have edges that add otherwise.
ROWS = np.array([16, 24, 36, 48, 60, 72, 84, 96, 108, 120, 144, 168, 192, 216, 240])  # query tokens, an item's product
TOKENS = np.array([16, 32, 48, 64, 96, 112, 144, 160, 192, 240])  # of the document
LONGEST = int(TOKENS[-1])
_VALUES = 1 << 19  # floats of operands and cells, a batched product: 2 MB
_LOOKED = 3  # products of a look


@dataclass(frozen=True)
class Items:
    """What is multiplied: an item has `lengths` tokens of the corpus from `tokens` on (`LONGEST` at most). Fields are `[n]`.

    It meets `counts` of `entries` from `firsts` on (`ROWS[-1]` at most); these alone are `[E]`, rows of the queries' matrix. Its maxima
    are written from `slots` on.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    entries: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    slots: np.ndarray


def add_maxima(queries: Queries, corpus: Corpus, items: Items, found: np.ndarray) -> bool:
    """Write every item's maxima into `found`, float32; False, and nothing written, where a shape would have other bits."""
    shapes = np.searchsorted(ROWS, items.counts) * len(TOKENS) + np.searchsorted(TOKENS, items.lengths)
    width = queries.matrix.shape[1]
    numbers = np.unique(shapes)
    sizes = [(int(ROWS[number // len(TOKENS)]), int(TOKENS[number % len(TOKENS)])) for number in numbers]
    if not alone(_all_same_bits, sizes, width):
        return False
    batches = []
    for number, (rows, tokens) in zip(numbers, sizes, strict=True):
        most = max(1, _VALUES // ((rows + tokens) * width + rows * tokens))
        alike = np.flatnonzero(shapes == number)
        batches += [(rows, tokens, alike[first : first + most]) for first in range(0, len(alike), most)]

    def work(taken: Iterator[tuple[int, int, np.ndarray]]) -> None:
        for rows, tokens, some in taken:
            counts = items.counts[some]
            places = np.minimum(np.arange(rows), counts[:, None] - 1)  # rows and tokens behind repeat the last one
            asked = items.entries[items.firsts[some][:, None] + places]
            places = np.minimum(np.arange(tokens), items.lengths[some][:, None] - 1)
            best = _maxima(queries.matrix, corpus, asked, items.tokens[some][:, None] + places)
            found[spans(items.slots[some], counts)] = best[np.arange(rows) < counts[:, None]]

    in_turns(work, batches)
    return True


def _maxima(matrix: Tensor, corpus: Corpus, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Maxima `[n, rows]` of the matrix's `rows` `[n, rows]` over the corpus's `tokens` `[n, tokens]`."""
    left = torch.index_select(matrix, 0, torch.from_numpy(rows.reshape(-1)))
    places = torch.from_numpy(tokens.reshape(-1))
    right = torch.index_select(corpus.values, 0, places if corpus.index is None else corpus.index[places]).float()
    cells = torch.empty(*rows.shape, tokens.shape[1], dtype=torch.float32, device="cpu")
    batched(left.view(*rows.shape, -1), right.view(*tokens.shape, -1), cells)
    return cells.amax(2).numpy()


def batched(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Products `[n, rows, tokens]` of `[n, rows, d]` with `[n, tokens, d]`, long sums in the pieces of `multiply`."""
    across = right.transpose(1, 2)
    torch.bmm(left[..., :INNER], across[:, :INNER], out=out)
    for start in range(INNER, left.shape[2], INNER):
        out.baddbmm_(left[..., start : start + INNER], across[:, start : start + INNER])


def _all_same_bits(sizes: list[tuple[int, int]], width: int) -> bool:
    return all(same_bits(rows, tokens, width) for rows, tokens in sizes)


@lru_cache(maxsize=1024)
def same_bits(rows: int, tokens: int, width: int) -> bool:
    """Whether every cell of a batched product has its bits in a plain product of 48 x 240 (by the thread that asks: one at a time)."""
    random = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(STEP, width, generator=random, dtype=torch.float32, device="cpu"),
        torch.randn(LONGEST, width, generator=random, dtype=torch.float32, device="cpu"),
    )
    plain = product_of(left, right)
    asked, held = (
        torch.arange(_LOOKED, device="cpu")[:, None] * 5 + torch.arange(size, device="cpu") for size in (rows, tokens)
    )
    asked, held = asked % len(left), held % len(right)
    found = torch.empty(_LOOKED, rows, tokens, dtype=torch.float32, device="cpu")
    batched(left[asked], right[held], found)
    return torch.equal(found, plain[asked[:, :, None], held[:, None, :]])
