"""A full disk, Ctrl-C, two processes at once: nothing half written, and the same command continues."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.data import beir
from maxsim_eval.encoders.lexical import LexicalEncoder
from maxsim_eval.types import Role
from maxsim_kernels import Packed
from places import ROOT

pytestmark = pytest.mark.slow

DATA, INTERRUPTED = 3, 130


def full_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The disk fills while the file called `name` is written (found when its bytes must reach the disk)."""
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to see which file is written")


@needs_proc
@pytest.mark.parametrize("name", ["manifest.json", "00000.h5"])
def test_the_disk_is_full_while_the_cache_is_written(
    name: str, demo: Any, cli: Any, clean: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo.copy(tmp_path, "datasets")
    with monkeypatch.context() as patch:
        full_disk(patch, name)
        cli("demo", "--quiet", cwd=folder).refused(DATA, name, "the disk is full", "MiB")
    clean(folder)
    assert list(folder.rglob("*.h5")) == []
    cli("demo", "--quiet", "--paths", "fp32", cwd=folder).fine()


@needs_proc
@pytest.mark.parametrize("name", ["int8.trec", "report.md", "result.json"])
def test_the_disk_is_full_while_the_report_is_written(
    name: str, demo: Any, cli: Any, clean: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo.copy(tmp_path, "datasets", "embeddings_cache")
    full_disk(monkeypatch, name)
    outcome = cli("demo", "--quiet", "--k", "5", cwd=folder)
    outcome.refused(DATA, "demo-small-lexical", "cannot be written", "No space left on device")
    left = {path.name for path in (folder / "results").rglob("*") if path.is_file()}
    assert "result.json" not in left, "where it exists, everything must be there"
    assert not any(file.startswith(".") for file in left)


@needs_proc
def test_a_report_is_never_half_old_and_half_new(demo: Any, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = demo.copy(tmp_path)
    report = folder / "results" / "demo-small-lexical"
    full_disk(monkeypatch, "result.json")
    cli("demo", "--quiet", "--k", "5", cwd=folder).refused(DATA, "cannot be written")
    deepest = max(int(line.split()[3]) for line in (report / "runs" / "fp32.trec").read_text().splitlines())
    assert not (report / "result.json").exists() or deepest == 100, "result.json says k = 100, the runs beside it hold 5"


@needs_proc
def test_the_disk_is_full_while_the_demo_data_is_written(
    cli: Any, clean: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, "corpus.jsonl")
    cli("demo", "--quiet", cwd=tmp_path).refused(DATA, "datasets/demo/small", "No space left on device")
    clean(tmp_path)


# Ctrl-C ---------------------------------------------------------------------------------------------------------------

SLOW = """if True:
    import pathlib, signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits an ignored Ctrl-C
    from maxsim_eval.cli import main
    from maxsim_eval.encoders.lexical import LexicalEncoder
    encode, seen = LexicalEncoder.encode, []

    def slowly(self, items, role):
        seen.append(len(items))
        if sum(seen) > 1100:  # two shards of 512 are finished, the third is begun
            pathlib.Path("third").touch()
            time.sleep(60)
        return encode(self, items, role)

    LexicalEncoder.encode = slowly
    sys.argv[0] = "evaluate.py"
    main(sys.argv[1:])
"""


@pytest.fixture
def many(collection: Callable[..., Path], tmp_path: Path) -> Path:
    """1300 documents: three shards."""
    corpus = {f"d{number}": f"fox number {number}" for number in range(1300)}
    collection(tmp_path / "datasets" / "local" / "foxes", corpus, qrels=(("q1", "d5", 1), ("q2", "d7", 1), ("q3", "d1", 1)))
    return tmp_path


@pytest.mark.parametrize(
    ("sent", "code", "word"), [(signal.SIGINT, INTERRUPTED, "interrupted"), (signal.SIGTERM, 143, "terminated (SIGTERM)")]
)
def test_ctrl_c_while_encoding_keeps_finished_shards(
    sent: signal.Signals, code: int, word: str, many: Path, cli: Any, clean: Any, start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    child = start(["-c", SLOW, "local", "foxes", "--quiet"], many)
    end = time.monotonic() + 60
    while not (many / "third").exists() and child.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    child.send_signal(sent)
    out, err = child.communicate(timeout=30)
    assert child.returncode == code, err
    assert out == ""
    assert err.strip() == f"{word}; finished parts are kept, the same command continues"
    clean(many)
    (documents,) = (many / "embeddings_cache" / "local" / "foxes").iterdir()
    finished = {path.name: path.read_bytes() for path in documents.glob("*.h5")}
    assert set(finished) == {"00000.h5", "00001.h5"}

    encoded: list[tuple[Role, str, str]] = []
    encode = LexicalEncoder.encode

    def watched(self: LexicalEncoder, items: Any, role: Role) -> Packed:
        encoded.append((role, items[0], items[-1]))
        return encode(self, items, role)

    monkeypatch.setattr(LexicalEncoder, "encode", watched)
    cli("local", "foxes", "--quiet", "--paths", "fp32", cwd=many).fine()
    of_documents = [(first, last) for role, first, last in encoded if role == "document"]
    assert of_documents[0][0] == "fox number 1024", "a finished shard was encoded again"
    assert of_documents[-1][1] == "fox number 1299"
    assert {name: (documents / name).read_bytes() for name in finished} == finished
    assert (documents / "00002.h5").is_file()


# Two processes --------------------------------------------------------------------------------------------------------


DROPPED = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits an ignored Ctrl-C
from maxsim_eval.cli import main
from maxsim_eval.encoders.lexical import LexicalEncoder

class Finalised:
    def __del__(self):
        os.kill(os.getpid(), int(os.environ["SENT"]))
        time.sleep(0.1)  # what a signal's handler raises here, Python prints and drops

def encode(self, items, role):
    Finalised()
    time.sleep(20)

LexicalEncoder.encode = encode
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("sent", "code", "word"), [(signal.SIGINT, INTERRUPTED, "interrupted"), (signal.SIGTERM, 143, "terminated (SIGTERM)")]
)
def test_a_signal_that_comes_in_a_finaliser_is_not_lost(
    sent: signal.Signals, code: int, word: str, many: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SENT", str(int(sent)))
    child = start(["-c", DROPPED, "local", "foxes", "--quiet"], many)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (code, "")
    assert err.strip() == f"{word}; finished parts are kept, the same command continues"


def test_two_fresh_processes_fill_one_cache_at_once(demo: Any, clean: Any, start: Callable[..., Any], tmp_path: Path) -> None:
    folder = demo.copy(tmp_path, "datasets")
    command = [ROOT / "evaluate.py", "demo", "--quiet", "--json", "--k", "5000", "--paths", "fp32", "--out"]
    children = [start([*command, f"report{n}"], folder) for n in range(2)]
    for number, child in enumerate(children):
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        assert err == "warning: k was clamped to the 300 documents of the corpus\n"
        result = json.loads(out)
        assert out == (folder / f"report{number}" / "result.json").read_text(encoding="utf-8")
        assert result["command"] == ["evaluate.py", *command[1:], f"report{number}"]
        assert str(folder) not in out
        assert result["paths"]["fp32"]["metrics"] == demo.result["paths"]["fp32"]["metrics"]
    runs = [(folder / f"report{n}" / "runs" / "fp32.trec").read_bytes() for n in range(2)]
    assert runs[0] == runs[1]
    assert len(list((folder / "embeddings_cache").rglob("*.h5"))) == 2
    assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def test_two_processes_generate_the_demo_data_at_once(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = beir.publish_folder
    exists = Path.exists
    finished: list[str] = []

    def late(temporary: Path, folder: Path) -> None:
        # The other process finishes between this one's look at the folder and its rename.
        def looked(path: Path, **options: Any) -> bool:
            found = exists(path, **options)
            if path == folder and not found:
                monkeypatch.setattr(Path, "exists", exists)
                folder.mkdir(parents=True)
                (folder / "corpus.jsonl").write_text("{}")
                finished.append(folder.name)
            return found

        monkeypatch.setattr(Path, "exists", looked)
        publish(temporary, folder)

    monkeypatch.setattr(beir, "publish_folder", late)
    cli("demo", "--quiet", "--paths", "fp32", cwd=tmp_path).fine()
    assert finished == ["small"], "no process came in between"
