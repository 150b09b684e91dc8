"""What a step of a codec is: a frozen dataclass, whose fields are its options; the number in `pool-2` is the first of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.errors import UsageError
from maxsim_kernels import BitTokens, Packed, ResidualTokens

State = Mapping[str, Tensor]
"""What a step learned from a sample, by name; also what a stored corpus has to keep once."""


@dataclass(frozen=True)
class Step:
    """Common to all steps.

    `summary` says in one line what is done, `source` who described it; `shared` names what of its state has to be stored once.
    """

    summary: ClassVar[str]
    source: ClassVar[str] = ""
    shared: ClassVar[tuple[str, ...]] = ()

    def check(self, dim: int) -> None:
        """Refuse embeddings of width `dim` that this step cannot take, by a `UsageError`."""

    def fit(self, sample: Packed, tokens: int) -> dict[str, Tensor]:
        """What the step learns of a corpus of `tokens` tokens, from some documents (float32, on the CPU, after earlier steps)."""
        return {}

    def sample_tokens(self, dim: int, tokens: int) -> int:
        """How many of the corpus's tokens `fit` wants to see; 0: none."""
        return 0


@dataclass(frozen=True)
class Shape(Step):
    """A step that changes tokens, which stay floating-point numbers."""

    def width(self, dim: int) -> int:
        """Width of tokens afterwards."""
        return dim

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens of every document afterwards, at most (`[N]` int64)."""
        return lengths

    def queries(self, tokens: Packed, state: State) -> Packed:
        """Query tokens, float32."""
        return tokens

    @property
    def reads_words(self) -> bool:
        """Whether `fit_words` has to be called: what is done depends on what tokens stand for."""
        return False

    def fit_words(self, words: Iterator[Sequence[str]]) -> dict[str, Tensor]:
        """What the step learns of `words`: those that the tokens stand for, document by document."""
        raise NotImplementedError

    def documents(self, tokens: Packed, state: State, first: int | None = None) -> Packed:
        """Document tokens, float32; each document by itself. `first`: the number of the first in the corpus (None: of a sample)."""
        return self.queries(tokens, state)


@dataclass(frozen=True)
class Coder(Step):
    """A step that stores numbers. Every token is coded by itself."""

    @property
    def int8_queries(self) -> bool:
        """Whether queries are quantised to INT8 and multiplied with the stored levels, as whole numbers, then with the scales."""
        return False

    def token_bytes(self, dim: int, state: State) -> float:
        """Bytes of a token."""
        raise NotImplementedError

    def encode(self, values: Tensor, state: State) -> dict[str, Tensor]:
        """Float32 tokens `[T, d]` to what is stored, by name: each `[T, ...]`."""
        raise NotImplementedError

    def decode(self, stored: Mapping[str, Tensor], state: State, dim: int) -> Tensor:
        """What is stored to float32 tokens `[T, d]`."""
        raise NotImplementedError

    @property
    def fused(self) -> bool:
        """Whether the operator scores what is stored without decoding it: `as_stored` gives its form."""
        return False

    def as_stored(self, tokens: Packed, stored: Mapping[str, Tensor], state: State) -> BitTokens | ResidualTokens:
        """What is stored of `tokens`, as the operator takes it."""
        raise NotImplementedError


_ROWS = 2048


def row_blocks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """`values` in pieces of one size, `_ROWS` rows, and where each begins; the last is filled up with zeros.

    Matrix products of one shape give a row the same bits wherever it stands, products of different shapes need not. So tokens are coded
    in products of one shape: what a token becomes does not depend on the block of documents that it was read with.
    """
    for first in range(0, len(values), _ROWS):
        piece = values[first : first + _ROWS]
        yield first, piece if len(piece) == _ROWS else torch.nn.functional.pad(piece, (0, 0, 0, _ROWS - len(piece)))


def product(values: Tensor, matrix: Tensor) -> Tensor:
    """`values @ matrix`, `[T, n]`: each row has the same bits, whatever rows stand beside it."""
    found = values.new_empty(len(values), matrix.shape[1])
    for first, piece in row_blocks(values):
        found[first : first + _ROWS] = (piece @ matrix)[: len(found) - first]
    return found


def require(name: str, value: Any, allowed: bool, need: str) -> None:
    """Refuse the value of an option, by a `UsageError`."""
    if not allowed:
        raise UsageError(f"{name}: got {value}, need {need}")


def is_unit(sample: Packed) -> bool:
    """Whether all tokens have length 1, as those of most encoders do."""
    norms = torch.linalg.vector_norm(sample.values.float(), dim=1)
    return bool(norms.numel() and ((norms - 1).abs() < 1e-2).all())


def unit(values: Tensor) -> Tensor:
    """Tokens at length 1; those of zeros as they are."""
    return torch.nn.functional.normalize(values, dim=1)
