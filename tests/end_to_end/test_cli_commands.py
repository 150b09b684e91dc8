"""compare, gate and report on the demo's result."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.gate.checking import load_thresholds

GATE, USAGE, DATA = 1, 2, 3


def doctored(report: Path, change: Any) -> Path:
    """The result with a change, in a file beside it."""
    result = json.loads((report / "result.json").read_text(encoding="utf-8"))
    change(result)
    target = report / "doctored.json"
    target.write_text(json.dumps(result), encoding="utf-8")
    return target


# compare --------------------------------------------------------------------------------------------------------------


def test_compare_two_paths_of_a_result(report: Path, cli: Any, tmp_path: Path) -> None:
    outcome = cli("compare", report / "result.json", f"{report}/result.json:int8", cwd=tmp_path).fine()
    said = " ".join(outcome.out.split())
    for text in ("40 judged queries", "demo-small-lexical:fp32", "demo-small-lexical:int8", "nDCG@10", "top-10 overlap"):
        assert text in said
    assert "order of the top 100 differs" in said
    assert "equivalent" in said.lower()


def test_compare_results_of_two_runs(report: Path, demo: Any, cli: Any, tmp_path: Path) -> None:
    outcome = cli("compare", report / "result.json", demo.results / "result.json", cwd=tmp_path).fine()
    assert "ranking identical" in outcome.out
    assert "Equivalent in all 10 metrics" in outcome.out


@pytest.mark.parametrize(("columns", "most"), [("80", 80), ("100", 100), ("", 200)])
def test_the_report_is_as_wide_as_columns_says(
    columns: str, most: int, report: Path, cli: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for options in ((), ("--verbose",)):
        lines = cli("report", report / "result.json", *options, cwd=tmp_path).fine().out.splitlines()
        assert max(map(len, lines)) <= most
        assert (len(lines) > 40) == bool(options)
    assert max(map(len, lines)) > most - 10, "sentences take the room there is"


def test_compare_trec_runs(report: Path, qrels: Path, demo: Any, cli: Any, tmp_path: Path) -> None:
    rows = [line.split() for line in (report / "runs" / "fp32.trec").read_text().splitlines()]
    other = tmp_path / "other.trec"  # the run of another tool: no order by rank, fewer documents
    other.write_text("".join(f"{r[0]} Q0 {r[2]} 0 {r[4]} tool\n" for r in reversed(rows) if int(r[3]) <= 20))
    outcome = cli("compare", report / "runs" / "fp32.trec", other, "--qrels", qrels, "--json", cwd=tmp_path).fine()
    found = json.loads(outcome.out)
    assert found["queries"] == 40
    first, second = found["inputs"] if isinstance(found["inputs"], list) else found["inputs"].values()
    ours = demo.result["paths"]["fp32"]["metrics"]
    assert first["metrics"]["nDCG@10"] == pytest.approx(ours["nDCG@10"], abs=1e-12)
    assert second["metrics"]["Recall@100"] == pytest.approx(ours["Recall@20"], abs=0.05)
    assert second["parity"]["overlap"]["@10"] > 0.97


def test_compare_prints_the_documented_json(report: Path, cli: Any, tmp_path: Path) -> None:
    outcome = cli("compare", report / "result.json", f"{report}/result.json:int8", "--json", cwd=tmp_path).fine()
    found = json.loads(outcome.out)
    assert found["schema"] == "maxsim-eval/comparison/1"
    assert found["reference"] == "demo-small-lexical:fp32"
    assert set(found["inputs"]) == {"demo-small-lexical:fp32", "demo-small-lexical:int8"}
    assert "NaN" not in outcome.out


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_ids_that_the_terminal_has_no_letters_for(
    encoding: str, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ("q 0 中😀 1\n", "q Q0 中😀 1 2.0 x\nq Q0 b 2 1.0 x\n", "q Q0 b 1 2.0 x\nq Q0 中😀 2 1.0 x\n")
    for name, text in zip(("qrels", "one.trec", "two.trec"), lines, strict=True):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    words = ("-c", "from maxsim_eval.cli import main; main()", "compare", "one.trec", "two.trec", "--qrels", "qrels")
    for options in (("--verbose",), ("--json",)):
        process = start([*words, *options], tmp_path)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        if options == ("--json",):
            found = json.loads(out)["inputs"]["two"]["parity"]["most_changed"][0]["moved"]
            assert [moved["document"] for moved in found] == ["中😀", "b"], "escapes of JSON"
        else:
            assert r"\u4e2d\ud83d\ude00 (1 to 2, relevance 1)" in out


def test_compare_writes_the_reports_of_an_evaluation(report: Path, qrels: Path, cli: Any, tmp_path: Path) -> None:
    inputs = (report / "result.json", f"{report}/result.json:int8", report / "runs" / "fp16.trec")
    options = ("--qrels", qrels, "--metrics", "nDCG@10,R@100", "--out", "both")
    outcome = cli("compare", *inputs, *options, "--verbose", cwd=tmp_path).fine()
    assert "fp16, R@100" in outcome.out
    written = json.loads((tmp_path / "both" / "result.json").read_text(encoding="utf-8"))
    assert written["command"][:2] == ["evaluate.py", "compare"]
    assert list(written["paths"]) == ["demo-small-lexical:fp32", "demo-small-lexical:int8", "fp16"]
    again = cli("report", tmp_path / "both" / "result.json", "--verbose", cwd=tmp_path).fine()
    assert "Differences from demo-small-lexical:fp32" in again.out
    assert "nDCG@10" in (tmp_path / "both" / "metrics.csv").read_text(encoding="utf-8")
    cli("compare", *inputs, *options[:-1], report, cwd=tmp_path).refused(USAGE, "report of an evaluation", "--out")


def test_compare_reads_pipes(report: Path, qrels: Path, cli: Any, piped: Callable[[str], Path], tmp_path: Path) -> None:
    runs = [report / "runs" / f"{name}.trec" for name in ("fp32", "int8")]
    few = tmp_path / "few.trec"
    few.write_text("".join(runs[1].read_text().splitlines(keepends=True)[:500]))  # a pipe holds 64 KiB
    read, expected = (
        json.loads(cli("compare", runs[0], second, "--qrels", judged, "--json", cwd=tmp_path).fine().out)
        for second, judged in ((piped(few.read_text()), piped(qrels.read_text())), (few, qrels))
    )
    assert [one["per_query"] for one in read["inputs"].values()] == [one["per_query"] for one in expected["inputs"].values()]


@pytest.mark.parametrize(
    ("words", "code", "texts"),
    [
        (("{report}/result.json", "{report}/result.json:int8", "--metrics", "R@5"), USAGE, ("--metrics", "--qrels")),
        (("{report}/result.json",), USAGE, ("got 1 input",)),
        (("{report}/result.json", "{report}/result.json:int9"), USAGE, ("'int9'", "Did you mean 'int8'")),
        (("{report}/runs/fp32.trec", "{report}/runs/int8.trec"), USAGE, ("--qrels",)),
        (("{report}/result.json", "missing.json"), DATA, ("missing.json", "cannot be read")),
        (("{report}/result.json", "{report}/report.md"), DATA, ("report.md:1", "columns")),
    ],
)
def test_compare_refuses(
    words: tuple[str, ...], code: int, texts: tuple[str, ...], report: Path, cli: Any, tmp_path: Path
) -> None:
    cli("compare", *(word.format(report=report) for word in words), cwd=tmp_path).refused(code, *texts)


def test_compare_takes_the_names_that_metrics_takes(report: Path, qrels: Path, cli: Any, tmp_path: Path) -> None:
    runs = [report / "runs" / f"{name}.trec" for name in ("fp32", "int8")]
    found = cli("compare", *runs, "--qrels", qrels, "--metrics", "RBP(p=0.8,rel=1),nDCG@10", "--json", cwd=tmp_path).fine().out
    assert "RBP(p=0.8,rel=1)" in found


def test_latex_and_json_are_two_answers(cli: Any, tmp_path: Path) -> None:
    cli("demo", "--latex", "--json", cwd=tmp_path).refused(USAGE, "--latex: not with --json")


# gate -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def baseline(report: Path, cli: Any, tmp_path: Path) -> Path:
    path = tmp_path / "base" / "demo.json"
    outcome = cli("gate", report / "result.json", "--baseline", path, "--update-baseline", cwd=tmp_path).fine()
    assert str(path) in outcome.out
    return path


def test_gate_passes_on_what_the_baseline_was_made_of(
    report: Path, baseline: Path, demo: Any, cli: Any, tmp_path: Path
) -> None:
    content = json.loads(baseline.read_text(encoding="utf-8"))
    assert content["schema"] == "maxsim-eval/baseline/1"
    assert content["paths"]["fp32"] == demo.result["paths"]["fp32"]["metrics"]
    outcome = cli("gate", report / "result.json", "--baseline", baseline, cwd=tmp_path).fine()
    assert "gate passed" in outcome.out
    assert "FAIL" not in outcome.out
    verbose = cli("gate", report / "result.json", "--baseline", baseline, "--verbose", cwd=tmp_path).fine()
    assert verbose.out.count("ok  ") > 20
    found = json.loads(cli("gate", report / "result.json", "--baseline", baseline, "--json", cwd=tmp_path).fine().out)
    assert found["passed"] is True
    assert all(finding["ok"] for finding in found["findings"])
    assert found["checks"] == len(found["findings"]) == verbose.out.count("ok  ")


def lower(result: dict[str, Any]) -> None:
    result["paths"]["fp32"]["metrics"]["nDCG@10"] -= 0.01
    del result["paths"]["fp32"]["per_query"]["nDCG@10"]  # a mean is that of its queries


def drift(result: dict[str, Any]) -> None:
    result["paths"]["fp16"]["parity"]["overlap"]["@10"] = 0.9


def drop(result: dict[str, Any]) -> None:
    del result["paths"]["int8"]


def other(result: dict[str, Any]) -> None:
    result["encoder"]["name"] = "colbertv2"


def null(result: dict[str, Any]) -> None:
    result["paths"]["int8"]["parity"]["spearman"]["mean"] = None


@pytest.mark.parametrize(
    ("change", "what"),
    [(lower, "nDCG@10"), (drift, "top-10 overlap"), (drop, "path int8"), (other, "encoder name"), (null, "Spearman")],
)
def test_gate_fails_on_a_doctored_result(
    change: Any, what: str, report: Path, baseline: Path, cli: Any, tmp_path: Path
) -> None:
    bad, before = doctored(report, change), baseline.read_bytes()
    outcome = cli("gate", bad, "--baseline", baseline, cwd=tmp_path)
    assert outcome.code == GATE
    assert outcome.err == ""
    failed = [line for line in outcome.out.splitlines() if line.startswith("FAIL")]
    assert any(what in line for line in failed), outcome.out
    assert "gate FAILED" in outcome.out
    assert baseline.read_bytes() == before
    as_json = cli("gate", bad, "--baseline", baseline, "--json", cwd=tmp_path)
    assert as_json.code == GATE
    found = json.loads(as_json.out)
    assert found["passed"] is False
    assert sum(not finding["ok"] for finding in found["findings"]) == found["failed"] == len(failed)


def test_gate_refuses_to_compare_another_subset(demo: Any, baseline: Path, cli: Any, tmp_path: Path) -> None:
    folder = demo.copy(tmp_path / "work", "datasets", "embeddings_cache")
    for seed in ("0", "1"):
        limits = ("--limit-documents", "200", "--limit-queries", "20", "--limit-seed", seed)
        cli("demo", *limits, "--quiet", "--out", tmp_path / seed, cwd=folder).fine()
    some, other = (tmp_path / seed / "result.json" for seed in ("0", "1"))
    subset = "20 of 40 queries and 200 of 300 documents (seed 0, ids "
    against_whole = cli("gate", some, "--baseline", baseline, cwd=tmp_path)
    assert against_whole.code == GATE
    assert f"FAIL  baseline fits: task subset: {subset}" in against_whole.out
    assert "need the whole collection" in against_whole.out
    assert "against the baseline" not in against_whole.out, "metrics of a subset were compared with those of the whole"
    cli("gate", some, "--baseline", "some.json", "--update-baseline", cwd=tmp_path).fine()
    assert "gate passed" in cli("gate", some, "--baseline", "some.json", cwd=tmp_path).fine().out
    for result in (other, demo.results / "result.json"):  # equal counts do not make it the same subset
        outcome = cli("gate", result, "--baseline", "some.json", cwd=tmp_path)
        assert outcome.code == GATE
        assert "FAIL  baseline fits: task subset" in outcome.out
        assert f"need {subset}" in outcome.out
        assert "against the baseline" not in outcome.out


def test_gate_with_thresholds_of_ones_own(report: Path, baseline: Path, cli: Any, tmp_path: Path) -> None:
    strict = tmp_path / "strict.toml"
    strict.write_text('[fall]\n"nDCG@10" = 0.0\n[classes.all]\npaths = ["*"]\noverlap = { "@10" = 1.0 }\n')
    assert tomllib.loads(strict.read_text())
    outcome = cli("gate", report / "result.json", "--baseline", baseline, "--thresholds", strict, cwd=tmp_path)
    assert outcome.code == GATE
    assert "int8: top-10 overlap" in outcome.out
    assert load_thresholds()["fall"]


@pytest.mark.parametrize(
    ("result", "base", "code", "texts"),
    [
        ("{report}/result.json", "none.json", DATA, ("none.json", "cannot be read")),
        ("none.json", "{base}", DATA, ("none.json", "cannot be read")),
        ("{report}/report.md", "{base}", DATA, ("report.md", "JSON")),
        ("{base}", "{base}", DATA, ("demo.json", "schema")),
        ("{report}/result.json", "{report}/result.json", DATA, ("result.json", "schema")),
    ],
)
def test_gate_refuses(
    result: str, base: str, code: int, texts: tuple[str, ...], report: Path, baseline: Path, cli: Any, tmp_path: Path
) -> None:
    words = [word.format(report=report, base=baseline) for word in ("gate", result, "--baseline", base)]
    cli(*words, cwd=tmp_path).refused(code, *texts)


def test_no_baseline_of_a_result_without_a_reference(report: Path, cli: Any, tmp_path: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        del result["paths"]["fp32"]
        result["reference"] = None

    bad = doctored(report, change)
    cli("gate", bad, "--baseline", "new.json", "--update-baseline", cwd=tmp_path).refused(USAGE, "reference")
    assert not (tmp_path / "new.json").exists()


def test_a_baseline_that_cannot_be_written(report: Path, cli: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = cli("gate", report / "result.json", "--baseline", "file/base.json", "--update-baseline", cwd=tmp_path)
    outcome.refused(DATA, "file/base.json", "cannot be written")


# report ---------------------------------------------------------------------------------------------------------------


def test_report_reads_nothing_but_the_file(report: Path, demo: Any, cli: Any, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "result.json").write_bytes((report / "result.json").read_bytes())
    outcome = cli("report", "result.json", "--out", "again", cwd=alone).fine()
    shown = demo.outcome.out.rpartition("report: ")[0]
    assert outcome.out == shown, "rendered again it must look the same"
    for name in ("report.md", "metrics.csv", "per_query.csv"):
        assert (alone / "again" / name).read_bytes() == (demo.results / name).read_bytes()
    pages = [(folder / "report.html").read_text(encoding="utf-8") for folder in (alone / "again", demo.results)]
    assert pages[0].partition("How to reproduce")[0] == pages[1].partition("How to reproduce")[0]
    assert ["runs/fp32.trec" in page for page in pages] == ["evaluate.py compare" in page for page in pages] == [False, True]
    again, first = (
        json.loads((folder / "result.json").read_text(encoding="utf-8")) for folder in (alone / "again", demo.results)
    )
    assert again.pop("paths") == {name: {**path, "run": None} for name, path in first.pop("paths").items()}
    assert again == first
    (alone / "other" / "runs").mkdir(parents=True)
    (alone / "other" / "runs" / "fp32.trec").write_text("q Q0 d 1 1 x")
    cli("report", "result.json", "--out", "other", cwd=alone).refused(USAGE, "other: holds runs of another evaluation")


def test_report_refuses(report: Path, cli: Any, tmp_path: Path) -> None:
    cli("report", "none.json", cwd=tmp_path).refused(DATA, "none.json", "cannot be read")
    (tmp_path / "empty").mkdir()
    cli("report", "empty", cwd=tmp_path).refused(DATA, "empty", "result.json")
    newer = doctored(report, lambda result: result.update(schema="maxsim-eval/result/2"))
    cli("report", newer, cwd=tmp_path).refused(DATA, "doctored.json", "maxsim-eval/result/2", "maxsim-eval/result/1")
