"""The inner part of `forward.py`: products of query rows with tiles of document tokens, and their maxima, document by document."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from maxsim_kernels.cpu import few, integers
from maxsim_kernels.cpu.corpus import (
    Corpus,
    Tile,
    TileReader,
    in_order_of_length,
    merge_pieces,
    runs_of,
    tiles_of,
    token_places,
)
from maxsim_kernels.turns import in_turns

# In products of whole STEPs of rows and tokens, and INNER dimensions at most, MKL adds every cell in one order, by its kernels for
# AVX-512, AVX2, AVX and SSE alike. Other products have edges that add otherwise, and longer sums are cut by the shape.
STEP, INNER = 48, 384
# Matrix rows for few query tokens, which give smaller products with the same bits; by these, the rows of products `[rows, tokens]`.
NARROW = {16: 24, 32: 36}
_OWN_ROWS = 96  # query tokens from which on a thread makes products of its own: fewer are sooner done by all threads together
_LONGEST_TILE = 336 * STEP  # document tokens a product, at most: with few query rows calls cost more than cache misses
_LONGEST_OWN = 42 * STEP  # the same where each thread makes its own: small, so that all threads end at about the same time
# Of a tile's tokens, which may have to be copied: a tile has fewer wide ones. Neither bound cuts FP32 tokens of up to 1024 dimensions.
_TILE_BYTES, _OWN_BYTES = 63 << 20, 63 << 19
_TILE_ROWS = 10 * STEP  # query tokens a product
_CELLS = 1 << 20  # similarities a product: FP32 [480, 2016]
# Query tokens from which on documents are taken in order of length: the maxima of those of one length are one call to torch, in which a
# thread does not wait for Python's lock. Not for floats without MKL: products with tokens first were not checked there.
_SORTED = 96
_SORTED_FLOATS = _SORTED if torch.backends.mkl.is_available() else sys.maxsize
_INT8_STEP, _INT8_TILE_ROWS = 32, 448
# Integer products are bound by what they write and maxima read, which should fit the L2 cache: [576, 448].
_INT8_CELLS = 1 << 18


@dataclass(frozen=True)
class Queries:
    """A block of queries as one matrix, in which repeated tokens stand once.

    `matrix`: `[R, d]` float32 or int8 (float64: wide codes as floats), zeros behind as `padded_rows` says; `bounds[q]`: tokens of query
    q; `rows`, `places`: `[tokens]` row of each token and its position in its query; `scales`, `sums`: `[R, 1]` float32, the quantised
    queries' scales and (affine documents) row sums.
    """

    matrix: Tensor
    bounds: list[tuple[int, int]]
    rows: np.ndarray
    places: np.ndarray
    scales: np.ndarray | None
    sums: np.ndarray | None


def padded_rows(rows: int, dtype: torch.dtype) -> int:
    """Rows of the matrix that holds `rows` query tokens, padding included."""
    if dtype == torch.int8:
        return max(_INT8_STEP, -(-rows // _INT8_STEP) * _INT8_STEP)
    return next((narrow for narrow in NARROW if rows <= narrow), -(-rows // STEP) * STEP)


def _chunk(queries: Queries) -> int:
    """Query rows a product; integer products share the rows, as evenly as their steps allow."""
    rows = queries.matrix.shape[0]
    if queries.matrix.dtype != torch.int8:
        return min(rows, _TILE_ROWS)
    parts = -(-rows // _INT8_TILE_ROWS)
    return -(-rows // parts // _INT8_STEP) * _INT8_STEP


def _parts(queries: Queries) -> dict[int, int]:
    """How many query rows each product has, by its first row: `_chunk`, and what is left for the last one."""
    rows, chunk = queries.matrix.shape[0], _chunk(queries)
    return {low: min(chunk, rows - low) for low in range(0, rows, chunk)}


def _tile_tokens(queries: Queries) -> int:
    """Document tokens of a product: decided by the queries alone, so it is the same for all documents."""
    rows, own = _chunk(queries), _by_one(queries)
    held = (_OWN_BYTES if own else _TILE_BYTES) // (queries.matrix.shape[1] * queries.matrix.itemsize)
    if queries.matrix.dtype == torch.int8:
        return max(1, min(held, _INT8_CELLS // rows) // _INT8_STEP) * _INT8_STEP
    return max(1, min(held, _LONGEST_OWN if own else _LONGEST_TILE, _CELLS // rows) // STEP) * STEP


def product_shapes(queries: Queries) -> set[tuple[int, int, bool]]:
    """The products of a block of float queries with packed documents: (query rows, document tokens, whether one thread makes them)."""
    return {(_rows_of(count, False), _tile_tokens(queries), _by_one(queries)) for count in _parts(queries).values()}


def product_of(queries: Tensor, tokens: Tensor) -> Tensor:
    """Similarities `[rows, tokens]` of float32 matrices exactly as a tile of that shape computes them; at most 512 rows."""
    block = Queries(queries, [], np.empty(0, np.int64), np.empty(0, np.int64), None, None)
    work = _Products(block, tokens.shape[0], scaled=False, tokens_first=False)
    return work.cells(work.parts[0], tokens, None, None)


def _exact(queries: Queries, tokens_first: bool) -> Queries:
    """The same queries; INT8 codes as floats where this CPU's integer products are wrong or slow. Scores keep their bits."""
    if queries.matrix.dtype != torch.int8:
        return queries
    width = queries.matrix.shape[1]
    if all(integers.worthwhile(count, _tile_tokens(queries), width, tokens_first) for count in _parts(queries).values()):
        return queries
    return replace(queries, matrix=queries.matrix.to(integers.exact_float(width)))


