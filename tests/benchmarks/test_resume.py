"""What a campaign of benchmarks/paper.py leaves out when it goes on: whole rows, cells that hang, methods that lost the GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import chamfer
import forward
import paper
import streaming
from cases import memory as paper_memory
from cases import paper as paper_cases
from cases import quantised
from measure import clocks, installed, session
from measure import method as methods_of
from results import file as results_file
from results import paper_file
from rivals import paper as paper_rivals
from rivals import peers
from run import campaign
from run import command as tools

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
HERE = {"gpu": "G", "capability": [9, 0], "torch": "2", "cuda": "13", "triton": "3", "sources": "a", "revision": "r"}
FLASH, LIK = "flash-maxsim", "late-interaction-kernels"


def options(**more: Any) -> Any:
    return methods_of.Options(CPU, **{"compile": False, "smoke": True, **more})


def asked(path: Path | None = None, **more: Any) -> argparse.Namespace:
    held = {
        "runs": 50,
        "compile": True,
        "peers": (FLASH,),
        "json": path,
        "again": False,
        "fresh": False,
        "quiet": True,
        "seconds": 1e9,
        "began": 0,
    }
    return argparse.Namespace(**{**held, **more})


def report_of(row: dict[str, Any], **more: Any) -> dict[str, Any]:
    report: dict[str, Any] = paper_file.opened(None, HERE, False, "s")
    paper_file.add(report, "g", "row", row, HERE, asked(), **more)
    return report


def known(row: dict[str, Any], name: str = "row") -> bool:
    report = report_of(row)
    report["groups"]["g"]["rows"][name] = report["groups"]["g"]["rows"]["row"]
    return bool(paper_file.there(report, "g", name, HERE, asked()))


def test_the_committed_rows_are_whole() -> None:
    report = json.loads((ROOT / "docs" / "results" / "h200" / "paper.json").read_text(encoding="utf-8"))
    count = 0
    for group, held in report["groups"].items():
        for name, row in held["rows"].items():
            here = report["environments"][row["environment"]]
            now = asked(runs=row["runs"], compile=False, peers=tuple(row["peers"]))
            assert paper_file.there(report, group, name, here, now), f"{group}: {name}"
            count += 1
    assert count > 50


@pytest.mark.parametrize(
    ("row", "whole"),
    [
        ({"main": "ours", "methods": {"ours": {"median_ms": 1.0}}}, True),
        ({"main": "ours", "methods": {"ours": {"error": 0.0}}}, False),
        ({"main": "ours", "methods": {}, "skipped": {"ours": "failed: RuntimeError: no"}}, False),
        ({"main": "ours", "methods": {}, "skipped": {"ours": "not tried: it lost the GPU"}}, True),
        ({"cells": {"a": {"peak_bytes": 1}, "b": {"failed": "OutOfMemoryError: CUDA out of memory. Tried"}}}, True),
        ({"cells": {"a": {"failed": "AcceleratorError: fault", "lost": "fault"}, "b": {"failed": "not tried: a fault"}}}, True),
        ({"cells": {"a": {"peak_bytes": 1}, "b": {"failed": "timed out after 300 s"}}}, False),
        ({"cells": {"a": {"failed": "not reached in 300 s"}}}, False),
        ({"cells": {"a": {"failed": "the process ended with 1"}}}, False),
    ],
)
def test_rows_that_miss_something_are_measured_again(row: dict[str, Any], whole: bool) -> None:
    assert known(row) is whole


def test_a_peer_installed_since_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "not installed (No module named 'flash_maxsim')"
    timed = {"main": "ours", "methods": {"ours": {"median_ms": 1.0}}, "skipped": {f"{FLASH}, INT8": why}}
    cells = {"cells": {"a": {"failed": why}}}
    monkeypatch.setattr(installed, "load", lambda peer, part="": why)
    assert known(timed)
    assert known(cells, FLASH)
    monkeypatch.setattr(installed, "load", lambda peer, part="": sys)
    assert not known(timed)
    assert not known(cells, FLASH)
    scorer = {**timed, "skipped": {"PyLate": "not installed (No module named 'pylate')"}}
    assert not known(scorer), "scorers take part unasked"
    monkeypatch.setattr(installed, "load", lambda peer, part="": why if peer == "PyLate" else sys)
    assert known(scorer)


def test_versions_name_peers_and_the_scorers_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "PyLate":
            raise installed.PackageNotFoundError(name)
        return "1.6.0"

    monkeypatch.setattr(installed, "version", version)
    assert installed.versions() == {FLASH: "not installed", "late-interaction-kernels": "not installed", "PyLate": "1.6.0"}


def test_rows_before_compiled_methods_joined_are_measured_again() -> None:
    whole = {"main": "ours", "methods": {"ours": {"median_ms": 1.0}}}
    report, there = report_of(whole), paper_file.there
    del report["groups"]["g"]["rows"]["row"]["lineup"]  # as older files have it
    assert there(report, "g", "row", HERE, asked())
    assert not there(report, "g", "row", HERE, asked(), 2)
    assert there(report, "g", "row", HERE, asked(compile=False), 2)
    assert there(report_of(whole, lineup=2), "g", "row", HERE, asked(), 2)


def test_another_version_of_a_peer_is_another_environment() -> None:
    report = paper_file.opened(None, HERE, False, "s")
    for name, version in (("first", "1.0"), ("second", "2.0")):
        paper_file.add(report, "g", name, {}, {**HERE, "peers": {FLASH: version}}, asked())
    rows = report["groups"]["g"]["rows"]
    assert [report["environments"][rows[name]["environment"]]["peers"][FLASH] for name in rows] == ["1.0", "2.0"]


def test_compiled_rivals_are_in_every_row_when_asked() -> None:
    cases, names = paper_cases, {f"compiled FP16, {mode}" for mode in paper_rivals.BOTH}
    for compile in (True, False):
        held = options(compile=compile)
        for row in (
            cases.op_abl_row(held, "textual"),
            cases.multiquery_row(held, "textual", 4),
            cases.frontier_row(held, "visual", 5000),
            quantised.int8_row(held, "textual", 1024),
        ):
            assert (names <= {method.name for method in row.lineup.methods}) is compile
    plans = [make(options(compile=True)) for make in (cases.op_abl, cases.multiquery, cases.frontier)]
    plans += [make(options(compile=True)) for make in (quantised.int8, quantised.int8_sweep)]
    assert {plan.lineup for part in plans for plan in part} == {2}
    assert {plan.lineup for plan in cases.shapes(options())} == {1}
    assert cases.op_abl(options(compile=True))[0].seconds == cases.op_abl(options())[0].seconds + 20


def test_a_graph_that_leaves_no_room_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    cases, held = paper_cases, SimpleNamespace(queries=1, query_tokens=1024, documents=20000, tokens=1024)
    cuda = methods_of.Options(torch.device("cuda"))
    for room, modes in ((200e9, paper_rivals.BOTH), (150e9, (paper_rivals.NO_GRAPHS,))):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, room=room: SimpleNamespace(total_memory=room))
        assert cases.graph_modes(cuda, held) == modes


# Memory in processes of their own

CHILD = """
import json, sys, time
for cell in sys.argv[1:]:
    key = cell.replace(":", " ")
    if key == "textual 2":
        print('["textual 2", {"half', end="", flush=True)
        time.sleep(60)
    if key == "textual 3":
        sys.exit(7)
    time.sleep(0.6)
    print(json.dumps([key, {"peak_bytes": 1}]), flush=True)
