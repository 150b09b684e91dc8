"""The campaign of the paper's tables (benchmarks/paper.py): rows, checks, the file, resuming; all on tiny shapes without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paper
import second
from cases import inputs as paper_inputs
from cases import memory as paper_memory
from cases import paper as paper_cases
from cases import quality, quantised, traffic
from measure import clocks, score_truth
from measure import method as methods_of
from paper_tables import FORWARD
from results import paper_file
from rivals import paper as paper_rivals
from rivals import torch_rivals
from run import campaign, runner

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
CPU = torch.device("cpu")


def smoke(path: Path, *more: str) -> dict[str, Any]:
    paper.main(["--smoke", "--no-compile", "--runs", "2", "--quiet", "--json", str(path), *more])
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def options(**more: Any) -> Any:
    return methods_of.Options(CPU, (), compile=False, smoke=True, **more)


def test_every_table_of_the_paper_has_a_group() -> None:
    for name in (*FORWARD, "scaling"):
        groups = paper.groups_of([name])
        assert groups
        assert set(groups) <= set(paper.GROUPS)
    assert paper.groups_of(["nocg", "fwd_abs"]) == ["memory", "shapes"], "processes that need the whole memory come first"
    with pytest.raises(ValueError, match=r"got fwdd, need some of fwd, "):
        paper.groups_of(["fwdd"])


def test_a_method_that_keeps_the_host_takes_turns_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever is called after it meets a late host: chunked FP16 once took 2.6 times as long in such company."""
    together: list[tuple[set[str], int]] = []

    def measure(calls: dict[str, Any], runs: int, flush: Any, warm_ups: int = 3) -> dict[str, dict[str, float]]:
        together.append((set(calls), runs))
        return {name: {"median_ms": 1000.0 if name == "slow" else 1.0, "iqr_ms": 0.0} for name in calls}

    monkeypatch.setattr(runner.timing, "measure", measure)
    library = SimpleNamespace(calls=lambda units: {"library": torch.zeros}, taken=lambda found: {"fp16": 1.0})
    fake = SimpleNamespace(flush=lambda: None, library=library, wait=lambda: None)
    calls = {
        "quick": lambda: None,
        "late": lambda: time.sleep(2e-3 * runner.HOST_MS),
        "slow": lambda: time.sleep(0.01),
    }
    found, _ = runner.clocked(calls, {"fp16"}, fake, 50)
    assert together[0] == ({"quick", "late", "slow"}, 1)
    assert together[1:] == [({"library", "quick"}, 50), ({"late"}, 50), ({"slow"}, runner.SLOW_RUNS)]
    assert {name for name, data in found.items() if data.get("apart")} == {"late", "slow"}


def test_rows_are_those_of_the_paper() -> None:
    held = options()
    names = {group: [plan.name for plan in make(held)] for group, make in paper.GROUPS.items()}
    assert names["shapes"] == [f"{shape} 1000" for shape in ("textual", "long-doc", "medium", "visual", "ColPali")]
    assert names["int8"] == names["op_abl"] == ["textual 1024", "long-doc 1024", "medium 512", "visual 256", "ColPali 128"]
    assert len(names["multiquery"]) == 15
    assert names["int8_B"][-1] == "ColPali 10000"
    full = methods_of.Options(CPU)
    textual = paper_inputs.sizes
    assert textual(full, paper_cases.SHAPES["textual"], 1000).tokens == 300
    assert textual(full, paper_inputs.SHORT["textual"], 1024).tokens == 180


def test_a_run_writes_every_row_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "paper.json"
    first = smoke(path, "--only", "op_abl,multiquery", "--rows", "textual")
    rows = first["groups"]["op_abl"]["rows"]
    assert list(rows) == ["textual 1024"]
    assert len(first["groups"]["multiquery"]["rows"]) == 5
    row = rows["textual 1024"]
    ours = row["methods"]["ours"]
    assert ours["error"] <= ours["bound"] == methods_of.EXACT
    assert ours["median_ms"] > 0
    assert row["skipped"]["ours, a program a pair"] == "needs a GPU"
    assert first["environments"][row["environment"]]["sources"] == "none"
    again = smoke(path, "--only", "op_abl", "--rows", "textual,medium")
    assert again["groups"]["op_abl"]["rows"]["textual 1024"] == row, "measured a second time"
    assert "medium 512" in again["groups"]["op_abl"]["rows"]
    assert "op_abl: textual 1024: in the file already" in capsys.readouterr().out
    more = smoke(path, "--only", "op_abl", "--rows", "textual", "--again")
    assert more["groups"]["op_abl"]["rows"]["textual 1024"]["methods"]["ours"] != ours


def test_rows_beyond_the_time_are_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        smoke(tmp_path / "paper.json", "--only", "op_abl", "--seconds", "0")
    assert ended.value.code == 1
    assert "op_abl: textual 1024: left out, may take 8 s" in capsys.readouterr().err


