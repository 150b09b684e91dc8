"""Queries of a search on a GPU: as a call gets them, for brute force's kernel, and packed, for the search's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import inf, isfinite

import torch
from torch import Tensor

from maxsim_kernels.api import maxsim
from maxsim_kernels.checks import Documents
from maxsim_kernels.tokens import Packed


class Queries:
    """`given` with its mask and lengths; and its valid tokens packed: `values` `[T, d]`, `starts`, `lengths` `[Nq]`, at most `longest`.

    A mask and the lengths of packed queries are read once, which waits for the GPU. `starts` and `lengths` are made on first use: a
    scan does not need them, and they can be made while it runs.
    """

    def __init__(self, given: Tensor | Packed, mask: Tensor | None = None, lengths: Tensor | None = None) -> None:
        self.given = given.detach() if isinstance(given, Tensor) else given
        self.mask, self._lengths = mask, lengths
        values, self._found, self.longest = (
            _packed(given) if isinstance(given, Packed) else _padded(given.detach(), mask, lengths)
        )
        self.values = values.contiguous()
        self._count = 1 if isinstance(given, Tensor) and given.dim() == 2 else len(given)

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        starts, lengths = self._found()
        return starts.long().contiguous(), lengths.long().contiguous()

    @property
    def starts(self) -> Tensor:  # noqa: D102
        return self._places[0]

    @property
    def lengths(self) -> Tensor:  # noqa: D102
        return self._places[1]

    @property
    def device(self) -> torch.device:
        """Where they are, and where they are scored."""
        return self.values.device

    def largest(self) -> float:
        """An upper bound of every query's `sum_i ||Q_i|| + ||P_i||`; inf where a token is not finite. Waits for the GPU.

        Codes of 8 bits are at most sqrt(d) / 254 (INT8) or a 16th (FP8) of a token's norm away from it, so `||P_i|| <= 2.01 ||Q_i||`
        for d <= 65536.
        """
        if not self.longest or not len(self.values):
            return 0.0
        largest = float(self.values.double().norm(dim=1).amax())
        return 4 * self.longest * largest if isfinite(largest) else inf

    def scores(self, documents: Documents, quantize_queries: bool = True) -> Tensor:
        """`maxsim` of these queries, `[Nq, n]`: with documents in full precision this is brute force's own call."""
        found = maxsim(
            self.given, documents, query_mask=self.mask, query_lengths=self._lengths, quantize_queries=quantize_queries
        )
        assert isinstance(found, Tensor)
        return found.unsqueeze(0) if isinstance(self.given, Tensor) and self.given.dim() == 2 else found


_Found = Callable[[], tuple[Tensor, Tensor]]  # starts and lengths


def _packed(given: Packed) -> tuple[Tensor, _Found, int]:
    inside = torch.clamp(given.values.shape[0] - given.starts, min=0)
    counts = torch.minimum(given.lengths.clamp(min=0), inside)
    return given.values.detach(), lambda: (given.starts, counts), int(counts.max()) if len(given) else 0


def _padded(tokens: Tensor, mask: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, _Found, int]:
    tokens = tokens.unsqueeze(0) if tokens.dim() == 2 else tokens
    device, (count, longest, width) = tokens.device, tokens.shape

    def padded() -> tuple[Tensor, Tensor]:
        every = torch.full((count,), longest, dtype=torch.int64, device=device)
        counts = every if lengths is None else lengths.reshape(-1).long().clamp(0, longest)
        return torch.arange(count, device=device) * longest, counts

    if mask is None:
        return tokens.reshape(-1, width), padded, longest
    valid = (mask.reshape(count, longest) != 0) & (torch.arange(longest, device=device) < padded()[1][:, None])
    counts = valid.sum(1)
    return tokens[valid], lambda: (counts.cumsum(0) - counts, counts), longest
