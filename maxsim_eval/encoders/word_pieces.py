"""Many texts to word pieces past the libraries' Python: the tokenizer's own Rust, as a call of the library on some of them left it.

transformers turns every text's pieces into lists of lists and flattens those in Python: at a GPU's pace that is most of the work. The
caller compares what comes out with the library's answer for a few of the texts, and takes the library's own way where they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

MANY = 64  # texts from which this way pays
_COMPARED = 8


@dataclass(frozen=True)
class Pieces:
    """Word pieces of n texts, one behind the other: ids and which are special `[sum]`, how many each text has `[n]`."""

    ids: np.ndarray
    special: np.ndarray
    lengths: np.ndarray

    @staticmethod
    def of(ids: Sequence[Sequence[int]], special: Sequence[Sequence[int]]) -> Pieces:
        """Of lists, a text each."""
        lengths = np.array([len(row) for row in ids], np.int64)
        count = int(lengths.sum())
        return Pieces(
            np.fromiter(chain.from_iterable(ids), np.int64, count),
            np.fromiter(chain.from_iterable(special), bool, count),
            lengths,
        )

    def same(self, rows: Sequence[int], other: Pieces) -> bool:
        """Whether these texts have exactly the pieces of `other`'s, in its order."""
        starts = np.cumsum(self.lengths) - self.lengths
        mine = np.concatenate([np.arange(starts[row], starts[row] + self.lengths[row]) for row in rows])
        return (
            np.array_equal(self.lengths[rows], other.lengths)
            and np.array_equal(self.ids[mine], other.ids)
            and np.array_equal(self.special[mine], other.special)
        )

    def laid_out(self, values: np.ndarray, fill: int | bool, left: bool = False) -> np.ndarray:
        """Values of all pieces `[sum]` as `[n, longest]`, `fill` before (`left`) or behind a text's own."""
        found = np.full((len(self.lengths), int(self.lengths.max(initial=0))), fill, values.dtype)
        found[self.filled(left)] = values
        return found

    def filled(self, left: bool = False) -> np.ndarray:
        """Where `laid_out` puts values, `[n, longest]` bool."""
        places = np.arange(int(self.lengths.max(initial=0)))
        return (places[::-1] if left else places) < self.lengths[:, None]


def some_of(texts: Sequence[str]) -> list[int]:
    """Texts to compare: the longest, the shortest and some between."""
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    return sorted({*order[:: max(1, len(order) // _COMPARED)], order[-1]})


def fast_pieces(tokenizer: Any, texts: Sequence[str]) -> Pieces | None:
    """Pieces of texts by the tokenizer's Rust part, truncated as its last call was; None: it has none."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    found = backend.encode_batch_fast(list(texts))
    return Pieces.of([one.ids for one in found], [one.special_tokens_mask for one in found])
