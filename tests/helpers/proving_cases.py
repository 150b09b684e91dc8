"""Streams whose stored values are proven where they are scored: what is stored, damaged and scored, for a GPU and the interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from maxsim_eval.cache.converting import convert_entry
from maxsim_eval.cache.copies import quantised
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.errors import CacheError
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.records import Records
from maxsim_eval.scoring.scoring import Scored, score_path
from maxsim_kernels import pack
from stored_cases import with_int8_copy

KINDS = {"int8": "int8-token", "int8-document": "int8-document"}  # the copies that paths read
QUERIES = 3
Damage = tuple[str, str, str, float, bool]
# Path, file of the second shard, its column, the byte of the column that changes, as a part of it, and whether to NaN.
DAMAGES: tuple[Damage, ...] = (
    ("fp16", "00001.h5", "values", 0.5, False),
    ("fp16", "00001.h5", "values", 0.3, True),
    ("fp8", "00001.h5", "values", 0.5, True),  # quantising refuses it
    ("int8", "00001.int8-token.h5", "codes", 0.01, False),
    ("int8", "00001.int8-token.h5", "scales", 0.99, False),
    ("int8-document", "00001.int8-document.h5", "codes", 0.5, False),
)


def stored(folder: Path, count: int, longest: int, width: int, dtype: torch.dtype = torch.float16) -> Entry:
    """Documents of up to so many tokens, some empty, in 3 shards, with the copies that paths read."""
    rng = torch.Generator().manual_seed(count)
    documents = [torch.randn(n * 7 % longest, width, generator=rng).to(dtype) for n in range(count)]
    entry = with_int8_copy(folder, [f"d{n}" for n in range(count)], documents, -(-count // 3))
    convert_entry(entry, "int8-token", quiet=True)
    return entry


@contextmanager
def changed(path: Path, column: str, part: float, nan: bool) -> Iterator[int]:
    """One bit of a column changed, at a part of its bytes, or the number there made NaN; gives the token that it belongs to."""
    with h5py.File(path) as file:
        held = file[column]
        place, size, row = held.id.get_offset(), held.size * held.dtype.itemsize, held.size // len(held) * held.dtype.itemsize
    whole, times = path.read_bytes(), path.stat()
    content, byte = bytearray(whole), int(part * size)
    content[place + byte] ^= 4
    if nan:
        content[place + (byte | 1)] |= 0x7E  # the upper half of an FP16 number
    path.write_bytes(content)
    yield byte // row
    path.write_bytes(whole)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as it was, to whoever opened it before


def scored(documents: Any, name: str, device: str, units: Any, **options: Any) -> Scored:
    """The best of a path, streamed to a device."""
    tokens = torch.randn(QUERIES, 5, documents.dim, generator=torch.Generator().manual_seed(9))
    asked = Asked(
        [f"q{n}" for n in range(QUERIES)],
        [f"d{n}" for n in range(documents.documents)],
        7,
        np.full(QUERIES, -1),
        np.zeros(0, np.int64),
    )
    copy = quantised(documents, KINDS[name]) if name in KINDS else None
    budget = options.pop("budget", None)
    corpus = Corpus(documents, quiet=True, device=device, memory_budget=budget, copies={} if copy is None else {name: copy})
    found = score_path(name, pack(list(tokens.to(documents.dtype))), corpus, asked, units=units, **options)
    assert found is not None
    return found


def same(one: Scored, other: Scored) -> None:
    """The same bits."""
    assert one.scores.tobytes() == other.scores.tobytes()
    assert one.indices.tobytes() == other.indices.tobytes()


def refused(folder: Path, damage: Damage, device: str, units: Any, records: Path, **options: Any) -> None:
    """A stream that meets damage ends with file and stripe, and keeps no unit that it is in."""
    name, file, column, part, nan = damage
    with changed(folder / file, column, part, nan) as token:
        entry = open_entry(folder)
        with (
            pytest.raises(CacheError, match=rf"{file}: damaged: tokens \d+ to \d+ do not have the CRC-32") as caught,
            Records(records, {}) as kept,
        ):
            scored(entry, name, device, units, records=kept, **options)
        if not nan:
            scored(entry.unchecked(), name, device, units, **options)
    first, last = (int(word) for word in str(caught.value).split("tokens ")[1].split(" do ")[0].split(" to "))
    assert first <= token <= last
    bad = entry.shards[1].spec.start + int(np.searchsorted(entry.shards[1].offsets, token, side="right")) - 1
    ends = [int(path.stem.split("-")[1]) for path in records.glob("*.h5")]
    assert max(ends, default=0) <= bad
