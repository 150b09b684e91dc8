"""The scripts behind how many documents bounds leave, at tiny sizes: what they count is what `exact_topk` scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from maxsim_kernels import quantize_int8
from maxsim_kernels.search import exact_topk
from measure import clustered
from searches import stages, survivors


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for script in (clustered, survivors, stages):
        monkeypatch.setattr(script, "BLOCK", 96)
    for script in (survivors, stages):
        monkeypatch.setattr(script, "DEPTHS", (3,))
    monkeypatch.setattr(survivors, "SIZES", (50, 150))


@pytest.mark.parametrize("growth", clustered.GROWTH)
def test_survivors_are_those_of_a_search(small: None, growth: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    given = ["--json", str(found), "--documents", "200", "--queries", "4", "--growth", growth]
    survivors.main(given)
    rows = json.loads(found.read_text())["growth"][growth]["rows"]
    assert [row["documents"] for row in rows] == [50, 150, 200]
    corpus = clustered.Clustered(growth, survivors.DIM, survivors.TOKENS)
    documents = clustered.packed(torch.cat([corpus.block(number) for number in range(3)])[:200])
    queries = corpus.queries(4, survivors.QUERY_TOKENS)
    for kind in survivors.KINDS:
        codes = quantize_int8(documents, kind)
        stats = exact_topk(queries, documents, 3, codes=codes, most_rescored=1.0)[2]
        row = rows[-1]["codes"][kind]["k=3"]
        assert row["mean"] == pytest.approx(stats.survivors.double().mean().item(), abs=0.3)
        assert 3 <= row["in_order"] <= row["mean"] <= row["most"]
    survivors.main([*given, "--table"])
    assert f"| 200 {growth} |" in capsys.readouterr().out


def test_stages_count_survivors_and_bytes(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    stages.main(["--json", str(found), "--clustered", "200", "--queries", "4"])
    made = json.loads(found.read_text())["corpora"]["clustered, 200"]
    assert (made["documents"], made["tokens"], made["dim"]) == (200, 3200, 128)
    rows = made["k=3"]
    assert rows["int8"]["bytes_one"] == 3200 * 128 + rows["int8"]["survivors"] * 16 * 128 * 4
    for name, row in rows.items():
        assert 3 <= rows["int8"]["survivors"] <= row["survivors"] <= row["most"] <= 200, name
        assert row["bytes_one"] <= row["bytes_all"]
    # More bits leave fewer, and so does a bound that looks at each token.
    assert rows["4 bits, by token"]["survivors"] <= rows["4 bits, by document"]["survivors"]
    assert rows["4 bits, by token"]["survivors"] < rows["1 bits, by token"]["survivors"]
    assert rows["4 bits, by token"]["bytes_one"] >= 3200 * (64 + 4)
    stages.main(["--json", str(found), "--table"])
    assert "| clustered, 200, k = 3 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        stages.main(["--json", str(found)])


def test_a_smaller_corpus_is_the_beginning_of_a_larger_one() -> None:
    for growth in clustered.GROWTH:
        one, other = (clustered.Clustered(growth, 8, 4) for _ in range(2))
        other.block(3)
        assert torch.equal(one.block(1), other.block(1))
        assert torch.allclose(one.block(0).norm(dim=2), torch.ones(clustered.BLOCK, 4))
        assert not torch.equal(one.block(0), one.block(1))
