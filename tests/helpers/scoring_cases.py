"""What is put into records of scoring, and candidates, for tests of several files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from maxsim_eval.scoring.candidates import Candidates


def numbers(start: int, stop: int, rows: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Keys and scores of a unit, which its beginning decides."""
    draw = np.random.default_rng(start)
    keys = draw.integers(-(1 << 63), (1 << 63) - 1, (7, 10), np.int64, endpoint=True)
    scores = draw.standard_normal((rows, stop - start)).astype(np.float32)
    scores[0, 0] = -np.inf
    return keys, scores


def drawn(size: int, seed: int, *, width: int, grid: bool) -> torch.Tensor:
    """`[size, width]`: multiples of 1/4 in [-1, 1] (exact everywhere, ties abound) or normal values."""
    rng = np.random.default_rng((seed, size))
    values = rng.integers(-4, 5, (size, width)) / 4 if grid else rng.standard_normal((size, width))
    return torch.from_numpy(values.astype(np.float32))


def of_sets(sets: Sequence[set[int]]) -> Candidates:
    """Candidates of every query, given as sets of places."""
    rows = [np.array(sorted(one), np.int64) for one in sets]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return Candidates("x", offsets, np.concatenate(rows).astype(np.int64))
