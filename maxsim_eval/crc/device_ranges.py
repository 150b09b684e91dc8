"""CRC-32 (zlib's) of ranges of bytes where they lie on a GPU, at the speed of its memory: a launch for every eight ranges.

A CRC is the remainder of the bytes, as a polynomial over GF(2), modulo P of degree 32. A program takes `ROWS` rows of `LANES` words.
Words below each other are y = x^(32 LANES) apart. 32 LANES is a power of two, so that P(y) = P(x)^(32 LANES): squaring over GF(2)
only spreads a polynomial. So a column is reduced modulo P(y) to 32 words, by 14 XORs a word, without a product or a table. A few
products with powers of x then join columns, and a range's programs, in one word. Bits are reflected, as in zlib: bit 31 is x^0.

What lies in front of a range's first byte in its word counts as zero, which changes no remainder; zeros behind its last byte multiply
it by a power of x, which the host divides by.

Ranges are arguments of the launch: a table of them, copied to the GPU on the stream that scores, would wait there for its turn behind
the blocks that are on their way over the same link, a millisecond each, and the scores with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_eval.crc.devices import sent, stream_of
from maxsim_eval.crc.remainders import ALL, ONE, moved, of_zeros, without_tail

POLYNOMIAL = 0x04C11DB7  # P without x^32: bit j is x^j
REFLECTED = tl.constexpr(0xEDB88320)
TAPS = tl.constexpr(POLYNOMIAL)
LANES, ROWS = 128, 256
RANGES = 8  # of a launch: as many as threads read parts of a block
Y = moved(ONE, 4 * LANES)


@triton.jit
def times(a, b):
    """The product of two remainders."""
    product = a & 0
    for bit in tl.static_range(
        31, -1, -1
    ):  # by a condition: the bits of a register become predicates, half as many instructions
        product = tl.where((a & (1 << bit)) != 0, product ^ b, product)
        b = (b >> 1) ^ (0 - (b & 1)) & REFLECTED
    return product


@triton.jit
def _with_row(state, row):
    """One row more: the polynomial in y (its coefficients, y^0 first) times y, plus the row, modulo P(y)."""
    found = (state[31] ^ row,)
    for power in tl.static_range(1, 32):
        if (TAPS >> power) & 1:
            found += (state[power - 1] ^ state[31],)
        else:
            found += (state[power - 1],)
    return found


@triton.jit
def _one_of(number, a, b, c, d, e, f, g, h):
    """Argument number `number`, 0 to 7, of the eight."""
    low = tl.where(number == 0, a, tl.where(number == 1, b, tl.where(number == 2, c, d)))
    high = tl.where(number == 4, e, tl.where(number == 5, f, tl.where(number == 6, g, h)))
    return tl.where(number < 4, low, high)


_ADDRESSES = [f"{end}{number}" for number in range(RANGES) for end in ("start", "stop")]


@triton.jit(do_not_specialize=["chunks", *_ADDRESSES])
def _crc_kernel(
    words_ptr, powers_ptr, chunks, start0, stop0, start1, stop1, start2, stop2, start3, stop3, start4, stop4, start5, stop5,
    start6, stop6, start7, stop7, Y: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program for every chunk of every range, the chunks counted from the range's end.

    A range is given by the addresses of its first byte and behind its last one. `words` `[ranges, chunks]` get the part of every
    chunk in its range's remainder, 0 where the range has no such chunk: their XOR is the remainder.
    """
    chunk, number = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    start = _one_of(number, start0, start1, start2, start3, start4, start5, start6, start7)
    stop = _one_of(number, stop0, stop1, stop2, stop3, stop4, stop5, stop6, stop7)
    end = (stop + 3) // 4 * 4 - chunk.to(tl.int64) * (LANES * ROWS * 4)
    part = tl.full([], 0, tl.uint32)
    if end > start:
        size = tl.minimum(end - start, LANES * ROWS * 4).to(tl.int32)
        groups = size // (32 * LANES * 4)
        first = (size + LANES * 4 - 1) // (LANES * 4) - groups * 32  # rows before groups of 32 that lie within the range
        lanes = tl.arange(0, LANES)
        place = end - (first + groups * 32).to(tl.int64) * (LANES * 4) + lanes * 4
        state = ()
        for _ in tl.static_range(32):
            state += (tl.zeros([LANES], tl.uint32),)
        for _ in range(first):
            word = tl.load(place.to(tl.pointer_type(tl.uint32)), mask=place + 3 >= start, other=0)
            before = tl.minimum(tl.maximum(start - place, 0), 3).to(tl.uint32)  # bytes of the word that are not the range's
            state = _with_row(state, word & (0xFFFFFFFF << (before * 8)))
            place += LANES * 4
        for _ in range(groups):
            for _ in tl.static_range(32):
                state = _with_row(state, tl.load(place.to(tl.pointer_type(tl.uint32))))
                place += LANES * 4
        # The bytes of the last word behind the range went into y^0 unmasked: `rest` takes them out again.
        behind = tl.where((chunk == 0) & (lanes == LANES - 1), (-stop & 3).to(tl.uint32), 0)
        last = tl.load((place - LANES * 4).to(tl.pointer_type(tl.uint32)), mask=behind > 0, other=0)
        rest = last & (0xFFFFFFFF << (32 - 8 * behind & 31))
        column = tl.zeros([LANES], tl.uint32)
        for _ in range(8):  # shifting the state costs moves, but with all 32 steps unrolled Triton compiles for minutes
            for _ in tl.static_range(4):
                column = times(column, tl.full([], Y, tl.uint32)) ^ state[31]
                state = (state[31],) + state[:31]
        whole = tl.xor_sum(times(column ^ rest, tl.load(powers_ptr + lanes)), 0)
        part = times(whole, tl.load(powers_ptr + LANES + chunk))
    tl.store(words_ptr + number * chunks + chunk, part.to(tl.int32, bitcast=True))


