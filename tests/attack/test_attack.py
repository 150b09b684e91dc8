"""Damaged files, killed commands, two at once and a system without room: a right answer, or one message and exit 2 or 3.

`attack.py` does the work in forked processes; here are as many cases as a test may take, and tests that the attack would notice a hole.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attacks import endings, fuzzing, specimen, truth, workers
from attacks.endings import CRASH, HANG, REFUSED_3, RIGHT, SILENT, UNCLEAR, UNFORESEEN, Case
from attacks.targets import TARGETS
from maxsim_eval.data import trec
from places import ROOT, TESTS

pytestmark = pytest.mark.slow

STORED = (
    "documents",
    "queries",
    "manifest",
    "copy",
    "kept",
    "part",
    "corpus",
    "asked",
    "judged",
    "candidates",
    "atlas",
    "scorer",
)
GIVEN = tuple(name for name in TARGETS if name not in STORED)


def attacked(folder: Path, *words: str) -> dict[str, Any]:
    """The counts of a run of the script, none of which may be forbidden."""
    counts = folder / "counts.json"
    command = [sys.executable, str(TESTS / "attack" / "attack.py"), "--scratch", str(folder), "--json", str(counts), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    bad = [line for line in done.stderr.splitlines() if not line.startswith("attack:")]
    assert done.returncode == 0, "\n".join(bad)[-4000:]
    found = json.loads(counts.read_text())
    assert found["forbidden"] == 0
    return dict(found)


def enough(found: dict[str, Any], cases: int) -> None:
    """All ran, and they are no formality: some answered, some were refused."""
    assert found["cases"] == cases
    assert found["endings"][RIGHT] > cases / 10
    assert found["endings"][REFUSED_3] > cases / 10


@pytest.mark.parametrize("targets", [STORED, GIVEN], ids=["stored", "given"])
def test_damaged_files(targets: tuple[str, ...], tmp_path: Path) -> None:
    enough(attacked(tmp_path, "--cases", "150", "--first", "200", "--targets", ",".join(targets), "--workers", "1"), 150)


def test_killed_commands_two_at_once_and_limits(tmp_path: Path) -> None:
    found = attacked(tmp_path, "--cases", "0", "--kills", "12", "--pairs", "5", "--faults", "10", "--workers", "1")
    assert (found["kills"], found["pairs"], found["faults"]) == (12, 5, 10)
    assert found["killed"] >= 12, "the kills came too late"


@pytest.mark.parametrize("first", ["1000", "5000"])
def test_many_more_damaged_files(first: str, tmp_path: Path) -> None:
    enough(attacked(tmp_path, "--cases", "1000", "--first", first, "--workers", "1"), 1000)


def test_many_killed_commands(tmp_path: Path) -> None:
    attacked(tmp_path, "--cases", "0", "--kills", "30", "--pairs", "8", "--faults", "20", "--first", "1000", "--workers", "1")


# A full disk ----------------------------------------------------------------------------------------------------------

UNSHARED = ("unshare", "--user", "--map-root-user", "--mount")
COMMAND = "import sys; sys.argv[0] = 'evaluate.py'; from maxsim_eval.cli import main; main()"


def in_namespace(script: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A shell that may mount."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'kernels'}:{ROOT}"}
    command = [*UNSHARED, "sh", "-c", script, "sh", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("kib", [60, 1000])
def test_a_full_file_system(kib: int, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    mount = f"mount -t tmpfs -o size={kib}k none small && "
    if shutil.which("unshare") is None or in_namespace(f"{mount} true", tmp_path).returncode:
        pytest.skip("no file system can be mounted here (unshare --user --mount)")
    specimen.write_collection(tmp_path)
    words = (*specimen.evaluation(), "--cache-dir", "small/cache", "--out", "small/out")
    # What must be left is looked at where it is mounted; then room is made, and the same command runs again.
    script = f'{mount} "$0" -c "{COMMAND}" "$@"; echo "exit $?"; find small -name "*.tmp"; '
    again = f'mount -o remount,size=50m small && "$0" -c "{COMMAND}" "$@"; echo "again $?"'
    done = in_namespace((script + again).replace('"$0"', f'"{sys.executable}"'), tmp_path, *words)
    said = [line for line in done.stdout.splitlines() if not line.startswith(("fp", "int8"))]
    assert said == ["exit 3", "again 0"], done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: small/"), line
    assert "full" in line or "No space left" in line


# The attack itself ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[specimen.Specimen]:
    folder = tmp_path_factory.mktemp("specimen")
    yield specimen.build(folder)
    shutil.rmtree(folder)


def test_a_seed_is_one_case(found: specimen.Specimen, tmp_path: Path) -> None:
    first, second = (fuzzing.attack("qrels", 17, found, tmp_path) for _ in range(2))
    assert (first.mutation, first.ending) == (second.mutation, second.ending)
    assert list(tmp_path.iterdir()) == []


def test_another_answer_is_noticed(found: specimen.Specimen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = trec.read_qrels

    def careless(path: Path) -> dict[str, dict[str, int]]:
        qrels = read(path)
        del qrels["q1"]
        return qrels

    seed = next(seed for seed in range(99) if fuzzing.attack("qrels", seed, found, tmp_path).ending == RIGHT)
    monkeypatch.setattr(trec, "read_qrels", careless)
    monkeypatch.setattr("maxsim_eval.cli.metrics.read_qrels", careless, raising=False)
    assert fuzzing.attack("qrels", seed, found, tmp_path).ending == SILENT


def test_an_evaluation_of_other_texts_is_noticed(found: specimen.Specimen, tmp_path: Path) -> None:
    names = specimen.METRICS.split(",")
    home = found.copy(tmp_path, "datasets", "out")
    assert truth.wrong_evaluation(home, home / "out", specimen.K, names) == ""
    corpus = home / specimen.CORPUS
    corpus.write_text(corpus.read_text().replace("fox", "cat", 1))
    assert truth.wrong_evaluation(home, home / "out", specimen.K, names) != ""


@pytest.mark.parametrize(
    ("code", "out", "err", "ending"),
    [
        (3, "", "error: a: cannot be read (x)\n", REFUSED_3),
        (3, "", "warning: w\nerror: a: cannot be read (x)\n", REFUSED_3),
        (3, "", "error: a: cannot be read\nand more\n", UNCLEAR),
        (3, "{}\n", "error: a: cannot be read (x)\n", UNCLEAR),
        (3, "", "error: a\x1b[2J: cannot be read (x)\n", UNCLEAR),
        (3, "", "", UNCLEAR),
        (4, "", "error: unforeseen: KeyError\n", UNFORESEEN),
        (3, "", "Traceback (most recent call last):\n", UNFORESEEN),
        (1, "FAIL  fp16: top-10 overlap: 0, need 1\n", "", endings.GATE_NO),
        (1, "FAIL  a\n", "new.json: not written; --accept writes it all the same\n", endings.GATE_NO),
        (1, "FAIL  a\n", "and more\n", UNCLEAR),
        (1, "", "error: a: cannot be read (x)\n", UNCLEAR),
    ],
)
def test_endings(code: int, out: str, err: str, ending: str) -> None:
    assert endings.refusal(code, out, err)[0] == ending


def test_a_crash_and_a_hang_cost_one_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PATIENCE", 1.0)
    fates: dict[int, Callable[[], Any]] = {
        1: lambda: os.kill(os.getpid(), signal.SIGKILL),
        3: lambda: time.sleep(60),
        4: lambda: 1 / 0,
    }

    def work(name: str, seed: int, _: Path) -> Case:
        fates.get(seed, lambda: None)()
        return Case(name, seed, "", RIGHT)

    cases = sorted(workers.run_all([("x", seed) for seed in range(6)], work, tmp_path, 2), key=lambda case: case.seed)
    assert [case.ending for case in cases] == [RIGHT, CRASH, RIGHT, HANG, UNFORESEEN, RIGHT]
    assert workers.summary(cases)["x"][RIGHT] == 3
