"""Scores of some of the pairs of queries and documents on the CPU: a document meets only the tokens of the queries that it is for.

The products have shapes of their own, whose bits are checked (`batches.py`). numpy plans all pairs at once; threads then take batches
of products.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.cpu.batches import LONGEST, ROWS, Items, add_maxima
from maxsim_kernels.cpu.corpus import Corpus, before, numbered, spans
from maxsim_kernels.cpu.forward import corpora
from maxsim_kernels.cpu.tiles import Queries

_CELLS = 1 << 23  # (query token, document) pairs of a piece: about 200 MB where all are wanted


def score_some(call: Call, first: int, queries: Queries, wanted: Tensor, scores: Tensor) -> bool:
    """Write the wanted scores of a block of queries, which begins with query `first`, and all packed documents of a call.

    Args:
        call: without scales; its queries are not looked at.
        queries: float32, of `query_blocks`.
        wanted: `[Nq, N]` bool; where false nothing is written.
        scores: `[Nq, N]` float32.

    Returns:
        False where this machine's library would give other bits than a call with all pairs; some scores may have been written then.
    """
    block = slice(first, first + len(queries.bounds))
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return all(
            _write(queries, corpus, begin, wanted[block, columns].numpy(), scores[block, columns])
            for corpus, begin, columns in _spans(call, queries)
        )


def _spans(call: Call, queries: Queries) -> Iterator[tuple[Corpus, int, slice]]:
    """Documents in pieces that fit in memory: a corpus, the first document's number in it, and the piece's span of the call."""
    step = max(1, _CELLS // queries.matrix.shape[0])
    for at, corpus in corpora(call, None):
        for begin in range(0, len(corpus.lengths), step):
            yield corpus, begin, slice(at + begin, at + min(begin + step, len(corpus.lengths)))


def _write(queries: Queries, corpus: Corpus, begin: int, asked: np.ndarray, scores: Tensor) -> bool:
    """Write the wanted scores of documents from `begin` on, `asked` and `scores` `[Nq, n]`; False as in `score_some`."""
    document, query = asked.T.nonzero()
    starts = np.array([low for low, _ in queries.bounds])[query]
    sizes = np.array([high - low for low, high in queries.bounds])[query]
    entries = queries.rows[spans(starts, sizes)]
    count = asked.shape[1]
    counts = np.bincount(document, weights=sizes, minlength=count).astype(np.int64)  # entries of each document
    lengths = corpus.lengths[begin : begin + count]
    pieces = np.maximum(1, -(-lengths // LONGEST))  # an empty document has one, with maxima of -inf
    slots = before(counts * pieces)
    found = np.full(int((counts * pieces).sum()), -np.inf, np.float32)
    items = _items(entries, counts, slots, corpus.starts[begin : begin + count], lengths)
    if len(items.slots) and not add_maxima(queries, corpus, items, found):
        return False
    for piece in range(1, int(pieces.max(initial=1))):
        longer = np.flatnonzero(pieces > piece)
        first = spans(slots[longer], counts[longer])
        found[first] = np.maximum(found[first], found[spans(slots[longer] + piece * counts[longer], counts[longer])])
    within = before(sizes) - before(counts)[document]  # entries of the document before the pair's own
    scores[torch.from_numpy(query), torch.from_numpy(document)] = torch.from_numpy(
        _summed(found, slots[document] + within, sizes)
    )
    return True


def _items(entries: np.ndarray, counts: np.ndarray, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Items:
    """Items of documents with `counts` entries each, cut where the largest shape ends: by pieces of tokens, then of entries."""
    most_rows = int(ROWS[-1])
    of_rows, of_tokens = -(-counts // most_rows), -(-lengths // LONGEST)
    owner, at = numbered(of_rows * of_tokens)
    token, row = at // of_rows[owner], at % of_rows[owner]
    firsts = before(counts)[owner] + row * most_rows
    return Items(
        tokens=starts[owner] + token * LONGEST,
        lengths=np.minimum(LONGEST, lengths[owner] - token * LONGEST),
        entries=entries,
        firsts=firsts,
        counts=np.minimum(most_rows, counts[owner] - row * most_rows),
        slots=slots[owner] + token * counts[owner] + row * most_rows,
    )


def _summed(maxima: np.ndarray, firsts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Sums `[P]` float32 of the maxima of each pair, added in FP64 one after the other, as `tiles.summed` adds them."""
    order = np.argsort(-sizes, kind="stable")
    firsts, ends = firsts[order], np.searchsorted(-sizes[order], -np.arange(int(sizes.max(initial=0))), side="left")
    total = np.zeros(len(sizes), np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for row, some in enumerate(ends):
            total[:some] += maxima[firsts[:some] + row]
        found = np.empty(len(sizes), np.float32)
        found[order] = total.astype(np.float32)
    return found
