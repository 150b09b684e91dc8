"""Results of several datasets as one table: averages as BEIR counts them, marks, LaTeX that a compiler takes."""

from __future__ import annotations

import math

import pytest

from maxsim_eval.errors import UsageError
from maxsim_eval.report.averages import Results
from maxsim_eval.report.result_json import from_json, to_document
from maxsim_eval.types import PathResult, Result


def result(fp32: float, int8: float | None, p: float = 1.0, source: str = "beir", reference: str | None = "fp32") -> Result:
    parity = {"delta": {}, "statistics": {"nDCG@10": {"p_adjusted": p}}}
    paths = {"fp32": PathResult({"nDCG@10": fp32, "R@10": 0.5}, {}, {})}
    if int8 is not None:
        paths["int8_x"] = PathResult({"nDCG@10": int8, "R@10": 0.5}, {}, {}, parity=parity)
    return Result({"source": source, "dataset": "x"}, {"name": "e"}, 10, paths, {}, [], reference)


@pytest.fixture
def results() -> Results:
    return Results(
        {
            "scifact": result(0.7, 0.6999, p=0.01),
            "cqadupstack/android": result(0.3, 0.4),
            "cqadupstack/english": result(0.5, 0.4),
            "trec_covid&x": result(0.8, 0.9),
        }
    )


def test_the_parts_of_a_collection_count_as_one(results: Results) -> None:
    found = results.values()
    assert list(found["fp32"]) == ["scifact", "cqadupstack", "trec_covid&x", "Avg"]
    assert found["fp32"]["cqadupstack"] == pytest.approx(0.4)
    assert found["fp32"]["Avg"] == pytest.approx((0.7 + 0.4 + 0.8) / 3)
    assert found["int8_x"]["Avg"] == pytest.approx((0.6999 + 0.4 + 0.9) / 3)


def test_ids_with_slashes_are_no_collection() -> None:
    ids = {"beir/scifact/test": result(0.7, 0.6, p=0.01, source="irds"), "beir/nfcorpus/test": result(0.3, 0.2, source="irds")}
    table = Results(ids).table()
    assert table.columns == ["path", *ids, "Avg"]
    assert table.rows == [["fp32", "0.7000", "0.3000", "0.5000"], ["int8_x", "0.6000*", "0.2000", "0.4000"]]


def test_no_mark_without_a_reference(results: Results) -> None:
    assert results.mark == "* differs from fp32 (p < 0.05, paired randomisation test, Holm-corrected within a dataset)"
    assert results.to_latex().splitlines()[0] == rf"\begin{{tabular}}{{lrrrr}}  % nDCG@10; {results.mark}"
    unmarked = Results({"a": result(0.7, 0.6, reference=None), "b": result(0.5, 0.5, reference=None)})
    assert unmarked.mark is None
    assert unmarked.to_latex().splitlines()[0] == r"\begin{tabular}{lrrr}  % nDCG@10"


def test_no_average_of_what_is_not_complete() -> None:
    found = Results({"a": result(0.7, 0.6), "b": result(0.5, None), "c": result(math.nan, 0.1)}).values()
    assert found == {
        "fp32": {"a": 0.7, "b": 0.5, "c": None, "Avg": None},
        "int8_x": {"a": 0.6, "b": None, "c": 0.1, "Avg": None},
    }


def test_the_table(results: Results) -> None:
    table = results.table()
    assert table.columns == ["path", "scifact", "cqadupstack", "trec_covid&x", "Avg"]
    assert table.rows == [["fp32", "0.7000", "0.4000", "0.8000", "0.6333"], ["int8_x", "0.6999*", "0.4000", "0.9000", "0.6666"]]


def test_a_metric_that_no_result_has(results: Results) -> None:
    with pytest.raises(UsageError, match=r"no result holds 'MAP@100', they hold: nDCG@10, R@10"):
        Results(results.results, "MAP@100")


def test_latex(results: Results) -> None:
    lines = results.to_latex().splitlines()
    assert lines[0].startswith(r"\begin{tabular}{lrrrr}")
    assert lines[1:3] == [r"\toprule", r"path & scifact & cqadupstack & trec\_covid\&x & Avg \\"]
    assert lines[4] == r"fp32 & \textbf{0.7000} & \textbf{0.4000} & 0.8000 & 0.6333 \\"
    assert lines[5] == r"int8\_x & 0.6999$^{*}$ & \textbf{0.4000} & \textbf{0.9000} & \textbf{0.6666} \\"
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    rows = [line for line in lines if line.endswith(r"\\")]
    assert {line.replace(r"\&", "").count("&") for line in rows} == {4}


def test_shown_in_python(results: Results) -> None:
    assert "int8_x: scifact 0.6999*, cqadupstack 0.4000" in repr(results)
    assert "<th>trec_covid&amp;x</th>" in results._repr_html_()
    assert results["scifact"].paths["fp32"].metrics["nDCG@10"] == 0.7
    assert len(results) == 4
    frame = pytest.importorskip("pandas") and results.to_dataframe()
    assert len(frame[frame["dataset"] == "scifact"]) == 4


def test_json_holds_whole_results(results: Results) -> None:
    found = results.to_json(to_document)
    assert found["schema"] == "maxsim-eval/datasets/1"
    assert found["averages"]["fp32"]["scifact"] == 0.7
    assert found["results"]["scifact"]["schema"] == "maxsim-eval/result/1"
    assert from_json  # each of them is what a result.json holds
