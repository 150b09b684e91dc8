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

import bench_modules

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
NAMES = ("figures", "rivals", "peers", "forward", "clocks", "harness", "streaming", "chamfer", "paper", "paper_file", "paper_run",
         "paper_rivals", "paper_cases", "paper_quantised", "paper_memory")  # fmt: skip
CPU = torch.device("cpu")
HERE = {"gpu": "G", "capability": [9, 0], "torch": "2", "cuda": "13", "triton": "3", "sources": "a", "revision": "r"}
FLASH, LIK = "flash-maxsim", "late-interaction-kernels"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scripts, imported as the command imports them: siblings of one folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return bench_modules.load(NAMES)


def options(bench: SimpleNamespace, **more: Any) -> Any:
    return bench.paper_run.Options(CPU, **{"compile": False, "smoke": True, **more})


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


def report_of(bench: SimpleNamespace, row: dict[str, Any], **more: Any) -> dict[str, Any]:
    report: dict[str, Any] = bench.paper_file.opened(None, HERE, False, "s")
    bench.paper_file.add(report, "g", "row", row, HERE, asked(), **more)
    return report


def known(bench: SimpleNamespace, row: dict[str, Any], name: str = "row") -> bool:
    report = report_of(bench, row)
    report["groups"]["g"]["rows"][name] = report["groups"]["g"]["rows"]["row"]
    return bool(bench.paper_file.there(report, "g", name, HERE, asked()))


def test_the_committed_rows_are_whole(bench: SimpleNamespace) -> None:
    report = json.loads((ROOT / "docs" / "results" / "h200" / "paper.json").read_text(encoding="utf-8"))
    count = 0
    for group, held in report["groups"].items():
        for name, row in held["rows"].items():
            here = report["environments"][row["environment"]]
            now = asked(runs=row["runs"], compile=False, peers=tuple(row["peers"]))
            assert bench.paper_file.there(report, group, name, here, now), f"{group}: {name}"
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
def test_rows_that_miss_something_are_measured_again(bench: SimpleNamespace, row: dict[str, Any], whole: bool) -> None:
    assert known(bench, row) is whole


