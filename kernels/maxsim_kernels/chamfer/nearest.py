"""Nearest points of two clouds, both ways, and the Chamfer gradient, without the `[N, M]` matrix (paper appendix 'Chamfer').

Filter and refine. The nearest of a source x has the largest score `x.y - |y|^2 / 2`, a matrix product; but a product of rounded numbers
cannot tell close distances apart. So it only selects: its maximum over each small part of the targets is kept, and every part whose
maximum comes near the row's best is scanned with FP32 coordinate differences of the inputs. The outcome is that of a plain FP32 scan.

Both clouds lie behind each other in one padded list of rows, p then q, so that every kernel does both directions in one launch.
Coordinates are centred (by the mean of a few points of both clouds: any centre will do) and scaled by one power of two into
[-1, 1]. FP16 features of a target y:
- d <= 20, "split": `(hi, lo, hi)` with `hi = fp16(y)`, `lo = fp16(y - hi)`, then `-|y|^2 / 2` in three FP16 pieces; a source has
  `(hi, hi, lo)` and a constant for the pieces. The product is then the whole score, with an error near FP32's. Parts are chunks of
  consecutive targets, and their maxima FP32.
- else "plain": `fp16(y)`, and the product is added to the FP32 bias `-|y|^2 / 2`. A scan reads whole points, so parts are small: the
  16 cells that a thread holds of a row of 64 targets (`tile_ops.slots`), whose maximum needs no other thread. It is stored in FP16.
  Rounding never swaps two numbers, so what reaches a threshold still does once both are rounded: the bound below needs no more room.

Error of a score, with u = 2^-24, F the features' width, everything in scaled units (`score_error`):
- centring rounds each coordinate by u, the FP32 sum behind the bias by (d + 2) u of itself, and adding it by u of the score;
- split drops lo.lo' (2^-22 |x||y| as |lo| <= 2^-11 |hi|) and rounds either lo (2^-22 each); plain rounds x and y to FP16, by 2^-11
  each: 2^-10 |x||y| (the product of both roundings is among the 8 below), but the bias by nothing more;
- FP16 has a smallest spacing 2^-24: at most 2^-25 a coordinate more, hence `floor * (|x| + |y|)` with floor = sqrt(d) 2^-24, and
  `TINY` for its square and for what three pieces of the bias leave;
- matrix units align the products of a step, and what they are added to, to the largest and cut them there: under 2^-22 of the sum of
  all magnitudes for each of the F products and the accumulator's own cuts together.
In all: `alpha |x||y| + beta |y|^2 / 2 + floor (|x| + |y|) + TINY`, with beta = (F + d + 8) 2^-22, and alpha = beta (plain: 2^-10 more).

Which y can matter? Let b be the best score and e0 the bound for |y| <= sqrt(d). The target k that scored b is at squared distance
`D_k <= reach^2 = |x|^2 - 2 b + 2 e0`, and so is the true nearest: both have |y| <= |x| + reach. With e the bound for that |y|, the true
nearest scores at least `b - 2 e`; FP32 distances may differ by (d + 4) 2^-23 of reach^2 more. What is below that is never scanned.
NaN and infinite coordinates become NaN features, NaN maxima, and parts that every row scans; so do clouds so wide (or so tiny) that
squares of their differences could overflow (underflow).

Several programs scan parts for one row. Each finding is a key, the distance's bits above the target's index, and the least key of all
is the nearest, the first one on ties: an atomic minimum gives the same from every order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import triton
from torch import Tensor

from maxsim_kernels.chamfer.filter_kernels import bounds_kernel, chunks_kernel, features_kernel, slots_kernel
from maxsim_kernels.chamfer.refine_kernels import (
    begin_kernel,
    gradient_kernel,
    place_kernel,
    rank_kernel,
    refine_kernel,
    winners_kernel,
)
from maxsim_kernels.gpu.forward.tuning import Config
from maxsim_kernels.gpu.geometry import descriptor, hardware, has_descriptors, padded
from maxsim_kernels.gpu.launch import call, empty, launch, planned, record, signature
from maxsim_kernels.gpu.plans import ensure_context

# By whether features are split, and their width: rows of sources, targets a tile, warps, stages, programs a multiprocessor; `short`:
# targets that share a maximum, a chunk of a tile (split) or a slot. A tile has no more targets than a program has rows.
FILTERS: dict[tuple[bool, int], Config] = {
    (True, 16): Config(
        128, 128, 4, 3, 3, "H200", "bound by the maxima, one matrix step a tile; long chunks: few maxima", short=128
    ),
    (True, 32): Config(128, 128, 4, 3, 3, "untuned", "as 16", short=128),
    (True, 64): Config(128, 128, 4, 3, 3, "untuned", "as 16", short=128),
    (False, 32): Config(256, 64, 8, 3, 2, "untuned", "as 128", short=16),
    (False, 64): Config(256, 64, 8, 3, 2, "untuned", "as 128", short=16),
    (False, 128): Config(256, 64, 8, 3, 2, "H200", "bound by the matrix units; two programs fit: 0.9 of cuBLAS", short=16),
    (False, 256): Config(128, 64, 4, 2, 1, "untuned", "rows and tiles of 512 bytes leave room for small tiles", short=16),
}
# By whether features are split: bytes of maxima held at once; other memory is linear in the points. An H200, 50,000 points: d = 3 takes
# 0.725 ms in two slices (128 MB) and 0.674 in one, which needs 149 MB; d = 128 takes 2.70, 2.54, 2.54 and 2.58 with 64 to 512 MB and
# 2.35 in one slice of 600 MB: too many for 8%.
MAXIMA_BYTES = {True: 160 << 20, False: 128 << 20}
# By whether features are split: coordinates that a program of `bounds_kernel` reads at once. Its warps; its programs at most (every
# program of `features_kernel` reads what all of them found); points of a cloud that give the centre.
BOUNDS = {True: 1024, False: 4096}
BOUND_WARPS, BOUND_PROGRAMS, SAMPLE = 4, 1024, 16
# By whether features are split: rows of a program of `features_kernel`, and its warps.
FEATURES = {True: (64, 4), False: (32, 4)}
# By whether features are split: rows of a one-warp program (8 floats or 16 halves of a tile), maxima of a row looked at together,
# coordinates of targets compared at once with a row (d > 8).
REFINES = {True: (8, 64, 1024), False: (16, 64, 2048)}
REFINE_PROGRAMS, REFINE_LOOKS = 4096, 2  # programs that share the tiles, but each looks so many times at least
WINNER_ROWS, WINNER_CELLS, WINNER_WARPS = 256, 512, 4  # rows of a program, and sums that the last one adds at once
LIST_ROWS, LIST_WARPS = 256, 4  # of the kernels that make the lists
GRADIENT_ROWS, LIST_SHORT = 128, 8  # rows of a program at most; lists up to this long are added for all rows at once
# By whether features are split: coordinates of a program, and of a longer list, held at once, and warps.
GRADIENTS = {True: (1024, 1024, 4), False: (1024, 2048, 8)}

MOST_DIMENSIONS = 256
MOST_POINTS = 1 << 30
_SPLIT_DIMENSIONS = 20  # 3 d + 3 <= 64
_MOST_SPLITS = 64


def features_of(d: int) -> tuple[bool, int]:
    """Whether coordinates are split in two, and the width of the features."""
    return (True, padded(3 * d + 3)) if d <= _SPLIT_DIMENSIONS else (False, padded(d))


def score_error(d: int) -> tuple[float, float, float]:
    """`alpha`, `beta` and `floor` of the bound on a score's error (module docstring)."""
    split, width = features_of(d)
    beta = (width + d + 8) * 2.0**-22
    return beta + (0.0 if split else 2.0**-10), beta, math.sqrt(d) * 2.0**-24


