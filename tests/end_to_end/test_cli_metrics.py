"""metrics on the demo's runs, on trec_eval's own files and on what a pipe gives."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

USAGE, DATA = 2, 3


def test_metrics_of_our_run_are_those_of_the_report(report: Path, qrels: Path, demo: Any, cli: Any, tmp_path: Path) -> None:
    for name in ("fp32", "int8"):
        outcome = cli("metrics", qrels, report / "runs" / f"{name}.trec", "--json", cwd=tmp_path).fine()
        found = json.loads(outcome.out)["runs"][f"{name}.trec"]
        assert found["metrics"] == pytest.approx(demo.result["paths"][name]["metrics"], abs=1e-12)
        assert found["queries"] == {"judged": 40, "in_run": 40, "missing": 0, "not_judged": 0}
        assert outcome.err == ""


def test_metrics_of_ones_choice(report: Path, qrels: Path, cli: Any, tmp_path: Path) -> None:
    outcome = cli("metrics", qrels, report / "runs" / "fp32.trec", "--metrics", "nDCG@10, R@100", cwd=tmp_path).fine()
    *lines, counted = outcome.out.splitlines()
    assert [line.split()[0] for line in lines] == ["nDCG@10", "R@100"], "under the names that were asked for"
    assert all(0 < float(line.split()[1]) <= 1 for line in lines)
    assert counted == "40 of 40 judged queries in the run"


def test_metrics_of_trec_evals_own_files(cli: Any, shared_data: Path, tmp_path: Path) -> None:
    """Under ir-measures' names, against what trec_eval itself printed."""
    names = {"AP": "map", "nDCG@10": "ndcg_cut_10", "R@100": "recall_100", "RR": "recip_rank", "P@5": "P_5", "Success@1": "success_1",
             "AP@30": "map_cut_30", "nDCG": "ndcg", "Rprec": "Rprec", "Bpref": "bpref", "infAP": "infAP", "SetF": "set_F"}  # fmt: skip
    folder = shared_data / "trec_eval"
    printed = dict(line.split("\tall\t") for line in (folder / "out.test.a").read_text().splitlines() if "\tall\t" in line)
    expected = {name.strip(): value.strip() for name, value in printed.items()}
    outcome = cli("metrics", folder / "qrels.test", folder / "results.test", "--metrics", ",".join(names), cwd=tmp_path).fine()
    found = dict(line.split() for line in outcome.out.splitlines()[:-1])
    assert found == {name: expected[measure] for name, measure in names.items()}


def test_metrics_refuse(report: Path, qrels: Path, cli: Any, tmp_path: Path) -> None:
    run = report / "runs" / "fp32.trec"
    cli("metrics", qrels, run, "--metrics", "nDGC@10", cwd=tmp_path).refused(USAGE, "nDGC@10", "nDCG")
    cli("metrics", qrels, tmp_path / "no.trec", cwd=tmp_path).refused(DATA, "no.trec", "cannot be read")
    cli("metrics", run, run, cwd=tmp_path).refused(DATA, "fp32.trec:1", "columns")
    cli("metrics", run, qrels, cwd=tmp_path).refused(
        USAGE, "fp32.trec: is a run, where the judgements are wanted", "swapped with"
    )
    cli("metrics", run, "--qrels", run, "--metrics", "AP", cwd=tmp_path).refused(DATA, "columns")
    cli("metrics", qrels, cwd=tmp_path).refused(USAGE, "only one file", "--qrels FILE RUN...")
    cli("metrics", cwd=tmp_path).refused(USAGE, "got no file")
    cli("metrics", qrels, run, run, cwd=tmp_path).refused(USAGE, "is named twice")
    headless = tmp_path / "headless.tsv"
    headless.write_text("q01\td001\t1\nq02\td002\t1\n")
    cli("metrics", headless, run, cwd=tmp_path).refused(DATA, "headless.tsv:1", "header")
    run.write_text(run.read_text().replace(" 2 ", " 2 nan ", 1))
    cli("metrics", qrels, run, cwd=tmp_path).refused(DATA, "fp32.trec:2", "NaN")


