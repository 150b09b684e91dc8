"""Query codes on the fly: one pass that turns float query tokens into INT8 or FP8 codes and one scale a token.

The rule is `quantize.py`'s for granularity "token", to the bit: the scale is rounded to FP16 first and the codes use the rounded one; a
zero token has scale 1; a token that is not finite has a NaN scale. Source: paper section 'INT8' and its appendix. How documents' scales
enter the products is said in `dense.py`, `general.py` and `wide.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.gpu.launch import empty, launch
from maxsim_kernels.gpu.tile_ops import keep_nan

_ROUND = tl.constexpr(12582912.0)  # adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even


@triton.jit(do_not_specialize=["rows", "size"])
def _query_codes_kernel(
    query_ptr, code_ptr, scale_ptr, rows, size, width, stride_n, stride_t, stride_d,
    LARGEST: tl.constexpr, EIGHT_BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes `[rows, width]` and float32 scales `[rows]` (values that FP16 holds) of queries `[Nq, size, width]`."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < rows
    source = query_ptr + (row // size) * stride_n + (row % size) * stride_t
    inner = tl.arange(0, WIDTH)
    absmax = tl.zeros([ROWS], tl.float32)
    for slice in range(0, width, WIDTH):
        column = slice + inner
        values = tl.load(
            source[:, None] + column.to(tl.int64)[None, :] * stride_d,
            mask=inside[:, None] & (column < width)[None, :],
            other=0.0,
        )
        absmax = keep_nan(absmax, tl.reduce(tl.abs(values.to(tl.float32)), 1, keep_nan))
    exact = tl.div_rn(absmax, LARGEST + tl.zeros([ROWS], tl.float32))
    scale = tl.maximum(exact, 5.9604644775390625e-08).to(tl.float16)
    # Among FP16 subnormals rounding may lose half the scale; there the largest value would leave the code range.
    clips = scale.to(tl.float32) * (LARGEST + 0.5) < exact * LARGEST
    above = (scale.to(tl.int16, bitcast=True) + 1).to(tl.int16).to(tl.float16, bitcast=True)
    finite = tl.abs(scale.to(tl.float32)) <= 65504.0
    stored = tl.where(clips & finite, above, scale).to(tl.float32)
    stored = tl.where(exact == 0.0, 1.0, stored)
    good = (stored <= 65504.0) & (exact < float("inf"))  # both false for NaN
    tl.store(scale_ptr + row, tl.where(good, stored, float("nan")), mask=inside)
    for slice in range(0, width, WIDTH):
        column = slice + inner
        held = inside[:, None] & (column < width)[None, :]
        values = tl.load(source[:, None] + column.to(tl.int64)[None, :] * stride_d, mask=held, other=0.0).to(tl.float32)
        scaled = tl.div_rn(values, tl.broadcast_to(tl.where(good, stored, 1.0)[:, None], [ROWS, WIDTH]))
        if EIGHT_BITS:
            codes = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        else:
            codes = tl.minimum(tl.maximum((scaled + _ROUND) - _ROUND, -127.0), 127.0)
        codes = tl.where(good[:, None], codes, 0.0)  # a NaN scale says it; the code itself must be some number
        tl.store(code_ptr + row[:, None] * width + column[None, :], codes.to(code_ptr.dtype.element_ty), mask=held)


def query_codes(queries: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of the queries' shape, contiguous, in `dtype` (int8 or float8_e4m3fn), and float32 scales of its leading shape."""
    lifted = queries if queries.dim() == 3 else queries.unsqueeze(0)
    count, size, width = lifted.shape
    codes = empty(tuple(queries.shape), dtype, queries.device)
    scales = empty(tuple(queries.shape[:-1]), torch.float32, queries.device)
    rows = count * size
    fp8 = dtype == torch.float8_e4m3fn
    held = min(256, max(16, triton.next_power_of_2(width)))
    launch(
        _query_codes_kernel, triton.cdiv(rows, 16),
        lifted, codes, scales, rows, size, width, lifted.stride(0), lifted.stride(1), lifted.stride(2),
        LARGEST=448.0 if fp8 else 127.0, EIGHT_BITS=fp8, ROWS=16, WIDTH=held, warps=4,
    )  # fmt: skip
    return codes, scales
