"""Several datasets in one command and one call: each folder as by itself, one table, and a failure that loses nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval import evaluate_datasets, many
from maxsim_eval.errors import UsageError

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
