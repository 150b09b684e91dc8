"""`merge_topk`, `TopK.add_keys` and a block's candidates: exact whatever the cut, the order and the grouping, ties and NaN included."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from maxsim_kernels import merge_topk
from maxsim_kernels.topk import TopK, keys_of, of_keys, refuse_nan

# Few different values, so that ties, also across parts and at the k-th place, are the rule. -0.0 equals 0.0.
VALUES = torch.tensor([-math.inf, math.inf, -1.5, -0.0, 0.0, 0.25, 0.25 + 2.0**-24, 1.0, 3.0])


def sorted_whole(scores: Tensor, k: int) -> tuple[list[list[float]], list[list[int]]]:
    """Top-k by sorting every row in Python."""
    rows = []
    for row in scores.tolist():
        found = sorted((n for n in range(len(row)) if row[n] != -math.inf), key=lambda n: (-row[n], n))[:k]
        rows.append((([row[n] for n in found] + [-math.inf] * k)[:k], (found + [-1] * k)[:k]))
    return [row[0] for row in rows], [row[1] for row in rows]


def tied(queries: int, documents: int, seed: int) -> Tensor:
    picks = torch.randint(0, len(VALUES), (queries, documents), generator=torch.Generator().manual_seed(seed))
    return VALUES[picks]


def part_keys(scores: Tensor, first: int, stop: int, k: int) -> Tensor:
    best = TopK(scores.shape[0], k, first=first)
    best.add(scores[:, first:stop])
    assert best.seen == stop - first
    return best.keys


def edges(total: int, parts: int, chance: random.Random) -> list[int]:
    """Ends of parts that cover `total` documents; some parts are empty."""
    return [0, *sorted(chance.randint(0, total) for _ in range(parts - 1)), total]


def grouped(parts: Sequence[Tensor], chance: random.Random) -> Tensor:
    """Merged as a tree of random shape."""
    held = list(parts)
    while len(held) > 1:
        chance.shuffle(held)
        size = chance.randint(2, max(2, len(held) // 2))
        held = [*held[size:], merge_topk(held[:size])]
    return merge_topk(held)


@pytest.mark.parametrize("shards", [2, 17, 300])
@pytest.mark.parametrize("k", [1, 7, 100])
def test_hundreds_of_shards_merge_into_the_whole(shards: int, k: int) -> None:
    """Any number of shards, in any order, merged at once, one by one or as a random tree."""
    chance = random.Random(shards * 1000 + k)
    for seed in range(3):
        full = tied(3, chance.choice([shards // 2 + 1, 4 * shards]), seed)
        need = sorted_whole(full, k)
        ends = edges(full.shape[1], shards, chance)
        parts = [part_keys(full, first, stop, k) for first, stop in itertools.pairwise(ends)]
        chance.shuffle(parts)
        one_by_one = TopK(3, k)
        for part in parts:
            one_by_one.add_keys(part)
        for keys in (merge_topk(parts), grouped(parts, chance), one_by_one.keys):
            assert keys.tolist() == merge_topk(parts).tolist()
            scores, indices = of_keys(keys)
            assert (scores.tolist(), indices.tolist()) == need


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_cut_of_any_small_corpus(data: st.DataObject) -> None:
    queries, total, k = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 40)), data.draw(st.integers(1, 9))
    full = tied(queries, total, data.draw(st.integers(0, 1000)))
    ends = [0, *sorted(data.draw(st.lists(st.integers(0, total), max_size=6))), total]
    parts = data.draw(st.permutations([part_keys(full, first, stop, k) for first, stop in itertools.pairwise(ends)]))
    scores, indices = of_keys(merge_topk(parts))
    assert (scores.tolist(), indices.tolist()) == sorted_whole(full, k)


@pytest.mark.parametrize("documents", [63, 64, 65, 1000, 4097])
@pytest.mark.parametrize("k", [1, 2, 15, 16, 63])
def test_a_block_much_longer_than_k_is_reduced_exactly(documents: int, k: int) -> None:
    """Whatever the size of the groups that stand for their members: ties among groups, and a last group that is not full."""
    for seed in range(4):
        full = tied(2, documents, seed)
        full[0, :: 3 + seed] = 3.0
        best = TopK(2, k, first=5)
        best.add(full)
        scores, indices = sorted_whole(full, k)
        assert best.scores.tolist() == scores
        assert best.indices.tolist() == [[n + 5 if n >= 0 else -1 for n in row] for row in indices]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF])
def test_no_nan_is_lost(bits: int, sign: float) -> None:
    """Of any bits, beside infinities, in a block that is reduced, through merges: the first one is named."""
    nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32).copysign(torch.tensor(sign))
    full = tied(3, 200, 0)
    full[1, 60:] = math.inf
    full[1, 171] = full[1, 57] = full[2, 3] = nan
    with pytest.raises(ValueError, match="NaN for query 1, document 57"):
        TopK(3, 2).add(full)
    parts = [keys_of(full[:, at : at + 10], at).sort(1, descending=True).values[:, :2] for at in range(0, 200, 10)]
    random.Random(1).shuffle(parts)
    with pytest.raises(ValueError, match="NaN for query 1, document 57"):
        merge_topk(parts)
    best = TopK(3, 2)
    with pytest.raises(ValueError, match="NaN for query 1, document 57"):
        best.add_keys(torch.cat(parts, 1))
    for read in (lambda: best.keys, lambda: best.scores, lambda: best.indices):
        with pytest.raises(ValueError, match="NaN for query 1, document 57"):
            read()
    with pytest.raises(ValueError, match="NaN for query 1, document 57"):
        refuse_nan(best.pending)


def test_first_counts_in_indices_and_in_nan_messages() -> None:
    best = TopK(1, 2, first=1 << 31)
    best.add(torch.tensor([[1.0, 3.0]]))
    best.add(torch.tensor([[3.0]]))
    assert best.indices.tolist() == [[(1 << 31) + 1, (1 << 31) + 2]]
    assert (best.first, best.seen) == (1 << 31, 3)
    with pytest.raises(ValueError, match=f"NaN for query 0, document {(1 << 31) + 3}"):
        best.add(torch.tensor([[math.nan]]))
    last = TopK(1, 1, first=(1 << 32) - 1)
    last.add(torch.tensor([[2.0]]))
    assert last.indices.tolist() == [[(1 << 32) - 1]]
    with pytest.raises(ValueError, match=f"got document {1 << 32}, need fewer"):
        last.add(torch.tensor([[2.0]]))
    with pytest.raises(ValueError, match="first: got -1"):
        TopK(1, 1, first=-1)


def test_a_document_in_two_parts_is_refused() -> None:
    full = tied(1, 30, 3)
    full[0, 4] = math.inf
    parts = [part_keys(full, 0, 15, 5), part_keys(full, 3, 30, 5)]
    with pytest.raises(ValueError, match="document 4 of query 0 is in two parts"):
        merge_topk(parts)


def test_parts_that_do_not_fit() -> None:
    keys = part_keys(tied(2, 9, 0), 0, 9, 4)
    for bad, message in (
        ([], "got no parts"),
        ([keys, keys[:, :3]], r"got parts \[2, 4\] and \[2, 3\]"),
        ([keys, keys[:1]], r"got parts \[2, 4\] and \[1, 4\]"),
        ([keys.int()], "need int64"),
        ([keys[0]], "need int64"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_topk(bad)
    with pytest.raises(ValueError, match=r"keys: got torch.int64 \[1, 4\], need int64 \[2, n\]"):
        TopK(2, 4).add_keys(keys[:1])


def test_merging_does_not_touch_the_parts() -> None:
    full = tied(2, 50, 1)
    parts = [part_keys(full, 0, 25, 6), part_keys(full, 25, 50, 6)]
    before = [part.clone() for part in parts]
    merge_topk(parts)
    merge_topk(parts[:1])
    assert all(torch.equal(part, kept) for part, kept in zip(parts, before, strict=True))


@pytest.mark.parametrize("most", [1, 40, 10**6])
def test_scores_that_wait_are_merged_as_if_they_had_not(most: int) -> None:
    """As on a GPU: whatever is asked for, and whenever, everything added is in it."""
    torch.manual_seed(most)
    whole = torch.randint(0, 4, (3, 90)).float()
    waiting, at_once = TopK(3, 7), TopK(3, 7)
    waiting._most_waiting = most
    for first, stop in itertools.pairwise([0, 1, 1, 14, 15, 40, 41, 77, 90]):
        for best in (waiting, at_once):
            best.add(whole[:, first:stop])
        if first == 15:
            assert torch.equal(waiting.pending, at_once.pending)
    other = keys_of(torch.full((3, 2), 9.0), 500)
    for best in (waiting, at_once):
        best.add_keys(other)
        best.add(whole[:, :5])
    assert waiting.seen == at_once.seen == 95
    assert torch.equal(waiting.scores, at_once.scores)
    assert torch.equal(waiting.indices, at_once.indices)
    with pytest.raises(ValueError, match="NaN for query 1, document 95"):
        refused(waiting, torch.tensor([[0.0], [torch.nan], [0.0]]))


def test_scores_that_wait_are_copies_in_one_buffer() -> None:
    """Who adds may use its memory again, and many small blocks are not kept one by one."""
    best, buffer = TopK(2, 3), torch.empty(2, 1)
    best._most_waiting = 1000  # as on a GPU: 500 documents
    for document in range(1300):
        best.add(buffer.fill_(float(document % 700)))
        assert best._waiting is not None
        assert best._waiting.shape == (2, 500)
    assert best.scores.tolist() == [[699.0, 698.0, 697.0]] * 2
    assert best.indices.tolist() == [[699, 698, 697]] * 2
    best.add(torch.full((2, 501), 699.0))  # more than may wait
    assert best._waiting is None
    assert best.indices.tolist() == [[699, 1300, 1301]] * 2


def refused(best: TopK, scores: Tensor) -> Tensor:
    """Raises when it adds, or when asked what is best."""
    best.add(scores)
    return best.scores


def test_interpreted_kernels_make_the_same_keys(interpreted) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    interpreted("keys", "keys", 5)
