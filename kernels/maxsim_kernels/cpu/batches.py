"""Maxima of some query tokens with some documents on the CPU: each document meets the tokens that want it, many documents a call.

Documents whose rows and tokens round up to the same shape are one batched product. Padding repeats a token that is there, so maxima
need no mask. Every shape is compared with a plain product, bit for bit, before it is taken: `same_bits`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from maxsim_kernels.cpu.tiles import INNER, STEP, Corpus, Queries, product_of

# Shapes of which MKL's kernels add every cell in one order: other sizes, and 8 or 32 rows, have edges that add otherwise.
ROWS = np.array([16, 24, 36, 48, 60, 72, 84, 96, 108, 120, 144, 168, 192, 216, 240])  # query tokens, a document's product
TOKENS = np.array([16, 32, 48, 64, 96, 112, 144, 160, 192, 240])  # of the document
_VALUES = 1 << 20  # floats of operands and cells, a batched product: 4 MB
_LOOKED = 3  # products of a look


def cells_of(rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Cells of the products that documents take; none where no shape is large enough."""
    of_rows, of_tokens = np.searchsorted(ROWS, rows), np.searchsorted(TOKENS, tokens)
    fits = (of_rows < len(ROWS)) & (of_tokens < len(TOKENS))
    return np.where(fits, ROWS[np.where(fits, of_rows, 0)] * TOKENS[np.where(fits, of_tokens, 0)], 0)


def add_maxima(
    queries: Queries, corpus: Corpus, documents: np.ndarray, columns: np.ndarray, wanted: np.ndarray, found: np.ndarray
) -> np.ndarray:
    """Write the wanted maxima of `documents`, each of which some shape holds; returns the columns that were left out.

    Args:
        columns: of `wanted` `[R, C]` bool and `found` `[R, C]`, where each document stands.
    """
    by_document = np.ascontiguousarray(wanted[:, columns].T)
    place, row = by_document.nonzero()
    counts = np.bincount(place, minlength=len(columns))
    ends = np.cumsum(counts)
    slot = np.arange(len(row)) - np.repeat(ends - counts, counts)  # of a row among those of its document
    lengths, starts = corpus.lengths[documents], corpus.starts[documents]
    shape = np.searchsorted(ROWS, counts) * len(TOKENS) + np.searchsorted(TOKENS, lengths)
    left_out = []
    for number in np.unique(shape[counts > 0]):
        rows, tokens = int(ROWS[number // len(TOKENS)]), int(TOKENS[number % len(TOKENS)])
        group = np.flatnonzero((shape == number) & (counts > 0))
        if not same_bits(rows, tokens, queries.matrix.shape[1]):
            left_out.append(columns[group])
            continue
        work = _Work(queries, corpus, rows, tokens, len(group))
        for first in range(0, len(group), work.batch):
            some = group[first : first + work.batch]
            held = _spans(ends[some] - counts[some], counts[some])
            in_batch = np.repeat(np.arange(len(some)), counts[some])
            asked = np.zeros((len(some), rows), np.int64)
            asked[in_batch, slot[held]] = row[held]
            best = work.maxima(asked, starts[some], lengths[some])
            found[row[held], columns[place[held]]] = best[in_batch, slot[held]]
    return np.concatenate(left_out) if left_out else columns[:0]


def _spans(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The numbers of spans, end to end."""
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))


class _Work:
    """Buffers of batched products of one shape."""

    def __init__(self, queries: Queries, corpus: Corpus, rows: int, tokens: int, most: int) -> None:
        self.queries, self.corpus = queries, corpus
        width = queries.matrix.shape[1]
        self.batch = min(most, max(1, _VALUES // ((rows + tokens) * width + rows * tokens)))
        self.left, self.right = torch.empty(self.batch, rows, width), torch.empty(self.batch, tokens, width)
        self.cells = torch.empty(self.batch, rows, tokens)
        self.places = np.arange(tokens)

    def maxima(self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """`[n, rows]` of documents that begin at tokens `starts` `[n]`."""
        count = len(rows)
        left, right, cells = self.left[:count], self.right[:count], self.cells[:count]
        torch.index_select(self.queries.matrix, 0, torch.from_numpy(rows.reshape(-1)), out=left.view(-1, left.shape[2]))
        tokens = torch.from_numpy((starts[:, None] + np.minimum(self.places, lengths[:, None] - 1)).reshape(-1))
        tokens = tokens if self.corpus.index is None else self.corpus.index[tokens]
        if self.corpus.values.dtype == torch.float32:
            torch.index_select(self.corpus.values, 0, tokens, out=right.view(-1, right.shape[2]))
        else:
            right.view(-1, right.shape[2]).copy_(self.corpus.values[tokens])
        batched(left, right, cells)
        return cells.amax(2).numpy()


def batched(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Products `[n, rows, tokens]` of `[n, rows, d]` with `[n, tokens, d]`, long sums in the pieces of `multiply`."""
    across = right.transpose(1, 2)
    torch.bmm(left[..., :INNER], across[:, :INNER], out=out)
    for start in range(INNER, left.shape[2], INNER):
        out.baddbmm_(left[..., start : start + INNER], across[:, start : start + INNER])


@lru_cache(maxsize=1024)
def same_bits(rows: int, tokens: int, width: int) -> bool:
    """Whether every cell of a batched product has its bits in a plain product of 48 x 240 (by the thread that asks: one at a time)."""
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(STEP, width, generator=random), torch.randn(int(TOKENS[-1]), width, generator=random)
    plain = product_of(left, right)
    asked, held = (torch.arange(_LOOKED)[:, None] * 5 + torch.arange(size) for size in (rows, tokens))
    asked, held = asked % len(left), held % len(right)
    found = torch.empty(_LOOKED, rows, tokens)
    batched(left[asked], right[held], found)
    return torch.equal(found, plain[asked[:, :, None], held[:, None, :]])
