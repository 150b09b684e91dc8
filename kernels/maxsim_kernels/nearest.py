"""Nearest points of two clouds, both ways, and the Chamfer gradient, without the `[N, M]` matrix (paper appendix 'Chamfer').

Filter and refine. The nearest of a source x has the largest score `x.y - |y|^2 / 2`, a matrix product; but a product of rounded numbers
cannot tell close distances apart. So it only selects: its maximum over each chunk of targets is kept, and every chunk whose maximum
comes near the row's best is scanned with FP32 coordinate differences of the inputs. The outcome is that of a plain FP32 scan.

Both clouds lie behind each other in one padded list of rows, p then q, so that every kernel does both directions in one launch.
Coordinates are centred (midrange of both clouds) and scaled by one power of two into [-1, 1]. FP16 features of a target y:
- d <= 20, "split": `(hi, lo, hi)` with `hi = fp16(y)`, `lo = fp16(y - hi)`, then `-|y|^2 / 2` in three FP16 pieces; a source has
  `(hi, hi, lo)` and a constant for the pieces. The product is then the whole score, with an error near FP32's.
- else `fp16(y)`, and the FP32 bias `-|y|^2 / 2` is added to the product.

Error of a score, with u = 2^-24, F the features' width, everything in scaled units (`score_error`):
- centring rounds each coordinate by u, the FP32 sum behind the bias by (d + 2) u of itself, and adding it by u of the score;
- split drops lo.lo' (2^-22 |x||y| as |lo| <= 2^-11 |hi|) and rounds either lo (2^-22 each); else both fp16 round: 2^-10 |x||y|;
- FP16 has a smallest spacing 2^-24: at most 2^-25 a coordinate more, hence `floor * (|x| + |y|)` with floor = sqrt(d) 2^-24, and
  `TINY` for its square and for what three pieces of the bias leave;
- matrix units align the products of a step to the largest and cut them there: under 2^-22 of the sum of all magnitudes for each of the
  F products and the accumulator's own cuts together.
In all: `alpha (|x||y| + |y|^2 / 2) + floor (|x| + |y|) + TINY`, with alpha = (F + d + 8) 2^-22 (not split: 2^-10 more).

Which y can matter? Let b be the best score and e0 the bound for |y| <= sqrt(d). The target k that scored b is at squared distance
`D_k <= reach^2 = |x|^2 - 2 b + 2 e0`, and so is the true nearest: both have |y| <= |x| + reach. With e the bound for that |y|, the true
nearest scores at least `b - 2 e`; FP32 distances may differ by (d + 4) 2^-23 of reach^2 more. What is below that is never scanned.
NaN and infinite coordinates become NaN features, NaN maxima, and chunks that every row scans; so do clouds so wide (or so tiny) that
squares of their differences could overflow (underflow).
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

from maxsim_kernels.geometry import descriptor, hardware, padded
from maxsim_kernels.launch import empty, ensure_context, launch, planned, record, signature
from maxsim_kernels.nearest_kernels import (
    bounds_kernel,
    features_kernel,
    filter_kernel,
    finish_kernel,
    gradient_kernel,
    refine_kernel,
)
from maxsim_kernels.tuning import Config

# To be tuned, all of it. Filter, by width of the features: rows of sources, targets a tile, warps, stages, programs a multiprocessor;
# `short`: targets a chunk, the part of a tile that has a maximum of its own. Tiles are no longer than rows are many.
FILTERS: dict[int, Config] = {
    16: Config(128, 128, 4, 3, 3, "untuned", "bound by the maximum: one matrix step a tile", short=64),
    32: Config(128, 128, 4, 3, 3, "untuned", "as 16", short=64),
    64: Config(128, 128, 4, 3, 3, "untuned", "as 16", short=64),
    128: Config(256, 64, 8, 3, 2, "untuned", "bound by the matrix units", short=64),
    256: Config(128, 64, 8, 2, 1, "untuned", "rows and tiles of 512 bytes leave room for small tiles", short=64),
}
MAXIMA_BYTES = 32 << 20  # chunk maxima held at once: they should stay in L2 from filter to refine
BOUND_BLOCKS = 128  # programs that find the range of the coordinates; every program of `features_kernel` reads all they left
BOUND_CELLS, BOUND_WARPS = 4096, 4
FEATURE_ROWS, FEATURE_WARPS = 64, 4
REFINE_ROWS, REFINE_CHUNKS = 8, 128  # rows of a one-warp program (8 floats: one sector of 32 bytes), chunks looked at together
SCAN_CELLS = 1024  # coordinates of targets compared at once with a row, d > 8
FINISH_CELLS, FINISH_WARPS = 4096, 8
GRADIENT_ROWS, GRADIENT_CELLS, GRADIENT_WARPS = 256, 2048, 4  # rows and coordinates a program holds, at most
LIST_CELLS, LIST_SHORT = 2048, 8  # of long lists at once; shorter lists are added row beside row

MOST_DIMENSIONS = 256
MOST_POINTS = 1 << 30
_SPLIT_DIMENSIONS = 20  # 3 d + 3 <= 64
_MOST_SPLITS = 64


def features_of(d: int) -> tuple[bool, int]:
    """Whether coordinates are split in two, and the width of the features."""
    return (True, padded(3 * d + 3)) if d <= _SPLIT_DIMENSIONS else (False, padded(d))


def score_error(d: int) -> tuple[float, float]:
    """`alpha` and `floor` of the bound on a score's error (module docstring)."""
    split, width = features_of(d)
    return (width + d + 8) * 2.0**-22 + (0.0 if split else 2.0**-10), math.sqrt(d) * 2.0**-24


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
        """Chunks of a tile."""
        return self.config.tokens // self.config.short

    @property
    def tile_maxima(self) -> int:
        """Chunk maxima of a group of sources and a tile of targets."""
        return self.config.rows * self.parts

    @property
    def row_q(self) -> int:
        """Where the second cloud begins."""
        return self.groups[0] * self.config.rows

    @property
    def rows(self) -> int:
        """Rows of both clouds, padding included."""
        return sum(self.groups) * self.config.rows


