"""What the console says first: few lines, whole names, and nothing equivalent that the gate would fail."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from maxsim_eval.bars import Bar
from maxsim_eval.comparison.bounds import NAMES, outside
from maxsim_eval.gate import checking
from maxsim_eval.report.console import render_console
from maxsim_eval.report.tables import every_table, summary
from maxsim_eval.report.words import brief, verdict, verdicts
from maxsim_eval.types import PathResult, Result
from report_results import full


def statistics(**verdicts: str) -> dict[str, dict[str, object]]:
    return {
        metric: {
            "verdict": word,
            "queries": 40,
            "mean": -0.0015,
            "low": -0.0054,
            "high": 0.0006,
            "queries_needed": None if word != "inconclusive" else 818.0,
        }
        for metric, word in verdicts.items()
    }


METRICS = {"nDCG@10": 0.6224, "nDCG@20": 0.7, "Recall@10": 0.59, "Recall@100": 0.9579}


def result(**changed: object) -> Result:
    """Three paths, fp16 as good as the reference, int8 with `changed` in its parity."""
    parity = {
        "delta": dict.fromkeys(METRICS, 0.0),
        "identical_order": {"k": 100, "identical": 40, "queries": 40},
        "spearman": {"mean": 0.999998, "min": 0.9999, "constant_in_one": 0},
        "overlap": {"@10": 1.0, "@20": 1.0},
        "max_rel_error": 2.2e-4,
        "mismatched_finite": 0,
        "statistics": statistics(**dict.fromkeys(METRICS, "equivalent")),
        "statistics_settings": {"level": 0.95},
    }
    paths = {
        "fp32": PathResult(METRICS, {}, {}),
        "fp16": PathResult(METRICS, {}, {}, parity=parity),
        "int8": PathResult(METRICS, {}, {}, parity={**parity, **changed}),
    }
    task = {
        "source": "demo",
        "dataset": "small",
        "split": "test",
        "queries": 40,
        "documents": 300,
        "query_tokens": 2,
        "judged_pairs": 9,
    }
    return Result(task, {"name": "lexical", "dim": 128}, 100, paths, {"device": "cpu"}, ["evaluate.py"], reference="fp32")


def drawn(found: Result, width: int) -> list[str]:
    stream = io.StringIO()
    render_console(found, Console(file=stream, width=width, color_system=None))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_few_lines_and_whole_names(width: int) -> None:
    changed = statistics(**{**dict.fromkeys(METRICS, "equivalent"), "nDCG@20": "inconclusive", "Recall@10": "different"})
    lines = drawn(result(statistics=changed), width)
    assert len(lines) <= 14  # and one for the report's path
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for word in ("nDCG@10", "change", "95% interval", "Recall@100", "Spearman", "top-10", "verdict", "equivalent", "different"):
        assert word in text
    assert "-0.0054 to +0.0006" in text
    assert " ".join(text.split()).endswith(
        "different in Recall@10, inconclusive in nDCG@20: 40 queries are too few to decide (about 820 would)."
    )


def test_long_names_take_the_interval_s_room_and_then_lines_of_their_own() -> None:
    found = result()
    named = replace(found, paths={"fp32": found.paths["fp32"], "python:my_scorers:the_fast_one": found.paths["int8"]})
    text = "\n".join(drawn(named, 80))
    assert "interval" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "python:my_scorers:the_fast_one" in "\n".join(drawn(named, 120))
    assert "equivalent" in "\n".join(drawn(named, 60))


WRONG = {"max_rel_error": 9.1e-4 * 40, "mismatched_finite": 320}


def test_no_wrong_scorer_is_called_equivalent() -> None:
    """Scores without the padding mask: the ranking stays, the scores do not."""
    found = result(**WRONG)
    assert verdict(found, "fp16") == "equivalent"
    assert verdict(found, "int8") == "fails gate"
    sentence = verdicts(found)[1]
    assert "ranking identical to fp32" in sentence
    assert (
        "NOT within bounds (max rel error 0.0364, need <= 0.02; finite in one only 320, need <= 0): the gate would fail."
        in sentence
    )
    assert brief(found)[2] == "int8: nDCG@10 0.6224 (=), fails gate"


def test_the_gate_says_the_same_under_the_same_names() -> None:
    found = result(**WRONG)
    baseline = checking.baseline_of(replace(found, task={**found.task, "judged_queries": 40}))
    failed = [finding for finding in checking.check(found, baseline) if not finding.ok and finding.what.startswith("int8")]
    assert outside(found) == {"fp16": [], "int8": failed}
    names = {row[0] for table in every_table(full()) for row in table.rows}
    assert {NAMES["max_rel_error"], NAMES["mismatched_finite"]} <= names
    assert all(finding.what.partition(": ")[2] in NAMES.values() for finding in failed)


def test_a_scorer_has_one_verdict_whatever_its_name() -> None:
    """Under a name that no class lists it is held to `exact`; a comparison of run files, without scores, to its statistics alone."""
    found, runs = result(**WRONG), result(max_rel_error=None, mismatched_finite=None, spearman={}, overlap={"@10": 0.5})
    for name in ("python:my_scorers:mine", "mine"):
        named = replace(found, paths={"fp32": found.paths["fp32"], name: found.paths["int8"]})
        assert verdict(named, name) == "fails gate"
        assert (
            "NOT within bounds (max rel error 0.0364, need <= 0.0005; finite in one only 320, need <= 0)" in verdicts(named)[0]
        )
    assert verdict(replace(runs, paths={"fp32": runs.paths["fp32"], "mine": runs.paths["int8"]}), "mine") == "equivalent"


@pytest.mark.parametrize("metric", ["MAP@100", "ndcg_cut_10"])
def test_the_sentence_is_about_the_metric_that_is_shown(metric: str) -> None:
    found = result(delta={metric: 0.00046})
    only = replace(found, paths={name: replace(path, metrics={metric: 0.5}) for name, path in found.paths.items()})
    assert f"; {metric} changes by +0.0005." in verdicts(only)[1]
    bare = replace(found, paths={name: replace(path, metrics={}) for name, path in found.paths.items()})
    assert verdicts(bare)[1].startswith("int8: ranking identical to fp32 (top 100, all 40 queries). ")


def test_what_was_not_measured_is_no_failure_of_the_verdict() -> None:
    assert outside(result(max_rel_error=None, spearman={}))["int8"] == []


def test_the_summary_of_a_result_without_a_reference() -> None:
    found = result()
    alone = replace(found, reference=None, paths={"fp16": found.paths["fp32"]})
    assert summary(alone).columns == ["path", "nDCG@10", "Recall@100", "verdict"]
    assert summary(replace(found, paths={}, reference=None)).rows == []


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("every_bar")
def test_off_a_terminal_progress_is_plain_lines() -> None:
    log, screen = io.StringIO(), Screen()
    for stream in (log, screen):
        with Bar(total=3, desc="fp32", unit="doc", file=stream) as bar:
            for _ in range(3):
                bar.update(1)
    assert "\r" in screen.getvalue()
    lines = log.getvalue().splitlines()
    assert lines[0].startswith("fp32: 0%, 0 of 3, 00:00 so far")
    assert lines[-1].startswith("fp32: 100%, 3 of 3")
    assert "\r" not in log.getvalue()
    assert all(lines)


def test_off_a_terminal_short_work_says_nothing() -> None:
    log = io.StringIO()
    with Bar(total=3, desc="fp32", file=log) as bar:
        bar.update(3)
    assert log.getvalue() == ""
