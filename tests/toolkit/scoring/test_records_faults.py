"""The writer of records when something fails: a full disk, a kill at any moment, a process that ends; nothing wrong is left or read."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from maxsim_eval.errors import CacheError
from maxsim_eval.scoring import records as module
from maxsim_eval.scoring.records import Record, Records, ScoreRows
from scoring_cases import numbers

PRINT = {"k": 10, "path": "fp16", "stamps": ["a", "b"]}


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def assert_right(record: Record | None, start: int, stop: int) -> None:
    assert record is not None
    keys, scores = numbers(start, stop)
    assert np.array_equal(record.keys, keys)
    assert record.cost == {"total": start / 7}
    assert record.scores is not None
    rows = ScoreRows([record.scores])
    assert np.array_equal(rows[:].view(np.int32), scores.view(np.int32))


def no_space(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def put_many(records: Records) -> None:
    for start in range(41, 141):
        records.put(start, start + 1, *numbers(start, start + 1), {})
        time.sleep(0.01)


def fail_with(records: Records) -> None:
    with records:
        records.put(0, 40, *numbers(0, 40), {})
        raise RuntimeError("of the evaluation")


@pytest.mark.parametrize("name", ["open", "os.fsync", "os.replace"])
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = tmp_path / "fp16"
    with Records(folder, PRINT) as before:
        before.put(0, 40, *numbers(0, 40), {"total": 0.0})
    monkeypatch.setattr(f"maxsim_eval.scoring.records.{name}", no_space, raising=False)
    records = Records(folder, PRINT)
    records.put(40, 41, *numbers(40, 41), {})
    with pytest.raises(CacheError, match=r"40-41\.h5: the disk is full .*needs [0-9.]+ MiB, .*parts are kept") as caught:
        put_many(records)  # far more than may wait: nobody waits for a writer that failed
    assert "another output folder" in str(caught.value)
    records.close()  # it was said
    with pytest.raises(CacheError, match="the disk is full"):
        records.put(0, 1, *numbers(0, 1), {})
    monkeypatch.undo()
    assert names(folder) == ["0-40.h5"]
    assert_right(Records(folder, PRINT).get(0, 40), 0, 40)


def test_close_says_what_no_put_has_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsim_eval.scoring.records.os.fsync", no_space)
    records = Records(tmp_path, PRINT)
    records.put(0, 40, *numbers(0, 40), {})
    with pytest.raises(CacheError, match="the disk is full"):
        records.close()
    with pytest.raises(RuntimeError, match="of the evaluation") as caught:
        fail_with(Records(tmp_path, PRINT))
    assert "the disk is full" in caught.value.__notes__[0]
    assert names(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full (Linux)")
def test_disk_full_as_the_kernel_says_it(tmp_path: Path) -> None:
    (tmp_path / f".0-40.h5.{module.host()}-{os.getpid()}.tmp").symlink_to("/dev/full")
    records = Records(tmp_path, PRINT)  # takes it for a leftover
    (tmp_path / f".0-40.h5.{module.host()}-{os.getpid()}.tmp").symlink_to("/dev/full")
    records.put(0, 40, *numbers(0, 40), {})
    with pytest.raises(CacheError, match=r"0-40\.h5: the disk is full"):
        records.close()
    assert names(tmp_path) == []


def test_other_errors_of_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    records = Records(tmp_path / "file", PRINT)
    records.put(0, 40, *numbers(0, 40), {})
    with pytest.raises(CacheError, match=r"0-40\.h5: cannot be written"):
        records.close()

    def broken(*arguments: object) -> None:
        raise MemoryError("no memory for the image")

    monkeypatch.setattr(module, "_image", broken)
    other = Records(tmp_path / "other", PRINT)
    other.put(0, 40, *numbers(0, 40), {})
    with pytest.raises(MemoryError, match="no memory for the image"):
        other.close()
    assert not (tmp_path / "other").exists()


def test_two_records_wait_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, fsync, put = threading.Event(), os.fsync, []

    def slow(descriptor: int) -> None:
        assert go.wait(30)
        fsync(descriptor)

    monkeypatch.setattr("maxsim_eval.scoring.records.os.fsync", slow)

    def run() -> None:
        with Records(tmp_path, PRINT) as records:
            for start in range(6):
                records.put(start, start + 1, *numbers(start, start + 1), {})
                put.append(start)

    worker = threading.Thread(target=run)
    worker.start()
    while len(put) < 2:
        time.sleep(0.01)
    time.sleep(0.3)
    assert put == [0, 1]  # one is being written, one waits, and the third `put` waits for them
    go.set()
    worker.join(30)
    assert put == list(range(6))
    assert len(names(tmp_path)) == 6


def finished_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_leftovers_of_dead_writers_are_removed(tmp_path: Path) -> None:
    with Records(tmp_path, PRINT) as records:
        records.put(0, 40, *numbers(0, 40), {})
    dead, host = finished_process(), module.host()
    away = [f".0-40.h5.{host}-{dead}.tmp", f".0-40.h5.{host}-{os.getpid()}.tmp", ".40-41.h5.0123456789ab-1.tmp"]
    stay = [f".0-40.h5.{host}-{os.getppid()}.tmp", f".0-40.h5.0123456789ab-{dead}.tmp", f".other.{dead}.tmp"]
    for name in away + stay:
        (tmp_path / name).touch()
    os.utime(tmp_path / away[2], (time.time() - 4000,) * 2)  # on another machine, an hour ago
    Records(tmp_path, PRINT)
    assert names(tmp_path) == sorted(["0-40.h5", *stay])


CHILD = """
import os, random, signal, sys, time
import numpy as np
from maxsim_eval.scoring.records import Records

