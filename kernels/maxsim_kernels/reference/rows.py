"""Where the valid tokens of each side lie, whatever a call's layout: packed, padded, masked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from maxsim_kernels.checks import check_padded, check_rows, is_plain
from maxsim_kernels.tokens import distinct_rows


@dataclass(frozen=True)
class Rows:
    """Where the valid tokens of one side lie: row n has `lengths[n]` of them, the rows `index[starts[n] + i]` of `values`."""

    values: Tensor  # [T, d]
    index: Tensor | None  # [V]; None: 0, 1, 2, ...
    starts: Tensor  # [N], on the values' device
    lengths: Tensor  # [N], the same
    size: int  # of the longest row, padding included
    padded: int | None  # length of a padded row where masks leave holes, so that positions are not 0, 1, 2, ...
    each: int | None = None  # tokens of every row, where their shape gives all the same number
    end_to_end: bool = False  # row n + 1 begins where row n ends, and row 0 at 0
    counts: np.ndarray | None = None  # `lengths` on the host, where they are known there

    def part(self, first: int, last: int) -> Rows:
        """Rows `first` to `last`, of the same values."""
        if first == 0 and last >= self.lengths.shape[0]:
            return self
        counts = None if self.counts is None else self.counts[first:last]
        return replace(self, starts=self.starts[first:last], lengths=self.lengths[first:last], end_to_end=False, counts=counts)

    def host(self) -> np.ndarray:
        """The lengths `[N]` on the host."""
        return self.lengths.cpu().numpy() if self.counts is None else self.counts

    def place(self, found: Tensor) -> Tensor:
        """Positions within their rows of the valid tokens `found`, which are numbered over all rows."""
        assert self.index is not None
        assert self.padded is not None
        return self.index[found] % self.padded


def _read_openly(*given: Tensor | None) -> None:
    """Read tensors in a way that a tracer sees and refuses: what `.numpy()` reads later would silently be a constant of its graph."""
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        for tensor in given:
            if tensor is not None:
                torch.equal(tensor, tensor)


def rows_of(
    name: str, values: Tensor, starts: Tensor | None, lengths: Tensor | None, mask: Tensor | None, end_to_end: bool = False
) -> Rows:
    """The valid tokens of one side: all of packed rows, or what mask and lengths leave of padded ones."""
    device = values.device
    _read_openly(starts, lengths, mask)
    if starts is not None:
        assert lengths is not None
        counts = check_rows(name, starts, lengths, values.shape[0])
        longest, rows = int(counts.max(initial=0)), (starts.to(torch.int64), lengths.to(torch.int64))
        return Rows(values, None, *rows, longest, None, end_to_end=end_to_end, counts=counts)
    check_padded(f"{name}_", mask, lengths, values.shape[-2])
    count, size = values.shape[:2]
    if mask is None and lengths is None:
        starts = torch.arange(count, device=device) * size
        return Rows(
            values.reshape(count * size, values.shape[-1]), None, starts, torch.full_like(starts, size), size, None, size, True
        )
    valid = torch.ones(count, size, dtype=torch.bool, device=device) if mask is None else mask != 0
    if lengths is not None:
        valid = valid & (torch.arange(size, device=device) < lengths[:, None])
    each = valid.sum(1)
    flat = values.reshape(count * size, values.shape[-1])
    return Rows(flat, valid.reshape(-1).nonzero()[:, 0], each.cumsum(0) - each, each, size, max(size, 1))


@dataclass(frozen=True)
class Asked:
    """Every query's valid tokens, one behind the other, and where their maxima go in a table of queries by positions."""

    tokens: Tensor  # [R, d], in the dtype of the scores; where `which` is there, only distinct ones
    slots: Tensor | None  # [R], cells of the table; None: 0, 1, 2, ... up to the last
    count: int
    width: int  # columns: the longest query, padding included
    which: Tensor | None = None  # [R]: the row of each token in `tokens`, where repeated ones are held once

    @property
    def rows(self) -> int:
        """Query tokens, repeated or not."""
        return len(self.tokens if self.which is None else self.which)


def asked_of(queries: Rows, dtype: torch.dtype) -> Asked:
    """All queries' valid tokens; on a CPU, unless gradients are asked for or the call is traced, repeated tokens are held once."""
    asked = _all_asked(queries, dtype)
    tokens = asked.tokens
    if tokens.device.type != "cpu" or tokens.requires_grad or not is_plain(tokens):
        return asked
    found = distinct_rows(tokens)
    return asked if found is None else replace(asked, tokens=found[0], which=found[1])


def _all_asked(queries: Rows, dtype: torch.dtype) -> Asked:
    lengths, width = queries.lengths, queries.size
    if queries.each is not None and queries.each * lengths.shape[0] == queries.values.shape[0]:
        return Asked(queries.values.to(dtype), None, lengths.shape[0], width)
    if queries.end_to_end and lengths.shape[0] == 1:
        return Asked(queries.values[:width].to(dtype), None, 1, width)
    if queries.each is None:
        owner = torch.repeat_interleave(lengths)
    else:
        owner = torch.arange(lengths.shape[0], device=lengths.device).repeat_interleave(queries.each)
    within = torch.arange(owner.shape[0], device=owner.device) - (lengths.cumsum(0) - lengths)[owner]
    found = queries.starts[owner] + within
    place = within if queries.padded is None else queries.place(found)
    if queries.end_to_end and queries.values.is_contiguous():
        tokens = queries.values[: len(owner)]
    else:
        tokens = queries.values[found if queries.index is None else queries.index[found]]
    return Asked(tokens.to(dtype), owner * width + place, lengths.shape[0], width)