def test_files_of_other_machines_are_refused_but_not_of_other_kernels(tmp_path: Path) -> None:
    run, path = paper_file, tmp_path / "paper.json"
    here = {"gpu": "G", "capability": [9, 0], "torch": "2", "cuda": "13", "triton": "3", "sources": "a", "revision": "r"}
    asked = argparse.Namespace(runs=50, compile=True, peers=("flash-maxsim",), json=path)
    report = run.opened(path, here, False, campaign.SCHEMA)
    run.add(report, "shapes", "row", {"methods": {}}, here, asked)
    other = {**here, "sources": "b"}
    report = run.opened(path, other, False, campaign.SCHEMA)
    assert run.there(report, "shapes", "row", here, asked)
    assert not run.there(report, "shapes", "row", other, asked), "of other kernels"
    assert not run.there(report, "shapes", "row", here, argparse.Namespace(**{**vars(asked), "runs": 60}))
    assert not run.there(
        report, "shapes", "row", here, argparse.Namespace(**{**vars(asked), "peers": ("late-interaction-kernels",)})
    )
    run.add(report, "shapes", "second", {"methods": {}}, other, asked)
    rows = run.opened(path, here, False, campaign.SCHEMA)["groups"]["shapes"]["rows"]
    assert [row["environment"] for row in rows.values()] == ["r a", "r b"]
    with pytest.raises(ValueError, match=r"identity .*--fresh"):
        run.opened(path, {**here, "gpu": "another"}, False, campaign.SCHEMA)


def test_wrong_and_failing_methods_are_reported_and_not_timed() -> None:
    row = paper_cases.op_abl_row(options(), "medium")
    shape = row.shape

    def broken() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 42.00 GiB. GPU 0 has\n more to say")

    row.lineup.methods += [
        methods_of.Method("constant", "peer", {"": lambda: torch.ones(shape)}),
        methods_of.Method("large", "baseline", {"": broken}),
    ]
    found = runner.run_row(row, clocks.Bench(CPU, 2), 2, runner.PAPER)
    assert found["skipped"]["constant"].startswith("wrong: error")
    assert found["skipped"]["large"] == (
        "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 42.00 GiB. GPU 0 has more to say"
    )
    assert not {"constant", "large"} & set(found["methods"])


def test_ragged_lengths_have_the_papers_fill() -> None:
    for kind, (fill, mean) in paper_inputs.RAGGED.items():
        lengths = paper_inputs.lengths(kind, 1000, 512)
        assert float(lengths.sum()) / 512_000 == pytest.approx(fill, abs=0.01)
        assert float(lengths.double().mean()) == pytest.approx(mean, rel=0.02)
        assert int(lengths.max()) == 512
    with pytest.raises(ValueError, match="kind: got 'other'"):
        paper_inputs.lengths("other", 10, 20)


def test_baselines_agree_with_the_reference() -> None:
    held = paper_inputs.sizes(options(), (24, 40), 20, 3)
    queries, asked, corpus = paper_inputs.drawn(options(), held)
    truth = score_truth.truth(queries, corpus)
    for method in paper_rivals.textbook(asked, corpus).methods:
        assert score_truth.error(method.entries[""](), truth, (3, 20)) <= methods_of.EXACT
    single = score_truth.truth(queries[:1], corpus)
    grid = paper_rivals.chunk_grid(queries[0], corpus)
    assert [method.name for method in grid.methods] == ["chunks of 1", "chunks of 4", "chunks of 16"]
    assert set(grid.skipped) == {f"chunks of {size}" for size in (64, 256, 1024, 4096, 16384)}
    for method in grid.methods:
        assert score_truth.error(method.entries[""]().float(), single, (1, 20)) <= method.bound
    padding = torch.arange(40) >= torch.arange(20, 40)[:, None]
    padded = paper_rivals.one_padded(queries[0].float(), corpus.float(), padding)
    assert torch.allclose(padded, torch_rivals.score_queries(queries[:1].float(), corpus.float(), padding)[0])


def test_too_many_chunks_are_not_called() -> None:
    corpus = torch.zeros(3000, 1, 4, dtype=torch.float16)
    grid = paper_rivals.chunk_grid(torch.zeros(1, 4, dtype=torch.float16), corpus)
    assert grid.skipped["chunks of 1"] == "3000 chunks of three launches each: bound by the host"


def test_what_fits_a_multiprocessor() -> None:
    needed = paper_rivals.shared_bytes
    assert needed((128, 64, 8, 3), 128) == (256 + 192) * 256
    assert needed((16, 16, 4, 1), 2048) <= 227 << 10 < needed((32, 32, 4, 1), 2048)
    assert needed((32, 32, 4, 1), 768) == needed((32, 32, 4, 1), 1024)


