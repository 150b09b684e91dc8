"""Slow tests in shares: every one has its turn, and kernels that no GPU has seen meet brute force each time."""

from __future__ import annotations

import argparse

import pytest

from shares import left_out, share

SLOW = {f"test {n:02}": n % 3 == 0 for n in range(60)}
ALL = set(SLOW)


def test_every_test_has_its_turn() -> None:
    for passed in (True, False):
        parts = [ALL - left_out(SLOW, (first, 12), passed) for first in range(12)]
        assert set().union(*parts) == ALL
        assert all(len(part) >= 5 for part in parts)
        assert [name for name in ALL if not SLOW[name] and sum(name in part for part in parts) != 1] == []
    assert not left_out(SLOW, (0, 1), passed=True)


def test_kernels_meet_brute_force_each_time_until_a_gpu_has_seen_them() -> None:
    every = {name for name, marked in SLOW.items() if marked}
    for first in range(12):
        assert every <= ALL - left_out(SLOW, (first, 12), passed=False)
        assert len(every - left_out(SLOW, (first, 12), passed=True)) in (6, 7)
    assert not every & left_out(SLOW, (1, 2), passed=True), "with few parts there is nothing to gain"


def test_a_share_is_two_numbers() -> None:
    assert share("2/12") == (1, 12)
    for wrong in ("0/3", "4/3", "3", "a/b", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="need K/N"):
            share(wrong)
