"""The processes of an evaluation: what they tell each other, and that the end of one is the end of all, soon and with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from maxsim_eval.cache import filling
from maxsim_eval.processes import world as distributed
from maxsim_eval.processes.failures import Failure, JoinError, RankError
from maxsim_eval.processes.progress import EncodeProgress, Progress
from maxsim_eval.processes.world import World, follower, joined, several
from maxsim_kernels import Packed
from places import TESTS

pytestmark = pytest.mark.slow

# Ranks are forked from one process that has imported torch; prints {scenario: [exit codes, what each said, seconds]}.
# Where one has to come later than another, it waits for a byte in a pipe.
RANKS = """if True:
    import json, os, select, sys, time
    sys.path.insert(0, sys.argv[1])
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    import torch, torch.distributed
    from maxsim_eval.processes import world as D
    from maxsim_eval.errors import DataError
    from ports import reserved_port
    D.SILENCE, D.GRACE, D.BEAT, D.PATIENCE = 30.0, 1.5, 0.1, 1.0
    told, idled = os.pipe(), os.pipe()

    def come(pipe):
        assert select.select([pipe[0]], [], [], 20)[0], "nobody came so far"

    def talk(world):
        assert world.share({"x": torch.arange(5), "by": world.rank})["by"] == 0
        assert world.largest(float(world.rank)) == world.size - 1
        if world.rank:  # ask only when the leader has told all: it waits for nobody
            come(told)
        assert [world.tell([number, world.rank]) for number in range(2)] == [[0, 0], [1, 0]]
        os.write(told[1], b"!")
        assert world.collect([world.rank]) == [[rank] for rank in range(world.size)]
        drawn = [world.draw("shard") for _ in range(1 + 2 * world.rank)]
        assert drawn == sorted(drawn)
        assert sorted(sum(world.collect(drawn), [])) == list(range(9))
        assert world.draw(f"of rank {world.rank}") == 0
        for _ in range(2):
            keys = torch.arange(6).reshape(2, 3) * 10 ** world.rank
            merged = world.reduce(keys, lambda parts: parts[0] + parts[1])
            assert (merged is None) == (world.rank > 0)
            assert world.rank or torch.equal(merged, torch.arange(6).reshape(2, 3) * 111)
        world.note = f"rank {world.rank}"
        end = time.monotonic() + 20
        while world.leader and sorted(world.notes()) != ["rank 1", "rank 2"]:
            assert time.monotonic() < end, world.notes()
            time.sleep(0.01)
        with D.joined() as inside:
            assert inside is world
        called = []
        world.idle = lambda: called or called.append(os.write(idled[1], b"!"))
        for _ in range(2 if world.rank == 1 else 0):  # until the two others wait for this one, and are idle
            come(idled)
            os.read(idled[0], 1)
        world.collect(0)
        assert called or world.rank == 1

    def twice(world):
        assert world.collect(world.rank) == [0, 1, 2]

    def dies_in_reduce(world):
        if world.rank == 1:
            world._meet()
            os._exit(9)
        world.reduce(torch.zeros(1000, 1000), max)

    def held(world):  # the main thread is in a call that does not come back
        if world.rank == 1:
            raise DataError("bad")
        if world.rank == 0:
            time.sleep(60)
        world.collect(0)

    def two(world):
        if world.rank:
            raise DataError(f"bad {world.rank}")
        world.collect(0)

    def go(scenario, count=3):
        with reserved_port() as port:
            return forked(scenario, count, port)

    def forked(scenario, count, port):
        began, children = time.monotonic(), []
        for rank in range(count):
            end, start = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.dup2(start, 2)
                sys.__stderr__ = sys.stderr
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                code = 0
                try:
                    for one in (twice, scenario) if scenario is twice else (scenario,):
                        with D.joined("cpu", lambda line: print(line, file=sys.stderr)) as world:
                            one(world)
                except SystemExit as ended:
                    code = ended.code
                except BaseException as error:
                    print(repr(error), file=sys.stderr)
                    code = 70
                sys.stderr.flush()
                os._exit(code)
            os.close(start)
            children.append((pid, end))
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in children]
        return codes, [os.fdopen(end).read() for _, end in children], time.monotonic() - began

    print(json.dumps({one.__name__: go(one) for one in (talk, twice, dies_in_reduce, held, two)}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    words = [sys.executable, "-c", RANKS, TESTS / "helpers"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


@pytest.mark.parametrize("name", ["talk", "twice"])
def test_ranks_talk(name: str, found: dict[str, Any]) -> None:
    codes, said, _ = found[name]
    assert said == ["", "", ""]
    assert codes == [0, 0, 0]


def test_a_rank_that_is_gone_in_the_middle_of_a_merge_is_named(found: dict[str, Any]) -> None:
    codes, said, seconds = found["dies_in_reduce"]
    assert codes == [3, 9, 3]
    assert said[0].startswith("error: rank 1 of 3: the connection to it was lost")
    assert said[2] == ""
    assert seconds < 20


def test_a_rank_that_cannot_look_up_ends_itself(found: dict[str, Any]) -> None:
    codes, said, seconds = found["held"]
    assert codes == [3, 3, 3]
    assert said[0] == "error: rank 1 of 3: bad\n"
    assert seconds < 20


def test_of_two_failures_one_is_said(found: dict[str, Any]) -> None:
    codes, said, _ = found["two"]
    assert codes == [3, 3, 3]
    assert said[0] in ("error: rank 1 of 3: bad 1\n", "error: rank 2 of 3: bad 2\n")
    assert said[1:] == ["", ""]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(distributed, "TIMEOUT", 1.0)
    return monkeypatch


def test_who_is_one_of_several(environment: pytest.MonkeyPatch) -> None:
    for rank, size, one_of_several, follows in (
        (None, None, False, False), ("0", "1", False, False), ("0", "2", True, False), ("1", "2", True, True)
    ):  # fmt: skip
        for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
            if value is not None:
                environment.setenv(name, value)
        assert (several(), follower()) == (one_of_several, follows)


def test_alone_nothing_is_touched(environment: pytest.MonkeyPatch) -> None:
    environment.setattr("torch.distributed.rendezvous", lambda *_, **__: pytest.fail("torch.distributed was used"))
    with joined("cuda") as world:
        assert type(world) is World
        assert world.leader
        assert (world.rank, world.size, world.device("cuda:3"), world.notes()) == (0, 1, "cuda:3", [])
        keys = torch.zeros(2, 3)
        assert world.reduce(keys, max) is keys
        assert [world.draw("a"), world.draw("a"), world.draw("b"), world.draw("a")] == [0, 1, 0, 2]
        assert (world.share(5), world.collect({"a": 1}), world.largest(2.5)) == (5, [{"a": 1}], 2.5)
        world.check()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, need less than WORLD_SIZE, 2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "invalid literal"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "rank 1 of 2: the processes cannot find",
        ),
    ],
)
def test_an_environment_that_cannot_work(given: dict[str, str], text: str, environment: pytest.MonkeyPatch) -> None:
    for name, value in given.items():
        environment.setenv(name, value)
    with pytest.raises(JoinError, match=text), joined():
        pytest.fail("there is nobody to join")
    said: list[str] = []
    with pytest.raises(SystemExit) as ended, joined("cpu", said.append):
        pytest.fail("there is nobody to join")
    assert ended.value.code == 3
    assert len(said) == 1
    assert said[0].startswith("error: rank ")
    assert "\n" not in said[0]


