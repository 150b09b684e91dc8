"""Filling an entry by several threads: shards and their pieces are worked on together, and one failure ends all."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from filling_cases import COUNT, SHARDS, assert_right, files, fill, tokens
from maxsim_eval.cache import filling
from maxsim_kernels import Packed


def test_shards_are_worked_on_together(tmp_path: Path) -> None:
    """The first waits for the third to begin: one after the other would wait for ever."""
    third = threading.Event()

    def encode(start: int, stop: int) -> Packed:
        if start == 6:
            third.set()
        elif start == 0:
            assert third.wait(20), "the third shard never began"
        return tokens(start, stop)

    switch = sys.getswitchinterval()
    assert_right(fill(tmp_path, encode, at_once=3))
    assert files(tmp_path) == [*SHARDS, "manifest.json"]
    assert sys.getswitchinterval() == switch


def test_pieces_of_one_shard_are_worked_on_together(tmp_path: Path) -> None:
    """Its first waits for its third, and the next shard's pieces come behind them."""
    third, order, lock = threading.Event(), list[int](), threading.Lock()

    def encode(start: int, stop: int) -> Packed:
        with lock:
            order.append(start)
        if start == 2:
            third.set()
        elif start == 0:
            assert third.wait(20), "the third piece never began"
        return tokens(start, stop)

    assert_right(fill(tmp_path, encode, at_once=3, chunk=1))
    assert sorted(order) == list(range(COUNT))
    assert sorted(order[:3]) == [0, 1, 2]


@pytest.mark.parametrize("at_once", [1, 3])
def test_several_threads_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    fill(tmp_path / "one")
    monkeypatch.setattr("maxsim_eval.cache.hdf5._WRITE_BYTES", 24)
    assert_right(fill(tmp_path / "many", at_once=at_once, chunk=2))
    for name in SHARDS:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()


@pytest.mark.slow
def test_a_shard_keeps_whole_pieces() -> None:
    """Of so many documents as an encoder wants together; a bound on its bytes comes first."""

    def documents(count: int, dim: int = 128, **options: int) -> int:
        made = filling.new_manifest(["d"] * count, "key", torch.float16, dim, {}, **options)
        return int(made["documents_per_shard"])

    assert documents(200_000) == 3125
    assert documents(200_000, least=1024, together=1024) == 3072
    assert documents(300_000, least=1024, together=1024) == 5120
    assert documents(5_000_000, least=1024, together=1024) == 32768
    assert documents(5_000_000, dim=768, least=1024, together=1024) == 5120
    assert documents(5_000_000, dim=8192, least=1024, together=1024) == 512, "a window of texts is too much"
    assert documents(10, together=1024) == 512


def test_shards_are_encoded_while_others_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time; the first two are not written before the third and the fourth are encoded."""
    later, lock, most = threading.Event(), threading.Lock(), [0, 0]

    def encode(start: int, stop: int) -> Packed:
        with lock:
            most[0] += 1
            most[1] = max(most)
        if start >= 9:
            later.set()
        time.sleep(0.05)
        with lock:
            most[0] -= 1
        return tokens(start, stop)

    def waiting(*arguments: Any) -> int:
        assert later.wait(20), "nothing was encoded while others wait to be written"
        return written(*arguments)

    written = filling.write_shard
    monkeypatch.setattr(filling, "write_shard", waiting)
    assert_right(fill(tmp_path, encode, at_once=2))
    assert most[1] == 2


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()], ids=["bug", "Ctrl-C"])
def test_one_failure_ends_all_and_keeps_what_is_finished(error: BaseException, tmp_path: Path) -> None:
    """The others stop at their next piece, write no half shard, and the next call goes on."""
    first, failed, late = threading.Event(), threading.Event(), []

    def encode(start: int, stop: int) -> Packed:
        if start >= 6 and not failed.is_set():
            assert first.wait(20)
            failed.set()
            raise error
        if start == 3:
            assert failed.wait(20)
            time.sleep(0.3)  # the failure is on its way
        elif failed.is_set():
            late.append(start)
        return tokens(start, stop)

    def watched(path: Path, *rest: object) -> int:
        size = written(path, *rest)  # type: ignore[arg-type]
        first.set()
        return size

    written = filling.write_shard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "write_shard", watched)
        with pytest.raises(type(error)):
            fill(tmp_path, encode, at_once=3, chunk=1)
    assert SHARDS[0] in files(tmp_path)
    assert not any(name.endswith(".tmp") for name in files(tmp_path))
    assert 4 not in late
    assert_right(fill(tmp_path, at_once=3))
