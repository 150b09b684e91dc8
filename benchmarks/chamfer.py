"""Chamfer distance on one NVIDIA GPU against flash-maxsim and naive autograd: correctness, then interleaved medians, L2 flushed.

    python benchmarks/chamfer.py [--only forward,training,small] [--json FILE] [--runs 20] [--peers none] [--smoke]
    python benchmarks/chamfer.py --show FILE [--brief]

N = M = 10K, 50K, 100K points of random normal coordinates, d = 3 and 128, FP32. Groups: forward, training (forward + backward), small
(both for 1K points).

In the same run the distance is compared with FP64 arithmetic over all pairs, once as drawn and once with both clouds shifted by +1000,
and of training rows every gradient row with FP64's on FP64 winners (rows that a near tie could change are left out). Ours must reach
1e-5, or is not timed. Peers and naive torch are timed even where they miss it, because they are the row's yardstick; they are marked
WRONG. Naive differences (torch.cdist without products) are measured up to 10K points; above, a part of the rows gives an estimate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from maxsim_kernels import chamfer_distance
from measure import installed
from measure.gradient_truth import _row_error
from measure.method import Lineup, Method, Options, Row
from measure.names import FLASH
from measure.session import RefusedError
from run.command import Tool, main
from tables.training import BOUND, COSINE, COUNTS, DIMS, SHIFT
from tables.training import chamfer_markdown as markdown
from tables.training import chamfer_name as row_name
from tables.training import chamfer_verdicts as verdicts

LARGE, SMALL = ("10K", "50K", "100K"), ("1K",)
DIFFERENCES = 10_000  # points; a call takes 0.1 s there, and grows with their square
TIES = 1e-5  # two squared distances closer than this, relatively, may change places
CELLS = 1 << 27  # FP64 distances held at once
Distance = Callable[[Tensor, Tensor], Tensor]


# The truth


@dataclass(frozen=True)
class Way:
    """One direction in FP64: each point's nearest target, its squared distance, and what a near tie could change."""

    distance: Tensor  # [N]
    nearest: Tensor  # [N] int64
    unsure: Tensor  # [N] bool: a second target is as near
    touched: Tensor  # [M] bool: targets that are nearest, or as near, for an unsure point