def test_a_failure_says_which_rank_and_keeps_its_code() -> None:
    error = RankError(Failure(4, "the disk is full", 3), 8)
    assert str(error) == "rank 4 of 8: the disk is full"
    assert error.exit_code == 3
    assert str(RankError(Failure(-1, "lost", 3), 8)) == "one of 8 processes: lost"


class Others(World):
    def notes(self) -> list[str]:
        return ["10 5 4000 fp16", "0 7 1000 fp32", "3 2 1000 fp16"]


@pytest.mark.usefixtures("every_bar")
def test_the_bar_counts_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    world = Others()
    with Progress("fp16", 100, 20, world, quiet=False) as progress:
        progress.tick(30, 10_000)
        assert world.note == "20 30 10000 fp16"
        assert (progress.bar.n, progress.bar.initial, progress.bar.total) == (20 + 10 + 3 + 30 + 5 + 2, 33, 100)
        assert "GB/s" in progress.bar.postfix
        assert world.idle == progress.show
    assert world.idle is None
    assert "fp16" in capsys.readouterr().err


@pytest.mark.usefixtures("every_bar")
def test_the_bar_of_encoding_counts_all_ranks_and_ends_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with EncodeProgress("fp16", 60, 20, Others(), quiet=False, label="encode x") as progress:
        progress.tick(7, 900)
        assert (progress.bar.n, progress.bar.initial) == (20 + 10 + 3 + 7 + 5 + 2, 33)
        progress.settle([[7, 900], [30, 5000], [3, 100]])
        assert (progress.bar.n, progress.bar.total) == (60, 60)
        assert progress.bar.postfix.endswith(" tokens/s")
    said = capsys.readouterr().err
    assert "encode x: 100%" in said
    assert "60 of 60" in said


@pytest.mark.usefixtures("every_bar")
def test_the_bars_say_when_the_disk_sets_the_pace() -> None:
    with Progress("fp16", 100, 0, World(), quiet=False) as progress:
        progress.spent(1.0, 4.0)
        progress.tick(10, 1000)
        assert progress.bar.postfix.endswith("GB/s")
        progress.spent(3.0, 3.5)
        progress.tick(10, 1000)
        assert progress.bar.postfix.endswith("GB/s, waiting for the disk")
    with EncodeProgress("fp16", 60, 0, World(), quiet=False, label="encode x") as progress:
        progress.spent(3.0, 4.0)
        progress.tick(10, 1000)
        assert progress.bar.postfix.endswith("tokens/s, the disk is slower than the model")


@pytest.mark.usefixtures("every_bar")
@pytest.mark.parametrize("slow", ["disk", "model"])
def test_filling_says_when_the_disk_is_slower_than_the_model(
    slow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = filling.write_shard

    def writing(*given: Any) -> int:
        time.sleep(0.2 if slow == "disk" else 0.0)
        return write(*given)

    def encode(start: int, stop: int) -> Packed:
        time.sleep(0.0 if slow == "disk" else 0.2)
        return Packed(torch.ones(stop - start, 4), torch.arange(stop - start + 1))

    monkeypatch.setattr(filling, "write_shard", writing)
    manifest: dict[str, Any] = {"key": "key", "dtype": torch.float32, "dim": 4, "provenance": {}}
    filling.fill_entry(tmp_path, ids=list("abcdefgh"), **manifest, encode=encode, documents_per_shard=2, quiet=False)
    assert (" tokens/s, the disk is slower than the model" in capsys.readouterr().err) == (slow == "disk")


def test_a_failure_elsewhere_is_raised_at_the_next_block() -> None:
    class Failed(World):
        def check(self) -> None:
            raise RankError(Failure(1, "x", 2), 2)

    with Progress("fp16", 10, 0, Failed(), quiet=True) as progress, pytest.raises(RankError, match="rank 1 of 2: x"):
        progress.tick(1, 1)
