"""`compare`: Results and plain runs side by side."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from maxsim_eval.comparing import Comparison, compare_inputs, read_input, render_comparison
from maxsim_eval.errors import DataError, UnknownNameError, UsageError
from maxsim_eval.metrics import evaluate_run, means
from maxsim_eval.report import to_json
from maxsim_eval.runs import write_trec_run
from maxsim_eval.types import PathResult, Result, Run

QRELS = {"q1": {"a": 1}, "q2": {"b": 1, "c": 1}}
RUNS = {
    "fp32": Run("fp32", {"q1": [("a", 2.0), ("b", 1.0)], "q2": [("b", 2.0), ("c", 1.0)]}),
    "int8": Run("int8", {"q1": [("b", 2.0), ("a", 1.0)], "q2": [("b", 2.0), ("c", 1.0)]}),
}


def write_result(folder: Path, qrels: dict[str, dict[str, int]] = QRELS, dataset: str = "tiny") -> Path:
    paths = {}
    for name, run in RUNS.items():
        per_query = evaluate_run(run, qrels)
        write_trec_run(folder / "runs" / f"{name}.trec", run)
        paths[name] = PathResult(means(per_query), per_query, {}, run=f"runs/{name}.trec")
    task = {"source": "local", "dataset": dataset, "split": "test", "queries": 2, "documents": 3}
    result = Result(task, {"name": "lexical"}, 2, paths, {}, [])
    (folder / "result.json").write_text(to_json(result))
    return folder / "result.json"


@pytest.fixture
def result_file(tmp_path: Path) -> Path:
    (tmp_path / "one").mkdir()
    return write_result(tmp_path / "one")


@pytest.fixture
def qrels_file(tmp_path: Path) -> Path:
    path = tmp_path / "qrels"
    path.write_text("".join(f"{q} 0 {d} {r}\n" for q, row in QRELS.items() for d, r in row.items()))
    return path


@pytest.fixture
def plain_run(tmp_path: Path) -> Path:
    path = tmp_path / "bm25.trec"
    path.write_text("q1 Q0 a 1 3.5 bm25\nq1 Q0 c 2 2.5 bm25\n")
    return path


def console_text(comparison: Comparison) -> str:
    stream = io.StringIO()
    render_comparison(comparison, Console(file=stream, width=150, color_system=None))
    return stream.getvalue()


def test_two_paths_of_a_result(result_file: Path) -> None:
    comparison = compare_inputs([result_file, f"{result_file}:int8"])
    first, second = comparison.inputs
    assert (first.label, second.label) == ("one:fp32", "one:int8")
    assert first.parity is None
    assert second.parity is not None
    assert second.parity["reference"] == "one:fp32"
    assert second.parity["delta"]["MRR@10"] == pytest.approx(-0.25)
    assert second.parity["delta_per_query"]["MRR@10"]["changed"] == 1
    assert second.parity["spearman"]["mean"] is None
    assert second.parity["identical_order"] == {"k": 2, "identical": 1, "queries": 2, "fraction": 0.5}
    text = console_text(comparison)
    assert "0.7500 (-0.2500)" in text
    assert "one:int8: ranking differs: same top 2 in 1 of 2 queries" in text


def test_json_form(result_file: Path, qrels_file: Path) -> None:
    comparison = compare_inputs([result_file.parent, f"{result_file}:int8"], qrels_file, metrics=["AP", "R@2"])
    document = json.loads(comparison.to_json())
    assert document["schema"] == "maxsim-eval/comparison/1"
    assert document["reference"] == "one:fp32"
    assert document["queries"] == 2
    assert document["inputs"]["one:int8"]["metrics"] == {"AP": 0.75, "R@2": 1.0}
    assert document["inputs"]["one:int8"]["per_query"]["AP"] == {"q1": 0.5, "q2": 1.0}
    assert "parity" not in document["inputs"]["one:fp32"]


def test_runs_of_other_tools(result_file: Path, plain_run: Path, qrels_file: Path) -> None:
    comparison = compare_inputs([result_file, plain_run, plain_run], qrels_file)
    assert [entry.label for entry in comparison.inputs] == ["one:fp32", "bm25", "bm25 (2)"]
    assert comparison.inputs[1].metrics["MRR@10"] == 0.5  # q2 has no results: 0, not left out
    assert sum("no results for 1 of 2 judged queries" in line for line in comparison.warnings) == 2
    assert "warning: " in console_text(comparison)
    assert comparison.inputs[1].parity == comparison.inputs[2].parity


def test_plain_runs_need_judgements(result_file: Path, plain_run: Path) -> None:
    with pytest.raises(UsageError, match=r"bm25\.trec is a plain run .* --qrels"):
        compare_inputs([result_file, plain_run])


def test_depth(result_file: Path) -> None:
    comparison = compare_inputs([result_file, f"{result_file}:int8"], k=1)
    parity = comparison.inputs[1].parity
    assert comparison.depth == 1
    assert parity is not None
    assert parity["identical_order"]["k"] == 1


def test_results_over_different_queries_are_not_compared(result_file: Path, qrels_file: Path, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    other = write_result(tmp_path / "two", {"q1": {"a": 1}}, dataset="other")
    with pytest.raises(DataError, match=r"over 1 judged queries, .* over 2, and 1 are the same"):
        compare_inputs([result_file, other])
    comparison = compare_inputs([result_file, other], qrels_file)
    assert comparison.warnings == ("the results are of different task sets: other test, tiny test",)


def test_results_of_different_subsets_are_said_to_be(result_file: Path, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    other = write_result(tmp_path / "two")
    assert compare_inputs([result_file, other]).warnings == ()
    document = json.loads(other.read_text())
    counts = {"limit": None, "before": 2, "after": 2}
    document["task"]["limits"] = {
        "seed": 1,
        "queries": counts,
        "documents": {"limit": 3, "before": 9, "after": 3, "judged": 3},
        "judged_pairs": counts,
        "ids_sha256": "ab" * 32,
    }
    other.write_text(json.dumps(document))
    (said,) = compare_inputs([result_file, other]).warnings
    assert said == (
        "the results are of different task sets: tiny test, "
        "tiny test, 2 of 2 queries and 3 of 9 documents (seed 1, ids abababababab)"
    )
    assert compare_inputs([other, f"{other}:int8"]).warnings == ()


def test_metrics_of_unknown_name_are_kept(result_file: Path) -> None:
    document = json.loads(result_file.read_text())
    for path in document["paths"].values():
        path["metrics"]["MyMetric"] = None
        path["metrics"]["R@10"] = path["metrics"].pop("Recall@10")
    result_file.write_text(json.dumps(document))
    comparison = compare_inputs([result_file, result_file])
    assert {"MyMetric", "Recall@10"} <= set(comparison.inputs[0].metrics)
    assert json.loads(comparison.to_json())["inputs"]["one:fp32 (2)"]["parity"]["delta"]["MyMetric"] is None
    assert "MyMetric" in console_text(comparison)


def test_a_name_with_a_colon_is_a_file_first(tmp_path: Path) -> None:
    path = tmp_path / "run:int8"
    path.write_text("q1 Q0 a 1 3.5 bm25\n")
    assert read_input(path).run.name == "bm25"


def test_paths_with_colons_can_be_selected(result_file: Path) -> None:
    document = json.loads(result_file.read_text())
    document["paths"]["python:mine:score"] = document["paths"]["int8"]
    result_file.write_text(json.dumps(document))
    assert read_input(f"{result_file}:python:mine:score").label == "one:python:mine:score"


def test_refused_inputs(result_file: Path, plain_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="got 1 input, need two"):
        compare_inputs([result_file])
    with pytest.raises(UsageError, match="k: got 0"):
        compare_inputs([result_file, result_file], k=0)
    with pytest.raises(UnknownNameError, match=r"'int9'\. Did you mean 'int8'"):
        read_input(f"{result_file}:int9")
    with pytest.raises(UsageError, match="which has no paths"):
        read_input(f"{plain_run}:int8")
    with pytest.raises(DataError, match=r"absent\.json: cannot be read"):
        read_input(tmp_path / "absent.json")
    with pytest.raises(DataError, match=r"result\.json: cannot be read"):
        read_input(tmp_path)
    (tmp_path / "empty").write_text("")
    with pytest.raises(DataError, match="holds no result line"):
        read_input(tmp_path / "empty")


def test_results_without_usable_run_files(result_file: Path, tmp_path: Path) -> None:
    document = json.loads(result_file.read_text())
    for run, message in (
        (None, "has no run file"),
        ("../../bm25.trec", "need a file beside"),
        ("/etc/passwd", "need a file beside"),
    ):
        document["paths"]["fp32"]["run"] = run
        result_file.write_text(json.dumps(document))
        with pytest.raises(DataError, match=message):
            read_input(result_file)
    document["paths"]["fp32"]["run"] = "runs/gone.trec"
    result_file.write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"gone\.trec: cannot be read"):
        read_input(result_file)
    document["reference"] = None
    result_file.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"choose one: .*:fp32"):
        read_input(result_file)


def test_a_result_without_per_query_values_needs_judgements(result_file: Path, qrels_file: Path) -> None:
    document = json.loads(result_file.read_text())
    for path in document["paths"].values():
        del path["per_query"]
    result_file.write_text(json.dumps(document))
    with pytest.raises(DataError, match="--qrels"):
        compare_inputs([result_file, f"{result_file}:int8"])
    assert compare_inputs([result_file, f"{result_file}:int8"], qrels_file).queries == 2