def _cell_dtype(queries: Queries) -> torch.dtype:
    """The dtype of a product's cells: int32 for INT8 codes, else the matrix's own."""
    return torch.int32 if queries.matrix.dtype == torch.int8 else queries.matrix.dtype


def maxima(
    queries: Queries, corpus: Corpus, begin: int, stop: int, return_argmax: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Maximum `[R, documents]` for each query row over the tokens of documents `begin..stop`, scaled, and the winning positions.

    There is at least one document; those without tokens have maximum -inf and winner -1.
    """
    lengths = corpus.lengths[begin:stop]
    least = _SORTED if queries.matrix.dtype == torch.int8 else _SORTED_FLOATS
    uniform = corpus.uniform if (corpus.uniform or 0) <= _tile_tokens(queries) else None
    by_length = not return_argmax and (bool(uniform) or queries.matrix.shape[0] >= least)
    queries = _exact(queries, by_length)
    one = _one_tile(queries, int(lengths.sum()), _tile_tokens(queries), uniform if by_length else None, by_length)
    size = one or _tile_tokens(queries)
    if by_length:
        found, owners = _by_length(queries, corpus, (begin, stop), size, bool(one))
        winners = None
    else:
        found, owners, winners = _in_place(queries, corpus, (begin, stop), size, bool(one), return_argmax)
    merged, merged_winners = merge_pieces(found, winners, owners, len(lengths))
    return _scaled(merged, queries, corpus, begin, stop), merged_winners


def _by_length(
    queries: Queries, corpus: Corpus, span: tuple[int, int], size: int, together: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Maximum `[R, pieces]` and the document of each piece: documents of one length follow each other, products `[tokens, rows]`.

    `together`: threads make each product together.
    """
    begin, stop = span
    held, order = in_order_of_length(corpus, begin, stop)
    base = int(held.starts[0])
    tiles, owners = tiles_of(held.lengths, size)
    scaled = corpus.token_scale is not None
    best = [
        torch.empty(len(owners), count, dtype=torch.float32 if scaled else _cell_dtype(queries), device="cpu")
        for count in _parts(queries).values()
    ]

    def work(taken: Iterable[Tile]) -> None:
        reader = TileReader(held, size, queries.matrix.dtype)
        products = _Products(queries, size, scaled, tokens_first=True)
        for tile in taken:
            tokens, scale, offset, shift = reader.read(base + tile.first, base + tile.last)
            runs = runs_of(tile)
            for part, out in zip(products.parts, best, strict=True):
                products.cells(part, tokens, scale, offset)
                for first, pieces, length in runs:
                    alike = part.documents(shift + first, pieces.stop - pieces.start, length)
                    torch.amax(alike, 1, out=out[pieces])

    _shared(work, tiles, queries, together)
    documents = order[owners]
    back = np.argsort(documents, kind="stable")  # a document's pieces stay in order
    found, places = torch.empty(queries.matrix.shape[0], len(owners), dtype=torch.float32, device="cpu"), torch.from_numpy(back)

    def put(taken: Iterable[tuple[int, Tensor]]) -> None:  # by threads of this package's own: torch's do not outlive a fork
        for low, out in taken:
            found[low : low + out.shape[1]].copy_(out[places].float().t())

    in_turns(put, list(zip(_parts(queries), best, strict=True)))
    return found.numpy(), documents[back]


def _in_place(
    queries: Queries, corpus: Corpus, span: tuple[int, int], size: int, together: bool, return_argmax: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """As `_by_length`, with documents in their own order and products `[rows, tokens]`; also the winning positions, where asked for."""
    begin, stop = span
    rows = queries.matrix.shape[0]
    tiles, owners = tiles_of(corpus.lengths[begin:stop], size)
    base = int(corpus.starts[begin])
    found = np.empty((rows, len(owners)), np.float32)
    winners = np.full((rows, len(owners)), -1, np.int32) if return_argmax else None

    def work(taken: Iterable[Tile]) -> None:
        reader = TileReader(corpus, size, queries.matrix.dtype)
        products = _Products(queries, size, corpus.token_scale is not None, tokens_first=False)
        for tile in taken:
            tokens, scale, offset, shift = reader.read(base + tile.first, base + tile.last)
            inside = slice(shift, shift + tile.last - tile.first)
            for part in products.parts:
                cells = products.cells(part, tokens, scale, offset).numpy()[: part.count, inside]
                best = np.maximum.reduceat(cells, tile.begins, axis=1)  # a maximum that keeps NaN
                found[part.rows, tile.pieces] = best
                if winners is not None:
                    places = token_places(corpus, begin, owners[tile.pieces], base + tile.first, base + tile.last)
                    winners[part.rows, tile.pieces] = _first_of(cells, best, tile.begins, places)

    _shared(work, tiles, queries, together)
    return found, owners, winners


def _shared(work: Callable[[Iterable[Tile]], None], tiles: list[Tile], queries: Queries, together: bool) -> None:
    """Have threads take tiles in turns, or make every product together."""
    if together or not _by_one(queries):
        work(tiles)
    else:
        in_turns(work, tiles)


def _by_one(queries: Queries) -> bool:
    """Whether one thread makes a product, decided by the queries alone as its shape is."""
    return queries.matrix.shape[0] >= _OWN_ROWS


def _rows_of(count: int, tokens_first: bool, dtype: torch.dtype = torch.float32) -> int:
    """Query rows of a product that is made for `count` rows of the matrix (`NARROW`)."""
    return count if tokens_first or dtype == torch.int8 else NARROW.get(count, count)


def _one_tile(queries: Queries, tokens: int, whole: int, uniform: int | None, tokens_first: bool) -> int:
    """The size of one tile for all of few documents, if threads make its product together with the same bits; else 0."""
    small = few.tile_for(tokens, whole, uniform or 1)
    if not small or queries.matrix.dtype != torch.float32:  # products of codes are exact in every shape
        return small
    parts = {_rows_of(count, tokens_first) for count in _parts(queries).values()}
    shared = (queries.matrix.shape[1], small, whole, tokens_first, torch.get_num_threads(), _by_one(queries), multiply)
    return small if all(few.same_bits(part, *shared) for part in parts) else 0


@dataclass(frozen=True)
class _Part:
    """A block of query rows with its operand and its views of the buffers, made once a task: the loop only calls kernels."""

    rows: slice
    count: int
    operand: Tensor
    product: Tensor
    scaled: Tensor
    sums: Tensor | None
    views: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def documents(self, first: int, count: int, length: int) -> Tensor:
        """Cells `[count, length, rows]` of the documents from token `first` on, where products have tokens first.

        A view is made once: torch gives Python's lock away for each, and threads wait to get it back.
        """
        key = first, count, length
        if key not in self.views:
            self.views[key] = self.scaled[first : first + count * length].view(count, length, -1)
        return self.views[key]


class _Products:
    """Products of query rows with a tile: `[tile, rows]` (`tokens_first`) or `[rows, tile]`, into buffers that are made once."""

    def __init__(self, queries: Queries, tile_tokens: int, scaled: bool, tokens_first: bool) -> None:
        self.tokens_first = tokens_first
        self.integer = queries.matrix.dtype == torch.int8
        most = _rows_of(_chunk(queries), tokens_first, queries.matrix.dtype) * tile_tokens
        product = torch.empty(most, dtype=_cell_dtype(queries), device="cpu")
        result = torch.empty(most, dtype=torch.float32, device="cpu") if scaled else product
        self.parts = []
        for low, count in _parts(queries).items():
            rows = slice(low, low + count)
            wide = _rows_of(count, tokens_first, queries.matrix.dtype)
            shape = (tile_tokens, wide) if tokens_first else (wide, tile_tokens)
            operand, sums = queries.matrix[rows], None if queries.sums is None else torch.from_numpy(queries.sums[rows])
            if wide > count:
                more = 0, 0, 0, wide - count
                operand, sums = pad(operand, more), None if sums is None else pad(sums, more)
            if tokens_first:
                operand, sums = operand.t(), None if sums is None else sums.t()
            own_product, own_result = (buffer[: wide * tile_tokens].view(shape) for buffer in (product, result))
            self.parts.append(_Part(rows, count, operand, own_product, own_result, sums))

    def cells(self, part: _Part, tokens: Tensor, scale: Tensor | None, offset: Tensor | None) -> Tensor:
        """Similarities of a part with a tile, token scale and offset applied; valid until the next call."""
        out = part.product
        left, right = (tokens, part.operand) if self.tokens_first else (part.operand, tokens.t())
        if self.integer:
            integers.product(left, right, out)
        else:
            multiply(left, right, out)
        if scale is None:
            return out
        along = (-1, 1) if self.tokens_first else (1, -1)
        # Two vector passes: one product of mixed types would convert cell by cell.
        part.scaled.copy_(out).mul_(scale.view(along))
        if offset is not None and part.sums is not None:
            part.scaled.addcmul_(offset.view(along), part.sums)
        return part.scaled


def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Float products into `out`, long sums in pieces: the matrix library would cut them itself, by the shape."""
    if left.shape[1] <= INNER:
        torch.mm(left, right, out=out)
        return
    torch.mm(left[:, :INNER], right[:INNER], out=out)
    for start in range(INNER, left.shape[1], INNER):
        out.addmm_(left[:, start : start + INNER], right[start : start + INNER])


def _first_of(cells: np.ndarray, best: np.ndarray, begins: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Position of the first cell that equals its piece's maximum: of the first NaN, where there is one."""
    sizes = np.diff(np.append(begins, cells.shape[1]))
    hit = cells == np.repeat(best, sizes, axis=1)
    if np.isnan(best).any():
        hit |= np.isnan(cells)
    return np.minimum.reduceat(np.where(hit, places.astype(np.int32), np.iinfo(np.int32).max), begins, axis=1)


def summed(best: np.ndarray, rows: Iterable[int]) -> np.ndarray:
    """A query's scores `[N]` float32: its rows of the maxima `[R, N]`, added in FP64 one after the other."""
    total = np.zeros(best.shape[1], np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is the NaN it should be, beyond FP32 lies inf
        for row in rows:
            total += best[row]
        return total.astype(np.float32)


def _scaled(maxima: np.ndarray, queries: Queries, corpus: Corpus, begin: int, stop: int) -> np.ndarray:
    """Apply the scales that stay out of the loop: one a document or corpus (not negative, so maxima stay maxima), one a query token."""
    with np.errstate(invalid="ignore", over="ignore"):  # what is beyond FP32 is inf, and its differences NaN
        if corpus.document_scale is not None:
            maxima = maxima * corpus.document_scale[begin:stop]
            if corpus.document_offset is not None and queries.sums is not None:
                maxima += queries.sums * corpus.document_offset[begin:stop]
        if queries.scales is not None:
            maxima = maxima * queries.scales
    return maxima
