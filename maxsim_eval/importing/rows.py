"""Token embeddings as files hold them (dense, chunked, list, packed), read a few documents at a time.

A file of 116 GB is mapped, not loaded: every class here keeps views of the mapping and copies only the rows it is asked
for, so checking and caching need memory for one slice. `rows_from_embeddings` and `rows_from_values` choose the class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.bars import Bar
from maxsim_eval.errors import DataError
from maxsim_eval.printing import printable
from maxsim_kernels import Packed, pack

KEPT = (torch.float16, torch.bfloat16, torch.float32)
SLICE_TOKENS = 1 << 18  # tokens handled at once while checking: 64 MB at d=128 in 16 bits
ZERO_STEP = 16  # positions looked at together while searching for the end of a row
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Where:
    """The file, key and rows that a message names; `notes` collects what was decided and must be said.

    role, names: what the rows are and are called, where that is known before they are read; `first`: place of row 0 in `names`.
    """

    path: Path
    key: str
    notes: list[str]
    role: str = ""
    names: Sequence[str] | None = None
    first: int = 0

    def fail(self, message: str) -> NoReturn:
        """Raise `DataError` naming file and key."""
        raise DataError(f"{self.path}: {self.key}: {message}")

    def note(self, message: str) -> None:
        """Keep a decision for the report."""
        self.notes.append(f"{self.key}: {message}")

    def sibling(self, key: str) -> Where:
        """The same place, but for another key of the file."""
        return replace(self, key=key)

    def row(self, number: int) -> str:
        """How a message calls a row: "document 'd7' (row 3)", or what is known of that."""
        at = self.first + number
        if self.names is not None and at < len(self.names):
            return f"{self.role} {self.names[at]!r} (row {number})"
        return f"{self.role} in row {number}" if self.role else f"row {number}"


class TokenRows(ABC):
    """N token matrices `[lengths[n], dim]`, read on demand; `take` yields `dtype`: the file's, float32 for float64."""

    dropped: int | None = None  # tokens left out on request, None where nobody asked

    def __init__(self, stored: torch.dtype, dim: int, lengths: np.ndarray) -> None:
        self.dim = dim
        self.dtype = stored if stored in KEPT else torch.float32
        self.lengths = lengths  # int64 [N]

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def row(self, index: int) -> Tensor:
        """Tokens `[L, d]` of one document, in the stored dtype, sharing storage where it can."""

    def take(self, rows: Sequence[int] | np.ndarray) -> Packed:
        """Copy documents `rows`, in that order, into one `Packed` in `dtype`."""
        return pack([self.row(int(index)).to(self.dtype) for index in rows], dim=self.dim, dtype=self.dtype)

    def span(self, start: int, stop: int) -> Packed:
        """Copy documents `start` to `stop` into one `Packed`."""
        return self.take(range(start, stop))

    def packed(self) -> Packed:
        """All documents; without a copy where the layout allows it."""
        return self.span(0, len(self))