"""


@pytest.mark.slow
def test_a_cell_that_hangs_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = paper_memory
    monkeypatch.setattr(memory, "SECONDS", 2.0)
    monkeypatch.setattr(memory, "command", lambda method, cells, flags: [sys.executable, "-c", CHILD, *cells])
    cells = tuple(f"textual:{count}" for count in (1, 5, 6, 7, 2, 3, 4))  # the first four take longer than SECONDS together
    found = memory.memory_row(options(), "ours", cells)["cells"]
    assert found.pop("textual 2") == {"failed": "timed out after 2 s"}
    assert found.pop("textual 3") == {"failed": "the process ended with 7"}
    assert found == {f"textual {count}": {"peak_bytes": 1} for count in (1, 5, 6, 7, 4)}


def test_a_missing_peer_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = paper_memory
    monkeypatch.setattr(installed, "load", lambda peer, part="": "not installed (gone)")
    monkeypatch.setattr(memory, "child", lambda *rest: pytest.fail("a process"))
    found = memory.memory_row(options(), FLASH, ("textual:1", "textual:2"))["cells"]
    assert found == {"textual 1": {"failed": "not installed (gone)"}, "textual 2": {"failed": "not installed (gone)"}}


def test_a_peer_that_does_not_import_fails_cell_by_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_maxsim", None)
    found = dict(paper_memory.measure(FLASH, ["textual:1000", "medium:1000"], CPU, True))
    assert [cell["failed"].split(":")[0] for cell in found.values()] == ["ModuleNotFoundError"] * 2


@pytest.mark.parametrize(("version", "kept"), [("0.4.5", False), ("0.4.4", False), ("0.4.6", True), ("0.10", True)])
def test_overflows_are_of_known_versions(monkeypatch: pytest.MonkeyPatch, version: str, kept: bool) -> None:
    monkeypatch.setattr(installed, "versions", lambda: {LIK: version})
    monkeypatch.setitem(sys.modules, "late_interaction_kernels", SimpleNamespace(maxsim=lambda queries, documents: "called"))
    documents = SimpleNamespace(numel=lambda: 2**31, shape=(1, 2**24, 128))
    assert (peers.overflows(documents) == "") is kept
    assert peers.overflows(SimpleNamespace(numel=lambda: 2**31 - 1)) == ""
    if kept:
        assert paper_memory.caller(LIK, None, documents)() == "called"
    else:
        with pytest.raises(session.RefusedError, match=r"2\^31 numbers and more.*0\.4\.5"):
            paper_memory.caller(LIK, None, documents)


@pytest.mark.parametrize("flags", [[], ["--autotune-here"]])
def test_compiled_processes_autotune_as_the_protocol_says(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    memory, settled = paper_memory, []
    monkeypatch.setattr(memory, "measure", lambda *rest: iter(()))
    monkeypatch.setattr(paper_rivals, "settle", settled.append)
    memory.main(["ours", "textual:1000", "--smoke", *flags])
    assert settled == []
    memory.main([memory.PLAIN_HALF, "textual:1000", "--smoke", *flags])
    assert settled == [not flags]


# A lost GPU


def test_a_method_that_lost_the_gpu_is_left_out_of_its_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, path, held = campaign, tmp_path / "paper.json", options()
    bench = clocks.Bench(CPU, 1)

    def fault() -> torch.Tensor:
        monkeypatch.setattr(bench, "wait", lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: illegal memory access")))
        raise RuntimeError("CUDA error: illegal memory access")

    def make() -> Any:
        row = paper_cases.op_abl_row(held, "medium")
        row.lineup.methods.append(methods_of.Method("rival", "peer", {"": fault}))
        return row

    todo, now = [("op_abl", run.Plan("medium 512", make))], asked(path, runs=1, compile=False, peers=())
    report = paper_file.opened(path, HERE, False, run.SCHEMA)
    with pytest.raises(session.DeviceLostError) as lost:
        run.work(todo, report, bench, now, HERE)
    assert (lost.value.method, lost.value.row) == ("rival", "op_abl: medium 512")
    assert "Run the same command again: rival is left out of that row (op_abl: medium 512)" in paper.told(lost.value, now)
    bench = clocks.Bench(CPU, 1)
    report = paper_file.opened(path, HERE, False, run.SCHEMA)
    assert run.work(todo, report, bench, now, HERE) == []
    row = json.loads(path.read_text(encoding="utf-8"))["groups"]["op_abl"]["rows"]["medium 512"]
    assert row["skipped"]["rival"].startswith("not tried: it lost the GPU (rival: CUDA error")
    assert row["methods"]["ours"]["median_ms"] > 0
    assert paper_file.losers(report, "op_abl: medium 512", {**HERE, "sources": "b"}) == {}, "other kernels: tried again"
    newer, scorer = {**HERE, "peers": {FLASH: "9.9"}}, {**HERE, "peers": {**HERE.get("peers", {}), "PyLate": "1.6.0"}}
    assert paper_file.losers(report, "op_abl: medium 512", newer) == {}, "another version of a peer: tried again"
    assert list(paper_file.losers(report, "op_abl: medium 512", scorer)) == ["rival"], "a scorer came: nothing changed"


def test_a_row_that_lost_the_gpu_at_nobody_known_is_left_out(tmp_path: Path) -> None:
    run, lost, now = campaign, session.DeviceLostError("g: row: fault"), asked(tmp_path / "paper.json")
    lost.row = "g: row"
    report = paper_file.opened(None, HERE, False, run.SCHEMA)
    paper_file.remember(report, "g: row", lost, HERE, now)
    assert "that row is left out (g: row)" in paper.told(lost, now)
    assert "again, without --fresh and --again: " in paper.told(lost, asked(now.json, fresh=True, again=True))
    assert "--json FILE would have kept" in paper.told(lost, asked())
    plan = run.Plan("row", lambda: pytest.fail("measured"))
    assert run.work([("g", plan)], report, None, now, HERE) == ["g: row: not tried: it lost the GPU (g: row: fault)"]


# The command line and the files


@pytest.mark.parametrize("text", ['{"schema": "maxsim-', "[1]", ""])
def test_a_cut_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cut.json"
    path.write_text(text, encoding="utf-8")
    for ask in (
        lambda: paper_file.opened(path, HERE, False, campaign.SCHEMA),
        lambda: results_file.opened(path, HERE, False),
    ):
        with pytest.raises(ValueError, match=r"cut\.json: got .*JSON.*--fresh replaces it"):
            ask()
    for command in (
        lambda: paper.main(["--smoke", "--json", str(path)]),
        lambda: tools.main(forward.TOOL, ["--show", str(path)]),
        lambda: streaming.main(["--show", str(path)]),
        lambda: tools.main(chamfer.TOOL, ["--show", str(path)]),
    ):
        with pytest.raises(SystemExit, match=r"cut\.json: got "):
            command()


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*rest: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(paper, "parse", stop)
    monkeypatch.setattr(tools, "parse", stop)
    monkeypatch.setattr(streaming, "parse", stop)
    for command in (paper.main, lambda: tools.main(forward.TOOL), streaming.main, lambda: tools.main(chamfer.TOOL)):
        with pytest.raises(SystemExit) as ended:
            command()
        assert ended.value.code == 130
        assert capsys.readouterr().err.strip().splitlines() == [
            "Stopped by Ctrl-C; with --json the file holds the rows so far."
        ]


def test_rows_that_match_nothing_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        paper.main(["--list", "--only", "op_abl", "--rows", "textual,textuall"])
    assert ended.value.code == 2
    assert "--rows: got textuall, need parts of names of rows (--list prints them)" in capsys.readouterr().err
    paper.main(["--list", "--only", "op_abl", "--rows", "textual"])
    assert "1 rows, about" in capsys.readouterr().out


def test_groups_have_a_date() -> None:
    report: dict[str, Any] = {"groups": {}, "partial": {}}
    results_file.merge(report, "g", {"rows": {}}, complete=True)
    assert report["groups"]["g"]["measured"].startswith("20")
    assert results_file.Figures(report).rows == {}


def test_tables_show_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    group = next(iter(chamfer.TOOL.groups))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for more, shown in (([], True), (["--quiet"], False)):
        tools.main(chamfer.TOOL, ["--smoke", "--runs", "1", "--only", group, *more])
        assert (f"{group}: " in capsys.readouterr().err) is shown
