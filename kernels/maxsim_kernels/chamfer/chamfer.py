"""Chamfer distance: mean over p of the squared distance to the nearest q, plus the same from q to p (paper appendix 'Chamfer').

Nearest points are decided by FP32 coordinate differences, never by `|p|^2 + |q|^2 - 2 p.q`, whose cancellation ruins translated clouds;
the `[N, M]` matrix never exists. On a GPU `nearest.py` filters by matrix products first; elsewhere plain torch compares points in
chunks. The forward leaves each point's nearest one; the gradient is a sum of differences over those pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maxsim_kernels import fallback
from maxsim_kernels.checks import is_plain
from maxsim_kernels.modes import check_tensors, unusual
from maxsim_kernels.reference import true_precision
from maxsim_kernels.tokens import FLOAT_DTYPES

_CELLS = 1 << 22  # distances held at once


def chamfer_distance(p: Tensor, q: Tensor) -> Tensor:
    """Symmetric squared Chamfer distance of two point clouds.

    Args:
        p, q: `[N, d]` and `[M, d]`, N, M >= 1, one dtype (fp16, bf16, fp32 or fp64) and device. CUDA tensors of d <= 256 that are
            not fp64 run fused kernels. Others are compared by plain torch, in chunks; a warning says so once, except on a CPU.

    Returns:
        A scalar: float32 (float64 for float64 inputs), differentiable in both (twice, too), with the same bits every time. A NaN
        coordinate gives NaN. Equal distances go to the first index; to plain torch those are equal whose square roots round alike.

    Raises:
        ValueError: names the argument, what it got and what it needs; a subclass of Tensor is refused.
        RuntimeError: under a transform of `torch.func` (vmap, grad, jvp), or with forward-mode tangents.
    """
    if unusual((p, q)):
        check_tensors("chamfer_distance", (("p", p), ("q", q)))
    for name, cloud in (("p", p), ("q", q)):
        if cloud.dim() != 2 or 0 in cloud.shape or cloud.dtype not in (*FLOAT_DTYPES, torch.float64):
            raise ValueError(f"{name}: got {cloud.dtype} {list(cloud.shape)}, need a floating [points >= 1, d >= 1]")
    if p.shape[1] != q.shape[1] or p.dtype != q.dtype or p.device != q.device:
        raise ValueError(
            f"q: got d = {q.shape[1]}, {q.dtype} on {q.device}, need d = {p.shape[1]}, {p.dtype} on {p.device} as p"
        )
    if is_plain(p, q):
        if not (torch.is_grad_enabled() and (p.requires_grad or q.requires_grad)):
            return _forward(p, q, winners=False)[0]
        if not _not_fused(p, q):
            return _Distance.apply(p, q)
    return _chamfer(p, q)[0]


def _not_fused(p: Tensor, q: Tensor) -> str:
    """Why the fused kernels cannot take two clouds; empty when they can."""
    if p.device.type != "cuda":
        return f"no fused Chamfer kernel for {p.device.type} tensors"
    if not fallback.HAS_TRITON:
        return "Triton is not installed"
    from maxsim_kernels.chamfer import nearest

    if p.dtype == torch.float64:
        return "no fused Chamfer kernel for float64"
    if p.shape[1] > nearest.MOST_DIMENSIONS:
        return f"no fused Chamfer kernel for d = {p.shape[1]}, above {nearest.MOST_DIMENSIONS}"
    if p.shape[0] + q.shape[0] > nearest.MOST_POINTS:
        return f"no fused Chamfer kernel for {p.shape[0] + q.shape[0]} points, above {nearest.MOST_POINTS}"
    return ""


def _forward(p: Tensor, q: Tensor, winners: bool) -> tuple[Tensor, Tensor | None]:
    """The distance, and where asked for int32 `[N + M]`: each point's nearest one, in the numbering of p followed by q."""
    reason = _not_fused(p, q)
    if not reason:
        from maxsim_kernels.chamfer import nearest

        return nearest.forward(p, q, winners)
    if p.device.type != "cpu":
        fallback.say_once(f"{reason}: plain torch in chunks (slower)")
    work = torch.float64 if p.dtype == torch.float64 else torch.float32
    left, right = p.to(work), q.to(work)
    of_left, of_right = _nearest(left, right), _nearest(right, left)
    distance = (left - right[of_left]).square().sum(1).mean() + (right - left[of_right]).square().sum(1).mean()
    return distance, torch.cat([of_left + len(left), of_right]).int() if winners else None


