"""The single pass over every token of an import: finite? norm? exactly zero? A slice at a time, so memory stays small."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.bars import Bar
from maxsim_eval.importing.rows import SLICE_TOKENS, TokenRows, Where, spans
from maxsim_eval.printing import printable
from maxsim_kernels import Packed

# A unit vector whose model worked in bfloat16 (norm, quotient and result rounded, 2^-9 each) is off by 0.006 at most.
UNIT_TOLERANCE = 0.02
NORM_TOKENS = 4096  # converted to float32 at once: stays in the processor's cache


@dataclass(frozen=True)
class Norms:
    """Least and largest norm of tokens that are not zero; how many are zero or no unit vectors, and which is the first."""

    tokens: int = 0
    low: float = math.inf
    high: float = 0.0
    zeros: int = 0
    off_unit: int = 0
    first_zero: str = ""
    first_off_unit: str = ""

    def __add__(self, other: Norms) -> Norms:
        return Norms(
            self.tokens + other.tokens,
            min(self.low, other.low),
            max(self.high, other.high),
            self.zeros + other.zeros,
            self.off_unit + other.off_unit,
            self.first_zero or other.first_zero,
            self.first_off_unit or other.first_off_unit,
        )

    def as_json(self) -> dict[str, Any]:
        """For the provenance of an entry."""
        known = self.tokens > self.zeros
        return {
            "smallest": self.low if known else None,
            "largest": self.high if known else None,
            "zero_tokens": self.zeros,
            "not_unit_tokens": self.off_unit,
        }


def check_tokens(where: Where, rows: TokenRows, quiet: bool) -> Norms:
    """Norms of all tokens; `DataError` for NaN and Inf in any of them, naming the first and its document."""
    norms = Norms()
    with Bar(total=len(rows), desc=f"checking {printable(where.key)}", unit="rows", disable=quiet, delay=1) as bar:
        for start, stop in spans(rows.lengths, SLICE_TOKENS):
            part = rows.span(start, stop)
            if part.values.numel():
                low, high = torch.aminmax(part.values)  # one pass, no temporaries; NaN and Inf both show in it
                if not (bool(torch.isfinite(low)) and bool(torch.isfinite(high))):
                    bad = (~torch.isfinite(part.values)).any(-1).nonzero()[0, 0]
                    row, token = _place(part, int(bad))
                    kind = "NaN" if bool(part.values[bad].isnan().any()) else "an infinite value"
                    where.fail(f"{where.row(start + row)}: token {token} holds {kind}, need finite embeddings")
                norms += _norms(where, part, start)
            bar.update(stop - start)
    return norms


def _place(part: Packed, position: int) -> tuple[int, int]:
    """Document of the part, and the token inside it, of a row of its values (the documents follow each other)."""
    row = int(torch.searchsorted(part.starts + part.lengths, position, right=True))
    return row, position - int(part.starts[row])


def _norms(where: Where, part: Packed, start: int) -> Norms:
    norms = torch.cat([_norm(block) for block in part.values.split(NORM_TOKENS)])
    zero = norms == 0
    off = ~zero & ((norms - 1).abs() > UNIT_TOLERANCE)
    first = []
    for marked in (zero, off):
        row, token = _place(part, int(marked.byte().argmax())) if bool(marked.any()) else (0, 0)
        first.append(f"{where.row(start + row)} of {where.path.name}, token {token}" if bool(marked.any()) else "")
    kept = norms[~zero]
    low, high = torch.aminmax(kept) if len(kept) else (math.inf, 0.0)
    return Norms(len(norms), float(low), float(high), int(zero.sum()), int(off.sum()), *first)


def _norm(tokens: Tensor) -> Tensor:
    """`[n]` float64 norms; 0 only for tokens that are exactly zero."""
    norms = torch.linalg.vector_norm(tokens.float(), dim=1).double()
    extreme = (norms < 1e-15) | ~norms.isfinite()  # where squares leave float32's range
    if bool(extreme.any()):
        norms[extreme] = torch.linalg.vector_norm(tokens[extreme].double(), dim=1)
    return norms


class NonZeroRows(TokenRows):
    """The tokens of `rows` that are not exactly zero: what padding rows of zeros, at whichever end, leave."""

    def __init__(self, rows: TokenRows, lengths: np.ndarray) -> None:
        super().__init__(rows.dtype, rows.dim, lengths)
        self.rows = rows
        self.dropped = int(rows.lengths.sum() - lengths.sum())

    def row(self, index: int) -> Tensor:
        """The tokens of one document that are not zero, copied."""
        tokens = self.rows.row(index)
        return tokens[(tokens != 0).any(-1)]


def without_zeros(where: Where, rows: TokenRows, lengths: np.ndarray | None, quiet: bool) -> NonZeroRows:
    """`rows` without tokens that are exactly zero; `lengths` are those found by an earlier look, if any."""
    if lengths is None:
        lengths = np.zeros(len(rows), np.int64)
        with Bar(
            total=len(rows), desc=f"looking for zeros in {printable(where.key)}", unit="rows", disable=quiet, delay=1
        ) as bar:
            for start, stop in spans(rows.lengths, SLICE_TOKENS):
                kept = (rows.span(start, stop).values != 0).any(-1).numpy()
                before = np.concatenate([[0], np.cumsum(kept)])  # number of kept tokens before each token
                bounds = np.concatenate([[0], np.cumsum(rows.lengths[start:stop])])
                lengths[start:stop] = np.diff(before[bounds])
                bar.update(stop - start)
    return NonZeroRows(rows, lengths)
