"""Several datasets in one command and one call: each folder as by itself, one table, and a failure that loses nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval import evaluate_datasets, many
from maxsim_eval.data import irds
from maxsim_eval.errors import UsageError
from maxsim_eval.types import Task

USAGE, DATA = 2, 3
OPTIONS = ("--encoder", "lexical", "--paths", "fp32,int8", "--k", "3")


@pytest.fixture
def home(collection: Callable[..., Path], tmp_path: Path) -> Path:
    collection(tmp_path / "datasets" / "local" / "one")
    collection(tmp_path / "datasets" / "local" / "two", queries={"q1": "red fox", "q2": "whale", "q3": "an owl"})
    return tmp_path


def test_one_table_and_every_folder(home: Path, cli: Any) -> None:
    outcome = cli("local", "one", "two", *OPTIONS, cwd=home).fine()
    head = next(line.split() for line in outcome.out.splitlines() if line.split()[:1] == ["path"])
    assert head == ["path", "one", "two", "Avg"]
    alone = cli("local", "two", *OPTIONS, "--json", "--out", "alone", cwd=home).fine()
    folder = home / "results" / "local-two-lexical"
    for name in ("report.html", "report.md", "result.json", "runs/int8.trec"):
        assert (folder / name).is_file()
        assert f"report: results/local-{'two'}-lexical/report.html" in outcome.out
    mine, other = json.loads((folder / "result.json").read_text()), json.loads(alone.out)
    assert {name: path["metrics"] for name, path in mine["paths"].items()} == {
        name: path["metrics"] for name, path in other["paths"].items()
    }
    assert (folder / "runs" / "int8.trec").read_bytes() == (home / "alone" / "runs" / "int8.trec").read_bytes()


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of ir_datasets whose documents are those of one dataset, `tiny/en`, as `irds.load` gives them."""

    def load(name: str) -> Task:
        part = name.removeprefix("tiny/en").strip("/") or "test"
        queries, documents = {"a": "red fox", "b": "an owl"}, {"a": "red fox", "b": "owl"}
        qrels = {"a": {"a": 1}, "b": {"b" if part == "test" else "a": 1}}
        facts = {"ir_datasets": "0", "id": name}
        return Task(
            "irds", "tiny/en", part, [*queries], [*queries.values()], [*documents], [*documents.values()], qrels, False, facts
        )

    monkeypatch.setattr(irds, "load", load)
    return ["tiny/en/dev", "tiny/en/test", "tiny/en"]


def test_splits_of_one_corpus_keep_their_own_results(splits: list[str], cli: Any, tmp_path: Path) -> None:
    words = ("--encoder", "lexical", "--paths", "fp32", "--metrics", "MRR@1", "--k", "2", "--quiet")
    for name, value in zip(splits, ("0.5000", "1.0000", "1.0000"), strict=True):
        assert cli("irds", name, *words, cwd=tmp_path).fine().out.startswith(f"fp32: MRR@1 {value}, ")
    folders = ["irds-tiny-en-dev-lexical", "irds-tiny-en-lexical", "irds-tiny-en-test-lexical"]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == folders
    together = cli("irds", *splits, *words, cwd=tmp_path).fine().out
    assert together == "fp32: tiny/en/dev 0.5000, tiny/en/test 1.0000, tiny/en 1.0000, Avg 0.8333\n"
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == folders


def test_splits_of_one_corpus_in_python(splits: list[str], tmp_path: Path) -> None:
    options = {"source": "irds", "metrics": ["MRR@1"], "k": 2, "quiet": True, "cache_dir": tmp_path / "cache"}
    found = evaluate_datasets(splits, "lexical", ["fp32"], out_dir=tmp_path / "out", **options)
    assert found.values()["fp32"] == {**dict(zip(splits, (0.5, 1.0, 1.0), strict=True)), "Avg": pytest.approx(2.5 / 3)}
    assert all((tmp_path / "out" / name / "result.json").is_file() for name in splits)
    with pytest.raises(UsageError, match="'tiny/en/dev' is named twice"):
        evaluate_datasets(["tiny/en/dev", irds.load("tiny/en/dev")], "lexical", ["fp32"], **options)


def test_no_line_about_a_reference_that_is_not_there(home: Path, cli: Any) -> None:
    for paths, marks in (("fp32,int8", 1), ("fp16,int8", 0)):
        words = ("local", "one", "two", "--encoder", "lexical", "--paths", paths, "--k", "3")
        assert cli(*words, cwd=home).fine().out.count("differs from") == marks
        assert cli(*words, "--latex", cwd=home).fine().out.count("differs from") == marks


