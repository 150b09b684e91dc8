"""The training-parity benchmark on a CPU: a short run, its file, its picture."""

from __future__ import annotations

from pathlib import Path

import pytest

import parity


def test_parity_run_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "parity.json"
    parity.main(["--smoke", "--steps", "5", "--json", str(path), "--full"])
    held = parity.load(path)
    runs = held["runs"]
    assert set(runs) == {parity.NAIVE, parity.FULL, parity.OURS}
    assert all(len(run["losses"]) == 5 for run in runs.values())
    assert runs[parity.OURS]["losses"][4] < runs[parity.OURS]["losses"][0]
    assert held["drift"][f"{parity.OURS} - {parity.FULL}"]["max"] < 1e-4
    capsys.readouterr()
    parity.main(["--show", str(path)])
    assert "the paper, naive FP16" in capsys.readouterr().out
    assert parity.drift([1.0, 2.0, 4.0], [1.0, 2.5, 3.0]) == {"max": 1.0, "mean": 0.5, "at": 2, "steps": [0.0, 0.5, 1.0]}
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="schema None"):
        parity.load(path)


def test_parity_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = {"losses": [2.0, 1.0], "ms_per_step": 1.0, "peak_bytes": 10**9}
    held = {
        "runs": {parity.NAIVE: run, parity.OURS: run},
        "drift": {"ours - naive FP16": parity.drift([2.0, 1.0], [2.0, 1.001])},
        "paper": parity.PAPER,
        "settings": {"steps": 2, "batch": 4, "tokens": 16},
    }
    parity.draw(held, tmp_path / "deep" / "parity.png")
    assert (tmp_path / "deep" / "parity.png").stat().st_size > 10_000