def test_metrics_say_what_was_counted(report: Path, qrels: Path, cli: Any, tmp_path: Path) -> None:
    """A run that lacks queries scored lower in silence; one of another set scored 0."""
    lines = (report / "runs" / "fp32.trec").read_text().splitlines(keepends=True)
    part = tmp_path / "part.trec"
    part.write_text(
        "".join(line for line in lines if line.split()[0] not in ("q01", "q07")) + "other Q0 d001 1 1.0 maxsim-eval/fp32\n"
    )
    outcome = cli("metrics", qrels, part, "--json", cwd=tmp_path).fine()
    assert json.loads(outcome.out)["runs"]["part.trec"]["queries"] == {
        "judged": 40,
        "in_run": 38,
        "missing": 2,
        "not_judged": 1,
    }
    assert "part.trec: 2 of 40 judged queries are not in the run, first 'q01'; they count 0 in every metric" in outcome.err
    alien = tmp_path / "alien.trec"
    alien.write_text("x Q0 d001 1 1.0 x\n")
    cli("metrics", qrels, alien, cwd=tmp_path).refused(DATA, "none of its 1 queries (first 'x') is among the 40 judged ones")


def test_metrics_read_pipes(report: Path, qrels: Path, cli: Any, piped: Callable[[str], Path], tmp_path: Path) -> None:
    run = report / "runs" / "fp32.trec"
    words = ("--metrics", "nDCG@10", "--json")
    read, expected = (
        json.loads(cli("metrics", judged, run, *words, cwd=tmp_path).fine().out)["runs"]
        for judged in (piped(qrels.read_text()), qrels)
    )
    assert read == expected
    few = "".join(run.read_text().splitlines(keepends=True)[:500])
    counted = json.loads(cli("metrics", qrels, piped(few), *words, cwd=tmp_path).fine().out)["runs"]
    assert [one["queries"]["in_run"] for one in counted.values()] == [5]
    # What a pipe holds is taken to be what its place says: no hint that the two were swapped.
    cli("metrics", run, piped(few), cwd=tmp_path).refused(DATA, "fp32.trec:1", "columns")


def test_metrics_of_one_query_have_no_interval(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "qrels").write_text("q 0 a 1\n")
    (tmp_path / "one.trec").write_text("q Q0 a 1 2.0 x\nq Q0 b 2 1.0 x\n")
    (tmp_path / "two.trec").write_text("q Q0 b 1 2.0 y\nq Q0 a 2 1.0 y\n")
    words = ("metrics", "qrels", "one.trec", "two.trec", "--metrics", "MRR@10")
    test = json.loads(cli(*words, "--json", cwd=tmp_path).fine().out)["tests"]["two.trec"]["MRR@10"]
    assert test == {"mean": -0.5, "low": None, "high": None, "p_adjusted": 1.0, "changed": 1, "queries": 1}
    assert "-0.5000" in cli(*words, cwd=tmp_path).fine().out


@pytest.mark.parametrize("names", ["AnyHit@10,MRR@10", "MRR@10,AnyHit@10"])
def test_metrics_list_every_query(names: str, cli: Any, tmp_path: Path) -> None:
    """Also those that the first metric leaves out: AnyHit@k, queries without a relevant document."""
    (tmp_path / "qrels").write_text("q1 0 a 0\nq2 0 a 1\nq3 0 b 1\n")
    (tmp_path / "run.trec").write_text("".join(f"q{number} Q0 a 1 2.0 x\n" for number in (1, 2, 3)))
    lines = cli("metrics", "qrels", "run.trec", "--metrics", names, "--per-query", cwd=tmp_path).fine().out.splitlines()
    rows = [line.split("\t") for line in lines if "\t" in line]
    assert [query for _, query, _ in rows] == ["q1", "q2", "q3"]
    assert rows[0][2] == "MRR@10=0.0000"
    assert set(rows[1][2].split()) == {"AnyHit@10=1.0000", "MRR@10=1.0000"}


