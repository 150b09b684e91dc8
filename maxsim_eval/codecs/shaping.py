"""Steps that give tokens of queries and documents alike other coordinates: scores change only by what is left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maxsim_eval.codecs.steps import Shape, State, product, require
from maxsim_kernels import Packed


def _times(tokens: Packed, matrix: Tensor) -> Packed:
    return tokens.with_values(product(tokens.values.float(), matrix))


@dataclass(frozen=True)
class Rotate(Shape):
    """A random rotation: every coordinate becomes a mixture of all, so that one scale a token fits them."""

    seed: int = 0

    summary = "random rotation of queries and documents (QR of a Gaussian matrix)"

    def fit(self, sample: Packed, tokens: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(self.seed)
        dim = sample.dim
        q, r = torch.linalg.qr(torch.randn(dim, dim, generator=random, dtype=torch.float64))
        return {"rotation": (q * torch.sign(torch.diagonal(r))).float()}

    def queries(self, tokens: Packed, state: State) -> Packed:
        return _times(tokens, state["rotation"])


@dataclass(frozen=True)
class Dims(Shape):
    """The leading numbers of every token, as encoders trained for it (Matryoshka) allow."""

    size: int

    summary = "the leading numbers of every token"
    source = "Kusupati et al. 2022, Matryoshka Representation Learning"

    def check(self, dim: int) -> None:
        require(f"dims-{self.size}", self.size, 1 <= self.size <= dim, f"1 to the embeddings' width, {dim}")

    def width(self, dim: int) -> int:
        return self.size

    def queries(self, tokens: Packed, state: State) -> Packed:
        return tokens.with_values(tokens.values.float()[:, : self.size].contiguous())


@dataclass(frozen=True)
class Pca(Shape):
    """The directions in which document tokens are longest: no other linear map to so few numbers keeps them as well."""

    size: int
    shared = ("directions",)

    summary = "principal directions of the document tokens (not centred: dot products are kept)"

    def check(self, dim: int) -> None:
        require(f"pca-{self.size}", self.size, 1 <= self.size <= dim, f"1 to the embeddings' width, {dim}")

    def width(self, dim: int) -> int:
        return self.size

    def sample_tokens(self, dim: int, tokens: int) -> int:
        return 64 * dim

    def fit(self, sample: Packed, tokens: int) -> dict[str, Tensor]:
        values = sample.values.double()
        _, vectors = torch.linalg.eigh(values.T @ values)  # ascending
        chosen = vectors.flip(1)[:, : self.size]
        signs = torch.sign(chosen.gather(0, chosen.abs().argmax(0, keepdim=True)))  # either sign is right: always take the same
        return {"directions": (chosen * signs).float().contiguous()}

    def queries(self, tokens: Packed, state: State) -> Packed:
        return _times(tokens, state["directions"])
