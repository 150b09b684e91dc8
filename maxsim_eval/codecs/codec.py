"""A codec: steps in a row, fitted on a sample of the corpus, then applied to documents and queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.codecs.scalar import Scaled
from maxsim_eval.codecs.steps import Coder, Shape, State, Step
from maxsim_eval.errors import DataError, UsageError
from maxsim_kernels import BitTokens, Int8Tokens, Packed, ResidualTokens

_ROWS = 1 << 16  # tokens coded at once: a hundred megabytes or so, beside the block itself

_TYPICAL = 240  # tokens of a document

Words = Callable[[], Iterator[Sequence[str]]]
Draw = Callable[[int], Packed]
"""Documents with about so many tokens, always the same ones."""


@dataclass(frozen=True)
class Codec:
    """A way of storing tokens: `shapes` change them one after the other, `coder` stores their numbers."""

    name: str
    shapes: tuple[Shape, ...]
    coder: Coder

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps in order."""
        return (*self.shapes, self.coder)

    @property
    def description(self) -> str:
        """What is done, in one line."""
        how = (
            "INT8 queries (one scale a token), exact integer products" if self.coder.int8_queries else "scored as decoded, FP32"
        )
        return "; ".join([*(step.summary for step in self.steps), how])

    def check(self, dim: int) -> None:
        """Refuse embeddings of width `dim`, by a `UsageError`."""
        for shape in self.shapes:
            shape.check(dim)
            dim = shape.width(dim)
        self.coder.check(dim)

    def width(self, dim: int) -> int:
        """Width of the tokens that are stored."""
        for shape in self.shapes:
            dim = shape.width(dim)
        return dim

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens that are stored of every document, at most (`[N]` int64)."""
        for shape in self.shapes:
            lengths = shape.lengths(lengths)
        return lengths

    def fit(self, draw: Draw, dim: int, tokens: int, words: Words | None = None) -> dict[str, Tensor]:
        """What all steps learn of a corpus of `tokens` tokens, from samples by `draw`: `<number of the step>.<name>` -> tensor.

        Args:
            words: gives, document by document, the words that the tokens stand for; None: they are not known.

        Raises:
            UsageError: a width that does not fit, or a step that reads words and is not the first. DataError: too few tokens,
                tokens that a step cannot work with, or words that are not known.
        """
        self.check(dim)
        found: dict[str, Tensor] = {}
        typical = np.array([_TYPICAL])
        thinner = _TYPICAL / max(1, int(self.lengths(typical)[0]))  # later steps see what earlier ones leave
        wanted = int(max(step.sample_tokens(dim, tokens) for step in self.steps) * thinner)
        sample = draw(min(wanted, tokens)) if wanted else Packed(torch.empty(0, dim), torch.zeros(1, dtype=torch.int64))
        for number, step in enumerate(self.steps):
            state = step.fit(sample, tokens)
            if isinstance(step, Shape) and step.reads_words:
                state |= self._of_words(number, step, words, tokens)
            found |= {f"{number}.{name}": value for name, value in state.items()}
            if isinstance(step, Shape):
                sample = step.documents(sample, state) if wanted else sample.with_values(torch.empty(0, step.width(sample.dim)))
        return found

    def _of_words(self, number: int, step: Shape, words: Words | None, tokens: int) -> dict[str, Tensor]:
        if number:
            raise UsageError(f"codec {self.name!r}: what reads words has to be the first step")
        if words is None:
            raise DataError(
                f"codec {self.name!r}: the words that tokens stand for are not known: of imported embeddings, of encoders that do not "
                "say them, and of candidates"
            )
        found = step.fit_words(words())
        count = int(found["begins"][-1])
        if count != tokens:
            raise DataError(f"codec {self.name!r}: the encoder names {count:,} tokens and the cache holds {tokens:,}")
        return found

    def shared_bytes(self, state: State) -> int:
        """Bytes that a stored corpus keeps once: codebooks and the like."""
        kept = (f"{number}.{name}" for number, step in enumerate(self.steps) for name in step.shared)
        return sum(state[name].numel() * state[name].element_size() for name in kept)

    def token_bytes(self, dim: int, state: State) -> float:
        """Bytes of a stored token."""
        return self.coder.token_bytes(self.width(dim), _of(state, len(self.shapes)))


@dataclass(frozen=True)
class Fitted:
    """A codec with what it learned."""

    codec: Codec
    state: State

    @cached_property
    def _on(self) -> dict[torch.device, list[dict[str, Tensor]]]:
        return {}

    def _states(self, device: torch.device) -> list[dict[str, Tensor]]:
        if device not in self._on:
            parts = (_of(self.state, number) for number in range(len(self.codec.steps)))
            self._on[device] = [{name: value.to(device) for name, value in part.items()} for part in parts]
        return self._on[device]

    def queries(self, tokens: Packed) -> Packed:
        """Query tokens as they are scored against decoded documents: float32."""
        tokens = tokens.to(torch.float32)
        for shape, state in zip(self.codec.shapes, self._states(tokens.device), strict=False):
            tokens = shape.queries(tokens, state)
        return tokens

    def documents(self, tokens: Packed, first: int = 0) -> Packed | Int8Tokens | BitTokens | ResidualTokens:
        """Document tokens stored and read again, as they are scored: float32, or whole numbers with a scale a token.

        On a GPU they stay as they are stored, if the operator has a kernel for that. Tokens of a document depend on no other
        document. `first` is the number of the first document in the corpus.
        """
        states, coder = self._states(tokens.device), self.codec.coder
        tokens = tokens.compact().to(torch.float32)
        for shape, state in zip(self.codec.shapes, states, strict=False):
            tokens = shape.documents(tokens, state, first)
        if tokens.device.type == "cuda" and coder.fused and len(tokens.values):
            return self._as_stored(tokens)
        whole = isinstance(coder, Scaled) and coder.int8_queries
        values = torch.empty(tokens.values.shape, dtype=torch.int8 if whole else torch.float32, device=tokens.device)
        scales = torch.empty(len(values), dtype=torch.float16, device=tokens.device)
        for row in range(0, len(values), _ROWS):
            span = slice(row, row + _ROWS)
            stored = self.encode(tokens.values[span])
            if isinstance(coder, Scaled) and whole:
                values[span], scales[span] = coder.levels(stored, tokens.dim), stored["scales"]
            else:
                values[span] = coder.decode(stored, states[-1], tokens.dim)
        found = tokens.with_values(values)
        return Int8Tokens(found, scales, granularity="token") if whole else found

    def _as_stored(self, tokens: Packed) -> BitTokens | ResidualTokens:
        """The stored form of shaped tokens (one or more), as the operator takes it."""
        kept: dict[str, Tensor] = {}
        for row in range(0, len(tokens.values), _ROWS):
            for name, part in self.encode(tokens.values[row : row + _ROWS]).items():
                if name not in kept:
                    kept[name] = part.new_empty(len(tokens.values), *part.shape[1:])
                kept[name][row : row + _ROWS] = part
        return self.codec.coder.as_stored(tokens, kept, self._states(tokens.device)[-1])

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """What is stored of shaped tokens `[T, d]` float32, by name."""
        return self.codec.coder.encode(values.contiguous(), self._states(values.device)[-1])


def _of(state: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """The state of one step."""
    return {name.partition(".")[2]: value for name, value in state.items() if name.startswith(f"{number}.")}
