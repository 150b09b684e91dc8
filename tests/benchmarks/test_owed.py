"""What is owed, in which order, and how it is run, with stand-ins for what needs a GPU."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import owed
import page
from measure import sources
from run import lanes
from run.measurements import Measurement, table
from tables import ages
from tables.cells import OPERATOR

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """
import json, pathlib, sys, time
path, what, families = pathlib.Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
path.with_name(what.replace(" ", "_") + ".began").write_text("")
if "slow" in what:
    time.sleep(60)
report = json.loads(path.read_text()) if path.exists() else {"schema": "maxsim-kernels/forward/2", "groups": {}, "partial": {}}
if "nothing" not in what:
    report["groups"][what] = {"environment": {"families": families, "revision": "abc"}, "rows": {"a": {}}}
    path.write_text(json.dumps(report))
sys.exit("broken" in what)
"""


@pytest.fixture
def today() -> dict[str, str]:
    return sources.digests(OPERATOR)


@pytest.fixture
def made(tmp_path: Path, today: dict[str, str]) -> Callable[..., Path]:
    """A table of stand-ins `(name, seconds, value, more)`, each writing a group of its name."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)

    def write(*entries: tuple[str, float, float, str]) -> Path:
        digest = json.dumps({"forward": today["forward"]}).replace("{", "{{").replace("}", "}}")
        text = "".join(
            f'[[measurement]]\nname = "{name}"\nfile = "h200/forward.json"\ngroups = ["{name}"]\ngpus = 0\n'
            f"command = '''{sys.executable} {script} {{json}} \"{name}\" {shlex.quote(digest)}'''\n"
            f"seconds = {seconds}\nvalue = {value}\n{more}\n"
            for name, seconds, value, more in entries
        )
        (tmp_path / "table.toml").write_text(text)
        (tmp_path / "results").mkdir(exist_ok=True)
        return tmp_path

    return write


def called(folder: Path, *more: str) -> int:
    return owed.main(["--table", str(folder / "table.toml"), "--results", str(folder / "results"), *more])


def test_most_value_a_second_comes_first_and_correctness_before_it(made: Callable[..., Path]) -> None:
    folder = made(
        ("dear", 100, 10, ""), ("cheap", 10, 5, ""), ("checks", 500, 1, "first = true"), ("reads", 1, 9, 'after = "dear"')
    )
    assert [one.name for one in table(folder / "table.toml")] == ["checks", "cheap", "dear", "reads"]


