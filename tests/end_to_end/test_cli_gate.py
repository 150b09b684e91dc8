"""The gate's command: summaries, baselines that are replaced, and the workflow file that others copy."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from maxsim_eval.gate.checking import load_baseline
from places import ROOT

GATE, USAGE, DATA = 1, 2, 3
BASELINE = ROOT / "tests" / "baselines" / "demo-lexical.json"
WORKFLOW = ROOT / "examples" / "github-workflow.yml"


@pytest.fixture
def result(demo: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return Path(demo.results / "result.json")


def changed(demo: Any, file: Path, change: Any) -> Path:
    content = demo.result
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def without_overlap(content: dict[str, Any]) -> None:
    content["paths"]["int8"]["parity"]["overlap"]["@20"] = 0.5


def test_the_committed_baseline_is_that_of_the_demo(result: Path, cli: Any, tmp_path: Path) -> None:
    """And the page for CI owners shows what is printed (last digits aside: they are the machine's)."""
    outcome = cli("gate", result, "--baseline", BASELINE, cwd=tmp_path).fine()
    page = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    for line in outcome.out.splitlines():
        shown = line[:14] if line.startswith(("fp", "int")) else line
        assert f"\n{shown}" in page, "docs/gate.md shows another output"
    quiet = cli("gate", result, "--baseline", BASELINE, "--quiet", cwd=tmp_path).fine()
    assert quiet.out == outcome.out.splitlines(keepends=True)[-1]
    assert not any(tmp_path.iterdir())


def test_the_summary_goes_where_github_wants_it(
    result: Path, demo: Any, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = changed(demo, tmp_path / "bad.json", without_overlap)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    cli("gate", result, "--baseline", BASELINE, cwd=tmp_path).fine()
    assert cli("gate", bad, "--baseline", BASELINE, "--json", cwd=tmp_path).code == GATE
    both = (tmp_path / "step.md").read_text(encoding="utf-8")
    assert both.index("gate passed") < both.index("gate FAILED: 1 of")
    assert "| int8: top-20 overlap | 0.5000000 | >= 0.95 |" in both
    cli("gate", result, "--baseline", BASELINE, "--summary", "mine.md", cwd=tmp_path).fine()
    assert (tmp_path / "mine.md").read_text(encoding="utf-8").count("gate passed") == 1
    assert (tmp_path / "step.md").read_text(encoding="utf-8") == both
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "")
    cli("gate", result, "--baseline", BASELINE, cwd=tmp_path).fine()


def test_a_summary_that_cannot_be_written(result: Path, cli: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = cli("gate", result, "--baseline", BASELINE, "--summary", "file/summary.md", cwd=tmp_path)
    assert outcome.code == DATA
    assert "gate passed" in outcome.out, "the answer is said first"
    assert "file/summary.md: cannot be written" in outcome.err


def test_a_new_baseline_has_no_summary(result: Path, cli: Any, tmp_path: Path) -> None:
    asked = ("gate", result, "--baseline", "new.json", "--update-baseline", "--summary", "mine.md")
    cli(*asked, cwd=tmp_path).refused(USAGE, "--summary: not with --update-baseline")
    assert list(tmp_path.iterdir()) == []


def test_a_baseline_is_replaced_on_purpose_only(result: Path, demo: Any, cli: Any, tmp_path: Path) -> None:
    words = ("--baseline", "base.json", "--update-baseline")
    assert "a new baseline" in cli("gate", result, *words, cwd=tmp_path).fine().out
    assert "nothing changed" in cli("gate", result, *words, cwd=tmp_path).fine().out
    before = (tmp_path / "base.json").read_bytes()
    other = changed(demo, tmp_path / "other.json", lambda content: content["encoder"].update(name="colbertv2"))
    cli("gate", other, *words, cwd=tmp_path).refused(USAGE, "base.json", "encoder name lexical there", "--replace")
    assert (tmp_path / "base.json").read_bytes() == before
    cli("gate", other, *words[:2], "--replace", cwd=tmp_path).refused(USAGE, "--update-baseline")
    said = json.loads(cli("gate", other, *words, "--replace", "--json", cwd=tmp_path).fine().out)
    assert said == {"baseline": "base.json", "written": True, "changes": ["a new baseline"]}
    assert load_baseline(tmp_path / "base.json")["encoder"]["name"] == "colbertv2"


@pytest.mark.parametrize("target", ["base.json", "none.json"])
def test_a_baseline_behind_a_link_is_not_written(target: str, result: Path, cli: Any, tmp_path: Path) -> None:
    words = ("--baseline", "link.json", "--update-baseline")
    cli("gate", result, "--baseline", "base.json", "--update-baseline", cwd=tmp_path).fine()
    (tmp_path / "link.json").symlink_to(target)
    cli("gate", result, *words, cwd=tmp_path).refused(USAGE, "link.json: is a link", target)
    assert (tmp_path / "link.json").is_symlink()


def test_a_failing_result_becomes_the_baseline_on_purpose_only(result: Path, demo: Any, cli: Any, tmp_path: Path) -> None:
    bad = changed(demo, tmp_path / "bad.json", without_overlap)
    words = ("--baseline", "base.json", "--update-baseline")
    outcome = cli("gate", bad, *words, cwd=tmp_path)
    assert outcome.code == 1
    assert "FAIL  int8: top-20 overlap" in outcome.out
    assert outcome.err == "base.json: not written; --accept writes it all the same\n"
    checks = json.loads(cli("gate", bad, "--baseline", BASELINE, "--json", cwd=tmp_path).out)["checks"]
    assert f"gate FAILED: 1 of {checks} checks" in outcome.out, "as without --update-baseline"
    assert cli("gate", bad, *words, "--verbose", cwd=tmp_path).out.count("\nok    ") == checks - 1
    assert not (tmp_path / "base.json").exists()
    cli("gate", result.parent, *words, cwd=tmp_path).fine()  # the folder of a result is one
    before = (tmp_path / "base.json").read_bytes()

    def lower(content: dict[str, Any]) -> None:
        for path in content["paths"].values():
            path["metrics"]["nDCG@10"] -= 0.1
            del path["per_query"]["nDCG@10"]  # a mean is that of its queries

    fallen = changed(demo, tmp_path / "fallen.json", lower)
    outcome = cli("gate", fallen, *words, "--json", cwd=tmp_path)
    assert outcome.code == 1
    said = json.loads(outcome.out)
    failed = [finding["what"] for finding in said["findings"] if not finding["ok"]]
    assert failed == ["fp32: nDCG@10 against the baseline"]
    assert (said["checks"], said["failed"]) == (len(said["findings"]), 1) == (checks, 1)
    assert (tmp_path / "base.json").read_bytes() == before
    assert "fp32: nDCG@10: 0.6" in cli("gate", fallen, *words, "--accept", cwd=tmp_path).fine().out
    cli("gate", fallen, *words[:2], "--accept", cwd=tmp_path).refused(USAGE, "--accept: only with --update-baseline")


def test_equivalence_can_be_asked_for(result: Path, cli: Any, tmp_path: Path) -> None:
    words = ("gate", result, "--baseline", BASELINE, "--json")
    plain, asked = (json.loads(cli(*words, *more, cwd=tmp_path).out) for more in ((), ("--require-equivalent",)))
    verdicts = [finding for finding in asked["findings"] if finding["what"].endswith(" equivalent")]
    assert len(verdicts) == asked["checks"] - plain["checks"] == 3
    assert all("(40 queries)" in finding["found"] for finding in verdicts)


# The workflow -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["timeout-minutes"]
    return list(job["steps"])


def test_the_workflow_caches_and_keeps_the_report(steps: list[dict[str, Any]]) -> None:
    used = {step["uses"].partition("@")[0]: step for step in steps if "uses" in step}
    assert set(used) == {"actions/checkout", "actions/setup-python", "actions/cache", "actions/upload-artifact"}
    assert used["actions/cache"]["with"]["path"].split() == ["datasets", "embeddings_cache"]
    assert used["actions/upload-artifact"]["if"] == "always()"
    assert used["actions/upload-artifact"]["with"]["path"] == "results/gate"
    order = [step.get("uses", step.get("name", "")).partition("@")[0] for step in steps]
    assert order.index("actions/cache") < order.index("Evaluate") < order.index("Gate") < order.index("actions/upload-artifact")


def test_the_steps_of_the_workflow_run(
    steps: list[dict[str, Any]], demo: Any, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a runner would, on the demo: no baseline, the one of that run committed, and the gate again."""
    demo.copy(tmp_path, "datasets", "embeddings_cache")
    given = {"SOURCE": "demo", "DATASET": "small", "ENCODER": "lexical", "PATHS": "fp32,fp16,int8", "BASELINE": "ci/base.json"}
    assert set(given) <= set(yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["env"])
    for name, value in {**given, "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}.items():
        monkeypatch.setenv(name, value)
    scripts = {step["name"]: step["run"] for step in steps if "run" in step}

    def run(name: str) -> Any:
        program, *words = shlex.split(scripts[name])
        assert program == "maxsim-eval"
        return cli(*map(os.path.expandvars, words), cwd=tmp_path)

    assert [line.partition(":")[0] for line in run("Evaluate").fine().out.splitlines()] == ["fp32", "fp16", "int8"]
    run("Gate").refused(DATA, "ci/base.json")
    run("Baseline of this run").fine()
    (tmp_path / "ci").mkdir()
    (tmp_path / "results" / "gate" / "new-baseline.json").rename(tmp_path / "ci" / "base.json")
    assert "gate passed" in run("Gate").fine().out
    assert (tmp_path / "summary.md").read_text(encoding="utf-8").startswith("## \N{WHITE HEAVY CHECK MARK} gate passed")