@lru_cache(maxsize=8)
def _powers(device: torch.device, chunks: int, stream: int) -> Tensor:
    """Factors of lanes, then of chunks: x^(8 n), n bytes behind each (lanes: x^32 more, a CRC is of the message and 32 zeros)."""
    behind = [*range(4 * LANES, 0, -4), *(4 * LANES * ROWS * chunk for chunk in range(chunks))]
    return sent((moved(ONE, n) for n in behind), device)


def remainders(ranges: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Queue parts of byte ranges' remainders, `[R, chunks]` int32 on the device, of which `crc_of` makes CRC-32s; nothing waits.

    Args:
        ranges: addresses of the first byte and behind the last one, in memory of the device; what else lies in the words of 4 bytes
            that they begin and end in is read too, and has no effect.
    """
    most = max(stop - start for start, stop in ranges)
    chunks = (most + 3) // (4 * LANES * ROWS) + 1  # up to 3 bytes more where a range ends within a word
    powers = _powers(device, 1 << (chunks - 1).bit_length(), stream_of(device))
    words = torch.empty(len(ranges), chunks, dtype=torch.int32, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for first in range(0, len(ranges), RANGES):
            some = ranges[first : first + RANGES]
            addresses = chain(*some, *[some[-1]] * (RANGES - len(some)))  # no program takes those filled up with
            _launch(device, chunks * len(some), words[first:], powers, chunks, *addresses)
    return words


_compiled: dict[tuple[torch.device, int], Any] = {}  # by device and `ROWS`: no size is compiled in, and our memory is aligned


def _launch(device: torch.device, grid: int, *arguments: Any) -> None:
    """Launch the kernel; from the second time on without Triton's search for the compiled one, which takes the host 0.1 ms."""
    compiled = _compiled.get((device, ROWS))
    if compiled is not None:
        compiled[(grid, 1, 1)](*arguments, Y, LANES, ROWS)
        return
    made = _crc_kernel[(grid,)](*arguments, Y=Y, LANES=LANES, ROWS=ROWS, num_warps=LANES // 32)
    if made is not None:  # an interpreter has none
        _compiled[device, ROWS] = made


def crc_of(words: np.ndarray, start: int, stop: int) -> int:
    """The CRC-32 of a range from what `remainders` has of it, `[chunks]` int32."""
    remainder, size, padded = int(np.bitwise_xor.reduce(words)) & ALL, stop - start, -stop % 4
    return without_tail(remainder, padded) ^ of_zeros(size)
