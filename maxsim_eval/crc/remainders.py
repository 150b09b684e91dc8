"""A CRC-32 as a remainder: bytes are a polynomial over GF(2), times x^32 and modulo P of degree 32; bits reflected, bit 31 is x^0.

zlib's CRC-32 begins and ends with 32 ones: that of n bytes is their remainder XOR 32 ones, moved by n bytes, XOR 32 ones. The
last two are `of_zeros(n)`.
"""

from __future__ import annotations

from zlib_ng import zlib_ng

ONE, ALL = 1 << 31, (1 << 32) - 1  # x^0; every bit
ORDER = (1 << 32) - 1  # multiplying a remainder by x^8 this many times does not change it


def moved(remainder: int, count: int) -> int:
    """The remainder times x^(8 count): of the same bytes with `count` zero bytes behind them."""
    return zlib_ng.crc32_combine(remainder, 0, count)


def of_zeros(count: int) -> int:
    """The CRC-32 of `count` zero bytes."""
    return zlib_ng.crc32_combine(ALL, ALL, count)


def without_tail(crc: int, count: int) -> int:
    """Undo `moved`: the value that `moved(value, count)` turns into `crc`."""
    return moved(crc, ORDER - count % ORDER)
