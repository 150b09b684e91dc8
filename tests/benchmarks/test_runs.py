"""alone/runs.py: two paths of one evaluation on a CPU, made-up ties, and what no tie explains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from alone import runs
from maxsim_eval import evaluate_embeddings
from measure import names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three paths; documents repeat, so that there are ties."""
    made = tmp_path_factory.mktemp("runs")
    generator = torch.Generator().manual_seed(0)

    def unit(*shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1)

    documents = [unit(length, 640) for length in torch.randint(3, 40, (60,), generator=generator).tolist()]
    queries = unit(8, 12, 640)
    evaluate_embeddings(
        queries,
        documents + documents[:20],
        {str(n): {str(n): 1} for n in range(8)},
        paths=["fp32", "fused-fp32", "int8"],
        k=30,
        out_dir=made,
    )
    return made / "runs"


def called(*words: str | Path) -> int:
    return runs.main([str(word) for word in words])


def test_two_paths_differ_by_ties_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert called(folder / "fp32.trec", folder / "fused-fp32.trec", "--query-tokens", "12", "--json", out) == 0
    found = json.loads(out.read_text())
    assert found["queries"] == 8 == found["counts"][names.SAME] + found["counts"][names.TIES]
    assert 0 < found["largest_difference"] <= 2 * found["bound"]
    assert set(found["families"]) >= {"operator", "evaluation"}
    assert capsys.readouterr().out.startswith("8 queries: ")


def test_another_number_format_is_no_tie(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(folder / "fp32.trec", folder / "int8.trec", "--query-tokens", "12") == 1
    assert "apart, 4.8e-05 allowed" in capsys.readouterr().out
    assert called(folder / "fp32.trec", folder / "int8.trec", "--bound", "1") == 0, "everything is a tie"


@pytest.mark.parametrize(
    ("other", "counted"),
    [
        ([("a", 3.0), ("b", 2.0), ("c", 1.0)], names.SAME),
        ([("a", 3.0), ("c", 2.0), ("b", 2.0)], names.OTHER),  # c's score is another
        ([("b", 3.0), ("a", 3.0), ("c", 1.0)], names.OTHER),
        ([("a", 3.0), ("b", 2.0)], names.OTHER),
        ([("a", 3.0), ("b", 2.0), ("d", 1.001)], names.TIES),  # at the cut-off
        ([("a", 3.0), ("d", 2.5), ("b", 2.0)], names.OTHER),
        ([("b", 2.0), ("a", 3.0), ("c", 1.0)], names.OTHER),  # order against its own scores
    ],
)
def test_what_ties_explain(other: runs.Ranking, counted: str) -> None:
    found = runs.compared({"q": [("a", 3.0), ("b", 2.0), ("c", 1.0)]}, {"q": other}, 0.001)
    assert found.counts[counted] == 1


def test_near_scores_may_change_places_within_four_bounds() -> None:
    one = [("a", 2.0), ("b", 1.997), ("c", 1.0)]
    assert runs.compared({"q": one}, {"q": [("b", 1.9985), ("a", 1.9984), ("c", 1.0)]}, 0.001).counts[names.TIES] == 1
    found = runs.compared({"q": one}, {"q": [("b", 1.9985), ("a", 1.9984), ("c", 1.0)]}, 0.0005)
    assert found.counts[names.OTHER] == 1
    assert found.moved == 2
    assert found.first[0].startswith("q: ")


def test_a_missing_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(tmp_path / "a.trec", tmp_path / "b.trec") == 2
    assert "a.trec" in capsys.readouterr().err
