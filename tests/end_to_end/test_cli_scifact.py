"""The command of the README on real data: BEIR SciFact from its folder, through the cache, to figures one can compare."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.encoders import hf
from places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.scifact]

BASELINE = ROOT / "tests" / "baselines" / "scifact-lexical.json"


def test_scifact_with_lexical_embeddings(scifact_data: Path, cli: Any, tmp_path: Path) -> None:
    command = ("beir", "scifact", "--data-dir", scifact_data, "--encoder", "lexical", "--paths", "fp32,fp16,int8")
    said = cli(*command, "--device", "cpu", cwd=tmp_path).fine().out
    assert said.splitlines() == shown_in_the_readme(" ".join((*command[:2], *command[4:6])))
    report = tmp_path / "results" / "beir-scifact-lexical"
    result = json.loads((report / "result.json").read_text(encoding="utf-8"))
    counts = [result["task"][key] for key in ("queries", "documents", "judged_pairs")]
    assert counts == [300, 5183, 339]
    assert result["task"]["warnings"] == []
    assert result["paths"]["fp32"]["metrics"]["nDCG@10"] >= 0.68  # 0.6853 was measured
    for name, bound, rank in (("fp16", 5e-4, 0.9999), ("int8", 3e-3, 0.999)):
        parity = result["paths"][name]["parity"]
        assert abs(parity["delta"]["nDCG@10"]) <= bound
        assert parity["spearman"]["mean"] >= rank
    outcome = cli(
        "metrics", scifact_data / "scifact" / "qrels" / "test.tsv", report / "runs" / "fp32.trec", "--json", cwd=tmp_path
    )
    found = json.loads(outcome.fine().out)["runs"]["fp32.trec"]
    assert found["metrics"] == pytest.approx(result["paths"]["fp32"]["metrics"], abs=1e-12)
    cli("gate", report / "result.json", "--baseline", BASELINE, cwd=tmp_path).fine()
    certified_run_is_brute_forces(command[:-2], cli, tmp_path)


def shown_in_the_readme(words: str) -> list[str]:
    """The lines that the README shows below a command."""
    (found,) = re.findall(
        rf"^```\npython evaluate\.py {words} .*\n((?:(?!```).*\n)+)```", (ROOT / "README.md").read_text("utf-8"), re.M
    )
    return str(found).splitlines()


def certified_run_is_brute_forces(command: tuple[Any, ...], cli: Any, folder: Path) -> None:
    """Through the copy that `convert` makes, reading a small part of full precision."""
    cli("convert", "beir", "scifact", "--encoder", "lexical", "--to", "int8-document", "--quiet", cwd=folder).fine()
    cli(*command, "--paths", "fused-fp32,exact-int8", "--out", "certified", "--quiet", cwd=folder).fine()
    runs = [(folder / "certified" / "runs" / f"{name}.trec").read_bytes() for name in ("fused-fp32", "exact-int8")]
    assert runs[0] == runs[1]
    search = json.loads((folder / "certified" / "result.json").read_text(encoding="utf-8"))["paths"]["exact-int8"]["search"]
    assert search["identical_to"] == {"fused-fp32": True}
    assert search["survivors"] < 0.05 * search["documents"]


def part_of(folder: Path, to: Path, queries: int, documents: int) -> None:
    """The first judged queries of a BEIR set, all documents judged for them, and some more, in its layout."""
    with (folder / "qrels" / "test.tsv").open(encoding="utf-8", newline="") as file:
        judged = list(csv.DictReader(file, delimiter="\t"))
    chosen = list(dict.fromkeys(row["query-id"] for row in judged))[:queries]
    rows = [row for row in judged if row["query-id"] in chosen]
    wanted = {row["corpus-id"] for row in rows}
    (to / "qrels").mkdir(parents=True)
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(row.values()) for row in rows)]
    (to / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, kept in (("queries.jsonl", set(chosen)), ("corpus.jsonl", wanted)):
        lines = (folder / name).read_text(encoding="utf-8").splitlines(keepends=True)
        more = documents if name == "corpus.jsonl" else 0
        text = "".join(line for place, line in enumerate(lines) if place < more or str(json.loads(line)["_id"]) in kept)
        (to / name).write_text(text, encoding="utf-8")


def test_real_weights_are_encoded_once_and_evaluated(
    scifact_data: Path, minilm: Path, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`encode`, then `beir`, with MiniLM's own weights, on a part of SciFact that a test has time for."""
    part_of(scifact_data / "scifact", tmp_path / "data" / "scifact", 12, 60)
    given = ("beir", "scifact", "--data-dir", tmp_path / "data", "--encoder", f"hf:{minilm}")
    made = cli("encode", *given, "--json", "--quiet", cwd=tmp_path).fine()
    entries = {row["role"]: row for row in json.loads(made.out)["entries"]}
    assert entries["queries"]["rows"] == 12
    assert entries["documents"]["dim"] == 384
    monkeypatch.setattr(hf.HfEncoder, "encode", None)  # everything is in the cache
    cli(*given, "--paths", "fp32,fp16,int8", "--out", tmp_path / "report", "--quiet", cwd=tmp_path).fine()
    result = json.loads((tmp_path / "report" / "result.json").read_text(encoding="utf-8"))
    assert result["task"]["documents"] == entries["documents"]["rows"]
    assert result["task"]["document_tokens"] == entries["documents"]["tokens"]
    assert result["paths"]["fp32"]["metrics"]["nDCG@10"] >= 0.96  # 0.9692 was measured
    for name, bound in (("fp16", 0.9999), ("int8", 0.999)):
        assert result["paths"][name]["parity"]["spearman"]["mean"] >= bound
    assert (tmp_path / "report" / "report.md").stat().st_size > 1000
