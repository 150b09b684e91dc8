"""Chamfer distance: mean over p of the squared distance to the nearest q, plus the same from q to p (paper appendix 'Chamfer').

Nearest points are found in chunks from coordinate differences, never from `|p|^2 + |q|^2 - 2 p.q`, whose cancellation ruins
translated clouds; the `[N, M]` matrix never exists. The distance is then taken again from the winners alone, by ordinary
differentiable torch, so gradients are exact and memory is linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maxsim_kernels.reference import true_precision
from maxsim_kernels.tokens import FLOAT_DTYPES

_CELLS = 1 << 22  # distances held at once


def chamfer_distance(p: Tensor, q: Tensor) -> Tensor:
    """Symmetric squared Chamfer distance of two point clouds.

    Args:
        p, q: `[N, d]` and `[M, d]`, N, M >= 1, one dtype (fp16, bf16, fp32 or fp64) and device.

    Returns:
        A scalar: float32 (float64 for float64 inputs), differentiable in both. A NaN coordinate gives NaN. Equal distances go to
        the first index.
    """
    for name, cloud in (("p", p), ("q", q)):
        if cloud.dim() != 2 or 0 in cloud.shape or cloud.dtype not in (*FLOAT_DTYPES, torch.float64):
            raise ValueError(f"{name}: got {cloud.dtype} {list(cloud.shape)}, need a floating [points >= 1, d >= 1]")
    if p.shape[1] != q.shape[1] or p.dtype != q.dtype or p.device != q.device:
        raise ValueError(
            f"q: got d = {q.shape[1]}, {q.dtype} on {q.device}, need d = {p.shape[1]}, {p.dtype} on {p.device} as p"
        )
    work = torch.float64 if p.dtype == torch.float64 else torch.float32
    left, right = p.to(work), q.to(work)
    return _one_way(left, right) + _one_way(right, left)


def _one_way(points: Tensor, targets: Tensor) -> Tensor:
    nearest = _nearest(points.detach(), targets.detach())
    return (points - targets[nearest]).square().sum(1).mean()


@torch.library.custom_op("maxsim_kernels::nearest", mutates_args=())
def _nearest(points: Tensor, targets: Tensor) -> Tensor:
    """Index `[N]` of the nearest target of each point, the first among equals."""
    step = max(1, _CELLS // targets.shape[0])
    mode = "donot_use_mm_for_euclid_dist"
    with true_precision():
        return torch.cat([torch.cdist(block, targets, compute_mode=mode).argmin(1) for block in points.split(step)])


@_nearest.register_fake
def _(points: Tensor, targets: Tensor) -> Tensor:
    return points.new_empty(points.shape[0], dtype=torch.int64)
