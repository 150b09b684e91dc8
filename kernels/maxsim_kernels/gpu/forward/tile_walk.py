"""What a walk over document tiles reads beside tokens: where each tile lies, its scale, which tokens are its own (`dense.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from maxsim_kernels.gpu.tile_ops import INT8_TOKEN, SCALED_TOKEN


@triton.jit
def document_start(step, table_ptr, bound_ptr, last_document, room):
    """The first tile at or after `step` that begins a document; the end of the last document's tiles beyond them."""
    end = tl.minimum(tl.load(bound_ptr + last_document), room)
    document = tl.load(table_ptr + (tl.full([], 0, tl.int64) + step) * 2 + 1, mask=step < end, other=0) // 2
    begin = tl.load(bound_ptr + document)
    after = tl.minimum(tl.load(bound_ptr + document + 1), end)
    return tl.where(step >= end, end, tl.where(begin == step, step, after))


@triton.jit
def tile_entry(step, end, document, tile, table_ptr, document_size, pitch, tiles, RAGGED: tl.constexpr, TOKENS: tl.constexpr):
    """First row of a tile (or place in the list), and 2 * document + (whether it is its last tile); anything beyond `end`."""
    if RAGGED:
        at = table_ptr + (tl.full([], 0, tl.int64) + step) * 2
        row = tl.load(at, mask=step < end, other=0)
        owner_and_last = tl.load(at + 1, mask=step < end, other=0)
    else:
        row = document * pitch + tl.minimum(tile * TOKENS, tl.maximum(document_size - TOKENS, 0))
        owner_and_last = document * 2 + (tile == tiles - 1).to(tl.int32)
    return row, owner_and_last


@triton.jit
def document_scale(document, scale_ptr, documents, splits, STORE_ROWS: tl.constexpr):
    """The scale of a document, or of the document that a piece belongs to; of the last one for numbers beyond."""
    if STORE_ROWS:
        if splits > 1:  # seldom, and a division costs more than this branch
            document = document // splits
    return tl.load(scale_ptr + tl.minimum(document, documents - 1)).to(tl.float32)


@triton.jit
def token_scales(
    row, there, list_ptr, scale_ptr, tokens_total, KIND: tl.constexpr, LISTED: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Scales of a tile's tokens where every token has its own; `LISTED`: a list says which rows the tokens are."""
    if KIND == INT8_TOKEN or KIND == SCALED_TOKEN:
        at = row + tl.arange(0, TOKENS)
        if LISTED:
            at = tl.load(list_ptr + at, mask=there, other=0)
        scale = tl.load(scale_ptr + at, mask=there & (at < tokens_total), other=0.0)
    else:
        scale = 0.0
    return scale


@triton.jit
def tokens_at(documents, row, list_ptr, width, stride_t, HOLES: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """A tile of document tokens `[TOKENS, WIDTH]`; `documents`: a descriptor, or with a list of rows a pointer."""
    if HOLES:  # one by one, by their addresses
        rows = tl.load(list_ptr + row + tl.arange(0, TOKENS))
        inner = tl.arange(0, WIDTH)
        source = documents + rows.to(tl.int64)[:, None] * stride_t + inner[None, :]
        tokens = tl.load(source, mask=(inner < width)[None, :], other=0.0)
    else:
        tokens = documents.load([row, 0])
    return tokens
