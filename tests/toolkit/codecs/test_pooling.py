"""Pooling by processes that stay from block to block: the same bits as without them, nothing overwritten, failures told."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from maxsim_eval.codecs import pooling
from maxsim_kernels import Packed, pack


def block(seed: int, documents: int, longest: int = 9) -> Packed:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(0, longest, documents)
    return pack([torch.from_numpy(draw.normal(size=(size, 8)).astype(np.float32)) for size in sizes], dim=8)


def halves(tokens: torch.Tensor) -> torch.Tensor:
    """Neighbours become their sum; a document that begins with a large number keeps its first token alone."""
    if tokens[0, 0] > 1:
        return tokens[:1]
    return torch.stack([tokens[n : n + 2].sum(0) for n in range(0, len(tokens), 2)])


def thirds(tokens: torch.Tensor) -> torch.Tensor:
    return tokens[::3] * 1.0


def named(tokens: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tokens[:1], float(os.getpid()))


def failing(tokens: torch.Tensor) -> torch.Tensor:
    if len(tokens) == 7:
        raise ValueError("seven tokens")
    return tokens


def most_of(tokens: Packed, part: int) -> np.ndarray:
    return -(-tokens.lengths.numpy().astype(np.int64) // part)


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "_LEAST_EACH", 8)
    monkeypatch.setattr(pooling.os, "sched_getaffinity", lambda _: range(3))
    pooling._kept.clear()


def test_blocks_in_turn_are_as_without_processes() -> None:
    blocks = [block(1, 40), block(2, 3), block(3, 90), block(4, 40, longest=2), block(5, 0)]
    calls = [(halves, 2), (halves, 2), (thirds, 3), (halves, 2)]
    found = [(pool, part, each, pooling.pooled(pool, each, most_of(each, part))) for pool, part in calls for each in blocks]
    for pool, _, each, got in found:  # after all of them: memory that is written again is nobody's result
        expected = [pool(each[n]) if len(each[n]) else each[n] for n in range(len(each))]
        assert got.lengths.tolist() == [len(one) for one in expected]
        assert all(torch.equal(got[n], one) for n, one in enumerate(expected))


def test_processes_stay_until_other_tokens_are_asked_for() -> None:
    tokens = block(6, 60)

    def processes() -> set[float]:
        return set(pooling.pooled(named, tokens, most_of(tokens, 1)).values.flatten().tolist())

    first = processes()
    assert len(first) == 3
    assert os.getpid() not in first
    assert processes() == first
    pooling.pooled(thirds, tokens, most_of(tokens, 3))
    assert processes() == first
    narrow = tokens.with_values(tokens.values[:, :4].contiguous())
    pooling.pooled(thirds, narrow, most_of(narrow, 3))
    assert not processes() & first


def test_few_documents_are_pooled_here() -> None:
    tokens = block(7, 15)
    got = pooling.pooled(named, tokens, most_of(tokens, 1))
    assert set(got.values.flatten().tolist()) == {float(os.getpid())}
    assert not pooling._kept


def test_a_failure_is_told_and_the_next_block_begins_anew() -> None:
    tokens = block(8, 80)
    assert 7 in tokens.lengths.tolist()
    with pytest.raises(ValueError, match="seven tokens"):
        pooling.pooled(failing, tokens, most_of(tokens, 1))
    assert not pooling._kept
    short = block(9, 80, longest=6)
    assert torch.equal(pooling.pooled(failing, short, most_of(short, 1)).values, short.values)


def test_a_process_forked_later_begins_its_own() -> None:
    tokens = block(10, 60)
    mine = set(pooling.pooled(named, tokens, most_of(tokens, 1)).values.flatten().tolist())
    pid = os.fork()
    if not pid:
        try:
            theirs = set(pooling.pooled(named, tokens, most_of(tokens, 1)).values.flatten().tolist())
            os._exit(0 if len(theirs) == 3 and not theirs & mine else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert set(pooling.pooled(named, tokens, most_of(tokens, 1)).values.flatten().tolist()) == mine
