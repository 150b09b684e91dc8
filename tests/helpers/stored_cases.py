"""Entries of the embedding cache, filled from given documents, and a disk on which there is no room for them."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxsim_eval.cache.converting import convert_entry
from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.filling import fill_entry
from maxsim_kernels import Packed, pack


def ragged(lengths: Sequence[int], dim: int = 24, dtype: torch.dtype = torch.float16, seed: int = 0) -> Packed:
    """Random documents of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return pack([torch.randn(length, dim, generator=generator).to(dtype) for length in lengths], dim=dim, dtype=dtype)


def filled(folder: Path, documents: Packed | Sequence[Tensor], **more: Any) -> Entry:
    """An entry of these documents, called d0, d1, ...; `more` goes to `fill_entry`, in place of what is chosen here or beside it."""
    packed = documents if isinstance(documents, Packed) else pack(documents)
    chosen: dict[str, Any] = {
        "ids": [f"d{n}" for n in range(len(packed))],
        "key": "0" * 16,
        "dtype": packed.dtype,
        "dim": packed.dim,
        "provenance": {},
        "encode": lambda start, stop: packed.select(range(start, stop)),
        "quiet": True,
    }
    return fill_entry(folder, **{**chosen, **more})


def filled_ragged(
    folder: Path, lengths: Sequence[int], per_shard: int, dim: int = 24, dtype: torch.dtype = torch.float16, key: str = "key"
) -> Entry:
    """An entry of random documents of these lengths, so many a shard."""
    return filled(folder, ragged(lengths, dim, dtype), key=key, documents_per_shard=per_shard)


def with_int8_copy(folder: Path, ids: Sequence[str], documents: Sequence[Tensor], documents_per_shard: int) -> Entry:
    """Documents of one dtype and width in shards, with an INT8 copy of a scale a document."""
    entry = filled(folder, documents, ids=ids, documents_per_shard=documents_per_shard)
    convert_entry(entry, "int8-document", quiet=True)
    return entry


class FullDisk:
    """A file that takes so many bytes, then is full as the system says it."""

    def __init__(self, path: Path, room: int) -> None:
        self.file, self.room = open(path, "wb"), room  # noqa: SIM115

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def seek(self, place: int) -> None:
        self.file.seek(place)

    def truncate(self, size: int) -> None:
        self.file.truncate(size)

    def write(self, content: memoryview) -> None:
        size = memoryview(content).nbytes
        self.file.write(bytes(content)[: self.room])
        self.room -= size
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
