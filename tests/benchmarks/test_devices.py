"""alone/devices.py: the whole of it with a CPU in place of the GPU, and what it says of a difference that no tie explains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from alone import devices, runs
from maxsim_eval.scoring.paths import our_paths
from maxsim_kernels import pack
from measure import names
from stored_cases import filled

WORDS = str(__doc__).split()


@pytest.fixture(params=["beir/scifact", "local/notes"])
def texts(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A BEIR folder of 20 short texts and three queries."""
    folder = tmp_path / request.param
    (folder / "qrels").mkdir(parents=True)
    for name, count, length in (("corpus", 20, 7), ("queries", 3, 4)):
        rows = [
            {"_id": f"{name[0]}{n}", "text": " ".join(WORDS[(3 * n + i * i) % len(WORDS)] for i in range(length))}
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    judged = "".join(f"q{n}\tc{n}\t1\n" for n in range(3))
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    return folder / "corpus.jsonl"


@pytest.mark.slow
def test_every_path_is_compared(texts: Path, tmp_path: Path) -> None:
    found = devices.measure(texts, "lexical", tmp_path, ("cpu", "cpu"))
    control = found["paths"].pop(devices.CONTROL)
    assert set(control["metrics"][0]) == set(found["paths"]["fp32"]["metrics"][0])
    assert control["parity"]["max_rel_error"] > 3 * found["paths"]["fp16"]["parity"]["max_rel_error"]
    assert any(line.startswith("max rel error: ") for line in control["gate"]), "the gate catches it"
    assert found["gate"] == found["paths"]["fp32"]["gate"] == found["paths"]["fp16"]["gate"] == []
    assert list(found["paths"]) == list(our_paths())
    for path in found["paths"].values():
        assert path["counts"] == {names.SAME: 3, names.TIES: 0, names.OTHER: 0}
        assert (path["queries"], path["same_top_10"], path["moved"], path["largest_difference"]) == (3, 3, 0, 0.0)
        assert path["metrics"][0] == path["metrics"][1]
    assert len(found["devices"]) == len(found["seconds"]) == 2
    assert set(found["families"]) >= {"operator", "evaluation"}


def test_fp8_may_be_off_by_more() -> None:
    assert devices.bounds("fp16", 128, {"q": 10.0}) == {"q": 10 * runs.OPERATOR_BOUND}
    assert devices.bounds("fp8", 384, {"q": 10.0}) == {"q": 10 * 12 * 17 * 2.0**-15}


def test_each_query_is_held_to_its_own_bound(tmp_path: Path) -> None:
    """Queries of the lexical encoder are not of unit tokens: their norms are inverse document frequencies."""
    for role, rows in (("queries", [[[3.0, 4.0], [0.0, 2.0]], [[0.5, 0.0]]]), ("documents", [[[0.0, 0.5]], [[0.0, 0.25]]])):
        filled(tmp_path / f"lexical-{role}-1", pack([torch.tensor(row) for row in rows]), ids=["q0", "q1"])
    assert devices.norms(tmp_path) == {"q0": 3.5, "q1": 0.25}
    one, other = ({query: [("a", score), ("b", 1.0)] for query in ("q0", "q1")} for score in (2.0, 2.5))
    assert runs.compared(one, other, {"q0": 0.3, "q1": 0.2}).counts == {names.SAME: 1, names.TIES: 0, names.OTHER: 1}


@pytest.mark.parametrize(("unexplained", "dataset", "entry"), [(0, "scifact", "lexical"), (2, "notes", "notes, lexical")])
def test_what_no_tie_explains_is_the_exit_code(
    unexplained: int,
    dataset: str,
    entry: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = {names.SAME: 3 - unexplained, names.TIES: 0, names.OTHER: unexplained}
    path: dict[str, Any] = {
        "counts": counts,
        "first": ["q1: why"][:unexplained],
        "metrics": [{"nDCG@10": 0.5}, {"nDCG@10": 0.75}],
        "gate": ["R@10: 0.1, needed 0.2"],
    }
    monkeypatch.setattr(devices, "measure", lambda *_: {"task": {"dataset": dataset}, "paths": {"fp16": path}})
    out = tmp_path / "devices.json"
    out.write_text('{"schema": "maxsim-eval/devices/1", "encoders": {"other": {"paths": {}}}}')
    assert devices.main(["--texts", "corpus.jsonl", "--json", str(out)]) == (unexplained > 0)
    held = json.loads(out.read_text())["encoders"]
    assert held["other"] == {"paths": {}}, "an entry of another call stays"
    assert held[entry]["paths"]["fp16"]["counts"] == counts
    said = capsys.readouterr().out
    assert f"{unexplained} not explained; nDCG@10 0.5000 and 0.7500\n" in said
    assert said.endswith("  gate: R@10: 0.1, needed 0.2\n")
    assert ("q1: why" in said) == bool(unexplained)
