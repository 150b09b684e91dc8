"""CRC-32s (zlib's) of stored bytes: put together by arithmetic, and made where the bytes lie on a GPU.

device_ranges.py  CRC-32s of ranges of bytes on a GPU
device_rows.py    what every row on a GPU adds to the CRC-32 of rows that lie one behind the other
devices.py        which devices have the kernels, and powers of x that lie there
remainders.py     the arithmetic: a CRC-32 as a polynomial's remainder
summed.py         `Summed`: tokens that were checked where they were made, and come with what their rows add
summing.py        `Summing`: what the rows of a GPU's tokens add, once the kernel is compiled
"""