FORCED = """
import torch
from rivals import paper as paper_rivals
from maxsim_kernels import maxsim_reference
from maxsim_kernels.gpu.forward.tuning import Config
torch.manual_seed(0)
queries, documents = (torch.nn.functional.normalize(torch.randn(*size, 32), dim=-1).half() for size in ((70,), (3, 50)))
need = maxsim_reference(queries, documents, dtype=torch.float64)
for kernel, rows, tokens, stages in (("general", 64, 32, 2), ("tiles", 64, 64, 2), ("tiles", 16, 32, 1)):
    scores = paper_rivals.forced(queries, documents, kernel, Config(rows, tokens, 4, stages, 8, "", ""))()
    assert float((scores[0].double() - need).abs().max()) < 1e-5, kernel
print("agree")
"""


@pytest.mark.slow
def test_forced_kernels_compute_maxsim() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])}
    done = subprocess.run([sys.executable, "-c", FORCED], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "agree", done.stderr[-2000:]


def test_quality_of_rankings() -> None:
    truth = torch.arange(100, 0, -1).double()
    perfect = quality.quality(truth.float(), truth)
    assert (perfect["max_error"], perfect["top20"], perfect["top50"]) == (0.0, 1.0, 1.0)
    assert perfect["spearman"] == pytest.approx(1.0)
    turned = quality.quality(truth.flip(0), truth)
    assert turned["spearman"] == pytest.approx(-1.0)
    assert (turned["top20"], turned["max_error"]) == (0.0, 99.0)
    moved = truth.clone()
    moved[0] = 0.0
    assert quality.quality(moved, truth)["top20"] == 0.95
    assert quality.spearman(torch.ones(5), truth[:5]) is None
    assert quality.top(torch.tensor([1.0, 2.0, 2.0, 1.0]), 3) == {0, 1, 2}, "ties by index"


def test_precision_rows_hold_every_path() -> None:
    found = quality.precision_row(options(), "textual")["paths"]
    assert found["ours FP16"]["own"]["max_relative_error"] < 1e-6 < found["naive FP16"]["own"]["max_relative_error"]
    assert found["ours BF16"]["own"]["max_error"] < found["naive BF16"]["own"]["max_error"]
    assert {f"ours INT8, {kind} scale" for kind in ("token", "document", "corpus")} <= set(found)


def test_int8_rows_say_storage_and_ranking() -> None:
    row = quantised.int8_row(options(), "ColPali", 128)
    found = runner.run_row(row, clocks.Bench(CPU, 1), 1, runner.PAPER)
    stored = found["stored_bytes"]
    assert stored["FP16"] / stored["token"] == pytest.approx(2 * 32 / 34)
    assert found["quality"]["ours INT8, token scale"]["spearman"] > 0.99
    assert {"dequantise to FP32, naive", "ours FP16", "naive FP32 accumulation"} <= set(found["methods"])


@pytest.mark.slow
def test_memory_process_and_what_it_could_not_do() -> None:
    held = paper_memory.memory_row(options(), "ours", ("textual:1000", "ColPali:1000"))
    assert set(held["cells"]) == {"textual 1000", "ColPali 1000"}
    assert held["cells"]["textual 1000"]["error"] <= methods_of.EXACT
    lost = paper_memory.memory_row(options(), "nobody", ("textual:1000",))
    assert lost["cells"]["textual 1000"]["failed"].startswith("ValueError: method: got 'nobody'")


def test_counted_traffic_is_the_papers() -> None:
    memory = paper_memory
    assert traffic.counted("ColPali", 1000, memory.HALF) == pytest.approx(4.456e9, rel=1e-3)
    # The paper's 8.65 GB: FP16 documents, S in FP32 written and read.
    wide = traffic.counted("ColPali", 1000, memory.WIDE)
    assert wide - 4 * 128 * 1024 * 1001 + 2 * 128 * 1024 * 1001 == pytest.approx(8.65e9, rel=1e-3)
    assert traffic.counted("medium", 1000, memory.OURS) == pytest.approx(0.263e9, rel=1e-2)


def test_counters_of_ncu() -> None:
    text = (
        '==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","a","dram__bytes_read.sum","Mbyte","1,262.5"\n"0","a","dram__bytes_write.sum","Kbyte","4.0"\n'
        '"1","b","dram__bytes_read.sum","Gbyte","1.0"\n"1","b","dram__bytes_write.sum","byte","128"\n'
    )
    found = traffic.total(text)
    assert found == {"read_bytes": 2.2625e9, "written_bytes": 4128.0, "bytes": 2.2625e9 + 4128, "kernels": 2}
    with pytest.raises(ValueError, match="no kernel"):
        traffic.total('"ID","Metric Name"\n')


def test_second_harness_checks_and_measures(tmp_path: Path) -> None:
    path = tmp_path / "second.json"
    second.main(["--smoke", "--repeats", "3", "--calls", "2", "--json", str(path)])
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found["shapes"]) == set(second.SHAPES)
    ours = found["shapes"]["ColPali"]["methods"]["ours"]
    assert ours["error"] < second.TOLERANCE
    assert len(ours["samples_ms"]) == 3
    assert ours["median_ms"] == sorted(ours["samples_ms"])[1]
