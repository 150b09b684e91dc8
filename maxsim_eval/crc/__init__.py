"""CRC-32s (zlib's) of stored bytes: put together by arithmetic, and made where the bytes lie on a GPU.

device_ranges.py  of ranges of bytes on a GPU
device_rows.py    what every row on a GPU adds to the CRC-32 of rows that lie one behind the other
devices.py        which devices have the kernels, and powers of x that lie there
remainders.py     the arithmetic: a CRC-32 as a polynomial's remainder
summed.py         `Summed`: tokens that come with what their rows add, so that nobody need look at them again
summing.py        `Summing`: the sums of what a GPU encodes, as soon as their kernel is compiled
"""
