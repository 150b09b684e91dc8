"""Fused MaxSim forward for many query rows: documents arrive as tiles, by tensor descriptors or (with holes) by lists of their rows.

One kernel for dense documents of one length and for ragged ones (`tile_tables.py` builds its tile table), in FP16, BF16, INT8 and FP8
with at most 256 bytes a token (paper Alg. 1; section 'INT8').

- A program keeps two tiles of query rows and walks over document tiles in one flat loop, so that loading never drains between
  documents; both query tiles share each document tile. Two programs a multiprocessor hide some of one's maxima in the other's products
  (docs/kernel_notes.md says how little where maxima are many).
- Each thread keeps a running maximum of its own cells of a row (a slot, `tile_ops.slots`): threads exchange nothing before a
  document's end. Winners take a comparison and a multiply-add a cell, whose result names the slot's first equal cell.
- A document's last tile is moved back to overlap the one before it: a maximum does not mind seeing a token twice, so only documents
  shorter than a tile need a mask.
- Integer products keep their maximum in int32 where the scale is a document's or the corpus's. A token's own scale takes one FMA
  a cell: the accumulator starts at the bit pattern of 1.5 * 2^23, so that it can be read as a float without a conversion.
- Floats of at least a tile of tokens, without winners, are compared by their bits, as integers: the GPU takes the larger of three
  integers at once, but only of two floats. The order is that of the floats, NaN above all, as long as one of them is not negative. A
  program with a row that met negative products alone notes it, and scores its documents again, as floats, in a second launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.forward.combine import RowMaxima, combine, row_maxima
from maxsim_kernels.gpu.forward.tile_tables import Tiles, tiles_of
from maxsim_kernels.gpu.forward.tile_walk import document_scale, document_start, tile_entry, token_scales, tokens_at
from maxsim_kernels.gpu.forward.tuning import Config
from maxsim_kernels.gpu.geometry import (
    EIGHT_BITS,
    SCALES,
    byte_mask,
    chunks_of,
    descriptor,
    flat_queries,
    flat_rows,
    hardware,
    padded,
    pieces_a_document,
    pitch,
)
from maxsim_kernels.gpu.launch import empty, launch
from maxsim_kernels.gpu.tile_ops import (
    INT8,
    INT8_TOKEN,
    MAGIC,
    MAGIC_FLOAT,
    SCALED_TOKEN,
    as_float,
    best_along,
    better,
    first_equal,
    half_rows,
    hide,
    load_rows,
    merge_best,
    nothing,
    slots,
    slots_first,
    valid_rows,
)

_SHARED = 228 << 10  # bytes of shared memory a multiprocessor of sm_90 and sm_100 has
_BESIDE = 1600  # of them a program takes besides its tiles: 1 KB the driver's, barriers, and what threads exchange
HOLES_PROGRAMS = 2  # programs a multiprocessor where tokens are loaded by their addresses; for codes more might fit
_WAVES = 4  # of programs, at most: more share documents more evenly, but each program begins by loading its queries
# What the kernel multiplies, by the codes' dtype and whether every token has its own scale.
KINDS = {(torch.int8, False): 1, (torch.int8, True): 2, (torch.float8_e4m3fn, False): 0, (torch.float8_e4m3fn, True): 3}


@triton.jit
def _cells(rows, tokens, scale, KIND: tl.constexpr):
    """Products of a query tile `[ROWS, WIDTH]` and a document tile `[TOKENS, WIDTH]`, as they enter the maximum."""
    if KIND == INT8_TOKEN:
        scale = scale.to(tl.float32)
        start = tl.full([rows.shape[0], tokens.shape[0]], MAGIC, tl.int32)
        shifted = tl.dot(rows, tokens.T, start, out_dtype=tl.int32).to(tl.float32, bitcast=True)
        # magic * scale is exact for a scale of FP16 (2 + 11 bits), so this is the scaled integer, rounded once. Left to the compiler's
        # flags, the product might be rounded before magic is taken away, and the integer lost.
        cells = tl.fma(shifted, scale[None, :], (scale * -MAGIC_FLOAT)[None, :])
    elif KIND == INT8:
        cells = tl.dot(rows, tokens.T, out_dtype=tl.int32)
    elif KIND == SCALED_TOKEN:
        cells = tl.dot(rows, tokens.T) * scale.to(tl.float32)[None, :]
    else:
        cells = tl.dot(rows, tokens.T)
    return cells


@triton.jit
def _winner_cell(
    query, token, document, column, out_stride, documents, winner_size, query_size, STORE_ROWS: tl.constexpr
):  # fmt: skip
    """Where a row's winner goes: in `[Nq, N, Lq]` or, for `combine` (no `winner_size`), in `[documents of this launch, rows]`."""
    if STORE_ROWS:
        cell = column * out_stride + token
        if winner_size > 0:
            cell = ((token // winner_size).to(tl.int64) * documents + document) * winner_size + token % winner_size
    else:
        cell = (query.to(tl.int64) * documents + document) * query_size + token
    return cell


@triton.jit
def _leave_unscored(
    out_ptr, argmax_ptr, bound_ptr, query0, token0, query1, token1, owner, query_count, query_size, first_document, last_document,
    chunk, chunks, out_stride, documents, winner_size, room, STORE_ROWS: tl.constexpr, ARGMAX: tl.constexpr,
):  # fmt: skip
    """Write NaN and no winner for documents whose tiles had no room: offsets overlapping against their promise claim too many."""
    for document in range(first_document + chunk, last_document, chunks):
        after = tl.load(bound_ptr + document + 1)
        if (after > room) & (after > tl.load(bound_ptr + document)):
            number = tl.full([], 0, tl.int64) + document
            column = number - first_document
            if STORE_ROWS:
                tl.store(out_ptr + column * out_stride + token0, float("nan"), mask=token0 < query_size)
                tl.store(out_ptr + column * out_stride + token1, float("nan"), mask=token1 < query_size)
            else:
                tl.store(out_ptr + owner.to(tl.int64) * out_stride + column, float("nan"), mask=owner < query_count)
            if ARGMAX:
                cell0 = _winner_cell(query0, token0, number, column, out_stride, documents, winner_size, query_size, STORE_ROWS)
                cell1 = _winner_cell(query1, token1, number, column, out_stride, documents, winner_size, query_size, STORE_ROWS)
                tl.store(argmax_ptr + cell0, -1, mask=(token0 < query_size) & (query0 < query_count))
                tl.store(argmax_ptr + cell1, -1, mask=(token1 < query_size) & (query1 < query_count))


@triton.jit(
    do_not_specialize=[
        "query_count", "query_size", "first_document", "last_document", "document_size", "pitch", "groups", "chunks",
        "argmax_documents", "winner_size", "tokens_total", "splits", "room", "again", "out_stride",
    ]
)  # fmt: skip
def _tiles_kernel(
    query_ptr, query_length_ptr, query_mask_ptr, query_scale_ptr, documents, table_ptr, bound_ptr, start_ptr, length_ptr,
    list_ptr, scale_ptr, out_ptr, argmax_ptr, negative_ptr,
    query_count, query_size, first_document, last_document, document_size, pitch, width, groups, chunks, out_stride,
    argmax_documents, winner_size, tokens_total, splits, room, again, stride_qn, stride_qt, stride_qd, stride_t,
    KIND: tl.constexpr, RAGGED: tl.constexpr, SHORT: tl.constexpr, HOLES: tl.constexpr, QUERY_SCALED: tl.constexpr,
    DOCUMENT_SCALED: tl.constexpr, HAS_QUERY_LENGTHS: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, STORE_ROWS: tl.constexpr,
    ARGMAX: tl.constexpr, BITS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    WAY: tl.constexpr = INT8 if BITS else KIND  # how maxima are held
    if not BITS:
        if again > 0:
            if tl.load(negative_ptr + tl.program_id(0)) == 0:
                return
    group = tl.program_id(0) % groups  # neighbours share documents in L2
    chunk = tl.program_id(0) // groups
    query0, token0, valid0 = half_rows(group, query_count, query_size, 0, PADDED, ROWS)
    query1, token1, valid1 = half_rows(group, query_count, query_size, 1, PADDED, ROWS)
    valid0 = valid_rows(valid0, query0, token0, query_length_ptr, query_mask_ptr, query_size, HAS_QUERY_LENGTHS, HAS_QUERY_MASK)
    valid1 = valid_rows(valid1, query1, token1, query_length_ptr, query_mask_ptr, query_size, HAS_QUERY_LENGTHS, HAS_QUERY_MASK)
    rows0 = load_rows(query_ptr, query0, token0, valid0, width, stride_qn, stride_qt, stride_qd, WIDTH)
    rows1 = load_rows(query_ptr, query1, token1, valid1, width, stride_qn, stride_qt, stride_qd, WIDTH)
    weight0 = tl.zeros([ROWS], tl.float32)
    weight1 = tl.zeros([ROWS], tl.float32)
    weight = 1.0
    if QUERY_SCALED:
        weight0 = tl.load(query_scale_ptr + query0 * query_size + token0, mask=valid0, other=1.0)
        weight1 = tl.load(query_scale_ptr + query1 * query_size + token1, mask=valid1, other=1.0)
        if DOCUMENT_SCALED == 2:
            weight = tl.load(scale_ptr).to(tl.float32)
    place = tl.arange(0, TOKENS)
    HALF: tl.constexpr = 1 if STORE_ROWS else PADDED // 2  # rows of a query in one tile, where a tile holds whole ones
    owner = group * (ROWS // HALF) + tl.arange(0, ROWS // HALF)
    if RAGGED:
        # Tiles are dealt out evenly; a program takes the documents that begin in its share.
        low = tl.minimum(tl.load(bound_ptr + first_document), room)
        claimed = tl.load(bound_ptr + last_document)
        if claimed > room:
            _leave_unscored(
                out_ptr, argmax_ptr, bound_ptr, query0, token0, query1, token1, owner, query_count, query_size, first_document,
                last_document, chunk, chunks, out_stride, argmax_documents, winner_size, room, STORE_ROWS, ARGMAX,
            )  # fmt: skip
        if HOLES:
            if claimed == low:  # a mask need not have holes: most calls end here
                return
        share = tl.cdiv(tl.minimum(claimed, room) - low, chunks)
        begin = document_start(low + chunk * share, table_ptr, bound_ptr, last_document, room)
        end = document_start(low + (chunk + 1) * share, table_ptr, bound_ptr, last_document, room)
        tiles = 1
    else:
        share = tl.cdiv(last_document - first_document, chunks)
        tiles = tl.cdiv(document_size, TOKENS)
        begin = (first_document + chunk * share) * tiles
        end = tl.minimum(first_document + (chunk + 1) * share, last_document) * tiles
    best0 = nothing(ROWS, TOKENS, WAY)
    best1 = nothing(ROWS, TOKENS, WAY)
    bits0 = tl.zeros_like(best0).to(tl.float32)
    bits1 = bits0
    from0 = bits0.to(tl.int32)
    from1 = from0
    negative = tl.zeros([ROWS], tl.int32)
    # What a tile needs besides its tokens is loaded one tile ahead: only tokens go through the compiler's pipeline.
    next_document = begin // tiles
    next_tile = 0
    entry = tile_entry(begin, end, next_document, next_tile, table_ptr, document_size, pitch, tiles, RAGGED, TOKENS)
    scale = token_scales(entry[0], begin < end, list_ptr, scale_ptr, tokens_total, KIND, HOLES, TOKENS)
    # A document's scale is loaded where the document ends: other programs hide the wait, and a tile carries nothing for it. With
    # winners that would take the registers of one program more, so there the scale is loaded a tile ahead too.
    next_weight = weight
    if DOCUMENT_SCALED == 1 and ARGMAX:
        next_weight = document_scale(entry[1] >> 1, scale_ptr, argmax_documents, 1, STORE_ROWS)
    # A list comes before its tokens, and each has half of the stages; winners leave shared memory for one less.
    STAGED: tl.constexpr = 2 * STAGES - (2 if ARGMAX and STAGES > 2 else 1) if HOLES else STAGES
    for step in tl.range(begin, end, num_stages=STAGED):
        row, owner_and_last = entry
        # Counted, not divided: a division costs as much as a tenth of a tile's maxima.
        next_tile = tl.where(next_tile == tiles - 1, 0, next_tile + 1)
        next_document += (next_tile == 0).to(tl.int32)
        entry = tile_entry(step + 1, end, next_document, next_tile, table_ptr, document_size, pitch, tiles, RAGGED, TOKENS)
        next_scale = token_scales(entry[0], step + 1 < end, list_ptr, scale_ptr, tokens_total, KIND, HOLES, TOKENS)
        document = owner_and_last >> 1
        last = (owner_and_last & 1) == 1
        size = document_size
        first = row - document * pitch
        if RAGGED:
            size = TOKENS  # at least, where documents are not short
            if SHORT or ARGMAX:
                size = tl.load(length_ptr + document)
                first = row - tl.load(start_ptr + document)
        if DOCUMENT_SCALED == 1 and ARGMAX:
            weight = next_weight
            next_weight = document_scale(entry[1] >> 1, scale_ptr, argmax_documents, 1, STORE_ROWS)
        tokens = tokens_at(documents, row, list_ptr, width, stride_t, HOLES, TOKENS, WIDTH)
        cells0 = _cells(rows0, tokens, scale, KIND)
        cells1 = _cells(rows1, tokens, scale, KIND)
        if SHORT:
            # In ragged documents a tile may end beyond its document, in dense ones only when that is shorter than a tile.
            inside = first + place < size
            cells0 = hide(cells0, inside, KIND)
            cells1 = hide(cells1, inside, KIND)
        if BITS:
            cells0 = cells0.to(tl.int32, bitcast=True)
            cells1 = cells1.to(tl.int32, bitcast=True)
        held0 = slots(cells0)
        held1 = slots(cells1)
        here0 = best_along(held0, 2, WAY)
        here1 = best_along(held1, 2, WAY)
        if ARGMAX:
            win0 = better(here0, best0, KIND)
            win1 = better(here1, best1, KIND)
            bits0 = tl.where(win0, first_equal(held0, here0), bits0)
            bits1 = tl.where(win1, first_equal(held1, here1), bits1)
            from0 = tl.where(win0, first, from0)
            from1 = tl.where(win1, first, from1)
        scale = next_scale
        best0 = merge_best(best0, here0, WAY)
        best1 = merge_best(best1, here1, WAY)
        if last:
            number = tl.full([], 0, tl.int64) + document
            row0 = best_along(best0, 1, WAY)
            row1 = best_along(best1, 1, WAY)
            if BITS:
                negative = tl.minimum(negative, tl.minimum(row0, row1))
                sum0 = row0.to(tl.float32, bitcast=True)
                sum1 = row1.to(tl.float32, bitcast=True)
            else:
                sum0 = as_float(row0, KIND)
                sum1 = as_float(row1, KIND)
            if QUERY_SCALED:
                # An empty document stays -inf, also for a query token whose scale is NaN. The document's scale comes first, as in
                # the other kernels: those score views of a large buffer, which must get the same bits.
                there = size > 0
                times = weight
                if DOCUMENT_SCALED == 1 and not ARGMAX:
                    times = document_scale(document, scale_ptr, argmax_documents, splits, STORE_ROWS)
                sum0 = sum0 * tl.where(there, times, 1.0) * tl.where(there, weight0, 1.0)
                sum1 = sum1 * tl.where(there, times, 1.0) * tl.where(there, weight1, 1.0)
            sum0 = tl.where(valid0, sum0, 0.0)
            sum1 = tl.where(valid1, sum1, 0.0)
            column = number - first_document
            if ARGMAX:
                index0 = slots_first(best0, row0, bits0, from0, ROWS, TOKENS)
                index1 = slots_first(best1, row1, bits1, from1, ROWS, TOKENS)
                index0 = tl.where(valid0, tl.minimum(index0, size - 1), -1)
                index1 = tl.where(valid1, tl.minimum(index1, size - 1), -1)
                if HOLES:
                    listed = list_ptr + tl.load(start_ptr + document)
                    index0 = tl.where(valid0, tl.load(listed + index0, mask=valid0, other=0) - document * pitch, -1)
                    index1 = tl.where(valid1, tl.load(listed + index1, mask=valid1, other=0) - document * pitch, -1)
                cell0 = _winner_cell(
                    query0, token0, number, column, out_stride, argmax_documents, winner_size, query_size, STORE_ROWS
                )
                cell1 = _winner_cell(
                    query1, token1, number, column, out_stride, argmax_documents, winner_size, query_size, STORE_ROWS
                )
                tl.store(argmax_ptr + cell0, index0, mask=(token0 < query_size) & (query0 < query_count))
                tl.store(argmax_ptr + cell1, index1, mask=(token1 < query_size) & (query1 < query_count))
                bits0 = tl.zeros_like(bits0)
                bits1 = bits0
                from0 = tl.zeros_like(from0)
                from1 = from0
            if STORE_ROWS:
                tl.store(out_ptr + column * out_stride + token0, sum0, mask=token0 < query_size)
                tl.store(out_ptr + column * out_stride + token1, sum1, mask=token1 < query_size)
            else:
                # In FP64, so that the order of addition cannot show: every kernel gives the same sum of the same maxima.
                both = sum0.to(tl.float64) + sum1.to(tl.float64)
                sums = tl.sum(tl.reshape(both, [ROWS // HALF, HALF]), 1).to(tl.float32)
                tl.store(out_ptr + owner.to(tl.int64) * out_stride + column, sums, mask=owner < query_count)
            best0 = nothing(ROWS, TOKENS, WAY)
            best1 = nothing(ROWS, TOKENS, WAY)
    if BITS:
        tl.store(negative_ptr + tl.program_id(0), tl.min(negative, 0))


def launch_tiles(
    call: Call, queries: Tensor, scales: Tensor | None, config: Config, scores: Tensor, argmax: Tensor | None
) -> None:
    """Score documents that a tensor descriptor describes; if quantised, `queries` are codes and `scales` their scales."""
    count = call.document_count
    packed = call.query_starts is not None
    size = 0 if packed else call.queries.shape[1]
    total = queries.shape[0] * (1 if packed else size)
    groups = triton.cdiv(total, 2 * config.rows)
    splits = 1 if argmax is not None else pieces_a_document(call, config.tokens, groups * count)
    # Rows mode: query tokens one after the other, their maxima stored for `combine`. Else a query's rows are padded to a power of two
    # and summed here, which is cheaper where padding wastes little.
    # Few such sizes, because each is a kernel of its own.
    rows_mode = packed or padded(size) not in (32, 64) or padded(size) * 4 > size * 5 or splits > 1
    if not rows_mode:
        groups = triton.cdiv(queries.shape[0] * padded(size), 2 * config.rows)
    ragged = (
        call.document_starts is not None or call.document_lengths is not None or call.document_mask is not None or splits > 1
    )
    tables: tuple[Tiles | None, ...] = tiles_of(call, config.tokens, config.short, splits) if ragged else (None,)
    pieces = count * splits
    # Winners of whole queries go where they belong at once; else with the maxima, through `combine`.
    direct = argmax if not packed and call.query_lengths is None else None
    through = argmax if direct is None else None
    maxima = row_maxima(total, pieces, splits, size, scores.device, through is not None) if rows_mode else None
    each = maxima.documents if maxima is not None else pieces
    for first in range(0, pieces, each):
        last = min(pieces, first + each)
        for tiles in tables:
            _launch(call, queries, scales, config, scores, argmax, maxima, tiles, groups, splits, first, last)
        if maxima is not None:
            combine(call, maxima, first // splits, (last - first) // splits, scores, through)


def resident(config: Config, tokens: int, width: int, most: int = 64) -> int:
    """Programs that a multiprocessor runs at once, by registers (the table, `most`) and shared memory; tokens of `width` bytes."""
    held = (2 * config.rows + config.stages * tokens) * width
    programs = min(most, (config.short_programs if tokens < config.tokens else 0) or config.programs)
    return max(1, min(programs, _SHARED // (held + _BESIDE)))


def hole_registers(config: Config, winners: bool) -> int:
    """Most registers a thread of the kernel that gathers tokens, so that `HOLES_PROGRAMS` fit; 0: they fit without a limit."""
    return 128 if config.warps == 8 and not winners else 0


def _chunks(documents: int, each: int, groups: int, slots: int, tiles: Tiles | None) -> int:
    """Programs a query group: documents of one length are dealt out whole, ragged ones tile by tile (`each` in the mean)."""
    if tiles is None:
        return chunks_of(documents, each, groups, slots, _WAVES)
    return min(documents, chunks_of(documents * max(1, each), 1, groups, slots, _WAVES))


def _launch(
    call: Call, queries: Tensor, scales: Tensor | None, config: Config, scores: Tensor, argmax: Tensor | None,
    maxima: RowMaxima | None, tiles: Tiles | None, groups: int, splits: int, first: int, last: int,
) -> None:  # fmt: skip
    documents, unused = call.documents, scores
    width = queries.shape[-1]
    held = padded(width, 32 if documents.dtype in EIGHT_BITS else 16)
    tokens = config.tokens if tiles is None else tiles.tokens
    rows_mode = maxima is not None
    source = flat_queries(queries) if rows_mode else queries
    out, winners = scores, argmax
    if maxima is not None:
        out, winners = maxima.best, argmax if maxima.winner is None else maxima.winner
    winner_size = argmax.shape[-1] if argmax is not None and winners is argmax else 0
    kind = KINDS[documents.dtype, call.granularity == "token"] if call.granularity != "none" else 0
    lengths = call.query_lengths if not rows_mode else None
    mask = call.query_mask if not rows_mode or winner_size else None
    size = documents.shape[-2] if documents.dim() == 3 else documents.shape[0] // max(1, call.document_count)
    holes = tiles is not None and tiles.rows is not None
    programs = resident(config, tokens, held * documents.element_size(), HOLES_PROGRAMS if holes else 64)
    full = (tokens, programs) == (config.tokens, config.programs)
    chunks = _chunks(last - first, triton.cdiv(size, tokens), groups, hardware(scores.device)[1] * programs, tiles)
    short = tiles.short if tiles is not None else documents.shape[-2] < tokens
    bits = config.bits and argmax is None and not short and not holes and kind != INT8.value
    negative = empty((groups * chunks,), torch.int32, scores.device) if bits else unused
    for again in (0, 1)[: 1 + bits]:
        launch(
            _tiles_kernel, groups * chunks,
            source, lengths if lengths is not None else unused, byte_mask(mask, unused), scales if scales is not None else unused,
            documents if holes else descriptor(documents, flat_rows(call), width, documents.stride(-2), [tokens, held]),
            *((tiles.table, tiles.bound, tiles.begin, tiles.size) if tiles is not None else (unused,) * 4),
            tiles.rows if tiles is not None and tiles.rows is not None else unused,
            call.scales.contiguous() if call.scales is not None else unused, out, winners if winners is not None else unused, negative,
            1 if rows_mode else queries.shape[0], source.shape[0] if rows_mode else queries.shape[1], first, last,
            documents.shape[-2], pitch(call) if documents.dim() == 3 else 0, width, groups, chunks, out.stride(0),
            call.document_count, winner_size, flat_rows(call), splits, tiles.table.shape[0] if tiles is not None else 0, again,
            0 if rows_mode else source.stride(0), source.stride(-2), source.stride(-1), documents.stride(-2),
            KIND=kind, RAGGED=tiles is not None, SHORT=short, HOLES=holes, QUERY_SCALED=scales is not None,
            DOCUMENT_SCALED=max(0, SCALES[call.granularity] - 1),
            HAS_QUERY_LENGTHS=lengths is not None, HAS_QUERY_MASK=mask is not None, STORE_ROWS=rows_mode,
            ARGMAX=argmax is not None, BITS=bits and not again,
            PADDED=4 * config.rows if rows_mode else padded(queries.shape[1]), ROWS=config.rows,
            TOKENS=tokens, WIDTH=held, STAGES=config.stages, warps=config.warps,
            registers=hole_registers(config, argmax is not None) if holes else config.registers if full else 0,
        )  # fmt: skip
