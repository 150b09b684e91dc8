"""Blocks of documents, cut into pieces of bounded size: whole documents, in order, described by the tensors that have to travel.

Nothing is read or copied here. A piece names its tensors (`Part`: where one lies on the host, or who reads it) and how to build the
documents from them once they arrived; `transfer.py` moves them. Documents that lie where they are needed are only sliced.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor

from maxsim_kernels.checks import Documents
from maxsim_kernels.tokens import FLOAT_DTYPES, Fp8Tokens, Granularity, Int8Tokens, Packed, held_of

ALIGNMENT = 256  # bytes: of every part in a buffer, more than any kernel asks for
_MOST_PARTS = 4  # codes, scales, offset, document offsets
Read = Callable[[int, Tensor], None]
Row = Literal["token", "document", "all"]


@dataclass(frozen=True)
class LazyBlock:
    """Packed documents that are read when their turn comes.

    Args:
        offsets: `[n + 1]` int64 on the CPU, starting at 0: document i is the tokens `offsets[i] .. offsets[i + 1]` of this block.
        dim: embedding width d.
        dtype: float16, bfloat16 or float32.
        read: `read(first, out)` fills `out` `[m, dim]` (contiguous, on the CPU) with the tokens `first .. first + m` of this block. It
            is called from reader threads, of several blocks and of several parts of one block at once.
    """

    offsets: Tensor
    dim: int
    dtype: torch.dtype
    read: Read

    def __post_init__(self) -> None:
        _require_documents(self.offsets, self.dim)
        if self.dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype: got {self.dtype}, need float16, bfloat16 or float32")

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    def load(self) -> Packed:
        """The documents, read into memory of their own."""
        return cast(Packed, _loaded(self))


@dataclass(frozen=True)
class LazyCodes:
    """Packed documents of 8-bit codes that are read when their turn comes, as `Int8Tokens` or `Fp8Tokens` of `Packed`.

    Args:
        offsets: `[n + 1]` int64 on the CPU, as of `LazyBlock`.
        dim: embedding width d.
        dtype: of the codes, int8 or float8_e4m3fn.
        granularity: what a scale is for: "token", "document" or "corpus".
        columns: "codes", "scales" and, of affine codes, "offset": each a tensor on the CPU, as in `Int8Tokens`; or, for codes and for
            what there is one of a token, `read(first, out)` as in `LazyBlock`, for rows `[m, d]` of codes, `[m]` float16 of the rest.
    """

    offsets: Tensor
    dim: int
    dtype: torch.dtype
    granularity: Granularity
    columns: Mapping[str, Tensor | Read]

    def __post_init__(self) -> None:
        _require_documents(self.offsets, self.dim)
        if self.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ValueError(f"dtype: got {self.dtype}, need int8 or float8_e4m3fn")
        names = list(self.columns)
        affine = self.dtype == torch.int8 and "offset" in names
        if names != ["codes", "scales", *(["offset"] if affine else [])]:
            raise ValueError(f"columns: got {', '.join(names)}, need codes, scales and, of affine INT8, offset")
        if self.granularity != "token" and any(not isinstance(self.columns[name], Tensor) for name in names[1:]):
            raise ValueError(
                f"columns: scales of a {self.granularity} are a tensor, need read functions for those of tokens alone"
            )

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    def load(self) -> Int8Tokens | Fp8Tokens:
        """The documents, read into memory of their own; what is in memory is not copied."""
        return cast("Int8Tokens | Fp8Tokens", _loaded(self))


def _require_documents(offsets: object, dim: int) -> None:
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.is_cuda:
        raise ValueError("offsets: need a 1-D int64 tensor on the CPU")
    if offsets.numel() < 1 or int(offsets[0]) != 0 or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError("offsets: need n + 1 entries, starting at 0 and never decreasing")
    if dim < 1:
        raise ValueError(f"dim: got {dim}, need 1 or more")


Block = Documents | LazyBlock | LazyCodes


@dataclass(frozen=True)
class Limits:
    """What a piece may hold: bytes of tensors (one document may be larger), and documents."""

    size: int
    documents: int


@dataclass(frozen=True)
class Part:
    """One tensor of a piece: it lies on the host (`tensor`), or `read(first row, out)` fills rows `[m, ...]` of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None = None
    read: Read | None = None

    @property
    def size(self) -> int:
        """Bytes that the part takes in a buffer."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """Some documents: the parts that have to arrive, and the documents that they make."""

    parts: tuple[Part, ...]
    build: Callable[[Sequence[Tensor]], Documents]


def pieces(blocks: Iterable[Block], device: torch.device, limits: Limits) -> Iterator[Piece | Documents]:
    """The documents of `blocks` in order: pieces that have to travel to `device`, or documents that are there already."""
    for number, block in enumerate(blocks):
        if isinstance(block, LazyBlock | LazyCodes):
            yield from _lazy_pieces(block, device, limits)
            continue
        where = _checked(number, block)
        if where == device:
            yield from _sliced(block, limits)
        elif where.type == "cpu":
            yield from _host_pieces(block, limits)
        else:
            raise ValueError(f"blocks: block {number} is on {where}, need the host or {device}")


def _checked(number: int, block: object) -> torch.device:
    held = held_of(block)
    if isinstance(held, Packed):
        return held.device
    if not isinstance(held, Tensor):
        raise ValueError(
            f"blocks: block {number} is {type(block).__name__}, need Packed, [b, Ld, d], Int8Tokens, Fp8Tokens, LazyBlock or "
            "LazyCodes"
        )
    if held.dim() != 3:
        raise ValueError(f"blocks: block {number} is {list(held.shape)}, need [b, Ld, d]")
    return held.device


def _spans(count: int, limits: Limits, cost: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """Cut `count` documents into spans within the limits on bytes (`cost`: of the first n) and number, one document at least.

    Spans cost about the same: every piece takes the host a fixed time, which a short one at a block's end would not be worth.
    """
    size = limits.size - (_MOST_PARTS + 1) * ALIGNMENT
    first = 0
    while first < count:
        begin, most = cost(first), min(count, first + limits.documents)
        left = max(-(-(cost(count) - begin) // size), -(-(count - first) // limits.documents), 1)
        even = begin + -(-(cost(count) - begin) // left)
        ends = range(first + 1, most + 1)
        fits = bisect_right(ends, begin + size, key=cost)
        stop = first + max(1, min(fits, bisect_left(ends, even, key=cost) + 1))
        yield first, stop
        first = stop


@dataclass(frozen=True)
class _Column:
    """One tensor of a block, or the function that reads it. `row`: what a row stands for; `width`: the shape of a row."""

    source: Tensor | Read
    row: Row
    dtype: torch.dtype
    width: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, row: Row) -> _Column:
        """The column of a tensor, detached from autograd."""
        return cls(tensor.detach(), row, tensor.dtype, tuple(tensor.shape[1:]))

    @property
    def row_bytes(self) -> int:
        """Bytes that one row takes."""
        return torch.Size(self.width).numel() * self.dtype.itemsize

    def part(self, first: int, stop: int, start: int, end: int) -> Part:
        """The part of it for documents `first` to `stop`, whose tokens are `start` to `end`."""
        if not isinstance(self.source, Tensor):
            return Part((end - start, *self.width), self.dtype, read=partial(_read_from, self.source, start))
        spans = {"token": slice(start, end), "document": slice(first, stop)}
        return _at_hand(self.source[spans[self.row]] if self.row in spans else self.source)


def _read_from(read: Read, start: int, first: int, out: Tensor) -> None:
    read(start + first, out)


def _lazy_columns(block: LazyBlock | LazyCodes) -> list[_Column]:
    """The columns of a lazy block, tokens first."""
    if isinstance(block, LazyBlock):
        return [_Column(block.read, "token", block.dtype, (block.dim,))]
    codes, *others = block.columns.values()
    row: Row = "all" if block.granularity == "corpus" else block.granularity
    return [
        _Column(codes, "token", block.dtype, (block.dim,)),
        *(_Column(one, row, torch.float16, ()) for one in others),
    ]


def _lazy_pieces(block: LazyBlock | LazyCodes, device: torch.device, limits: Limits) -> Iterator[Piece]:
    ends, columns = block.offsets.numpy(), _lazy_columns(block)
    token, document = (sum(one.row_bytes for one in columns if one.row == row) for row in ("token", "document"))
    for first, stop in _spans(len(block), limits, lambda n: int(ends[n]) * token + n * (document + 8)):
        start, end = int(ends[first]), int(ends[stop])
        parts = [one.part(first, stop, start, end) for one in columns]
        offsets = block.offsets[first : stop + 1] - start
        if device.type == "cpu":
            yield Piece(tuple(parts), partial(_made, block, offsets=offsets))
        else:
            yield Piece((*parts, _at_hand(offsets)), partial(_made, block))


def _made(block: LazyBlock | LazyCodes, made: Sequence[Tensor], offsets: Tensor | None = None) -> Documents:
    """Documents from the tensors of their columns; `offsets` are the last of these where they are not given."""
    if offsets is None:
        *made, offsets = made
    tokens = Packed(made[0], offsets)
    return tokens if isinstance(block, LazyBlock) else _coded(tokens, made[1:], block.granularity)


def _loaded(block: LazyBlock | LazyCodes) -> Documents:
    made, tokens = list[Tensor](), int(block.offsets[-1])
    for column in _lazy_columns(block):
        part = column.part(0, len(block), 0, tokens)
        values = torch.empty(part.shape, dtype=part.dtype, device="cpu") if part.tensor is None else part.tensor
        if part.read is not None:
            part.read(0, values)
        made.append(values)
    return _made(block, made, block.offsets)


def _coded(tokens: Tensor | Packed, others: Sequence[Tensor], granularity: Granularity) -> Int8Tokens | Fp8Tokens:
    """Codes with their scales and, of affine ones, offset."""
    if tokens.dtype == torch.int8:
        return Int8Tokens(tokens, others[0], others[1] if len(others) > 1 else None, granularity)
    return Fp8Tokens(tokens, others[0], granularity)


def _columns(block: Documents) -> list[_Column]:
    """The tensors of a block but for the offsets of packed documents, tokens first."""
    held = held_of(block)
    packed = isinstance(held, Packed)
    values = held.values if isinstance(held, Packed) else held
    columns = [_Column.of(values, "token" if packed else "document")]
    if isinstance(block, Int8Tokens | Fp8Tokens):
        row: Row = "token" if packed and block.granularity == "token" else "document"
        row = "all" if block.granularity == "corpus" else row
        columns.append(_Column.of(block.scales, row))
        if isinstance(block, Int8Tokens) and block.offset is not None:
            columns.append(_Column.of(block.offset, row))
    return columns


def _rebuild(block: Documents, made: Sequence[Tensor]) -> Documents:
    """Documents like `block` from its columns' tensors and, of packed documents, offsets."""
    held = held_of(block)
    codes, *others = made
    tokens: Tensor | Packed = codes
    if isinstance(held, Packed):
        tokens = Packed(codes, others.pop())
    return _coded(tokens, others, block.granularity) if isinstance(block, Int8Tokens | Fp8Tokens) else tokens


