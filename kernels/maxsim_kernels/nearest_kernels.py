"""The Triton kernels behind `nearest.py`, in the order in which they run; its docstring says what they compute and why that is exact.

Rows of both clouds are numbered one after the other, p then q, each padded to whole groups of rows; `row_q` is where q begins.
"""
# mypy: disable-error-code="no-untyped-def, attr-defined"
# ruff: noqa: PLR0124

from __future__ import annotations

import triton
import triton.language as tl

from maxsim_kernels.tile_ops import keep_nan

_LAST = tl.constexpr(2**63 - 1)
_NO_CODE = tl.constexpr(2**31 - 1)
TINY = tl.constexpr(2.0**-32)


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _range_of(cloud_ptr, low, high, count, step, D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Smallest and largest finite coordinate seen by this program."""
    lane = tl.arange(0, LANES)
    for first in range(tl.program_id(0) * ROWS, count, step):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (lane < D)[None, :]
        x = tl.load(cloud_ptr + row.to(tl.int64)[:, None] * D + lane[None, :], mask=inside, other=float("inf")).to(tl.float32)
        low = tl.minimum(low, tl.min(tl.where(_finite(x), x, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(_finite(x), x, float("-inf")), 0))
    return low, high


@triton.jit(do_not_specialize=["count_p", "count_q"])
def bounds_kernel(
    p_ptr, q_ptr, bound_ptr, count_p, count_q,
    D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Smallest and largest coordinates of what each program saw, `[BLOCKS, 2, LANES]`; NaN and infinity are passed over."""
    low = tl.full([LANES], float("inf"), tl.float32)
    high = tl.full([LANES], float("-inf"), tl.float32)
    low, high = _range_of(p_ptr, low, high, count_p, BLOCKS * ROWS, D, LANES, ROWS)
    low, high = _range_of(q_ptr, low, high, count_q, BLOCKS * ROWS, D, LANES, ROWS)
    at = bound_ptr + tl.program_id(0) * (2 * LANES) + tl.arange(0, LANES)
    tl.store(at, low)
    tl.store(at + LANES, high)


@triton.jit(do_not_specialize=["count_p", "count_q", "row_q"])
def features_kernel(
    p_ptr, q_ptr, bound_ptr, feature_ptr, bias_ptr, count_p, count_q, row_q,
    D: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Features and `-|y|^2 / 2` of centred, scaled points; -inf where a row is only padding."""
    lane = tl.arange(0, LANES)
    low = tl.full([LANES], float("inf"), tl.float32)
    high = tl.full([LANES], float("-inf"), tl.float32)
    for block in range(0, BLOCKS, STEP):
        at = bound_ptr + (block + tl.arange(0, STEP))[:, None] * (2 * LANES) + lane[None, :]
        low = tl.minimum(low, tl.min(tl.load(at), 0))
        high = tl.maximum(high, tl.max(tl.load(at + LANES), 0))
    centre = tl.where(low <= high, low * 0.5 + high * 0.5, 0.0)
    half = tl.max(tl.where(low <= high, high * 0.5 - low * 0.5, 0.0), 0)
    # The centre lies between low and high, so no coordinate is further from it than twice `half` < 2^(exponent - 126).
    exponent = half.to(tl.int32, bitcast=True) >> 23
    usable = (exponent >= 127 - 48) & (exponent <= 127 + 58)
    scale = tl.where(usable, (252 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    scale = tl.where(half == 0.0, 1.0, scale)

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    from_q = tl.program_id(0) * ROWS >= row_q
    point = row - tl.where(from_q, row_q, 0)
    there = point < tl.where(from_q, count_q, count_p)
    cloud = tl.where(from_q, q_ptr, p_ptr)
    inside = there[:, None] & (lane < D)[None, :]
    x = tl.load(cloud + point.to(tl.int64)[:, None] * D + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    x = (x - centre[None, :]) * scale
    x = tl.where(inside, tl.where(tl.abs(x) < 1.5, x, float("nan")), 0.0)
    bias = -0.5 * tl.sum(x * x, 1)
    tl.store(bias_ptr + row, tl.where(there, bias, float("-inf")))
    high_part = x.to(tl.float16)
    to = feature_ptr + row.to(tl.int64)[:, None] * WIDTH
    if SPLIT:
        low_part = (x - high_part.to(tl.float32)).to(tl.float16)
        column = (lane < D)[None, :] & (row >= 0)[:, None]
        tl.store(to + lane[None, :], high_part, mask=column)
        tl.store(to + (D + lane)[None, :], low_part, mask=column)
        tl.store(to + (2 * D + lane)[None, :], high_part, mask=column)
        piece = bias * PIECES
        first = piece.to(tl.float16)
        second = (piece - first.to(tl.float32)).to(tl.float16)
        third = (piece - first.to(tl.float32) - second.to(tl.float32)).to(tl.float16)
        first = tl.where(there, first, float("-inf"))  # a row that is only padding never wins
        rest = 3 * D + tl.arange(0, WIDTH)
        zero = tl.where((rest == 3 * D)[None, :], first[:, None], 0.0)
        zero = tl.where((rest == 3 * D + 1)[None, :], second[:, None], zero)
        zero = tl.where((rest == 3 * D + 2)[None, :], third[:, None], zero)
        tl.store(to + rest[None, :], zero.to(tl.float16), mask=(rest < WIDTH)[None, :] & (row >= 0)[:, None])
    else:
        tl.store(to + lane[None, :], high_part)


@triton.jit
def _source_rows(feature_ptr, row, D: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, PIECES: tl.constexpr):
    """Features of sources `[ROWS, WIDTH]`, read from those of targets."""
    column = tl.arange(0, WIDTH)
    place = row.to(tl.int64)[:, None] * WIDTH
    if SPLIT:
        held = tl.where(column < D, column, column - D)  # (hi, lo, hi) as (hi, hi, lo)
        rows = tl.load(feature_ptr + place + held[None, :], mask=(column < 3 * D)[None, :], other=0.0)
        constant = (column >= 3 * D) & (column < 3 * D + 3)
        rows = tl.where(constant[None, :], 1.0 / PIECES, rows).to(tl.float16)
    else:
        rows = tl.load(feature_ptr + place + column[None, :])
    return rows


@triton.jit(
    do_not_specialize=["first_group", "groups_p", "groups_q", "row_q", "tiles_p", "tiles_q", "splits_p", "splits_q", "rows"]
)
def filter_kernel(
    target_desc, feature_ptr, bias_ptr, maxima_ptr, best_ptr,
    first_group, groups_p, groups_q, row_q, tiles_p, tiles_q, splits_p, splits_q, rows,
    D: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, PIECES: tl.constexpr, DESCRIPTOR: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Largest score of each source in each chunk of targets, and in each split of the chunks."""
    number = tl.program_id(0)
    from_q = number >= groups_p * splits_p
    number -= tl.where(from_q, groups_p * splits_p, 0)
    groups = tl.where(from_q, tl.maximum(groups_q, 1), tl.maximum(groups_p, 1))
    tiles = tl.where(from_q, tiles_p, tiles_q)
    targets = tl.where(from_q, 0, row_q)
    share = tl.cdiv(tiles, tl.where(from_q, splits_q, splits_p))
    split = number // groups
    place = number % groups + tl.where(from_q, groups_p, 0)
    begin = split * share
    end = tl.minimum(begin + share, tiles)
    lane = tl.arange(0, ROWS)
    row = (first_group + place) * ROWS + lane
    rows_held = _source_rows(feature_ptr, row, D, WIDTH, SPLIT, PIECES)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    column = tl.arange(0, TILE)
    to = maxima_ptr + _first_tile(place, groups_p, tiles_p, tiles_q) * (ROWS * PARTS)
    to = to + lane[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    next_bias = tl.load(bias_ptr + targets + begin * TILE + column, mask=(column >= 0) & (begin < end), other=0.0)
    for tile in tl.range(begin, end, num_stages=STAGES):
        start = targets + tile * TILE
        bias = next_bias
        if not SPLIT:
            next_bias = tl.load(bias_ptr + start + TILE + column, mask=(column >= 0) & (tile + 1 < end), other=0.0)
        if DESCRIPTOR:
            tokens = target_desc.load([start, 0])
        else:
            inner = tl.arange(0, WIDTH)
            tokens = tl.load(feature_ptr + (start + column).to(tl.int64)[:, None] * WIDTH + inner[None, :])
        cells = tl.dot(rows_held, tokens.T)
        if not SPLIT:
            cells = cells + bias[None, :]
        here = tl.reduce(tl.reshape(cells, [ROWS, PARTS, TILE // PARTS]), 2, keep_nan)
        tl.store(to + (tl.full([], 0, tl.int64) + tile) * (ROWS * PARTS), here)
        best = tl.maximum(best, tl.max(here, 1))  # the best number: NaN is passed over
    tl.store(best_ptr + split.to(tl.int64) * rows + place * ROWS + lane, best)


@triton.jit
def _first_tile(place, groups_p, tiles_p, tiles_q):
    """Chunk maxima lie group by group, `[tiles, ROWS, PARTS]` each: where those of a launch's group `place` begin, in tiles."""
    wide = tl.full([], 0, tl.int64)
    of_p = wide + tl.minimum(place, groups_p)
    return of_p * tiles_q + (wide + tl.maximum(place - groups_p, 0)) * tiles_p


@triton.jit
def _threshold(best, bias, ALPHA: tl.constexpr, FLOOR: tl.constexpr, D: tl.constexpr):
    """The score that a chunk must reach to be scanned (nearest.py); -inf where nothing is known."""
    ROOT: tl.constexpr = D**0.5
    norm2 = bias * -2.0
    norm = tl.sqrt(norm2)
    coarse = (norm * ROOT + D * 0.5) * ALPHA + (norm + ROOT) * FLOOR + TINY
    reach2 = tl.maximum(norm2 - 2.0 * best + 2.0 * coarse, 0.0)
    reach = norm + tl.sqrt(reach2)
    error = (norm * reach + reach * reach * 0.5) * ALPHA + (norm + reach) * FLOOR + TINY
    threshold = best - 2.0 * error - reach2 * ((D + 4) * 2.0**-23)
    return tl.where(threshold == threshold, threshold, float("-inf"))


@triton.jit
def _scan(
    source, target_ptr, first, count, D: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, SCAN: tl.constexpr
):  # fmt: skip
    """The nearest target of a chunk: its squared distance's bits (-1: NaN, the least) above its index, so that ties go to the first."""
    best = tl.full([SCAN], _LAST, tl.int64)
    for start in range(0, CHUNK, SCAN):
        target = first + start + tl.arange(0, SCAN)
        there = target < count
        at = target_ptr + target.to(tl.int64) * D
        if D <= 8:
            distance = tl.zeros([SCAN], tl.float32)
            for c in tl.static_range(D):
                delta = tl.load(at + c, mask=there, other=0.0).to(tl.float32) - tl.load(source + c).to(tl.float32)
                distance += delta * delta
        else:
            lane = tl.arange(0, LANES)
            x = tl.load(source + lane, mask=lane < D, other=0.0).to(tl.float32)
            y = tl.load(at[:, None] + lane[None, :], mask=there[:, None] & (lane < D)[None, :], other=0.0).to(tl.float32)
            delta = y - x[None, :]
            distance = tl.sum(delta * delta, 1)
        bits = tl.where(distance == distance, distance.to(tl.int32, bitcast=True), -1)
        key = (bits.to(tl.int64) << 32) | target.to(tl.int64)
        best = tl.minimum(best, tl.where(there, key, _LAST))
    return tl.min(best, 0)


@triton.jit(
    do_not_specialize=[
        "count_p", "count_q", "first_group", "groups_p", "row_q", "tiles_p", "tiles_q", "splits_p", "splits_q", "rows",
    ]
)  # fmt: skip
def refine_kernel(
    p_ptr, q_ptr, bias_ptr, maxima_ptr, best_ptr, partial_ptr, nearest_ptr,
    count_p, count_q, first_group, groups_p, row_q, tiles_p, tiles_q, splits_p, splits_q, rows,
    D: tl.constexpr, LANES: tl.constexpr, ALPHA: tl.constexpr, FLOOR: tl.constexpr, WINNERS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """Scan the chunks that may hold the nearest; leaves sums of distances, divided by their count, and the nearest points."""
    number = tl.program_id(0)
    place = number * ROWS // GROUP
    from_q = place >= groups_p
    lane = tl.arange(0, ROWS)
    row = first_group * GROUP + number * ROWS + lane
    point = row - tl.where(from_q, row_q, 0)
    sources = tl.where(from_q, count_q, count_p)
    count = tl.where(from_q, count_p, count_q)
    tiles = tl.where(from_q, tiles_p, tiles_q)
    splits = tl.where(from_q, splits_q, splits_p)
    source_ptr = tl.where(from_q, q_ptr, p_ptr)
    target_ptr = tl.where(from_q, p_ptr, q_ptr)
    there = point < sources

    best = tl.full([ROWS], float("-inf"), tl.float32)
    for first in range(0, splits, 32):
        split = first + tl.arange(0, 32)
        at = split.to(tl.int64)[:, None] * rows + (number * ROWS + lane)[None, :]
        held = tl.load(best_ptr + at, mask=(split < splits)[:, None] & there[None, :], other=float("-inf"))
        best = tl.maximum(best, tl.max(held, 0))
    threshold = _threshold(best, tl.load(bias_ptr + row, mask=there, other=0.0), ALPHA, FLOOR, D)

    keys = tl.full([ROWS], _LAST, tl.int64)
    step = tl.arange(0, CHUNKS)
    code_of = step[:, None] * ROWS + lane[None, :]
    held_ptr = maxima_ptr + _first_tile(place, groups_p, tiles_p, tiles_q) * (GROUP * PARTS)
    held_ptr = held_ptr + (number * ROWS % GROUP + lane)[None, :] * PARTS + (step % PARTS)[:, None]
    for first in range(0, tiles * PARTS, CHUNKS):
        inside = (first + step < tiles * PARTS)[:, None] & there[None, :]
        tile = ((first + step) // PARTS).to(tl.int64)
        held = tl.load(held_ptr + tile[:, None] * (GROUP * PARTS), mask=inside, other=float("-inf"))
        wanted = ((held >= threshold[None, :]) | (held != held)) & inside
        codes = tl.where(wanted, code_of, _NO_CODE)
        code = tl.min(tl.min(codes, 0), 0)
        while code < _NO_CODE:
            which = code % ROWS
            source = source_ptr + (tl.full([], 0, tl.int64) + first_group * GROUP + number * ROWS + which) * D
            source -= tl.where(from_q, row_q, 0).to(tl.int64) * D
            key = _scan(source, target_ptr, (first + code // ROWS) * CHUNK, count, D, LANES, CHUNK, SCAN)
            keys = tl.where(lane == which, tl.minimum(keys, key), keys)
            codes = tl.where(codes <= code, _NO_CODE, codes)
            code = tl.min(tl.min(codes, 0), 0)

    bits = (keys >> 32).to(tl.int32)
    distance = tl.where(bits < 0, float("nan"), bits.to(tl.float32, bitcast=True))
    distance = tl.where(there, distance, 0.0).to(tl.float64)
    tl.store(partial_ptr + first_group * (GROUP // ROWS) + number, tl.sum(distance, 0) / sources.to(tl.float64))
    if WINNERS:
        winner = (keys & 0xFFFFFFFF).to(tl.int32) + tl.where(from_q, 0, count_p)
        tl.store(nearest_ptr + point + tl.where(from_q, count_p, 0), winner, mask=there)


@triton.jit(do_not_specialize=["count"])
def finish_kernel(partial_ptr, out_ptr, count, CELLS: tl.constexpr):
    """The sum of what `refine_kernel` left, in a fixed order."""
    total = tl.zeros([CELLS], tl.float64)
    for first in range(0, count, CELLS):
        at = first + tl.arange(0, CELLS)
        total += tl.load(partial_ptr + at, mask=at < count, other=0.0)
    tl.store(out_ptr, tl.sum(total, 0).to(tl.float32))


@triton.jit
def _lower_bound(sorted_ptr, wanted, entries, steps):
    """For each wanted value the first of the sorted entries that is not smaller."""
    low = wanted * 0
    high = low + entries
    for _ in range(steps):
        open = low < high
        middle = low + (high - low) // 2
        smaller = tl.load(sorted_ptr + middle, mask=open, other=0) < wanted
        low = tl.where(open & smaller, middle + 1, low)
        high = tl.where(open & (smaller == 0), middle, high)
    return low


@triton.jit
def _points(cloud_ptr, point, inside, D: tl.constexpr, LANES: tl.constexpr):
    """Points `[ROWS, LANES]` in FP32, zero where not `inside`."""
    lane = tl.arange(0, LANES)
    at = cloud_ptr + point.to(tl.int64)[:, None] * D + lane[None, :]
    return tl.load(at, mask=inside[:, None] & (lane < D)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["count_p", "count_q", "blocks_p", "entries", "steps", "order_p"])
def gradient_kernel(
    grad_ptr, p_ptr, q_ptr, nearest_ptr, sorted_ptr, order_ptr, grad_p_ptr, grad_q_ptr,
    count_p, count_q, blocks_p, entries, steps, order_p,
    D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, LIST: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Each row's difference to its nearest, and the differences to all rows that chose it, in ascending order."""
    number = tl.program_id(0)
    of_q = number >= blocks_p
    row = (number - tl.where(of_q, blocks_p, 0)) * ROWS + tl.arange(0, ROWS)
    count = tl.where(of_q, count_q, count_p)
    others = tl.where(of_q, count_p, count_q)
    cloud = tl.where(of_q, q_ptr, p_ptr)
    other = tl.where(of_q, p_ptr, q_ptr)
    there = row < count
    name = row + tl.where(of_q, count_p, 0)  # in the numbering of both clouds
    grad = tl.load(grad_ptr).to(tl.float32) * 2.0
    mine = _points(cloud, row, there, D, LANES)
    nearest = tl.load(nearest_ptr + name, mask=there, other=0) - tl.where(of_q, 0, count_p)
    total = (mine - _points(other, nearest, there, D, LANES)) * (grad / count.to(tl.float32))

    # Everybody whose nearest this row is, in ascending order.
    begin = _lower_bound(sorted_ptr, name, entries, steps)
    size = tl.where(there, _lower_bound(sorted_ptr, name + 1, entries, steps) - begin, 0)
    origin = tl.where(of_q, 0, order_p)
    longest = tl.max(size, 0)
    listed = tl.zeros([ROWS, LANES], tl.float32)
    for place in range(0, tl.minimum(longest, SHORT)):
        inside = place < size
        member = (tl.load(order_ptr + begin + place, mask=inside, other=0) - origin).to(tl.int32)
        listed += tl.where(inside[:, None], mine - _points(other, member, inside, D, LANES), 0.0)
    if longest > SHORT:
        for which in range(ROWS):
            chosen = tl.arange(0, ROWS) == which
            first = tl.sum(tl.where(chosen, begin, 0), 0)
            last = first + tl.sum(tl.where(chosen, size, 0), 0)
            if last - first > SHORT:
                point = tl.sum(tl.where(chosen[:, None], mine, 0.0), 0)
                sums = tl.zeros([LIST, LANES], tl.float32)
                for start in range(first + SHORT, last, LIST):
                    entry = start + tl.arange(0, LIST)
                    inside = entry < last
                    member = (tl.load(order_ptr + entry, mask=inside, other=0) - origin).to(tl.int32)
                    sums += tl.where(inside[:, None], point[None, :] - _points(other, member, inside, D, LANES), 0.0)
                listed += tl.where(chosen[:, None], tl.sum(sums, 0)[None, :], 0.0)
    total += listed * (grad / others.to(tl.float32))
    out = tl.where(of_q, grad_q_ptr, grad_p_ptr)
    lane = tl.arange(0, LANES)
    to = out + row.to(tl.int64)[:, None] * D + lane[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & (lane < D)[None, :])
