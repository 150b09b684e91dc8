"""Queries of a search on a GPU: as a call gets them, for brute force's kernel, and packed, for the search's own kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from maxsim_kernels.api import maxsim
from maxsim_kernels.checks import Documents
from maxsim_kernels.tokens import Packed


class Queries:
    """`given` with its mask and lengths; `values` `[T, d]`, `starts`, `lengths` `[Nq]` of their valid tokens, `longest` of them.

    A mask and packed queries are looked at once, which waits for the GPU.
    """

    def __init__(self, given: Tensor | Packed, mask: Tensor | None = None, lengths: Tensor | None = None) -> None:
        self.given = given.detach() if isinstance(given, Tensor) else given
        self.mask, self._lengths = mask, lengths
        if isinstance(given, Packed):
            inside = torch.clamp(given.values.shape[0] - given.starts, min=0)
            values, starts, counts = given.values.detach(), given.starts, torch.minimum(given.lengths.clamp(min=0), inside)
            longest = int(counts.max()) if len(given) else 0
        else:
            tokens = self.given.unsqueeze(0) if self.given.dim() == 2 else self.given
            count, longest = tokens.shape[:2]
            place = torch.arange(longest, device=tokens.device)
            counts = torch.full((count,), longest, dtype=torch.int64, device=tokens.device)
            if lengths is not None:
                counts = lengths.reshape(-1).long().clamp(0, longest)
            values, starts = tokens.reshape(-1, tokens.shape[-1]), torch.arange(count, device=tokens.device) * longest
            if mask is not None:
                valid = (mask.reshape(count, longest) != 0) & (place < counts[:, None])
                values, counts = tokens[valid], valid.sum(1)
                starts = counts.cumsum(0) - counts
        self.values = values.contiguous()
        self.starts, self.lengths, self.longest = starts.long().contiguous(), counts.long().contiguous(), longest

    def __len__(self) -> int:
        return self.starts.numel()

    @property
    def device(self) -> torch.device:
        """Where they are, and where they are scored."""
        return self.values.device

    def scores(self, documents: Documents, quantize_queries: bool = True) -> Tensor:
        """`maxsim` of them, `[Nq, n]`: with full precision this is brute force's own call."""
        found = maxsim(
            self.given, documents, query_mask=self.mask, query_lengths=self._lengths, quantize_queries=quantize_queries
        )
        assert isinstance(found, Tensor)
        return found.unsqueeze(0) if isinstance(self.given, Tensor) and self.given.dim() == 2 else found