class RaggedRows(TokenRows):
    """`values` [T, d] and `offsets` [N + 1]."""

    def __init__(self, values: Tensor, offsets: np.ndarray) -> None:
        super().__init__(values.dtype, values.shape[1], np.diff(offsets))
        self.values, self.offsets = values, offsets

    def row(self, index: int) -> Tensor:
        """Tokens of one document, as a view of the values."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def span(self, start: int, stop: int) -> Packed:
        """A slice of the values, not copied."""
        offsets = self.offsets[start : stop + 1]
        values = self.values[int(offsets[0]) : int(offsets[-1])].to(self.dtype)
        return Packed(values, torch.from_numpy(offsets - offsets[0]))


class ListRows(TokenRows):
    """A list of `[L_i, d]`; only the first `lengths[i]` rows of each are tokens."""

    def __init__(self, tensors: Sequence[Tensor], lengths: np.ndarray) -> None:
        super().__init__(tensors[0].dtype, tensors[0].shape[1], lengths)
        self.tensors = tensors

    def row(self, index: int) -> Tensor:
        """The first `lengths[index]` rows of the item."""
        return self.tensors[index][: int(self.lengths[index])]


class DenseRows(TokenRows):
    """Chunks `[b, L, d]` (one, or many with their own L) with lengths, or with masks `[b, L]` (False: no token)."""

    def __init__(self, chunks: Sequence[Tensor], lengths: np.ndarray, masks: Sequence[Tensor] | None = None) -> None:
        super().__init__(chunks[0].dtype, chunks[0].shape[2], lengths)
        self.chunks, self.masks = chunks, masks
        self.firsts = np.array([0, *accumulate(len(chunk) for chunk in chunks)], dtype=np.int64)

    def row(self, index: int) -> Tensor:
        """The unpadded rows of one document: a view, or a copy where there are masks."""
        number = int(np.searchsorted(self.firsts, index, side="right")) - 1
        inside = index - int(self.firsts[number])
        if self.masks is not None:
            return self.chunks[number][inside][self.masks[number][inside]]
        return self.chunks[number][inside, : int(self.lengths[index])]

    def packed(self) -> Packed:
        """All documents; one plain chunk is viewed, padding and all, without a copy."""
        whole = self.chunks[0]
        if len(self.chunks) > 1 or self.masks is not None or whole.dtype != self.dtype or not whole.is_contiguous():
            return super().packed()
        starts = torch.arange(len(self), dtype=torch.int64) * whole.shape[1]
        return Packed.view(whole.reshape(-1, self.dim), starts, torch.from_numpy(self.lengths))


def check_tensor(where: Where, value: Any, rank: int | None = None) -> Tensor:
    """`value` itself, a dense CPU tensor of a floating dtype that can be kept or converted; else `DataError`."""
    if not isinstance(value, Tensor):
        where.fail(f"got {type(value).__name__}, need a tensor")
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_nested:
        where.fail(f"got a {value.layout} tensor on {value.device}, need a plain dense tensor")
    if value.dtype not in (*KEPT, torch.float64):
        hint = "; quantised codes mean nothing without their scales" if value.dtype in INTEGERS else ""
        where.fail(f"got {value.dtype}, need float16, bfloat16 or float32 embeddings{hint}")
    if rank is not None and value.dim() != rank:
        where.fail(f"got shape {list(value.shape)}, need {rank} axes")
    if value.dim() and value.shape[-1] < 1:
        where.fail(f"got shape {list(value.shape)}, need an embedding width of at least 1")
    return value.detach()


def integers(where: Where, value: Any) -> np.ndarray:
    """`value` (integer tensor, list of ints, or a list of those, one a chunk) as one int64 array; else `DataError`."""
    if isinstance(value, Tensor):
        if value.dtype not in INTEGERS or value.dim() != 1:
            where.fail(f"got {value.dtype} {list(value.shape)}, need a 1-D tensor of integers")
        return value.to(torch.int64).numpy()
    if isinstance(value, (list, tuple)):
        parts = [[int(v)] if type(v) is int else integers(where, v) for v in value]
        try:
            return np.concatenate([np.asarray(p, dtype=np.int64) for p in parts]) if parts else np.zeros(0, np.int64)
        except OverflowError:
            where.fail("holds an integer that does not fit 64 bits")
    where.fail(f"got {type(value).__name__}, need integers")


def rows_from_values(where: Where, values: Any, offsets_where: Where, offsets: Any) -> TokenRows:
    """Packed layout: `values` [T, d] and `offsets` [N + 1], starting at 0, not decreasing, ending at T."""
    tokens = check_tensor(where, values, rank=2)
    bounds = integers(offsets_where, offsets)
    if len(bounds) == 0 or bounds[0] != 0:
        offsets_where.fail(f"starts at {bounds[0] if len(bounds) else 'nothing'}, need [N + 1] offsets starting at 0")
    falls = np.flatnonzero(np.diff(bounds) < 0)
    if falls.size:
        at = int(falls[0])
        offsets_where.fail(f"decreases after entry {at} ({bounds[at]} to {bounds[at + 1]}), need offsets that never fall")
    if bounds[-1] != len(tokens):
        offsets_where.fail(f"ends at {bounds[-1]}, need {len(tokens)}, the number of rows of {where.key}")
    return _checked(where, RaggedRows(tokens, bounds))


def rows_from_embeddings(
    where: Where, value: Any, lengths: Any = None, mask: Any = None, *, pad: np.ndarray | bool = True, quiet: bool = True
) -> TokenRows:
    """Dense `[N, L, d]`, a list of `[L, d]`, a list of chunks `[b, L, d]`, or a list of lists of `[L, d]`.

    Without lengths or mask, trailing all-zero rows of dense layouts are padding, which is noted; the rest are tokens.
    `pad`: True searches for them; an array gives the lengths that an earlier search found; False takes every position as a token.
    """
    parts = [check_tensor(where, value)] if isinstance(value, Tensor) else _flat_list(where, value)
    rank = 3 if isinstance(value, Tensor) else parts[0].dim() if parts else 2
    for number, part in enumerate(parts):
        if part.dim() != rank or rank not in (2, 3):
            at = "" if isinstance(value, Tensor) else f"item {number}: "
            where.fail(f"{at}got shape {list(part.shape)}, need [N, L, d], or a list of only [L, d] or only [b, L, d]")
    _require_one_kind(where, parts, rank)
    if sum(len(part) if rank == 3 else 1 for part in parts) == 0:
        where.fail("holds no rows, need at least one")
    sizes = np.array([part.shape[-2] for part in parts], dtype=np.int64)
    if rank == 3:
        sizes = np.repeat(sizes, [len(part) for part in parts])
    counts = _given_lengths(where, lengths, sizes)
    if rank == 2:
        if mask is not None:
            where.fail("a mask needs a dense layout; give lengths, or leave the masked rows out of the list")
        return _checked(where, ListRows(parts, sizes if counts is None else counts))
    if mask is not None:
        masks = _masks(where, mask, parts, counts)
        kept = np.concatenate([m.sum(1).numpy() for m in masks]).astype(np.int64)
        return _checked(where, DenseRows(parts, kept, masks))
    if counts is None:
        counts = pad if isinstance(pad, np.ndarray) else _lengths_from_zeros(where, parts, quiet) if pad else sizes
    return _checked(where, DenseRows(parts, counts))


def _require_one_kind(where: Where, parts: Sequence[Tensor], rank: int) -> None:
    """One width and one dtype for all; else the message names the first row that has another."""
    row = 0
    for part in parts:
        for what, first, found in (
            ("embedding widths", parts[0].shape[-1], part.shape[-1]),
            ("dtypes", parts[0].dtype, part.dtype),
        ):
            if first != found:
                both = ", ".join(sorted((str(first), str(found))))
                where.fail(f"mixed {what} [{both}], need one for all rows: {where.row(row)} has {found}, those before {first}")
        row += len(part) if rank == 3 else 1


def _flat_list(where: Where, value: Any) -> list[Tensor]:
    if not isinstance(value, (list, tuple)):
        where.fail(f"got {type(value).__name__}, need a tensor [N, L, d] or a list of tensors")
    flat: list[Tensor] = []
    for number, item in enumerate(value):
        here = where.sibling(f"{where.key}[{number}]")
        if isinstance(item, (list, tuple)):
            flat += [check_tensor(where.sibling(f"{here.key}[{n}]"), inner, rank=2) for n, inner in enumerate(item)]
        else:
            flat.append(check_tensor(here, item))
    return flat


def _checked(where: Where, rows: TokenRows) -> TokenRows:
    if len(rows) == 0:
        where.fail("holds no rows, need at least one")
    stored = rows.row(0).dtype
    if stored != rows.dtype:
        where.note(f"ImportWarning: converted from {stored} to {rows.dtype}")
    return rows


def _given_lengths(where: Where, lengths: Any, sizes: np.ndarray) -> np.ndarray | None:
    if lengths is None:
        return None
    here = where.sibling(where.key.rsplit("_", 1)[0] + "_lengths")
    counts = integers(here, lengths)
    if len(counts) != len(sizes):
        here.fail(f"got {len(counts)} lengths, need {len(sizes)}, one for each row of {where.key}")
    wrong = np.flatnonzero((counts < 0) | (counts > sizes))
    if wrong.size:
        at = int(wrong[0])
        here.fail(f"row {at}: got {counts[at]}, need 0 to {sizes[at]}, the padded size")
    return counts


def _masks(where: Where, mask: Any, parts: Sequence[Tensor], counts: np.ndarray | None) -> list[Tensor]:
    """Bool masks `[b, L]`, one a chunk; where lengths are given too, both must hold."""
    here = where.sibling(where.key.rsplit("_", 1)[0] + "_mask")
    given = [mask] if isinstance(mask, Tensor) else mask
    if isinstance(mask, Tensor) and len(parts) > 1 and mask.dim() == 2 and len(mask) == sum(map(len, parts)):
        given = list(mask.split([len(part) for part in parts]))
    if not isinstance(given, (list, tuple)) or len(given) != len(parts):
        here.fail(f"does not match {where.key}, need a mask [b, L] for each of its {len(parts)} chunks")
    masks: list[Tensor] = []
    first = 0
    for number, (m, part) in enumerate(zip(given, parts)):
        if not isinstance(m, Tensor) or m.shape != part.shape[:2]:
            got = list(m.shape) if isinstance(m, Tensor) else type(m).__name__
            here.fail(f"chunk {number}: got {got}, need {list(part.shape[:2])}")
        if not bool(((m == 0) | (m == 1)).all()):
            here.fail(f"chunk {number}: holds values other than 0 and 1")
        kept = m.to(torch.bool)
        if counts is not None:
            limit = torch.from_numpy(counts[first : first + len(part)])
            kept = kept & (torch.arange(part.shape[1]) < limit[:, None])
        masks.append(kept)
        first += len(part)
    return masks


def _lengths_from_zeros(where: Where, chunks: Sequence[Tensor], quiet: bool) -> np.ndarray:
    """Lengths of dense rows whose padding is exactly zero; padding that is not zero cannot be told from tokens."""
    lengths: list[np.ndarray] = []
    label = where.key.rsplit("_", 1)[0] + "_lengths"
    done = padded = 0
    bar = Bar(total=sum(map(len, chunks)), desc=f"reading {printable(where.key)}", unit="rows", disable=quiet, delay=1)
    with bar:
        for chunk in chunks:
            step = max(1, SLICE_TOKENS // max(1, chunk.shape[1]))
            for start in range(0, len(chunk), step):
                part = chunk[start : start + step]
                counts, suspect = _trailing_zeros(part)
                if suspect is not None:
                    where.fail(
                        f"{where.row(done + suspect)} ends in repeated rows that are not zero: this looks like padding, but "
                        f"cannot be told from tokens. Save {label} [N] (or a mask) beside it"
                    )
                lengths.append(counts)
                padded += int((counts < part.shape[1]).sum())
                done += len(part)
                bar.update(len(part))
    if padded:
        where.note(f"no {label}: trailing all-zero rows of {padded} of {done} rows were taken as padding")
    else:
        where.note(f"no {label}: no row ends in zeros, so every position was taken as a token")
    return np.concatenate(lengths)


def _trailing_zeros(part: Tensor) -> tuple[np.ndarray, int | None]:
    """Lengths of `[b, L, d]` without trailing zero rows, and the first row that ends in equal, non-zero ones."""
    size = part.shape[1]
    if size == 0:
        return np.zeros(len(part), np.int64), None
    if size > 2:
        last = part[:, -1]
        repeated = (last == part[:, -2]).all(-1) & (last != 0).any(-1) & (last != part[:, 0]).any(-1)
        if bool(repeated.any()):
            return np.zeros(0, np.int64), int(repeated.nonzero()[0])
    counts = np.zeros(len(part), np.int64)
    left = torch.arange(len(part))  # rows without a token so far, searched from the end: only padding is read
    for stop in range(size, 0, -ZERO_STEP):
        start = max(0, stop - ZERO_STEP)
        block = part[:, start:stop] if len(left) == len(part) else part[left, start:stop]
        ends = ((block != 0).any(-1) * torch.arange(start + 1, stop + 1)).amax(1)
        counts[left.numpy()] = ends.numpy()
        left = left[ends == 0]
        if not len(left):
            break
    return counts, None


def spans(lengths: np.ndarray, tokens: int) -> Iterator[tuple[int, int]]:
    """Cut N rows into runs start..stop of about `tokens` tokens (and at most `tokens` rows); at least one row a run."""
    ends = np.cumsum(lengths)
    start, before = 0, 0
    while start < len(lengths):
        stop = int(np.searchsorted(ends, before + tokens, side="right"))
        stop = min(max(stop, start + 1), start + tokens)
        yield start, stop
        start, before = stop, int(ends[stop - 1])
