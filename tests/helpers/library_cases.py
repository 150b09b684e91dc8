"""Inputs for the functions of other libraries, and what such a function makes of them: scores and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Dtypes of embeddings, and of masks; None: no mask.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MASKS = (None, torch.bool, torch.float32, torch.int64)
# Forward and backward of a library in float32 against ours: two orders of summation, of scores below 100 and gradients below 20.
FP32 = {"rtol": 2e-6, "atol": 2e-5}
# Scores of a library that rounds similarities, and sums of them, to 16 bits: a few of its steps at the scores' size.
ROUNDED = {torch.float16: {"rtol": 4e-3, "atol": 2e-2}, torch.bfloat16: {"rtol": 3e-2, "atol": 2e-1}}
# Ours in 16 bits against the library in float32 on the same values: gradients are rounded once.
ONCE = {torch.float16: {"rtol": 1e-3, "atol": 1e-3}, torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3}, torch.float32: FP32}


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random token embeddings that want a gradient."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype).requires_grad_()


def mask(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bool) -> Tensor:
    """A random mask in which every row keeps its first token."""
    kept = torch.rand(*shape, generator=torch.Generator().manual_seed(100 + seed)) > 0.4
    kept[..., 0] = True
    return kept.to(dtype)


def masks(kind: torch.dtype | None, *shapes: tuple[int, ...]) -> list[Tensor | None]:
    """A mask of every shape, in a dtype; None: none."""
    return [None if kind is None else mask(*shape, seed=number, dtype=kind) for number, shape in enumerate(shapes)]


def scores_and_gradients(function: Callable[..., Tensor], *inputs: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Scores, and the gradients of an uneven sum of them with respect to every input that wants one."""
    scores = function(*inputs, **options)
    wanted = [value for value in _flat(inputs) if isinstance(value, Tensor) and value.requires_grad]
    weights = torch.linspace(0.1, 1, scores.numel()).view_as(scores)
    gradients = torch.autograd.grad((scores.float() * weights).sum(), wanted)
    return scores.detach(), list(gradients)


def same(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]], **tolerance: float) -> None:
    """Scores and gradients agree."""
    torch.testing.assert_close(ours[0], theirs[0], **(tolerance or FP32))
    for one, other in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(one, other, **(tolerance or FP32))


def widened(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same values in float32."""
    return tuple(
        value.detach().float().requires_grad_() if isinstance(value, Tensor) and value.requires_grad else value
        for value in inputs
    )


def _flat(inputs: tuple[Any, ...]) -> list[Any]:
    return [one for value in inputs for one in (value if isinstance(value, list) else [value])]
