"""Candidate: the tile kernel in Gluon, whose products run while the maxima of the other query tile are taken.

Today's kernel (`gpu/forward/dense.py`) waits for every product before it issues the next one: Triton's compiler puts a wait with nothing
outstanding behind both `tl.dot`s of the loop. Here one product is always queued: while a tile's maxima are taken, the other query tile's
product runs. No winners, no masks, documents of at least one tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

EMPTY = gl.constexpr(-(2**31))
MAGIC = gl.constexpr(0x4B400000)
MAGIC_FLOAT = gl.constexpr(12582912.0)


@gluon.jit
def _max_int(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _nan_max(a, b):
    return gl.inline_asm_elementwise("max.NaN.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _slot_best(cells, KIND: gl.constexpr):
    """`tile_ops.slots` and the maximum inside each slot, without a thread exchanging anything."""
    ROWS: gl.constexpr = cells.shape[0]
    TOKENS: gl.constexpr = cells.shape[1]
    PER: gl.constexpr = TOKENS // 4 if TOKENS < 64 else 16
    parts = cells.reshape([ROWS, TOKENS // (PER * 4), PER // 2, 4, 2])
    held = parts.permute([0, 1, 3, 2, 4]).reshape([ROWS, TOKENS // PER, PER])
    if KIND == 1:
        here = gl.reduce(held, 2, _max_int)
    else:
        here = gl.reduce(held, 2, _nan_max)
    return here


@gluon.jit
def _merge(best, cells, scale, KIND: gl.constexpr):
    """The running maximum after one more product."""
    if KIND == 2:
        shifted = (cells + MAGIC).to(gl.float32, bitcast=True)
        values = gl.fma(shifted, scale[None, :], (scale * -MAGIC_FLOAT)[None, :])
        merged = _nan_max(best, _slot_best(values, KIND))
    elif KIND == 3:
        merged = _nan_max(best, _slot_best(cells * scale[None, :], KIND))
    elif KIND == 1:
        merged = gl.maximum(best, _slot_best(cells, KIND))
    else:
        merged = _nan_max(best, _slot_best(cells, KIND))
    return merged


@gluon.jit
def _nothing(ROWS: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr, KIND: gl.constexpr):
    if KIND == 1:
        best = _slot_best(gl.full([ROWS, TOKENS], EMPTY, gl.int32, LAYOUT), KIND)
    else:
        best = _slot_best(gl.full([ROWS, TOKENS], float("-inf"), gl.float32, LAYOUT), KIND)
    return best


@gluon.jit
def _row(best, valid, weight, query_weight, KIND: gl.constexpr, QUERY_SCALED: gl.constexpr, LAYOUT: gl.constexpr):
    """A row's maximum, scaled as `dense.py` scales it; rows that do not count are 0."""
    if KIND == 1:
        found = gl.reduce(best, 1, _max_int)
        value = gl.where(found == EMPTY, float("-inf"), found.to(gl.float32))
    else:
        value = gl.reduce(best, 1, _nan_max)
    value = gl.convert_layout(value, LAYOUT)
    if QUERY_SCALED:
        value = value * weight * query_weight
    return gl.where(valid, value, 0.0)


@gluon.jit
def _product(rows, tokens, cells):
    """Begin a product in the registers of cells that nobody needs any more; nobody waits for it here.

    Nothing but products may write those registers while another product runs: else the assembler waits after every instruction.
    """
    return warpgroup_mma(rows, tokens, cells, use_acc=False, is_async=True)


@gluon.jit
def _entry(step, end, document, tile, table_ptr, document_size, pitch, tiles, RAGGED: gl.constexpr, TOKENS: gl.constexpr):
    """First row of a tile and 2 * document + (whether it is its last); beyond `end` the last entry again, whose load does no harm."""
    if RAGGED:
        at = table_ptr + gl.minimum(step, end - 1).to(gl.int64) * 2
        row = gl.load(at)
        owner_and_last = gl.load(at + 1)
    else:
        row = document * pitch + gl.minimum(tile * TOKENS, document_size - TOKENS)
        owner_and_last = document * 2 + (tile == tiles - 1).to(gl.int32)
    return row, owner_and_last


