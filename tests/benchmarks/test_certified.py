"""The script that times certified search in whole evaluations: rows by encoder and depth, only where run files are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from searches import certified


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Evaluations whose paths take 2, 1 and 0.5 s and whose run files are equal; returns what was run."""
    ran: list[list[str]] = []

    def stand_in(command: list[str]) -> float:
        ran.append(command)
        if "--out" in command:
            evaluation(Path(command[command.index("--out") + 1]), equal="--limit-queries" not in command)
        return 1.0

    monkeypatch.setattr(certified, "seconds_of", stand_in)
    return ran


def evaluation(out: Path, equal: bool) -> None:
    (out / "runs").mkdir(parents=True)
    search = dict.fromkeys(certified.FACTS, 5)
    paths: dict[str, Any] = {}
    for name, seconds in ((certified.BRUTE, 2.0), (certified.CERTIFIED, 1.0), (certified.SCAN, 0.5)):
        paths[name] = {"seconds": {"total": seconds}, "run": f"runs/{name}.trec", "search": search}
        (out / "runs" / f"{name}.trec").write_text("1 Q0 d 1 2.0 t\n" if equal else f"1 Q0 {name} 1 2.0 t\n")
    (out / "result.json").write_text(json.dumps({"task": {"queries": 3}, "paths": paths}))


def test_rows_are_added_and_replaced(commands: list[list[str]], tmp_path: Path) -> None:
    given = ["beir", "scifact", "--data-dir", "data", "--cache-dir", str(tmp_path), "--json", str(tmp_path / "found.json")]
    certified.main([*given, "--k", "10", "--runs", "2"])
    certified.main([*given, "--k", "10,100", "--runs", "1"])
    runs = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert list(runs) == ["lexical, k = 10", "lexical, k = 100"]
    assert runs["lexical, k = 10"]["times"] == [2.0]
    assert runs["lexical, k = 10"]["seconds"][certified.SCAN] == [0.5]
    assert {"families", "revision", "survivors"} < set(runs["lexical, k = 10"])
    encode, convert, evaluate = commands[:3]
    assert encode[2:6] == ["encode", "beir", "scifact", "--data-dir"]
    assert convert[2:5] == ["convert", "beir", "scifact"]
    assert "--data-dir" not in convert
    assert evaluate[2:4] == ["beir", "scifact"]


def test_other_rankings_are_no_row(commands: list[list[str]], tmp_path: Path) -> None:
    words = ["beir", "scifact", "--limit-queries", "3", "--cache-dir", str(tmp_path), "--json", str(tmp_path / "found.json")]
    with pytest.raises(SystemExit, match="the run files of fused-fp32 and exact-int8 differ"):
        certified.main(words)
    assert not (tmp_path / "found.json").exists()
