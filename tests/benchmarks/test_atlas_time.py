"""The atlas's whole command is timed twice over cached embeddings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alone import atlas_time
from measure.session import kernels


def test_an_atlas_is_timed_twice_over_cached_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(atlas_time, "seconds_of", lambda command: (calls.append(command[2:]), float(len(calls)))[1])
    file = tmp_path / "time.json"
    atlas_time.main(["--json", str(file), "--encoder", "hf:some", "--data-dir", "sets"])
    assert [call[:5] for call in calls] == [
        [name, "beir", "scifact", "--encoder", "hf:some"] for name in ("encode", "atlas", "atlas")
    ]
    assert len({call[call.index("--cache-dir") + 1] for call in calls}) == 1
    assert len({call[call.index("--out") + 1] for call in calls[1:]}) == 2, "each writes a folder of its own"
    found = json.loads(file.read_text(encoding="utf-8"))
    assert (found["first_s"], found["second_s"]) == (2.0, 3.0)
    assert found["families"] == kernels()["families"]
