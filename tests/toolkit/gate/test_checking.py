"""The gate: each condition on its own, thresholds and baselines that are refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.errors import DataError, UnknownNameError, UsageError
from maxsim_eval.gate.checking import (
    Finding,
    baseline_of,
    check,
    check_thresholds,
    load_baseline,
    load_thresholds,
    passed,
    write_baseline,
)
from maxsim_eval.gate.report import render
from maxsim_eval.types import PathResult, Result

METRICS = {"nDCG@10": 0.62, "Recall@10": 0.75, "Recall@100": 0.88, "MAP@100": 0.55}


def parity_of(**changes: Any) -> dict[str, Any]:
    return {
        "reference": "fp32",
        "delta": dict.fromkeys(METRICS, 0.0),
        "spearman": {"mean": 1.0, "min": 1.0, "queries": 300, "sampled": False, "constant": 0, "constant_in_one": 0},
        "overlap": {"@5": 1.0, "@10": 1.0, "@20": 1.0, "@100": 1.0},
        "max_abs_error": 0.0,
        "max_rel_error": 0.0,
        "mismatched_finite": 0,
        **changes,
    }


def path_of(parity: Mapping[str, Any] | None = None, **metrics: float) -> PathResult:
    return PathResult({**METRICS, **{name.replace("_", "@"): value for name, value in metrics.items()}}, {}, {}, parity=parity)


@pytest.fixture
def result() -> Result:
    return Result(
        task={"source": "beir", "dataset": "scifact", "split": "test", "queries": 300, "documents": 5183, "judged_pairs": 339},
        encoder={"name": "lexical", "revision": "1", "dim": 128},
        k=100,
        paths={"fp32": path_of(), "fp16": path_of(parity_of()), "int8": path_of(parity_of())},
        environment={},
        command=[],
    )


def with_path(result: Result, name: str, path: PathResult) -> Result:
    return replace(result, paths={**result.paths, name: path})


def failures(result: Result, baseline: Mapping[str, Any], thresholds: Mapping[str, Any] | None = None) -> list[str]:
    findings = check(result, baseline, thresholds)
    assert passed(findings) == (not [finding for finding in findings if not finding.ok])
    return [finding.what for finding in findings if not finding.ok]


def test_unchanged_result_passes(result: Result) -> None:
    baseline = baseline_of(result)
    findings = check(result, baseline)
    assert passed(findings)
    assert render(findings) == f"gate passed: {len(findings)} checks"
    assert render(findings, every=True).count("\nok  ") == len(findings) - 1


def test_small_changes_pass_and_rises_too(result: Result) -> None:
    baseline = baseline_of(result)
    assert not failures(with_path(result, "fp32", path_of(nDCG_10=0.6196)), baseline)
    assert not failures(with_path(result, "int8", path_of(parity_of(), nDCG_10=0.6171)), baseline)
    risen = replace(
        result, paths={name: replace(path, metrics={**path.metrics, "nDCG@10": 0.7}) for name, path in result.paths.items()}
    )
    assert not failures(risen, baseline)


@pytest.mark.parametrize(
    ("metric", "fallen"), [("nDCG@10", 0.6194), ("Recall@100", 0.878), ("MAP@100", 0.5), ("Recall@10", math.nan)]
)
def test_a_fall_of_the_reference_fails(result: Result, metric: str, fallen: float) -> None:
    changed = {name: replace(path, metrics={**path.metrics, metric: fallen}) for name, path in result.paths.items()}
    found = failures(replace(result, paths=changed), baseline_of(result))
    assert f"fp32: {metric} against the baseline" in found


@pytest.mark.parametrize(
    ("name", "path", "what"),
    [
        ("fp16", path_of(parity_of(), nDCG_10=0.6194), "fp16: |delta nDCG@10|"),
        ("fp16", path_of(parity_of(), nDCG_10=0.6206), "fp16: |delta nDCG@10|"),  # better is different, too
        ("fp16", path_of(parity_of(), Recall_10=0.7487), "fp16: |delta Recall@10|"),
        ("fp16", path_of(parity_of(spearman={"mean": 0.99989, "constant_in_one": 0})), "fp16: Spearman, mean"),
        ("fp16", path_of(parity_of(overlap={"@10": 0.9989})), "fp16: top-10 overlap"),
        ("fp16", path_of(parity_of(max_rel_error=0.0006)), "fp16: max rel error"),
        ("fp16", path_of(parity_of(mismatched_finite=1)), "fp16: finite in one only"),
        ("fused-fp32", path_of(parity_of(), nDCG_10=0.6194), "fused-fp32: |delta nDCG@10|"),
        ("python:my.kernel:score", path_of(parity_of(), nDCG_10=0.6194), "python:my.kernel:score: |delta nDCG@10|"),
        ("int8", path_of(parity_of(), nDCG_10=0.6169), "int8: |delta nDCG@10|"),
        ("int8-corpus", path_of(parity_of(), nDCG_10=0.6169), "int8-corpus: |delta nDCG@10|"),
        ("int8", path_of(parity_of(spearman={"mean": 0.9989, "constant_in_one": 0})), "int8: Spearman, mean"),
        ("int8", path_of(parity_of(overlap={"@20": 0.949})), "int8: top-20 overlap"),
        ("bf16", path_of(parity_of(overlap={"@10": 0.994})), "bf16: top-10 overlap"),
        ("fp8", path_of(parity_of(), nDCG_10=0.6145), "fp8: |delta nDCG@10|"),
        (
            "int8",
            path_of(parity_of(spearman={"mean": 1.0, "constant_in_one": 2})),
            "int8: queries with constant scores in one path",
        ),
    ],
)
def test_each_bound_on_a_path(result: Result, name: str, path: PathResult, what: str) -> None:
    assert failures(with_path(result, name, path), baseline_of(result)) == [what]


def test_values_that_are_null_fail(result: Result) -> None:
    empty = parity_of(
        spearman={"mean": None, "constant_in_one": None}, overlap={"@10": None}, max_rel_error=None, mismatched_finite=None
    )
    for parity in (empty, None, {}, {"spearman": 1, "overlap": []}):
        found = failures(with_path(result, "fp16", path_of(parity)), baseline_of(result))
        assert len(found) == 5, found
    assert failures(with_path(result, "fp16", path_of(parity_of(), nDCG_10=math.nan)), baseline_of(result)) == [
        "fp16: |delta nDCG@10|"
    ]
    without = with_path(result, "fp16", PathResult({}, {}, {}, parity=parity_of()))
    assert failures(without, baseline_of(result)) == ["fp16: |delta nDCG@10|", "fp16: |delta Recall@10|"]


def test_delta_entries_are_not_trusted(result: Result) -> None:
    claimed = path_of(parity_of(delta={"nDCG@10": 0.0}), nDCG_10=0.5)
    assert failures(with_path(result, "fp16", claimed), baseline_of(result)) == ["fp16: |delta nDCG@10|"]


@pytest.mark.parametrize("key", ["queries", "documents", "judged_pairs"])
def test_changed_counts_fail(result: Result, key: str) -> None:
    changed = replace(result, task={**result.task, key: result.task[key] - 1})
    assert failures(changed, baseline_of(result)) == [f"number of {key.replace('_', ' ')}"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"task": {"dataset": "nfcorpus"}}, "task dataset"),
        ({"task": {"split": "dev"}}, "task split"),
        ({"encoder": {"name": "colbertv2"}}, "encoder name"),
        ({"encoder": {"revision": "2"}}, "encoder revision"),
        ({"k": 10}, "k"),
    ],
)
def test_a_baseline_of_something_else_does_not_fit(result: Result, changes: dict[str, Any], what: str) -> None:
    merged = {key: {**getattr(result, key), **value} if isinstance(value, dict) else value for key, value in changes.items()}
    findings = check(replace(result, **merged), baseline_of(result))
    assert [finding.what for finding in findings if not finding.ok] == [f"baseline fits: {what}"]
    assert not any("against the baseline" in finding.what for finding in findings)  # those numbers mean something else


def limited(result: Result, ids: str = "ab" * 32, **counts: int) -> Result:
    """The result as one of a subset; its counts stay, so that only `limits` can tell."""
    sizes = {"queries": 1000, "documents": 60_000, **counts}
    limits = {
        "seed": 0,
        **{key: {"limit": result.task[key], "before": sizes[key], "after": result.task[key]} for key in sizes},
        "judged_pairs": {"before": 2000, "after": 339},
        "ids_sha256": ids,
    }
    return replace(result, task={**result.task, "limits": limits})


def test_a_subset_is_compared_with_the_same_subset_only(result: Result, tmp_path: Path) -> None:
    some, what = limited(result), "baseline fits: task subset"
    write_baseline(tmp_path / "some.json", some)
    baseline = load_baseline(tmp_path / "some.json")
    assert not failures(some, baseline)
    for mine, theirs in (
        (some, baseline_of(result)),
        (result, baseline),
        (limited(result, "cd" * 32), baseline),
        (limited(result, documents=70_000), baseline),
    ):
        findings = check(mine, theirs)
        assert [finding.what for finding in findings if not finding.ok] == [what]
        assert not any("against the baseline" in finding.what for finding in findings)
        assert not passed(findings)
        failed = next(finding for finding in findings if not finding.ok)
        assert failed.found != failed.needed, "the message must show what differs"
    (line, _) = render(check(some, baseline_of(result))).splitlines()  # no hint: a new baseline would be one of something else
    assert line == (
        f"FAIL  {what}: 300 of 1,000 queries and 5,183 of 60,000 documents (seed 0, ids abababababab), "
        "need the whole collection"
    )


def test_a_baseline_without_limits_is_of_the_whole(result: Result) -> None:
    assert "limits" not in baseline_of(result)["task"]
    assert not failures(replace(result, task={**result.task, "limits": None}), baseline_of(result))


def test_a_missing_path_fails(result: Result) -> None:
    paths = {name: path for name, path in result.paths.items() if name != "int8"}
    assert failures(replace(result, paths=paths), baseline_of(result)) == ["path int8"]


def test_a_missing_reference_fails(result: Result) -> None:
    paths = {name: path for name, path in result.paths.items() if name != "fp32"}
    found = failures(replace(result, paths=paths, reference=None), baseline_of(result))
    assert found == ["baseline fits: reference path", "path fp32", "reference path"]


def test_a_path_no_class_covers_fails(result: Result) -> None:
    found = check(with_path(result, "mystery", path_of(parity_of())), baseline_of(result))
    assert [(f.what, f.found) for f in found if not f.ok] == [("mystery: thresholds", "no class matches")]


def test_a_metric_the_baseline_lacks_fails(result: Result) -> None:
    baseline = baseline_of(result)
    del baseline["paths"]["fp32"]["MAP@100"]
    assert failures(result, baseline) == ["fp32: MAP@100 against the baseline"]


def test_a_metric_may_have_another_of_its_names(result: Result) -> None:
    """In the result, its statistics and the baseline, each its own."""
    names = {"nDCG@10": "ndcg_cut_10", "Recall@10": "R@10", "Recall@100": "R@100", "MAP@100": "AP@100"}
    entry = {"mean": 0.0, "low": 0.0, "high": 0.0, "queries": 300}
    parity = parity_of(statistics=dict.fromkeys(names.values(), entry))
    other = {
        name: replace(
            path, metrics={names[metric]: value for metric, value in path.metrics.items()}, parity=path.parity and parity
        )
        for name, path in result.paths.items()
    }
    renamed = replace(result, paths=other)
    for baseline in (baseline_of(result), baseline_of(renamed)):
        assert [finding for finding in check(renamed, baseline, equivalent=True) if not finding.ok] == []
    other["fp16"] = replace(other["fp16"], metrics={**other["fp16"].metrics, "R@10": 0.7})
    assert failures(replace(result, paths=other), baseline_of(result)) == ["fp16: |delta Recall@10|"]


def test_render_puts_failures_first() -> None:
    findings = [Finding(True, "a", "1", "1"), Finding(False, "b", "2", "<= 1")]
    assert render(findings) == "FAIL  b: 2, need <= 1\ngate FAILED: 1 of 2 checks"
    assert render(findings, every=True).splitlines()[:2] == ["FAIL  b: 2, need <= 1", "ok    a: 1"]
    assert not passed([])


def test_baseline_file_round_trip(result: Result, tmp_path: Path) -> None:
    write_baseline(tmp_path / "baseline.json", result)
    baseline = load_baseline(tmp_path / "baseline.json")
    assert baseline == baseline_of(result)
    assert baseline["schema"] == "maxsim-eval/baseline/1"
    assert len((tmp_path / "baseline.json").read_text()) < 2000
    assert not failures(result, baseline)


def test_no_baseline_of_half_a_result(result: Result) -> None:
    with pytest.raises(UsageError, match="no reference path"):
        baseline_of(replace(result, reference=None))
    with pytest.raises(DataError, match=r"path 'fp16' has no value for nDCG@10"):
        baseline_of(with_path(result, "fp16", path_of(parity_of(), nDCG_10=math.nan)))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("schema",), "maxsim-eval/baseline/2", "schema is 'maxsim-eval/baseline/2'"),
        (("task",), None, "'task' is null"),
        (("task", "dataset"), 3, "'dataset' is 3"),
        (("task", "queries"), "300", "'queries' is \"300\""),
        (("task", "limits"), "some", "'limits' is \"some\", need null or an object"),
        (("task", "limits"), {"seed": 0}, "'limits': no 'queries'"),
        (("encoder", "name"), None, "'name' is null"),
        (("k",), "100", "'k' is \"100\""),
        (("reference",), "fp64", "reference 'fp64' is not among its paths: fp32, fp16, int8"),
        (("paths", "fp32"), [], r"'fp32' is \[\]"),
        (("paths", "fp32", "nDCG@10"), None, "'nDCG@10' is null, need a number"),
        (("paths",), {}, "is not among its paths: none"),
    ],
)
def test_malformed_baselines(result: Result, tmp_path: Path, keys: tuple[str, ...], value: Any, message: str) -> None:
    baseline: Any = baseline_of(result)
    place = baseline
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (tmp_path / "b.json").write_text(json.dumps(baseline))
    with pytest.raises(DataError, match=r"b\.json.*" + message):
        load_baseline(tmp_path / "b.json")


def test_unreadable_baselines(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"baseline .*absent\.json: cannot be read"):
        load_baseline(tmp_path / "absent.json")
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        load_baseline(tmp_path / "b.json")
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(DataError, match="schema is"):
        load_baseline(tmp_path / "b.json")


def test_default_thresholds_are_the_papers() -> None:
    thresholds = load_thresholds()
    assert thresholds["fall"]["nDCG@10"] == 5e-4
    exact, int8 = thresholds["classes"]["exact"], thresholds["classes"]["int8"]
    assert (exact["delta"], exact["spearman_mean"], exact["overlap"]) == (
        {"nDCG@10": 5e-4, "Recall@10": 1.2e-3},
        0.9999,
        {"@10": 0.999},
    )
    assert (int8["delta"], int8["spearman_mean"], int8["overlap"]) == ({"nDCG@10": 3e-3}, 0.999, {"@20": 0.95})


def test_own_thresholds_replace_the_defaults(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text('[fall]\n"nDCG@10" = 0.5\n[classes.all]\npaths = ["*"]\nspearman_min = 0.5\nmax_abs_error = 1\n')
    thresholds = load_thresholds(path)
    low = parity_of(spearman={"mean": 0.1, "min": 0.6}, overlap={}, max_abs_error=2)
    assert failures(with_path(result, "mystery", path_of(low)), baseline_of(result), thresholds) == ["mystery: max abs error"]


def edited(**changes: Any) -> dict[str, Any]:
    thresholds = copy.deepcopy(dict(load_thresholds()))
    thresholds["classes"]["exact"].update(changes)
    return thresholds


@pytest.mark.parametrize(
    ("thresholds", "error", "message"),
    [
        ({**edited(), "fal": {}}, UnknownNameError, r"'fal'\. Did you mean 'fall'"),
        (edited(spearman=0.9), UnknownNameError, r"'spearman'\. Did you mean 'spearman_m"),
        (edited(delta={"nDGC@10": 0.1}), UnknownNameError, "unknown metric 'nDGC@10'"),
        (edited(overlap={"@7": 0.1}), UnknownNameError, "'@7'"),
        (edited(delta={"nDCG@10": "0.1"}), UsageError, "delta 'nDCG@10': got '0.1', need a number from 0 to 1"),
        (edited(delta={"nDCG@10": -0.1}), UsageError, "need a number from 0 to 1"),
        (edited(delta={"nDCG@10": math.nan}), UsageError, "need a number from 0 to 1"),
        (edited(delta=0.1), UsageError, "need a table"),
        (edited(spearman_mean=2), UsageError, "spearman_mean: got 2"),
        (edited(mismatched_finite=True), UsageError, "mismatched_finite: got True"),
        (edited(paths=[]), UsageError, r"paths is \[\]"),
        (edited(paths="fp16"), UsageError, "need a list of path names"),
        ({**edited(), "fall": {}}, UsageError, r"no \[fall\] entries"),
        ({"fall": {"nDCG@10": 0.1}}, UsageError, r"no \[classes\] entries"),
        ({**edited(), "classes": {"exact": 1}}, UsageError, "class 'exact': got 1, need a table"),
        ({**edited(), "schema": "maxsim-eval/thresholds/2"}, UsageError, "schema is 'maxsim-eval/thresholds/2'"),
    ],
)
def test_refused_thresholds(result: Result, thresholds: dict[str, Any], error: type[UsageError], message: str) -> None:
    with pytest.raises(error, match=message):
        check_thresholds(thresholds)
    with pytest.raises(error, match=message):
        check(result, baseline_of(result), thresholds)


def test_unreadable_thresholds(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_thresholds(tmp_path / "absent.toml")
    (tmp_path / "t.toml").write_text("fall = [")
    with pytest.raises(UsageError, match="not valid TOML"):
        load_thresholds(tmp_path / "t.toml")
