"""Which tokens are not all zeros, as libraries mark padding: one pass at the speed of memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _WIDTH = 32, 128


@triton.jit
def _nonzero_kernel(token_ptr, out_ptr, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    found = tl.zeros([ROWS], tl.int32)
    for first in range(0, width, WIDTH):
        place = first + tl.arange(0, WIDTH)
        inside = (row < rows)[:, None] & (place < width)[None, :]
        values = tl.load(token_ptr + row[:, None] * width + place[None, :], mask=inside, other=0.0)
        found = tl.maximum(found, tl.max((values != 0).to(tl.int32), 1))  # NaN is not zero
    tl.store(out_ptr + row, found.to(tl.uint8), mask=row < rows)


def nonzero_rows(tokens: Tensor) -> Tensor:
    """`tokens.any(dim=-1)` of contiguous float tokens `[..., d]` on a GPU: bool `[...]`."""
    found = torch.empty(tokens.shape[:-1], dtype=torch.bool, device=tokens.device)
    rows, width = found.numel(), tokens.shape[-1]
    with torch.cuda.device(tokens.device):
        _nonzero_kernel[(triton.cdiv(rows, _ROWS),)](
            tokens, found.view(torch.uint8), rows, width, ROWS=_ROWS, WIDTH=_WIDTH, num_warps=4
        )
    return found
