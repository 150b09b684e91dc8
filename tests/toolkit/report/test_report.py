"""Result to JSON and back, refused files, and the reports for people."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from maxsim_eval.comparison.parity import compare
from maxsim_eval.comparison.verdicts import with_statistics
from maxsim_eval.environment import environment
from maxsim_eval.errors import DataError
from maxsim_eval.report.console import render_console
from maxsim_eval.report.csv_files import CSV_FILES
from maxsim_eval.report.result_json import SCHEMA, from_json, to_json
from maxsim_eval.report.tables import tables
from maxsim_eval.report.words import verdicts
from maxsim_eval.report.writing import to_markdown, write_reports
from maxsim_eval.types import PathResult, Result, Run
from places import ROOT

PARITY: dict[str, Any] = {
    "reference": "fp32",
    "delta": {"nDCG@10": -0.25, "MRR@10": 0.0},
    "delta_per_query": {"nDCG@10": {"max_abs": 0.5, "mean_abs": 0.25, "changed": 1, "queries": 2}},
    "spearman": {"mean": 0.99987654, "min": 0.9, "queries": 2, "sampled": True, "constant": 3, "constant_in_one": 0},
    "overlap": {"@5": 1.0, "@10": 0.975, "@20": None, "@100": None},
    "identical_order": {"k": 10, "identical": 1, "queries": 2, "fraction": 0.5},
    "max_abs_error": 0.0125,
    "mean_abs_error": 1.5e-5,
    "max_rel_error": 0.001,
    "mean_rel_error": 1e-6,
    "mismatched_finite": 0,
}


LIMITS: dict[str, Any] = {
    "seed": 3,
    "queries": {"limit": 2, "before": 1300, "after": 2},
    "documents": {"limit": 5183, "before": 60000, "after": 5183, "judged": 3},
    "judged_pairs": {"before": 1500, "after": 3},
    "ids_sha256": "0123456789abcdef" * 4,
}


@pytest.fixture
def result() -> Result:
    reference = PathResult(
        metrics={"nDCG@10": 0.75, "MRR@10": 0.5},
        per_query={"nDCG@10": {"q1": 1.0, "é2": 0.5}, "MRR@10": {"q1": 0.5, "é2": 0.5}},
        seconds={"score": 1.25, "total": 2.0},
        run="runs/fp32.trec",
        description="the FP32 reference",
    )
    other = replace(
        reference,
        metrics={"nDCG@10": 0.5, "MRR@10": 0.5},
        per_query={"nDCG@10": {"q1": 0.5, "é2": 0.5}, "MRR@10": {"q1": 0.5, "é2": 0.5}},
        run="runs/int8.trec",
        parity=PARITY,
        description="[bold]int8|x",
    )
    return Result(
        task={
            "source": "beir",
            "dataset": "sci|fact",
            "split": "test",
            "queries": 2,
            "documents": 5183,
            "document_tokens": 1234567,
            "judged_pairs": 3,
            "warnings": ["2 unknown ids [dim]"],
        },
        encoder={"name": "lexical", "revision": "1", "dim": 128},
        k=10,
        paths={"fp32": reference, "int8": other},
        environment={"python": "3.11.9", "threads": 2, "gpu": None},
        command=["evaluate.py", "beir", "sci fact"],
        reference="fp32",
        created="2025-01-01T00:00:00Z",
    )


def console_text(result: Result, width: int = 120) -> str:
    stream = io.StringIO()
    render_console(result, Console(file=stream, width=width, color_system=None), verbose=True)
    return stream.getvalue()


def test_round_trip(result: Result) -> None:
    again = from_json(to_json(result), "result.json")
    assert again == replace(result, task=dict(result.task))
    assert to_json(again) == to_json(result)


def test_a_subset_survives_the_file_and_every_report_says_so(result: Result) -> None:
    some = replace(result, task={**result.task, "limits": LIMITS})
    again = from_json(to_json(some), "result.json")
    assert again.task["limits"] == LIMITS
    assert to_json(again) == to_json(some)
    said = "SUBSET: 2 of 1,300 queries and 5,183 of 60,000 documents (seed 3); figures are not those of the whole collection"
    for shown in (console_text(some), to_markdown(some)):
        assert said in shown
    for task in (result.task, {**result.task, "limits": None}):  # absent in files of earlier versions
        whole = replace(result, task=task)
        assert "SUBSET" not in console_text(whole) + to_markdown(whole)
        assert from_json(to_json(whole)).task.get("limits") is None


def test_layout_others_parse(result: Result) -> None:
    document = json.loads(to_json(result))
    assert document["schema"] == SCHEMA == "maxsim-eval/result/1"
    assert set(document) == {
        "schema", "created", "task", "encoder", "k", "reference", "paths", "environment", "command",
    }  # fmt: skip
    assert document["paths"]["fp32"]["metrics"]["nDCG@10"] == 0.75
    assert "parity" not in document["paths"]["fp32"]
    assert document["paths"]["int8"]["parity"] == PARITY
    assert document["paths"]["int8"]["run"] == "runs/int8.trec"
    lines = to_json(result).splitlines()
    assert any(line.strip() == '"nDCG@10": {"q1": 1.0, "é2": 0.5},' for line in lines)  # one line a metric


def test_numbers_json_cannot_hold_become_null(result: Result) -> None:
    path = replace(
        result.paths["fp32"],
        metrics={"nDCG@10": math.nan, "MRR@10": np.float32(0.5)},
        seconds={"score": math.inf, "n": np.int64(3)},
    )
    text = to_json(replace(result, paths={"fp32": path}))
    assert "NaN" not in text
    assert "Infinity" not in text
    document = json.loads(text)["paths"]["fp32"]
    assert document["metrics"] == {"nDCG@10": None, "MRR@10": 0.5}
    assert document["seconds"] == {"score": None, "n": 3}
    again = from_json(text)
    assert math.isnan(again.paths["fp32"].metrics["nDCG@10"])
    assert to_json(again) == text
    assert "| nDCG@10 | - |" in to_markdown(again)


def test_things_that_are_no_json_are_refused(result: Result) -> None:
    with pytest.raises(TypeError, match="a result cannot hold"):
        to_json(replace(result, environment={"folder": Path("x")}))


def test_unknown_extras_are_tolerated(result: Result) -> None:
    document = json.loads(to_json(result))
    document["later"] = {"x": 1}
    document["task"]["later"] = 1
    document["paths"]["int8"]["later"] = [1]
    document["paths"]["int8"]["parity"]["later"] = 1
    again = from_json(json.dumps(document))
    assert again.task["later"] == 1
    assert again.paths["int8"].metrics == result.paths["int8"].metrics


def test_the_least_a_file_must_hold(result: Result) -> None:
    document = json.loads(to_json(result))
    del document["created"], document["reference"]
    for path in document["paths"].values():
        for key in ("per_query", "seconds", "description", "run"):
            del path[key]
    again = from_json(json.dumps(document))
    assert again.reference == "fp32"
    assert again.paths["int8"].run is None
    assert "fp32" in to_markdown(again)
    assert console_text(again)


def change(*keys: str, value: Any = ...) -> Callable[[dict[str, Any]], None]:
    def apply(document: dict[str, Any]) -> None:
        for key in keys[:-1]:
            document = document[key]
        if value is ...:
            del document[keys[-1]]
        else:
            document[keys[-1]] = value

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("schema"), "schema is null, need 'maxsim-eval/result/1'"),
        (change("schema", value="maxsim-eval/result/2"), 'schema is "maxsim-eval/result/2"'),
        (change("task"), "no 'task'"),
        (change("task", "split"), "'task': no 'split'"),
        (change("task", "queries", value="many"), "'queries' is \"many\", need a whole number"),
        (change("task", "documents", value=True), "'documents' is true"),
        (change("task", "limits", value=7), "'limits' is 7, need null or an object"),
        (change("task", "limits", value={}), "'limits': no 'seed', need a whole number"),
        (change("task", "limits", value={**LIMITS, "seed": "0"}), "'limits': 'seed' is \"0\""),
        (change("task", "limits", value={**LIMITS, "queries": [2, 9]}), r"'limits': 'queries' is \[2, 9\], need an object"),
        (change("task", "limits", value={**LIMITS, "documents": {"after": 1}}), "'documents': no 'before'"),
        (change("task", "limits", value={**LIMITS, "queries": {"before": 2, "after": 3}}), "'queries' is 3 of 2, need no more"),
        (change("task", "limits", value={**LIMITS, "ids_sha256": None}), "'ids_sha256' is null, need text"),
        (change("encoder", "name", value=None), "'name' is null, need text"),
        (change("k", value=0), "'k' is 0"),
        (change("k", value=1.5), "'k' is 1.5"),
        (change("paths", value=[]), r"'paths' is \[\]"),
        (change("paths", "int8", value=1), "path 'int8' is 1"),
        (change("paths", "int8", "metrics"), "path 'int8': no 'metrics'"),
        (change("paths", "int8", "metrics", "nDCG@10", value="0.5"), "'nDCG@10' is \"0.5\", need a number or null"),
        (change("paths", "int8", "per_query", value=[]), r"'per_query' is \[\]"),
        (change("paths", "int8", "per_query", "nDCG@10", value=3), "'per_query' 'nDCG@10' is 3"),
        (change("paths", "int8", "seconds", value=3), "'seconds' is 3"),
        (change("paths", "int8", "run", value=3), "'run' is 3"),
        (change("paths", "int8", "parity", value=3), "'parity' is 3"),
        (change("paths", "int8", "tie_bounds", value=[]), r"'tie_bounds' is \[\], need an object or null"),
        (change("paths", "int8", "memory", value=7), "'memory' is 7, need an object or null"),
        (change("reference", value="fp64"), "'reference' is \"fp64\", need null or one of: fp32, int8"),
        (change("reference", value=[]), r"'reference' is \[\]"),
        (change("environment"), "no 'environment'"),
        (change("command", value="x"), "'command' is \"x\", need a list"),
    ],
)
def test_malformed_results(result: Result, damage: Callable[[dict[str, Any]], None], message: str) -> None:
    document = json.loads(to_json(result))
    damage(document)
    with pytest.raises(DataError, match="my.json: .*" + message):
        from_json(json.dumps(document), "my.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1]", r"holds \[1\]"),
        ('{"schema": NaN}', "holds NaN"),
        ('{"schema": 1e999}', "too large a number"),
        ('{"schema": 1%s}' % ("0" * 400), "too large a number"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_text_that_is_no_result(text: str, message: str) -> None:
    with pytest.raises(DataError, match=f"my.json: .*{message}"):
        from_json(text, "my.json")


def test_console_and_markdown_say_the_same(result: Result) -> None:
    console, markdown = console_text(result), to_markdown(result)
    for fact in (
        "0.5000 (-0.2500)", "0.5000 (=)", "0.7500", "0.999877", "0.9750", "1 of 2 queries", "0.0125", "1.5e-05", "1.250",
        "5,183 documents", "1,234,567 document tokens", "2 sampled, 3 constant left out", "2 unknown ids [dim]",
        "order of the top 10 differs from fp32 in 1 of 2 queries, top-10 overlap 0.9750; nDCG@10 changes by -0.2500",
    ):  # fmt: skip
        assert fact in console
        assert fact.replace("_", "\\_") in markdown
    assert "sci|fact" in console
    assert "sci\\|fact" in markdown
    assert "\\[bold]" not in markdown
    assert "[bold]int8\\|x" in markdown
    assert "    evaluate.py beir 'sci fact'" in markdown
    for line in markdown.splitlines():
        assert line.count("<") == 0


def test_markdown_tables_are_rectangular(result: Result) -> None:
    widths = set()
    for line in to_markdown(result).splitlines():
        if line.startswith("|"):
            widths.add(line.replace("\\|", "").count("|"))
        elif widths:
            assert len(widths) == 1
            widths = set()


def test_identical_rankings_are_said_to_be(result: Result) -> None:
    parity = {
        **PARITY,
        "delta": {"nDCG@10": 0.0},
        "identical_order": {"k": 10, "identical": 2, "queries": 2, "fraction": 1.0},
    }
    path = replace(result.paths["int8"], parity=parity, metrics=result.paths["fp32"].metrics)
    same = replace(result, paths={**result.paths, "int8": path})
    assert verdicts(same) == ["int8: ranking identical to fp32 (top 10, all 2 queries); nDCG@10 is the same."]
    assert verdicts(same)[0] in console_text(same)


@pytest.mark.parametrize("parity", [{}, {"spearman": None, "overlap": [], "identical_order": 3, "delta": None}])
def test_foreign_parity_never_breaks_a_report(result: Result, parity: dict[str, Any]) -> None:
    odd = replace(result, paths={**result.paths, "int8": replace(result.paths["int8"], parity=parity)})
    said = "int8: order not compared with fp32; change of nDCG@10 unknown."
    assert verdicts(odd) == [f"{said} NOT within bounds (|delta nDCG@10| 0.25, need <= 0.003): the gate would fail."]
    assert "0.5000 (?)" in console_text(odd)
    assert to_markdown(odd)


def test_no_reference_no_parity(result: Result) -> None:
    alone = replace(result, reference=None, paths={"fp16": replace(result.paths["fp32"])})
    assert [table.title for table in tables(alone)] == ["Metrics", "Seconds"]
    assert verdicts(alone) == []
    assert from_json(to_json(alone)).reference is None


def test_write_reports(result: Result, tmp_path: Path) -> None:
    write_reports(result, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"metrics.csv", "per_query.csv", "report.md", "result.json"}
    assert not [name for name in names if name.startswith(".")]
    assert from_json((tmp_path / "out" / "result.json").read_text(encoding="utf-8")) == result
    assert (tmp_path / "out" / "report.md").read_text(encoding="utf-8") == to_markdown(result)


def test_full_disk_leaves_no_result(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="the report cannot be written \\(No space left"):
        write_reports(result, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_environment_names_versions_and_nobody() -> None:
    facts = environment()
    assert set(facts) >= {"python", "platform", "cpu", "cores", "threads", "device", "torch", "triton", "numpy", "maxsim_eval"}
    assert facts["numpy"] == np.__version__
    text = json.dumps(facts, allow_nan=False)
    assert platform.node() not in text or len(platform.node()) < 4
    assert str(Path.home()) not in text
    assert os.getcwd() not in text


def test_the_documented_example_is_a_result() -> None:
    text = (ROOT / "docs" / "result.md").read_text(encoding="utf-8")
    example = text.split("```json\n")[1].split("```")[0]
    result = from_json(example, "docs/result.md")
    parity = result.paths["fp16"].parity
    assert parity is not None
    run = Run("fp32", {"q": [("a", 1.0)]})
    scores = np.ones((1, 1), dtype=np.float32)
    found = compare(result.paths["fp32"], result.paths["fp16"], run, run, reference_scores=scores, scores=scores, k=1)
    judged = with_statistics(result.paths, "fp32")["fp16"].parity
    assert judged is not None
    assert set(parity) == set(found) | set(judged)
    for key in ("spearman", "identical_order", "overlap", "same_order", "rank_shifts", "error_histogram"):
        assert set(parity[key]) == set(found[key])
    assert set(parity["statistics"]["nDCG@10"]) == set(judged["statistics"]["nDCG@10"])
    assert parity["statistics_settings"] == judged["statistics_settings"]
    for entry in (*parity, *parity["statistics"]["nDCG@10"], *parity["most_changed"][0], *result.task, "memory", "tie_bounds"):
        assert f"`{entry}`" in text
    for name, to_csv in CSV_FILES.items():
        assert all(f"`{column}`" in text for column in (name, *to_csv(result).splitlines()[0].split(",")))
