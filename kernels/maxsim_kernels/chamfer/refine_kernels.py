"""The Triton kernels behind `nearest.py` after the filters: refine, sum, gradient. Its docstring says why the outcome is exact."""
# ruff: noqa: PLR0124

from __future__ import annotations

import triton
import triton.language as tl

from maxsim_kernels.chamfer.filter_kernels import LAST, first_tile
from maxsim_kernels.gpu.tile_ops import keep_nan

_NO_CODE = tl.constexpr(2**31 - 1)
_TWO_LEAST = tl.constexpr(-0x03FF0400)  # -inf in FP16, twice
TINY = tl.constexpr(2.0**-32)


@triton.jit
def _rows_of(words):
    """What `filter_kernels._two_rows` packed, `[8, COUNT]` for 16 rows, as FP32 `[16, COUNT]`."""
    COUNT: tl.constexpr = words.shape[1]
    both = tl.join(words.to(tl.int16).to(tl.float16, bitcast=True), (words >> 16).to(tl.int16).to(tl.float16, bitcast=True))
    return tl.reshape(tl.permute(both, (2, 0, 1)), [16, COUNT]).to(tl.float32)


@triton.jit
def _threshold(best, bias, ALPHA: tl.constexpr, BETA: tl.constexpr, FLOOR: tl.constexpr, D: tl.constexpr):
    """The score that a part must reach to be scanned (nearest.py); -inf where nothing is known."""
    ROOT: tl.constexpr = D**0.5
    norm2 = bias * -2.0
    norm = tl.sqrt(norm2)
    coarse = norm * (ALPHA * ROOT) + BETA * D * 0.5 + (norm + ROOT) * FLOOR + TINY
    reach2 = tl.maximum(norm2 - 2.0 * best + 2.0 * coarse, 0.0)
    reach = norm + tl.sqrt(reach2)
    error = norm * reach * ALPHA + reach * reach * (BETA * 0.5) + (norm + reach) * FLOOR + TINY
    threshold = best - 2.0 * error - reach2 * ((D + 4) * 2.0**-23)
    return tl.where(threshold == threshold, threshold, float("-inf"))


