"""The inner part of `forward.py`: tiles of document tokens, their products with query rows, and segmented maxima."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from maxsim_kernels.cpu import few, integers
from maxsim_kernels.cpu.turns import in_turns

# Of products of whole steps of rows and tokens, and of so many dimensions at most, MKL adds every cell in one order, by its kernels for
# AVX-512, AVX2, AVX and SSE alike. Others have edges that add otherwise, and longer sums are cut by the shape.
STEP, INNER = 48, 384
# Rows of few query tokens, whose smaller products have these bits too; beside them those they need where queries come first.
NARROW = {16: 24, 32: 36}
_OWN_ROWS = 96  # query tokens from which a thread makes products of its own: with fewer, threads make them together sooner
_LONGEST_TILE = 336 * STEP  # document tokens a product, at most: with few query rows calls cost more than cache misses
_LONGEST_OWN = 42 * STEP  # the same where each thread makes its own: the last ones are to end together
_TILE_ROWS = 10 * STEP  # query tokens a product
_CELLS = 1 << 20  # similarities a product: FP32 [480, 2016]
# Query tokens from which maxima of float cells are scattered to their documents, in one call a product: for fewer torch is slower than
# numpy, which looks at one run after the other. Builds without MKL have no fast way for it at all.
_SCATTERED = 96 if torch.backends.mkl.is_available() else sys.maxsize
_INT8_STEP, _INT8_TILE_ROWS = 32, 448
# Integer products are bound by what they write and maxima read, which should fit the L2 cache: [576, 448].
_INT8_CELLS = 1 << 18
_WALKED_ROWS, _WALKED_TOKENS = 96, 16  # query tokens, and tokens a document, from which integer maxima are a call a document


@dataclass(frozen=True)
class Queries:
    """A block of queries as one matrix, tokens that repeat in it once.

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
    owners = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
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


def padded_rows(rows: int, dtype: torch.dtype) -> int:
    """Rows of the matrix of so many query tokens."""
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


def _counts(queries: Queries) -> set[int]:
    """Query rows of all products: `_chunk`, and what is left for the last one."""
    rows, chunk = queries.matrix.shape[0], _chunk(queries)
    return {min(chunk, rows - low) for low in range(0, rows, chunk)}


