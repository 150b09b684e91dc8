"""Entries of the embedding cache, filled from given documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from maxsim_eval.cache.converting import convert_entry
from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.filling import fill_entry
from maxsim_kernels import pack


def with_int8_copy(folder: Path, ids: Sequence[str], documents: Sequence[Tensor], documents_per_shard: int) -> Entry:
    """Documents of one dtype and width in shards, with an INT8 copy of a scale a document."""
    entry = fill_entry(
        folder,
        ids=ids,
        key="0" * 16,
        dtype=documents[0].dtype,
        dim=documents[0].shape[1],
        provenance={},
        encode=lambda start, stop: pack(documents[start:stop], dim=documents[0].shape[1]),
        documents_per_shard=documents_per_shard,
        quiet=True,
    )
    convert_entry(entry, "int8-document", quiet=True)
    return entry
