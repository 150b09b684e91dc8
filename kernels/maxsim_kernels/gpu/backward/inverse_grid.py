"""The inverse grid: for every document token, the query tokens that chose it, in a fixed order (paper section 'Inverse-Grid Kernels').

A stable counting sort of the saved winners, built on the device without waiting for it:

1. `_count_kernel` counts the winners of every (document token, block of queries) by integer atomics, whose sum has no order;
2. a cumulative sum turns counts into places, tokens first, blocks of queries within a token;
3. `_place_kernel` writes each (query, query token) to its place. One program owns a document's block of queries and walks over it in
   order, a chunk at a time: the rank among equal keys of a chunk comes from comparing all pairs, the ranks before it from the
   places already used. So equal keys stay in the order (query, query token), and the lists have the same bits every time.

Packed rows that may overlap (views) have no such blocks; there `sorted_entries` sorts all winners by torch's stable sort.

A list may hold any number of the entries (one token that everybody chose), and a program that sums it alone would outlast all
others. So lists of `2 * apart` entries or more are cut into `length // apart` equal pieces. Who sums which is known without the
host: the entries of all lists have a mark at every multiple of `apart`, each mark has a program, and a list of n entries holds at
least `n // apart` of them. The program of a list's k-th mark sums its k-th piece. Cuts depend on the list's length and on shapes,
not on its place or the GPU's load: the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.gpu.geometry import hardware, padded
from maxsim_kernels.gpu.launch import call, empty, launch

COUNT_CHUNK, PLACE_CHUNK = 1024, 32  # winners at once: counting is free of order, placing compares all pairs of a chunk
TABLE_CHUNK, _TABLE_WINNERS, _TABLE_BINS = 2048, 8192, 2048  # winners that a program counts at once, and in all; its counters
WHOLE_CHUNK = 64  # winners that a program of eight warps places at once
_BLOCK_WINNERS = 1024  # winners that a program walks over, at least
_PROGRAMS = 32  # programs of one warp that a multiprocessor is to get
APART = 512  # entries between marks, at least: a piece is 16 turns of its program or more
_MARKS = 4096  # at most, of up to 128 columns: what fills the GPU a few times; their sums take 2 MiB


def divisor(value: int) -> tuple[int, int]:
    """`(magic, shift)` such that `n * magic >> shift` is `n // value` for 0 <= n < 2^31; a division costs twenty instructions."""
    shift = 31 + (value - 1).bit_length()
    return ((1 << shift) + value - 1) // value, shift


@triton.jit
def divide(number, magic, shift):
    """Quotient of int32 numbers >= 0 by `divisor`'s value."""
    return ((number.to(tl.int64) * magic) >> shift).to(tl.int32)


@triton.jit
def winner_of(place, LEAN: tl.constexpr):
    """A saved winner as int32, -1 where there is none; lean ones are the low 16 bits."""
    index = place.to(tl.int32)
    if LEAN:
        index = index & 0xFFFF
        index = tl.where(index == 0xFFFF, -1, index)
    return index


@triton.jit
def row_at(position, end_ptr, rows, blocks):
    """The row whose list holds `position` (int64), `rows` where none does: a search among 32 rows at a time."""
    low = tl.full([], 0, tl.int32)
    high = low + rows
    while low < high:  # the row is in low .. high
        step = (high - low + 31) // 32
        row = low + (tl.arange(0, 32) + 1) * step - 1
        end = tl.load(end_ptr + (row.to(tl.int64) + 1) * blocks - 1, mask=row < high, other=0)
        before = tl.sum(((row < high) & (end <= position)).to(tl.int32), 0)
        low += before * step
        high = tl.minimum(high, low + step - 1)
    return low


@triton.jit
def list_of(row, place, end_ptr, blocks, document_size, room, FIXED: tl.constexpr):
    """Where a row's list begins and ends; FIXED: the lists of each document begin at its `place` times `room`."""
    last = (tl.full([], 0, tl.int64) + row) * blocks - 1
    if FIXED:
        begin = tl.load(end_ptr + last, mask=row > place * document_size, other=place * room)
    else:
        begin = tl.load(end_ptr + last, mask=row > 0, other=0)
    return begin, tl.load(end_ptr + last + blocks)