def _shape(p: Tensor, q: Tensor) -> _Shape:
    config = FILTERS[features_of(p.shape[1])[1]]
    points = (p.shape[0], q.shape[0])
    groups = [triton.cdiv(count, config.rows) for count in points]
    tiles = [triton.cdiv(count, config.tokens) for count in points]
    return _Shape(points, p.shape[1], config, (groups[0], groups[1]), (tiles[0], tiles[1]))


def _slices(shape: _Shape) -> list[tuple[int, int, int]]:
    """Runs of row groups whose chunk maxima fit `MAXIMA_BYTES`: the first group, groups of p and groups of q."""
    (in_p, in_q), (tiles_p, tiles_q) = shape.groups, shape.tiles
    whole = in_p * tiles_q + in_q * tiles_p
    pieces = triton.cdiv(whole * shape.tile_maxima * 4, MAXIMA_BYTES)
    room = max(triton.cdiv(whole, pieces), tiles_p, tiles_q)
    found, first = [], 0
    while first < in_p + in_q:
        of_p = max(0, min(in_p - first, room // tiles_q))
        left = room - of_p * tiles_q if first + of_p >= in_p else 0
        of_q = min(in_p + in_q - first - of_p, left // tiles_p)
        found.append((first, of_p, of_q))
        first += of_p + of_q
    return found


def _splits(of_p: int, of_q: int, shape: _Shape, processors: int) -> tuple[int, int]:
    """Into how many programs to cut the targets of each group of p and of q: whole waves of programs with equal shares."""
    tiles_p, tiles_q = shape.tiles
    longest = max(tiles_q if of_p else 1, tiles_p if of_q else 1)
    best, least = (1, 1), float("inf")
    for pieces in range(1, min(longest, _MOST_SPLITS) + 1):
        share = triton.cdiv(longest, pieces)
        cut = (triton.cdiv(tiles_q, share) if of_p else 1, triton.cdiv(tiles_p, share) if of_q else 1)
        waves = triton.cdiv(of_p * cut[0] + of_q * cut[1], processors * shape.config.programs)
        cost = waves * (share + 3)  # a program loads its rows before its first tile
        if cost < least * 0.99:
            best, least = cut, cost
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
    pieces = 2.0**14 / triton.next_power_of_2(d)  # brings |y|^2 / 2 <= d / 2 up to 2^13
    alpha, floor = score_error(d)
    slices = [(*one, *_splits(one[1], one[2], shape, processors)) for one in _slices(shape)]
    distance = empty((), torch.float32, p.device)
    nearest = empty((count_p + count_q,), torch.int32, p.device) if winners else distance
    features = empty((shape.rows, width), torch.float16, p.device)
    programs = shape.rows // REFINE_ROWS
    scratch = _Scratch(
        p.device,
        bound=BOUND_BLOCKS * 2 * lanes,
        bias=shape.rows,
        sums=2 * programs,  # float64
        maxima=max(of_p * shape.tiles[1] + of_q * shape.tiles[0] for _, of_p, of_q, _, _ in slices) * shape.tile_maxima,
        best=max((of_p + of_q) * config.rows * max(cuts) for _, of_p, of_q, *cuts in slices),
    )
    sums = scratch["sums"].view(torch.float64)
    launch(
        bounds_kernel, BOUND_BLOCKS, p, q, scratch["bound"], count_p, count_q,
        D=d, LANES=lanes, ROWS=BOUND_CELLS // lanes, BLOCKS=BOUND_BLOCKS, warps=BOUND_WARPS,
    )  # fmt: skip
    feature_rows = min(FEATURE_ROWS, config.rows)
    launch(
        features_kernel, shape.rows // feature_rows,
        p, q, scratch["bound"], features, scratch["bias"], count_p, count_q, row_q,
        D=d, LANES=lanes, WIDTH=width, SPLIT=split, PIECES=pieces, ROWS=feature_rows, BLOCKS=BOUND_BLOCKS,
        STEP=min(BOUND_BLOCKS, 2048 // lanes), warps=FEATURE_WARPS,
    )  # fmt: skip
    described = capability >= (9, 0)
    target = descriptor(features, shape.rows, width, width, [config.tokens, width]) if described else features
    for first, of_p, of_q, splits_p, splits_q in slices:
        rows = (of_p + of_q) * config.rows
        launch(
            filter_kernel, of_p * splits_p + of_q * splits_q,
            target, features, scratch["bias"], scratch["maxima"], scratch["best"],
            first, of_p, of_q, row_q, *shape.tiles, splits_p, splits_q, rows,
            D=d, WIDTH=width, SPLIT=split, PIECES=pieces, DESCRIPTOR=described, ROWS=config.rows, TILE=config.tokens, PARTS=shape.parts,
            STAGES=config.stages, warps=config.warps,
        )  # fmt: skip
        launch(
            refine_kernel, rows // REFINE_ROWS,
            p, q, scratch["bias"], scratch["maxima"], scratch["best"], sums, nearest,
            count_p, count_q, first, of_p, row_q, *shape.tiles, splits_p, splits_q, rows,
            D=d, LANES=lanes, ALPHA=alpha, FLOOR=floor, WINNERS=winners, GROUP=config.rows, ROWS=REFINE_ROWS,
            CHUNKS=REFINE_CHUNKS, CHUNK=config.short, PARTS=shape.parts,
            SCAN=min(config.short, SCAN_CELLS // (lanes if d > 8 else 1)), warps=1,
        )  # fmt: skip
    launch(finish_kernel, 1, sums, distance, programs, CELLS=FINISH_CELLS, warps=FINISH_WARPS)
    return (distance, nearest) if winners else distance


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
    """What `run` launches for these inputs, by the recorded plan where there is one (`launch.py`)."""
    key = signature(inputs, *flags)
    plan = planned(key)
    return record(key, inputs, device, run) if plan is None else plan.run(inputs, device)


def _run_gradient(
    grad: Tensor, p: Tensor, q: Tensor, nearest: Tensor, keys: Tensor, order: Tensor, need_p: bool, need_q: bool
) -> tuple[Tensor, Tensor]:
    grads = [empty(tuple(one.shape) if need else (0,), one.dtype, one.device) for one, need in ((p, need_p), (q, need_q))]
    d = p.shape[1]
    lanes = padded(d, 4)
    rows = min(GRADIENT_ROWS, GRADIENT_CELLS // lanes)
    blocks_p = triton.cdiv(p.shape[0], rows) if need_p else 0
    blocks_q = triton.cdiv(q.shape[0], rows) if need_q else 0
    with torch.cuda.device(p.device) if p.device.type == "cuda" else nullcontext():
        launch(
            gradient_kernel, blocks_p + blocks_q,
            grad, p, q, nearest, keys, order, grads[0] if need_p else grads[1], grads[1] if need_q else grads[0],
            p.shape[0], q.shape[0], blocks_p, keys.shape[0], keys.shape[0].bit_length(), p.shape[0] if need_q else 0,
            D=d, LANES=lanes, ROWS=rows, LIST=LIST_CELLS // lanes, SHORT=LIST_SHORT, warps=GRADIENT_WARPS,
        )  # fmt: skip
    return grads[0], grads[1]


def backward(grad: Tensor, p: Tensor, q: Tensor, nearest: Tensor, need_p: bool, need_q: bool) -> tuple[Tensor, Tensor]:
    """Gradients of p and q (empty where not needed) by the inverse of `nearest`: bitwise repeatable, no atomics, no waiting.

    Every row's list of the points that chose it comes from a stable sort, and is added in its order in FP32.

    Args:
        grad: float32 scalar, of the distance.
        p, q, nearest: as `forward` took and gave them.
        need_p, need_q: at least one.
    """
    p, q = p.contiguous(), q.contiguous()
    chosen = nearest if need_p and need_q else nearest[p.shape[0] :] if need_p else nearest[: p.shape[0]]
    keys, order = torch.sort(chosen, stable=True)
    inputs = (grad, p, q, nearest, keys, order)
    run = partial(_run_gradient, *inputs, need_p, need_q)
    return run() if p.device.type != "cuda" else _replayed(inputs, p.device, run, "chamfer gradient", need_p, need_q)
