"""Leaving the fused kernels: whether Triton is there at all, and saying once a reason why a call runs slower code."""

from __future__ import annotations

import importlib.util
import warnings

HAS_TRITON = importlib.util.find_spec("triton") is not None
_SAID: set[str] = set()


def say_once(reason: str) -> None:
    """Warn whoever called the operator, the first time that a reason comes up."""
    if reason not in _SAID:
        _SAID.add(reason)
        warnings.warn(f"maxsim_kernels: {reason}", stacklevel=4)
