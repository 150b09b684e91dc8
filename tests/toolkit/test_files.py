"""One writer a folder, deleting without following links, and what killed writers left."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxsim_eval import files
from maxsim_eval.errors import DataError

HOLD = """
import sys, time
from maxsim_eval.files import alone
with alone(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that holds a folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def finished_process() -> int:
    """The number of a process that runs no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# alone ------------------------------------------------------------------------------------------------------------------


def test_a_folder_is_held_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "x"
    with files.alone(folder):
        with pytest.raises(DataError, match=rf"another command is writing there \(process {os.getpid()} on .+\); wait"):
            files.alone(folder).__enter__()
        (folder / "result.json").write_text("{}")
    assert [path.name for path in folder.iterdir()] == ["result.json"], "no lock file stays"
    with files.alone(folder):
        pass


def test_folders_made_for_nothing_are_gone_again(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    with pytest.raises(ZeroDivisionError), files.alone(tmp_path / "results" / "a" / "b"):
        raise ZeroDivisionError
    assert list((tmp_path / "results").iterdir()) == []


def test_another_process_holds_it_and_is_killed(tmp_path: Path) -> None:
    process = holder(tmp_path / "x")
    try:
        with pytest.raises(DataError, match=rf"process {process.pid} on "):
            files.alone(tmp_path / "x").__enter__()
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "x" / files.LOCK).exists()
    with files.alone(tmp_path / "x"):
        pass
    assert list((tmp_path / "x").iterdir()) == []


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no place that holds no files")
@pytest.mark.timeout(20)
def test_a_place_that_holds_no_files_is_no_endless_loop() -> None:
    with pytest.raises(DataError, match="/proc: cannot be written"):
        files.alone("/proc").__enter__()


@pytest.mark.timeout(20)
def test_a_lock_that_never_stays_is_no_endless_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.fcntl, "flock", lambda *_: (tmp_path / "x" / files.LOCK).unlink())
    with pytest.raises(DataError, match="is replaced as soon as it is locked"):
        files.alone(tmp_path / "x").__enter__()


def test_a_lock_file_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "x" / files.LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(DataError, match="cannot be written"):
        files.alone(tmp_path / "x").__enter__()
    assert (tmp_path / "precious").read_text() == "keep"


def _count(folder: str, turns: int, lost: object) -> None:
    done = 0
    while done < turns:
        try:
            with files.alone(folder):
                file = Path(folder) / "count"
                found = int(file.read_text()) if file.exists() else 0
                time.sleep(0.0005)
                file.write_text(str(found + 1))
                done += 1
        except DataError:
            time.sleep(0.0002)


def test_no_two_hold_it_at_once(tmp_path: Path) -> None:
    """Lock files come and go with their holders: whoever locks one that is no longer of that name must try again."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_count, args=(str(tmp_path / "x"), 100, None)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "x" / "count").read_text() == "400"


# delete -----------------------------------------------------------------------------------------------------------------


def test_links_are_removed_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "file").write_text("keep")
    (tmp_path / "a").symlink_to(outside)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "link").symlink_to(outside)
    (tmp_path / "b" / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("a", "b", "dangling", "not there", "b"):
        files.delete(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside"]
    assert (outside / "deep" / "file").read_text() == "keep"


# leftovers --------------------------------------------------------------------------------------------------------------


def test_leftovers_are_those_of_processes_that_are_gone(tmp_path: Path) -> None:
    dead, here, target = finished_process(), files.host(), tmp_path / "nq"
    gone = [f".nq.{here}-{dead}.tmp", f".nq.{here}-{dead}.download", f".nq.{here}-{dead}.old"]
    stay = [
        f".nq.{here}-{os.getpid()}.tmp",
        f".nq.{here}-{os.getppid()}.old",
        f".nq.0123456789ab-{dead}.tmp",  # of another machine, and young
        f".nq.{dead}.tmp",  # of an earlier version, and young
        f".other.{here}-{dead}.tmp",
        "nq",
        ".nq.tmp",
        f"nq.{here}-{dead}.tmp",
    ]
    for name in (*gone, *stay):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("x")
    assert [path.name for path in files.leftovers(tmp_path, "nq")] == sorted(gone)
    assert [path.name for path in files.leftovers(tmp_path)] == sorted([*gone, f".other.{here}-{dead}.tmp"])
    files.remove_leftovers(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stay)
    long_ago = time.time() - 2 * 86400
    for name in stay[:4]:
        os.utime(tmp_path / name, (long_ago, long_ago))
    files.remove_leftovers(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*stay[:2], *stay[4:]])


def test_a_leftover_that_is_a_link_loses_the_link_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("keep")
    left = tmp_path / f".nq.{files.host()}-{finished_process()}.tmp"
    left.symlink_to(tmp_path / "precious")
    files.remove_leftovers(tmp_path / "nq")
    assert not left.is_symlink()
    assert (tmp_path / "precious" / "file").read_text() == "keep"


def test_the_place_of_this_process_is_recognised() -> None:
    place = files.hidden(Path("data/beir/nq"), "download")
    assert place.parent == Path("data/beir")
    match = files._HIDDEN.fullmatch(place.name)
    assert match is not None
    assert (match["name"], match["host"], int(match["process"])) == ("nq", files.host(), os.getpid())
    assert files.alive(os.getpid())
    assert not files.alive(10**30)
