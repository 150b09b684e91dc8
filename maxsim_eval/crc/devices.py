"""What the kernels of this folder share: which devices have them, and powers of x that lie there; imports no Triton."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

import torch
from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def can_prove(device: torch.device) -> bool:
    """Whether a device can make CRC-32s of what lies there; elsewhere the host does."""
    return device.type == "cuda" and _HAS_TRITON


def stream_of(device: torch.device) -> int:
    """The device's current stream, as a cache key of what was copied in it: another stream would not wait for the copy."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def sent(powers: Iterable[int], device: torch.device) -> Tensor:
    """Powers `[n]` uint32 on their way to a device; nothing waits."""
    return torch.tensor(list(powers), dtype=torch.uint32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
