"""`benchmarks/alone/conformance.py`: who is tested, what a dead or missing scorer leaves, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alone import conformance


@pytest.mark.slow
def test_findings_are_kept_and_who_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conformance.main(["--only", "ours,flash_maxsim", "--device", "cpu", "--json", str(tmp_path / "found.json")])
    report = json.loads((tmp_path / "found.json").read_text())
    assert set(conformance.SCORERS) > {"ours", "sentence_transformers", "pylate", "late_interaction_kernels", "flash_maxsim"}
    assert list(report["scorers"]) == ["ours"]
    assert {verdict for verdict, _ in report["scorers"]["ours"].values()} <= {"pass"}
    assert "No module named 'flash_maxsim'" in report["left_out"]["flash_maxsim"]
    assert "ours: everything passes" in capsys.readouterr().out


def test_a_scorer_that_dies_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dead = tmp_path / "dead.py"
    dead.write_text("import os, sys; sys.stderr.write('oh'); sys.exit(3)")
    monkeypatch.setattr(conformance, "HERE", dead)
    assert conformance.found("ours", "cpu", 60) == ([], "its process ended with 3: oh")
    dead.write_text("import os, sys; sys.stderr.write('/a/folder'); os.abort()")
    assert conformance.found("ours", "cpu", 60) == ([], "its process ended with SIGABRT")
    refused = {"check": "a", "verdict": "refused", "found": "raised ModuleNotFoundError: No module named 'x'"}
    skipped = {"check": "b", "verdict": "skipped", "found": "needs 9.9 GB of free memory, there are 1.0"}
    dead.write_text(f"import json; print(json.dumps({[refused, skipped]!r}))")
    assert conformance.found("ours", "cpu", 60) == ([], refused["found"])
    dead.write_text("import time; time.sleep(60)")
    assert conformance.found("ours", "cpu", 0.2) == ([], "did not end within 0.2 seconds")
