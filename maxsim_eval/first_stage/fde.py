"""MUVERA: token vectors of a document as one long vector whose dot product with a query's comes near the Chamfer (MaxSim) score.

Dhulipala et al. 2024, MUVERA: Multi-Vector Retrieval via Fixed Dimensional Encodings (arXiv 2405.19504). Each repetition cuts space by
`bits` random planes into `2**bits` parts. A query's encoding holds, part by part, the sum of its tokens there; a document's the mean of
its tokens, and where a part is empty the token that lies nearest to it (fewest planes between). Parts are projected by random signs to
`projected` numbers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from maxsim_eval.bars import Bar
from maxsim_eval.errors import UsageError
from maxsim_eval.first_stage.stage import Found, Tokens, best_of
from maxsim_kernels import Packed

_BLOCK = 16 << 20


@dataclass(frozen=True)
class Fde:
    """Fixed-dimensional encodings of `repetitions * 2**bits * projected` numbers, stored as FP16."""

    repetitions: int = 20
    bits: int = 4
    projected: int = 16
    seed: int = 0

    reads: ClassVar[str] = "embeddings"

    @property
    def width(self) -> int:
        """Numbers of an encoding."""
        return int(self.repetitions * 2**self.bits * self.projected)

    @property
    def description(self) -> str:
        """What it does."""
        return (
            f"MUVERA's fixed-dimensional encodings: {self.repetitions} repetitions x {2**self.bits} parts x {self.projected} numbers, "
            "FP16, all documents compared"
        )

    def search(self, source: Tokens, n: int, *, device: str, quiet: bool) -> Found:
        """The best `n` documents of every query; errors: `UsageError` for options that cannot be."""
        dim = source.queries.dim
        for name, value, most in (
            ("repetitions", self.repetitions, 1000),
            ("bits", self.bits, 12),
            ("projected", self.projected, dim),
        ):
            if not 1 <= value <= most:
                raise UsageError(f"fde: {name} is {value}, need 1 to {most}")
        planes, signs = self._drawn(dim, device)
        started = time.perf_counter()
        encodings = torch.empty(source.documents.documents, self.width, dtype=torch.float16, device=device)
        done = 0
        with Bar(total=len(encodings), desc="fde", unit="doc", disable=quiet, leave=False) as bar:
            for block in source.documents.blocks(_BLOCK):
                found = self._encoded(block.to(device), planes, signs, document=True)
                encodings[done : done + len(block)] = found
                done += len(block)
                bar.update(len(block))
        indexed = time.perf_counter()
        asked = self._encoded(source.queries.to(device), planes, signs, document=False)
        scores, indices = best_of(asked, encodings.float(), n)
        seconds = {"index": indexed - started, "search": time.perf_counter() - indexed}
        return Found(scores, indices, encodings.numel() * 2, seconds)

    def _drawn(self, dim: int, device: str) -> tuple[Tensor, Tensor]:
        """Planes `[R, d, bits]` and projections `[R, d, projected]`."""
        random = torch.Generator().manual_seed(self.seed)
        planes = torch.randn(self.repetitions, dim, self.bits, generator=random)
        signs = torch.randint(0, 2, (self.repetitions, dim, self.projected), generator=random) * 2.0 - 1.0
        return planes.to(device), (signs / self.projected**0.5).to(device)

    def _encoded(self, tokens: Packed, planes: Tensor, signs: Tensor, *, document: bool) -> Tensor:
        """`[N, width]` float32."""
        tokens = tokens.compact()
        values, owner, parts = tokens.values.float(), tokens.document_of_token(), 2**self.bits
        powers = 2 ** torch.arange(self.bits, device=values.device)
        found = torch.empty(len(tokens), self.repetitions, parts, self.projected, device=values.device)
        for number in range(self.repetitions):
            sketch = ((values @ planes[number] > 0) * powers).sum(1)
            cells = owner * parts + sketch
            small = values @ signs[number]
            held = torch.zeros(len(tokens) * parts, self.projected, device=values.device).index_add_(0, cells, small)
            if document:
                counts = torch.zeros(len(tokens) * parts, device=values.device).index_add_(
                    0, cells, torch.ones_like(small[:, 0])
                )
                held /= counts.clamp(min=1)[:, None]
                self._fill(held, counts, sketch, small, tokens)
            found[:, number] = held.view(len(tokens), parts, self.projected)
        return found.view(len(tokens), -1)

    def _fill(self, held: Tensor, counts: Tensor, sketch: Tensor, small: Tensor, tokens: Packed) -> None:
        """Empty parts of documents that have tokens get the token with the fewest planes between, the first of equals."""
        parts, total = 2**self.bits, len(sketch)
        empty = ((counts == 0) & (tokens.lengths > 0).repeat_interleave(parts)).nonzero()[:, 0]
        every = torch.arange(parts, device=sketch.device)
        between = torch.zeros(parts, parts, dtype=torch.int64, device=sketch.device)
        for bit in range(self.bits):
            between += (every[:, None] ^ every) >> bit & 1
        # The first token of each part of a document stands for those after it; then the nearest of `parts` parts, the first of equals.
        cells = tokens.document_of_token() * parts + sketch
        numbers = torch.arange(total, device=sketch.device)
        first = torch.full((len(tokens) * parts,), total, device=sketch.device).scatter_reduce_(0, cells, numbers, "amin")
        of_document = first.view(len(tokens), parts)[empty // parts]
        ranked = torch.where(
            of_document < total, between[empty % parts] * (total + 1) + of_document, torch.iinfo(torch.int64).max
        )
        held[empty] = small[ranked.amin(1) % (total + 1)]
