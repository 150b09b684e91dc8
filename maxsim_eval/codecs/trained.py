"""Coders whose codebooks a sample of the corpus trained: ColBERTv2's residuals, and product quantisation; k-means by faiss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.codecs.bits import pack_bits, packed_size, unpack_bits
from maxsim_eval.codecs.steps import Coder, State, is_unit, require, row_blocks, unit
from maxsim_eval.errors import DataError, MissingPackageError
from maxsim_kernels import Packed, ResidualTokens

LEAST_PER_CENTROID = 39  # tokens, faiss' own bound
_PER_CENTROID = 64
_HELD_OUT = 0.05  # part of the sample's tokens whose residuals give the buckets' bounds
_MOST_HELD_OUT = 50_000
_MOST_NUMBERS = 1 << 24  # in these residuals
_PQ_CENTROIDS = 256


def _faiss(what: str) -> Any:
    try:
        import faiss
    except ImportError:
        raise MissingPackageError(what, "faiss-cpu", "atlas") from None
    return faiss


def default_centroids(tokens: int) -> int:
    """ColBERTv2's number of centroids for a corpus of so many tokens: the power of two at or below 16 times its root."""
    return int(2 ** np.floor(np.log2(16 * np.sqrt(max(tokens, 1)))))


def _number(state: State) -> torch.dtype:
    """The dtype that numbers of centroids are stored in."""
    return torch.uint16 if len(state["centroids"]) <= 1 << 16 else torch.int32


