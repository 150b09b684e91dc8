"""Filling an entry: interrupted, killed, out of disk, or by two processes at once, it ends right or can go on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest

from filling_cases import COUNT, SHARDS, assert_right, counted, files, fill, tokens
from maxsim_eval.cache import filling
from maxsim_eval.cache.entries import open_entry
from maxsim_eval.errors import CacheError
from maxsim_eval.files import atomic_path
from maxsim_kernels import Packed
from stored_cases import FullDisk


def test_complete_entry_is_not_encoded_again(tmp_path: Path) -> None:
    encode, calls = counted()
    fill(tmp_path, encode)
    assert calls == [(0, 3), (3, 6), (6, 9), (9, 10)]
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in files(tmp_path)}
    assert_right(fill(tmp_path, encode, documents_per_shard=5))  # the boundaries are those of the entry
    assert len(calls) == 4
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in files(tmp_path)} == before


def test_complete_entry_needs_no_lock(tmp_path: Path) -> None:
    fill(tmp_path)
    with filelock.FileLock(tmp_path / ".lock"):
        assert_right(fill(tmp_path, lock_timeout=0))


@pytest.mark.parametrize("shard", range(4))
def test_missing_shard_is_encoded_again_and_no_other(tmp_path: Path, shard: int) -> None:
    fill(tmp_path)
    (tmp_path / SHARDS[shard]).unlink()
    encode, calls = counted()
    assert_right(fill(tmp_path, encode, documents_per_shard=None))
    assert calls == [(3 * shard, min(3 * shard + 3, 10))]


def test_chunks_stay_inside_shards(tmp_path: Path) -> None:
    encode, calls = counted()
    assert_right(fill(tmp_path, encode, chunk=2))
    assert calls == [(0, 2), (2, 3), (3, 5), (5, 6), (6, 8), (8, 9), (9, 10)]


@pytest.mark.parametrize("shard", range(4))
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_while_encoding(tmp_path: Path, shard: int, error: type[BaseException]) -> None:
    def encode(start: int, stop: int) -> Packed:
        if start == 3 * shard + 2 or stop == COUNT:  # the second chunk of the shard
            raise error("stop")
        return tokens(start, stop)

    with pytest.raises(error):
        fill(tmp_path, encode, chunk=2)
    assert files(tmp_path) == [*SHARDS[:shard], "manifest.json"]
    again, calls = counted()
    assert_right(fill(tmp_path, again, lock_timeout=0))  # and the lock was let go
    assert calls[0][0] == 3 * shard


def test_interrupted_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    fill(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    with monkeypatch.context() as patch:
        patch.setattr("maxsim_eval.files.os.fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fill(tmp_path)
    assert files(tmp_path) == [SHARDS[0], *SHARDS[2:], "manifest.json"]
    assert_right(fill(tmp_path))


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(start: int, stop: int) -> Packed:
        if start == 6:
            monkeypatch.setattr("maxsim_eval.cache.shards.open", lambda path, mode: FullDisk(path, 100), raising=False)
        return tokens(start, stop)

    with pytest.raises(CacheError, match=r"00002\.h5: the disk is full .*needs [0-9.]+ MiB, [0-9.,]+ MiB are free"):
        fill(tmp_path, encode)
    monkeypatch.undo()
    assert files(tmp_path) == [*SHARDS[:2], "manifest.json"]
    assert_right(fill(tmp_path))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full (Linux)")
def test_disk_full_as_the_kernel_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * size)

    def encode(start: int, stop: int) -> Packed:
        if start == 3:  # the writer opens this name and gets a device that is always full
            (tmp_path / f".00001.h5.{os.getpid()}-0000.tmp").symlink_to("/dev/full")
        return tokens(start, stop)

    with pytest.raises(CacheError, match=r"00001\.h5: the disk is full"):
        fill(tmp_path, encode)
    assert files(tmp_path) == [SHARDS[0], "manifest.json"]
    assert_right(fill(tmp_path))


def test_disk_full_at_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str, **options: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CacheError, match=r"manifest\.json: the disk is full"):
        fill(tmp_path / "entry")
    assert files(tmp_path / "entry") == []


def test_other_write_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match="file: cannot be created or locked"):
        fill(tmp_path / "file")
    (tmp_path / "entry" / "00000.h5").mkdir(parents=True)
    with pytest.raises(CacheError, match=r"00000\.h5"):
        fill(tmp_path / "entry")


def test_lock_held_by_another(tmp_path: Path) -> None:
    folder = tmp_path / "entry"
    folder.mkdir()
    with filelock.FileLock(folder / ".lock"), pytest.raises(CacheError, match="another process is writing") as caught:
        fill(folder, lock_timeout=0.1)
    assert str(folder) in str(caught.value)
    assert files(folder) == []


def test_waits_for_the_lock_and_uses_what_was_written(tmp_path: Path) -> None:
    began, go = threading.Event(), threading.Event()

    def slow(start: int, stop: int) -> Packed:
        began.set()
        assert go.wait(30)
        return tokens(start, stop)

    def never(start: int, stop: int) -> Packed:
        raise AssertionError("the other writer encoded everything")

    first = threading.Thread(target=fill, args=(tmp_path, slow))
    first.start()
    assert began.wait(30)
    threading.Timer(0.2, go.set).start()
    assert_right(fill(tmp_path, never, lock_timeout=30))
    first.join()


@pytest.mark.usefixtures("every_bar")
def test_progress_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "quiet")
    assert capsys.readouterr() == ("", "")
    fill(tmp_path / "loud", quiet=False, label="encode demo")
    (tmp_path / "loud" / SHARDS[0]).unlink()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "encode demo: 100%" in captured.err
    assert "10 of 10" in captured.err
    assert "tokens/s" in captured.err
    fill(tmp_path / "loud", quiet=False)
    assert "70%, 7 of 10" in capsys.readouterr().err  # what was there counts from the start
    fill(tmp_path / "loud", quiet=False)
    assert capsys.readouterr().err == ""


CHILD = """
import os, signal, sys, time
from pathlib import Path
import torch
from maxsim_eval.cache.filling import fill_entry
from maxsim_kernels import Packed

