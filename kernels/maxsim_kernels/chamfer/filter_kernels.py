"""The Triton kernels behind `nearest.py` up to the filters; its docstring says what they compute and why that is exact.

Rows of both clouds are numbered one after the other, p then q, each padded to whole groups of rows; `row_q` is where q begins.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maxsim_kernels.gpu.tile_ops import FLOAT, best_along, keep_nan, nothing, slots

LAST = tl.constexpr(2**63 - 1)


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _sampled(cloud_ptr, count, lane, D: tl.constexpr, SAMPLE: tl.constexpr):
    """Coordinates of some points of a cloud, evenly spaced; halved, 0 where not finite, and which are finite."""
    row = (tl.arange(0, SAMPLE).to(tl.int64) * count) // SAMPLE
    inside = (row >= 0)[:, None] & (lane < D)[None, :]
    x = tl.load(cloud_ptr + row[:, None] * D + lane[None, :], mask=inside, other=float("inf")).to(tl.float32) * 0.5
    return tl.where(_finite(x), x, 0.0), _finite(x)


@triton.jit(do_not_specialize=["count_p", "count_q"])
def bounds_kernel(
    p_ptr, q_ptr, centre_ptr, bound_ptr, count_p, count_q,
    D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """A centre, and of each program the farthest that a coordinate lies from it; NaN and infinity are passed over.

    Every program finds the same centre from the same few points: to share one would take another launch.
    """
    lane = tl.arange(0, LANES)
    of_p, known_p = _sampled(p_ptr, count_p, lane, D, SAMPLE)
    of_q, known_q = _sampled(q_ptr, count_q, lane, D, SAMPLE)
    known = tl.sum(known_p.to(tl.float32) + known_q.to(tl.float32), 0)
    centre = tl.sum(of_p + of_q, 0) / tl.maximum(known, 1.0) * 2.0
    centre = tl.where(_finite(centre), centre, 0.0)
    most = tl.zeros([ROWS, LANES], tl.float32)
    tiles_p = tl.cdiv(count_p, ROWS)
    for tile in range(tl.program_id(0), tiles_p + tl.cdiv(count_q, ROWS), tl.num_programs(0)):
        from_q = tile >= tiles_p
        row = (tile - tl.where(from_q, tiles_p, 0)) * ROWS + tl.arange(0, ROWS)
        inside = (row < tl.where(from_q, count_q, count_p))[:, None] & (lane < D)[None, :]
        at = tl.where(from_q, q_ptr, p_ptr) + row.to(tl.int64)[:, None] * D + lane[None, :]
        x = tl.load(at, mask=inside, other=float("inf")).to(tl.float32)
        most = tl.maximum(most, tl.where(_finite(x), tl.abs(x - centre[None, :]), 0.0))
    tl.store(bound_ptr + tl.program_id(0), tl.max(tl.max(most, 0), 0))
    if tl.program_id(0) == 0:
        tl.store(centre_ptr + lane, centre)


@triton.jit(do_not_specialize=["count_p", "count_q", "row_q", "bounds"])
def features_kernel(
    p_ptr, q_ptr, centre_ptr, bound_ptr, feature_ptr, bias_ptr, key_ptr, done_ptr, count_p, count_q, row_q, bounds,
    D: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
    BOUNDS: tl.constexpr,
):  # fmt: skip
    """Features and biases `-|y|^2 / 2` of centred, scaled points (-inf where a row is only padding); resets each row's key."""
    if tl.program_id(0) == 0:
        tl.store(done_ptr, 0)  # for `winners_kernel`
    lane = tl.arange(0, LANES)
    centre = tl.load(centre_ptr + lane)
    at = tl.arange(0, BOUNDS)
    most = tl.max(tl.load(bound_ptr + at, mask=at < bounds, other=0.0), 0)  # below 2^(exponent - 126)
    exponent = most.to(tl.int32, bitcast=True) >> 23
    usable = (exponent >= 127 - 48) & (exponent <= 127 + 58)
    scale = tl.where(usable, (253 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    scale = tl.where(most == 0.0, 1.0, scale)

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
    tl.store(key_ptr + row, tl.full([ROWS], LAST, tl.int64))
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


@triton.jit
def _assignment(groups_p, groups_q, row_q, tiles_p, tiles_q, splits_p, splits_q):
    """What a program of a filter does: split, group within the launch, first tile and end, and the first row of its targets."""
    number = tl.program_id(0)
    from_q = number >= groups_p * splits_p
    number -= tl.where(from_q, groups_p * splits_p, 0)
    groups = tl.where(from_q, tl.maximum(groups_q, 1), tl.maximum(groups_p, 1))
    tiles = tl.where(from_q, tiles_p, tiles_q)
    share = tl.cdiv(tiles, tl.where(from_q, splits_q, splits_p))
    split = number // groups
    begin = split * share
    place = number % groups + tl.where(from_q, groups_p, 0)
    return split, place, begin, tl.minimum(begin + share, tiles), tl.where(from_q, 0, row_q)


@triton.jit
def _target_rows(target, start, WIDTH: tl.constexpr, DESCRIPTOR: tl.constexpr, TILE: tl.constexpr):
    """Features of a tile of targets `[TILE, WIDTH]`."""
    if DESCRIPTOR:
        rows = target.load([start, 0])
    else:
        row = (start + tl.arange(0, TILE)).to(tl.int64)
        rows = tl.load(target + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
    return rows


@triton.jit(
    do_not_specialize=["first_group", "groups_p", "groups_q", "row_q", "tiles_p", "tiles_q", "splits_p", "splits_q", "rows"]
)
def chunks_kernel(
    target_desc, feature_ptr, maxima_ptr, best_ptr,
    first_group, groups_p, groups_q, row_q, tiles_p, tiles_q, splits_p, splits_q, rows,
    D: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, DESCRIPTOR: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Split features: largest score of each source in each chunk of targets, and in each split of the chunks."""
    split, place, begin, end, targets = _assignment(groups_p, groups_q, row_q, tiles_p, tiles_q, splits_p, splits_q)
    lane = tl.arange(0, ROWS)
    sources = _source_rows(feature_ptr, (first_group + place) * ROWS + lane, D, WIDTH, True, PIECES)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    to = maxima_ptr + first_tile(place, groups_p, tiles_p, tiles_q) * (ROWS * PARTS)
    to = to + lane[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    for tile in tl.range(begin, end, num_stages=STAGES):
        cells = tl.dot(sources, _target_rows(target_desc, targets + tile * TILE, WIDTH, DESCRIPTOR, TILE).T)
        here = tl.reduce(tl.reshape(cells, [ROWS, PARTS, TILE // PARTS]), 2, keep_nan)
        tl.store(to + (tl.full([], 0, tl.int64) + tile) * (ROWS * PARTS), here)
        best = tl.maximum(best, tl.max(here, 1))  # the best number: NaN is passed over
    tl.store(best_ptr + split.to(tl.int64) * rows + place * ROWS + lane, best)


@triton.jit
def _two_rows(here):
    """Maxima `[ROWS, SLOTS]` in FP16, two rows in an int32 `[ROWS / 2, SLOTS]`: rows r and r + 8 of 16, which one thread holds.

    A thread then has one word to store, and the words of a warp are neighbours: nothing moves between threads.
    """
    ROWS: tl.constexpr = here.shape[0]
    SLOTS: tl.constexpr = here.shape[1]
    bits = here.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    pairs = tl.permute(tl.reshape(bits, [ROWS // 16, 2, 8, SLOTS]), (0, 2, 3, 1))
    first, second = tl.split(pairs)
    return tl.reshape((first & 0xFFFF) | (second << 16), [ROWS // 2, SLOTS])


@triton.jit(
    do_not_specialize=["first_group", "groups_p", "groups_q", "row_q", "tiles_p", "tiles_q", "splits_p", "splits_q", "rows"]
)
def slots_kernel(
    target_desc, feature_ptr, bias_ptr, maxima_ptr, best_ptr,
    first_group, groups_p, groups_q, row_q, tiles_p, tiles_q, splits_p, splits_q, rows,
    D: tl.constexpr, WIDTH: tl.constexpr, DESCRIPTOR: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Plain features: largest score of each source in each slot of targets (`tile_ops.slots`), and in each split of the tiles.

    Two tiles of sources share each tile of targets, which is then loaded once for both.
    """
    split, place, begin, end, targets = _assignment(groups_p, groups_q, row_q, tiles_p, tiles_q, splits_p, splits_q)
    HALF: tl.constexpr = ROWS // 2
    WORDS: tl.constexpr = HALF * SLOTS  # of a tile
    lane = tl.arange(0, HALF)
    row = (first_group + place) * ROWS + lane
    sources0 = _source_rows(feature_ptr, row, D, WIDTH, False, 1.0)
    sources1 = _source_rows(feature_ptr, row + HALF, D, WIDTH, False, 1.0)
    best0 = nothing(HALF, TILE, FLOAT)
    best1 = nothing(HALF, TILE, FLOAT)
    word = tl.arange(0, HALF // 2)[:, None] * SLOTS + tl.arange(0, SLOTS)[None, :]
    to = maxima_ptr + (first_tile(place, groups_p, tiles_p, tiles_q) + begin) * WORDS
    column = tl.arange(0, TILE)
    next_bias = tl.load(bias_ptr + targets + begin * TILE + column, mask=(column >= 0) & (begin < end), other=0.0)
    for tile in tl.range(begin, end, num_stages=STAGES):
        bias = next_bias
        following = tl.multiple_of(targets + tl.minimum(tile + 1, end - 1) * TILE, TILE)
        next_bias = tl.load(bias_ptr + following + column)
        tokens = _target_rows(target_desc, targets + tile * TILE, WIDTH, DESCRIPTOR, TILE)
        cells0 = tl.dot(sources0, tokens.T)
        cells1 = tl.dot(sources1, tokens.T)
        here0 = best_along(slots(cells0 + bias[None, :]), 2, FLOAT)
        here1 = best_along(slots(cells1 + bias[None, :]), 2, FLOAT)
        tl.store(to + word, _two_rows(here0))
        tl.store(to + (WORDS // 2 + word), _two_rows(here1))
        best0 = tl.maximum(best0, here0)  # the best number: NaN is passed over
        best1 = tl.maximum(best1, here1)
        to += WORDS
    out = best_ptr + split.to(tl.int64) * rows + place * ROWS + lane
    tl.store(out, tl.max(best0, 1))
    tl.store(out + HALF, tl.max(best1, 1))


@triton.jit
def first_tile(place, groups_p, tiles_p, tiles_q):
    """Where the maxima of a launch's group `place` begin, in tiles: they lie group by group, tile by tile."""
    wide = tl.full([], 0, tl.int64)
    of_p = wide + tl.minimum(place, groups_p)
    return of_p * tiles_q + (wide + tl.maximum(place - groups_p, 0)) * tiles_p
