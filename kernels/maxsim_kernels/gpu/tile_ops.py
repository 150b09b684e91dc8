"""Pieces shared by the Triton kernels: which query rows a tile holds, maxima that keep NaN, and winners.

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
NO_CELL = tl.constexpr(1.1754945e-38)  # a number that no cell is: the least normal one and one bit more


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
def best_along(cells, AXIS: tl.constexpr, KIND: tl.constexpr):
    """Maximum along an axis, NaN kept."""
    if KIND == INT8:
        best = tl.reduce(cells, AXIS, larger)
    else:
        best = tl.reduce(cells, AXIS, keep_nan)
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
def nothing(ROWS: tl.constexpr, TOKENS: tl.constexpr, KIND: tl.constexpr):
    """The running maximum of each row's slots before any token."""
    SLOTS: tl.constexpr = 4 if TOKENS < 64 else TOKENS // 16
    if KIND == INT8:
        best = tl.full([ROWS, SLOTS], EMPTY, tl.int32)
    else:
        best = tl.full([ROWS, SLOTS], float("-inf"), tl.float32)
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
    """The cells, with those outside the document at a value that never wins."""
    if KIND == INT8:
        hidden = tl.where(inside[None, :], cells, EMPTY)
    else:
        hidden = tl.where(inside[None, :], cells, float("-inf"))
    return hidden


@triton.jit
def wins(cells, best):
    """Which cells equal the maximum `best` of their row or slot, or are NaN where it is. Every kernel names the first such cell.

    One comparison a cell, "equal or unordered": NaN cells pass it whatever they meet, and a maximum that is NaN is replaced by a
    number that no other cell is.
    """
    if cells.dtype == tl.int32:
        won = cells == best
    else:
        sought = tl.where(best == best, best, NO_CELL)
        won = ((cells < sought) | (cells > sought)) == 0
    return won


@triton.jit
def first_place(cells, here, place):
    """The first position that wins its row (`wins`)."""
    return tl.min(tl.where(wins(cells, here[:, None]), place[None, :], 2147483647), 1)


@triton.jit
def better(here, best, KIND: tl.constexpr):
    """Where a later maximum `here` exceeds `best`: strictly, so the first of equals stays. NaN beats any number, and stays."""
    if KIND == INT8:
        win = here > best
    else:
        win = (here > best) | ((here != here) & (best == best))
    return win


@triton.jit
def slots(cells):
    """Cells `[ROWS, TOKENS]` as `[ROWS, SLOTS, PER]`, up to 16 of a row in a slot: what one thread of a Hopper accumulator holds.

    The matrix unit leaves every 8 tokens of a row to four threads, two neighbours each. So a slot is pairs of neighbours that
    begin 8 tokens apart, and everything done along the last axis stays inside a thread. `slot_place` says which token a cell is.
    """
    ROWS: tl.constexpr = cells.shape[0]
    TOKENS: tl.constexpr = cells.shape[1]
    PER: tl.constexpr = TOKENS // 4 if TOKENS < 64 else 16
    parts = tl.reshape(cells, [ROWS, TOKENS // (PER * 4), PER // 2, 4, 2])
    return tl.reshape(tl.permute(parts, (0, 1, 3, 2, 4)), [ROWS, TOKENS // PER, PER])


@triton.jit
def first_equal(held, here):
    """For each slot a float, `[ROWS, SLOTS]`, whose highest bit stands for the first cell that wins the slot (`wins`).

    A comparison gives 1 or 0; neighbours are merged by one multiply-add, twice as many cells at a time, so that the cells of a slot
    become the bits of an integer below 2^16: exact, and ties keep every bit.
    """
    ROWS: tl.constexpr = held.shape[0]
    SLOTS: tl.constexpr = held.shape[1]
    PER: tl.constexpr = held.shape[2]
    bits = wins(held, here[:, :, None]).to(tl.float32)
    left, right = tl.split(tl.reshape(bits, [ROWS, SLOTS, PER // 2, 2]))
    bits = left * 2.0 + right
    if PER >= 4:
        left, right = tl.split(tl.reshape(bits, [ROWS, SLOTS, PER // 4, 2]))
        bits = left * 4.0 + right
    if PER >= 8:
        left, right = tl.split(tl.reshape(bits, [ROWS, SLOTS, PER // 8, 2]))
        bits = left * 16.0 + right
    if PER >= 16:
        left, right = tl.split(tl.reshape(bits, [ROWS, SLOTS, PER // 16, 2]))
        bits = left * 256.0 + right
    return tl.reshape(bits, [ROWS, SLOTS])


@triton.jit
def slots_first(best, row, bits, tile, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """The first token `[ROWS]` that wins its row, from the winners of the row's slots (`bits`); 0 where nothing won."""
    token = tl.where(bits > 0, tile + slot_place(bits, ROWS, TOKENS), 0)
    return tl.min(tl.where(wins(best, row[:, None]), token, 2147483647), 1)


@triton.jit
def slot_place(bits, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """The place in its tile of the token that the highest bit of each `first_equal` stands for."""
    PER: tl.constexpr = TOKENS // 4 if TOKENS < 64 else 16
    slot = tl.arange(0, TOKENS // PER)[None, :]
    order = (PER - 1) - ((bits.to(tl.int32, bitcast=True) >> 23) - 127)
    return (slot // 4) * (PER * 4) + (order // 2) * 8 + (slot % 4) * 2 + order % 2
