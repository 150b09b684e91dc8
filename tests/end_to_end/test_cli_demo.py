"""`evaluate.py demo`, from nothing to the report, and every option an evaluation takes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.encoders.lexical import LexicalEncoder
from maxsim_eval.errors import EXIT_USAGE
from maxsim_eval.scoring import stream

PATHS = ("fp32", "fused-fp32", "fp16", "bf16", "int8", "int8-document", "int8-corpus", "fp8")
METRICS = {"nDCG@1", "nDCG@5", "nDCG@10", "nDCG@20", "Recall@5", "Recall@10", "Recall@20", "Recall@100", "MAP@100", "MRR@10"}
PARITY = {
    "reference", "delta", "delta_per_query", "spearman", "overlap", "identical_order", "max_abs_error", "mean_abs_error",
    "max_rel_error", "mean_rel_error", "mismatched_finite", "error_histogram", "same_order", "rank_shifts", "most_changed",
    "reference_reads_same_inputs", "statistics", "statistics_settings",
}  # fmt: skip
REPORTS = {"result.json", "report.md", "report.html", "metrics.csv", "per_query.csv"}
TASK = {"source", "dataset", "split", "queries", "documents", "document_tokens", "query_tokens", "judged_pairs", "warnings"}


@pytest.fixture
def no_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("something was encoded although it is in the cache")

    monkeypatch.setattr(LexicalEncoder, "encode", refuse)
    monkeypatch.setattr(LexicalEncoder, "prepare", refuse)


def strict(text: str) -> Any:
    """JSON without the NaN and Infinity that Python's reader would let pass."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for entry in value.values():
            yield from numbers(entry)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def same_but_times(one: dict[str, Any], other: dict[str, Any]) -> bool:
    for result in (one, other):
        for key in ("created", "command", "environment"):
            result.pop(key)
        for path in result["paths"].values():
            for name in ("seconds", "memory"):
                path.pop(name)
    return one == other


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_from_nothing_to_the_report(demo: Any) -> None:
    said = demo.outcome.fine().out
    for text in ("fp32", "fp16", "int8", "nDCG@10", "Recall@100", "Spearman", "top-10", "report.html"):
        assert text in said
    assert "warning" not in said
    assert files(demo.results) == {*REPORTS, "runs/fp32.trec", "runs/fp16.trec", "runs/int8.trec"}
    assert files(demo.folder / "datasets" / "demo" / "small") == {"corpus.jsonl", "queries.jsonl", "qrels/test.tsv"}
    cached = [path.rpartition("-")[0] for path in files(demo.folder / "embeddings_cache") if path.endswith("00000.h5")]
    assert sorted(cached) == ["demo/small/lexical-documents", "demo/small/lexical-queries"]
    assert {path.name for path in demo.folder.iterdir()} == {"datasets", "embeddings_cache", "results"}
    report = (demo.results / "report.md").read_text(encoding="utf-8")
    for text in ("fp32", "fp16", "int8", "nDCG@10", "lexical"):
        assert text in report


def test_the_result_is_what_the_documentation_says(demo: Any) -> None:
    text = (demo.results / "result.json").read_text(encoding="utf-8")
    result = strict(text)
    assert result["schema"] == "maxsim-eval/result/1"
    assert set(result["task"]) >= TASK
    assert [result["task"][key] for key in ("source", "dataset", "split")] == ["demo", "small", "test"]
    assert [result["task"][key] for key in ("queries", "documents", "judged_pairs")] == [40, 300, 293]
    assert result["encoder"]["name"] == "lexical"
    assert result["encoder"]["dim"] == 128
    assert result["k"] == 100
    assert result["reference"] == "fp32"
    assert list(result["paths"]) == ["fp32", "fp16", "int8"]
    assert result["command"] == ["evaluate.py", "demo"]
    assert {"python", "torch", "threads"} <= set(result["environment"])
    for name, path in result["paths"].items():
        assert set(path["metrics"]) == METRICS
        assert set(path["per_query"]) == METRICS
        assert all(len(values) == 40 for values in path["per_query"].values())
        assert path["run"] == f"runs/{name}.trec"
        assert (demo.results / path["run"]).is_file()
        assert path["seconds"]["total"] > 0
        assert ("parity" in path) == (name != "fp32")
        assert all(math.isfinite(number) for number in numbers(path))
    for name in ("fp16", "int8"):
        parity = result["paths"][name]["parity"]
        assert set(parity) >= PARITY
        assert parity["reference"] == "fp32"
        assert set(parity["delta"]) == METRICS
        assert {"mean", "min"} <= set(parity["spearman"])
        assert set(parity["overlap"]) == set(parity["same_order"]) == {"@1", "@5", "@10", "@20", "@50", "@100"}
        assert set(parity["statistics"]) == METRICS