def one_way(points: Tensor, targets: Tensor, *, ties: bool = True) -> Way:
    """Nearest targets by FP64 products around the clouds' common mean, so that a shift cancels nothing; `ties`: look for them."""
    middle = targets.double().mean(0)
    points, targets = points.double() - middle, targets.double() - middle
    norms = targets.square().sum(1)
    nearest, unsure, touched = [], [], torch.zeros(len(targets), dtype=torch.bool, device=points.device)
    for block in points.split(max(1, CELLS // len(targets))):
        squares = torch.addmm(norms, block, targets.t(), alpha=-2.0).add_(block.square().sum(1, keepdim=True))
        best, winners = squares.min(1)
        nearest.append(winners)
        if not ties:
            unsure.append(torch.zeros_like(winners, dtype=torch.bool))
            continue
        near = squares <= (best * (1 + TIES) + 1e-12).unsqueeze(1)
        several = near.sum(1) > 1
        unsure.append(several)
        touched |= near[several].any(0)
    chosen = torch.cat(nearest)
    return Way((points - targets[chosen]).square().sum(1), chosen, torch.cat(unsure), touched)


@dataclass
class Truth:
    """Two clouds `[N, d]` without gradients, and what FP64 says of them."""

    p: Tensor
    q: Tensor

    @cached_property
    def ways(self) -> tuple[Way, Way]:
        """The directions from p to q and from q to p."""
        return one_way(self.p, self.q), one_way(self.q, self.p)

    @cached_property
    def distance(self) -> float:
        """The Chamfer distance of the clouds as drawn."""
        return float(sum(way.distance.mean() for way in self.ways))

    @cached_property
    def shifted(self) -> tuple[Tensor, Tensor, float]:
        """Both clouds moved by `SHIFT`, as FP32 holds them, and their Chamfer distance."""
        p, q = self.p + SHIFT, self.q + SHIFT
        found = (one_way(p, q, ties=False), one_way(q, p, ties=False))
        return p, q, float(sum(way.distance.mean() for way in found))


@cache
def drawn(points: int, dim: int, device: torch.device) -> Truth:
    """Random normal clouds; forward and training rows share them and their truth, which takes longer than the calls."""
    generator = torch.Generator(device).manual_seed(0)
    return Truth(*(torch.randn(points, dim, device=device, generator=generator) for _ in range(2)))


class Clouds:
    """A row's two clouds `[N, d]`, leaves with gradients in training rows, and the truth about them."""

    def __init__(self, truth: Truth, *, training: bool) -> None:
        self.truth = truth
        self.p, self.q = (cloud.detach().requires_grad_(training) for cloud in (truth.p, truth.q))

    @cached_property
    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """FP64 gradient of p and of q, each with the rows to leave out."""
        clouds, found = (self.truth.p.double(), self.truth.q.double()), []
        for mine, (forth, back) in ((0, self.truth.ways), (1, self.truth.ways[::-1])):
            own, other = clouds[mine], clouds[1 - mine]
            grad = (own - other[forth.nearest]) * (2 / len(own))
            grad.index_add_(0, back.nearest, (own[back.nearest] - other) * (2 / len(other)))
            found.append((grad, forth.unsure | back.touched))
        return found

    def check(self, value: Tensor, moved: Tensor, *, gradients: bool) -> dict[str, Any]:
        """Relative errors of the distance, as drawn and shifted; cosine and row error of `p.grad` and `q.grad`."""
        need, need_moved = self.truth.distance, self.truth.shifted[2]
        found: dict[str, Any] = {"error": abs(float(value) - need) / need}
        found["shifted_error"] = abs(float(moved) - need_moved) / need_moved
        if gradients:
            cosine, worst = 1.0, 0.0
            for leaf, (true, unsure) in zip((self.p, self.q), self.gradients, strict=True):
                assert leaf.grad is not None
                got, need_rows = leaf.grad.double()[~unsure], true[~unsure]
                cosine = min(cosine, float((got * need_rows).sum() / (got.norm() * need_rows.norm())))
                worst = max(worst, _row_error(got, need_rows))
            found |= {"cosine": cosine, "cosine_gap": 1 - cosine, "gradient_error": worst}
        wrong = [f"{key} {found[key]:.1e}" for key in ("error", "shifted_error") if not found[key] <= BOUND]
        if gradients and not found["cosine"] >= COSINE:
            wrong.append(f"cosine {found['cosine']:.6f}")
        for key, number in found.items():
            if not math.isfinite(number):
                found[key] = None  # JSON has no NaN
        return {**found, "wrong": ", ".join(wrong)} if wrong else found


# Who takes part


def method(clouds: Clouds, name: str, kind: str, distance: Distance, *, training: bool) -> Method:
    """The method of a distance function; with `training` its gradients are made and checked too."""
    p, q = clouds.p, clouds.q

    def call() -> Tensor:
        p.grad = q.grad = None
        value = distance(p, q)
        if training:
            value.backward()
        return value.detach()

    def check(_: str) -> dict[str, Any]:
        value = call()
        found = clouds.check(value, distance(*clouds.truth.shifted[:2]), gradients=training)
        if kind == "ours" and "wrong" in found:
            raise RefusedError(f"wrong: {found['wrong']} (need {BOUND:.0e})")
        return found

    size = (p.numel() + q.numel()) * p.element_size() if training else 0
    return Method(name, kind, {"": call}, check=check, gradient_bytes=size)


def naive(p: Tensor, q: Tensor, mode: str = "use_mm_for_euclid_dist_if_necessary") -> Tensor:
    """The `[N, M]` matrix once, its minima both ways."""
    squares = torch.cdist(p, q, compute_mode=mode).square()
    return squares.min(1).values.mean() + squares.min(0).values.mean()


def lineup(clouds: Clouds, options: Options, *, training: bool) -> Lineup:
    """Ours, flash-maxsim's entry points, naive torch in both of cdist's ways."""
    add = partial(method, clouds, training=training)
    found = Lineup([add("ours", "ours", chamfer_distance)])
    if FLASH in options.peers:
        module = installed.load(FLASH)
        if isinstance(module, str):
            found.skipped[FLASH] = module
        elif training:
            found.methods.append(add(f"{FLASH} train", "peer", module.flash_chamfer_train))
            found.methods.append(add(f"{FLASH} inverse grid", "peer", module.flash_chamfer_invgrid_train))
        else:
            found.methods.append(add(FLASH, "peer", module.flash_chamfer))
    found.methods.append(add("naive, products", "baseline", naive))
    differences: Distance = partial(naive, mode="donot_use_mm_for_euclid_dist")
    if len(clouds.p) > DIFFERENCES:
        found.skipped["naive, differences"] = f"too slow: about {estimate(clouds, differences):.2g} s a forward, by a part of p"
    else:
        found.methods.append(add("naive, differences", "baseline", differences))
    return found


def estimate(clouds: Clouds, distance: Distance) -> float:
    """Seconds that a call would take, by as many points of p as make `DIFFERENCES**2` pairs with all of q."""

    def wait() -> None:
        if clouds.p.is_cuda:
            torch.cuda.synchronize()

    part, q = clouds.truth.p[: max(1, DIFFERENCES**2 // len(clouds.q))], clouds.truth.q
    distance(part[:8], q)  # the first call loads code
    wait()
    start = time.perf_counter()
    distance(part, q)
    wait()
    return (time.perf_counter() - start) * len(clouds.p) / len(part)


def rows(options: Options, counts: tuple[str, ...], *, training: bool) -> Iterator[Row]:
    """Rows of these counts of points."""
    for dim in DIMS:
        for count in counts:
            points = min(COUNTS[count], 200 + COUNTS[count] // 1000) if options.smoke else COUNTS[count]
            clouds = Clouds(drawn(points, dim, options.device), training=training)
            about = {"points": points, "dim": dim, "dtype": "float32"}
            found = lineup(clouds, options, training=training)
            # "highest": products in true FP32, which naive's cdist needs to be comparable at all
            yield Row(row_name(count, dim, training=training), about, found, busy=True, precision="highest")


def small(options: Options) -> Iterator[Row]:
    """Few points: forward, then training."""
    for training in (False, True):
        yield from rows(options, SMALL, training=training)


TOOL = Tool(
    "chamfer.py",
    __doc__ or "",
    "maxsim-kernels/chamfer/1",
    {
        "forward": partial(rows, counts=LARGE, training=False),
        "training": partial(rows, counts=LARGE, training=True),
        "small": small,
    },
    verdicts,
    markdown,
)

if __name__ == "__main__":
    main(TOOL)
