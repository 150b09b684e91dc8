"""Scores of some of the pairs of queries and documents on the CPU: a tile meets only the query tokens that one of its documents is for.

Many queries that each want a few documents share the reading of a tile, and most of its products are never made. Where documents of
a tile are wanted by different queries, each meets its own instead (`batches.py`). The products have shapes of their own: whether they
keep the bits of a whole call is looked at by whoever asks (`search/rescoring.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.cpu import batches
from maxsim_kernels.cpu.forward import corpora
from maxsim_kernels.cpu.tiles import NARROW, STEP, Corpus, Queries, TileReader, merge_pieces, multiply, summed, tiles_of
from maxsim_kernels.cpu.turns import in_turns

TOKENS = 5 * STEP  # of documents, a product
ROWS = (*NARROW.values(), *range(STEP, 10 * STEP + 1, STEP))  # query tokens, a product: few shapes, each of which is looked at
_SHARED = 4e6  # operations a product, from which threads gain: for less they wait for each other's Python
_CELLS = 1 << 22  # (query token, document piece) maxima held at once by a thread: 16 MB


def score_some(call: Call, first: int, queries: Queries, wanted: Tensor, scores: Tensor) -> None:
    """Write the wanted scores of a block of queries, which begins with query `first`, and all packed documents of a call.

    Args:
        call: without scales; its queries are not looked at.
        queries: float32, of `query_blocks`.
        wanted: `[Nq, N]` bool; where false nothing is written.
        scores: `[Nq, N]` float32.
    """
    last = first + len(queries.bounds)
    asked = wanted[first:last].numpy()

    def score(spans: Iterator[tuple[Corpus, int, int, int]]) -> None:
        for corpus, at, begin, stop in spans:
            columns = slice(at + begin, at + stop)
            _write(queries, corpus, begin, stop, asked[:, columns], scores[first:last, columns])

    assert call.document_lengths is not None
    tokens = max(1, int(call.document_lengths.sum()))
    asked_rows = int(wanted[first:last].sum()) * queries.matrix.shape[0] / max(1, len(queries.bounds))
    shared = 2 * queries.matrix.shape[1] * TOKENS * TOKENS * asked_rows / tokens > _SHARED
    in_turns(score, list(_spans(call, queries)), most=None if shared else 1)


def _spans(call: Call, queries: Queries) -> Iterator[tuple[Corpus, int, int, int]]:
    """Documents in pieces whose maxima fit in memory, several for every thread."""
    most = max(1, _CELLS // queries.matrix.shape[0])
    step = max(1, min(most, -(-call.document_count // (4 * torch.get_num_threads()))))
    for at, corpus in corpora(call, None):
        for begin in range(0, len(corpus.lengths), step):
            yield corpus, at, begin, min(begin + step, len(corpus.lengths))


def _write(queries: Queries, corpus: Corpus, begin: int, stop: int, asked: np.ndarray, scores: Tensor) -> None:
    rows = np.zeros((queries.matrix.shape[0], stop - begin), bool)
    for number, (low, high) in enumerate(queries.bounds):
        rows[queries.rows[low:high]] |= asked[number]
    best = _maxima(queries, corpus, begin, stop, rows)
    for number, (low, high) in enumerate(queries.bounds):
        which = np.flatnonzero(asked[number])
        held = best[queries.rows[low:high, None], which]
        scores[number, torch.from_numpy(which)] = torch.from_numpy(summed(held, range(len(held))))


def _cheaper_alone(
    corpus: Corpus, begin: int, firsts: np.ndarray, owners: np.ndarray, rows: np.ndarray, union: np.ndarray
) -> np.ndarray:
    """Which tiles cost more than their documents one by one: their products meet every row that any of the documents wants.

    Args:
        firsts: the first piece of every tile.
        rows, union: how many rows want each piece, and any piece of each tile.
    """
    cells = batches.cells_of(rows, corpus.lengths[begin + owners])
    whole = np.bincount(owners)[owners] == 1  # a document of several pieces is none of a batch
    fits = np.logical_and.reduceat(whole & (cells > 0), firsts)
    return fits & (np.add.reduceat(cells, firsts) < -(-union // STEP) * STEP * TOKENS)


def _maxima(queries: Queries, corpus: Corpus, begin: int, stop: int, wanted: np.ndarray) -> np.ndarray:
    """Maximum `[R, documents]` of the wanted cells, `[R, documents]` bool, over a document's tokens; -inf elsewhere."""
    tiles, owners = tiles_of(corpus.lengths[begin:stop], TOKENS)
    found = np.full((len(wanted), len(owners)), -np.inf, np.float32)
    if not tiles:
        return merge_pieces(found, None, owners, stop - begin)[0]
    wanted = wanted if len(owners) == wanted.shape[1] and np.array_equal(owners, np.arange(len(owners))) else wanted[:, owners]
    firsts = np.array([tile.pieces.start for tile in tiles])
    asked = np.logical_or.reduceat(wanted, firsts, axis=1)
    alone = _cheaper_alone(corpus, begin, firsts, owners, wanted.sum(0), asked.sum(0))
    pieces = np.flatnonzero(np.repeat(alone, np.diff(np.append(firsts, len(owners)))))
    if len(pieces):
        left_out = batches.add_maxima(queries, corpus, begin + owners[pieces], pieces, wanted, found)
        alone[np.searchsorted(firsts, left_out, side="right") - 1] = False
    reader = TileReader(corpus, TOKENS, torch.float32)
    left, product = torch.empty(ROWS[-1], queries.matrix.shape[1]), torch.empty(ROWS[-1] * TOKENS)
    base = int(corpus.starts[begin])
    for number, tile in enumerate(tiles):
        if alone[number]:
            continue
        rows = np.flatnonzero(asked[:, number])
        if not len(rows):
            continue
        tokens, _, _, shift = reader.read(base + tile.first, base + tile.last)
        for low in range(0, len(rows), ROWS[-1]):
            some = rows[low : low + ROWS[-1]]
            torch.index_select(queries.matrix, 0, torch.from_numpy(some), out=left[: len(some)])
            padded = next(size for size in ROWS if size >= len(some))  # rows behind: whatever was there, never looked at
            cells = product[: padded * TOKENS].view(padded, TOKENS)
            multiply(left[:padded], tokens.t(), cells)
            inside = cells.numpy()[: len(some), shift : shift + tile.last - tile.first]
            found[some, tile.pieces] = np.maximum.reduceat(inside, tile.begins, axis=1)
    return merge_pieces(found, None, owners, stop - begin)[0]
