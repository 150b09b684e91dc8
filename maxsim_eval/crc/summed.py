"""Tokens that were checked where they were made: all are finite, and come with what each row adds to a CRC-32."""

from __future__ import annotations

import numpy as np
from torch import Tensor
from zlib_ng import zlib_ng

from maxsim_eval.crc.remainders import ALL, moved, of_zeros
from maxsim_kernels import Packed


class Summed(Packed):
    """Packed tokens of the CPU whose encoder found every value finite, and summed the rows before they came here.

    Args:
        values, offsets: as of `Packed`.
        sums: `[T]` uint32: what row t adds (`device_rows.py`).
    """

    def __init__(self, values: Tensor, offsets: Tensor, sums: np.ndarray) -> None:
        super().__init__(values, offsets)
        assert len(sums) == values.shape[0]
        self.sums = sums

    def crc(self, first: int, stop: int) -> int:
        """The CRC-32 of rows `first` to `stop`, one at least, as they were summed."""
        part, row_bytes = int(np.bitwise_xor.reduce(self.sums[first:stop])), self._row_bytes
        return moved(part, row_bytes * (stop - 1)) ^ of_zeros(row_bytes * (stop - first))

    @property
    def _row_bytes(self) -> int:
        return self.values.shape[1] * self.values.element_size()

    def enter(self, crcs: np.ndarray, first: int, stripe: int) -> None:
        """Enter in `crcs` `[S]` the running CRC-32s, at every `stripe` rows, of these next rows, from row `first` on."""
        count, row_bytes = len(self.sums), self._row_bytes
        if not count:
            return
        number = first // stripe
        stops = np.arange((number + 1) * stripe - first, count + stripe, stripe).clip(max=count)
        parts = np.bitwise_xor.accumulate(self.sums)[stops - 1].tolist()
        before = moved((int(crcs[(first - 1) // stripe]) if first else 0) ^ ALL, row_bytes)
        for at, (stop, part) in enumerate(zip(stops.tolist(), parts), number):
            crcs[at] = zlib_ng.crc32_combine(before ^ part, ALL, row_bytes * (stop - 1))