def test_what_fits_is_run_and_the_same_command_continues(made: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(("good", 5, 9, ""), ("broken", 5, 8, ""), ("nothing", 5, 7, ""), ("long", 1000, 9999, ""))
    out = folder / "out"
    assert called(folder, "--seconds", "200", "--out", str(out)) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("long: left out, takes 1000 s")
    assert said[1].startswith("good: done in")
    assert said[2].startswith("broken: ended with 1")
    assert said[3].startswith("nothing: wrote a file that lacks nothing")
    assert "1 done, 2 failed, 1 still owed" in said[4]
    began = {path.name for path in (out / "h200").glob("*.began")}
    assert began == {"good.began", "broken.began", "nothing.began"}
    (out / "h200" / "good.began").unlink()
    assert called(folder, "--seconds", "200", "--out", str(out)) == 1
    said = capsys.readouterr().out.splitlines()
    assert not (out / "h200" / "good.began").exists(), "done for these sources"
    assert [line.partition(":")[0] for line in said[:3]] == ["long", "nothing", "broken"], "what failed comes last"
    assert [path.name for path in (folder / "results").iterdir()] == []
    assert owed.main(["--table", str(folder / "table.toml"), "--results", str(folder / "results"), "--take", str(out)]) == 0
    taken = json.loads((folder / "results" / "h200" / "forward.json").read_text())
    assert list(taken["groups"]) == ["good"]


def test_named_alone_what_comes_after_another_looks_for_it_among_all(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(("first", 5, 9, ""), ("second", 5, 9, 'after = "first"'))
    out = folder / "out"
    assert called(folder, "--only", "second", "--seconds", "60", "--out", str(out)) == 3
    assert "second: left out, comes after 'first'" in capsys.readouterr().out
    assert called(folder, "--only", "first", "--seconds", "60", "--out", str(out)) == 0
    assert called(folder, "--only", "second", "--seconds", "60", "--out", str(out)) == 0
    assert "second: done" in capsys.readouterr().out


def test_a_limit_ends_whoever_does_not(made: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(("slow", 1, 1, ""))
    assert called(folder, "--seconds", "2", "--out", str(folder / "out")) == 1
    assert "slow: ended with its limit after 2 s" in capsys.readouterr().out


def test_changed_sources_are_owed(made: Callable[..., Path], capsys: pytest.CaptureFixture[str], today: dict[str, str]) -> None:
    folder = made(("a", 1, 1, ""), ("b", 1, 1, ""), ("c", 1, 1, ""), ("d", 1, 1, ""))

    def group(families: dict[str, str]) -> dict[str, Any]:
        return {"environment": {"families": families}, "rows": {"x": {}}}

    groups = {"a": group({"forward": today["forward"]}), "b": group({"forward": "other"}), "c": group({})}
    held = {"schema": "maxsim-kernels/forward/2", "groups": groups, "partial": {"d": group({})}}
    (folder / "results" / "h200").mkdir()
    (folder / "results" / "h200" / "forward.json").write_text(json.dumps(held))
    assert called(folder, "--list") == 0
    said = {line.split()[2]: " ".join(line.split()[4:]) for line in capsys.readouterr().out.splitlines()[:-1]}
    assert said == {"b": "sources changed", "c": "recorded no sources", "d": "lacks d"}


def test_a_gpu_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert owed.main(["--seconds", "10", "--out", str(out), "--gpus", "0", "--results", str(tmp_path)]) == 2
    assert "needs none" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_several_gpus_share_what_may_run_beside(
    made: Callable[..., Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = made(
        ("a", 3, 9, ""),
        ("b", 2, 5, ""),
        ("c", 1, 2, ""),
        ("waits", 1, 1, "alone = true"),
        ("after a", 1, 1, 'after = "a"'),
        ("long", 99, 9, ""),
    )
    words = ["--table", str(place / "table.toml"), "--results", str(place / "results"), "--out", str(place / "out")]
    assert owed.main([*words, "--seconds", "60", "--at-once", "2"]) == 3
    said = capfd.readouterr().out
    assert "3 dealt to 2 GPUs; left: waits, after a, long" in said
    lanes = [sorted(owed.journal(place / "out" / f"lane-{lane}")) for lane in (0, 1)]
    assert lanes == [["a"], ["b", "c"]]
    assert owed.main([*words, "--seconds", "60"]) == 3
    said = capfd.readouterr().out
    assert [line.partition(":")[0] for line in said.splitlines()[:-1]] == ["waits", "after a", "long"], "what lanes did is done"
    assert owed.main([*words, "--take", str(place / "out")]) == 0
    taken = json.loads((place / "results" / "h200" / "forward.json").read_text())
    assert sorted(taken["groups"]) == ["a", "after a", "b", "c", "waits"]
    monkeypatch.setattr(owed, "NEEDED", ("pytest", "no-such-package"))
    assert owed.main([*words[:4], "--seconds", "9", "--out", str(place / "c")]) == 2
    assert "owed.py needs no-such-package installed for" in capfd.readouterr().err
    assert not (place / "c").exists()


def test_lanes_have_a_gpu_a_share_of_cpus_and_caches_of_their_own(tmp_path: Path) -> None:
    assert lanes.dealt({"a": 5, "b": 4, "c": 3, "d": 9, "e": 1}, 2, 8) == [["a", "e"], ["b", "c"]]
    script = (
        "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['TRITON_CACHE_DIR'], file=open(sys.argv[1], 'w'))"
    )
    outs = [tmp_path / "0", tmp_path / "1"]
    assert lanes.run(
        [[sys.executable, "-c", f"{script}; sys.exit({n})", str(tmp_path / f"said-{n}")] for n in (0, 1)], outs
    ) == [0, 1]
    assert [(tmp_path / f"said-{n}").read_text().split() for n in (0, 1)] == [
        [str(n), str(outs[n] / "triton_cache_dir")] for n in (0, 1)
    ]


def test_files_of_another_state_are_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "forward.json"
    path.write_text(json.dumps({"identity": {"sources": "old"}}))
    owed.aside(path)
    assert [one.name for one in tmp_path.iterdir()] == ["forward.old.json"]
    path.write_text(json.dumps({"identity": {"gpu": "G"}}))
    owed.aside(path)
    assert path.exists()


def test_taking_refuses_another_gpu_and_keeps_the_rest() -> None:
    one = Measurement("m", "c", "f", 1, 1, groups=("b",))
    a, b, newer = ({"rows": {name: {}}, "time": time} for name, time in (("r", 1), ("s", 2), ("s", 3)))
    verdicts = [{"row": "r", "met": True}, {"row": "s", "met": False}]
    old = {
        "identity": {"gpu": "A"},
        "groups": {"a": a, "b": b},
        "partial": {"b": 0},
        "environments": {"x": 1},
        "verdicts": verdicts,
    }
    new = {"identity": {"gpu": "A"}, "groups": {"b": newer}, "environments": {"y": 2}, "verdicts": [{"row": "s", "met": True}]}
    found = owed.taken(one, new, old)
    assert (found["groups"], found["partial"], found["environments"]) == ({"a": a, "b": newer}, {}, {"x": 1, "y": 2})
    assert "verdicts" not in found, "those of either run would not be of these rows"
    with pytest.raises(ValueError, match="measured on B, the committed file on A"):
        owed.taken(one, {**new, "identity": {"gpu": "B"}}, old)


# The committed table


TABLE = table()


@pytest.mark.parametrize("one", TABLE, ids=lambda one: one.name)
def test_scripts_know_the_options_of_their_measurement(
    one: Measurement, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each command line is parsed by its own script: what it does not know ends with 2."""
    words = owed.command(one, tmp_path, tmp_path / "texts.jsonl")
    script = next(word for word in words if word.endswith(".py"))
    given = words[words.index(script) + 1 :]
    assert (ROOT / script).is_file()

    class ParsedError(Exception):
        """What was asked for is known."""

    real = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *arguments: Any, **named: Any) -> Any:
        real(self, *arguments, **named)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [script, *given])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "tests" / "gpu")])
    home = Path(script)
    name = ".".join(home.relative_to("benchmarks").with_suffix("").parts) if home.parts[0] == "benchmarks" else home.stem
    module = importlib.import_module(name)
    with pytest.raises(ParsedError):
        module.main(module.TOOL, given) if hasattr(module, "TOOL") else module.main(*([] if name == "libraries" else [given]))


def test_names_differ_and_every_family_is_known() -> None:
    assert len({one.name for one in TABLE}) == len(TABLE)
    for one in TABLE:
        path = page.RESULTS / one.file
        schema = json.loads(path.read_text(encoding="utf-8")).get("schema", "") if path.exists() else ""
        assert all(ages.families(schema, group) for group in one.groups or ("",)), one.name


def test_groups_are_those_of_their_script() -> None:
    """Whoever names a group after --only has it in `groups`, so that it is seen to be owed."""
    for one in TABLE:
        words = shlex.split(one.command)
        if one.groups and "--only" in words:
            assert words[words.index("--only") + 1].split(",") == list(one.groups), one.name


def test_every_figure_of_the_pages_has_its_measurement() -> None:
    """Files of a GPU that the pages read are ones that the table would write, or of older states kept for what nothing newer has."""
    known = {one.file for one in TABLE} | {"h200/streaming_4.json"}
    for cells in json.loads(page.MAP.read_text(encoding="utf-8")).values():
        for cell in cells.values():
            for place in cell["from"]:
                name = place.partition("#")[0]
                assert name in known or name.startswith("cpu/"), name


def test_slices_deal_out_every_test_file() -> None:
    dealt = [entry for one in TABLE if one.file == "h200/tests.json" for entry in one.entries]
    assert sorted(dealt) == sorted(path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py"))


def test_of_a_slice_the_owed_files_alone_run(tmp_path: Path, today: dict[str, str]) -> None:
    (one,) = (one for one in TABLE if one.name == "tests 2/3")
    files = {name: {"seconds": 10.0, "families": today} for name in one.entries}
    old = one.entries[3]
    files[old] = {"seconds": 30.0, "families": {**today, "operator": "0", "scoring": "0"}}
    path = tmp_path / "results" / one.file
    path.parent.mkdir(parents=True)

    def left() -> list[Measurement]:
        path.write_text(json.dumps({"schema": "maxsim-eval/tests/2", "files": files}))
        return [held for held, _ in owed.owed([one], None, tmp_path / "results")]

    (found,) = left()
    assert found.entries == (old,)
    assert found.seconds == pytest.approx(one.seconds * 30 / (30 + 10 * (len(one.entries) - 1)))
    assert f"--files {old} " in " ".join(owed.command(found, tmp_path, tmp_path / "a" / "b" / "c" / "d"))
    # What a call ran of a slice is taken, beside what is there.
    out = tmp_path / "out"
    (out / one.file).parent.mkdir(parents=True)
    new = {"seconds": 5.0, "families": today}
    (out / one.file).write_text(json.dumps({"schema": "maxsim-eval/tests/2", "files": {old: new}}))
    (out / owed.JOURNAL).write_text(json.dumps({one.name: {"exit": 0}}))
    assert owed.take([one], out, tmp_path / "results") == 1
    files[old] = new
    assert json.loads(path.read_text())["files"] == files
    assert left() == []
    del files[old]
    assert [held.entries for held in left()] == [one.entries], "a file that nobody ran: the whole slice"


def test_a_machine_that_was_not_at_rest_is_named() -> None:
    steady = {"median_ms": 2.0, "iqr_ms": 0.9}
    methods = {"ours": steady, "ours csr": {"median_ms": 2.0, "iqr_ms": 1.1}, "naive FP16": {"median_ms": 2.0, "iqr_ms": 9.0}}
    found = {"groups": {"steps": {"rows": {"step B=32": {"floor_ms": 1.0, "methods": methods}, "step B=64": {"methods": {}}}}}}
    assert list(owed.unsteady(found)) == ["step B=32: ours csr"]
    assert list(owed.unsteady({"groups": [methods]})) == []
