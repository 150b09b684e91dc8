"""Documents pooled by several processes: pooling is Python code, and Python's lock lets one thread at a time run it.

Processes are kept from block to block: beginning one in a program that holds a GPU takes 0.1 s, more than a block's work. They
read and write memory shared with them, which must be made before they begin: for tokens of another width or dtype, or a larger
block, others are begun in their place.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from maxsim_eval.environment import cores
from maxsim_kernels import Packed

_PROCESSES, _LEAST_EACH = 16, 16  # most processes, and least documents of a block for each: one takes some milliseconds

PoolOne = Callable[[Tensor], Tensor]


class _Document(NamedTuple):
    """Where a document's tokens begin in what is read, how many they are, and where they go in what is written."""

    start: int
    length: int
    place: int


class _Kind(NamedTuple):
    """The tokens that processes are begun for."""

    dim: int
    dtype: torch.dtype


class _Documents(Dataset[int]):
    """A torch data set: getting item `(pool_one, document)` pools that document and gives its new number of tokens."""

    def __init__(self, kind: _Kind, rows: int) -> None:
        self.read, self.written = (_shared(rows, kind) for _ in range(2))

    def __getitem__(self, asked: tuple[PoolOne, _Document]) -> int:
        pool_one, document = asked
        found = self.read[document.start : document.start + document.length]
        found = pool_one(found) if len(found) else found
        self.written[document.place : document.place + len(found)] = found
        return len(found)


class _Batches:
    """The documents of the current block, in batches for the processes."""

    def __init__(self) -> None:
        self.documents: list[tuple[PoolOne, _Document]] = []

    def __iter__(self) -> Iterator[list[tuple[PoolOne, _Document]]]:
        each = _LEAST_EACH // 2
        return (self.documents[n : n + each] for n in range(0, len(self.documents), each))


class _Workers:
    """Processes of one kind, and the memory shared with them."""

    def __init__(self, kind: _Kind, rows: int, processes: int) -> None:
        self.kind, self.rows, self.processes = kind, rows, processes
        self.documents, self.batches = _Documents(kind, rows), _Batches()
        self.loader: DataLoader[int] = DataLoader(
            self.documents,
            batch_sampler=self.batches,
            collate_fn=list,
            num_workers=processes,
            persistent_workers=processes > 0,
            multiprocessing_context="fork" if processes else None,
        )

    def pool(self, pool_one: PoolOne, tokens: Packed, most: np.ndarray) -> Packed:
        """Pool the documents of one block, each to at most `most` tokens."""
        assert tokens.offsets is not None
        places = np.concatenate([np.zeros(1, np.int64), np.cumsum(most)])
        starts, lengths = tokens.offsets[:-1].tolist(), tokens.lengths.tolist()
        self.documents.read[: len(tokens.values)].copy_(tokens.values)
        self.batches.documents = [(pool_one, _Document(*each)) for each in zip(starts, lengths, places.tolist(), strict=False)]
        counts = torch.tensor([count for some in self.loader for count in some], dtype=torch.int64)
        written = self.documents.written[: places[-1]].to(tokens.device)  # moved first, then compacted there
        found = Packed.view(written, torch.from_numpy(places[:-1]).to(written.device), counts.to(written.device)).compact()
        shared = found.values.untyped_storage().data_ptr() == self.documents.written.untyped_storage().data_ptr()
        return found.with_values(found.values.clone()) if shared else found  # the next block writes there


_kept: dict[int, _Workers] = {}  # of the last call, by the id of the process that began them: a fork of it must not use them


def pooled(pool_one: PoolOne, tokens: Packed, most: np.ndarray) -> Packed:
    """Pool documents on the CPU, each by `pool_one`, to at most `most` tokens and never more than it had.

    Calls share processes, to which `pool_one` is sent (pickled).
    """
    tokens = tokens.compact()
    if not most.sum():
        return tokens
    kind = _Kind(tokens.dim, tokens.dtype)
    workers = _kept.pop(os.getpid(), None)  # put back when the block is done, so those of a failed call are not used again
    if workers is None or workers.kind != kind or workers.rows < len(tokens.values):
        workers = _Workers(kind, len(tokens.values) * 5 // 4, _processes(len(tokens)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes: sums of several threads could have other bits
    try:
        found = workers.pool(pool_one, tokens, most)
    finally:
        torch.set_num_threads(threads)
    if workers.processes:
        _kept[os.getpid()] = workers
    return found


def _processes(documents: int) -> int:
    """How many processes to begin for a block of so many documents; 0: this one pools them."""
    found = min(_PROCESSES, cores(), documents // _LEAST_EACH)
    return found if found > 1 else 0


def _shared(rows: int, kind: _Kind) -> Tensor:
    """Memory that processes begun later share with this one, [rows, dim]."""
    count = max(rows, 1) * kind.dim
    return torch.frombuffer(mmap.mmap(-1, count * kind.dtype.itemsize), dtype=kind.dtype, count=count).view(-1, kind.dim)
