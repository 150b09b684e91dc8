"""What the FP32 reference owes on any device: a score has the same bits wherever its document stands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inputs import same_bits
from maxsim_kernels import Packed


def check_places(score: Callable[[Packed], Tensor], documents: Packed) -> None:
    """Scores have the same bits in any order, for documents that come twice, for every cut, alone, and beside NaN."""
    whole, count, device = score(documents), len(documents), documents.device
    shuffled = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(device)
    every = torch.arange(count, device=device)
    for order in (every.flip(0), shuffled, every.repeat(2)):
        for held in (documents.select(order), documents.select(order).compact()):
            assert same_bits(score(held), whole[:, order])
    for cut in (1, count // 3, count - 1):
        parts = [score(documents.select(part)) for part in (every[:cut], every[cut:])]
        assert same_bits(torch.cat(parts, 1), whole), cut
    for n in range(0, count, 7):
        assert same_bits(score(documents.select([n])), whole[:, n : n + 1]), n
    odd = every % 2 == 1
    spoilt = score(
        documents.with_values(documents.values.masked_fill(odd.repeat_interleave(documents.lengths)[:, None], torch.nan))
    )
    assert same_bits(spoilt[:, ~odd], whole[:, ~odd])
    assert torch.equal(spoilt[:, odd].isnan(), whole[:, odd].isfinite() & (whole[:, odd] != 0))
