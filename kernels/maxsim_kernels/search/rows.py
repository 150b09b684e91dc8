"""Documents that lie elsewhere, on a disk or across a link, and are read when they are needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from maxsim_kernels.tokens import Packed

_READ = 64 << 20  # bytes of tokens that are held at once


class Rows(ABC):
    """N documents of float tokens, of which some are asked for: a class of one's own over a file says how.

    Args:
        lengths: `[N]` int64, tokens of every document.
        dim: width of a token.
        dtype: of the tokens.
    """

    def __init__(self, lengths: Tensor, dim: int, dtype: torch.dtype) -> None:
        if lengths.dim() != 1 or lengths.dtype != torch.int64:
            raise ValueError(f"lengths: got {lengths.dtype} {list(lengths.shape)}, need int64 [N]")
        self.lengths, self.dim, self.dtype = lengths, dim, dtype

    def __len__(self) -> int:
        return self.lengths.numel()

    def __getitem__(self, span: slice) -> Rows:
        """Documents `span.start` to `span.stop`, where they lie."""
        return _Part(self, span)

    @abstractmethod
    def read(self, numbers: Tensor) -> Packed:
        """Documents `numbers` (`[m]` int64, ascending), packed, on the CPU, in that order."""

    def empty(self) -> Tensor:
        """No tokens `[0, d]`."""
        return torch.empty(0, self.dim, dtype=self.dtype)


class _Part(Rows):
    """Documents `first` and those after it, as many as `lengths`."""

    def __init__(self, rows: Rows, span: slice) -> None:
        super().__init__(rows.lengths[span], rows.dim, rows.dtype)
        self.rows, self.first = rows, span.start

    def read(self, numbers: Tensor) -> Packed:
        """Of the whole."""
        return self.rows.read(numbers + self.first)


def part(documents: Packed | Rows, span: slice) -> Packed | Rows:
    """Documents `span.start` to `span.stop`."""
    if isinstance(documents, Rows):
        return documents[span]
    return Packed.view(documents.values, documents.starts[span], documents.lengths[span])


def documents_at(documents: Packed | Rows, numbers: Tensor) -> Iterator[tuple[Tensor, Packed]]:
    """Documents `numbers` (ascending), a few at a time: their numbers and themselves; what is in memory all at once."""
    if isinstance(documents, Packed):
        if len(numbers):
            yield numbers, Packed.view(documents.values, documents.starts[numbers], documents.lengths[numbers])
        return
    room = max(1, _READ // (documents.dim * documents.dtype.itemsize))
    ends = torch.cumsum(documents.lengths[numbers], 0)
    first = 0
    while first < len(numbers):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(torch.searchsorted(ends, before + room, right=True)))
        some = numbers[first:last]
        held = documents.read(some)
        if held.dtype != documents.dtype or not torch.equal(held.lengths.long(), documents.lengths[some]):
            got = f"{len(held)} documents of {held.dtype}"
            raise ValueError(
                f"documents: read gave {got} and other lengths, need the {len(some)} asked for, of {documents.dtype}"
            )
        yield some, held
        first = last


def whole(documents: Packed | Rows) -> Iterator[Packed]:
    """All of them, a few at a time; what is in memory all at once."""
    if isinstance(documents, Packed):
        yield documents
        return
    found = False
    for _, held in documents_at(documents, torch.arange(len(documents))):
        found = True
        yield held
    if not found:
        yield Packed(documents.empty(), torch.zeros(len(documents) + 1, dtype=torch.int64))