def _nearest(points: Tensor, targets: Tensor) -> Tensor:
    """Index `[N]` of the nearest target of each point, the first among equals."""
    step = max(1, _CELLS // targets.shape[0])
    mode = "donot_use_mm_for_euclid_dist"
    with true_precision():
        return torch.cat([torch.cdist(block, targets, compute_mode=mode).argmin(1) for block in points.split(step)])


@torch.library.custom_op("maxsim_kernels::chamfer", mutates_args=())
def _chamfer(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The distance and the nearest points, as `_forward`."""
    distance, nearest = _forward(p, q, winners=True)
    assert nearest is not None
    return distance, nearest


@_chamfer.register_fake
def _(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    work = torch.float64 if p.dtype == torch.float64 else torch.float32
    return p.new_empty((), dtype=work), p.new_empty(p.shape[0] + q.shape[0], dtype=torch.int32)


@torch.library.custom_op("maxsim_kernels::chamfer_backward", mutates_args=())
def _chamfer_backward(grad: Tensor, p: Tensor, q: Tensor, nearest: Tensor, need_p: bool, need_q: bool) -> tuple[Tensor, Tensor]:
    """Gradients of p and q in their dtype (empty where not needed)."""
    if not _not_fused(p, q):
        from maxsim_kernels.chamfer import nearest as fused

        return fused.backward(grad, p, q, nearest, need_p, need_q)
    count = p.shape[0]
    left, right = p.to(grad.dtype), q.to(grad.dtype)
    of_left, of_right = nearest[:count].long() - count, nearest[count:].long()
    from_left = (left - right[of_left]) * (2 * grad / count)
    from_right = (right - left[of_right]) * (2 * grad / q.shape[0])
    return (
        from_left.index_add(0, of_right, from_right, alpha=-1).to(p.dtype) if need_p else p.new_empty(0),
        from_right.index_add(0, of_left, from_left, alpha=-1).to(q.dtype) if need_q else q.new_empty(0),
    )


@_chamfer_backward.register_fake
def _(grad: Tensor, p: Tensor, q: Tensor, nearest: Tensor, need_p: bool, need_q: bool) -> tuple[Tensor, Tensor]:
    return p.new_empty(p.shape if need_p else (0,)), q.new_empty(q.shape if need_q else (0,))


def _setup_context_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.needs = inputs[4:]


def _backward_of_backward(ctx: Any, from_p: Tensor, from_q: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient is `grad * H [p; q]` with a symmetric H that follows from the nearest points alone; H is applied again."""
    grad, p, q, nearest = ctx.saved_tensors
    along_p = from_p if ctx.needs[0] else torch.zeros_like(p)
    along_q = from_q if ctx.needs[1] else torch.zeros_like(q)
    of_p, of_q = _chamfer_backward(grad, along_p, along_q, nearest, True, True)
    unit_p, unit_q = _chamfer_backward(torch.ones_like(grad), p, q, nearest, True, True)
    of_grad = (unit_p.to(grad.dtype) * along_p.to(grad.dtype)).sum() + (unit_q.to(grad.dtype) * along_q.to(grad.dtype)).sum()
    return of_grad, of_p, of_q, None, None, None


_chamfer_backward.register_autograd(_backward_of_backward, setup_context=_setup_context_backward)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, Tensor | None]:
    p, q, nearest = ctx.saved_tensors
    need_p, need_q = ctx.needs_input_grad
    grad_p, grad_q = _chamfer_backward(grad, p, q, nearest, need_p, need_q)
    return grad_p if need_p else None, grad_q if need_q else None


_chamfer.register_autograd(_backward, setup_context=_setup_context)


class _Distance(torch.autograd.Function):
    """Eager calls on a GPU that need gradients: the ops' kernels without the ops' dispatch, which costs more than the kernels."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, q: Tensor) -> Tensor:
        distance, nearest = _forward(p, q, winners=True)
        ctx.save_for_backward(p, q, nearest)
        ctx.set_materialize_grads(False)
        return distance

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        from maxsim_kernels.chamfer import nearest as fused

        if grad is None:
            return None, None
        if unusual((grad, grad)):
            check_tensors("chamfer_distance's gradient", (("upstream gradient", grad),))
        p, q, nearest = ctx.saved_tensors
        need_p, need_q = ctx.needs_input_grad
        # The op where the gradient is to be differentiated again, traced (compiled autograd), or one of many (`is_grads_batched`).
        through_op = torch.is_grad_enabled() or torch.compiler.is_compiling() or not torch._C._has_storage(grad)
        run = _chamfer_backward if through_op else fused.backward
        grad_p, grad_q = run(grad, p, q, nearest, need_p, need_q)
        return grad_p if need_p else None, grad_q if need_q else None