@dataclass(frozen=True)
class _Shape:
    """Sizes that follow from two clouds and a row of `FILTERS`."""

    points: tuple[int, int]
    d: int
    config: Config
    groups: tuple[int, int]  # of `config.rows` sources each
    tiles: tuple[int, int]  # of each cloud as targets

    @property
    def parts(self) -> int:
        """How many maxima a row keeps of a tile, one of each part."""
        return self.config.tokens // self.config.short

    @property
    def split(self) -> bool:
        """Whether features are split, and maxima FP32 of chunks; else FP16 of slots."""
        return features_of(self.d)[0]

    @property
    def tile_words(self) -> int:
        """The maxima of a group of sources and a tile of targets, in words of four bytes."""
        return self.config.rows * self.parts // (1 if self.split else 2)

    @property
    def refine(self) -> tuple[int, int, int]:
        """Rows of a program of `refine_kernel`, tiles that it looks at together, and targets that it compares at once."""
        rows, maxima, cells = REFINES[self.split]
        scan = cells // (padded(self.d) if self.d > 8 else 1)
        return rows, max(1, maxima // self.parts), min(self.config.short, scan)

    def refine_pieces(self, rows: int) -> int:
        """Into how many programs of `refine_kernel` to cut the targets of `rows` sources."""
        wanted = REFINE_PROGRAMS * self.refine[0] // rows
        return max(1, min(wanted, max(self.tiles) // (self.refine[1] * REFINE_LOOKS)))

    @property
    def row_q(self) -> int:
        """The row where the second cloud begins."""
        return self.groups[0] * self.config.rows

    @property
    def rows(self) -> int:
        """Rows of both clouds, padding included."""
        return sum(self.groups) * self.config.rows


def _shape(p: Tensor, q: Tensor) -> _Shape:
    config = FILTERS[features_of(p.shape[1])]
    points = (p.shape[0], q.shape[0])
    groups = [triton.cdiv(count, config.rows) for count in points]
    tiles = [triton.cdiv(count, config.tokens) for count in points]
    return _Shape(points, p.shape[1], config, (groups[0], groups[1]), (tiles[0], tiles[1]))


def _slices(shape: _Shape, processors: int) -> list[tuple[int, int, int]]:
    """Runs of row groups whose maxima fit `MAXIMA_BYTES`: the first group, groups of p and groups of q."""
    (in_p, in_q), (tiles_p, tiles_q) = shape.groups, shape.tiles
    whole, longest = in_p * tiles_q + in_q * tiles_p, max(tiles_p, tiles_q)
    pieces = triton.cdiv(whole * shape.tile_words * 4, MAXIMA_BYTES[shape.split])
    room = max(triton.cdiv(whole, pieces), longest)
    if pieces > 1:  # as many groups as fill whole waves of programs, but no fewer than half
        most = room // longest
        choices = range(most, most // 2, -max(1, most // 32))
        room = min(choices, key=lambda groups: _splits(groups, 0, shape, processors)[2] / groups) * longest
    found, first = [], 0
    while first < in_p + in_q:
        of_p = max(0, min(in_p - first, room // tiles_q))
        left = room - of_p * tiles_q if first + of_p >= in_p else 0
        of_q = min(in_p + in_q - first - of_p, left // tiles_p)
        found.append((first, of_p, of_q))
        first += of_p + of_q
    return found


def _splits(of_p: int, of_q: int, shape: _Shape, processors: int) -> tuple[int, int, int]:
    """How many programs share the targets of each group of p, and of q: whole waves of programs with equal shares; and the cost."""
    tiles_p, tiles_q = shape.tiles
    longest = max(tiles_q if of_p else 1, tiles_p if of_q else 1)
    best, least = (1, 1, 1 << 62), float("inf")
    for pieces in range(1, min(longest, _MOST_SPLITS) + 1):
        share = triton.cdiv(longest, pieces)
        cut = (triton.cdiv(tiles_q, share) if of_p else 1, triton.cdiv(tiles_p, share) if of_q else 1)
        waves = triton.cdiv(of_p * cut[0] + of_q * cut[1], processors * shape.config.programs)
        cost = waves * (share + 3)  # a program loads its rows before its first tile
        if cost < least * 0.99:
            best, least = (*cut, cost), cost
    return best


class _Scratch:
    """One allocation cut into float32 regions of whole 256 bytes: allocating costs host time on every call."""

    def __init__(self, device: torch.device, **sizes: int) -> None:
        ends = list(accumulate(triton.cdiv(size, 64) * 64 for size in sizes.values()))
        held = empty((ends[-1],), torch.float32, device)
        self.parts = {name: held[end - triton.cdiv(size, 64) * 64 : end] for end, (name, size) in zip(ends, sizes.items())}

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name]


def _run(p: Tensor, q: Tensor, winners: bool) -> Any:
    device = p.device
    if device.type == "cuda":
        ensure_context(device.index or 0)
    # Triton launches on the current device, which need not be the tensors' one.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return _launch(p, q, winners)


def _launch(p: Tensor, q: Tensor, winners: bool) -> Any:
    capability, processors = hardware(p.device)
    shape = _shape(p, q)
    config, d, (count_p, count_q), row_q = shape.config, shape.d, shape.points, shape.row_q
    (split, width), lanes = features_of(d), padded(d, 4)
    weight = 2.0**14 / triton.next_power_of_2(d)  # brings |y|^2 / 2 <= d / 2 up to 2^13
    alpha, beta, floor = score_error(d)
    slices = [(*one, *_splits(one[1], one[2], shape, processors)[:2]) for one in _slices(shape, processors)]
    distance = empty((), torch.float32, p.device)
    nearest = empty((count_p + count_q,), torch.int32, p.device) if winners else distance
    features = empty((shape.rows, width), torch.float16, p.device)
    programs = triton.cdiv(shape.rows, WINNER_ROWS)
    scratch = _Scratch(
        p.device,
        centre=lanes,
        bound=BOUND_PROGRAMS,
        bias=shape.rows,
        keys=2 * shape.rows,  # int64
        sums=2 * programs,  # float64
        done=1,  # int32
        maxima=max(of_p * shape.tiles[1] + of_q * shape.tiles[0] for _, of_p, of_q, _, _ in slices) * shape.tile_words,
        best=max((of_p + of_q) * config.rows * max(cuts) for _, of_p, of_q, *cuts in slices),
    )
    keys, sums = scratch["keys"].view(torch.int64), scratch["sums"].view(torch.float64)
    done = scratch["done"].view(torch.int32)
    _launch_features(p, q, shape, scratch, features, (keys, done), weight)
    described = has_descriptors(capability)
    target = descriptor(features, shape.rows, width, width, [config.tokens, width]) if described else features
    refine_rows, look, scan = shape.refine
    maxima = scratch["maxima"] if split else scratch["maxima"].view(torch.int32)
    for first, of_p, of_q, splits_p, splits_q in slices:
        rows = (of_p + of_q) * config.rows
        cut = (row_q, *shape.tiles, splits_p, splits_q, rows)
        if split:
            launch(
                chunks_kernel, of_p * splits_p + of_q * splits_q,
                target, features, maxima, scratch["best"], first, of_p, of_q, *cut,
                D=d, WIDTH=width, PIECES=weight, DESCRIPTOR=described, ROWS=config.rows, TILE=config.tokens, PARTS=shape.parts,
                STAGES=config.stages, warps=config.warps,
            )  # fmt: skip
        else:
            launch(
                slots_kernel, of_p * splits_p + of_q * splits_q,
                target, features, scratch["bias"], maxima, scratch["best"], first, of_p, of_q, *cut,
                D=d, WIDTH=width, DESCRIPTOR=described, ROWS=config.rows, TILE=config.tokens, SLOTS=shape.parts,
                STAGES=config.stages, warps=config.warps,
            )  # fmt: skip
        pieces = shape.refine_pieces(rows)
        launch(
            refine_kernel, rows // refine_rows * pieces,
            p, q, scratch["bias"], maxima, scratch["best"], keys, count_p, count_q, first, of_p, *cut, pieces,
            D=d, LANES=lanes, ALPHA=alpha, BETA=beta, FLOOR=floor, SPLIT=split, GROUP=config.rows, ROWS=refine_rows,
            TILE=config.tokens, PARTS=shape.parts, LOOK=look, SCAN=scan, warps=1,
        )  # fmt: skip
    launch(
        winners_kernel, programs, keys, sums, done, nearest, distance, count_p, count_q, row_q,
        WINNERS=winners, ROWS=WINNER_ROWS, CELLS=WINNER_CELLS, warps=WINNER_WARPS,
    )  # fmt: skip
    return (distance, nearest) if winners else distance


def _launch_features(
    p: Tensor, q: Tensor, shape: _Shape, scratch: _Scratch, features: Tensor, cleared: tuple[Tensor, Tensor], weight: float
) -> None:
    """Make rows of features of both clouds, scaled by what they span; `cleared`: keys and counter, reset for later launches."""
    (split, width), lanes = features_of(shape.d), padded(shape.d, 4)
    count_p, count_q = shape.points
    rows = BOUNDS[split] // lanes
    bounds = min(BOUND_PROGRAMS, triton.cdiv(count_p, rows) + triton.cdiv(count_q, rows))
    launch(
        bounds_kernel, bounds, p, q, scratch["centre"], scratch["bound"], count_p, count_q,
        D=shape.d, LANES=lanes, ROWS=rows, SAMPLE=SAMPLE, warps=BOUND_WARPS,
    )  # fmt: skip
    rows, warps = FEATURES[split]
    rows = min(rows, shape.config.rows)
    launch(
        features_kernel, shape.rows // rows,
        p, q, scratch["centre"], scratch["bound"], features, scratch["bias"], *cleared, count_p, count_q, shape.row_q, bounds,
        D=shape.d, LANES=lanes, WIDTH=width, SPLIT=split, PIECES=weight, ROWS=rows, BOUNDS=BOUND_PROGRAMS, warps=warps,
    )  # fmt: skip


def forward(p: Tensor, q: Tensor, winners: bool) -> tuple[Tensor, Tensor | None]:
    """Chamfer distance of two clouds, and where asked for the nearest points.

    Args:
        p, q: `[N, d]` and `[M, d]`, fp16, bf16 or fp32, d <= 256, N + M <= 2^30, on one GPU (or CPU under Triton's interpreter).
        winners: return the nearest points too.

    Returns:
        A float32 scalar, and int32 `[N + M]`: the nearest point of each point of p, then of q, in the numbering of p followed by q.
    """
    p, q = p.contiguous(), q.contiguous()
    run = partial(_run, p, q, winners)
    out = run() if p.device.type != "cuda" else _replayed((p, q), p.device, run, "chamfer", winners)
    return out if winners else (out, None)


def _replayed(inputs: tuple[Tensor, ...], device: torch.device, run: Callable[[], Any], *flags: Hashable) -> Any:
    """What `run` launches for these inputs, by the recorded plan where there is one (`gpu/launch.py`)."""
    key = signature(inputs, *flags)
    plan = planned(key)
    return record(key, inputs, device, run) if plan is None else plan.run(inputs, device)


def _run_gradient(grad: Tensor, p: Tensor, q: Tensor, nearest: Tensor, need_p: bool, need_q: bool) -> tuple[Tensor, Tensor]:
    device, d, (count_p, count_q) = p.device, p.shape[1], (p.shape[0], q.shape[0])
    grads = [empty(tuple(one.shape) if need else (0,), one.dtype, device) for one, need in ((p, need_p), (q, need_q))]
    entries, lanes = count_p + count_q, padded(d, 4)
    counts = empty((entries + 1,), torch.int32, device)
    scratch = _Scratch(device, rank=entries, begin=entries, list=entries)
    rank, begin, members = (scratch[name].view(torch.int32) for name in ("rank", "begin", "list"))
    programs = triton.cdiv(entries, LIST_ROWS)
    cells, list_cells, warps = GRADIENTS[features_of(d)[0]]
    rows = min(GRADIENT_ROWS, cells // lanes)
    blocks_p = triton.cdiv(count_p, rows) if need_p else 0
    blocks_q = triton.cdiv(count_q, rows) if need_q else 0
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        call(torch.Tensor.zero_, counts)
        launch(rank_kernel, programs, nearest, counts, rank, entries, ROWS=LIST_ROWS, warps=LIST_WARPS)
        launch(begin_kernel, programs, counts, begin, entries, ROWS=LIST_ROWS, warps=LIST_WARPS)
        launch(place_kernel, programs, nearest, begin, rank, members, entries, ROWS=LIST_ROWS, warps=LIST_WARPS)
        launch(
            gradient_kernel, blocks_p + blocks_q,
            grad, p, q, nearest, counts, begin, members, grads[0] if need_p else grads[1], grads[1] if need_q else grads[0],
            count_p, count_q, blocks_p, max(count_p, count_q).bit_length(),
            D=d, LANES=lanes, ROWS=rows, LIST=list_cells // lanes, SHORT=LIST_SHORT, warps=warps,
        )  # fmt: skip
    return grads[0], grads[1]


def backward(grad: Tensor, p: Tensor, q: Tensor, nearest: Tensor, need_p: bool, need_q: bool) -> tuple[Tensor, Tensor]:
    """Gradients of p and q (empty where not needed) by the inverse of `nearest`: bitwise repeatable, without waiting.

    Every row has a list of the points that chose it, in whatever order atomics gave; the differences to them are added as integers,
    whose sum is the same in every order (`gradient_kernel`).

    Args:
        grad: float32 scalar, of the distance.
        p, q, nearest: as `forward` took and gave them.
        need_p, need_q: at least one.
    """
    inputs = (grad, p.contiguous(), q.contiguous(), nearest)
    run = partial(_run_gradient, *inputs, need_p, need_q)
    return run() if p.device.type != "cuda" else _replayed(inputs, p.device, run, "chamfer gradient", need_p, need_q)
