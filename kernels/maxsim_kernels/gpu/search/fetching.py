"""Documents by number, end to end in device memory: out of device memory, or out of pinned host memory over the link.

Pinned memory has an address on the GPU, so the same kernel reads it where it lies: nothing is put together on the host, and only what
is asked for crosses the link.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.gpu.launch import launch
from maxsim_kernels.tokens import Packed

_WORDS = 1024  # of 4 bytes, that a step copies
_SHARES = 4  # programs a document


@triton.jit(do_not_specialize=["shares"])
def _fetch_kernel(
    value_ptr, start_ptr, offset_ptr, out_ptr, shares, token, WORDS: tl.constexpr
):  # fmt: skip
    """Copy documents, whose tokens are `token` words each, to their offsets in the result."""
    document = tl.program_id(0) // shares
    share = tl.program_id(0) % shares
    start = tl.load(start_ptr + document).to(tl.int64) * token
    offset = tl.load(offset_ptr + document).to(tl.int64) * token
    words = tl.load(offset_ptr + document + 1).to(tl.int64) * token - offset
    for first in range(share * WORDS, words, shares * WORDS):
        at = first + tl.arange(0, WORDS)
        tl.store(out_ptr + offset + at, tl.load(value_ptr + start + at, mask=at < words, other=0), mask=at < words)


def fetched(values: Tensor, starts: Tensor, offsets: Tensor, tokens: int) -> Packed:
    """Documents that begin at `starts` `[m]` of `values` `[T, d]` (contiguous; device or pinned), `offsets` `[m + 1]` in the result.

    `starts`, `offsets`: int64 on the device. `tokens`: the last of the offsets.
    """
    out = torch.empty(tokens, values.shape[1], dtype=values.dtype, device=starts.device)
    size = values.shape[1] * values.element_size()
    word = torch.int32 if size % 4 == 0 and values.data_ptr() % 4 == 0 else torch.int16 if size % 2 == 0 else torch.uint8
    if tokens:
        launch(
            _fetch_kernel, starts.numel() * _SHARES, values.view(word), starts.contiguous(), offsets, out.view(word), _SHARES,
            size // word.itemsize, WORDS=_WORDS, warps=4,
        )  # fmt: skip
    return Packed(out, offsets)
