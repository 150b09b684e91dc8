"""Units and shares: every document in one unit, every unit in one share, sizes within bounds, the largest share as small as can be."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsim_eval.errors import UsageError
from maxsim_eval.scoring.units import LEAST_BYTES, MOST_BYTES, MOST_DOCUMENTS, shares, units


def sizes(found: list[tuple[int, int]], lengths: np.ndarray) -> list[int]:
    return [int(lengths[start:stop].sum()) for start, stop in found]


def limit(lengths: np.ndarray, row_bytes: int) -> int:
    """Bytes that a unit of more than one document may have."""
    return min(max(-(-int(lengths.sum()) * row_bytes // 256), LEAST_BYTES), MOST_BYTES)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 3_000_000), st.just(20_000_000)), max_size=60),
    row_bytes=st.sampled_from([1, 48, 256, 8192, 1 << 31]),
)
def test_units_cover_the_corpus_within_bounds(lengths: list[int], row_bytes: int) -> None:
    array = np.array(lengths, np.int64)
    found = units(array, row_bytes)
    assert [number for start, stop in found for number in range(start, stop)] == list(range(len(lengths)))
    most = limit(array, row_bytes)
    for (start, stop), tokens in zip(found, sizes(found, array), strict=True):
        assert start < stop
        assert tokens * row_bytes <= most or stop == start + 1
    for start, stop in found[:-1]:  # none was closed before it was full
        assert int(array[start : stop + 1].sum()) * row_bytes > most


@pytest.mark.parametrize(
    ("documents", "tokens", "expected"),
    [
        (5_000, 120, 3),  # 146 MiB: units of 64 MiB
        (523_000, 120, 240),  # 15 GiB: the same
        (2_680_000, 170, 257),  # 109 GiB: a 256th, and what is left
        (17_600_000, 120, 504),  # 503 GiB: units of 1 GiB, and no part of a document
    ],
)
def test_sizes_of_real_corpora(documents: int, tokens: int, expected: int) -> None:
    lengths = np.full(documents, tokens, np.int64)
    found = units(lengths, 256)
    assert found == units(lengths, 256)
    assert abs(len(found) - expected) <= expected // 20
    held = np.array(sizes(found, lengths)) * 256
    assert held[:-1].min() > limit(lengths, 256) - tokens * 256
    assert held.max() <= limit(lengths, 256)


def test_many_short_documents_are_cut_by_number() -> None:
    found = units(np.ones(200_000, np.int64), 2)
    assert found == [(0, 65536), (65536, 131072), (131072, 196608), (196608, 200000)]
    assert MOST_DOCUMENTS == 65536
    assert len(units(np.zeros(70_000, np.int64), 2)) == 2


def test_no_documents() -> None:
    assert units(np.zeros(0, np.int64), 256) == []
    assert shares([], [], 3) == [range(0), range(0), range(0)]


def numbered(count: int) -> list[tuple[int, int]]:
    return [(number, number + 1) for number in range(count)]


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 1000)), max_size=9), ranks=st.integers(1, 6))
def test_shares_are_runs_and_the_largest_is_the_smallest_possible(tokens: list[int], ranks: int) -> None:
    found = shares(numbered(len(tokens)), tokens, ranks)
    assert len(found) == ranks
    assert [number for share in found for number in share] == list(range(len(tokens)))
    best = min(
        max(sum(tokens[a:b]) for a, b in pairwise((0, *cuts, len(tokens))))
        for cuts in combinations_with_replacement(range(len(tokens) + 1), ranks - 1)
    )
    assert max(sum(tokens[number] for number in share) for share in found) == best
    assert sum(len(share) > 0 for share in found) <= min(ranks, len(tokens))
    assert found == shares(numbered(len(tokens)), np.array(tokens, np.int64), ranks)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(1, 10), min_size=64, max_size=300), ranks=st.integers(1, 64))
def test_shares_are_even_on_many_ranks(tokens: list[int], ranks: int) -> None:
    found = shares(numbered(len(tokens)), tokens, ranks)
    held = [sum(tokens[number] for number in share) for share in found]
    assert sum(held) == sum(tokens)
    assert max(held) < sum(tokens) / ranks + 10  # a unit above even at most
    assert held[0] > 0


def test_shares_leave_no_rank_idle_that_could_have_a_unit() -> None:
    assert shares(numbered(4), [10, 1, 1, 1], 4) == [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
    assert sorted(len(share) for share in shares(numbered(9), [5] * 9, 8)) == [1, 1, 1, 1, 1, 1, 1, 2]
    assert [len(share) for share in shares(numbered(2), [5, 5], 4)] == [1, 1, 0, 0]


@pytest.mark.parametrize(("tokens", "ranks"), [([1, 2], 0), ([1], 2), ([1, 2, 3], 2)])
def test_shares_of_what_cannot_be(tokens: list[int], ranks: int) -> None:
    with pytest.raises(UsageError, match="shares: got"):
        shares(numbered(2), tokens, ranks)
