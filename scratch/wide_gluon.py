"""Scratch: the wide forward as a warp-specialised Gluon kernel (one loading warp, consumers of 64 rows x TOKENS cells each).

Consumers wait for the loads alone, never for each other, so that one's maxima are taken while the other's products run (as far apart
as STAGES allows). RESIDENT slices of the queries stay in shared memory and are read from L2 once.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

_ALL = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def _keep_nan(a, b):
    return gl.maximum(a, b, propagate_nan=_ALL)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _produce(
    query_desc, document_desc, rows_mem, documents_mem, full, empty, row, low, high, size, slices,
    TOKENS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, RESIDENT: gl.constexpr,
):  # fmt: skip
    tiles = gl.cdiv(size, TOKENS)
    stage = 0
    phase = 0
    fresh = 1  # nothing is resident yet
    for document in range(low, high):
        for tile in range(tiles):
            start = document * size + gl.minimum(tile * TOKENS, size - TOKENS)
            for slice in range(slices):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                if RESIDENT == 0:
                    mbarrier.expect(full.index(stage), (64 * CONSUMERS + TOKENS) * WIDTH * 2)
                    for consumer in gl.static_range(CONSUMERS):
                        tma.async_copy_global_to_shared(
                            query_desc,
                            [row + 64 * consumer, slice * WIDTH],
                            full.index(stage),
                            rows_mem.index(stage * CONSUMERS + consumer),
                        )
                else:
                    if (slice >= RESIDENT) | (fresh > 0):
                        mbarrier.expect(full.index(stage), (64 * CONSUMERS + TOKENS) * WIDTH * 2)
                        place = gl.where(slice < RESIDENT, slice, RESIDENT + stage)
                        for consumer in gl.static_range(CONSUMERS):
                            tma.async_copy_global_to_shared(
                                query_desc,
                                [row + 64 * consumer, slice * WIDTH],
                                full.index(stage),
                                rows_mem.index(place * CONSUMERS + consumer),
                            )
                    else:
                        mbarrier.expect(full.index(stage), TOKENS * WIDTH * 2)
                tma.async_copy_global_to_shared(
                    document_desc, [start, slice * WIDTH], full.index(stage), documents_mem.index(stage)
                )
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            fresh = 0


@gluon.jit
def _consume(
    rows_mem, documents_mem, full, empty, out_ptr, row, rows_total, low, high, size, slices, out_stride,
    CONSUMER: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, RESIDENT: gl.constexpr,
    INTEGER: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16])
    along: gl.constexpr = gl.SliceLayout(1, layout)
    own = row + 64 * CONSUMER + gl.arange(0, 64, layout=along)
    tiles = gl.cdiv(size, TOKENS)
    stage = 0
    phase = 0
    before = 0
    cells = gl.zeros([64, TOKENS], gl.float32, layout)
    for document in range(low, high):
        best = gl.full([64], float("-inf"), gl.float32, layout=along)
        for tile in range(tiles):
            for slice in range(slices):
                mbarrier.wait(full.index(stage), phase)
                place = stage
                if RESIDENT > 0:
                    place = gl.where(slice < RESIDENT, slice, RESIDENT + stage)
                token = warpgroup_mma(
                    rows_mem.index(place * CONSUMERS + CONSUMER),
                    documents_mem.index(stage).permute((1, 0)),
                    cells,
                    use_acc=slice > 0,
                    is_async=True,
                )
                cells = warpgroup_mma_wait(1, deps=(token,))
                # Every warp has read the stage before: it may be filled again.
                if slice > 0:
                    gl.thread_barrier()
                    mbarrier.arrive(empty.index(before))
                before = stage
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            cells = warpgroup_mma_wait(0, deps=(cells,))
            gl.thread_barrier()
            mbarrier.arrive(empty.index(before))
            if INTEGER:  # right only where every row has a cell >= 0
                here = gl.reduce(cells.to(gl.int32, bitcast=True), 1, _larger).to(gl.float32, bitcast=True)
            else:
                here = gl.reduce(cells, 1, _keep_nan)
            best = _keep_nan(best, here)
        gl.store(out_ptr + (document.to(gl.int64) * out_stride + own), best, mask=own < rows_total)


@gluon.jit(do_not_specialize=["rows_total", "documents", "size", "slices", "groups", "chunks", "out_stride"])
def specialised_kernel(
    query_desc, document_desc, out_ptr, rows_total, documents, size, slices, groups, chunks, out_stride,
    TOKENS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, RESIDENT: gl.constexpr,
    INTEGER: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    group = gl.program_id(0) % groups
    share = gl.cdiv(documents, chunks)
    low = gl.program_id(0) // groups * share
    high = gl.minimum(low + share, documents)
    row = group * (64 * CONSUMERS)
    rows_mem = gl.allocate_shared_memory(gl.float16, [(STAGES + RESIDENT) * CONSUMERS, 64, WIDTH], query_desc.layout)
    documents_mem = gl.allocate_shared_memory(gl.float16, [STAGES, TOKENS, WIDTH], document_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    gl.static_assert(CONSUMERS == 2 or CONSUMERS == 3)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (rows_mem, documents_mem, full, empty, out_ptr, row, rows_total, low, high, size, slices, out_stride,
                            gl.constexpr(0), TOKENS, STAGES, CONSUMERS, RESIDENT, INTEGER)),
                (_consume, (rows_mem, documents_mem, full, empty, out_ptr, row, rows_total, low, high, size, slices, out_stride,
                            gl.constexpr(1), TOKENS, STAGES, CONSUMERS, RESIDENT, INTEGER)),
                (_produce, (query_desc, document_desc, rows_mem, documents_mem, full, empty, row, low, high, size, slices,
                            TOKENS, WIDTH, STAGES, CONSUMERS, RESIDENT)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (rows_mem, documents_mem, full, empty, out_ptr, row, rows_total, low, high, size, slices, out_stride,
                            gl.constexpr(0), TOKENS, STAGES, CONSUMERS, RESIDENT, INTEGER)),
                (_consume, (rows_mem, documents_mem, full, empty, out_ptr, row, rows_total, low, high, size, slices, out_stride,
                            gl.constexpr(1), TOKENS, STAGES, CONSUMERS, RESIDENT, INTEGER)),
                (_consume, (rows_mem, documents_mem, full, empty, out_ptr, row, rows_total, low, high, size, slices, out_stride,
                            gl.constexpr(2), TOKENS, STAGES, CONSUMERS, RESIDENT, INTEGER)),
                (_produce, (query_desc, document_desc, rows_mem, documents_mem, full, empty, row, low, high, size, slices,
                            TOKENS, WIDTH, STAGES, CONSUMERS, RESIDENT)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
