"""The one form of a refusal: what it is about, what was found, what is needed."""

from __future__ import annotations

from torch import Tensor


def need(condition: bool, name: str, got: object, wanted: object) -> None:
    """Refuse an argument unless the condition holds.

    Raises:
        ValueError: it does not.
    """
    if not condition:
        raise ValueError(f"{name}: got {got}, need {wanted}")


def describe(value: object) -> str:
    """A tensor's dtype and shape; the type of anything else."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
