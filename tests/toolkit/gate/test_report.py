"""The gate beyond its bounds: verdicts of the statistics, baselines that are replaced, what a log and a job summary say."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from maxsim_eval.api import evaluate
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.gate.checking import baseline_of, check, check_thresholds, load_baseline, load_thresholds, update_baseline
from maxsim_eval.gate.report import append_summary, overview, render, to_json, to_summary
from maxsim_eval.types import Result, Task

COLUMNS = 7


@pytest.fixture(scope="module")
def result(demo_home: Path, demo_task: Task) -> Result:
    """The demo's, of three paths."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return evaluate(demo_task, "lexical", ["fp32", "fp16", "int8"], cache_dir=demo_home / "cache", quiet=True)
    finally:
        torch.set_num_threads(threads)


def with_parity(result: Result, name: str, **changes: Any) -> Result:
    path = result.paths[name]
    return replace(result, paths={**result.paths, name: replace(path, parity={**(path.parity or {}), **changes})})


def with_interval(result: Result, name: str, **changes: Any) -> Result:
    found: Any = copy.deepcopy((result.paths[name].parity or {})["statistics"])
    found["nDCG@10"] |= changes
    return with_parity(result, name, statistics=found)


def with_metrics(result: Result, name: str, **metrics: float) -> Result:
    path = result.paths[name]
    values = {**path.metrics, **{key.replace("_", "@"): value for key, value in metrics.items()}}
    return replace(result, paths={**result.paths, name: replace(path, metrics=values)})


def asking(*metrics: str, bound: float = 0.003) -> dict[str, Any]:
    entry = {"paths": ["*"], "delta": {"nDCG@10": bound}, "equivalent": list(metrics)}
    return {"fall": {"nDCG@10": 0.1}, "classes": {"all": entry}}


def failed(result: Result, thresholds: Mapping[str, Any] | None = None, **options: bool) -> dict[str, str]:
    findings = check(result, baseline_of(result), thresholds, **options)
    return {finding.what: finding.found for finding in findings if not finding.ok}


# Verdicts ---------------------------------------------------------------------------------------------------------------


def test_a_wide_interval_fails_only_where_equivalence_is_asked_for(result: Result) -> None:
    wide = with_interval(result, "int8", low=-0.004, high=0.001)
    assert failed(wide) == {}
    assert failed(wide, asking()) == {}
    found = failed(wide, asking("nDCG@10"))
    assert found == {"int8: nDCG@10 equivalent": "inconclusive: -0.004000 to +0.001000 (40 queries)"}
    assert failed(wide, asking("nDCG@10", bound=0.004)) == {}, "the bound is that of the thresholds in use"
    outside = with_interval(result, "int8", low=0.0031, high=0.005)
    assert failed(outside, asking("nDCG@10"))["int8: nDCG@10 equivalent"].startswith("different: ")
    assert "int8: nDCG@10 equivalent" in failed(wide, equivalent=True)


def test_require_equivalent_asks_of_every_bound(result: Result) -> None:
    findings = check(result, baseline_of(result), equivalent=True)
    asked = [finding.what for finding in findings if finding.what.endswith(" equivalent")]
    assert asked == ["fp16: nDCG@10 equivalent", "fp16: Recall@10 equivalent", "int8: nDCG@10 equivalent"]
    assert not any(finding.what.endswith(" equivalent") for finding in check(result, baseline_of(result)))


@pytest.mark.parametrize("changes", [{"low": None}, {"high": None}, {"mean": None}, {"queries": None}, {"queries": "40"}])
def test_an_interval_that_is_not_known_is_not_inside(result: Result, changes: dict[str, Any]) -> None:
    found = failed(with_interval(result, "int8", **changes), asking("nDCG@10"))
    assert found == {"int8: nDCG@10 equivalent": "no interval"}


def test_statistics_that_are_absent_or_of_other_values_do_not_pass(result: Result) -> None:
    for statistics in (None, {}, [], {"nDCG@10": None}):
        assert failed(with_parity(result, "int8", statistics=statistics), asking("nDCG@10"))
    moved = with_metrics(result, "int8", nDCG_10=result.paths["int8"].metrics["nDCG@10"] - 0.001)
    found = failed(moved, asking("nDCG@10"))
    assert found["int8: nDCG@10 equivalent"] == "statistics of another difference (+0.000000)"


def test_too_few_queries_show_nothing(result: Result) -> None:
    assert failed(with_interval(result, "int8", queries=9), asking("nDCG@10"))