def _at_hand(tensor: Tensor) -> Part:
    return Part(tuple(tensor.shape), tensor.dtype, tensor=tensor)


def _gathered(tensor: Tensor, rows: Tensor) -> Part:
    """A part of a tensor's rows that do not follow each other: they are gathered when the buffer is filled."""
    source = tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor  # torch gathers no float8

    def read(first: int, out: Tensor) -> None:
        torch.index_select(source, 0, rows[first : first + out.shape[0]], out=out.view(source.dtype))

    return Part((rows.numel(), *tensor.shape[1:]), tensor.dtype, read=read)


def _host_pieces(block: Documents, limits: Limits) -> Iterator[Piece]:
    columns = _columns(block)
    held = held_of(block)
    packed = held if isinstance(held, Packed) else None
    token = sum(column.row_bytes for column in columns if column.row == "token")
    document = sum(column.row_bytes for column in columns if column.row == "document")
    if packed is None:
        ends = None
    elif packed.offsets is not None:
        ends = packed.offsets
    else:
        ends = torch.zeros(len(packed) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(packed.lengths, 0, out=ends[1:])
    tokens = None if ends is None else ends.numpy()

    def cost(n: int) -> int:
        return n * document if tokens is None else int(tokens[n]) * token + n * (document + 8)

    for first, stop in _spans(len(block), limits, cost):
        start, end = (0, 0) if tokens is None else (int(tokens[first]), int(tokens[stop]))
        rows = None if packed is None or packed.offsets is not None else _rows(packed, first, stop)
        parts = []
        for column in columns:
            gathered = rows is not None and column.row == "token"
            parts.append(_gathered(column.source, rows) if gathered else column.part(first, stop, start, end))  # type: ignore[arg-type]
        if ends is not None:
            parts.append(_at_hand(ends[first : stop + 1] - start))
        yield Piece(tuple(parts), partial(_rebuild, block))


def _rows(view: Packed, first: int, stop: int) -> Tensor:
    """The rows of a view's buffer that hold the tokens of some of its documents, in order."""
    starts, lengths = view.starts[first:stop].long(), view.lengths[first:stop].long()
    begins = lengths.cumsum(0) - lengths
    rows = torch.repeat_interleave(starts - begins, lengths)
    return rows.add_(torch.arange(rows.numel(), device="cpu"))


def _sliced(block: Documents, limits: Limits) -> Iterator[Documents]:
    """Documents that are where they are needed, `limits.documents` at a time; offsets on a GPU are not read."""
    count = len(block)
    if count <= limits.documents:
        if count:
            yield block
        return
    for first in range(0, count, limits.documents):
        yield slice_of(block, first, min(count, first + limits.documents))


def slice_of(block: Documents, first: int, stop: int) -> Documents:
    """Documents `first` to `stop` of a block, in its form, without a copy and without waiting for a GPU."""
    held = held_of(block)
    tokens: Tensor | Packed
    span = slice(None)  # of a token's scales
    if not isinstance(held, Packed):
        tokens = held[first:stop]
        span = slice(first, stop)
    elif held.offsets is None:
        tokens = Packed.view(held.values, held.starts[first:stop], held.lengths[first:stop])
    elif held.device.type == "cpu":
        span = slice(int(held.offsets[first]), int(held.offsets[stop]))
        tokens = Packed(held.values[span], held.offsets[first : stop + 1] - span.start)
    else:
        # Where these documents lie among the values is known to the GPU alone: offsets into all of them, which the kernels take.
        tokens = Packed(held.values, held.offsets[first : stop + 1])
    if not isinstance(block, Int8Tokens | Fp8Tokens):
        return tokens
    chosen = {"token": span, "document": slice(first, stop)}.get(block.granularity)
    return block.over(tokens, None if chosen is None else lambda one: one[chosen])
