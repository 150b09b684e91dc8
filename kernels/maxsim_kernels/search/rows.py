"""Documents, and codes, that lie elsewhere, on a disk or across a link, and are read when they are needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from maxsim_kernels.streaming import LazyCodes
from maxsim_kernels.tokens import Fp8Tokens, Int8Tokens, Packed

_READ = 128 << 20  # bytes of tokens that are held at once, at most


class Rows(ABC):
    """N documents of float tokens, some of which are read when they are needed: a subclass, over a file say, implements `read`.

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
        """Documents `span.start` to `span.stop`; nothing is read."""
        return _Part(self, span)

    @abstractmethod
    def read(self, numbers: Tensor) -> Packed:
        """Documents `numbers` (`[m]` int64, ascending), packed, on the CPU, in that order."""

    def empty(self) -> Tensor:
        """No tokens `[0, d]`."""
        return torch.empty(0, self.dim, dtype=self.dtype, device="cpu")


class StreamedCodes(ABC):
    """Codes without offsets of N documents, read when they are scanned: a subclass, over a file say, implements `read`.

    Args:
        lengths: `[N]` int64, tokens of every document, on the CPU.
        dtype: of the codes, int8 or float8_e4m3fn.
    """

    def __init__(self, lengths: Tensor, dtype: torch.dtype) -> None:
        if lengths.dim() != 1 or lengths.dtype != torch.int64:
            raise ValueError(f"lengths: got {lengths.dtype} {list(lengths.shape)}, need int64 [N]")
        if dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ValueError(f"dtype: got {dtype}, need torch.int8 or torch.float8_e4m3fn")
        self.lengths, self.dtype = lengths, dtype

    def __len__(self) -> int:
        return self.lengths.numel()

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[Int8Tokens | Fp8Tokens | LazyCodes]:
        """Packed codes of documents `start` to `stop` on the CPU, in order, in blocks of whole documents; lazy ones are read ahead."""


class _Part(Rows):
    """The documents `span` of other `Rows`."""

    def __init__(self, rows: Rows, span: slice) -> None:
        super().__init__(rows.lengths[span], rows.dim, rows.dtype)
        self.rows, self.first = rows, span.start

    def read(self, numbers: Tensor) -> Packed:
        """As `Rows.read`, with numbers that count from the first document of the span."""
        return self.rows.read(numbers + self.first)


def part(documents: Packed | Rows, span: slice) -> Packed | Rows:
    """Documents `span.start` to `span.stop`."""
    if isinstance(documents, Rows):
        return documents[span]
    return Packed.view(documents.values, documents.starts[span], documents.lengths[span])


def documents_at(documents: Packed | Rows, numbers: Tensor, most: int | None = None) -> Iterator[tuple[Tensor, Packed]]:
    """Documents `numbers` (ascending), at most `most` bytes at a time (`Packed`: all at once): their numbers and themselves."""
    if isinstance(documents, Packed):
        if len(numbers):
            yield numbers, Packed.view(documents.values, documents.starts[numbers], documents.lengths[numbers])
        return
    room = max(1, (_READ if most is None else min(most, _READ)) // (documents.dim * documents.dtype.itemsize))
    ends = torch.cumsum(documents.lengths[numbers], 0)
    first = 0
    while first < len(numbers):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(torch.searchsorted(ends, before + room, right=True)))
        some = numbers[first:last]
        found = documents.read(some)
        if found.dtype != documents.dtype or not torch.equal(found.lengths.long(), documents.lengths[some]):
            got = f"{len(found)} documents of {found.dtype}"
            raise ValueError(
                f"documents: read gave {got} and other lengths, need the {len(some)} asked for, of {documents.dtype}"
            )
        yield some, found
        first = last


def whole(documents: Packed | Rows, most: int | None = None) -> Iterator[Packed]:
    """All documents, at most `most` bytes at a time (`Packed`: all at once)."""
    if isinstance(documents, Packed):
        yield documents
        return
    found = False
    for _, held in documents_at(documents, torch.arange(len(documents), device="cpu"), most):
        found = True
        yield held
    if not found:
        yield Packed(documents.empty(), torch.zeros(len(documents) + 1, dtype=torch.int64, device="cpu"))
