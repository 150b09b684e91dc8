"""Triton kernels of the gradients of MaxSim from saved winners (paper section 'Inverse-Grid Update', Alg. 'bwd').

- `_rows_kernel`: a program owns some query tokens and walks over documents. It gathers winners' rows into dQ (no collisions), adds
  its query rows to dD by float atomics, or both at once ("unified").
- `_lists_kernel`: a program owns a document token and sums the query rows of its list (`inverse_grid.py`): no atomics. Lists that
  would keep one program busy long after the others are cut into pieces; `_pieces_kernel` adds their sums up, in order.
- `_own_kernel`: documents that only one query sees (candidates of each query, pairs): who chose which token is a 0/1 matrix, its
  product with the query's rows is the whole gradient. One write per row, no atomics, no sort.
- `_sum_kernel`: parts of dQ, of programs that share a query token's documents, added in one order and rounded.

All accumulate in FP32 and round once. Rows that nobody chose get exact zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maxsim_kernels.gpu.backward.inverse_grid import divide, list_of, row_at, winner_of


@triton.jit
def _winners(
    first, high, document, token, query, argmax_ptr, grad_ptr, documents, winner_size, LEAN: tl.constexpr
):  # fmt: skip
    """Winner and gradient of each (document, query token) of one turn; -1 and 0 where there is none."""
    at = first + document
    cell = query.to(tl.int64) * documents + at
    there = at < high
    place = tl.load(argmax_ptr + cell * winner_size + token, mask=there & (token < winner_size), other=-1)
    place = winner_of(place, LEAN)
    return place, tl.load(grad_ptr + cell, mask=there & (place >= 0), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["documents", "winner_size", "document_size", "token_blocks", "splits", "columns", "room"])
def _rows_kernel(
    grad_ptr, argmax_ptr, query_ptr, query_start_ptr, document_ptr, start_ptr, out_ptr, sums_ptr,
    documents, winner_size, document_size, token_blocks, splits, columns, room, width,
    stride_qn, stride_qt, stride_qd, stride_m, stride_n, stride_t, stride_d,
    OWNED: tl.constexpr, LEAN: tl.constexpr, PACKED_QUERIES: tl.constexpr, APART: tl.constexpr, RAGGED: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, TOKENS: tl.constexpr, TURN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) % columns
    worker = tl.program_id(0) // columns
    split = worker % splits
    block = worker // splits
    query = tl.full([], 0, tl.int64) + block // token_blocks
    row = tl.arange(0, TURN * TOKENS)  # TURN documents at once, TOKENS query tokens each
    token = (block % token_blocks) * TOKENS + row % TOKENS
    document = row // TOKENS
    inner = column * WIDTH + tl.arange(0, WIDTH)
    share = tl.cdiv(documents, splits)
    low = split * share
    high = tl.minimum(low + share, documents)
    mine = query * stride_qn
    start = tl.full([], 0, tl.int64)
    if PACKED_QUERIES:
        start = tl.maximum(tl.load(query_start_ptr + query).to(tl.int64), 0)
        mine = start * stride_qt
    if SCATTER:
        # A query may have fewer tokens than `winner_size`: rows beyond have no winner, and exist only as far as the buffer does.
        exists = token < winner_size
        if PACKED_QUERIES:
            exists = exists & (token < room - start)
        rows = tl.load(
            query_ptr + mine + token.to(tl.int64)[:, None] * stride_qt + inner.to(tl.int64)[None, :] * stride_qd,
            mask=exists[:, None] & (inner < width)[None, :],
            other=0.0,
        ).to(tl.float32)
    total = tl.zeros([TURN * TOKENS, WIDTH], tl.float32)
    seen = tl.zeros([TURN * TOKENS], tl.int32)
    next_place, next_weight = _winners(low, high, document, token, query, argmax_ptr, grad_ptr, documents, winner_size, LEAN)
    for first in range(low, high, TURN):
        place, weight = next_place, next_weight
        next_place, next_weight = _winners(
            first + TURN, high, document, token, query, argmax_ptr, grad_ptr, documents, winner_size, LEAN
        )
        won = place >= 0
        number = tl.full([], 0, tl.int64) + tl.minimum(first + document, documents - 1)
        if OWNED:
            number = number + query * documents
        begin = number * document_size
        if RAGGED:
            begin = tl.maximum(tl.load(start_ptr + number).to(tl.int64), 0)  # as the forward reads it
            # Offsets that break their promise may leave any winner: none beyond the buffer (`document_size`) is used.
            won = won & (place < document_size - begin)
        if GATHER:
            seen = tl.maximum(seen, won.to(tl.int32))
            source = begin + place
            source = source * stride_t
            if not RAGGED:
                source = (
                    query * stride_m + (tl.full([], 0, tl.int64) + first + document) * stride_n + place.to(tl.int64) * stride_t
                )
            found = tl.load(
                document_ptr + source[:, None] + inner.to(tl.int64)[None, :] * stride_d,
                mask=won[:, None] & (inner < width)[None, :],
                other=0.0,
            )
            total += found.to(tl.float32) * weight[:, None]
        if SCATTER:
            target = (begin + place) * width
            tl.atomic_add(
                sums_ptr + target[:, None] + inner[None, :],
                rows * weight[:, None],
                mask=won[:, None] & (inner < width)[None, :],
                sem="relaxed",
            )
    if GATHER:
        out = tl.sum(tl.reshape(total, [TURN, TOKENS, WIDTH]), 0)
        chosen = tl.max(tl.reshape(seen, [TURN, TOKENS]), 0) > 0
        token = (block % token_blocks) * TOKENS + tl.arange(0, TOKENS)
        to = query * winner_size + token
        kept = token < winner_size
        if PACKED_QUERIES and not APART:
            to = start + token
            kept = kept & chosen & (token < room - start)  # a row beyond the query is another query's
        to = ((tl.full([], 0, tl.int64) + split) * room + to) * width
        tl.store(out_ptr + to[:, None] + inner[None, :], out, mask=kept[:, None] & (inner < width)[None, :])


@triton.jit(
    do_not_specialize=[
        "first_row", "first_document", "last_document", "queries", "query_room", "documents", "winner_size", "document_size",
        "blocks", "columns", "magic", "shift", "apart", "marks", "rows", "room",
    ]
)  # fmt: skip
def _lists_kernel(
    grad_ptr, list_ptr, end_ptr, query_ptr, query_start_ptr, owner_ptr, out_ptr,
    first_row, first_document, last_document, queries, query_room, documents, winner_size, document_size, blocks, columns, magic,
    shift, width, stride_qn, stride_qt, stride_qd, piece_ptr, piece_row_ptr, apart, marks, rows, room,
    FLAT: tl.constexpr, WEIGHTED: tl.constexpr, ADD: tl.constexpr, PACKED_QUERIES: tl.constexpr, RAGGED: tl.constexpr,
    SPLIT: tl.constexpr, FIXED: tl.constexpr, ENTRIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) % columns
    worker = tl.program_id(0) // columns
    inner = column * WIDTH + tl.arange(0, WIDTH)
    row = worker
    mine = True  # the row's sum is this program's to write
    if SPLIT:
        # The first programs are the marks': most have nothing to do, the others have the longest work of all.
        row = worker - marks
        mine = row >= 0
        piece = row < 0  # the program sums a piece of a long list
        if piece:
            row = row_at(worker.to(tl.int64) * apart, end_ptr, rows, blocks)
            piece = row < rows
            row = tl.minimum(row, rows - 1)
    place = row // document_size
    begin, end = list_of(row, place, end_ptr, blocks, document_size, room, FIXED)
    if SPLIT:
        size = end - begin
        if mine:
            mine = size < 2 * apart
            end = tl.where(mine, end, begin)
        else:
            pieces = tl.maximum(size // apart, 1)
            number = worker - ((begin.to(tl.int64) + (apart - 1)) // apart).to(tl.int32)
            piece = piece & (size >= 2 * apart) & (number < pieces) & (number >= 0)
            share = size // pieces
            more = size - share * pieces  # pieces that have one entry more
            begin += number * share + tl.minimum(number, more)
            end = tl.where(piece, begin + share + tl.where(number < more, 1, 0), begin)
            # One program adds the pieces up: the first mark's.
            tl.store(piece_row_ptr + worker, tl.where(piece & (number == 0), row, -1), mask=column == 0)
    document = first_row // document_size + place
    if RAGGED:
        document = tl.load(owner_ptr + row)
        mine = (document >= first_document) & (document < last_document) & mine
    at = begin + tl.arange(0, ENTRIES)
    next_entry = tl.load(list_ptr + at, mask=at < end, other=0)
    total = tl.zeros([ENTRIES, WIDTH], tl.float32)
    for first in range(begin, end, ENTRIES):
        entry = next_entry
        there = first + tl.arange(0, ENTRIES) < end
        after = first + ENTRIES + tl.arange(0, ENTRIES)
        next_entry = tl.load(list_ptr + after, mask=after < end, other=0)
        if FLAT:
            # A place in the flat winners `[Nq, N, W]`, of any size.
            cell = entry // winner_size
            token = entry % winner_size
            query = cell // documents
        else:
            query = divide(entry, magic, shift)
            token = entry - query * winner_size
            cell = query.to(tl.int64) * documents + document
        if RAGGED and not FLAT:
            # Documents that overlap against their promise share rows of the lists, and leave places that nobody wrote.
            there = there & (entry >= 0) & (query < queries)
        source = query.to(tl.int64) * stride_qn
        if PACKED_QUERIES:
            source = tl.maximum(tl.load(query_start_ptr + query, mask=there, other=0).to(tl.int64), 0)
            there = there & (token < query_room - source)  # a winner beyond its query, where offsets break their promise
            source = source * stride_qt
        source += token.to(tl.int64) * stride_qt
        found = tl.load(
            query_ptr + source[:, None] + inner.to(tl.int64)[None, :] * stride_qd,
            mask=there[:, None] & (inner < width)[None, :],
            other=0.0,
        ).to(tl.float32)
        if WEIGHTED:
            found = found * tl.load(grad_ptr + cell, mask=there, other=0.0).to(tl.float32)[:, None]
        total += found
    to = out_ptr + (tl.full([], 0, tl.int64) + first_row + row) * width + inner
    summed = tl.sum(total, 0)
    if SPLIT:
        tl.store(piece_ptr + worker * width + inner, summed, mask=(inner < width) & piece)
    if ADD:
        summed += tl.load(to, mask=(inner < width) & mine, other=0.0)
    tl.store(to, summed, mask=(inner < width) & mine)


@triton.jit(do_not_specialize=["first_row", "document_size", "blocks", "columns", "apart", "room"])
def _pieces_kernel(
    piece_ptr, piece_row_ptr, end_ptr, out_ptr, first_row, document_size, blocks, columns, apart, room, width,
    FIXED: tl.constexpr, ADD: tl.constexpr, TURN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) % columns
    mark = tl.program_id(0) // columns
    row = tl.load(piece_row_ptr + mark)
    if row >= 0:
        inner = column * WIDTH + tl.arange(0, WIDTH)
        begin, end = list_of(row, row // document_size, end_ptr, blocks, document_size, room, FIXED)
        pieces = ((end - begin) // apart).to(tl.int32)
        total = tl.zeros([TURN, WIDTH], tl.float32)
        for first in range(0, pieces, TURN):
            number = first + tl.arange(0, TURN)
            total += tl.load(
                piece_ptr + (mark + number)[:, None] * width + inner[None, :],
                mask=(number < pieces)[:, None] & (inner < width)[None, :],
                other=0.0,
            )
        to = out_ptr + (tl.full([], 0, tl.int64) + first_row + row) * width + inner
        summed = tl.sum(total, 0)
        if ADD:
            summed += tl.load(to, mask=inner < width, other=0.0)
        tl.store(to, summed, mask=inner < width)


@triton.jit(do_not_specialize=["documents", "winner_size", "document_size", "tiles", "columns", "room", "query_room", "count"])
def _own_kernel(
    grad_ptr, argmax_ptr, query_ptr, query_start_ptr, start_ptr, out_ptr,
    documents, winner_size, document_size, tiles, columns, room, query_room, count, width, stride_qn, stride_qt, stride_qd,
    LEAN: tl.constexpr, PACKED_QUERIES: tl.constexpr, RAGGED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) % columns
    worker = tl.program_id(0) // columns
    number = tl.full([], 0, tl.int64) + worker // tiles
    query = number // documents
    inner = column * WIDTH + tl.arange(0, WIDTH)
    begin = number * document_size
    size = document_size
    if RAGGED:
        begin = tl.maximum(tl.load(start_ptr + number).to(tl.int64), 0)
        after = tl.maximum(tl.load(start_ptr + number + 1, mask=number + 1 < count, other=0).to(tl.int64), 0)
        # Offsets that break their promise must not write outside either.
        size = tl.maximum(tl.minimum(tl.where(number + 1 < count, after, room), room) - begin, 0).to(tl.int32)
    mine = query * stride_qn
    if PACKED_QUERIES:
        mine = tl.maximum(tl.load(query_start_ptr + query).to(tl.int64), 0)
        query_tokens = query_room - mine
        mine = mine * stride_qt
    weight = tl.load(grad_ptr + number).to(tl.float32)
    for first in range((worker % tiles) * TOKENS, size, tiles * TOKENS):
        place = first + tl.arange(0, TOKENS)
        total = tl.zeros([TOKENS, WIDTH], tl.float32)
        hits = tl.zeros([TOKENS], tl.int32)
        for row in range(0, winner_size, ROWS):
            token = row + tl.arange(0, ROWS)
            chosen = tl.load(argmax_ptr + number * winner_size + token, mask=token < winner_size, other=-1)
            chosen = winner_of(chosen, LEAN)
            if PACKED_QUERIES:
                chosen = tl.where(token < query_tokens, chosen, -1)  # as in `_lists_kernel`
            rows = tl.load(
                query_ptr + mine + token.to(tl.int64)[:, None] * stride_qt + inner.to(tl.int64)[None, :] * stride_qd,
                mask=(chosen >= 0)[:, None] & (inner < width)[None, :],
                other=0.0,
            )
            same = place[:, None] == chosen[None, :]
            hits += tl.sum(same.to(tl.int32), 1)
            total = tl.dot(same.to(rows.dtype), rows, total, input_precision="ieee")
        total = tl.where((hits > 0)[:, None], total * weight, 0.0)
        to = out_ptr + (begin + place)[:, None] * width + inner[None, :]
        tl.store(to, total, mask=(place < size)[:, None] & (inner < width)[None, :])


@triton.jit(do_not_specialize=["size", "parts"])
def _sum_kernel(part_ptr, out_ptr, size, parts, BLOCK: tl.constexpr):
    """`out = parts.sum(0)`, of few parts, in the order of torch's sum: every fourth part, then the four."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    step = tl.full([], 0, tl.int64) + size
    total0 = tl.zeros([BLOCK], tl.float32)
    total1 = tl.zeros([BLOCK], tl.float32)
    total2 = tl.zeros([BLOCK], tl.float32)
    total3 = tl.zeros([BLOCK], tl.float32)
    # Four names: sums that change places each turn would begin as one value, and Triton would take them for unchanged.
    for first in range(0, parts, 4):
        here = part_ptr + first * step + at
        total0 += tl.load(here, mask=inside, other=0.0)
        total1 += tl.load(here + step, mask=inside & (first + 1 < parts), other=0.0)
        total2 += tl.load(here + 2 * step, mask=inside & (first + 2 < parts), other=0.0)
        total3 += tl.load(here + 3 * step, mask=inside & (first + 3 < parts), other=0.0)
    tl.store(out_ptr + at, total0 + total1 + total2 + total3, mask=inside)