@triton.jit
def _member(place, part, SPLIT: tl.constexpr, PER: tl.constexpr):
    """The place in its tile of target number `place` of the chunk or slot `part`."""
    if SPLIT:
        target = part * PER + place
    else:
        target = (part // 4) * (PER * 4) + (place // 2) * 8 + (part % 4) * 2 + place % 2
    return target


@triton.jit
def _scan(
    source, target_ptr, tile, part, count, D: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
    PER: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """The key of a part's nearest target: its squared distance's bits (NaN: -1, the least) above its index: ties go to the first."""
    best = tl.full([SCAN], LAST, tl.int64)
    for start in range(0, PER, SCAN):
        target = tile * TILE + _member(start + tl.arange(0, SCAN), part, SPLIT, PER)
        there = target < count
        at = target_ptr + target.to(tl.int64) * D
        if D <= 8:
            distance = tl.zeros([SCAN], tl.float32)
            for c in tl.static_range(D):
                delta = tl.load(at + c, mask=there, other=0.0).to(tl.float32) - tl.load(source + c).to(tl.float32)
                distance = tl.fma(delta, delta, distance)  # one rounding, whatever the compiler may contract
        else:
            # A point's pieces of 32 coordinates stay in the same few threads, whose sums are then exchanged in fewer steps.
            INNER: tl.constexpr = 32 if LANES > 32 else LANES
            column = tl.arange(0, LANES // INNER)[:, None, None] * INNER + tl.arange(0, INNER)[None, None, :]
            x = tl.load(source + column, mask=column < D, other=0.0).to(tl.float32)
            y = tl.load(at[None, :, None] + column, mask=there[None, :, None] & (column < D), other=0.0).to(tl.float32)
            delta = y - x
            distance = tl.sum(tl.sum(delta * delta, 0), 1)
        bits = tl.where(distance == distance, distance.to(tl.int32, bitcast=True), -1)
        key = (bits.to(tl.int64) << 32) | target.to(tl.int64)
        best = tl.minimum(best, tl.where(there, key, LAST))
    return tl.min(best, 0)


@triton.jit(
    do_not_specialize=[
        "count_p", "count_q", "first_group", "groups_p", "row_q", "tiles_p", "tiles_q", "splits_p", "splits_q", "rows", "pieces",
    ]
)  # fmt: skip
def refine_kernel(
    p_ptr, q_ptr, bias_ptr, maxima_ptr, best_ptr, key_ptr,
    count_p, count_q, first_group, groups_p, row_q, tiles_p, tiles_q, splits_p, splits_q, rows, pieces,
    D: tl.constexpr, LANES: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, FLOOR: tl.constexpr,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, LOOK: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """Scan the parts of tiles that may hold the nearest, and keep the least key of every row.

    A row's tiles are cut into `pieces` programs, whose keys meet in an atomic minimum: the same from every order.
    """
    number = tl.program_id(0) % (rows // ROWS)
    place = number * ROWS // GROUP
    from_q = place >= groups_p
    lane = tl.arange(0, ROWS)
    row = first_group * GROUP + number * ROWS + lane
    first_point = first_group * GROUP + number * ROWS - tl.where(from_q, row_q, 0)
    sources = tl.where(from_q, count_q, count_p)
    there = first_point + lane < sources
    count = tl.where(from_q, count_p, count_q)
    tiles = tl.where(from_q, tiles_p, tiles_q)
    share = tl.cdiv(tiles, pieces)
    begin = tl.program_id(0) // (rows // ROWS) * share
    end = tl.minimum(begin + share, tiles)
    splits = tl.where(from_q, splits_q, splits_p)
    source_ptr = tl.where(from_q, q_ptr, p_ptr)
    target_ptr = tl.where(from_q, p_ptr, q_ptr)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    for first in range(0, splits, 32):
        split = first + tl.arange(0, 32)
        at = split.to(tl.int64)[:, None] * rows + (number * ROWS + lane)[None, :]
        held = tl.load(best_ptr + at, mask=(split < splits)[:, None] & there[None, :], other=float("-inf"))
        best = tl.maximum(best, tl.max(held, 0))
    threshold = _threshold(best, tl.load(bias_ptr + row, mask=there, other=0.0), ALPHA, BETA, FLOOR, D)

    keys = tl.full([ROWS], LAST, tl.int64)
    step = tl.arange(0, LOOK * PARTS)
    code_of = lane[:, None] + step[None, :] * ROWS
    part = (step % PARTS)[None, :]
    inner = number * ROWS % GROUP
    # Words of a tile, and of a row (slots: of two rows, 8 apart). Padding holds -inf, below the least threshold; NaN is above any.
    WORDS: tl.constexpr = GROUP * PARTS if SPLIT else GROUP // 2 * PARTS
    LEAST: tl.constexpr = -3.4e38 if SPLIT else -65504.0
    NOTHING: tl.constexpr = float("-inf") if SPLIT else _TWO_LEAST
    held_row = inner + lane
    if not SPLIT:
        held_row = inner // 2 + tl.arange(0, 8)
        threshold = threshold.to(tl.float16).to(tl.float32)  # rounded as the maxima were
    threshold = tl.where(there, tl.maximum(threshold, LEAST), float("inf"))
    held_ptr = maxima_ptr + first_tile(place, groups_p, tiles_p, tiles_q) * WORDS + (held_row[:, None] * PARTS + part)
    for first in range(begin, end, LOOK):
        tile = (first + step // PARTS)[None, :]
        held = tl.load(held_ptr + tile.to(tl.int64) * WORDS, mask=(tile < end) & (held_row >= 0)[:, None], other=NOTHING)
        if not SPLIT:
            held = _rows_of(held)
        wanted = (held < threshold[:, None]) == 0
        codes = tl.where(wanted, code_of, _NO_CODE)
        code = tl.min(tl.ravel(codes, can_reorder=True), 0)
        while code < _NO_CODE:
            which = code % ROWS
            # A row that is only padding comes here for NaN alone, and leaves no key.
            source = source_ptr + (tl.full([], 0, tl.int64) + tl.minimum(first_point + which, sources - 1)) * D
            chosen = code // ROWS
            key = _scan(
                source, target_ptr, first + chosen // PARTS, chosen % PARTS, count, D, LANES, SPLIT, TILE, TILE // PARTS, SCAN
            )
            keys = tl.where(lane == which, tl.minimum(keys, key), keys)
            codes = tl.where(codes <= code, _NO_CODE, codes)
            code = tl.min(tl.ravel(codes, can_reorder=True), 0)

    tl.atomic_min(key_ptr + row, keys, mask=there & (keys < LAST), sem="relaxed")


@triton.jit(do_not_specialize=["count_p", "count_q", "row_q"])
def winners_kernel(
    key_ptr, partial_ptr, done_ptr, nearest_ptr, out_ptr, count_p, count_q, row_q,
    WINNERS: tl.constexpr, ROWS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """The nearest points, and each program's sum of distances over their count; the last program done adds these in a fixed order."""
    number = tl.program_id(0)
    row = number * ROWS + tl.arange(0, ROWS)
    from_q = row >= row_q
    point = row - tl.where(from_q, row_q, 0)
    sources = tl.where(from_q, count_q, count_p)
    there = point < sources
    keys = tl.load(key_ptr + row, mask=there, other=0)
    bits = (keys >> 32).to(tl.int32)
    distance = tl.where(bits < 0, float("nan"), bits.to(tl.float32, bitcast=True)).to(tl.float64)
    of_p = tl.sum(tl.where(from_q, 0.0, distance), 0) / count_p.to(tl.float64)
    of_q = tl.sum(tl.where(from_q, distance, 0.0), 0) / count_q.to(tl.float64)
    if WINNERS:
        winner = (keys & 0xFFFFFFFF).to(tl.int32) + tl.where(from_q, 0, count_p)
        tl.store(nearest_ptr + point + tl.where(from_q, count_p, 0), winner, mask=there)
    tl.store(partial_ptr + number, of_p + of_q)
    tl.debug_barrier()  # this program's sum is written before it counts as done; sums are read past the first cache
    programs = tl.num_programs(0)
    if tl.atomic_add(done_ptr, 1, sem="acq_rel") == programs - 1:
        tl.debug_barrier()
        total = tl.zeros([CELLS], tl.float64)
        for first in range(0, programs, CELLS):
            at = first + tl.arange(0, CELLS)
            total += tl.load(partial_ptr + at, mask=at < programs, other=0.0, cache_modifier=".cg")
        tl.store(out_ptr, tl.sum(total, 0).to(tl.float32))


@triton.jit
def _points(cloud_ptr, point, inside, D: tl.constexpr, LANES: tl.constexpr):
    """Points `[ROWS, LANES]` in FP32, zero where not `inside`."""
    lane = tl.arange(0, LANES)
    at = cloud_ptr + point.to(tl.int64)[:, None] * D + lane[None, :]
    return tl.load(at, mask=inside[:, None] & (lane < D)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["entries"])
def rank_kernel(nearest_ptr, count_ptr, rank_ptr, entries, ROWS: tl.constexpr):
    """How many entries chose each point, and every entry's place among those that chose the same point (any order will do)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < entries
    chosen = tl.load(nearest_ptr + row, mask=inside, other=0)
    tl.store(rank_ptr + row, tl.atomic_add(count_ptr + chosen, 1, mask=inside, sem="relaxed"), mask=inside)


@triton.jit(do_not_specialize=["entries"])
def begin_kernel(count_ptr, begin_ptr, entries, ROWS: tl.constexpr):
    """Where each point's list begins. Programs take room for their lists in any order; how much is taken stands behind the counts."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    size = tl.load(count_ptr + row, mask=row < entries, other=0)
    taken = tl.atomic_add(count_ptr + entries, tl.sum(size, 0), sem="relaxed")
    tl.store(begin_ptr + row, taken + tl.cumsum(size, 0) - size, mask=row < entries)


@triton.jit(do_not_specialize=["entries"])
def place_kernel(nearest_ptr, begin_ptr, rank_ptr, list_ptr, entries, ROWS: tl.constexpr):
    """Write every entry into the list of the point that it chose."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < entries
    chosen = tl.load(nearest_ptr + row, mask=inside, other=0)
    place = tl.load(begin_ptr + chosen, mask=inside, other=0) + tl.load(rank_ptr + row, mask=inside, other=0)
    tl.store(list_ptr + place, row, mask=inside)


@triton.jit
def _unit(top, drop, bits):
    """The exponent of the power of two by which the sum of up to 2^bits differences, from `-drop` to `top`, fits 62 bits."""
    exponent = tl.maximum(top, drop).to(tl.int32, bitcast=True) >> 23  # they are below 2^(exponent - 126)
    return tl.where((top < float("inf")) & (drop < float("inf")), 188 - bits - exponent, 0)


@triton.jit
def _power(exponent):
    """2^exponent, an FP64 number put together from its bits."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _whole(delta, unit):
    """Differences as integers, in units of 2^-unit."""
    return (tl.where(tl.abs(delta) < float("inf"), delta, 0.0).to(tl.float64) * _power(unit)).to(tl.int64)


@triton.jit
def _added(sums, top, drop, unit):
    """The sum of differences in FP32; where one is infinite or NaN, what FP32 additions would leave."""
    known = (top < float("inf")) & (drop < float("inf"))
    return tl.where(known, (sums.to(tl.float64) * _power(-unit)).to(tl.float32), top - drop)


@triton.jit(do_not_specialize=["count_p", "count_q", "blocks_p", "bits"])
def gradient_kernel(
    grad_ptr, p_ptr, q_ptr, nearest_ptr, count_ptr, begin_ptr, list_ptr, grad_p_ptr, grad_q_ptr, count_p, count_q, blocks_p, bits,
    D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, LIST: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Gradients: each row's difference to its nearest, and the differences to all rows that chose it.

    Lists have no order, and integers need none: the largest differences of a row (`top`, and `drop` of their negatives) give it a
    unit, in which all of its differences are cut to integers, whose sum has up to 62 bits, and added exactly.
    """
    number = tl.program_id(0)
    of_q = number >= blocks_p
    row = (number - tl.where(of_q, blocks_p, 0)) * ROWS + tl.arange(0, ROWS)
    count = tl.where(of_q, count_q, count_p)
    others = tl.where(of_q, count_p, count_q)
    cloud = tl.where(of_q, q_ptr, p_ptr)
    other = tl.where(of_q, p_ptr, q_ptr)
    origin = tl.where(of_q, 0, count_p)  # of the other cloud, in the numbering of both
    there = row < count
    name = row + tl.where(of_q, count_p, 0)
    grad = tl.load(grad_ptr).to(tl.float32) * 2.0
    begin = tl.load(begin_ptr + name, mask=there, other=0)
    size = tl.load(count_ptr + name, mask=there, other=0)
    mine = _points(cloud, row, there, D, LANES)
    nearest = tl.load(nearest_ptr + name, mask=there, other=0) - origin
    total = (mine - _points(other, nearest, there, D, LANES)) * (grad / count.to(tl.float32))

    short = tl.where(size <= SHORT, size, 0)
    longest = tl.max(short, 0)
    top = tl.zeros([ROWS, LANES], tl.float32)
    drop = tl.zeros([ROWS, LANES], tl.float32)
    for place in range(0, longest):
        inside = place < short
        member = tl.load(list_ptr + begin + place, mask=inside, other=0) - origin
        delta = tl.where(inside[:, None], mine - _points(other, member, inside, D, LANES), 0.0)
        top = keep_nan(top, delta)
        drop = keep_nan(drop, -delta)
    unit = _unit(top, drop, bits)
    sums = tl.zeros([ROWS, LANES], tl.int64)
    for place in range(0, longest):
        inside = place < short
        member = tl.load(list_ptr + begin + place, mask=inside, other=0) - origin
        sums += _whole(tl.where(inside[:, None], mine - _points(other, member, inside, D, LANES), 0.0), unit)
    listed = _added(sums, top, drop, unit)

    # Long lists, one after the other, by the whole program.
    place_of = tl.arange(0, ROWS)
    which = tl.min(tl.where(size > SHORT, place_of, ROWS), 0)
    while which < ROWS:
        first = tl.sum(tl.where(place_of == which, begin, 0), 0)
        last = first + tl.sum(tl.where(place_of == which, size, 0), 0)
        point = tl.sum(tl.where((place_of == which)[:, None], mine, 0.0), 0)
        tops = tl.zeros([LIST, LANES], tl.float32)
        drops = tl.zeros([LIST, LANES], tl.float32)
        for start in range(first, last, LIST):
            entry = start + tl.arange(0, LIST)
            member = tl.load(list_ptr + entry, mask=entry < last, other=0) - origin
            delta = tl.where((entry < last)[:, None], point[None, :] - _points(other, member, entry < last, D, LANES), 0.0)
            tops = keep_nan(tops, delta)
            drops = keep_nan(drops, -delta)
        most = tl.reduce(tops, 0, keep_nan)
        least = tl.reduce(drops, 0, keep_nan)
        unit_of = _unit(most, least, bits)
        parts = tl.zeros([LIST, LANES], tl.int64)
        for start in range(first, last, LIST):
            entry = start + tl.arange(0, LIST)
            member = tl.load(list_ptr + entry, mask=entry < last, other=0) - origin
            delta = tl.where((entry < last)[:, None], point[None, :] - _points(other, member, entry < last, D, LANES), 0.0)
            parts += _whole(delta, unit_of[None, :])
        sum_of = _added(tl.sum(parts, 0), most, least, unit_of)
        listed = tl.where((place_of == which)[:, None], sum_of[None, :], listed)
        which = tl.min(tl.where((size > SHORT) & (place_of > which), place_of, ROWS), 0)

    total += listed * (grad / others.to(tl.float32))
    out = tl.where(of_q, grad_q_ptr, grad_p_ptr)
    lane = tl.arange(0, LANES)
    to = out + row.to(tl.int64)[:, None] * D + lane[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & (lane < D)[None, :])
