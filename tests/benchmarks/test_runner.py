"""The GPU benchmark's parts that need no GPU: floors, medians, the results file, verdicts, truths, baselines, the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import forward
from cases import forward as forward_cases
from maxsim_kernels import pack, quantize_fp8, quantize_int8
from measure import installed, score_truth, work
from measure import method as methods_of
from results import file as results_file
from rivals import peers, torch_rivals
from run import command
from tables import forward_asked

ENVIRONMENT = {"gpu": "G", "capability": [9, 0], "torch": "2", "cuda": "13", "triton": "3", "sources": "abc", "revision": "r"}


def method(kind: str, ms: float, **more: Any) -> dict[str, Any]:
    data = {
        "kind": kind,
        "entry": "",
        "median_ms": ms,
        "iqr_ms": 0.0,
        "of_floor": 0.5,
        "error": 1e-8,
        "extra_bytes": 0,
        "kept_bytes": 0,
    }
    return {**data, **more}


def row(methods: dict[str, Any], operations: float = 8e11, size: float = 4e9, **more: Any) -> dict[str, Any]:
    data = {"methods": methods, "skipped": {}, "operations": operations, "bytes": size, "main": "ours", "host": False}
    return {**data, "floor_ms": 1.0, "bound_by": "matrix", **more}


def report(rows: dict[str, Any]) -> dict[str, Any]:
    return {"groups": {"g": {"ceilings": {"fp16": 8e14, "int8": 1e15, "read": 4e12}, "rows": rows}}, "partial": {}}


def test_floor_is_the_slower_of_memory_and_matrix() -> None:
    ceilings = {"read": 4e12, "fp16": 8e14}
    assert work.floor(work.Work(8e11, 4e8), ceilings) == (1.0, "matrix")
    assert work.floor(work.Work(8e11, 8e9), ceilings) == (2.0, "memory")
    assert work.floor(work.Work(8e11, 4e9, "fp8"), ceilings) == (1.0, "memory")  # no FP8 rate here


def test_work_of_a_row_counts_codes_and_scales() -> None:
    plain, codes = forward_cases.product(32, 1000), forward_cases.product(32, 1000, 128, "int8", 1000)
    assert plain.operations == codes.operations == 2 * 32 * 1000 * 128
    assert plain.size == 2 * 128 * 1000
    assert codes.size == 130 * 1000


def test_summary() -> None:
    assert work.summary([3.0], "ms") == {"median_ms": 3.0, "iqr_ms": 0.0}
    assert work.summary([1.0, 2.0, 3.0, 4.0, 100.0], "us") == {"median_us": 3.0, "iqr_us": 2.0}


def test_results_file_merges_groups_and_keeps_finished_ones(tmp_path: Path) -> None:
    figures, path = results_file, tmp_path / "new" / "forward.json"
    first = figures.opened(path, ENVIRONMENT, False)
    figures.merge(first, "dense", {"rows": {"a": 1 / 3}}, complete=True)
    figures.merge(first, "wide", {"rows": {}}, complete=False)
    figures.write(path, first)
    assert [file.name for file in path.parent.iterdir()] == ["forward.json"]
    again = figures.opened(path, {**ENVIRONMENT, "revision": "another word for the same sources"}, False)
    assert again["groups"]["dense"]["rows"]["a"] == 0.333333
    figures.merge(again, "dense", {"rows": {"b": 2}}, complete=False)
    assert "a" in again["groups"]["dense"]["rows"], "a half-done group does not replace a whole one"
    figures.merge(again, "dense", {"rows": {"b": 2}}, complete=True)
    assert again["groups"]["dense"]["rows"] == {"b": 2}
    assert set(again["partial"]) == {"wide"}


def test_results_of_other_kernels_or_schemas_are_not_mixed(tmp_path: Path) -> None:
    figures, path = results_file, tmp_path / "forward.json"
    figures.write(path, figures.opened(path, ENVIRONMENT, False))
    other = {**ENVIRONMENT, "sources": "def"}
    with pytest.raises(ValueError, match=r"sources 'abc', here 'def'.*--fresh"):
        figures.opened(path, other, False)
    assert figures.opened(path, other, True)["identity"]["sources"] == "def"
    path.write_text(json.dumps({"cases": {}}), encoding="utf-8")
    with pytest.raises(ValueError, match="schema None"):
        figures.opened(path, ENVIRONMENT, False)


def test_verdicts_follow_the_figures() -> None:
    # 8e11 operations in 1.25 ms are 0.8 of 8e14/s
    many = {"ours": method("ours", 1.25), "flash-maxsim": method("peer", 6.25), "late-interaction-kernels": method("peer", 5.0)}
    lines = forward_asked.verdicts(report({forward_asked.MANY: row(many)}))
    found = {line["what"]: (line["measured"], line["met"]) for line in lines}
    assert found["of cuBLAS FP16"] == (pytest.approx(0.8), False)
    assert found["times faster than flash-maxsim"] == (pytest.approx(5.0), True)
    assert found["times faster than late-interaction-kernels"] == (pytest.approx(4.0), False)
    assert forward_asked.table(lines)[-1] == "2 of 4 lines met"  # with the peak memory of all rows


def test_verdicts_need_ours_but_not_every_rival() -> None:
    lines = forward_asked.verdicts(report({forward_asked.MANY: row({"ours": method("ours", 1.0)})}))
    assert [line["what"] for line in lines if "flash" in line["what"]] == []
    lost = row({"flash-maxsim": method("peer", 5.0)}, skipped={"ours": "wrong"})
    lines = forward_asked.verdicts(report({forward_asked.MANY: lost}))
    assert lines
    assert not any(line["met"] for line in lines)
    assert all("not measured" in line["what"] for line in lines)


def test_memory_verdict_counts_what_a_call_keeps() -> None:
    methods = {
        "ours": method("ours", 1.0, extra_bytes=40e6, kept_bytes=30e6),
        "naive FP16": method("baseline", 2.0, extra_bytes=9e9),
    }
    lines = forward_asked.verdicts(report({"textual 10K": row(methods)}))
    (memory,) = [line for line in lines if "peak MB" in line["what"]]
    assert memory["measured"] == pytest.approx(70)
    assert not memory["met"]


def test_tables_name_wins_and_losses() -> None:
    methods = {"ours": method("ours", 1.0), "chunked FP16": method("baseline", 0.5), "flash-maxsim": method("peer", 2.0)}
    held = row(methods, skipped={"naive FP16": "its similarity tensor would need 70 GB"})
    lines = results_file.standing(results_file.Figures(report({"visual 10K": held})))
    assert any("chunked FP16" in line and line.endswith("LOSS") for line in lines)
    text = "\n".join(results_file.row_lines("visual 10K", held))
    assert "2.00x ours" in text
    assert "70 GB" in text


def test_truth_and_error_of_every_holding() -> None:
    torch.manual_seed(0)
    queries = torch.nn.functional.normalize(torch.randn(2, 4, 16), dim=-1)
    ragged = pack([torch.nn.functional.normalize(torch.randn(3 + n % 4, 16), dim=-1) for n in range(20)])
    dense = torch.nn.functional.normalize(torch.randn(20, 5, 16), dim=-1)
    holdings = [ragged, dense]
    holdings += [
        quantise(held, kind)
        for quantise in (quantize_int8, quantize_fp8)
        for held in (ragged, dense)
        for kind in ("token", "document", "corpus")
    ]
    for held in holdings:
        truth = score_truth.truth(queries, held)
        assert truth.scores.shape == truth.scale.shape == (2, 16)
        scores = score_truth.maxsim_reference(queries, held)
        assert score_truth.error(scores, truth, (2, 20)) <= 2e-6
        assert score_truth.error(scores + 0.01, truth, (2, 20)) > 1e-3
        unwritten = scores.clone()
        unwritten[1, 10] = torch.nan  # not among the documents compared
        assert score_truth.error(unwritten, truth, (2, 20)) == float("inf")


def test_baselines_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rivals, "CHUNKS", (4, 64))
    torch.manual_seed(0)
    queries = torch.nn.functional.normalize(torch.randn(3, 4, 16), dim=-1).half()
    documents = torch.nn.functional.normalize(torch.randn(9, 5, 16), dim=-1).half()
    padding = torch.arange(5) >= torch.randint(1, 6, (9,))[:, None]
    ragged = pack([document[~mask] for document, mask in zip(documents, padding, strict=True)])
    for asked in (queries, queries[0]):
        block = asked if asked.dim() == 3 else asked[None]
        full, part = score_truth.truth(block, documents), score_truth.truth(block, ragged)
        lineup = torch_rivals.naive(asked, documents).add(torch_rivals.chunked(asked, documents))
        masked = torch_rivals.naive(asked, documents, padding=padding).add(torch_rivals.chunked(asked, documents, padding))
        assert len(lineup.methods) == len(masked.methods) == 4
        for methods, truth in ((lineup.methods, full), (masked.methods, part)):
            for entry in (call for held in methods for call in held.entries.values()):
                assert score_truth.error(entry(), truth, (len(block), 9)) <= methods_of.LOOSE
    single = torch_rivals.naive(queries, documents[:3], pairs=True)
    truth = score_truth.truth(queries, documents[:3], pairs=True)
    assert all(score_truth.error(held.entries[""](), truth, (3,)) <= methods_of.LOOSE for held in single.methods)
    lineup = torch_rivals.dequantised(queries[0], quantize_int8(documents, "token"))
    truth = score_truth.truth(queries[:1], documents)
    entries = [call for held in lineup.methods for call in held.entries.values()]
    assert len(entries) == 4
    assert all(score_truth.error(entry(), truth, (1, 9)) <= methods_of.INT8_LOOSE for entry in entries)


def test_baselines_too_large_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rivals, "LARGEST", 3 * 9 * 5 * 4 * 2)
    lineup = torch_rivals.naive(torch.ones(3, 4, 8).half(), torch.ones(9, 5, 8).half())
    assert [held.name for held in lineup.methods] == ["naive FP16", "naive FP16, amax"]
    assert "similarity tensor" in lineup.skipped["naive FP32 accumulation"]


def test_missing_peers_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "PEERS", dict.fromkeys(installed.PEERS, "no_such_module_of_a_peer"))
    names = tuple(installed.PEERS)
    queries, documents = torch.ones(2, 4, 8).half(), torch.ones(2, 5, 8).half()
    lengths = torch.tensor([5, 5])
    packed = pack(list(documents))
    for lineup in (
        peers.dense(names, queries, documents),
        peers.ragged(names, queries, packed, documents, lengths),
        peers.pairs(names, queries, documents),
        peers.int8(names, queries[0], documents),
        peers.fp8(names, queries, documents),
    ):
        assert not lineup.methods
        assert any("not installed" in reason for reason in lineup.skipped.values())


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(forward.TOOL, ["--help"])
    assert end.value.code == 0
    assert "--only" in capsys.readouterr().out
    options = command.parse(forward.TOOL, ["--only", "dense,host", "--peers", "none", "--no-compile"])
    assert (options.only, options.peers, options.compile) == (["dense", "host"], (), False)
    for wrong in (["--only", "dens"], ["--peers", "someone"], ["--runs", "0"]):
        with pytest.raises(SystemExit):
            command.parse(forward.TOOL, wrong)
        assert "need" in capsys.readouterr().err


def test_tables_of_a_file_need_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "forward.json"
    held = results_file.empty(ENVIRONMENT) | report({"textual 10K": row({"ours": method("ours", 1.0)})})
    results_file.write(path, held)
    command.main(forward.TOOL, ["--show", str(path)])
    assert "of read bandwidth" in capsys.readouterr().out
