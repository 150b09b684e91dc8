"""Fused MaxSim forward for wide embeddings (split-d): the product is added up over slices of d before its maximum is taken.

For many query rows and tokens of more than 256 bytes. Query and document slices stream past by tensor descriptors in one flat
loop over (document, tile, slice), so that loading never drains; the accumulator is reduced to the running maximum at a tile's
last slice, and row maxima are stored at a document's last tile for `combine.py` to sum. Columns beyond d arrive as zeros, so any
d with aligned rows is taken without a copy. Traffic: a slice of queries and documents is read from L2 for every tile, as in a
matrix product. Source: paper section 'Wide embeddings' (split-d, d > 512).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.forward.combine import combine, row_maxima
from maxsim_kernels.gpu.forward.tile_tables import begins_of
from maxsim_kernels.gpu.forward.tuning import Config
from maxsim_kernels.gpu.geometry import (
    SCALES,
    byte_mask,
    chunks_of,
    descriptor,
    flat_queries,
    flat_rows,
    hardware,
    pieces_a_document,
    pitch,
)
from maxsim_kernels.gpu.launch import launch
from maxsim_kernels.gpu.tile_ops import better, first_place, keep_nan

_FP32_ROWS_BYTES = 24 << 20  # of row maxima: products of FP32 take long enough for more launches not to show


@triton.jit
def _mask_of(mask_ptr, first, place, inside):
    """The mask of a tile's tokens, 0 where they are not `inside`."""
    return tl.load(mask_ptr + (tl.full([], 0, tl.int64) + first + place), mask=inside, other=0)