sync = os.fsync
os.fsync = lambda descriptor: (time.sleep(0.005), sync(descriptor))  # a disk that is never too quick to be caught writing

def write(rounds):
    records = Records(sys.argv[1], {"k": 10, "path": "fp16", "stamps": ["a", "b"]})
    for _ in range(rounds):
        for start in range(0, 4000, 400):
            draw = np.random.default_rng(start)
            keys = draw.integers(-(1 << 63), (1 << 63) - 1, (7, 10), np.int64, endpoint=True)
            scores = draw.standard_normal((3, 400)).astype(np.float32)
            scores[0, 0] = -np.inf
            records.put(start, start + 400, keys, scores, {"total": start / 7})

if sys.argv[2] in ("end", "raise"):
    write(1)
    assert sys.argv[2] == "end"
else:
    draw = random.Random(1)
    for number, line in enumerate(sys.stdin):
        writer = os.fork()
        if writer == 0:
            write(1 << 30)
        time.sleep(draw.uniform(0, 0.1 + number / 200))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        print("killed", flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment_nothing_wrong_comes_back(tmp_path: Path) -> None:
    found = leftovers = 0
    command = [sys.executable, "-c", CHILD, str(tmp_path), "kill"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killer:
        assert killer.stdin is not None
        assert killer.stdout is not None
        for number in range(200):
            if number > 30 and found > 30 and leftovers > 3:  # on a slow disk it takes more
                break
            print("go", file=killer.stdin, flush=True)
            assert killer.stdout.readline() == "killed\n"
            leftovers += sum(name.startswith(".") for name in names(tmp_path))
            records = Records(tmp_path, PRINT)
            assert not [name for name in names(tmp_path) if name.startswith(".")]
            for start in range(0, 4000, 400):
                record = records.get(start, start + 400)
                if record is not None:
                    assert_right(record, start, start + 400)
                    found += 1
            for name in names(tmp_path)[:1]:
                (tmp_path / name).unlink()
        killer.stdin.close()
    assert found > 30
    assert leftovers > 3  # some were killed in the middle of a write


@pytest.mark.slow
def test_a_process_that_forgets_to_close_writes_what_it_has_and_ends(tmp_path: Path) -> None:
    for mode, code in (("end", 0), ("raise", 1)):
        command = [sys.executable, "-c", CHILD, str(tmp_path / mode), mode]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        records = Records(tmp_path / mode, PRINT)
        for start in range(0, 4000, 400):
            assert_right(records.get(start, start + 400), start, start + 400)
