"""An entry of ten documents in four shards, and what tests of filling one ask of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from maxsim_eval.cache.entries import Entry
from maxsim_kernels import Packed
from stored_cases import filled

COUNT, SPLIT = 10, 3  # documents, documents a shard
SHARDS = [f"0000{n}.h5" for n in range(4)]


def tokens(start: int, stop: int) -> Packed:
    """Document n: n tokens, all of them n."""
    lengths = torch.arange(start, stop)
    values = torch.repeat_interleave(lengths, lengths).float()[:, None].expand(-1, 4)
    return Packed(values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))


def fill(folder: Path, encode: Callable[[int, int], Packed] = tokens, **options) -> Entry:
    return filled(folder, tokens(0, COUNT), **{"key": "key", "encode": encode, "documents_per_shard": SPLIT, **options})


def assert_right(entry: Entry) -> None:
    entry.verify()
    want = tokens(0, COUNT)
    got = entry.load()
    assert torch.equal(got.values, want.values)
    assert torch.equal(got.lengths, want.lengths)


def files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != ".lock")


def counted() -> tuple[Callable[[int, int], Packed], list[tuple[int, int]]]:
    calls: list[tuple[int, int]] = []

    def encode(start: int, stop: int) -> Packed:
        calls.append((start, stop))
        return tokens(start, stop)

    return encode, calls
