"""The CPU benchmark's baselines and peers: right before they are timed, missing ones said."""

from __future__ import annotations

import importlib
import io
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import cpu_forward


@pytest.mark.parametrize("ragged", [False, True])
def test_chunked_products_are_maxsim(ragged: bool) -> None:
    torch.manual_seed(0)
    queries, documents = cpu_forward.unit(3, 5, 16), cpu_forward.unit(70, 9, 16)
    lengths = torch.randint(1, 10, (70,)) if ragged else None
    need = cpu_forward.einsum(queries, documents, lengths, listing=True)
    assert torch.allclose(cpu_forward.chunks(queries, documents, lengths), need, atol=1e-5)


def test_missing_peers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("maxsim_cpu", "numkong"):
        monkeypatch.setitem(sys.modules, name, None)
    found, skipped = cpu_forward.peers(cpu_forward.unit(1, 4, 8), [cpu_forward.unit(3, 8)])
    assert not found
    assert set(skipped) == {"maxsim-cpu", "numkong"}
    assert all(why.startswith("not installed") for why in skipped.values())


def test_angles_become_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """numkong gives the sum of smallest angular distances of a pair: one minus the cosine each."""
    fake = ModuleType("numkong")
    fake.maxsim_pack = torch.from_numpy  # type: ignore[attr-defined]
    fake.maxsim_packed = lambda query, document: float((1 - query @ document.t()).amin(1).sum())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "numkong", fake)
    queries, documents = cpu_forward.unit(2, 4, 8), [cpu_forward.unit(3, 8), cpu_forward.unit(5, 8)]
    need = torch.stack([torch.stack([(query @ one.t()).amax(1).sum() for one in documents]) for query in queries])
    assert torch.allclose(cpu_forward.numkong_calls(queries, documents)(), need, atol=1e-5)


def test_a_wrong_peer_is_reported_and_a_wrong_method_of_ours_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_forward, "DOCUMENTS", 6)
    monkeypatch.setattr(cpu_forward, "LENGTH", 8)
    monkeypatch.setattr(
        cpu_forward, "PEERS", {"numkong": lambda queries, documents: lambda: torch.ones(len(queries), len(documents))}
    )
    monkeypatch.setattr(cpu_forward, "version", lambda name: "7")
    skipped: dict[str, str] = {}
    table = cpu_forward.measure("case", 1, False, 3, skipped)
    assert skipped["numkong 7, case"].startswith("wrong: error")
    assert "numkong 7" not in table
    assert table[cpu_forward.CHUNKED]["median_ms"] > 0
    monkeypatch.setattr(cpu_forward, "chunks", lambda queries, documents, lengths: torch.ones(len(queries), len(documents)))
    with pytest.raises(SystemExit, match="products of 32 documents, padded: wrong"):
        cpu_forward.measure("case", 1, False, 3, skipped)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("runs", ["1", "2"])
def test_a_run_of_any_length_writes_its_file_after_every_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: str
) -> None:
    monkeypatch.setattr(cpu_forward, "DOCUMENTS", 6)
    monkeypatch.setattr(cpu_forward, "LENGTH", 18)
    monkeypatch.setattr(cpu_forward, "PEERS", {})
    path, kept = tmp_path / "cpu.json", []

    def memory() -> dict[str, float]:
        kept.append(json.loads(path.read_text(encoding="utf-8")))
        return {"small": 1.0}

    monkeypatch.setattr(cpu_forward, "memory", memory)
    cpu_forward.main(["--runs", runs, "--json", str(path)])
    held = json.loads(path.read_text(encoding="utf-8"))
    assert len(kept[0]["cases"]) == len(held["cases"]) == 4
    row = held["cases"]["1 query, ragged"]["ours FP32"]
    assert row["median_ms"] > 0
    assert (row["iqr_ms"] == 0) == (runs == "1"), "one round has no spread"
    assert held["peak_mb_beyond_inputs_and_results"] == {"small": 1.0}
    assert "ours FP32" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        cpu_forward.main(["--runs", "0"])
    assert "--runs: got 0, need 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cpu_forward", "parity"])
def test_a_bar_on_a_terminal_only(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = importlib.import_module(name)
    monkeypatch.setattr(cpu_forward, "DOCUMENTS", 6)
    monkeypatch.setattr(cpu_forward, "LENGTH", 18)
    monkeypatch.setattr(cpu_forward, "PEERS", {})
    monkeypatch.setattr(cpu_forward, "memory", dict)
    command = [
        "--json",
        str(tmp_path / "held.json"),
        *(["--runs", "2"] if name == "cpu_forward" else ["--smoke", "--steps", "2"]),
    ]
    shown = {}
    for words, stream in (((), Terminal()), (("--quiet",), Terminal()), ((), io.StringIO())):
        monkeypatch.setattr(sys, "stderr", stream)
        script.main([*command, *words])
        shown[(words, stream.isatty())] = stream.getvalue()
    assert "%|" in shown[(), True]
    assert ("round" if name == "cpu_forward" else "step") in shown[(), True]
    assert not shown[("--quiet",), True]
    assert not shown[(), False]