def test_equivalence_needs_a_bound() -> None:
    with pytest.raises(UsageError, match=r"equivalent names 'Recall@10', which has no bound in delta"):
        check_thresholds(asking("Recall@10"))
    with pytest.raises(UsageError, match=r"equivalent is 'nDCG@10', need a list"):
        check_thresholds({**asking(), "classes": {"all": {**asking()["classes"]["all"], "equivalent": "nDCG@10"}}})
    for entry in load_thresholds()["classes"].values():
        assert "equivalent" not in entry


# Baselines that are replaced --------------------------------------------------------------------------------------------


def test_a_baseline_of_the_same_is_replaced_and_the_changes_are_said(result: Result, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "baseline.json"
    assert update_baseline(file, result) == ["a new baseline"]
    before = file.read_bytes()
    assert update_baseline(file, result) == []
    assert file.read_bytes() == before
    fallen = with_metrics(result, "fp32", nDCG_10=0.5)
    fewer = {name: path for name, path in fallen.paths.items() if name != "int8"} | {"bf16": fallen.paths["fp16"]}
    changes = update_baseline(file, replace(fallen, paths=fewer, task={**result.task, "queries": 39}))
    value = result.paths["fp32"].metrics["nDCG@10"]
    assert changes == [
        "number of queries: 40 -> 39",
        "path int8: gone",
        "path bf16: new",
        f"fp32: nDCG@10: {value:.6f} -> 0.500000",
    ]
    assert load_baseline(file)["task"]["queries"] == 39
    assert load_baseline(file)["paths"]["fp32"]["nDCG@10"] == 0.5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": {"dataset": "other"}}, "task dataset small there, other in the result; name another file, or say --replace"),
        ({"encoder": {"name": "colbertv2"}}, "encoder name lexical there, colbertv2 in the result"),
        ({"k": 10}, "k 100 there, 10 in the result"),
        ({"k": 10, "encoder": {"dim": 64}}, r"\(and 1 more differ\)"),
    ],
)
def test_a_baseline_of_something_else_is_not_replaced_unasked(
    result: Result, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    file = tmp_path / "baseline.json"
    update_baseline(file, result)
    before = file.read_bytes()
    merged = {key: {**getattr(result, key), **value} if isinstance(value, dict) else value for key, value in changes.items()}
    other = replace(result, **merged)
    with pytest.raises(UsageError, match=said):
        update_baseline(file, other)
    assert file.read_bytes() == before
    assert update_baseline(file, other, replace=True) == ["a new baseline"]
    assert load_baseline(file) == baseline_of(other)


def test_a_file_that_is_no_baseline_is_not_replaced_unasked(result: Result, tmp_path: Path) -> None:
    file = tmp_path / "notes.json"
    file.write_text('{"mine": 1}')
    with pytest.raises(DataError, match=r"notes\.json: schema is"):
        update_baseline(file, result)
    assert file.read_text() == '{"mine": 1}'
    update_baseline(file, result, replace=True)
    assert load_baseline(file) == baseline_of(result)


# What people see --------------------------------------------------------------------------------------------------------


def test_the_log_shows_what_was_evaluated_and_a_row_a_path(result: Result) -> None:
    lines = overview(result).splitlines()
    assert lines[0].startswith("demo/small test: 40 queries, 300 documents")
    assert len(lines) == 2 + 1 + len(result.paths)
    assert " ".join(lines[2].split()) == "nDCG@10 change Spearman top-10 overlap top-20 overlap max rel error"
    parity: Any = result.paths["int8"].parity
    value, ranks = f"{result.paths['int8'].metrics['nDCG@10']:.4f}", f"{parity['spearman']['mean']:.6f}"
    overlaps = [f"{parity['overlap'][cutoff]:.4f}" for cutoff in ("@10", "@20")]
    assert lines[5].split() == ["int8", value, "=", ranks, *overlaps, f"{parity['max_rel_error']:.1e}"]
    moved = overview(with_metrics(result, "int8", nDCG_10=0.6)).splitlines()[5]
    assert f"{0.6 - result.paths['fp32'].metrics['nDCG@10']:+.4f}" in moved, "as an evaluation prints it"


def test_the_log_survives_what_is_missing(result: Result) -> None:
    bare = with_parity(result, "int8", spearman=None, overlap=[], max_rel_error="x")
    assert overview(bare).splitlines()[5].split()[3:] == ["-"] * 4
    paths = {name: replace(path, metrics={"MRR@10": 0.5}) for name, path in result.paths.items()}
    assert "MRR@10" in overview(replace(result, paths=paths, reference=None)).splitlines()[2]
    assert overview(replace(result, paths={}, reference=None))


def test_what_passed_is_not_said_to_need_what_it_has(result: Result) -> None:
    lines = render(check(result, baseline_of(result)), every=True).splitlines()
    assert "ok    number of judged pairs: 293" in lines
    assert "ok    baseline fits: task source: demo" in lines
    assert next(line for line in lines if "top-20 overlap" in line).endswith("; bound: >= 0.95")
    assert not any("_" in line or ", need" in line for line in lines)


def test_a_new_baseline_is_offered_only_where_it_would_help(result: Result) -> None:
    hint = "--update-baseline"
    baseline = baseline_of(result)
    fallen = {name: replace(path, metrics={**path.metrics, "nDCG@10": 0.5}) for name, path in result.paths.items()}
    lower = replace(result, paths=fallen)
    assert hint in render(check(lower, baseline))
    assert hint in render(check(replace(result, task={**result.task, "documents": 299}), baseline))
    assert hint not in render(check(result, baseline))
    assert hint not in render(check(replace(result, k=10), baseline)), "it would be the baseline of something else"
    assert hint not in render(check(with_parity(lower, "int8", overlap={}), baseline)), "parity does not depend on it"


def table_rows(text: str, head: str) -> list[list[str]]:
    """Cells of the rows of the Markdown table whose head begins so."""
    lines = text[text.index(f"| {head}") :].splitlines()
    ends = next(place for place, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:ends]]