def test_the_paths_agree_within_the_papers_bounds(demo: Any) -> None:
    paths = demo.result["paths"]
    assert paths["fp32"]["metrics"]["nDCG@10"] >= 0.62  # 0.6224 was measured
    for name, bound, rank in (("fp16", 5e-4, 0.9999), ("int8", 3e-3, 0.999)):
        assert abs(paths[name]["parity"]["delta"]["nDCG@10"]) <= bound
        assert paths[name]["parity"]["spearman"]["mean"] >= rank
        assert 0 < paths[name]["parity"]["max_abs_error"] < 0.1
        assert paths[name]["parity"]["mismatched_finite"] == 0


def test_the_runs_follow_the_fixed_order(demo: Any) -> None:
    corpus = (demo.folder / "datasets" / "demo" / "small" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    place = {json.loads(line)["_id"]: number for number, line in enumerate(corpus)}
    for name in ("fp32", "fp16", "int8"):
        rows = [line.split() for line in (demo.results / "runs" / f"{name}.trec").read_text().splitlines()]
        assert {row[5] for row in rows} == {f"maxsim-eval/{name}"}
        ties = 0
        for above, below in itertools.pairwise(rows):
            if above[0] != below[0]:
                assert below[3] == "1"
                continue
            assert int(below[3]) == int(above[3]) + 1
            assert (-float(above[4]), place[above[2]]) < (-float(below[4]), place[below[2]])
            ties += above[4] == below[4]
        assert ties > 20, "the demo has exact duplicates"
        assert len({row[0] for row in rows}) == 40


def test_all_paths_from_the_cache(demo: Any, cli: Any, no_encoding: None, tmp_path: Path) -> None:
    folder = demo.copy(tmp_path, "datasets", "embeddings_cache")
    outcome = cli("demo", "--paths", ",".join(PATHS), "--json", "--out", "all", cwd=folder).fine()
    result = strict(outcome.out)
    assert list(result["paths"]) == list(PATHS)
    assert result == strict((folder / "all" / "result.json").read_text(encoding="utf-8"))
    assert files(folder / "all" / "runs") == {f"{name}.trec" for name in PATHS}
    for name in PATHS[1:]:
        parity = result["paths"][name]["parity"]
        assert set(parity) >= PARITY
        assert parity["spearman"]["mean"] > 0.995
        assert abs(parity["delta"]["nDCG@10"]) < 0.01
        assert parity["mismatched_finite"] == 0
    assert result["paths"]["fused-fp32"]["parity"]["max_rel_error"] < 2e-6
    first = demo.result["paths"]
    for name in ("fp32", "fp16", "int8"):  # the other paths beside it change nothing
        assert result["paths"][name]["metrics"] == first[name]["metrics"]
        assert (folder / "all" / "runs" / f"{name}.trec").read_bytes() == (demo.results / "runs" / f"{name}.trec").read_bytes()
    assert list(folder.rglob("*.tmp")) == []


def test_json_is_all_that_is_on_stdout_and_a_second_run_gives_the_same(
    demo: Any, cli: Any, no_encoding: None, tmp_path: Path
) -> None:
    folder = demo.copy(tmp_path, "datasets", "embeddings_cache")
    outcome = cli("demo", "--json", cwd=folder).fine()
    assert "warning" not in outcome.err
    assert same_but_times(strict(outcome.out), demo.result)


def test_quiet_keeps_a_line_for_each_path(demo: Any, cli: Any, tmp_path: Path) -> None:
    outcome = cli("demo", "--quiet", cwd=demo.copy(tmp_path, "datasets")).fine()
    lines = [
        "fp32: nDCG@10 0.6224, reference",
        "fp16: nDCG@10 0.6224 (=), equivalent",
        "int8: nDCG@10 0.6224 (=), inconclusive",
    ]
    assert (outcome.out.splitlines(), outcome.err) == (lines, "")
    result = tmp_path / "results" / "demo-small-lexical" / "result.json"
    assert same_but_times(strict(result.read_text(encoding="utf-8")), demo.result)


def test_progress_goes_to_stderr(every_bar: None, cli: Any, tmp_path: Path) -> None:
    said = cli("demo", cwd=tmp_path).fine()
    for text in ("encode small: 100%, 300 of 300", "documents", "queries", "tokens/s"):
        assert text in said.err
    assert "\r" not in said.err
    assert "%" not in said.out


def test_a_short_evaluation_says_nothing_on_its_way(demo: Any) -> None:
    assert demo.outcome.err == ""


def test_folders_of_ones_choice(cli: Any, tmp_path: Path) -> None:
    options = ("--data-dir", "some/data", "--cache-dir", tmp_path / "cache", "--out", "a/b/report", "--limit-queries", "3")
    cli("demo", *options, "--paths", "fp32", "--quiet", cwd=tmp_path).fine()
    assert {path.name for path in tmp_path.iterdir()} == {"some", "cache", "a"}
    assert files(tmp_path / "a" / "b" / "report") == {*REPORTS, "runs/fp32.trec"}
    assert (tmp_path / "some" / "data" / "demo" / "small" / "corpus.jsonl").is_file()


def test_limited_queries(demo: Any, cli: Any, no_encoding: None, tmp_path: Path) -> None:
    folder = demo.copy(tmp_path, "datasets", "embeddings_cache")
    result = strict(cli("demo", "--limit-queries", "7", "--paths", "fp32", "--json", "--quiet", cwd=folder).fine().out)
    assert result["task"]["queries"] == 7
    assert "parity" not in result["paths"]["fp32"]
    everything = demo.result["paths"]["fp32"]["per_query"]
    for name, values in result["paths"]["fp32"]["per_query"].items():
        assert len(values) == 7
        assert values == {query: everything[name][query] for query in values}


def test_a_subset_of_documents_and_queries(demo: Any, cli: Any, no_encoding: None, tmp_path: Path) -> None:
    folder = demo.copy(tmp_path, "datasets", "embeddings_cache")
    limits = ("--limit-documents", "120", "--limit-queries", "7", "--limit-seed", "5")
    said = cli("demo", *limits, "--k", "120", "--out", "some", cwd=folder).fine().out
    line = "SUBSET: 7 of 40 queries and 120 of 300 documents (seed 5); figures are not those of the whole collection"
    assert line in " ".join(said.split())
    assert line in (folder / "some" / "report.md").read_text(encoding="utf-8")
    result = strict((folder / "some" / "result.json").read_text(encoding="utf-8"))
    task = result["task"]
    assert result["schema"] == "maxsim-eval/result/1"
    assert [task[key] for key in ("queries", "documents")] == [7, 120]
    found = {key: task["limits"][key] for key in ("seed", "queries")}
    assert found == {"seed": 5, "queries": {"limit": 7, "before": 40, "after": 7}}
    # Every judged document of the kept queries is there to be found.
    judged: dict[str, set[str]] = {}
    for row in (folder / "datasets/demo/small/qrels/test.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query, document, _ = row.split("\t")
        judged.setdefault(query, set()).add(document)
    kept = result["paths"]["fp32"]["per_query"]["nDCG@10"].keys()
    documents = set().union(*(judged[query] for query in kept))
    assert task["limits"]["documents"] == {"limit": 120, "before": 300, "after": 120, "judged": len(documents)}
    assert task["limits"]["judged_pairs"] == {"before": 293, "after": sum(len(judged[query]) for query in kept)}
    rows = [row.split() for row in (folder / "some" / "runs" / "fp32.trec").read_text().splitlines()]
    assert documents <= {row[2] for row in rows}
    assert len({row[2] for row in rows}) <= 120
    # The whole's ranking without what was left out.
    searched = {row[2] for row in rows}
    whole = cli("demo", "--k", "300", "--paths", "fp32", "--quiet", "--out", "whole", cwd=folder).fine()
    assert "SUBSET" not in whole.out
    everything = [row.split() for row in (folder / "whole" / "runs" / "fp32.trec").read_text().splitlines()]
    expected = [(row[0], row[2], row[4]) for row in everything if row[0] in kept and row[2] in searched]
    assert [(row[0], row[2], row[4]) for row in rows] == expected
    assert len(list((folder / "embeddings_cache" / "demo" / "small").iterdir())) == 2, "an entry was copied for the subset"
    # Again, as JSON: the same subset. Another seed: another one.
    again = strict(cli("demo", *limits, "--json", "--quiet", cwd=folder).fine().out)
    assert again["task"]["limits"] == task["limits"]
    other = strict(cli("demo", *limits[:-1], "6", "--json", "--quiet", cwd=folder).fine().out)
    assert other["task"]["limits"]["ids_sha256"] != task["limits"]["ids_sha256"]


def test_readers_and_a_memory_budget_change_no_figure(
    demo: Any, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    blocks = stream.device_blocks

    def watched(*given: Any, **named: Any) -> Any:
        asked.append(named["readers"])
        return blocks(*given, **named)

    monkeypatch.setattr(stream, "device_blocks", watched)
    demo.copy(tmp_path, "datasets", "embeddings_cache")
    said = cli("demo", "--readers", "1", "--memory-budget", "64MB", "--json", cwd=tmp_path).fine()
    assert same_but_times(strict(said.out), demo.result)
    assert set(asked) == {1}
    cli("demo", "--memory-budget", "9KB", "--quiet", cwd=tmp_path).refused(
        EXIT_USAGE, "memory budget: got 9000 bytes, need at least"
    )


def test_k_beyond_the_corpus_is_clamped_and_said_once(demo: Any, cli: Any, no_encoding: None, tmp_path: Path) -> None:
    folder = demo.copy(tmp_path, "datasets", "embeddings_cache")
    outcome = cli("demo", "--k", "5000", "--json", "--quiet", cwd=folder).fine()
    assert outcome.err.count("clamped") == 1
    assert outcome.err.strip() == "warning: k was clamped to the 300 documents of the corpus"
    result = strict(outcome.out)
    assert result["k"] == 300
    assert result["task"]["warnings"] == ["k was clamped to the 300 documents of the corpus"]
    assert result["paths"]["fp32"]["metrics"] == demo.result["paths"]["fp32"]["metrics"], "the metrics go no deeper than 100"
    rows = (folder / "results" / "demo-small-lexical" / "runs" / "fp32.trec").read_text().splitlines()
    assert len(rows) == 40 * 292, "the eight documents without words are not retrieved"
    shown = cli("demo", "--k", "5000", cwd=folder).fine()
    assert (shown.out + shown.err).count("clamped") == 1


def test_a_changed_demo_collection_is_generated_anew_and_said(demo: Any, cli: Any, tmp_path: Path) -> None:
    folder = demo.copy(tmp_path)
    corpus = folder / "datasets" / "demo" / "small" / "corpus.jsonl"
    good = corpus.read_bytes()
    corpus.write_bytes(good.replace(b"honey", b"money"))
    result = strict(cli("demo", "--json", "--quiet", cwd=folder).fine().out)
    assert corpus.read_bytes() == good
    assert "generated anew" in result["task"]["warnings"][0]
    assert result["paths"]["fp32"]["metrics"] == demo.result["paths"]["fp32"]["metrics"]


@pytest.mark.parametrize("command", [(), ("--help",), ("demo", "--help"), ("import", "--help"), ("gate", "--help")])
def test_help(cli: Any, command: tuple[str, ...], tmp_path: Path) -> None:
    outcome = cli(*command, cwd=tmp_path)
    assert outcome.code in (0, 2)
    assert "Usage" in outcome.out + outcome.err
    assert "\\n" not in outcome.out + outcome.err
    if command[:1] not in ((), ("--help",)):
        assert "Example:\n    python evaluate.py" in outcome.out
    assert not list(tmp_path.iterdir())