@triton.jit
def _key(
    step, total, query0, number, argmax_ptr, documents, winner_size, magic, shift, base, left, LEAN: tl.constexpr,
    RAGGED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(query * winner size + query token, row of the table) of a chunk of a program's winners; row -1: none."""
    at = step + tl.arange(0, CHUNK)
    inside = at < total
    query = query0 + divide(at, magic, shift)
    token = at - divide(at, magic, shift) * winner_size
    cell = (query.to(tl.int64) * documents + number) * winner_size + token
    place = winner_of(tl.load(argmax_ptr + cell, mask=inside, other=-1), LEAN)
    won = inside & (place >= 0)
    if RAGGED:
        won = won & (place < left)  # the forward may leave any winner where offsets break their promise
    return query * winner_size + token, tl.where(won, base + place, -1)


@triton.jit
def _share(first_document, queries, blocks, per_block, document_size, start_ptr, winner_size, RAGGED: tl.constexpr):
    """A program's document, block, first query, number of winners, the table's row of its first token, and rows from there."""
    number = first_document + tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    query0 = block * per_block
    total = tl.maximum(tl.minimum(queries - query0, per_block), 0) * winner_size
    base = (number - first_document) * document_size
    if RAGGED:
        base = tl.minimum(tl.maximum(tl.load(start_ptr + number).to(tl.int64), 0), document_size).to(tl.int32)
    return number, block, query0, total, base, document_size - base


@triton.jit(
    do_not_specialize=[
        "first_document", "queries", "documents", "winner_size", "blocks", "per_block", "document_size", "magic", "shift"
    ]
)  # fmt: skip
def _count_kernel(
    argmax_ptr, start_ptr, table_ptr, first_document, queries, documents, winner_size, blocks, per_block, document_size, magic,
    shift, LEAN: tl.constexpr, RAGGED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    number, block, query0, total, base, left = _share(
        first_document, queries, blocks, per_block, document_size, start_ptr, winner_size, RAGGED
    )
    for step in range(0, total, CHUNK):
        _, row = _key(
            step, total, query0, number, argmax_ptr, documents, winner_size, magic, shift, base, left, LEAN, RAGGED, CHUNK
        )
        # One entry further on: after the cumulative sum an entry then holds how many lie before it.
        tl.atomic_add(table_ptr + 1 + row.to(tl.int64) * blocks + block, 1, mask=row >= 0, sem="relaxed")


@triton.jit
def _write_lists(
    number, block, query0, total, base, left, argmax_ptr, table_ptr, list_ptr, documents, winner_size, blocks, magic, shift,
    LEAN: tl.constexpr, RAGGED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write every winner of a document's block of queries to its place, in order; the table's entries become the lists' ends."""
    mine = tl.arange(0, CHUNK)
    source, row = _key(
        0, total, query0, number, argmax_ptr, documents, winner_size, magic, shift, base, left, LEAN, RAGGED, CHUNK
    )
    for step in range(0, total, CHUNK):
        next_source, next_row = _key(
            step + CHUNK,
            total,
            query0,
            number,
            argmax_ptr,
            documents,
            winner_size,
            magic,
            shift,
            base,
            left,
            LEAN,
            RAGGED,
            CHUNK,
        )
        # Down a column: the keys a winner (a lane) is compared with lie in its own registers. Equal ones before it count 1,
        # those after it CHUNK: one sum for both.
        order = tl.where(mine[:, None] < mine[None, :], 1, tl.where(mine[:, None] > mine[None, :], CHUNK, 0))
        equal = tl.sum(tl.where(row[:, None] == row[None, :], order, 0), 0)
        before = equal % CHUNK
        entry = table_ptr + row.to(tl.int64) * blocks + block
        # Only this program uses these entries, but any of its threads may: read past the first cache, a barrier between chunks.
        place = tl.load(entry, mask=row >= 0, other=0, cache_modifier=".cg") + before
        tl.store(list_ptr + place, source, mask=row >= 0)
        tl.debug_barrier()
        tl.store(entry, place + 1, mask=(row >= 0) & (equal < CHUNK))
        tl.debug_barrier()
        source = next_source
        row = next_row


@triton.jit(
    do_not_specialize=[
        "first_document", "queries", "documents", "winner_size", "blocks", "per_block", "document_size", "magic", "shift"
    ]
)  # fmt: skip
def _place_kernel(
    argmax_ptr, start_ptr, table_ptr, list_ptr, first_document, queries, documents, winner_size, blocks, per_block,
    document_size, magic, shift, LEAN: tl.constexpr, RAGGED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    number, block, query0, total, base, left = _share(
        first_document, queries, blocks, per_block, document_size, start_ptr, winner_size, RAGGED
    )
    _write_lists(
        number, block, query0, total, base, left, argmax_ptr, table_ptr, list_ptr, documents, winner_size, blocks, magic, shift,
        LEAN, RAGGED, CHUNK,
    )  # fmt: skip


@triton.jit
def _histogram(step, total, number, argmax_ptr, documents, winner_size, magic, shift, LEAN: tl.constexpr, BINS: tl.constexpr,
    CHUNK: tl.constexpr):  # fmt: skip
    """How often each token of a document won in a chunk of cells; the last bin, of no token, counts cells without a winner."""
    _, row = _key(step, total, 0, number, argmax_ptr, documents, winner_size, magic, shift, 0, BINS, LEAN, False, CHUNK)
    return tl.histogram(tl.where(row >= 0, row, BINS - 1), BINS)


@triton.jit(
    do_not_specialize=[
        "first_document", "queries", "documents", "winner_size", "blocks", "per_block", "document_size", "magic", "shift"
    ]
)  # fmt: skip
def _table_kernel(
    argmax_ptr, table_ptr, list_ptr, first_document, queries, documents, winner_size, blocks, per_block, document_size, magic,
    shift, LEAN: tl.constexpr, WHOLE: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PLACE_CHUNK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    number = first_document + place
    total = queries * winner_size
    token = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for step in range(0, total, CHUNK):
        counts += _histogram(step, total, number, argmax_ptr, documents, winner_size, magic, shift, LEAN, BINS, CHUNK)
    before = tl.cumsum(counts, 0) - counts + place * total
    entry = table_ptr + ((tl.full([], 0, tl.int64) + place) * document_size + token) * blocks
    if WHOLE:  # the document is one block of queries: its lists are written here too
        tl.store(entry, before, mask=token < document_size)
        tl.debug_barrier()
        _write_lists(
            number, 0, 0, total, place * document_size, 0, argmax_ptr, table_ptr, list_ptr, documents, winner_size, blocks, magic,
            shift, LEAN, False, PLACE_CHUNK,
        )  # fmt: skip
    else:
        for block in range(blocks):
            tl.store(entry + block, before, mask=token < document_size)
            first = block * per_block * winner_size
            last = tl.minimum(first + per_block * winner_size, total)
            for step in range(first, last, CHUNK):
                before += _histogram(step, last, number, argmax_ptr, documents, winner_size, magic, shift, LEAN, BINS, CHUNK)


@dataclass(frozen=True)
class Pieces:
    """Room for the sums of the pieces of long lists: `sums` `[marks, columns]` float32, `rows` `[marks]` int32."""

    apart: int
    sums: Tensor
    rows: Tensor


def marks(entries: int, width: int) -> tuple[int, int]:
    """How many marks `entries` entries of lists get, and how far apart, where rows have `width` columns: by shapes only."""
    most = max(1, _MARKS * 128 // max(width, 128))
    apart = max(APART, triton.cdiv(entries, most))
    return triton.cdiv(entries, apart), apart


def room_for_pieces(entries: int, longest: int, width: int, device: torch.device) -> Pieces | None:
    """Room for the pieces of long lists; None where no list can be long, having `longest` entries at most."""
    count, apart = marks(entries, width)
    if longest <= 2 * apart:  # at most one list, of all query tokens, is worth a piece: a launch takes longer
        return None
    return Pieces(apart, empty((count, width), torch.float32, device), empty((count,), torch.int32, device))


@dataclass(frozen=True)
class Grid:
    """Lists of some documents' tokens: row r's are `list[ends[r * blocks - 1] : ends[(r + 1) * blocks - 1]]` (from 0 for r = 0).

    `room`: entries set aside for each document: the n-th one's first list begins at `n * room`; 0: lists follow each other.
    """

    list: Tensor
    ends: Tensor
    blocks: int
    pieces: Pieces | None
    room: int = 0


def shares(queries: int, documents: int, winner_size: int, device: torch.device, limit: int) -> tuple[int, int]:
    """Blocks a document's queries are cut into (at most `limit`), and queries a block: by shapes only, never by the GPU's load."""
    wanted = triton.cdiv(hardware(device)[1] * _PROGRAMS, documents)
    most = max(1, queries * winner_size // _BLOCK_WINNERS)
    per_block = triton.cdiv(queries, max(1, min(wanted, most, queries, limit)))
    return triton.cdiv(queries, per_block), per_block


class Lists:
    """Room for the lists of up to `most` documents at once, used again for the next ones.

    Args:
        argmax: `[Nq, N, W]` winners, contiguous.
        starts: first row of every document, packed end to end in a buffer of `rows`; or None: `rows` tokens each.
        room: bytes that the table of places may take where a row gets several places, one for each block of queries.
        width: columns of what will be summed.
    """

    def __init__(self, argmax: Tensor, starts: Tensor | None, rows: int, most: int, room: int, width: int) -> None:
        queries, _, winner_size = argmax.shape
        self._argmax, self._starts, self._rows = argmax, starts, rows
        table = rows if starts is not None else rows * most
        self._blocks, self._per_block = shares(queries, most, winner_size, argmax.device, max(1, room // (4 * table)))
        self._ends = empty((table * self._blocks + 1,), torch.int32, argmax.device)
        self._list = empty((queries * most * winner_size,), torch.int32, argmax.device)
        # A query token has one winner in a document.
        self._pieces = room_for_pieces(self._list.numel(), queries * winner_size, width, argmax.device)

    def build(self, first: int, count: int) -> Grid:
        """Lists of documents `first .. first + count`; what was built before is overwritten."""
        argmax, starts = self._argmax, self._starts
        queries, documents, winner_size = argmax.shape
        shape = (first, queries, documents, winner_size, self._blocks, self._per_block, self._rows, *divisor(winner_size))
        kinds = {"LEAN": argmax.dtype == torch.int16, "RAGGED": starts is not None}
        begin = argmax if starts is None else starts
        grid = count * self._blocks
        bins = padded(self._rows + 1)  # and one for cells without a winner
        room = queries * winner_size if starts is None and bins <= _TABLE_BINS else 0
        if 0 < room <= _TABLE_WINNERS:
            whole = self._blocks == 1
            launch(
                _table_kernel, count, argmax, self._ends, self._list, *shape, LEAN=kinds["LEAN"], WHOLE=whole, BINS=bins,
                CHUNK=TABLE_CHUNK, PLACE_CHUNK=WHOLE_CHUNK, warps=8,
            )  # fmt: skip
            if whole:
                return Grid(self._list, self._ends, self._blocks, self._pieces, room)
        else:
            room = 0
            call(torch.Tensor.zero_, self._ends)
            launch(_count_kernel, grid, argmax, begin, self._ends, *shape, CHUNK=COUNT_CHUNK, warps=4, **kinds)
            call(_accumulate, self._ends)
        launch(_place_kernel, grid, argmax, begin, self._ends, self._list, *shape, CHUNK=PLACE_CHUNK, warps=1, **kinds)
        return Grid(self._list, self._ends, self._blocks, self._pieces, room)


def _accumulate(counts: Tensor) -> None:
    torch.cumsum(counts, 0, dtype=torch.int32, out=counts)


def sorted_entries(rows: Tensor, count: int, width: int) -> Grid:
    """Lists of the entries that go to each of `count` rows, in order, by torch's stable sort.

    `rows`: the row that each entry goes to (`count` or more: none). `width`: columns of what will be summed.
    """
    keys, order = torch.sort(rows, stable=True)
    ends = torch.searchsorted(keys, torch.arange(count, device=rows.device, dtype=rows.dtype), right=True)
    return Grid(order, ends.to(torch.int64), 1, room_for_pieces(order.numel(), order.numel(), width, rows.device))