folder, mode = Path(sys.argv[1]), sys.argv[2]

def tokens(start, stop):
    lengths = torch.arange(start, stop)
    values = torch.repeat_interleave(lengths, lengths).float()[:, None].expand(-1, 4)
    return Packed(values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))

def encode(start, stop):
    print("encoded", start, flush=True)
    time.sleep(0.1)
    return tokens(start, stop)

if mode == "die":
    replace = os.replace
    def die(source, target):
        if Path(target).name == "00002.h5":
            assert os.path.getsize(source) > 0
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
    os.replace = die
else:
    Path(mode).touch()
    while not (folder.parent / "go").exists():
        time.sleep(0.01)
entry = fill_entry(folder, ids=[f"d{n}" for n in range(10)], key="key", dtype=torch.float32, dim=4, provenance={},
                   encode=encode, documents_per_shard=3, quiet=True)
assert torch.equal(entry.load().values, tokens(0, 10).values)
print("right", flush=True)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[[Path, str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path, mode: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, str(folder), mode]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_killed_in_the_middle_of_a_write(tmp_path: Path, child: Callable[[Path, str], subprocess.Popen[str]]) -> None:
    folder = tmp_path / "entry"
    process = child(folder, "die")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors
    leftover = [name for name in files(folder) if name.endswith(".tmp")]
    assert len(leftover) == 1
    assert files(folder) == [*leftover, *SHARDS[:2], "manifest.json"]
    with pytest.raises(CacheError, match="partial"):
        open_entry(folder)
    encode, calls = counted()
    assert_right(fill(folder, encode))
    assert calls == [(6, 9), (9, 10)]
    assert files(folder) == [*SHARDS, "manifest.json"]


def test_writers_of_one_file_never_share_a_temporary_one(tmp_path: Path) -> None:
    """On two machines, or in two containers, two may have one process id."""
    with atomic_path(tmp_path / "x") as first, atomic_path(tmp_path / "x") as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert (tmp_path / "x").read_text() == "first", "the outer block ends last"
    assert files(tmp_path) == ["x"]


@pytest.mark.slow
def test_two_processes_fill_one_entry_at_once(tmp_path: Path, child: Callable[[Path, str], subprocess.Popen[str]]) -> None:
    folder = tmp_path / "entry"
    processes = [child(folder, str(tmp_path / f"ready{n}")) for n in range(2)]
    for _ in range(6000):
        if all((tmp_path / f"ready{n}").exists() for n in range(2)):
            break
        threading.Event().wait(0.01)
    (tmp_path / "go").touch()
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    said = [line for out, _ in outputs for line in out.splitlines()]
    assert said.count("right") == 2
    assert sorted(line for line in said if line.startswith("encoded")) == [f"encoded {n}" for n in (0, 3, 6, 9)]
    assert files(folder) == [*SHARDS, "manifest.json"]
    assert_right(open_entry(folder))


def test_what_was_filled_is_what_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are opened as they are written; those of before at the beginning, where they are proven, and at the end."""
    with pytest.raises(ZeroDivisionError):
        fill(tmp_path, lambda start, stop: tokens(start, stop) if start < 6 else 1 / 0)
    opened, at = list[str](), dict[int, int]()
    before = filling.open_shard

    def told(path: Path, spec: filling.ShardSpec) -> object:
        opened.append(path.name)
        return before(path, spec)

    def encode(start: int, stop: int) -> Packed:
        at[start] = len(opened)
        return tokens(start, stop)

    monkeypatch.setattr(filling, "open_shard", told)
    filled, whole = fill(tmp_path, encode), open_entry(tmp_path)
    assert at == {6: 2, 9: 3}
    assert opened == [*SHARDS, *SHARDS[:2]]
    assert filled.manifest == whole.manifest
    assert filled.stamp() == whole.stamp()
    assert (filled.documents, filled.tokens, filled.dim, filled.dtype) == (
        whole.documents,
        whole.tokens,
        whole.dim,
        whole.dtype,
    )
    assert_right(filled)


def test_a_shard_that_vanishes_meanwhile_is_missed(tmp_path: Path) -> None:
    def encode(start: int, stop: int) -> Packed:
        if start == 9:
            (tmp_path / SHARDS[1]).unlink()
        return tokens(start, stop)

    with pytest.raises(CacheError, match=r"partial: 1 of 4 shards are missing \(00001\.h5\)"):
        fill(tmp_path, encode)
