"""The inverse grid: for every document token, the query tokens that chose it, in a fixed order (paper section 'Inverse-Grid Kernels').

A stable counting sort of the saved winners, built on the device without waiting for it:

1. `_count_kernel` counts the winners of every (document token, block of queries) by integer atomics, whose sum has no order;
2. a cumulative sum turns counts into places, tokens first, blocks of queries within a token;
3. `_place_kernel` writes each (query, query token) to its place. One program owns a document's block of queries and walks over it in
   order, a chunk at a time: the rank among equal keys of a chunk comes from comparing all pairs, the ranks before it from the
   places already used. So equal keys stay in the order (query, query token), and the lists have the same bits every time.

Packed rows that may overlap (views) have no such blocks; there `sorted_entries` sorts all winners by torch's stable sort.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.geometry import hardware
from maxsim_kernels.launch import call, empty, launch

COUNT_CHUNK, PLACE_CHUNK = 1024, 32  # winners at once: counting is free of order, placing compares all pairs of a chunk
_BLOCK_WINNERS = 1024  # that a program walks over, at least
_PROGRAMS = 32  # of one warp, a multiprocessor


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
def _key(
    step, total, query0, number, argmax_ptr, documents, winner_size, magic, shift, base, LEAN: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """(query * winner size + query token, row of the table) of a chunk of a program's winners; row -1: none."""
    at = step + tl.arange(0, CHUNK)
    inside = at < total
    query = query0 + divide(at, magic, shift)
    token = at - divide(at, magic, shift) * winner_size
    cell = (query.to(tl.int64) * documents + number) * winner_size + token
    place = winner_of(tl.load(argmax_ptr + cell, mask=inside, other=-1), LEAN)
    return query * winner_size + token, tl.where(inside & (place >= 0), base + place, -1)


@triton.jit
def _share(first_document, queries, blocks, per_block, document_size, start_ptr, winner_size, RAGGED: tl.constexpr):
    """A program's document, block, first query, winners, and the table's row of the document's first token."""
    number = first_document + tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    query0 = block * per_block
    total = tl.maximum(tl.minimum(queries - query0, per_block), 0) * winner_size
    base = (number - first_document) * document_size
    if RAGGED:
        base = tl.maximum(tl.load(start_ptr + number), 0).to(tl.int32)
    return number, block, query0, total, base


@triton.jit(
    do_not_specialize=[
        "first_document", "queries", "documents", "winner_size", "blocks", "per_block", "document_size", "magic", "shift"
    ]
)  # fmt: skip
def _count_kernel(
    argmax_ptr, start_ptr, table_ptr, first_document, queries, documents, winner_size, blocks, per_block, document_size, magic,
    shift, LEAN: tl.constexpr, RAGGED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    number, block, query0, total, base = _share(
        first_document, queries, blocks, per_block, document_size, start_ptr, winner_size, RAGGED
    )
    for step in range(0, total, CHUNK):
        _, row = _key(step, total, query0, number, argmax_ptr, documents, winner_size, magic, shift, base, LEAN, CHUNK)
        # One place on: after the cumulative sum an entry holds what lies before it.
        tl.atomic_add(table_ptr + 1 + row.to(tl.int64) * blocks + block, 1, mask=row >= 0, sem="relaxed")


@triton.jit(
    do_not_specialize=[
        "first_document", "queries", "documents", "winner_size", "blocks", "per_block", "document_size", "magic", "shift"
    ]
)  # fmt: skip
def _place_kernel(
    argmax_ptr, start_ptr, table_ptr, list_ptr, first_document, queries, documents, winner_size, blocks, per_block,
    document_size, magic, shift, LEAN: tl.constexpr, RAGGED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    number, block, query0, total, base = _share(
        first_document, queries, blocks, per_block, document_size, start_ptr, winner_size, RAGGED
    )
    mine = tl.arange(0, CHUNK)
    source, row = _key(0, total, query0, number, argmax_ptr, documents, winner_size, magic, shift, base, LEAN, CHUNK)
    for step in range(0, total, CHUNK):
        next_source, next_row = _key(
            step + CHUNK, total, query0, number, argmax_ptr, documents, winner_size, magic, shift, base, LEAN, CHUNK
        )
        # Down a column: the keys a winner (a lane) is compared with lie in its own registers. Equal ones before it count 1,
        # those after it CHUNK: one sum for both.
        order = tl.where(mine[:, None] < mine[None, :], 1, tl.where(mine[:, None] > mine[None, :], CHUNK, 0))
        equal = tl.sum(tl.where(row[:, None] == row[None, :], order, 0), 0)
        before = equal % CHUNK
        entry = table_ptr + row.to(tl.int64) * blocks + block
        # Only this program uses these entries, but any of its threads: past the first cache, with a barrier between chunks.
        place = tl.load(entry, mask=row >= 0, other=0, cache_modifier=".cg") + before
        tl.store(list_ptr + place, source, mask=row >= 0)
        tl.debug_barrier()
        tl.store(entry, place + 1, mask=(row >= 0) & (equal < CHUNK))
        tl.debug_barrier()
        source = next_source
        row = next_row


@dataclass(frozen=True)
class Grid:
    """Lists of some documents' tokens: row r's are `list[ends[r * blocks - 1] : ends[(r + 1) * blocks - 1]]` (from 0 for r = 0)."""

    list: Tensor
    ends: Tensor
    blocks: int


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
        room: bytes that places may take, where more than one a row are wanted.
    """

    def __init__(self, argmax: Tensor, starts: Tensor | None, rows: int, most: int, room: int) -> None:
        queries, _, winner_size = argmax.shape
        self._argmax, self._starts, self._rows = argmax, starts, rows
        table = rows if starts is not None else rows * most
        self._blocks, self._per_block = shares(queries, most, winner_size, argmax.device, max(1, room // (4 * table)))
        self._ends = empty((table * self._blocks + 1,), torch.int32, argmax.device)
        self._list = empty((queries * most * winner_size,), torch.int32, argmax.device)

    def build(self, first: int, count: int) -> Grid:
        """Lists of documents `first .. first + count`; what was built before is overwritten."""
        argmax, starts = self._argmax, self._starts
        queries, documents, winner_size = argmax.shape
        shape = (first, queries, documents, winner_size, self._blocks, self._per_block, self._rows, *divisor(winner_size))
        kinds = {"LEAN": argmax.dtype == torch.int16, "RAGGED": starts is not None}
        begin = argmax if starts is None else starts
        grid = count * self._blocks
        call(torch.Tensor.zero_, self._ends)
        launch(_count_kernel, grid, argmax, begin, self._ends, *shape, CHUNK=COUNT_CHUNK, warps=4, **kinds)
        call(_accumulate, self._ends)
        launch(_place_kernel, grid, argmax, begin, self._ends, self._list, *shape, CHUNK=PLACE_CHUNK, warps=1, **kinds)
        return Grid(self._list, self._ends, self._blocks)


def _accumulate(counts: Tensor) -> None:
    torch.cumsum(counts, 0, dtype=torch.int32, out=counts)


def sorted_entries(rows: Tensor, count: int) -> Grid:
    """Lists of places in the flat `rows` (destination of each entry, at or beyond `count`: none), stable, by torch's sort."""
    keys, order = torch.sort(rows, stable=True)
    ends = torch.searchsorted(keys, torch.arange(count, device=rows.device, dtype=rows.dtype), right=True)
    return Grid(order, ends.to(torch.int64), 1)
