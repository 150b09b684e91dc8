"""Clustered tokens by seed, block by block: a vocabulary of centres, topics that use some of them, documents of a topic.

Two ways to grow: `wider`, where documents come in groups of 32 about a topic of their own, so that more documents are more topics; and
`deeper`, where 512 topics have ever more documents each, so that what is near a query grows with the corpus. A smaller corpus is the
beginning of a larger one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maxsim_kernels import Packed

GROWTH = ("wider", "deeper")
BLOCK = 4096  # documents of one seed
_CENTRES, _SLOTS, _GROUP, _TOPICS = 4096, 48, 32, 512
_STRAY, _NOISE, _QUERY_NOISE = 0.3, 0.6, 0.4
_SCATTER = 2_654_435_761  # odd, so that neighbouring numbers are scattered over the centres


class Clustered:
    """A corpus without an end.

    Args:
        growth: one of `GROWTH`.
        dim, tokens: width of a token, and tokens of every document.
        device: where tokens are made; another kind of device makes others.
    """

    def __init__(self, growth: str, dim: int, tokens: int, device: str = "cpu") -> None:
        self.growth, self.dim, self.tokens, self.device = growth, dim, tokens, device
        self.centres = torch.nn.functional.normalize(self._normal(self._draw(-1), _CENTRES, dim), dim=1)

    def block(self, number: int) -> Tensor:
        """Documents `number * BLOCK` and those after it, float32 `[BLOCK, tokens, dim]`, of norm 1."""
        draw, shape = self._draw(number), (BLOCK, self.tokens)
        first = torch.arange(number * BLOCK, (number + 1) * BLOCK, device=self.device)
        topic = first // _GROUP if self.growth == "wider" else first % _TOPICS
        slot = torch.randint(0, _SLOTS, shape, generator=draw, device=self.device)
        centre = (topic[:, None] * _SLOTS + slot) * _SCATTER // 1024 % _CENTRES
        other = torch.randint(0, _CENTRES, shape, generator=draw, device=self.device)
        stray = torch.rand(shape, generator=draw, device=self.device) < _STRAY
        made = self.centres[torch.where(stray, other, centre)]
        return torch.nn.functional.normalize(made + _NOISE / self.dim**0.5 * self._normal(draw, *made.shape), dim=2)

    def queries(self, count: int, tokens: int) -> Tensor:
        """`[count, tokens, dim]`: tokens of documents of the first block, and noise."""
        draw, documents = self._draw(-2), self.block(0)
        of = torch.randint(0, BLOCK, (count, 1), generator=draw, device=self.device)
        token = torch.randint(0, self.tokens, (count, tokens), generator=draw, device=self.device)
        chosen = documents[of, token]
        return torch.nn.functional.normalize(chosen + _QUERY_NOISE / self.dim**0.5 * self._normal(draw, *chosen.shape), dim=2)

    def _draw(self, number: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(number + 7)

    def _normal(self, draw: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=self.device)


def packed(documents: Tensor) -> Packed:
    """Documents `[n, tokens, d]` end to end."""
    count, tokens, dim = documents.shape
    return Packed(documents.reshape(-1, dim), torch.arange(0, count * tokens + 1, tokens, device=documents.device))