def _tile_tokens(queries: Queries) -> int:
    """Document tokens a product: decided by the queries alone, so it is one number for a task."""
    rows = _chunk(queries)
    if queries.matrix.dtype == torch.int8:
        return _INT8_CELLS // rows // _INT8_STEP * _INT8_STEP
    return min(_LONGEST_OWN if _by_one(queries) else _LONGEST_TILE, _CELLS // rows // STEP * STEP)


def product_shapes(queries: Queries) -> set[tuple[int, int, bool]]:
    """Of the products of a block of float queries with packed documents: query rows, document tokens, whether one thread makes them."""
    return {(_rows_of(count, False), _tile_tokens(queries), _by_one(queries)) for count in _counts(queries)}


def product_of(queries: Tensor, tokens: Tensor) -> Tensor:
    """Similarities `[rows, tokens]` of float32 matrices exactly as a tile of that shape computes them; at most 512 rows."""
    block = Queries(queries, [], np.empty(0, np.int64), np.empty(0, np.int64), None, None)
    work = _Products(block, tokens.shape[0], scaled=False, tokens_first=False)
    return work.cells(work.parts[0], tokens, None, None)


def _exact(queries: Queries, tokens_first: bool) -> Queries:
    """The same queries; INT8 codes as floats where this CPU's integer products are wrong. Scores keep their bits."""
    if queries.matrix.dtype != torch.int8:
        return queries
    width = queries.matrix.shape[1]
    if all(integers.right(count, _tile_tokens(queries), width, tokens_first) for count in _counts(queries)):
        return queries
    return replace(queries, matrix=queries.matrix.to(integers.exact_float(width)))


def _cell_dtype(queries: Queries) -> torch.dtype:
    """Of a product's cells: integers stay what they are."""
    return torch.int32 if queries.matrix.dtype == torch.int8 else queries.matrix.dtype


def maxima(
    queries: Queries, corpus: Corpus, begin: int, stop: int, return_argmax: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Maximum `[R, documents]` for each query row over the tokens of documents `begin..stop`, scaled, and the winning positions.

    Documents without tokens have maximum -inf and winner -1.
    """
    scaled = corpus.token_scale is not None
    rows = queries.matrix.shape[0]
    scattered = not return_argmax and rows >= _SCATTERED and (scaled or queries.matrix.dtype == torch.float32)
    lengths = corpus.lengths[begin:stop]
    walked = not (return_argmax or scattered) and rows >= _WALKED_ROWS and lengths.sum() >= _WALKED_TOKENS * len(lengths)
    queries = _exact(queries, not return_argmax and (bool(corpus.uniform) or scattered or walked))
    base = int(corpus.starts[begin])
    size = _tile_tokens(queries)
    uniform = corpus.uniform if not return_argmax and (corpus.uniform or 0) <= size else None
    tokens_first = bool(uniform) or scattered or walked
    one = _one_tile(queries, int(lengths.sum()), size, uniform, tokens_first)
    size = one or size
    tiles, owners = tiles_of(lengths, size // uniform * uniform if uniform else size)
    found = np.empty((rows, 0 if tokens_first else len(owners)), np.float32)
    reduced = torch.float32 if scaled else _cell_dtype(queries)
    by_document = torch.empty(len(owners) if tokens_first else 0, rows, dtype=reduced)
    winners = np.full((rows, len(owners)), -1, np.int32) if return_argmax else None

    def work(taken: Iterable[Tile]) -> None:
        reader = TileReader(corpus, size, queries.matrix.dtype)
        products = _Products(queries, size, scaled, tokens_first)
        for tile in taken:
            tokens, scale, offset, shift = reader.read(base + tile.first, base + tile.last)
            inside = slice(shift, shift + tile.last - tile.first)
            for part in products.parts:
                product = products.cells(part, tokens, scale, offset)
                if uniform:
                    documents = product[inside].view(len(tile.begins), uniform, -1)
                    torch.amax(documents, 1, out=by_document[tile.pieces, part.rows])
                elif scattered:
                    by_document[tile.pieces, part.rows] = _segment_maxima(product[inside], tile.begins)
                elif walked:
                    _walk(product[inside].numpy(), tile.begins, by_document[tile.pieces, part.rows].numpy())
                else:
                    cells = product.numpy()[: part.count, inside]
                    best = np.maximum.reduceat(cells, tile.begins, axis=1)  # a maximum that keeps NaN
                    found[part.rows, tile.pieces] = best
                    if winners is not None:
                        places = _token_places(corpus, begin, owners[tile.pieces], base + tile.first, base + tile.last)
                        winners[part.rows, tile.pieces] = _first_of(cells, best, tile.begins, places)

    if one or not _by_one(queries):
        work(tiles)
    else:
        in_turns(work, tiles)
    if tokens_first:
        found = by_document.t().float().contiguous().numpy()
    merged, merged_winners = merge_pieces(found, winners, owners, len(lengths))
    return _scaled(merged, queries, corpus, begin, stop), merged_winners


def _segment_maxima(cells: Tensor, begins: np.ndarray) -> Tensor:
    """Maximum `[n, rows]` of each run of the rows of `cells` `[tokens, rows]`, NaN where one is NaN."""
    owners = torch.from_numpy(np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(cells)))))
    best = torch.full((len(begins), cells.shape[1]), -torch.inf)
    return best.scatter_reduce_(0, owners[:, None].expand_as(cells), cells, "amax")


def _walk(cells: np.ndarray, begins: np.ndarray, out: np.ndarray) -> None:
    """The same into `out` `[n, rows]`, run by run."""
    stops = [*begins[1:].tolist(), len(cells)]
    for begin, stop, row in zip(begins.tolist(), stops, out, strict=True):
        np.maximum.reduce(cells[begin:stop], axis=0, out=row)


def _by_one(queries: Queries) -> bool:
    """Whether one thread makes a product, decided by the queries alone as its shape is."""
    return queries.matrix.shape[0] >= _OWN_ROWS


def _rows_of(count: int, tokens_first: bool, dtype: torch.dtype = torch.float32) -> int:
    """Query rows of a product of so many rows of the matrix."""
    return count if tokens_first or dtype == torch.int8 else NARROW.get(count, count)


def _one_tile(queries: Queries, tokens: int, whole: int, uniform: int | None, tokens_first: bool) -> int:
    """Of few documents: the size of one tile for all of them, whose product threads make together with the same bits; else 0."""
    small = few.tile_for(tokens, whole, uniform or 1)
    if not small or queries.matrix.dtype != torch.float32:  # products of codes are exact in every shape
        return small
    parts = {_rows_of(count, tokens_first) for count in _counts(queries)}
    shared = (queries.matrix.shape[1], small, whole, tokens_first, torch.get_num_threads(), _by_one(queries), multiply)
    return small if all(few.same_bits(part, *shared) for part in parts) else 0


class TileReader:
    """Gives tiles of document tokens in one fixed shape, copying only where dtype, order or a small corpus needs it."""

    def __init__(self, corpus: Corpus, tile_tokens: int, dtype: torch.dtype) -> None:
        self.corpus = corpus
        self.tile_tokens = tile_tokens
        same = corpus.index is None and corpus.values.dtype == dtype and corpus.values.stride(1) == 1
        self.direct = same and corpus.values.shape[0] >= tile_tokens
        if not self.direct:
            self.buffer = torch.zeros(tile_tokens, corpus.values.shape[1], dtype=dtype)
            self.scale = torch.zeros(tile_tokens) if corpus.token_scale is not None else None
            self.offset = torch.zeros(tile_tokens) if corpus.token_offset is not None else None

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


@dataclass(frozen=True)
class _Part:
    """A block of query rows with its operand and its views of the buffers, made once a task: the loop only calls kernels."""

    rows: slice
    count: int
    operand: Tensor
    product: Tensor
    scaled: Tensor
    sums: Tensor | None


class _Products:
    """Products of query rows with a tile: `[tile, rows]` (`tokens_first`) or `[rows, tile]`, into buffers that are made once."""

    def __init__(self, queries: Queries, tile_tokens: int, scaled: bool, tokens_first: bool) -> None:
        self.tokens_first = tokens_first
        self.integer = queries.matrix.dtype == torch.int8
        total = queries.matrix.shape[0]
        chunk = _chunk(queries)
        most = _rows_of(chunk, tokens_first, queries.matrix.dtype) * tile_tokens
        product = torch.empty(most, dtype=_cell_dtype(queries))
        result = torch.empty(most) if scaled else product
        self.parts = []
        for low in range(0, total, chunk):
            rows = slice(low, min(low + chunk, total))
            count = rows.stop - low
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


def _token_places(corpus: Corpus, begin: int, owners: np.ndarray, first: int, last: int) -> np.ndarray:
    """Position of each token `first..last` of the group in its own document."""
    if corpus.places is not None:
        return corpus.places[first:last]
    starts = corpus.starts[begin + owners]
    tokens = np.arange(first, last)
    piece = np.searchsorted(starts, tokens, side="right") - 1
    return tokens - starts[piece]


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


def merge_pieces(
    found: np.ndarray, winners: np.ndarray | None, owners: np.ndarray, documents: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """One column a document: `[R, documents]`; documents without tokens keep -inf and -1."""
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


def _scaled(maxima: np.ndarray, queries: Queries, corpus: Corpus, begin: int, stop: int) -> np.ndarray:
    """Scales that leave the loop: one a document or corpus (positive, so they keep the maximum), one a query token."""
    with np.errstate(invalid="ignore", over="ignore"):  # what is beyond FP32 is inf, and its differences NaN
        if corpus.document_scale is not None:
            maxima = maxima * corpus.document_scale[begin:stop]
            if corpus.document_offset is not None and queries.sums is not None:
                maxima += queries.sums * corpus.document_offset[begin:stop]
        if queries.scales is not None:
            maxima = maxima * queries.scales
    return maxima