def test_the_summary_has_the_verdict_the_failures_and_the_figures(result: Result) -> None:
    baseline = baseline_of(result)
    good, bad = check(result, baseline), check(with_parity(result, "int8", overlap={"@20": 0.9}), baseline)
    text = to_summary(result, good)
    assert text.startswith(f"## \N{WHITE HEAVY CHECK MARK} gate passed: {len(good)} checks: demo/small test, lexical")
    assert "| failed |" not in text
    assert [row[0] for row in table_rows(text, "path |")] == ["fp32", "fp16", "int8"]
    assert {len(row) for row in table_rows(text, "path |")} == {COLUMNS}
    assert len(table_rows(text, " | check |")) == len(good)
    text = to_summary(result, bad)
    assert text.startswith(f"## \N{CROSS MARK} gate FAILED: 1 of {len(bad)} checks")
    assert table_rows(text, "failed |") == [["int8: top-20 overlap", "0.9000000", ">= 0.95"]]
    assert text.count("<details>") == text.count("</details>") == 1


def test_a_summary_above_what_github_takes_loses_its_folded_checks_alone(
    result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = check(with_parity(result, "int8", overlap={"@20": 0.9}), baseline_of(result))
    whole = to_summary(result, findings)
    size = len(whole.encode()) - 1  # without the line's end
    monkeypatch.setattr("maxsim_eval.gate.report._TEXT_BYTES", size)
    assert to_summary(result, findings) == whole
    monkeypatch.setattr("maxsim_eval.gate.report._TEXT_BYTES", size - 1)
    assert to_summary(result, findings) == whole[: whole.index("<details>")]


def test_text_of_a_result_is_no_markup_in_the_summary(result: Result) -> None:
    odd = "a|b</details><b>*x*\n## new"
    paths = {**result.paths, odd: result.paths["int8"]}
    named = replace(result, task={**result.task, "dataset": odd}, encoder={**result.encoder, "name": odd}, paths=paths)
    text = to_summary(named, check(named, baseline_of(result)))
    assert "</details><b>" not in text
    assert text.count("</details>") == 1
    assert {len(row) for row in table_rows(text, "path |")} == {COLUMNS}
    assert not any(line.startswith("## new") for line in text.splitlines())


def test_summaries_are_added_one_below_the_other(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "summary.md"
    append_summary(file, "first\n")
    append_summary(file, "second\n")
    assert file.read_text() == "first\n\nsecond\n\n"
    with pytest.raises(DataError, match="cannot be written"):
        append_summary(file / "below", "x")


def test_json_says_whether_it_passed(result: Result) -> None:
    baseline = baseline_of(result)
    found: Any = to_json(check(replace(result, k=10), baseline))
    assert json.loads(json.dumps(found)) == found
    assert (found["passed"], found["failed"]) == (False, 1)
    assert found["checks"] == len(found["findings"])
    (bad,) = [finding for finding in found["findings"] if not finding["ok"]]
    assert bad == {"ok": False, "what": "baseline fits: k", "found": "10", "needed": "100", "kind": "fit"}
    assert to_json(check(result, baseline))["passed"] is True
    assert to_json([])["passed"] is False
