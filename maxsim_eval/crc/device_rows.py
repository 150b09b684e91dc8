"""What every row on a GPU adds to the CRC-32 of rows that lie one behind the other: one number each, from which any run's follows.

Row t of n bytes gives its remainder divided by x^(8 n t). The remainder of a run of rows is then the XOR of their numbers times
one power of x, wherever it begins and ends (`Summed`): the GPU need not know where the host will cut.

A program takes rows as words of 4 bytes, `LANES` at a time from their ends; what is missing before the first word counts as zero, which
changes no remainder.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_eval.crc.device_ranges import times
from maxsim_eval.crc.devices import sent, stream_of
from maxsim_eval.crc.remainders import ONE, moved, without_tail

LANES, ROWS = 32, 32
NEAR, FAR = 1024, 4096  # row t's power is that of t % NEAR times that of the NEAR-row groups before it: NEAR * FAR rows at most
STEP = moved(ONE, 4 * LANES)


@triton.jit(do_not_specialize=["rows", "width"])
def _rows_kernel(
    words_ptr, powers_ptr, sums_ptr, rows, width, STEP: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """`sums` `[rows]` of `words` `[rows, width]`; `powers` are those of lanes, of rows within `NEAR`, and of `NEAR` rows each."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    there = row < rows
    state = tl.zeros([ROWS, LANES], tl.uint32)
    for first in range(width - (width + LANES - 1) // LANES * LANES, width, LANES):
        place = first + lanes
        mask = there[:, None] & (place >= 0)[None, :]
        word = tl.load(words_ptr + row.to(tl.int64)[:, None] * width + place[None, :], mask=mask, other=0)
        state = times(state, tl.full([ROWS, LANES], STEP, tl.uint32)) ^ word.to(tl.uint32, bitcast=True)
    powers = tl.load(powers_ptr + lanes)
    whole = tl.xor_sum(times(state, tl.zeros([ROWS, LANES], tl.uint32) + powers[None, :]), 1)
    near = tl.load(powers_ptr + LANES + row % NEAR)
    far = tl.load(powers_ptr + LANES + NEAR + row // NEAR, mask=there, other=0)
    tl.store(sums_ptr + row, times(times(whole, near), far).to(tl.int32, bitcast=True), mask=there)


@lru_cache(maxsize=4)
def _powers(device: torch.device, row_bytes: int, stream: int) -> Tensor:
    """x^(8 n), n bytes behind a lane's words; then 1 / x^(8 n), n bytes before each of `NEAR` rows and each group of `NEAR`."""
    lanes = [moved(ONE, 4 * (LANES - lane)) for lane in range(LANES)]  # x^32 more: remainders are of the bytes times that
    before = [row_bytes * row for row in (*range(NEAR), *range(0, NEAR * FAR, NEAR))]
    return sent((*lanes, *(without_tail(ONE, count) for count in before)), device)


def row_sums(rows: Tensor) -> Tensor | None:
    """Queue what rows `[T, n]` of any dtype add to a CRC-32, `[T]` int32 (bits of uint32) on their device; nothing waits.

    None: rows that are no whole words of 4 bytes, or too many.
    """
    count, row_bytes = rows.shape[0], rows.shape[1] * rows.element_size()
    assert rows.is_contiguous()
    if row_bytes % 4 or count > NEAR * FAR:
        return None
    words = rows.view(-1).view(torch.int32)
    sums = torch.empty(count, dtype=torch.int32, device=rows.device)
    powers = _powers(rows.device, row_bytes, stream_of(rows.device))
    grid = (-(-count // ROWS),)
    _rows_kernel[grid](words, powers, sums, count, row_bytes // 4, STEP=STEP, LANES=LANES, ROWS=ROWS, NEAR=NEAR, num_warps=4)
    return sums