@gluon.jit
def _start_of(step, table_ptr, bound_ptr, last_document, room):
    """`tile_walk.document_start`."""
    end = gl.minimum(gl.load(bound_ptr + last_document), room)
    document = gl.load(table_ptr + step.to(gl.int64) * 2 + 1, mask=step < end, other=0) // 2
    begin = gl.load(bound_ptr + document)
    after = gl.minimum(gl.load(bound_ptr + document + 1), end)
    return gl.where(step >= end, end, gl.where(begin == step, step, after))


@gluon.jit
def _fetch(document_desc, scale_desc, row, buffers, scales, bars, stage, TOKENS: gl.constexpr, WIDTH: gl.constexpr, BYTES: gl.constexpr, KIND: gl.constexpr):
    """Ask for a tile and, where tokens have them, its scales."""
    if KIND >= 2:
        mbarrier.expect(bars.index(stage), TOKENS * WIDTH * BYTES + TOKENS * 2)
        tma.async_copy_global_to_shared(scale_desc, [row], bars.index(stage), scales.index(stage))
    else:
        mbarrier.expect(bars.index(stage), TOKENS * WIDTH * BYTES)
    tma.async_copy_global_to_shared(document_desc, [row, 0], bars.index(stage), buffers.index(stage))


@gluon.jit(
    do_not_specialize=[
        "query_count", "query_size", "first_document", "last_document", "document_size", "pitch", "groups", "chunks",
        "tokens_total", "room", "out_stride",
    ]
)
def tiles_kernel(
    query_ptr, query_scale_ptr, document_desc, scale_desc, table_ptr, bound_ptr, scale_ptr, out_ptr,
    query_count, query_size, first_document, last_document, document_size, pitch, width, groups, chunks, out_stride, room,
    stride_qn, stride_qt,
    KIND: gl.constexpr, RAGGED: gl.constexpr, QUERY_SCALED: gl.constexpr, DOCUMENT_SCALED: gl.constexpr, STORE_ROWS: gl.constexpr,
    PADDED: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, WIDTH: gl.constexpr, BYTES: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TOKENS, 32 // BYTES])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 4 // BYTES)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 16 // BYTES], [32 * 16 // (WIDTH * BYTES), WIDTH * BYTES // 16], [num_warps, 1], [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    SCALE: gl.constexpr = gl.SliceLayout(0, ACC)
    group = gl.program_id(0) % groups
    chunk = gl.program_id(0) // groups
    HALF: gl.constexpr = 1 if STORE_ROWS else PADDED // 2
    # Query rows, as `tile_ops.half_rows` deals them.
    line = gl.arange(0, ROWS, gl.SliceLayout(1, LOAD))
    inner = gl.arange(0, WIDTH, gl.SliceLayout(0, LOAD))
    slot = gl.arange(0, ROWS, ROW)
    if STORE_ROWS:
        lq0 = line * 0
        lt0 = group * (2 * ROWS) + line
        lq1 = lq0
        lt1 = lt0 + ROWS
        query0 = slot * 0
        token0 = group * (2 * ROWS) + slot
        query1 = query0
        token1 = token0 + ROWS
    else:
        lq0 = group * (2 * ROWS // PADDED) + line // HALF
        lt0 = line % HALF
        lq1 = lq0
        lt1 = lt0 + HALF
        query0 = group * (2 * ROWS // PADDED) + slot // HALF
        token0 = slot % HALF
        query1 = query0
        token1 = token0 + HALF
    valid0 = (token0 < query_size) & (query0 < query_count)
    valid1 = (token1 < query_size) & (query1 < query_count)
    at0 = lq0.to(gl.int64) * stride_qn + lt0.to(gl.int64) * stride_qt
    at1 = lq1.to(gl.int64) * stride_qn + lt1.to(gl.int64) * stride_qt
    there0 = ((lt0 < query_size) & (lq0 < query_count))[:, None] & (inner < width)[None, :]
    there1 = ((lt1 < query_size) & (lq1 < query_count))[:, None] & (inner < width)[None, :]
    loaded0 = gl.load(query_ptr + at0[:, None] + inner[None, :], mask=there0, other=0.0)
    loaded1 = gl.load(query_ptr + at1[:, None] + inner[None, :], mask=there1, other=0.0)
    if HELD:
        rows0 = gl.convert_layout(loaded0, OPERAND)
        rows1 = gl.convert_layout(loaded1, OPERAND)
    else:
        TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], query_ptr.dtype.element_ty)
        rows0 = gl.allocate_shared_memory(query_ptr.dtype.element_ty, [ROWS, WIDTH], TILE, loaded0)
        rows1 = gl.allocate_shared_memory(query_ptr.dtype.element_ty, [ROWS, WIDTH], TILE, loaded1)
        fence_async_shared()
    weight0 = gl.full([ROWS], 1.0, gl.float32, ROW)
    weight1 = weight0
    if QUERY_SCALED:
        weight0 = gl.load(query_scale_ptr + query0 * query_size + token0, mask=valid0, other=1.0)
        weight1 = gl.load(query_scale_ptr + query1 * query_size + token1, mask=valid1, other=1.0)
    buffers = gl.allocate_shared_memory(document_desc.dtype, [STAGES, TOKENS, WIDTH], document_desc.layout)
    scales = buffers
    if KIND >= 2:
        scales = gl.allocate_shared_memory(scale_desc.dtype, [STAGES, TOKENS], scale_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for one in gl.static_range(STAGES):
        mbarrier.init(bars.index(one), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if RAGGED:
        low = gl.minimum(gl.load(bound_ptr + first_document), room)
        share = gl.cdiv(gl.minimum(gl.load(bound_ptr + last_document), room) - low, chunks)
        begin = _start_of(low + chunk * share, table_ptr, bound_ptr, last_document, room)
        end = _start_of(low + (chunk + 1) * share, table_ptr, bound_ptr, last_document, room)
        tiles = 1
    else:
        share = gl.cdiv(last_document - first_document, chunks)
        tiles = gl.cdiv(document_size, TOKENS)
        begin = (first_document + chunk * share) * tiles
        end = gl.minimum(first_document + (chunk + 1) * share, last_document) * tiles
    if begin < end:
        # `load_*` lead by a whole ring of buffers.
        load_document = begin // tiles
        load_tile = 0
        document = load_document
        tile = 0
        for one in gl.static_range(STAGES):
            row, _ = _entry(begin + one, end, load_document, load_tile, table_ptr, document_size, pitch, tiles, RAGGED, TOKENS)
            _fetch(document_desc, scale_desc, row, buffers, scales, bars, one, TOKENS, WIDTH, BYTES, KIND)
            load_tile = gl.where(load_tile == tiles - 1, 0, load_tile + 1)
            load_document = gl.minimum(load_document + (load_tile == 0).to(gl.int32), last_document - 1)
        _, owner_and_last = _entry(begin, end, document, tile, table_ptr, document_size, pitch, tiles, RAGGED, TOKENS)
        ahead, _ = _entry(begin + STAGES, end, load_document, load_tile, table_ptr, document_size, pitch, tiles, RAGGED, TOKENS)
        if DOCUMENT_SCALED == 1:
            weight = gl.load(scale_ptr + owner_and_last // 2)
        else:
            weight = gl.load(scale_ptr)
        best0 = _nothing(ROWS, TOKENS, ACC, KIND)
        best1 = best0
        stage = 0
        phase = 0
        PRODUCT: gl.constexpr = gl.int32 if (KIND == 1 or KIND == 2) else gl.float32
        # A first product of the second tile, whose maxima meet nothing: taken again at the first step.
        mbarrier.wait(bars.index(0), 0)
        cells0 = gl.full([ROWS, TOKENS], 0, PRODUCT, ACC)
        cells1 = gl.full([ROWS, TOKENS], 0, PRODUCT, ACC)
        acc1 = _product(rows1, buffers.index(0).permute((1, 0)), cells1)
        cells1 = warpgroup_mma_wait(0, deps=[acc1])
        scale = 0.0
        if KIND >= 2:
            scale = scales.index(0).load(SCALE).to(gl.float32)
        flush = False
        number = owner_and_last // 2
        for step in range(begin, end + 1):
            # Beyond `end` is a tile that was read before: its products are begun and meet nothing.
            mbarrier.wait(bars.index(stage), phase)
            acc0 = _product(rows0, buffers.index(stage).permute((1, 0)), cells0)
            cells1 = warpgroup_mma_wait(1, deps=[cells1])  # waits for nothing: keeps what follows behind the product's start
            best1 = _merge(best1, cells1, scale, KIND)
            if flush:
                times = 1.0
                if DOCUMENT_SCALED > 0:
                    times = weight.to(gl.float32)
                sum0 = _row(best0, valid0, times, weight0, KIND, QUERY_SCALED, ROW)
                sum1 = _row(best1, valid1, times, weight1, KIND, QUERY_SCALED, ROW)
                column = number.to(gl.int64) - first_document
                if STORE_ROWS:
                    gl.store(out_ptr + column * out_stride + token0, sum0, mask=token0 < query_size)
                    gl.store(out_ptr + column * out_stride + token1, sum1, mask=token1 < query_size)
                else:
                    both = (sum0.to(gl.float64) + sum1.to(gl.float64)).reshape([ROWS // HALF, HALF])
                    sums = gl.sum(both, 1).to(gl.float32)
                    owner = group * (ROWS // HALF) + gl.arange(0, ROWS // HALF, sums.type.layout)
                    gl.store(out_ptr + owner.to(gl.int64) * out_stride + column, sums, mask=owner < query_count)
                best0 = _nothing(ROWS, TOKENS, ACC, KIND)
                best1 = best0
                if DOCUMENT_SCALED == 1:
                    weight = gl.load(scale_ptr + owner_and_last // 2)
            if KIND >= 2:
                scale = scales.index(stage).load(SCALE).to(gl.float32)
            cells0 = warpgroup_mma_wait(0, deps=[acc0])
            acc1 = _product(rows1, buffers.index(stage).permute((1, 0)), cells1)
            cells0 = warpgroup_mma_wait(1, deps=[cells0])
            best0 = _merge(best0, cells0, scale, KIND)
            number = owner_and_last // 2
            flush = owner_and_last % 2 == 1
            tile = gl.where(tile == tiles - 1, 0, tile + 1)
            document = gl.minimum(document + (tile == 0).to(gl.int32), last_document - 1)
            _, owner_and_last = _entry(step + 1, end, document, tile, table_ptr, document_size, pitch, tiles, RAGGED, TOKENS)
            cells1 = warpgroup_mma_wait(0, deps=[acc1])
            gl.thread_barrier()  # every warp has left this buffer
            _fetch(document_desc, scale_desc, ahead, buffers, scales, bars, stage, TOKENS, WIDTH, BYTES, KIND)
            load_tile = gl.where(load_tile == tiles - 1, 0, load_tile + 1)
            load_document = gl.minimum(load_document + (load_tile == 0).to(gl.int32), last_document - 1)
            ahead, _ = _entry(
                step + 1 + STAGES, end, load_document, load_tile, table_ptr, document_size, pitch, tiles, RAGGED, TOKENS
            )
            phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        # Loads still on their way must land before the program ends.
        for one in gl.static_range(STAGES):
            mbarrier.wait(bars.index(stage), phase)
            phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