@triton.jit(
    do_not_specialize=[
        "rows_total",
        "first_document",
        "last_document",
        "document_size",
        "pitch",
        "groups",
        "chunks",
        "splits",
        "out_stride",
        "tokens_total",
    ]
)
def _wide_kernel(
    query_desc, document_desc, query_scale_ptr, begin_ptr, size_ptr, mask_ptr, scale_ptr, out_ptr, winner_ptr,
    rows_total, first_document, last_document, document_size, pitch, width, groups, chunks, out_stride, tokens_total, splits,
    CODES: tl.constexpr, MASKED: tl.constexpr, SCALE: tl.constexpr, QUERY_SCALED: tl.constexpr, RAGGED: tl.constexpr,
    SHORT: tl.constexpr, ARGMAX: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) % groups  # neighbours share documents in L2
    chunk = tl.program_id(0) // groups
    row = group * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, TOKENS)
    slices = tl.cdiv(width, WIDTH)
    share = tl.cdiv(last_document - first_document, chunks)
    low = first_document + chunk * share
    high = tl.minimum(low + share, last_document)
    # Ragged documents are taken one by one (their number of tiles differs), dense ones in one flat loop.
    turns = 1
    if RAGGED:
        turns = high - low
    for turn in range(turns):
        origin = 0
        size = document_size
        documents = high - low
        if RAGGED:
            origin = tl.load(begin_ptr + low + turn)
            size = tl.load(size_ptr + low + turn)
            documents = 1
        tiles = tl.maximum(tl.cdiv(size, TOKENS), 1)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        index = tl.full([ROWS], -1, tl.int32)
        cells = tl.zeros([ROWS, TOKENS], tl.int32 if CODES else tl.float32)
        slice = 0
        tile = 0
        document = low + turn
        for _ in tl.range(0, documents * tiles * slices, num_stages=STAGES):
            done = slice == slices - 1
            whole = tile == tiles - 1
            first = tl.minimum(tile * TOKENS, tl.maximum(size - TOKENS, 0))
            start = origin + first
            if not RAGGED:
                start = document * document_size + first
            masked = start - document // splits * (pitch - document_size)
            if MASKED and not ARGMAX:
                # Loaded before the products, which take longer than the load; winners leave no registers for that.
                counted = _mask_of(mask_ptr, masked, place, (first + place < size) & done)
            rows = query_desc.load([group * ROWS, slice * WIDTH])
            tokens = document_desc.load([start, slice * WIDTH])
            if CODES:
                cells = tl.dot(rows, tokens.T, cells, out_dtype=tl.int32)
            else:
                cells = tl.dot(rows, tokens.T, cells, input_precision="tf32")  # matters for FP32 tokens alone
            if done:
                values = cells.to(tl.float32)
                if SCALE == 1:
                    at = start + place
                    values = values * tl.load(scale_ptr + at, mask=at < tokens_total, other=0.0).to(tl.float32)[None, :]
                if MASKED:
                    if ARGMAX:
                        counted = _mask_of(mask_ptr, masked, place, first + place < size)
                    values = tl.where((counted != 0)[None, :], values, float("-inf"))
                elif RAGGED or SHORT:
                    values = tl.where((place < size)[None, :], values, float("-inf"))
                here = tl.reduce(values, 1, keep_nan)
                if ARGMAX:
                    win = better(here, best, 0) | (index < 0)
                    index = tl.where(win, first_place(values, here, first + place), index)
                best = keep_nan(best, here)
                cells = tl.zeros([ROWS, TOKENS], tl.int32 if CODES else tl.float32)
                if whole:
                    kept = best
                    number = tl.full([], 0, tl.int64) + document
                    if size > 0:
                        if SCALE == 2:
                            kept = kept * tl.load(scale_ptr + number // splits).to(tl.float32)
                        elif SCALE == 3:
                            kept = kept * tl.load(scale_ptr).to(tl.float32)
                        if QUERY_SCALED:
                            kept = kept * tl.load(query_scale_ptr + row, mask=row < rows_total, other=1.0)
                    to = (number - first_document) * out_stride + row
                    tl.store(out_ptr + to, kept, mask=row < rows_total)
                    if ARGMAX:
                        tl.store(winner_ptr + to, tl.minimum(index, size - 1), mask=row < rows_total)
                        index = tl.full([ROWS], -1, tl.int32)
                    best = tl.full([ROWS], float("-inf"), tl.float32)
            # Counted, not divided out of a step: such divisions stood between one product and the next, a tenth of the time.
            document += (done & whole).to(tl.int32)
            tile = tl.where(done, tl.where(whole, 0, tile + 1), tile)
            slice = tl.where(done, 0, slice + 1)


def _one_masked_tile(call: Call, tokens: int, winners: bool) -> bool:
    """Whether documents with a mask are taken as if they were whole: each is one tile anyhow, and the flat loop never drains.

    Codes and winners have to know how long a document is, or whether it is empty.
    """
    documents = call.documents
    if call.document_mask is None or call.document_lengths is not None or winners or call.granularity != "none":
        return False
    return documents.dim() == 3 and documents.shape[1] <= tokens and pitch(call) == documents.shape[1]


def launch_wide(
    call: Call, queries: Tensor, scales: Tensor | None, config: Config, scores: Tensor, argmax: Tensor | None
) -> None:
    """Score documents of more than 256 bytes a token; if they are quantised, `queries` are codes and `scales` their scales."""
    documents = call.documents
    flat = flat_queries(queries)
    if flat.stride(1) != 1 or flat.stride(0) * flat.element_size() % 16 or flat.data_ptr() % 16:
        flat = flat.clone(memory_format=torch.contiguous_format)  # `contiguous` would keep one that only begins at an odd place
    total, width = flat.shape
    groups = triton.cdiv(total, config.rows)
    splits = 1 if argmax is not None else pieces_a_document(call, config.tokens, groups * call.document_count)
    ragged = (
        call.document_starts is not None or call.document_lengths is not None or call.document_mask is not None or splits > 1
    )
    apart = pitch(call) if documents.dim() == 3 else 0
    begin, sizes, mask = scores, scores, None
    if _one_masked_tile(call, config.tokens, argmax is not None):
        ragged, mask = False, byte_mask(call.document_mask, scores)
    elif ragged or (apart > 0 and apart != documents.shape[1]):
        ragged = True
        begin, sizes, mask = begins_of(call, config.tokens, splits)
    pieces = call.document_count * splits
    size = 0 if call.query_starts is not None else call.queries.shape[1]
    room = _FP32_ROWS_BYTES if documents.dtype == torch.float32 else None
    maxima = row_maxima(total, pieces, splits, size, scores.device, argmax is not None, room)
    slice = 128 // documents.element_size()
    query_desc = descriptor(flat, total, width, flat.stride(0), [config.rows, slice])
    document_desc = descriptor(documents, flat_rows(call), width, documents.stride(-2), [config.tokens, slice])
    for first in range(0, pieces, maxima.documents):
        last = min(pieces, first + maxima.documents)
        chunks = chunks_of(last - first, 8, groups, hardware(scores.device)[1] * config.programs, 1)
        launch(
            _wide_kernel, groups * chunks,
            query_desc, document_desc, scales if scales is not None else scores, begin, sizes,
            mask if mask is not None else scores,
            call.scales.contiguous() if call.scales is not None else scores, maxima.best,
            maxima.winner if maxima.winner is not None else scores,
            total, first, last, documents.shape[-2], apart, width, groups, chunks, maxima.best.stride(0), flat_rows(call), splits,
            CODES=documents.dtype == torch.int8, MASKED=mask is not None, SCALE=SCALES[call.granularity],
            QUERY_SCALED=scales is not None, RAGGED=ragged, SHORT=documents.shape[-2] < config.tokens, ARGMAX=argmax is not None,
            ROWS=config.rows, TOKENS=config.tokens, WIDTH=slice, STAGES=config.stages, warps=config.warps,
        )  # fmt: skip
        combine(call, maxima, first // splits, (last - first) // splits, scores, argmax)
