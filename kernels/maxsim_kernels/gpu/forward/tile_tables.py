"""The tile tables of ragged documents: where each tile of tokens lies, built on the device without waiting for it.

Documents of at least one tile go into one table, shorter ones (the empty too: their one tile writes -inf) into another with
smaller tiles, because only those need a mask. A tile's entry holds its first row and its document; a document's last tile is
moved back over the one before it. The host knows only a bound on the number of tiles, ceil(T / tile) + N, which sizes the
tables: 8 bytes a tile, 16 a document (28 with a mask, and 4 for each of its tokens up to whole tiles). Lengths are clamped to the
buffer here, once. Offsets that overlap against their promise may claim more tiles than that bound: those are not made, and their
documents score NaN (`dense.py`). What all claim must stay below 2^31 tiles.
A mask is looked at once (`_Spans`): documents end at their last token that counts, so that padding costs nothing. Those with holes
before it go into a third table: the tokens that count are listed, by their rows, and its tiles are runs of that list.
Source: paper section 'Variable-length corpora'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.geometry import byte_mask, padded, pitch
from maxsim_kernels.gpu.launch import call as call_torch
from maxsim_kernels.gpu.launch import empty, launch

_BLOCK = 128
_MASK_CELLS = 4096  # of a mask that a program reads at once
LAID_OUT = (1024, 8192)  # (pieces of) documents that one program lays out, by its two sizes; more take several


@triton.jit
def _cells(mask_ptr, document, size, document_size, first, BLOCK: tl.constexpr):
    """Cells `first..first + BLOCK` of the mask of some documents: their places in a document and in the mask, and which count."""
    place = first + tl.arange(0, BLOCK).to(tl.int64)
    at = document[:, None] * document_size + place[None, :]
    valid = tl.load(mask_ptr + at, mask=place[None, :] < size[:, None], other=0) != 0
    return place, at, valid


@triton.jit
def _list(
    mask_ptr, row_ptr, document, listing, size, end, count, document_size, pitch, listed, TOKENS: tl.constexpr, EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the list of each document in `listing`: the rows of its tokens that count, filled up to whole tiles by the last."""
    to = row_ptr + document[:, None] * listed
    seen = tl.zeros([EACH], tl.int32)
    for first in range(0, document_size, BLOCK):
        place, _, valid = _cells(mask_ptr, document, tl.where(listing, size, 0), document_size, first, BLOCK)
        rank = seen[:, None] + tl.cumsum(valid.to(tl.int32), 1) - 1
        tl.store(to + rank, (document[:, None] * pitch + place[None, :]).to(tl.int32), mask=valid)
        seen += tl.sum(valid.to(tl.int32), 1)
    rank = count[:, None] + tl.arange(0, TOKENS)[None, :]
    rest = listing[:, None] & (rank < (tl.cdiv(count, TOKENS) * TOKENS)[:, None])
    tl.store(to + rank, tl.broadcast_to((document * pitch + end - 1).to(tl.int32)[:, None], [EACH, TOKENS]), mask=rest)