def test_metrics_of_several_runs_with_paired_tests(report: Path, qrels: Path, demo: Any, cli: Any, tmp_path: Path) -> None:
    runs = [report / "runs" / f"{name}.trec" for name in ("fp32", "int8")]
    words = ("metrics", "--qrels", qrels, *runs, "--metrics", "nDCG@20,MAP@100")
    found = json.loads(cli(*words, "--json", "--per-query", cwd=tmp_path).fine().out)
    statistics = demo.result["paths"]["int8"]["parity"]["statistics"]
    for metric in ("nDCG@20", "MAP@100"):
        test = found["tests"]["int8.trec"][metric]
        assert {key: test[key] for key in ("mean", "changed", "queries")} == {
            key: pytest.approx(statistics[metric][key]) for key in ("mean", "changed", "queries")
        }
        assert 0 <= test["p_adjusted"] <= 1
    assert found["runs"]["int8.trec"]["per_query"]["nDCG@20"] == demo.result["paths"]["int8"]["per_query"]["nDCG@20"]
    shown = cli(*words, "--per-query", cwd=tmp_path).fine().out.splitlines()
    assert shown[0].split() == ["fp32.trec", "int8.trec", "change", "p"]
    assert shown[1].split()[0] == "nDCG@20"
    assert len(shown) == 1 + 2 + 2 + 2 * 40


def test_metrics_by_other_names(report: Path, qrels: Path, cli: Any, tmp_path: Path) -> None:
    """trec_eval's own names, and what only ir-measures knows."""
    pytest.importorskip("ir_measures")
    run = report / "runs" / "fp32.trec"
    names = [
        "nDCG@10",
        "ndcg_cut_10",
        "AP",
        "map",
        "recall_100",
        "R@100",
        "P_5",
        "P@5",
        "AP(rel=2)@100",
        "Judged@10",
        "RBP(p=.8)",
        "ERR@20",
        "Compat(p=0.95)",
    ]
    found = json.loads(cli("metrics", qrels, run, "--metrics", ",".join(names), "--json", cwd=tmp_path).fine().out)
    values = found["runs"]["fp32.trec"]["metrics"]
    assert list(values) == names
    for mine, theirs in (("nDCG@10", "ndcg_cut_10"), ("AP", "map"), ("R@100", "recall_100"), ("P@5", "P_5")):
        assert values[mine] == values[theirs]
    assert values["AP(rel=2)@100"] != values["AP"]
    assert all(0 < values[name] <= 1 for name in names)
    listed = cli("metrics", "--list", cwd=tmp_path).fine().out.split()
    assert {"nDCG@k", "AnyHit@k", "RBP", "Judged"} <= set(listed)


def test_metrics_that_need_a_package_name_it(report: Path, qrels: Path, cli: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    run = report / "runs" / "fp32.trec"
    cli("metrics", qrels, run, "--metrics", "RBP(p=.8)", cwd=tmp_path).refused(DATA, "'ir_measures'", "maxsim-eval[measures]")
    cli("metrics", qrels, run, "--metrics", "ERR@20", cwd=tmp_path).refused(USAGE, "ERR@20")
    cli("metrics", qrels, run, "--metrics", "ndcg_cut_10", cwd=tmp_path).fine()


@pytest.mark.parametrize("names", ["", " , "])
def test_metrics_of_no_name(names: str, report: Path, qrels: Path, cli: Any, tmp_path: Path) -> None:
    cli("metrics", qrels, report / "runs" / "fp32.trec", "--metrics", names, cwd=tmp_path).refused(USAGE, "metrics")
