"""Pieces shared by the Triton kernels: which query rows a tile holds, maxima that keep NaN, winners, query codes and their scales.

A query is padded to a power of two of rows, so that a tile holds several short queries or a part of a long one. In the two-tile
kernels each query has half of its rows in either tile: the two tiles' maxima are added row by row first, and what is left of a query
of up to 32 tokens then lies inside one warp, so that its sum needs no exchange between warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What the cells of a tile are before the maximum.
FLOAT = tl.constexpr(0)  # float products, FP32
INT8 = tl.constexpr(1)  # integer products, the maximum stays in int32: document and corpus scales, applied once a row
INT8_TOKEN = tl.constexpr(2)  # integer products times the token's own scale
SCALED_TOKEN = tl.constexpr(3)  # FP8 products times the token's own scale
EMPTY = tl.constexpr(-(2**31))  # the integer maximum of no token
# 1.5 * 2^23: an integer of up to 22 bits added to its bit pattern is, read as a float, exactly that much larger.
MAGIC = tl.constexpr(0x4B400000)
MAGIC_FLOAT = tl.constexpr(12582912.0)


@triton.jit
def keep_nan(a, b):
    """The larger number, or NaN where either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger(a, b):
    """The larger integer."""
    return tl.maximum(a, b)


@triton.jit
def query_rows(block, query_count, query_size, blocks_per_query, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Query and token of each row of a one-tile block, and whether the row exists."""
    row = tl.arange(0, ROWS)
    if PADDED <= ROWS:
        query = block * (ROWS // PADDED) + row // PADDED
        token = row % PADDED
    else:
        query = block // blocks_per_query + row * 0
        token = (block % blocks_per_query) * ROWS + row
    return query, token, (token < query_size) & (query < query_count)


@triton.jit
def half_rows(group, query_count, query_size, TILE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Query and token of each row of tile `TILE` (0 or 1) of a two-tile group, and whether the row exists.

    `PADDED` beyond two tiles: the rows are one flat run of tokens, whose queries `combine` tells apart.
    """
    row = tl.arange(0, ROWS)
    if PADDED <= 2 * ROWS:
        HALF: tl.constexpr = PADDED // 2
        query = group * (2 * ROWS // PADDED) + row // HALF
        token = TILE * HALF + row % HALF
    else:
        query = row * 0
        token = group * (2 * ROWS) + TILE * ROWS + row
    return query, token, (token < query_size) & (query < query_count)


@triton.jit
def valid_rows(valid, query, token, length_ptr, mask_ptr, query_size, HAS_LENGTHS: tl.constexpr, HAS_MASK: tl.constexpr):
    """Rows that exist and are neither masked nor beyond their query's length."""
    if HAS_LENGTHS:
        valid = valid & (token < tl.load(length_ptr + query, mask=valid, other=0))
    if HAS_MASK:
        valid = valid & (tl.load(mask_ptr + query.to(tl.int64) * query_size + token, mask=valid, other=0) != 0)
    return valid


@triton.jit
def load_rows(query_ptr, query, token, valid, width, stride_n, stride_t, stride_d, WIDTH: tl.constexpr):
    """Query tokens `[ROWS, WIDTH]`; rows that do not count and columns beyond d are zero."""
    inner = tl.arange(0, WIDTH)
    place = query.to(tl.int64)[:, None] * stride_n + token.to(tl.int64)[:, None] * stride_t
    place = place + inner.to(tl.int64)[None, :] * stride_d
    return tl.load(query_ptr + place, mask=valid[:, None] & (inner < width)[None, :], other=0.0)


@triton.jit
def tile_best(cells, KIND: tl.constexpr):
    """Maximum of each row of a tile, NaN kept."""
    if KIND == INT8:
        best = tl.reduce(cells, 1, larger)
    else:
        best = tl.reduce(cells, 1, keep_nan)
    return best


@triton.jit
def merge_best(best, here, KIND: tl.constexpr):
    """The running maximum after one more tile."""
    if KIND == INT8:
        merged = tl.maximum(best, here)
    else:
        merged = keep_nan(best, here)
    return merged


@triton.jit
def nothing(ROWS: tl.constexpr, KIND: tl.constexpr):
    """The running maximum before any token."""
    if KIND == INT8:
        best = tl.full([ROWS], EMPTY, tl.int32)
    else:
        best = tl.full([ROWS], float("-inf"), tl.float32)
    return best


@triton.jit
def as_float(best, KIND: tl.constexpr):
    """The maximum as float32, -inf where no token was seen."""
    value = best
    if KIND == INT8:
        value = tl.where(best == EMPTY, float("-inf"), best.to(tl.float32))
    return value


@triton.jit
def hide(cells, inside, KIND: tl.constexpr):
    """Cells outside the document never win."""
    if KIND == INT8:
        hidden = tl.where(inside[None, :], cells, EMPTY)
    else:
        hidden = tl.where(inside[None, :], cells, float("-inf"))
    return hidden


@triton.jit
def first_place(cells, here, place, KIND: tl.constexpr):
    """The first position whose cell equals the row's maximum; beyond every position where the maximum is NaN."""
    return tl.min(tl.where(cells == here[:, None], place[None, :], 2147483647), 1)


@triton.jit
def better(here, best, KIND: tl.constexpr):
    """Rows whose maximum a later tile exceeds: strictly, so that the first of equal maxima stays, and NaN beats any number."""
    if KIND == INT8:
        win = here > best
    else:
        win = (here > best) | ((here != here) & (best == best))
    return win