def nearest(values: Tensor, points: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[T]` int64: for every row the point `[C, d]` of the largest dot product (plus `bias` `[C]`), the first of equals."""
    found = torch.empty(len(values), dtype=torch.int64, device=values.device)
    for first, piece in row_blocks(values):
        products = piece @ points.T
        if bias is not None:
            products += bias
        found[first : first + len(piece)] = products.argmax(1)[: len(found) - first]
    return found


@dataclass(frozen=True)
class Residual(Coder):
    """ColBERTv2's codec: the nearest centroid, and for every number of the residual its bucket; each bucket gets equally many.

    Centroids: k-means, at length 1; the nearest is that of the largest dot product. Buckets: quantiles of held-out residuals,
    each read back as the quantile at its middle. Decoded tokens have length 1 where the original ones had. `centroids=0` is
    ColBERTv2's rule for the corpus (`default_centroids`).
    """

    bits: int
    centroids: int = 0
    iterations: int = 4
    seed: int = 123

    shared = ("centroids", "cutoffs", "weights")
    summary = "ColBERTv2: nearest of k-means centroids, and the rest in buckets by quantiles"
    source = "Santhanam et al. 2022, ColBERTv2, section 3.3; PLAID's code for cut-offs and weights"

    def check(self, dim: int) -> None:
        require(f"residual-{self.bits}", self.bits, self.bits in (1, 2, 4, 8), "1, 2, 4 or 8 bits")
        for name in ("centroids", "iterations"):
            value = getattr(self, name)
            require(
                name,
                value,
                value >= (name == "iterations"),
                "1 or more" if name == "iterations" else "0 (ColBERTv2's rule) or more",
            )

    def sample_tokens(self, dim: int, tokens: int) -> int:
        return _PER_CENTROID * self._count(tokens)

    def _count(self, tokens: int) -> int:
        return self.centroids or default_centroids(tokens)

    def token_bytes(self, dim: int, state: State) -> float:
        return float(packed_size(dim, self.bits) + _number(state).itemsize)

    def fit(self, sample: Packed, tokens: int) -> dict[str, Tensor]:
        values = np.ascontiguousarray(sample.values.numpy())
        count = self._count(tokens)
        if len(values) < LEAST_PER_CENTROID * count:
            raise DataError(
                f"residual-{self.bits}: {len(values):,} tokens are too few for {count:,} centroids, need "
                f"{LEAST_PER_CENTROID * count:,}; centroids={max(1, len(values) // LEAST_PER_CENTROID)} would do"
            )
        order = np.random.default_rng(self.seed).permutation(len(values))
        held = max(1, min(round(_HELD_OUT * len(values)), _MOST_HELD_OUT, _MOST_NUMBERS // values.shape[1]))
        apart, rest = values[order[:held]], values[order[held:]]
        kmeans = _faiss(f"residual-{self.bits}").Kmeans(
            values.shape[1],
            count,
            niter=self.iterations,
            seed=self.seed,
            min_points_per_centroid=1,
            max_points_per_centroid=256,
        )
        kmeans.train(np.ascontiguousarray(rest))
        centroids = unit(torch.from_numpy(kmeans.centroids.copy()))
        heldout = torch.from_numpy(apart)
        rests = (heldout - centroids[nearest(heldout, centroids)]).numpy()
        levels = np.arange(2**self.bits) / 2**self.bits
        return {
            "centroids": centroids,
            "cutoffs": torch.from_numpy(np.quantile(rests, levels[1:]).astype(np.float32)),
            "weights": torch.from_numpy(np.quantile(rests, levels + 0.5 / 2**self.bits).astype(np.float32)),
            "unit": torch.tensor(is_unit(sample)),
        }

    def encode(self, values: Tensor, state: State) -> dict[str, Tensor]:
        numbers = nearest(values, state["centroids"])
        codes = torch.bucketize(values - state["centroids"][numbers], state["cutoffs"], out_int32=True)
        return {"centroids": numbers.to(_number(state)), "codes": pack_bits(codes.to(torch.uint8), self.bits)}

    def decode(self, stored: Mapping[str, Tensor], state: State, dim: int) -> Tensor:
        codes = unpack_bits(stored["codes"], dim, self.bits)
        values = state["weights"][codes.int()] + state["centroids"][stored["centroids"].long()]
        return unit(values) if bool(state["unit"]) else values

    @property
    def fused(self) -> bool:
        return self.bits < 8

    def as_stored(self, tokens: Packed, stored: Mapping[str, Tensor], state: State) -> ResidualTokens:
        codes, tables = tokens.with_values(stored["codes"]), (state["centroids"], state["weights"])
        return ResidualTokens(codes, stored["centroids"], *tables, unit=bool(state["unit"]))


@dataclass(frozen=True)
class Pq(Coder):
    """Product quantisation: `parts` pieces of every token, each the nearest of 256 points, one byte. `parts=0`: one for 8 numbers."""

    parts: int = 0
    seed: int = 1234

    shared = ("points",)
    summary = "product quantisation: every piece of a token is the nearest of 256 points"
    source = "Jegou, Douze and Schmid 2011; codebooks by faiss"

    def check(self, dim: int) -> None:
        parts = self._parts(dim)
        require("parts", self.parts, parts >= 1 and dim % parts == 0, f"a divisor of the width, {dim}")

    def _parts(self, dim: int) -> int:
        return self.parts or max(1, dim // 8)

    def sample_tokens(self, dim: int, tokens: int) -> int:
        return _PER_CENTROID * _PQ_CENTROIDS

    def token_bytes(self, dim: int, state: State) -> float:
        return float(self._parts(dim))

    def fit(self, sample: Packed, tokens: int) -> dict[str, Tensor]:
        values = np.ascontiguousarray(sample.values.numpy())
        if len(values) < LEAST_PER_CENTROID * _PQ_CENTROIDS:
            need = LEAST_PER_CENTROID * _PQ_CENTROIDS
            raise DataError(f"pq: {len(values):,} tokens are too few for {_PQ_CENTROIDS} points a piece, need {need:,}")
        parts = self._parts(sample.dim)
        quantiser = _faiss("pq").ProductQuantizer(sample.dim, parts, 8)
        quantiser.cp.seed = self.seed
        quantiser.train(values)
        points = np.array(_faiss("pq").vector_to_array(quantiser.centroids), np.float32)
        return {"points": torch.from_numpy(points.reshape(parts, _PQ_CENTROIDS, -1))}

    def encode(self, values: Tensor, state: State) -> dict[str, Tensor]:
        points = state["points"]
        pieces = values.view(len(values), len(points), -1)
        codes = torch.empty(len(values), len(points), dtype=torch.uint8, device=values.device)
        for part, of_part in enumerate(points):  # nearest by distance: |x|^2 is the same for all
            codes[:, part] = nearest(pieces[:, part].contiguous(), of_part, -of_part.square().sum(1) / 2)
        return {"codes": codes}

    def decode(self, stored: Mapping[str, Tensor], state: State, dim: int) -> Tensor:
        points = state["points"]
        found = [points[part][stored["codes"][:, part].int()] for part in range(len(points))]
        return torch.cat(found, 1)
