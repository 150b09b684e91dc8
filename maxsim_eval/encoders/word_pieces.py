"""Turns many texts into word pieces by the tokenizer's Rust part itself, with the settings that the library's call on a few left.

transformers turns every text's pieces into lists of lists and flattens those in Python: at a GPU's pace that is most of the work. The
result is compared with the library's answer for those few; where they differ, callers take the library's own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from threading import Lock
from typing import Any

import numpy as np

from maxsim_eval.encoders import piece_process
from maxsim_eval.encoders.readers import Readers

MANY = 64  # texts from which this way pays
_COMPARED = 8


@dataclass(frozen=True)
class Pieces:
    """Ids of the word pieces of n texts, one behind the other `[sum]`, and how many each text has `[n]`; int64."""

    ids: np.ndarray
    lengths: np.ndarray

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Pieces:
        """From lists of ids, one for each text."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return Pieces(np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum())), lengths)

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


def fast_pieces(
    tokenizer: Any, texts: list[str], some: Sequence[int], asked: Sequence[Sequence[int]], lock: Lock, readers: Readers | None
) -> Pieces | None:
    """Pieces of texts by the tokenizer's Rust part, special tokens included, cut as in its last call; by `readers` if ready.

    None: there is no Rust part, or the texts `some` do not come out as in that call (`asked`). The caller holds `lock`, the
    tokenizer's; it is released while processes tokenize.
    """
    if not getattr(tokenizer, "is_fast", False):
        return None
    backend = tokenizer.backend_tokenizer
    settings = backend.truncation, backend.encode_special_tokens  # others may change them where the lock is let go
    if readers is not None and readers.ready(backend, len(texts)):
        lock.release()
        try:
            ids, lengths = readers.pieces(*settings, texts)
        finally:
            lock.acquire()
    else:
        ids, lengths = piece_process.pieces(backend, *settings, texts)
    pieces = Pieces(ids.astype(np.int64), lengths)
    ends = np.cumsum(pieces.lengths)
    own = (pieces.ids[ends[row] - pieces.lengths[row] : ends[row]].tolist() for row in some)
    return pieces if all(one == list(ids) for one, ids in zip(own, asked, strict=True)) else None


def margins(special: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """How many special tokens stand before and behind every text's own; None: they lie otherwise, or not alike in all."""
    found = set()
    for row in special:
        before = next((n for n, flag in enumerate(row) if not flag), len(row))
        behind = next((n for n, flag in enumerate(reversed(row)) if not flag), len(row))
        if before == len(row):
            continue  # special tokens alone say nothing about where the text's own would be
        if sum(row) != before + behind:
            return None
        found.add((before, behind))
    return found.pop() if len(found) == 1 else None