def test_a_peer_installed_since_is_measured(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "not installed (No module named 'flash_maxsim')"
    timed = {"main": "ours", "methods": {"ours": {"median_ms": 1.0}}, "skipped": {f"{FLASH}, INT8": why}}
    cells = {"cells": {"a": {"failed": why}}}
    monkeypatch.setattr(bench.peers, "load", lambda peer, part="": why)
    assert known(bench, timed)
    assert known(bench, cells, FLASH)
    monkeypatch.setattr(bench.peers, "load", lambda peer, part="": sys)
    assert not known(bench, timed)
    assert not known(bench, cells, FLASH)
    scorer = {**timed, "skipped": {"PyLate": "not installed (No module named 'pylate')"}}
    assert not known(bench, scorer), "scorers take part unasked"
    monkeypatch.setattr(bench.peers, "load", lambda peer, part="": why if peer == "PyLate" else sys)
    assert known(bench, scorer)


def test_versions_name_peers_and_the_scorers_that_are_installed(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name != "PyLate":
            raise bench.peers.PackageNotFoundError(name)
        return "1.6.0"

    monkeypatch.setattr(bench.peers, "version", version)
    assert bench.peers.versions() == {FLASH: "not installed", "late-interaction-kernels": "not installed", "PyLate": "1.6.0"}


def test_rows_before_compiled_methods_joined_are_measured_again(bench: SimpleNamespace) -> None:
    whole = {"main": "ours", "methods": {"ours": {"median_ms": 1.0}}}
    report, there = report_of(bench, whole), bench.paper_file.there
    del report["groups"]["g"]["rows"]["row"]["lineup"]  # as older files have it
    assert there(report, "g", "row", HERE, asked())
    assert not there(report, "g", "row", HERE, asked(), 2)
    assert there(report, "g", "row", HERE, asked(compile=False), 2)
    assert there(report_of(bench, whole, lineup=2), "g", "row", HERE, asked(), 2)


def test_another_version_of_a_peer_is_another_environment(bench: SimpleNamespace) -> None:
    report = bench.paper_file.opened(None, HERE, False, "s")
    for name, version in (("first", "1.0"), ("second", "2.0")):
        bench.paper_file.add(report, "g", name, {}, {**HERE, "peers": {FLASH: version}}, asked())
    rows = report["groups"]["g"]["rows"]
    assert [report["environments"][rows[name]["environment"]]["peers"][FLASH] for name in rows] == ["1.0", "2.0"]


def test_compiled_rivals_are_in_every_row_when_asked(bench: SimpleNamespace) -> None:
    cases, names = bench.paper_cases, {f"compiled FP16, {mode}" for mode in bench.paper_rivals.BOTH}
    for compile in (True, False):
        held = options(bench, compile=compile)
        for row in (
            cases.op_abl_row(held, "textual"),
            cases.multiquery_row(held, "textual", 4),
            cases.frontier_row(held, "visual", 5000),
            bench.paper_quantised.int8_row(held, "textual", 1024),
        ):
            assert (names <= {method.name for method in row.lineup.methods}) is compile
    plans = [make(options(bench, compile=True)) for make in (cases.op_abl, cases.multiquery, cases.frontier)]
    plans += [make(options(bench, compile=True)) for make in (bench.paper_quantised.int8, bench.paper_quantised.int8_sweep)]
    assert {plan.lineup for part in plans for plan in part} == {2}
    assert {plan.lineup for plan in cases.shapes(options(bench))} == {1}
    assert cases.op_abl(options(bench, compile=True))[0].seconds == cases.op_abl(options(bench))[0].seconds + 20


def test_a_graph_that_leaves_no_room_is_not_captured(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, held = bench.paper_cases, SimpleNamespace(queries=1, query_tokens=1024, documents=20000, tokens=1024)
    cuda = bench.paper_run.Options(torch.device("cuda"))
    for room, modes in ((200e9, bench.paper_rivals.BOTH), (150e9, (bench.paper_rivals.NO_GRAPHS,))):
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


def test_a_cell_that_hangs_is_named_and_the_rest_goes_on(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = bench.paper_memory
    monkeypatch.setattr(memory, "SECONDS", 2.0)
    monkeypatch.setattr(memory, "command", lambda method, cells, flags: [sys.executable, "-c", CHILD, *cells])
    cells = tuple(f"textual:{count}" for count in (1, 5, 6, 7, 2, 3, 4))  # the first four take longer than SECONDS together
    found = memory.memory_row(options(bench), "ours", cells)["cells"]
    assert found.pop("textual 2") == {"failed": "timed out after 2 s"}
    assert found.pop("textual 3") == {"failed": "the process ended with 7"}
    assert found == {f"textual {count}": {"peak_bytes": 1} for count in (1, 5, 6, 7, 4)}


def test_a_missing_peer_starts_no_process(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = bench.paper_memory
    monkeypatch.setattr(bench.peers, "load", lambda peer, part="": "not installed (gone)")
    monkeypatch.setattr(memory, "child", lambda *rest: pytest.fail("a process"))
    found = memory.memory_row(options(bench), FLASH, ("textual:1", "textual:2"))["cells"]
    assert found == {"textual 1": {"failed": "not installed (gone)"}, "textual 2": {"failed": "not installed (gone)"}}


def test_a_peer_that_does_not_import_fails_cell_by_cell(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_maxsim", None)
    found = dict(bench.paper_memory.measure(FLASH, ["textual:1000", "medium:1000"], CPU, True))
    assert [cell["failed"].split(":")[0] for cell in found.values()] == ["ModuleNotFoundError"] * 2


@pytest.mark.parametrize(("version", "kept"), [("0.4.5", False), ("0.4.4", False), ("0.4.6", True), ("0.10", True)])
def test_overflows_are_of_known_versions(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, version: str, kept: bool
) -> None:
    monkeypatch.setattr(bench.peers, "versions", lambda: {LIK: version})
    monkeypatch.setitem(sys.modules, "late_interaction_kernels", SimpleNamespace(maxsim=lambda queries, documents: "called"))
    documents = SimpleNamespace(numel=lambda: 2**31, shape=(1, 2**24, 128))
    assert (bench.peers.overflows(documents) == "") is kept
    assert bench.peers.overflows(SimpleNamespace(numel=lambda: 2**31 - 1)) == ""
    if kept:
        assert bench.paper_memory.caller(LIK, None, documents)() == "called"
    else:
        with pytest.raises(bench.forward.RefusedError, match=r"2\^31 numbers and more.*0\.4\.5"):
            bench.paper_memory.caller(LIK, None, documents)


@pytest.mark.parametrize("flags", [[], ["--autotune-here"]])
def test_compiled_processes_autotune_as_the_protocol_says(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    memory, settled = bench.paper_memory, []
    monkeypatch.setattr(memory, "measure", lambda *rest: iter(()))
    monkeypatch.setattr(bench.paper_rivals, "settle", settled.append)
    memory.main(["ours", "textual:1000", "--smoke", *flags])
    assert settled == []
    memory.main([memory.PLAIN_HALF, "textual:1000", "--smoke", *flags])
    assert settled == [not flags]


# A lost GPU


def test_a_method_that_lost_the_gpu_is_left_out_of_its_row(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, path, held = bench.paper_run, tmp_path / "paper.json", options(bench)
    clocks = bench.clocks.Bench(CPU, 1)

    def fault() -> torch.Tensor:
        monkeypatch.setattr(clocks, "wait", lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: illegal memory access")))
        raise RuntimeError("CUDA error: illegal memory access")

    def make() -> Any:
        row = bench.paper_cases.op_abl_row(held, "medium")
        row.lineup.methods.append(bench.rivals.Method("rival", "peer", {"": fault}))
        return row

    todo, now = [("op_abl", run.Plan("medium 512", make))], asked(path, runs=1, compile=False, peers=())
    report = bench.paper_file.opened(path, HERE, False, run.SCHEMA)
    with pytest.raises(bench.forward.DeviceLostError) as lost:
        run.work(todo, report, clocks, now, HERE)
    assert (lost.value.method, lost.value.row) == ("rival", "op_abl: medium 512")
    assert "Run the same command again: rival is left out of that row (op_abl: medium 512)" in bench.paper.told(lost.value, now)
    clocks = bench.clocks.Bench(CPU, 1)
    report = bench.paper_file.opened(path, HERE, False, run.SCHEMA)
    assert run.work(todo, report, clocks, now, HERE) == []
    row = json.loads(path.read_text(encoding="utf-8"))["groups"]["op_abl"]["rows"]["medium 512"]
    assert row["skipped"]["rival"].startswith("not tried: it lost the GPU (rival: CUDA error")
    assert row["methods"]["ours"]["median_ms"] > 0
    assert bench.paper_file.losers(report, "op_abl: medium 512", {**HERE, "sources": "b"}) == {}, "other kernels: tried again"
    newer, scorer = {**HERE, "peers": {FLASH: "9.9"}}, {**HERE, "peers": {**HERE.get("peers", {}), "PyLate": "1.6.0"}}
    assert bench.paper_file.losers(report, "op_abl: medium 512", newer) == {}, "another version of a peer: tried again"
    assert list(bench.paper_file.losers(report, "op_abl: medium 512", scorer)) == ["rival"], "a scorer came: nothing changed"


def test_a_row_that_lost_the_gpu_at_nobody_known_is_left_out(bench: SimpleNamespace, tmp_path: Path) -> None:
    run, lost, now = bench.paper_run, bench.forward.DeviceLostError("g: row: fault"), asked(tmp_path / "paper.json")
    lost.row = "g: row"
    report = bench.paper_file.opened(None, HERE, False, run.SCHEMA)
    bench.paper_file.remember(report, "g: row", lost, HERE, now)
    assert "that row is left out (g: row)" in bench.paper.told(lost, now)
    assert "again, without --fresh and --again: " in bench.paper.told(lost, asked(now.json, fresh=True, again=True))
    assert "--json FILE would have kept" in bench.paper.told(lost, asked())
    plan = run.Plan("row", lambda: pytest.fail("measured"))
    assert run.work([("g", plan)], report, None, now, HERE) == ["g: row: not tried: it lost the GPU (g: row: fault)"]


# The command line and the files


@pytest.mark.parametrize("text", ['{"schema": "maxsim-', "[1]", ""])
def test_a_cut_file_is_named(bench: SimpleNamespace, tmp_path: Path, text: str) -> None:
    path = tmp_path / "cut.json"
    path.write_text(text, encoding="utf-8")
    for ask in (
        lambda: bench.paper_file.opened(path, HERE, False, bench.paper_run.SCHEMA),
        lambda: bench.figures.opened(path, HERE, False),
    ):
        with pytest.raises(ValueError, match=r"cut\.json: got .*JSON.*--fresh replaces it"):
            ask()
    for command in (
        lambda: bench.paper.main(["--smoke", "--json", str(path)]),
        lambda: bench.forward.main(["--show", str(path)]),
        lambda: bench.streaming.main(["--show", str(path)]),
        lambda: bench.harness.main(bench.chamfer.TOOL, ["--show", str(path)]),
    ):
        with pytest.raises(SystemExit, match=r"cut\.json: got "):
            command()


def test_ctrl_c_is_one_line(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*rest: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.paper, "parse", stop)
    monkeypatch.setattr(bench.harness, "parse", stop)
    monkeypatch.setattr(bench.forward, "parse", stop)
    monkeypatch.setattr(bench.streaming, "parse", stop)
    for command in (bench.paper.main, bench.forward.main, bench.streaming.main, lambda: bench.harness.main(bench.chamfer.TOOL)):
        with pytest.raises(SystemExit) as ended:
            command()
        assert ended.value.code == 130
        assert capsys.readouterr().err.strip().splitlines() == [
            "Stopped by Ctrl-C; with --json the file holds the rows so far."
        ]


def test_rows_that_match_nothing_are_a_usage_error(bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.paper.main(["--list", "--only", "op_abl", "--rows", "textual,textuall"])
    assert ended.value.code == 2
    assert "--rows: got textuall, need parts of names of rows (--list prints them)" in capsys.readouterr().err
    bench.paper.main(["--list", "--only", "op_abl", "--rows", "textual"])
    assert "1 rows, about" in capsys.readouterr().out


def test_groups_have_a_date(bench: SimpleNamespace) -> None:
    report: dict[str, Any] = {"groups": {}, "partial": {}}
    bench.figures.merge(report, "g", {"rows": {}}, complete=True)
    assert report["groups"]["g"]["measured"].startswith("20")
    assert bench.figures.Figures(report).rows == {}


def test_tables_show_a_bar(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    group = next(iter(bench.chamfer.TOOL.groups))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for more, shown in (([], True), (["--quiet"], False)):
        bench.harness.main(bench.chamfer.TOOL, ["--smoke", "--runs", "1", "--only", group, *more])
        assert (f"{group}: " in capsys.readouterr().err) is shown
