"""How an evaluation is divided: units of documents that are scored and kept whole, and the share of them that each rank takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maxsim_eval.errors import UsageError

_UNITS = 256  # about: enough that a share of them is even on many ranks, few enough that each is worth a file
LEAST_BYTES = 64 << 20
MOST_BYTES = 1 << 30  # at most seconds of work are lost to an interruption
MOST_DOCUMENTS = 1 << 16  # what is kept of a unit grows with its documents, however short they are


def units(lengths: np.ndarray, row_bytes: int) -> list[tuple[int, int]]:
    """Cut a corpus into ranges of whole documents, `(start, stop)` in order: every document is in exactly one.

    A unit has at most a 256th of the corpus's bytes (but 64 MiB at least and 1 GiB at most) and 65,536 documents, and takes as many
    as that allows; a larger document is a unit of its own. The cut depends on the corpus alone, never on ranks, memory or block
    size: finished units are found again whatever changed about those.

    Args:
        lengths: `[N]` int64, tokens of every document.
        row_bytes: bytes of one token.
    """
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    size = min(max(-(-int(offsets[-1]) * row_bytes // _UNITS), LEAST_BYTES), MOST_BYTES)
    found, start, documents = [], 0, len(lengths)
    while start < documents:
        stop = int(np.searchsorted(offsets, offsets[start] + size // row_bytes, side="right")) - 1
        stop = min(max(stop, start + 1), start + MOST_DOCUMENTS)
        found.append((start, stop))
        start = stop
    return found


def shares(units: Sequence[tuple[int, int]], tokens: Sequence[int], ranks: int) -> list[range]:
    """Divide units among ranks: for every rank a run of units (numbers of `units`), in order, every unit in exactly one.

    The largest share is as small as runs allow; within that, each rank takes what is nearest to an even part of what is left. Where
    there are more ranks than units, the last ones have empty runs.

    Args:
        units: as `units` gives them.
        tokens: of every unit.
        ranks: how many.

    Raises:
        UsageError: no ranks, or other than one number of tokens a unit.
    """
    if ranks < 1 or len(tokens) != len(units):
        raise UsageError(f"shares: got {ranks} ranks and tokens of {len(tokens)} units, need at least 1 and {len(units)}")
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(tokens, np.int64))])
    most = _smallest_most(ends, ranks)
    first = [len(units)]  # from the last rank to the first: the earliest unit it can start with, so that nobody exceeds `most`
    for _ in range(ranks):
        first.append(_earliest(ends, first[-1], most))
    found, start = [], 0
    for left in range(ranks, 0, -1):
        target = int(ends[start]) + int(ends[-1] - ends[start]) / left
        low = min(max(start + 1, first[left - 1]), len(units))
        high = max(_latest(ends, start, most), low)
        # Among equals the last: units without tokens stay with those before them.
        stop = len(units) if left == 1 else min(range(high, low - 1, -1), key=lambda place: abs(int(ends[place]) - target))
        found.append(range(start, stop))
        start = stop
    return found


def _smallest_most(ends: np.ndarray, ranks: int) -> int:
    """The smallest number of tokens with which `ranks` runs cover all units."""
    total = int(ends[-1])
    low, high = max(-(-total // ranks), int(np.diff(ends).max(initial=0))), total
    while low < high:
        middle = (low + high) // 2
        start = 0
        for _ in range(ranks):
            start = _latest(ends, start, middle)
        low, high = (low, middle) if start == len(ends) - 1 else (middle + 1, high)
    return low


def _latest(ends: np.ndarray, start: int, most: int) -> int:
    """Where a run that begins at unit `start` must end to have at most `most` tokens."""
    return int(np.searchsorted(ends, ends[start] + most, side="right")) - 1


def _earliest(ends: np.ndarray, stop: int, most: int) -> int:
    """Where a run that ends before unit `stop` can begin to have at most `most` tokens."""
    return int(np.searchsorted(ends, ends[stop] - most, side="left"))
