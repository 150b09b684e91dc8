"""What reports say of statistics, ties, moved documents and memory, and the CSV files."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from maxsim_eval.report.console import render_console
from maxsim_eval.report.csv_files import metrics_csv, per_query_csv
from maxsim_eval.report.result_json import from_json, to_json
from maxsim_eval.report.tables import every_table, tables
from maxsim_eval.report.values import about
from maxsim_eval.report.words import verdicts
from maxsim_eval.report.writing import to_markdown
from maxsim_eval.types import PathResult, Result

SETTINGS = {"level": 0.95, "resamples": 10_000, "seed": 0, "correction": "holm", "comparisons": 3}


def judged(verdict: str, **changes: Any) -> dict[str, Any]:
    return {
        "queries": 300, "changed": 4, "changed_share_at_most": 0.03, "mean": -0.00123, "sd": 0.01, "low": -0.002, "high": 0.0001,
        "p_value": 0.0123, "p_adjusted": 0.0369, "bound": 0.003, "verdict": verdict, "queries_needed": None, **changes,
    }  # fmt: skip


@pytest.fixture
def result() -> Result:
    reference = PathResult(
        {"nDCG@10": 0.75, "R@10": 0.5, "Mine": math.nan},
        {"nDCG@10": {"q1": 1.0, "q,2": 0.5}, "R@10": {"q1": 0.5, "q,2": 0.1 + 0.2}},
        {"total": 2.0},
        tie_bounds={"nDCG@10": {"low": 0.75, "high": 0.75, "queries_affected": 0}},
        memory={"host_peak_bytes": 3 << 30, "device_peak_bytes": None},
    )
    parity = {
        "reference": "fp32",
        "delta": {"nDCG@10": -0.00123, "R@10": 0.0, "Mine": None},
        "spearman": {"mean": 1.0, "min": 0.9, "percentiles": {"1": 0.91, "50": 0.99}, "queries": 300},
        "overlap": {"@1": 1.0, "@50": 0.5},
        "same_order": {"@1": 0.25, "@50": None},
        "mean_rel_error": 1.5e-6,
        "reference_reads_same_inputs": True,
        "statistics": {
            "nDCG@10": judged("inconclusive", queries_needed=1234),
            "R@10": judged("equivalent", mean=0.0, low=0.0, high=4e-6, changed=0, p_adjusted=1.0, bound=0.0012),
            "MAP@100": judged("different", p_adjusted=0.00009, low=None, high=None),
        },
        "statistics_settings": SETTINGS,
        "most_changed": [
            {
                "query": f"q{number}",
                "metric": "nDCG@10",
                "reference": 0.5,
                "value": 0.25,
                "delta": -0.25,
                "moved": [
                    {"document": "d|1", "reference_rank": 1, "rank": None, "relevance": 2},
                    *({"document": f"d{n}", "reference_rank": n, "rank": n + 1, "relevance": None} for n in (2, 3, 4)),
                ],
            }
            for number in range(7)
        ],
    }
    other = replace(
        reference,
        metrics={"nDCG@10": 0.74877, "R@10": 0.5, "Mine": 0.1},
        per_query={"nDCG@10": {"q1": 0.75, "q,2": 0.5}, "R@10": {"q1": 0.5, "q,2": math.nan}},
        tie_bounds={"nDCG@10": {"low": 0.7, "high": 0.8125, "queries_affected": 3}},
        memory={"host_peak_bytes": 512 << 20, "device_peak_bytes": 5 << 20},
        parity=parity,
    )
    task = {"source": "local", "dataset": "x", "split": "test", "queries": 300, "documents": 9}
    return Result(task, {"name": "lexical"}, 50, {"fp32": reference, "int8": other}, {}, [])


def shown(result: Result, title: str) -> dict[str, list[str]]:
    (table,) = (table for table in every_table(result) if table.title.startswith(title))
    return {row[0]: row[1:] for row in table.rows}


def test_differences_with_intervals_p_values_and_verdicts(result: Result) -> None:
    found = shown(result, "Differences from fp32")
    assert found == {
        "int8, nDCG@10": [
            "-0.00123", "-0.00200 to +0.00010", "4 of 300", "0.037", "0.003", "inconclusive (needs about 1,300 queries)"
        ],
        "int8, R@10": ["0", "0 to +0.00000", "0 of 300", "1.000", "0.0012", "equivalent"],
        "int8, MAP@100": ["-0.00123", "- to -", "4 of 300", "< 0.001", "0.003", "different"],
    }  # fmt: skip
    (table,) = (table for table in every_table(result) if table.title.startswith("Differences"))
    assert table.columns == ["", "change", "95% interval", "queries changed", "p (Holm)", "bound", "verdict"]


def test_parity_has_the_new_figures_and_leaves_out_what_nobody_knows(result: Result) -> None:
    found = shown(result, "Parity with fp32")
    assert found == {
        "Spearman, mean": ["1.000000"],
        "Spearman, 1% of queries below": ["0.910000"],
        "Spearman, 50% of queries below": ["0.990000"],
        "Spearman, min": ["0.900000"],
        "Spearman, queries": ["300"],
        "top-1 overlap": ["1.0000"],
        "top-50 overlap": ["0.5000"],
        "top-1 in the same order": ["0.2500"],
        "mean rel error": ["1.5e-06"],
        "reads the same embeddings": ["yes"],
    }


def test_ties_are_shown_where_they_matter(result: Result) -> None:
    assert shown(result, "Equal scores") == {"nDCG@10": ["no effect", "0.7000 to 0.8125 (3 queries)"]}
    calm = replace(result, paths={"fp32": result.paths["fp32"]})
    assert shown(calm, "Equal scores") == {"all metrics": ["no effect"]}


def test_the_first_of_the_most_changed_queries(result: Result) -> None:
    found = shown(result, "Queries that changed most: int8")
    assert list(found) == [f"q{number}" for number in range(5)], "result.json has the rest"
    moved = "d|1 (1 to -, relevance 2); d2 (2 to 3); d3 (3 to 4); ..."
    assert found["q0"] == ["nDCG@10", "0.5000", "0.2500 (-0.2500)", moved]


def test_memory_in_mebibytes(result: Result) -> None:
    assert shown(result, "Peak memory") == {"process": ["3,072", "512"], "device": ["-", "5"]}


def test_the_verdict_of_all_metrics(result: Result) -> None:
    assert verdicts(result) == [
        "int8: order not compared with fp32; nDCG@10 changes by -0.0012. Equivalent in 1 of 3 metrics, "
        "different in MAP@100, inconclusive in nDCG@10: 300 queries are too few to decide (about 1,300 would)."
    ]
    parity = {**(result.paths["int8"].parity or {}), "statistics": {"A": judged("equivalent"), "B": judged("equivalent")}}
    same = replace(result, paths={**result.paths, "int8": replace(result.paths["int8"], parity=parity)})
    assert verdicts(same)[0].endswith("Equivalent in all 2 metrics.")


def test_console_and_markdown_show_every_table(result: Result) -> None:
    stream = io.StringIO()
    render_console(result, Console(file=stream, width=200, color_system=None), verbose=True)
    markdown = to_markdown(result)
    for table in every_table(result):
        assert table.title in stream.getvalue()
        assert f"## {table.title}" in markdown
        for row in table.rows:
            for cell in row:
                assert cell in stream.getvalue()
                assert cell.replace("|", "\\|").replace("<", "&lt;") in markdown
    assert {table.title for table in tables(result)} < {table.title for table in every_table(result)}


@pytest.mark.parametrize(
    "parity",
    [
        {
            "statistics": [1],
            "most_changed": 3,
            "reference_reads_same_inputs": [1],
            "spearman": {"percentiles": [1]},
            "same_order": "x",
        },
        {"statistics": {"A": {"verdict": []}, "B": {"verdict": {}}}},
        {"statistics": {"A": None, "B": 3}, "statistics_settings": 1, "most_changed": [None, {"moved": {}}, {"moved": [1]}]},
    ],
)
def test_foreign_entries_never_break_a_report(result: Result, parity: dict[str, Any]) -> None:
    path = replace(result.paths["int8"], parity=parity, tie_bounds={"A": 1, "B": {}}, memory={"host_peak_bytes": "x"})
    odd = replace(result, paths={**result.paths, "int8": path})
    assert to_markdown(odd)
    assert metrics_csv(odd)
    assert len(verdicts(odd)) == 1


def test_whole_numbers_may_be_written_as_others(result: Result) -> None:
    entries = {"nDCG@10": judged("equivalent", changed=4.0, queries=300.0)}
    moved = [{"document": "d1", "reference_rank": 1.0, "rank": 2.0, "relevance": None}]
    parity = {"mismatched_finite": 3.0, "statistics": entries, "most_changed": [{"query": "q", "moved": moved}]}
    odd = replace(result, paths={**result.paths, "int8": replace(result.paths["int8"], parity=parity)})
    assert shown(odd, "Parity with fp32")["finite in one only"] == ["3"]
    assert shown(odd, "Differences")["int8, nDCG@10"][2] == "4 of 300"
    assert shown(odd, "Queries that changed most")["q"][-1] == "d1 (1 to 2)"


HOSTILE = ("a[bold]b", "x[/red]", "python:fire:score", "[link=http://x]y")


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_no_markup(name: str, result: Result) -> None:
    odd = replace(result, paths={"fp32": result.paths["fp32"], name: result.paths["int8"]})
    stream = io.StringIO()
    render_console(odd, Console(file=stream, width=200, color_system=None), verbose=True)
    assert f"Queries that changed most: {name}" in stream.getvalue()
    assert name in to_markdown(odd)


def test_ids_are_no_links_in_markdown_and_no_images_that_are_fetched(result: Result) -> None:
    parity = {"most_changed": [{"query": "![x](http://y/z.png)", "metric": "~~A~~", "moved": []}]}
    odd = replace(result, paths={**result.paths, "int8": replace(result.paths["int8"], parity=parity)})
    assert r"| ![x]\(http://y/z.png) | \~\~A\~\~ |" in to_markdown(odd)


def test_ids_control_no_terminal(result: Result) -> None:
    parity = {"most_changed": [{"query": "\x1b]0;title\x07\x9b31m", "metric": "A", "moved": []}]}
    odd = replace(result, paths={**result.paths, "int8": replace(result.paths["int8"], parity=parity)})
    stream = io.StringIO()
    render_console(odd, Console(file=stream, width=200, color_system=None), verbose=True)
    assert not any(character in stream.getvalue() for character in "\x1b\x07\x9b")
    assert r"\x1b]0;title\x07\x9b31m" in stream.getvalue()


def test_no_tables_of_a_result_without_paths(result: Result) -> None:
    assert every_table(replace(result, paths={}, reference=None)) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [(7, "7"), (7.0, "7"), (1234.0, "1,300"), (10, "10"), (101, "110"), (1234, "1,300"), (990_001, "1,000,000")],
)
def test_queries_needed_have_two_digits(count: float, text: str) -> None:
    assert about(count) == text


def test_csv_of_metrics(result: Result) -> None:
    rows = list(csv.DictReader(io.StringIO(metrics_csv(result))))
    assert [(row["path"], row["metric"]) for row in rows] == [
        (path, metric) for path in ("fp32", "int8") for metric in ("nDCG@10", "R@10", "Mine")
    ]
    assert list(rows[0]) == [
        "path", "metric", "mean", "delta", "low", "high", "p_value", "p_adjusted", "bound", "verdict", "queries_needed", "queries",
        "changed", "tie_low", "tie_high", "tie_queries",
    ]  # fmt: skip
    assert rows[2]["mean"] == rows[0]["delta"] == rows[0]["verdict"] == rows[5]["delta"] == rows[1]["tie_low"] == ""
    assert float(rows[3]["delta"]) == -0.00123
    assert (rows[3]["verdict"], rows[3]["queries_needed"], rows[3]["tie_queries"]) == ("inconclusive", "1234", "3")
    assert (float(rows[3]["tie_low"]), float(rows[3]["tie_high"])) == (0.7, 0.8125)


def test_csv_of_queries_reads_back_exactly(result: Result) -> None:
    text = per_query_csv(result)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert "\r" not in text
    read = {(row["path"], row["metric"], row["query"]): (row["value"], row["delta"]) for row in rows}
    assert read["fp32", "R@10", "q,2"] == ("0.30000000000000004", "")
    assert read["int8", "nDCG@10", "q1"] == ("0.75", "-0.25")
    assert read["int8", "nDCG@10", "q,2"] == ("0.5", "0.0")
    assert read["int8", "R@10", "q,2"] == ("", ""), "null: no value"
    assert len(rows) == 8


def test_csv_of_ids_that_a_spreadsheet_or_a_reader_would_take_for_something_else(result: Result) -> None:
    formulas = ['=HYPERLINK("http://x")', "=1+1", "@SUM(A1)", "-2+cmd|' /C calc'!A0", "+A1*2", "\t=1"]
    plain = ["-1", "-x_9Z", "@name", "+49", "a=b", "a\rb", "a\nb", 'say "x", y', "é", "'x'"]
    values = dict.fromkeys([*formulas, *plain], 0.5)
    odd = replace(result, paths={"fp32": replace(result.paths["fp32"], per_query={"A": values})})
    rows = list(csv.DictReader(io.StringIO(per_query_csv(odd), newline="")))
    assert [row["query"] for row in rows] == [*(f"'{text}" for text in formulas), *plain]
    assert {row["value"] for row in rows} == {"0.5"}


def test_all_of_it_survives_the_file(result: Result) -> None:
    true = {"fp32": {"R@10": (0.5 + 0.1 + 0.2) / 2}, "int8": {"nDCG@10": 0.625}}  # a file's means are those of its queries
    paths = {name: replace(path, metrics={**path.metrics, **true[name]}) for name, path in result.paths.items()}
    result = replace(result, paths=paths)
    again = from_json(to_json(result))
    assert to_json(again) == to_json(result)
    assert [table.rows for table in every_table(again)] == [table.rows for table in every_table(result)]
    assert per_query_csv(again) == per_query_csv(result)
