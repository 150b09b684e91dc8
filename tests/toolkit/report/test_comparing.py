"""`compare`: Results and plain runs side by side."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from maxsim_eval.comparison.metrics import evaluate_run, means
from maxsim_eval.data.trec import write_trec_run
from maxsim_eval.errors import DataError, UnknownNameError, UsageError
from maxsim_eval.report.comparing import Comparison, compare_inputs, read_input, render_comparison, write_comparison
from maxsim_eval.report.result_json import from_json, to_json
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
    render_comparison(comparison, Console(file=stream, width=150, color_system=None), verbose=True)
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
    assert "one:int8: order of the top 2 differs from one:fp32 in 1 of 2 queries" in text


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


def test_no_cutoff_is_beyond_the_depth_of_the_runs(many: tuple[list[Path], Path]) -> None:
    comparison = compare_inputs(*many, metrics=["RR@10"], k=100)
    parity = comparison.inputs[1].parity
    assert comparison.depth == 3, "of the longest ranking"
    assert parity is not None
    assert parity["overlap"] == {"@1": pytest.approx(0.8), "@5": None, "@10": None, "@20": None, "@50": None, "@100": None}
    assert (parity["rank_shifts"]["k"], parity["identical_order"]["k"]) == (3, 3)


def test_runs_of_different_depths_are_said_to_be(many: tuple[list[Path], Path], tmp_path: Path) -> None:
    files, qrels = many
    assert compare_inputs(files, qrels).warnings == ()
    short = tmp_path / "short.trec"
    write_trec_run(short, Run("short", {f"q{number}": [("a", 2.0), ("c", 1.0)] for number in range(30)}, ordered=False))
    (said,) = compare_inputs([files[0], short], qrels).warnings
    assert f"different depths ({files[0]} 3, {short} 2)" in said
    assert compare_inputs([files[0], short], qrels, k=2).warnings == ()


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


def test_runs_of_another_set_are_not_equivalent(result_file: Path, qrels_file: Path, tmp_path: Path) -> None:
    aliens = [tmp_path / "x.trec", tmp_path / "y.trec"]
    for path in aliens:
        path.write_text(f"x1 Q0 a 1 3.5 {path.stem}\n")
    said = rf"x\.trec: none of its 1 queries \(first 'x1'\) is among the 2 judged ones of {qrels_file} \(first 'q1'\)"
    for inputs in (aliens, [result_file, aliens[0]]):
        with pytest.raises(DataError, match=said):
            compare_inputs(inputs, qrels_file)


def test_a_result_without_per_query_values_needs_judgements(result_file: Path, qrels_file: Path) -> None:
    document = json.loads(result_file.read_text())
    for path in document["paths"].values():
        del path["per_query"]
    result_file.write_text(json.dumps(document))
    with pytest.raises(DataError, match="--qrels"):
        compare_inputs([result_file, f"{result_file}:int8"])
    assert compare_inputs([result_file, f"{result_file}:int8"], qrels_file).queries == 2


@pytest.fixture
def many(tmp_path: Path) -> tuple[list[Path], Path]:
    """Three runs of 30 queries: the second finds a relevant document no earlier than second in 6 of them, the third is the first's double.

    Where scores are equal the order is trec_eval's, by id descending: a c b, and in those 6 queries b c a.
    """
    queries = [f"q{number}" for number in range(30)]
    good = {query: [("a", 2.0), ("b", 1.0), ("c", 1.0)] for query in queries}
    fallen = good | {query: [("b", 2.0), ("a", 1.0), ("c", 1.0)] for query in queries[:6]}
    files = []
    for name, rankings in (("first", good), ("second", fallen), ("third", good)):
        files.append(tmp_path / f"{name}.trec")
        write_trec_run(files[-1], Run(name, rankings, ordered=False))
    qrels = tmp_path / "many.qrels"
    qrels.write_text("".join(f"{query} 0 a 1\n{query} 0 c 1\n" for query in queries))
    return files, qrels


def test_statistics_are_over_all_inputs(many: tuple[list[Path], Path]) -> None:
    comparison = compare_inputs(*many, metrics=["RR@10", "R@10"])
    first, second, third = comparison.inputs
    assert first.parity is None
    assert second.parity is not None
    assert third.parity is not None
    entry = second.parity["statistics"]["RR@10"]
    assert entry["mean"] == pytest.approx(6 * -0.5 / 30)
    assert entry["p_value"] == 2 / 2**6  # the six changes are alike: two of 64 sign patterns are as extreme
    assert entry["p_adjusted"] == pytest.approx(4 * 2 / 2**6)  # of two inputs and two metrics
    assert (entry["changed"], entry["queries"], entry["verdict"], entry["bound"]) == (6, 30, "different", 5e-4)
    assert second.parity["statistics"]["R@10"]["verdict"] == "equivalent"
    assert third.parity["statistics"]["RR@10"]["verdict"] == "equivalent"
    assert second.parity["statistics_settings"]["comparisons"] == 4
    assert second.parity["rank_shifts"]["counts"] == [[1, 1, 24], [1, 3, 6], [2, 2, 30], [3, 1, 6], [3, 3, 24]]
    moved = second.parity["most_changed"][0]["moved"]
    assert {"document": "b", "reference_rank": 3, "rank": 1, "relevance": None} in moved
    assert len(second.parity["most_changed"]) == 6


def test_bounds_over_ties_of_runs(many: tuple[list[Path], Path]) -> None:
    first = compare_inputs(*many, metrics=["R@2", "infAP"]).inputs[0]
    # b and c are tied, c is relevant: second, as trec_eval has it, or third.
    assert first.path.tie_bounds == {"R@2": {"low": 0.5, "high": 1.0, "queries_affected": 30}}
    assert first.metrics["R@2"] == 1.0


def test_ties_of_results_are_those_they_hold(result_file: Path) -> None:
    document = json.loads(result_file.read_text())
    bounds = {"low": 0.25, "high": 0.75, "queries_affected": 1}
    document["paths"]["fp32"]["tie_bounds"] = {"R@10": bounds}
    result_file.write_text(json.dumps(document))
    first, second = compare_inputs([result_file, f"{result_file}:int8"]).inputs
    assert first.path.tie_bounds == {"Recall@10": bounds}
    assert second.path.tie_bounds is None


def test_the_bounds_of_a_path_are_those_of_its_class(result_file: Path) -> None:
    parity = compare_inputs([result_file, f"{result_file}:int8", f"{result_file}:fp32"])
    bounds = [entry.parity["statistics"]["nDCG@10"]["bound"] for entry in parity.inputs[1:] if entry.parity]
    assert bounds == [3e-3, 5e-4]


def test_the_bounds_of_a_run_file_are_those_of_its_path_only_if_it_is_ours(
    result_file: Path, qrels_file: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs.trec"
    theirs.write_text("q1 Q0 a 1 3.5 int8\nq1 Q0 c 2 2.5 int8\n")
    comparison = compare_inputs([result_file, result_file.parent / "runs" / "int8.trec", theirs], qrels_file)
    bounds = [entry.parity["statistics"]["nDCG@10"]["bound"] for entry in comparison.inputs[1:] if entry.parity]
    assert bounds == [3e-3, 5e-4], "another tool's run is held to the strictest, whatever it calls itself"


def test_a_comparison_as_a_result(many: tuple[list[Path], Path]) -> None:
    comparison = compare_inputs(*many)
    result = comparison.to_result(["evaluate.py", "compare"])
    assert to_json(from_json(to_json(result))) == to_json(result)
    assert list(result.paths) == ["first", "second", "third"]
    assert (result.reference, result.k, result.command) == ("first", 3, ["evaluate.py", "compare"])
    assert {key: result.task[key] for key in ("source", "queries", "documents", "judged_pairs", "documents_counted")} == {
        "source": "comparison", "queries": 30, "documents": 3, "judged_pairs": 60,
        "documents_counted": "those that the inputs retrieve",
    }  # fmt: skip
    assert result.encoder == {"name": "unknown"}
    assert result.paths["second"].parity == comparison.inputs[1].parity
    assert all(path.run is None for path in result.paths.values())


def test_a_comparison_of_results_knows_what_was_searched(result_file: Path, many: tuple[list[Path], Path]) -> None:
    result = compare_inputs([result_file, f"{result_file}:int8"]).to_result()
    facts = {key: result.task[key] for key in ("source", "dataset", "split", "documents")}
    assert facts == {"source": "comparison", "dataset": "tiny", "split": "test", "documents": 3}
    assert "documents_counted" not in result.task
    assert result.encoder == {"name": "lexical"}
    mixed = compare_inputs([result_file, many[0][0]], many[1]).to_result()
    assert mixed.encoder == {"name": "lexical"}
    assert mixed.task["warnings"], "queries without results"


def test_written_reports(result_file: Path, many: tuple[list[Path], Path], tmp_path: Path) -> None:
    comparison = compare_inputs(*many)
    for _ in range(2):  # a comparison may be written again
        write_comparison(comparison, tmp_path / "out", ["evaluate.py"])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"metrics.csv", "per_query.csv", "report.md", "result.json"}
    written = from_json((tmp_path / "out" / "result.json").read_text())
    assert written.paths["second"].metrics == comparison.inputs[1].metrics
    assert "different in nDCG@1" in (tmp_path / "out" / "report.md").read_text()
    (tmp_path / "out" / "per_query.csv").unlink()
    (tmp_path / "out" / "per_query.csv").mkdir()  # in the way
    with pytest.raises(DataError, match="cannot be written"):
        write_comparison(comparison, tmp_path / "out")
    assert not (tmp_path / "out" / "result.json").exists(), "where it exists the rest belongs to it"
    before = result_file.read_bytes()
    with pytest.raises(UsageError, match="holds the report of an evaluation"):
        write_comparison(comparison, result_file.parent)
    assert result_file.read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_comparison(comparison, tmp_path / "file")


def test_the_console_shows_what_the_reports_show(many: tuple[list[Path], Path]) -> None:
    text = console_text(compare_inputs(*many, metrics=["RR@10"]))
    for said in ("30 judged queries", "second, RR@10", "-0.10000", "6 of 30", "different", "Queries that changed most: second"):
        assert said in text
    assert "Spearman" not in text, "scores are not compared"
