"""The command of the README on real data: BEIR SciFact from its folder, through the cache, to figures one can compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.scifact]


def test_scifact_with_lexical_embeddings(scifact_data: Path, cli: Any, tmp_path: Path) -> None:
    command = ("beir", "scifact", "--data-dir", scifact_data, "--encoder", "lexical", "--paths", "fp32,fp16,int8")
    cli(*command, "--quiet", cwd=tmp_path).fine()
    report = tmp_path / "results" / "beir-scifact-lexical"
    result = json.loads((report / "result.json").read_text(encoding="utf-8"))
    counts = [result["task"][key] for key in ("queries", "documents", "judged_pairs")]
    assert counts == [300, 5183, 339]
    assert result["task"]["warnings"] == []
    assert result["paths"]["fp32"]["metrics"]["nDCG@10"] >= 0.62
    for name, bound, rank in (("fp16", 5e-4, 0.9999), ("int8", 3e-3, 0.999)):
        parity = result["paths"][name]["parity"]
        assert abs(parity["delta"]["nDCG@10"]) <= bound
        assert parity["spearman"]["mean"] >= rank
    outcome = cli(
        "metrics", scifact_data / "scifact" / "qrels" / "test.tsv", report / "runs" / "fp32.trec", "--json", cwd=tmp_path
    )
    assert json.loads(outcome.fine().out) == pytest.approx(result["paths"]["fp32"]["metrics"], abs=1e-12)
    baseline = tmp_path / "baseline.json"
    for options in (("--update-baseline",), ()):
        cli("gate", report / "result.json", "--baseline", baseline, *options, cwd=tmp_path).fine()
