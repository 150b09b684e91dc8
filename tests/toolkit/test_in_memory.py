"""`evaluate_embeddings`, and what a Result shows of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import maxsim_eval
from maxsim_eval import evaluate, evaluate_embeddings
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.report.comparing import read_input
from maxsim_eval.report.result_json import read_result
from maxsim_eval.types import PathResult, Result
from maxsim_kernels import Packed, maxsim_reference

WIDTH = 24
QRELS = {"a": {"d3": 1}, "b": {"d7": 2, "d8": 0}, "z": {"d1": 1}}


def unit(count: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(values, dim=1).to(dtype)


def made(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    documents = [unit(1 + n % 5, n, dtype) for n in range(20)]
    return [documents[n][:2].clone() for n in (3, 7, 11)], documents


def packed(rows: list[torch.Tensor]) -> Packed:
    return Packed(torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0))


IDS = {"query_ids": ["a", "b", "c"], "document_ids": [f"d{n}" for n in range(20)], "quiet": True, "k": 10}


def test_what_lies_between_a_view_s_documents_is_nobody_s(tmp_path: Path) -> None:
    queries, documents = made()
    padded = torch.full((len(documents), 7, WIDTH), torch.nan)
    for row, document in zip(padded, documents, strict=True):
        row[: len(document)] = document
    lengths = torch.tensor([len(document) for document in documents])
    view = Packed.view(padded.view(-1, WIDTH), torch.arange(len(documents)) * 7, lengths)
    result = evaluate_embeddings(queries, view, QRELS, out_dir=tmp_path, **IDS)
    assert result.paths["fp32"].metrics["nDCG@10"] == 1.0
    view.values[0, 0] = torch.nan
    with pytest.raises(DataError, match="documents: hold a value that is not finite"):
        evaluate_embeddings(queries, view, QRELS, out_dir=tmp_path, **IDS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_lists_and_packed_give_the_scores_of_the_operator(dtype: torch.dtype, tmp_path: Path) -> None:
    queries, documents = made(dtype)
    result = evaluate_embeddings(queries, documents, QRELS, out_dir=tmp_path / "a", **IDS)
    same = evaluate_embeddings(packed(queries), packed(documents), QRELS, out_dir=tmp_path / "b", **IDS)
    assert result.task["queries"] == 2, "those that are judged"
    assert {name: path.metrics for name, path in result.paths.items()} == {
        name: path.metrics for name, path in same.paths.items()
    }
    assert result.paths["fp32"].metrics["nDCG@10"] == 1.0
    runs = [(tmp_path / part / "runs" / "fp32.trec").read_text() for part in "ab"]
    assert runs[0] == runs[1]
    scores = maxsim_reference(packed(queries), packed(documents))
    assert isinstance(scores, torch.Tensor)
    for line in runs[0].splitlines():
        query, _, document, _, score, _ = line.split()
        assert np.float32(score) == scores["abc".index(query), int(document[1:])].numpy()


def test_a_dense_tensor_and_numbers_as_ids() -> None:
    documents = torch.stack([unit(4, n) for n in range(6)])
    result = evaluate_embeddings(documents[:3, :2], documents, {"2": {"2": 1}}, paths=["fp32"], quiet=True, k=3)
    assert result.paths["fp32"].metrics["nDCG@1"] == 1.0


def test_without_judgements_there_is_parity_alone(tmp_path: Path) -> None:
    queries, documents = made()
    result = evaluate_embeddings(queries, documents, out_dir=tmp_path, **IDS)
    assert result.task["queries"] == 3
    assert all(path.metrics == {} for path in result.paths.values())
    parity = result.paths["int8"].parity
    assert parity is not None
    assert parity["spearman"]["mean"] > 0.99
    assert read_result(tmp_path / "result.json") == result
    assert "<table" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"queries": torch.ones(3, WIDTH)}, UsageError, r"queries: got \[3, 24\], need a list of tensors"),
        ({"queries": []}, UsageError, "queries: got an empty list, need a list of tensors"),
        ({"queries": [np.ones((2, WIDTH))]}, UsageError, "queries: got a list with ndarray in it, need a list of tensors"),
        ({"queries": [torch.ones(WIDTH)]}, UsageError, r"queries: got a list with a tensor \[24\] in it"),
        ({"queries": [torch.ones(2, 5)]}, UsageError, "queries: d = 5, documents: d = 24"),
        (
            {"documents": [torch.ones(2, WIDTH), torch.ones(2, WIDTH).half()]},
            UsageError,
            "documents: tensors of 2 widths, dtypes",
        ),
        ({"documents": torch.ones(2, 2, WIDTH, dtype=torch.int8)}, UsageError, "documents: got torch.int8"),
        ({"documents": [torch.full((1, WIDTH), torch.nan)]}, DataError, "documents: hold a value that is not finite"),
        ({"query_ids": ["a"]}, UsageError, "query_ids: got 1, need one for each of 3"),
        ({"query_ids": ["a", "a", "b"]}, UsageError, "query_ids: need texts, each once"),
        ({"document_ids": list(range(20))}, UsageError, "document_ids: need texts"),
        ({"qrels": {"nobody": {"d1": 1}}}, DataError, "1 judgements of 1 queries, none of which is in query_ids"),
        ({"qrels": {"a": {"nothing": 1}}}, DataError, "none of the 1 judged documents is in document_ids"),
        ({"qrels": {"a": {"d3": 0}}}, DataError, "none of the 1 judged queries has a relevant document"),
        ({"qrels": {"a": {"d3": None}}}, DataError, "relevance None, need a whole number"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], error: type[Exception], text: str) -> None:
    queries, documents = made()
    with pytest.raises(error, match=text):
        evaluate_embeddings(**{"queries": queries, "documents": documents, "qrels": QRELS, **IDS, **change})


def test_misfits_of_judgements_are_said_once() -> None:
    queries, documents = made()
    qrels = {**QRELS, "a": {"d3": 1, "gone": 1}, "c": {"d1": 0}}
    result = evaluate_embeddings(queries, documents, qrels, **{**IDS, "k": 20})
    assert [line.partition(";")[0] for line in result.task["warnings"]] == [
        "qrels: 1 judgements of 1 queries that query_ids lacks were left out, first 'z'",
        "qrels: 1 judgements name documents that document_ids lacks, first 'gone'",
        "qrels: 1 of 3 judged queries have no relevant document, first 'c'",
    ]


def test_a_warning_points_at_the_caller() -> None:
    queries, documents = made()
    with pytest.warns(UserWarning, match="k was clamped to the 20 documents") as said:
        evaluate_embeddings(queries, documents, QRELS, **{**IDS, "k": 21})
    assert [one.filename for one in said] == [__file__]


# What a Result shows of itself ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result() -> Result:
    queries, documents = made()
    return evaluate_embeddings(queries, documents, QRELS, **IDS)


def test_its_repr_is_a_line(result: Result) -> None:
    assert repr(result).startswith(
        "Result(memory/embeddings, embeddings, k=10: fp32 nDCG@10 1.0000 Recall@100 1.0000 Spearman - "
    )
    assert len(repr(result)) < 300


def test_a_notebook_shows_a_table_without_markup_of_others(result: Result) -> None:
    names = {"<script>alert(1)</script>": result.paths["fp32"]}
    shown = Result({"source": "<b>", "dataset": "&"}, {"name": "<i>"}, 3, names, {}, [])._repr_html_()
    assert "<script>" not in shown
    assert "&lt;b&gt;/&amp;, &lt;i&gt;, top 3" in shown
    assert result._repr_html_().count("<tr>") == 1 + len(result.paths)


def test_to_dataframe(result: Result) -> None:
    pytest.importorskip("pandas")
    frame = result.to_dataframe()
    assert list(frame.columns) == ["path", "metric", "value", "change", "low", "high", "p_adjusted", "verdict"]
    assert len(frame) == sum(len(path.metrics) for path in result.paths.values())
    row = frame[(frame.path == "int8") & (frame.metric == "nDCG@10")].iloc[0]
    assert row.value == result.paths["int8"].metrics["nDCG@10"]
    assert row.change == result.paths["int8"].parity["delta"]["nDCG@10"]  # type: ignore[index]
    empty = Result({}, {}, 1, {"x": PathResult({}, {}, {})}, {}, []).to_dataframe()
    assert len(empty) == 0


def test_report_writes_the_files(result: Result, tmp_path: Path) -> None:
    page = result.report(tmp_path / "x")
    assert page == tmp_path / "x" / "report.html"
    assert {path.name for path in page.parent.iterdir()} >= {"report.html", "report.md", "result.json", "metrics.csv"}
    assert json.loads((page.parent / "result.json").read_text())["k"] == 10


def test_a_report_stands_beside_its_own_runs_or_none(tmp_path: Path) -> None:
    queries, documents = made()
    own, other = (evaluate_embeddings(queries, documents, QRELS, **{**IDS, "k": k}, out_dir=tmp_path / str(k)) for k in (5, 6))
    with pytest.raises(UsageError, match=r"6: holds runs of another evaluation, .* choose another folder"):
        own.report(tmp_path / "6")
    assert read_result(tmp_path / "6") == other
    for folder, run in (("new", None), ("new", None), ("5", "runs/fp32.trec")):
        own.report(tmp_path / folder)
        assert read_result(tmp_path / folder).paths["fp32"].run == run
    read_result(tmp_path / "new").report(tmp_path / "5")
    assert read_result(tmp_path / "5") == own
    with pytest.raises(DataError, match="has no run file"):
        read_input(tmp_path / "new")


def test_the_package_says_what_it_has() -> None:
    assert set(maxsim_eval.__all__) <= set(dir(maxsim_eval))
    assert maxsim_eval.__version__.count(".") == 2
    assert maxsim_eval.evaluate is evaluate
    for name in maxsim_eval.__all__:
        assert getattr(maxsim_eval, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        maxsim_eval.nothing  # noqa: B018
