"""Documents of a call on the CPU: a matrix that is cut into tiles, in order of length or not, and read tile by tile."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Corpus:
    """Documents as rows of a `[T, d]` matrix, with per-token or per-document scale and offset (float32, or None).

    `index`: row of `values` for each token in order (None: documents follow each other in memory); `places`: position of each
    token in its document (None: 0, 1, 2, ...); `uniform`: the one length of all documents, where nothing is masked.
    """

    values: Tensor
    starts: np.ndarray
    lengths: np.ndarray
    index: Tensor | None
    places: np.ndarray | None
    uniform: int | None
    token_scale: Tensor | None
    token_offset: Tensor | None
    document_scale: np.ndarray | None
    document_offset: np.ndarray | None


@dataclass(frozen=True)
class Tile:
    """Tokens `first..last` of the group; `begins` of its pieces relative to `first`; the piece numbers `pieces`."""

    first: int
    last: int
    begins: np.ndarray
    pieces: slice


def tiles_of(lengths: np.ndarray, tile_tokens: int) -> tuple[list[Tile], np.ndarray]:
    """Cut documents into tiles of whole documents (a longer one into pieces); also the document of each piece."""
    counts = -(-lengths // tile_tokens)  # pieces of each document; none for an empty one
    owners, number = numbered(counts)
    sizes = np.minimum(tile_tokens, lengths[owners] - number * tile_tokens)
    ends = np.cumsum(sizes)
    begins = ends - sizes
    tiles = []
    piece = 0
    while piece < len(owners):
        first = int(begins[piece])
        stop = int(np.searchsorted(ends, first + tile_tokens, side="right"))
        tiles.append(Tile(first, int(ends[stop - 1]), begins[piece:stop] - first, slice(piece, stop)))
        piece = stop
    return tiles, owners


def before(sizes: np.ndarray) -> np.ndarray:
    """Where each part begins, of parts of these sizes that lie end to end."""
    return np.cumsum(sizes) - sizes


def numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Owner n has `counts[n]` things: the owner of each thing, and the number of the thing among that owner's."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - before(counts)[owners]


def spans(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """All numbers of the spans `starts .. starts + sizes`, one span after the other."""
    return np.repeat(starts - before(sizes), sizes) + np.arange(int(sizes.sum()))


def in_order_of_length(corpus: Corpus, begin: int, stop: int) -> tuple[Corpus, np.ndarray]:
    """Documents `begin..stop` in order of length, as a corpus that reads their tokens where they lie, and the former place of each."""
    starts, lengths = corpus.starts[begin:stop], corpus.lengths[begin:stop]
    if (lengths == lengths[:1]).all():
        return replace(corpus, starts=starts, lengths=lengths), np.arange(len(lengths))
    order = np.argsort(lengths, kind="stable")
    starts, lengths = starts[order], lengths[order]
    rows = torch.from_numpy(spans(starts, lengths))
    index = rows if corpus.index is None else corpus.index[rows]
    return replace(corpus, starts=before(lengths), lengths=lengths, index=index), order


def runs_of(tile: Tile) -> list[tuple[int, slice, int]]:
    """Runs of pieces of one length in a tile: the first token, relative to the tile's, the numbers of the pieces, their length."""
    lengths = np.diff(tile.begins, append=tile.last - tile.first)
    firsts = np.flatnonzero(np.diff(lengths, prepend=-1)).tolist()
    piece = tile.pieces.start
    return [
        (int(tile.begins[first]), slice(piece + first, piece + stop), int(lengths[first]))
        for first, stop in zip(firsts, [*firsts[1:], len(lengths)], strict=True)
    ]


class TileReader:
    """Gives tiles of document tokens in one fixed shape, copying only where dtype, order or a small corpus needs it."""

    def __init__(self, corpus: Corpus, tile_tokens: int, dtype: torch.dtype) -> None:
        self.corpus = corpus
        self.tile_tokens = tile_tokens
        same = corpus.index is None and corpus.values.dtype == dtype and corpus.values.stride(1) == 1
        self.direct = same and corpus.values.shape[0] >= tile_tokens
        if not self.direct:
            self.buffer = torch.zeros(tile_tokens, corpus.values.shape[1], dtype=dtype, device="cpu")
            self.scale = torch.zeros(tile_tokens, dtype=torch.float32, device="cpu") if corpus.token_scale is not None else None
            self.offset = (
                torch.zeros(tile_tokens, dtype=torch.float32, device="cpu") if corpus.token_offset is not None else None
            )

    def read(self, first: int, last: int) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
        """Tokens `[tile, d]`, their scales and offsets `[tile]`, and where in the tile token `first` stands.

        A tile may hold tokens of other documents before and behind the ones asked for; their cells are never looked at.
        """
        corpus = self.corpus
        if self.direct:
            start = min(first, corpus.values.shape[0] - self.tile_tokens)
            whole = slice(start, start + self.tile_tokens)
            scale = None if corpus.token_scale is None else corpus.token_scale[whole]
            offset = None if corpus.token_offset is None else corpus.token_offset[whole]
            return corpus.values[whole], scale, offset, first - start
        count = last - first
        rows = slice(first, last) if corpus.index is None else corpus.index[first:last]
        for buffer, source in ((self.scale, corpus.token_scale), (self.offset, corpus.token_offset)):
            if buffer is not None and source is not None:
                buffer[:count] = source[rows]
        if isinstance(rows, Tensor) and corpus.values.dtype == self.buffer.dtype:
            torch.index_select(corpus.values, 0, rows, out=self.buffer[:count])  # one copy, not two
        else:
            self.buffer[:count] = corpus.values[rows]
        return self.buffer, self.scale, self.offset, 0


def token_places(corpus: Corpus, begin: int, owners: np.ndarray, first: int, last: int) -> np.ndarray:
    """Position of each token `first..last` of the group in its own document."""
    if corpus.places is not None:
        return corpus.places[first:last]
    starts = corpus.starts[begin + owners]
    tokens = np.arange(first, last)
    piece = np.searchsorted(starts, tokens, side="right") - 1
    return tokens - starts[piece]


def merge_pieces(
    found: np.ndarray, winners: np.ndarray | None, owners: np.ndarray, documents: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Merge pieces into one column a document, `[R, documents]`; documents without tokens get -inf and -1."""
    if np.array_equal(
        owners, np.arange(documents)
    ):  # as many pieces as documents is not enough: one may have two, another none
        return found, winners
    merged = np.full((found.shape[0], documents), -np.inf, np.float32)
    merged_winners = None if winners is None else np.full((found.shape[0], documents), -1, np.int32)
    if len(owners) == 0:
        return merged, merged_winners
    firsts = np.flatnonzero(np.diff(owners, prepend=-1))
    merged[:, owners[firsts]] = np.maximum.reduceat(found, firsts, axis=1)
    if winners is not None and merged_winners is not None:
        for begin, stop in zip(firsts, np.append(firsts[1:], len(owners)), strict=True):
            piece = found[:, begin:stop].argmax(1)  # the first maximum, or the first NaN
            merged_winners[:, owners[begin]] = winners[np.arange(len(winners)), begin + piece]
    return merged, merged_winners