@triton.jit(do_not_specialize=["documents", "document_size", "pitch", "listed"])
def _spans_kernel(
    mask_ptr, length_ptr, end_ptr, count_ptr, row_ptr, both_ptr, documents, document_size, pitch, listed,
    HAS_LENGTHS: tl.constexpr, LIST: tl.constexpr, TOKENS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where the last token that counts ends in each of `EACH` documents, and how many count.

    `LIST`: tokens of documents with holes are listed. Else, where there are lengths too, both are written as one mask.
    """
    document = tl.program_id(0).to(tl.int64) * EACH + tl.arange(0, EACH)
    inside = document < documents
    size = tl.where(inside, document_size, 0).to(tl.int64)
    if HAS_LENGTHS:
        size = tl.minimum(tl.maximum(tl.load(length_ptr + document, mask=inside, other=0).to(tl.int64), 0), document_size)
    end = tl.zeros([EACH], tl.int64)
    count = tl.zeros([EACH], tl.int32)
    for first in range(0, document_size, BLOCK):
        place, at, valid = _cells(mask_ptr, document, size, document_size, first, BLOCK)
        if HAS_LENGTHS and not LIST:
            tl.store(both_ptr + at, valid.to(tl.uint8), mask=inside[:, None] & (place[None, :] < document_size))
        end = tl.maximum(end, tl.max(tl.where(valid, place[None, :] + 1, 0), 1))
        count += tl.sum(valid.to(tl.int32), 1)
    tl.store(end_ptr + document, end.to(tl.int32), mask=inside)
    tl.store(count_ptr + document, count, mask=inside)
    if LIST:
        listing = inside & (count < end)
        if tl.max(listing.to(tl.int32), 0) > 0:
            _list(mask_ptr, row_ptr, document, listing, size, end, count, document_size, pitch, listed, TOKENS, EACH, BLOCK)


@triton.jit(do_not_specialize=["pieces", "splits", "document_size", "pitch", "listed", "total"])
def _pieces_kernel(
    start_ptr, length_ptr, count_ptr, begin_ptr, size_ptr, whole_ptr, short_ptr, masked_ptr, pieces, splits, document_size, pitch,
    listed, total, RAGGED: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_HOLES: tl.constexpr, TOKENS: tl.constexpr,
    SHORT_TOKENS: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First token, clamped size and number of tiles (in each table) of every document, or of every piece of a split one."""
    piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = piece < pieces
    document = (piece // splits).to(tl.int64)
    if RAGGED:
        begin = tl.maximum(tl.load(start_ptr + document, mask=inside, other=0).to(tl.int64), 0)
        size = tl.load(length_ptr + document, mask=inside, other=0).to(tl.int64)
        size = tl.maximum(tl.minimum(size, total - begin), 0)
    else:
        begin = document * pitch
        size = tl.zeros([BLOCK], tl.int64) + document_size
        if HAS_LENGTHS:
            size = tl.minimum(tl.maximum(tl.load(length_ptr + document, mask=inside, other=0).to(tl.int64), 0), document_size)
    if HAS_HOLES:  # of a document with holes: where its list begins, and how long it is
        count = tl.load(count_ptr + document, mask=inside, other=0).to(tl.int64)
        listing = count < size
        begin = tl.where(listing, document * listed, begin)
        size = tl.minimum(count, size)
    share = tl.cdiv(tl.cdiv(size, splits), TOKENS) * TOKENS
    skipped = (piece % splits) * share
    size = tl.maximum(tl.minimum(size - skipped, share), 0)
    begin = tl.where(size > 0, begin + skipped, 0)  # an empty document's begin may lie anywhere
    tl.store(begin_ptr + piece, begin.to(tl.int32), mask=inside)
    tl.store(size_ptr + piece, size.to(tl.int32), mask=inside)
    plain = inside
    if HAS_HOLES:
        holed = inside & listing & (size > 0)
        plain = inside & (holed == 0)
        masked = tl.where(holed, tl.cdiv(size, TOKENS), 0).to(tl.int32)
        if SUM:
            masked = tl.cumsum(masked, 0)
        tl.store(masked_ptr + 1 + piece, masked, mask=inside)
        tl.store(masked_ptr + piece, piece * 0, mask=piece == 0)
    whole = tl.where(plain & (size >= TOKENS), tl.cdiv(size, TOKENS), 0).to(tl.int32)
    short = tl.where(plain & (size < TOKENS), tl.maximum(tl.cdiv(size, SHORT_TOKENS), 1), 0).to(tl.int32)
    if SUM:  # one program holds all of them: their running sums at once
        whole = tl.cumsum(whole, 0)
        short = tl.cumsum(short, 0)
    tl.store(whole_ptr + 1 + piece, whole, mask=inside)
    tl.store(short_ptr + 1 + piece, short, mask=inside)
    tl.store(whole_ptr + piece, piece * 0, mask=piece == 0)
    tl.store(short_ptr + piece, piece * 0, mask=piece == 0)


@triton.jit(do_not_specialize=["pieces", "room"])
def _table_kernel(bound_ptr, begin_ptr, size_ptr, table_ptr, pieces, room, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Row (or place in the list) and document of every tile: `[tiles, 2]`, the second 2 * document + (whether it is its last)."""
    piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = piece < pieces
    first = tl.load(bound_ptr + piece, mask=inside, other=0)
    count = tl.load(bound_ptr + piece + 1, mask=inside, other=0) - first
    begin = tl.load(begin_ptr + piece, mask=inside, other=0)
    furthest = tl.maximum(tl.load(size_ptr + piece, mask=inside, other=0) - TOKENS, 0)
    for tile in range(0, tl.max(count, 0)):
        here = inside & (tile < count) & (first + tile < room)  # offsets that overlap against their promise end here
        to = table_ptr + (first + tile).to(tl.int64) * 2
        tl.store(to, begin + tl.minimum(tile * TOKENS, furthest), mask=here)
        tl.store(to + 1, piece * 2 + (tile + 1 == count).to(tl.int32), mask=here)


@dataclass(frozen=True)
class Tiles:
    """Tiles of ragged documents: `table` [tiles, 2]; `bound` [N + 1] each document's first tile; `begin`, `size` [N] in tokens.

    `short`: of documents shorter than a tile; `rows`: of documents with holes, the rows of the tokens that count, int32. The tiles
    and `begin` are then places in this list.
    """

    table: Tensor
    bound: Tensor
    begin: Tensor
    size: Tensor
    tokens: int
    short: bool
    rows: Tensor | None = None


@dataclass(frozen=True)
class _Spans:
    """What a mask says of every document, `[N]` int32: the end of its last token that counts, and how many count.

    Where tiles are asked for, `rows` int32 `[N, listed]` lists the tokens that count; else `mask` holds bytes `[N, Ld]`, lengths
    included.
    """

    end: Tensor
    count: Tensor
    rows: Tensor
    mask: Tensor


def tiles_of(call: Call, tokens: int, short_tokens: int, splits: int) -> tuple[Tiles, ...]:
    """Tiles of the documents of at least `tokens`, of the shorter ones and, where there is a mask, of those with holes.

    Each document is cut into `splits` pieces, which then count as documents.
    """
    device = call.documents.device
    pieces = call.document_count * splits
    spans = _spans(call, tokens)
    begin, size = empty((pieces,), torch.int32, device), empty((pieces,), torch.int32, device)
    bounds = tuple(empty((pieces + 1,), torch.int32, device) for _ in range(2 if spans is None else 3))
    few = pieces <= LAID_OUT[1]
    counts = bounds if few else tuple(empty((pieces + 1,), torch.int32, device) for _ in bounds)
    _lay_out(call, spans, begin, size, counts, tokens, short_tokens, splits, pieces, few)
    made = []
    for number, (bound, count) in enumerate(zip(bounds, counts, strict=True)):
        if not few:
            call_torch(_running_sum, bound, count)
        short = number == 1
        each = short_tokens if short else tokens
        most = triton.cdiv(tokens, short_tokens) * pieces if short else most_tiles(call, tokens, splits)
        table = empty((most, 2), torch.int32, device)
        launch(
            _table_kernel,
            triton.cdiv(pieces, _BLOCK),
            bound,
            begin,
            size,
            table,
            pieces,
            most,
            TOKENS=each,
            BLOCK=_BLOCK,
            warps=4,
        )
        rows = spans.rows if spans is not None and number == 2 else None
        made.append(Tiles(table, bound, begin, size, each, short, rows))
    return tuple(made)


def _running_sum(out: Tensor, counts: Tensor) -> None:
    torch.cumsum(counts, 0, dtype=torch.int32, out=out)


def _spans(call: Call, tokens: int = 0) -> _Spans | None:
    """The spans of a call with a mask, else None; `tokens` of a tile, if tokens that count are to be listed (0: they are not)."""
    if call.document_mask is None:
        return None
    device, count, size = call.documents.device, call.document_count, call.documents.shape[1]
    mask, lengths = byte_mask(call.document_mask, call.document_mask), call.document_lengths
    end, counts = empty((count,), torch.int32, device), empty((count,), torch.int32, device)
    rows = empty((count, triton.cdiv(size, tokens) * tokens), torch.int32, device) if tokens else end
    both = mask if tokens or lengths is None else empty((count, size), torch.uint8, device)
    block = min(padded(size, 256), 1024)
    launch(
        _spans_kernel, triton.cdiv(count, _MASK_CELLS // block),
        mask, end if lengths is None else lengths, end, counts, rows, both, count, size, pitch(call), rows.stride(0),
        HAS_LENGTHS=lengths is not None, LIST=tokens > 0, TOKENS=max(1, tokens), EACH=_MASK_CELLS // block,
        BLOCK=block, warps=4,
    )  # fmt: skip
    return _Spans(end, counts, rows, both)


def _lay_out(
    call: Call, spans: _Spans | None, begin: Tensor, size: Tensor, counts: tuple[Tensor, ...], tokens: int, short: int,
    splits: int, pieces: int, one: bool,
) -> None:  # fmt: skip
    """Launch `_pieces_kernel`: by `one` program, which makes running sums of the counts too, or by several."""
    ragged = call.document_starts is not None
    documents = call.documents
    lengths = call.document_lengths if spans is None else spans.end
    launch(
        _pieces_kernel, 1 if one else triton.cdiv(pieces, _BLOCK),
        call.document_starts if ragged else begin, lengths if lengths is not None else begin,
        begin if spans is None else spans.count, begin, size, counts[0], counts[1], counts[-1], pieces, splits,
        0 if ragged else documents.shape[1], 0 if ragged else pitch(call), 0 if spans is None else spans.rows.stride(0),
        documents.shape[0] if ragged else 0,
        RAGGED=ragged, HAS_LENGTHS=lengths is not None, HAS_HOLES=len(counts) > 2, TOKENS=tokens, SHORT_TOKENS=short, SUM=one,
        BLOCK=_BLOCK if not one else LAID_OUT[pieces > LAID_OUT[0]], warps=4 if not one else 32 if pieces > LAID_OUT[0] else 8,
    )  # fmt: skip


def begins_of(call: Call, tokens: int, splits: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """First token and clamped size `[N]` of every (piece of a) document, int32; the mask as bytes `[N, Ld]`, where there is one."""
    pieces, spans = call.document_count * splits, _spans(call)
    begin, size, unused = (empty((pieces + 1,), torch.int32, call.documents.device) for _ in range(3))
    _lay_out(call, spans, begin, size, (unused, unused), tokens, tokens, splits, pieces, one=False)
    return begin, size, None if spans is None else spans.mask


def most_tiles(call: Call, tokens: int, splits: int) -> int:
    """A bound on the number of tiles that needs no value from the device: views may overlap, each up to the whole buffer."""
    pieces = call.document_count * splits
    if call.document_starts is None:
        return call.document_count * triton.cdiv(call.documents.shape[1], tokens) + pieces
    whole = triton.cdiv(call.documents.shape[0], tokens)
    return (whole if call.end_to_end else call.document_count * whole) + pieces
