"""Scratch: the wide forward's dense FP16 case with other tiles, stages and loops, in plain Triton.

LOOP 0: one flat loop with divisions (as the product); 1: flat, counters; 2: nested, the slice loop pipelined. (`flatten=True` around
LOOP 2 does not compile in Triton 3.6: its pass of fused loops makes an `if` that it then refuses.)
INTEGER: the maximum on the bits of floats, right only where every row of a tile has a cell >= 0 (an upper bound on what it brings).
"""

from __future__ import annotations

import triton
import triton.language as tl

from maxsim_kernels.gpu.tile_ops import keep_nan, larger


@triton.jit
def _row_best(cells, INTEGER: tl.constexpr):
    if INTEGER:
        here = tl.reduce(cells.to(tl.int32, bitcast=True), 1, larger).to(tl.float32, bitcast=True)
    else:
        here = tl.reduce(cells, 1, keep_nan)
    return here


@triton.jit(do_not_specialize=["rows_total", "documents", "size", "slices", "groups", "chunks", "out_stride"])
def tiles_kernel(
    query_desc, document_desc, out_ptr, rows_total, documents, size, slices, groups, chunks, out_stride,
    LOOP: tl.constexpr, INTEGER: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) % groups
    row = group * ROWS + tl.arange(0, ROWS)
    share = tl.cdiv(documents, chunks)
    low = tl.program_id(0) // groups * share
    high = tl.minimum(low + share, documents)
    tiles = tl.cdiv(size, TOKENS)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    if LOOP <= 1:
        cells = tl.zeros([ROWS, TOKENS], tl.float32)
        slice = 0
        tile = 0
        document = low
        for step in tl.range(0, (high - low) * tiles * slices, num_stages=STAGES):
            if LOOP == 0:
                slice = step % slices
                tile = (step // slices) % tiles
                document = low + step // (slices * tiles)
            start = document * size + tl.minimum(tile * TOKENS, size - TOKENS)
            rows = query_desc.load([group * ROWS, slice * WIDTH])
            tokens = document_desc.load([start, slice * WIDTH])
            cells = tl.dot(rows, tokens.T, cells)
            last = slice == slices - 1
            whole = tile == tiles - 1
            if last:
                best = keep_nan(best, _row_best(cells, INTEGER))
                cells = tl.zeros([ROWS, TOKENS], tl.float32)
                if whole:
                    tl.store(out_ptr + document.to(tl.int64) * out_stride + row, best, mask=row < rows_total)
                    best = tl.full([ROWS], float("-inf"), tl.float32)
            if LOOP == 1:
                document += (last & whole).to(tl.int32)
                tile = tl.where(last, tl.where(whole, 0, tile + 1), tile)
                slice = tl.where(last, 0, slice + 1)
    else:
        for number in tl.range(0, (high - low) * tiles, num_stages=1):
            document = low + number // tiles
            tile = number % tiles
            start = document * size + tl.minimum(tile * TOKENS, size - TOKENS)
            cells = tl.zeros([ROWS, TOKENS], tl.float32)
            for slice in tl.range(0, slices, num_stages=STAGES):
                rows = query_desc.load([group * ROWS, slice * WIDTH])
                tokens = document_desc.load([start, slice * WIDTH])
                cells = tl.dot(rows, tokens.T, cells)
            best = keep_nan(best, _row_best(cells, INTEGER))
            if tile == tiles - 1:
                tl.store(out_ptr + document.to(tl.int64) * out_stride + row, best, mask=row < rows_total)
                best = tl.full([ROWS], float("-inf"), tl.float32)
