"""Stored values proven on the GPU that scores them: reads leave the CRC-32s of long runs ("claims") to `Proofs`, off the host.

For every block the CRCs of its parts of claims are queued on the GPU. They come back with the results of the block's unit, which
are handed out only after the CRCs were compared. So nothing is kept or reported of values that were not proven, their way to the
GPU included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from zlib_ng import zlib_ng

from maxsim_eval.cache.stripes import Claim, Claims
from maxsim_kernels import Fp8Tokens, Int8Tokens


@dataclass(frozen=True)
class _Part:
    """What a block holds of a claim: the bytes between two addresses, and whether they are the claim's last."""

    claim: Claim
    start: int
    stop: int
    last: bool


@dataclass(frozen=True)
class _Column:
    """Where a block's column lies. Parts are found by arithmetic: a call of torch would have to wait for threads that read."""

    base: int
    rows: int
    row_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Column:
        assert tensor.is_contiguous()
        rows = tensor.shape[0]
        return cls(tensor.data_ptr(), rows, tensor.nbytes // max(rows, 1))

    def part(self, claim: Claim, place: int) -> _Part:
        """The part of a claim that lies in this column, whose first row is row `place` of the stream."""
        first, stop = max(claim.first - place, 0), min(claim.stop - place, self.rows)
        ends = claim.stop - place <= self.rows
        return _Part(claim, self.base + first * self.row_bytes, self.base + stop * self.row_bytes, ends)


@dataclass
class Launch:
    """The proof of a block: the CRCs of its parts are made from `words`, on the device and later on the host."""

    parts: list[_Part]
    words: Tensor


class Proofs:
    """The proofs of one stream of blocks; its readers add what is to be proven to `claims`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.claims = device, Claims()
        self._place, self._open = 0, list[Claim]()  # rows of earlier blocks, and claims that go on in the next one
        self._launches: list[Launch] = []

    def launch(self, block: Any) -> None:
        """Queue the proof of the next block, on the current stream of its device; nothing waits."""
        columns = {name: _Column.of(tensor) for name, tensor in _columns(block).items()}
        place, stop = self._place, self._place + next(iter(columns.values())).rows
        new = self.claims.take(stop)
        assert all(claim.first >= place for claim in new), "claims of a block that has gone by"
        parts = [columns[claim.column].part(claim, place) for claim in (*self._open, *new)]
        self._place, self._open = stop, [part.claim for part in parts if not part.last]
        if parts:
            from maxsim_eval.crc.device_ranges import remainders  # needs Triton

            words = remainders([(part.start, part.stop) for part in parts], self.device)
            self._launches.append(Launch(parts, words))

    def take(self) -> list[Launch]:
        """The launches since the last call, at the end of a unit: every claim must have ended."""
        assert not self._open, "claims that no block has ended"
        return self.pending()

    def pending(self) -> list[Launch]:
        """The launches since the last call."""
        found, self._launches = self._launches, []
        return found


def settle(launches: Iterable[Launch]) -> None:
    """Compare CRCs that have arrived, those of a claim in order from its first on; `CacheError` names the file and what is damaged."""
    crcs: dict[Claim, int] = {}
    for launch in launches:
        from maxsim_eval.crc.device_ranges import crc_of  # needs Triton

        for part, words in zip(launch.parts, launch.words.cpu().numpy(), strict=True):
            here = crc_of(words, part.start, part.stop)
            crcs[part.claim] = zlib_ng.crc32_combine(crcs.get(part.claim, 0), here, part.stop - part.start)
            if part.last and crcs[part.claim] != part.claim.crc:
                part.claim.blame()


def _columns(block: Any) -> dict[str, Tensor]:
    """A block's tensors by the names that they have in files, tokens first."""
    if not isinstance(block, Int8Tokens | Fp8Tokens):
        return {"values": block.values}
    offset = block.offset if isinstance(block, Int8Tokens) else None
    return {"codes": block.token_values, "scales": block.scales} | ({} if offset is None else {"offset": offset})
