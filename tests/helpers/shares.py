"""Which of the slow tests a run takes: every N-th, and more of those that compare kernels with brute force."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from places import ROOT, TESTS

OFTEN = 4  # kernels that passed on a GPU as they are meet brute force so many times as often as a test takes its turn
GPU_TESTS = "h200/tests.json"


def share(text: str) -> tuple[int, int]:
    """`K/N` as (K - 1, N): the first place and the step."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"got {text!r}, need K/N with K from 1 to N, as 1/8")
    return int(part) - 1, int(parts)


def passed_on_a_gpu(results: Path = ROOT / "docs" / "results") -> bool:
    """Whether every file of tests/gpu passed with the operator as it is, by the committed record."""
    from tables import ages  # of benchmarks/, which a run of all tests does not need
    from tables.cells import FIGURES, Book

    book = Book(results, FIGURES)
    held = (book.file(GPU_TESTS) or {}).get("files", {})
    return all(
        name in held and not held[name]["failed"] and not ages.is_older(book, GPU_TESTS, ["files", name])
        for name in (path.stem for path in (TESTS / "gpu").glob("test_*.py"))
    )


def left_out(slow: Mapping[str, bool], part: tuple[int, int], passed: bool) -> set[str]:
    """Of slow tests (name: whether it is of every change), those that are not in this part.

    Args:
        slow: The tests.
        part: As `share` gives it.
        passed: Whether the kernels are those that passed on a GPU: then tests of every change take turns too.
    """
    found = set()
    for every_change in (True, False):
        first, step = part
        if every_change:
            step = max(1, step // OFTEN) if passed else 1
        names = sorted(name for name, every in slow.items() if every == every_change)
        found |= set(names) - set(names[first % step :: step])
    return found
