"""Spearman's rank correlation of two rows of scores, and the ranks behind it: by the CPU, or the same numbers by a GPU's sort."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from threading import Lock

import numpy as np
import torch

Ranking = Callable[[np.ndarray], np.ndarray]  # scores `[documents]` without NaN to ranks float64, from 1, ties averaged
_LOW = 0 if sys.byteorder == "little" else 1  # which 16 bits of an integer come first in memory
DEVICE_MEMORY = 2 << 30  # bytes of a GPU that an evaluation may take unless it is told otherwise
_SORTED_BYTES = 64  # bytes of a GPU that ranking one score there takes


def ranks_of(scores: np.ndarray) -> np.ndarray:
    """`scipy.stats.rankdata` of scores without NaN; of float32 in a quarter of its time, and in half its memory."""
    if not _is_sortable(scores):
        from scipy.stats import rankdata  # half a second to import, and scores are float32

        return np.asarray(rankdata(scores))
    bits = _bits_of(scores)
    # Two stable sorts by 16 bits, which numpy does by counting, sort all 32.
    halves = (bits.view(np.uint32) ^ np.uint32(1 << 31)).view(np.uint16).reshape(-1, 2)
    order = np.argsort(halves[:, _LOW], kind="stable")
    order = order[np.argsort(halves[order, 1 - _LOW], kind="stable")]
    del halves
    bits = bits[order]
    ends = np.append(np.flatnonzero(bits[1:] != bits[:-1]) + 1, len(bits)).astype(np.int32)  # of runs of equal scores
    del bits
    size = np.diff(ends, prepend=np.int32(0))
    twice = np.empty(len(scores), np.int32)  # a mean of whole numbers may end in a half
    twice[order] = np.repeat(2 * ends - size + 1, size)
    del order
    return twice * 0.5


def ranking_on(device: str, memory: int) -> Ranking:
    """`ranks_of`; on a GPU the same numbers by its sort, in a tenth of the time, for rows that fit into `memory` bytes of it.

    The ranking may be called by several threads: rows are sorted one after the other, so that only one is in the GPU's memory.
    """
    if torch.device(device).type != "cuda":
        return ranks_of
    turn = Lock()

    def ranks(scores: np.ndarray) -> np.ndarray:
        if not _is_sortable(scores) or _SORTED_BYTES * len(scores) > memory:
            return ranks_of(scores)
        try:
            with turn:
                return sorted_by(device, scores)
        except torch.OutOfMemoryError:
            warnings.warn("comparing scores: the GPU's memory is full, so the CPU ranks them, which takes longer", stacklevel=2)
            return ranks_of(scores)

    return ranks


def sorted_by(device: str, scores: np.ndarray) -> np.ndarray:
    """`ranks_of` float32 scores by torch's sort on a device."""
    level, order = torch.from_numpy(_bits_of(scores)).to(device).sort()
    size = torch.unique_consecutive(level, return_counts=True)[1]
    twice = torch.empty(len(level), dtype=torch.int32, device=device)
    twice[order] = (2 * size.cumsum(0) - size + 1).int().repeat_interleave(size, output_size=len(level))
    return twice.cpu().numpy() * 0.5


def _is_sortable(scores: np.ndarray) -> bool:
    return scores.dtype == np.float32 and 0 < len(scores) < 1 << 30


def _bits_of(scores: np.ndarray) -> np.ndarray:
    """int32 in the order of float32 scores; equal ones where scores are equal."""
    bits = (scores + np.float32(0)).view(np.int32)  # -0.0 becomes 0.0, which it equals
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return bits


def spearman(reference: np.ndarray, other: np.ndarray, ranking: Ranking = ranks_of) -> float | None:
    """Spearman's rank correlation of two score rows `[documents]`, ties averaged; None when either row is constant.

    -inf counts as the lowest score, so documents that were not retrieved share the bottom rank.
    """
    if len(reference) < 2:
        return None
    left, right = ranking(reference), ranking(other)
    left -= left.mean()
    right -= right.mean()
    variance = math.sqrt(_dot(left, left)) * math.sqrt(_dot(right, right))
    if variance == 0.0:
        return None
    if np.array_equal(left, right):
        return 1.0  # exactly: the quotient below may round to 0.9999999999999999
    return max(-1.0, min(1.0, _dot(left, right) / variance))


def _dot(left: np.ndarray, right: np.ndarray) -> float:
    """The dot product without BLAS, whose order of additions depends on how many threads it has: under torchrun, one."""
    return float((left * right).sum())
