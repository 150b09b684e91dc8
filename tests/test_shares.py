"""Slow tests in shares: every one has its turn, and kernels that no GPU has seen meet brute force each time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from measure import sources
from places import ROOT
from shares import GPU_TESTS, left_out, passed_on_a_gpu, share
from tables.cells import OPERATOR

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


def test_the_record_has_to_hold_every_file_as_passed_by_these_sources(tmp_path: Path) -> None:
    held = json.loads((ROOT / "docs" / "results" / GPU_TESTS).read_text(encoding="utf-8"))
    today = sources.digests(OPERATOR)
    for one in held["files"].values():
        one |= {"failed": 0, "families": today}
    path = tmp_path / GPU_TESTS
    path.parent.mkdir()
    assert not passed_on_a_gpu(tmp_path), "no record"

    def passed(**changes: object) -> bool:
        changed = {**held["files"], "test_gpu_bits": {**held["files"]["test_gpu_bits"], **changes}}
        path.write_text(json.dumps({**held, "files": changed}), encoding="utf-8")
        return passed_on_a_gpu(tmp_path)

    assert passed()
    assert not passed(failed=1)
    assert not passed(families={**today, "scoring": "other"})
    path.write_text(json.dumps({**held, "files": {}}), encoding="utf-8")
    assert not passed_on_a_gpu(tmp_path)


def test_a_share_is_two_numbers() -> None:
    assert share("2/12") == (1, 12)
    for wrong in ("0/3", "4/3", "3", "a/b", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="need K/N"):
            share(wrong)
