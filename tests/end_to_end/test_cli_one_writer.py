"""Two commands on one `--out`, and what deleting must not touch there."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.files import alone, host

pytestmark = pytest.mark.slow

DATA = 3

# Two evaluations in two processes that import once and begin every turn together. In the first, a holds the lock until b has tried.
PAIR = """if True:
    import contextlib, io, json, pathlib, sys, time
    from maxsim_eval import subject
    from maxsim_eval.cli import main
    mine, k, turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
    alone, codes = subject.alone, []

    def wait(*names):
        while not all(pathlib.Path(name).exists() for name in names):
            time.sleep(0.0005)

    @contextlib.contextmanager
    def held(folder):
        with alone(folder):
            pathlib.Path("held").touch()
            wait("tried")
            yield

    for turn in range(turns):
        pathlib.Path(f"ready-{mine}-{turn}").touch()
        wait(f"ready-a-{turn}", f"ready-b-{turn}")
        subject.alone = alone if turn or mine == "b" else held
        if mine == "b":
            wait("held")
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                main(["demo", "--quiet", "--k", k, "--paths", "fp32,fp16", "--out", f"out-{turn}"])
        except SystemExit as ended:
            codes.append([ended.code or 0, said.getvalue()])
        pathlib.Path("tried").touch()
    print(json.dumps(codes))
"""


def one_run(folder: Path) -> int:
    """The k of a report whose files are all of one run."""
    k = int(json.loads((folder / "result.json").read_text())["k"])
    for name in ("fp32", "fp16"):
        ranks = [int(line.split()[3]) for line in (folder / "runs" / f"{name}.trec").read_text().splitlines()]
        assert max(ranks) == k, f"{folder}: result.json says k = {k}, the run of {name} holds {max(ranks)}"
    assert not list(folder.rglob(".*")), "nothing hidden stays"
    return k


def test_two_evaluations_on_one_folder(demo: Any, start: Callable[..., Any], tmp_path: Path) -> None:
    folder, turns = demo.copy(tmp_path, "datasets", "embeddings_cache"), 12
    pair = [start(["-c", PAIR, mine, k, str(turns)], folder) for mine, k in (("a", "7"), ("b", "9"))]
    answers = [process.communicate(timeout=300) for process in pair]
    codes = [json.loads(out) for out, _ in answers]
    for turn, both in enumerate(zip(*codes, strict=True)):
        k = one_run(folder / f"out-{turn}")
        ended = sorted(code for code, _ in both)
        assert ended in ([0, 0], [0, DATA]), both
        for (code, said), own in zip(both, (7, 9), strict=True):
            if code == DATA:
                assert said.startswith(f"error: out-{turn}: another command is writing there"), said
                assert k != own
    assert [one[0][0] for one in codes] == [0, DATA], "they never met"


@pytest.mark.parametrize("command", ["evaluate", "compare", "report"])
def test_every_command_that_writes_a_folder_waits_for_nobody(command: str, demo: Any, cli: Any, tmp_path: Path) -> None:
    folder = demo.copy(tmp_path)
    runs, qrels = demo.results / "runs", folder / "datasets" / "demo" / "small" / "qrels" / "test.tsv"
    words: dict[str, tuple[Any, ...]] = {
        "evaluate": ("demo", "--quiet"),
        "compare": ("compare", runs / "fp32.trec", runs / "int8.trec", "--qrels", qrels),
        "report": ("report", demo.results / "result.json", "--json"),
    }
    with alone(tmp_path / "held"):
        refused = cli(*words[command], "--out", tmp_path / "held", cwd=folder)
    assert refused.code == DATA
    assert refused.err.strip().splitlines()[-1].startswith(f"error: {tmp_path}/held: another command is writing there")
    assert not (tmp_path / "held").exists()


def test_fresh_does_not_follow_a_link(demo: Any, cli: Any, tmp_path: Path) -> None:
    folder = demo.copy(tmp_path)
    precious = tmp_path / "precious"
    (precious / "thesis").mkdir(parents=True)
    (precious / "thesis" / "text").write_text("three years")
    partial = folder / "results" / "demo-small-lexical" / ".partial"
    partial.symlink_to(precious)
    cli("demo", "--quiet", cwd=folder).refused(DATA, ".partial: is a link", "or say --fresh")
    assert partial.is_symlink()
    cli("demo", "--quiet", "--fresh", cwd=folder).fine()
    assert not partial.is_symlink()
    assert (precious / "thesis" / "text").read_text() == "three years"


def test_what_a_killed_run_left_is_taken_away(demo: Any, cli: Any, tmp_path: Path) -> None:
    folder = demo.copy(tmp_path)
    results, data = folder / "results" / "demo-small-lexical", folder / "datasets" / "demo"
    left = [results / ".report.html.999999-0123abcd.tmp", results / "runs" / ".fp16.trec.999999-0123abcd.tmp"]
    for path in left:
        path.write_text("half")
    old = data / ".small.999999.tmp"  # as an earlier version named them
    old.mkdir()
    day_ago = time.time() - 2 * 86400
    os.utime(old, (day_ago, day_ago))
    made = data / f".small.{host()}-999999999.tmp"
    made.mkdir()
    (data / "small" / "corpus.jsonl").unlink()  # so that it is made again
    cli("demo", "--quiet", cwd=folder).fine()
    assert [path for path in (*left, old, made) if path.exists()] == []
    assert not list(results.rglob(".*"))


def test_what_a_killed_report_left_is_taken_away(demo: Any, cli: Any, tmp_path: Path) -> None:
    left = tmp_path / "again" / ".report.html.999999-0123abcd.tmp"
    left.parent.mkdir()
    left.write_text("half")
    cli("report", demo.results / "result.json", "--out", "again", cwd=tmp_path).fine()
    assert not list(left.parent.glob(".*"))