def test_latex_json_and_quiet(home: Path, cli: Any) -> None:
    latex = cli("local", "one", "two", *OPTIONS, "--latex", "--out", "all", cwd=home).fine().out
    assert latex.startswith(r"\begin{tabular}{lrrr}")
    assert {path.name for path in (home / "all").iterdir()} == {"local-one-lexical", "local-two-lexical"}
    found = json.loads(cli("local", "one", "two", *OPTIONS, "--json", cwd=home).fine().out)
    assert list(found["results"]) == ["one", "two"]
    averages = found["averages"]["fp32"]
    assert averages["Avg"] == pytest.approx((averages["one"] + averages["two"]) / 2)
    quiet = cli("local", "one", "two", *OPTIONS, "--quiet", cwd=home).fine().out.splitlines()
    assert [line.partition(":")[0] for line in quiet] == ["fp32", "int8"]


def test_a_dataset_that_fails_loses_no_other(home: Path, cli: Any) -> None:
    (home / "datasets" / "local" / "two" / "qrels" / "test.tsv").unlink()
    outcome = cli("local", "two", "one", *OPTIONS, "--quiet", cwd=home)
    assert outcome.code == DATA
    assert outcome.err.startswith("error: two: ")
    assert "fp32: one 0." in outcome.out
    assert (home / "results" / "local-one-lexical" / "result.json").is_file()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("beir",), "need the name of one: arguana"),
        (("local",), "source 'local' has no public ones"),
        (("beir", "scifact", "nfcorpus", "scifact"), "datasets: 'scifact' is named twice"),
        (("beir", "scifact", "--all"), "--all: got 'scifact' too"),
    ],
)
def test_names_that_are_none(words: tuple[str, ...], text: str, cli: Any, tmp_path: Path) -> None:
    cli(*words, cwd=tmp_path).refused(USAGE, text)


def test_all_public_sets_are_tried(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def refuse(source: str, dataset: str, **_: object) -> None:
        seen.append(dataset)
        raise UsageError("not here")

    monkeypatch.setattr("maxsim_eval.data.loading.load_task", refuse)
    outcome = cli("beir", "--all", *OPTIONS, cwd=tmp_path)
    assert outcome.code == USAGE
    assert outcome.err.count("not here") == len(seen)
    assert {"scifact", "hotpotqa", "cqadupstack/android"} <= set(seen)
    assert "cqadupstack" not in seen


def test_in_python(home: Path) -> None:
    data = {"source": "local", "data_dir": home / "datasets", "cache_dir": home / "cache", "quiet": True, "k": 3}
    found = evaluate_datasets(["one", "two"], "lexical", ["fp32", "fp16"], out_dir=home / "out", **data)
    assert found.table().columns == ["path", "one", "two", "Avg"]
    assert (home / "out" / "two" / "result.json").is_file()
    again = evaluate_datasets(["one", "two"], "lexical", iter(["fp32"]), metrics=iter(["nDCG@3"]), **data)
    assert [[*result.paths["fp32"].metrics] for result in again.results.values()] == [["nDCG@3"]] * 2
    with pytest.raises(UsageError, match="named twice"):
        evaluate_datasets(["one", "one"], "lexical", ["fp32"], **data)
    with pytest.raises(UsageError, match="got none"):
        evaluate_datasets([], "lexical", **data)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"metric": "R@20"}, "Recall@20"),
        ({"metrics": ["R@2", "MAP"]}, "R@2"),
        ({"metrics": ["MAP", "R@2"], "metric": "Recall@2"}, "R@2"),
    ],
)
def test_the_metric_of_the_table_is_one_that_is_computed(home: Path, options: dict[str, Any], shown: str) -> None:
    data = {"source": "local", "data_dir": home / "datasets", "cache_dir": home / "cache", "quiet": True, "k": 3}
    found = evaluate_datasets(["one"], "lexical", ["fp32"], **data, **options)
    assert (found.metric, "-" in found.table().rows[0]) == (shown, False)


@pytest.mark.parametrize(
    ("datasets", "options", "text"),
    [
        ("one", {}, r"datasets: got 'one' by itself, need a list: \['one'\]"),
        (["one"], {"metric": "nonsense"}, "unknown metric 'nonsense'"),
        (["one"], {"metric": "MAP@7"}, r"metric: got 'MAP@7', need one of those that are computed \(metrics=\): nDCG@1, "),
        (["one"], {"metrics": []}, "metrics: got none"),
    ],
)
def test_what_could_not_be_shown_is_not_evaluated(
    datasets: Any, options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many, "load_task", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(UsageError, match=text):
        evaluate_datasets(datasets, "lexical", ["fp32"], **options)
