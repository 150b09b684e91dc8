"""How the kernels for tokens in few bits read them: where a document lies, and a tile of its tokens as it is multiplied."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def extent(start_ptr, length_ptr, number, total):
    """First token and length of document (or query) `number`, inside the buffer whatever the offsets say."""
    start = tl.maximum(tl.load(start_ptr + number).to(tl.int64), 0)
    length = tl.load(length_ptr + number).to(tl.int64)
    return start, tl.maximum(tl.minimum(length, total - start), 0).to(tl.int32)


@triton.jit
def centroids_of(id_ptr, token, inside, centroid_ptr, centroids, width):
    """Pointers `[TOKENS]` to the rows of the tokens' centroids, and factors: 1, or NaN where an id names no centroid."""
    number = tl.load(id_ptr + token, mask=inside, other=0).to(tl.int64)
    known = (number >= 0) & (number < centroids)
    return centroid_ptr + tl.where(known, number, 0) * width, tl.where(known, 1.0, float("nan"))


@triton.jit
def unpack(
    byte_ptr, token, inside, slice, centroid, weight_ptr, bytes, width, stride_t, stride_b,
    DTYPE: tl.constexpr, BITS: tl.constexpr, RESIDUAL: tl.constexpr, UNIT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Tokens `[TOKENS, WIDTH]` of `DTYPE` as they are multiplied, and their sums of squares (0 unless `UNIT`).

    `centroid`: pointers `[TOKENS]` to the centroids' rows. Columns beyond d may hold anything: the queries are zero there.
    """
    EACH: tl.constexpr = 8 // BITS
    byte = slice // EACH + tl.arange(0, WIDTH // EACH)
    source = byte_ptr + token[:, None] * stride_t + byte.to(tl.int64)[None, :] * stride_b
    packed = tl.load(source, mask=inside[:, None] & (byte < bytes)[None, :], other=0).to(tl.int32)
    shift = (EACH - 1 - tl.arange(0, EACH)) * BITS
    codes = tl.reshape((packed[:, :, None] >> shift[None, None, :]) & (2**BITS - 1), [TOKENS, WIDTH])
    squares = tl.zeros([TOKENS], tl.float32)
    if RESIDUAL:
        inner = slice + tl.arange(0, WIDTH)
        counted = (inner < width)[None, :]
        values = tl.load(centroid[:, None] + inner[None, :], mask=inside[:, None] & counted, other=0.0).to(tl.float32)
        values = tl.where(counted, values + tl.load(weight_ptr + codes), 0.0)
        if UNIT:
            squares = tl.sum(values * values, 1)
        tokens = values.to(DTYPE)
    else:
        tokens = (2 * codes - (2**BITS - 1)).to(DTYPE)
    return tokens, squares


@triton.jit
def per_length(factor, squares):
    """The tokens' factors divided by their lengths."""
    return factor / tl.maximum(tl.sqrt_rn(squares), 1e-12)
