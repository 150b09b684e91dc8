"""Rows that cannot be read 16 bytes at a time, and another tile for `general.py` where there are any.

Where strides, width or address are no multiples of 16, a thread loads its numbers one by one, each with an address of 64 bits and a
predicate. More of them than it has registers for are spilled, up to 7 kilobytes a thread. That is slow, and ptxas (Triton 3.6, sm_90)
was seen to compile such a kernel wrongly: every part of a long query got the first part's rows. Smaller tiles, spread over 256
threads, leave at most 64 bytes, whatever is loaded (`tests/kernels/forward/test_unaligned.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.forward import general
from maxsim_kernels.gpu.forward.choice import Launch
from maxsim_kernels.gpu.geometry import padded

UNTUNED: dict[str, Any] = {
    "measured": "untuned",
    "reason": "rows are read number by number: a tile for which a thread has the registers",
}
_HELD, _SLICED = 128, 64  # numbers a thread that it has registers for: of whole tokens, and of slices, whose addresses change


def spread(launch: Launch, call: Call, queries: Tensor) -> Launch:
    """The launch of a call as it runs; `queries`: as the kernel reads them."""
    kernel, config = launch
    if kernel not in ("stream", "general") or (aligned(queries) and aligned(call.documents)):
        return launch
    columns, whole = general._columns(queries, call.documents, kernel == "stream")
    rows, most = min(config.rows, padded(queries.numel() // max(1, queries.shape[-1]))), _HELD if whole else _SLICED
    if columns * (rows + config.tokens) <= most * 32 * config.warps:
        return launch
    if columns <= 128:
        rows, tokens = config.rows, 32
    else:
        rows, tokens = 32, 32 if whole else 16
    return Launch(kernel, replace(config, rows=rows, tokens=tokens, warps=8, **UNTUNED))


def aligned(tokens: Tensor) -> bool:
    """Whether rows `[..., d]` are read 16 bytes at a time: Triton asks whether 16 divides each size, stride and address."""
    *outer, last = tokens.stride()
    return last == 1 and tokens.data_ptr() % 16 == 0 and not any(one % 16 for one in (*outer, tokens.shape[-1]))
