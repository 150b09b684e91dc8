"""The JSON Schema of result.json: what is written follows it, all of what is written is in it, damage is found by it."""

from __future__ import annotations

import copy
import importlib.resources
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from maxsim_eval.api import evaluate
from maxsim_eval.encoders.lexical import LexicalEncoder
from maxsim_eval.report.comparing import compare_inputs
from maxsim_eval.report.result_json import from_json, to_json
from maxsim_eval.types import PathResult, Result, Task
from places import ROOT

SCHEMA: dict[str, Any] = json.loads(
    importlib.resources.files("maxsim_eval").joinpath("schemas", "result.json").read_text(encoding="utf-8")
)
FREE = ("environment", "encoder")  # objects that hold what the machine and the encoder report


def closed(schema: Any, name: str = "") -> Any:
    """The schema with every object of named entries allowing no others: nothing undocumented passes."""
    if isinstance(schema, list):
        return [closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(entry, key) for key, entry in schema.items()}
    if found.get("type") == "object" and "properties" in found and name not in FREE:
        found["additionalProperties"] = False
    return found


OPEN, CLOSED = Draft202012Validator(SCHEMA), Draft202012Validator(closed(SCHEMA))


def faults(document: Any, validator: Draft202012Validator = CLOSED) -> list[str]:
    return [f"{'/'.join(map(str, error.path))}: {error.message[:200]}" for error in validator.iter_errors(document)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schema")


@pytest.fixture(scope="module")
def run(demo_task: Task, folder: Path) -> Callable[..., dict[str, Any]]:
    """`run(name, **options)`: the demo evaluated, as the JSON that was written."""

    def work(name: str, paths: tuple[str, ...] = ("fp32", "fp16", "int8"), **options: Any) -> dict[str, Any]:
        where = folder / name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # k is clamped
            evaluate(demo_task, LexicalEncoder(), paths, cache_dir=folder / "cache", out_dir=where, quiet=True, **options)
        return dict(json.loads((where / "result.json").read_text(encoding="utf-8")))

    return work


@pytest.fixture(scope="module")
def demo(run: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return run("demo")


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for name in SCHEMA["$defs"]:
        assert json.dumps(SCHEMA).count(f'"#/$defs/{name}"') >= 1, f"nobody refers to {name}"


def test_the_demo(demo: dict[str, Any]) -> None:
    assert faults(demo) == []
    parity = demo["paths"]["int8"]["parity"]
    named = SCHEMA["$defs"]["parity"]["properties"]
    assert set(parity) == set(named), "every entry that the schema knows is written"
    assert set(demo["paths"]["int8"]) == set(SCHEMA["$defs"]["path"]["properties"]) - {"search"}  # of certified paths
    assert set(demo) == set(SCHEMA["properties"])
    assert set(demo["task"]) == set(SCHEMA["$defs"]["task"]["properties"])


def test_a_certified_path(demo: dict[str, Any]) -> None:
    counts = dict.fromkeys(("documents", "code_bytes", "row_bytes", "stored_bytes", "pieces", "brute_pieces"), 3)
    search = {"certifies": ["fp16", "fused-fp32"], "identical_to": {"fp16": True}, "survivors": 2.5, **counts}
    path = demo["paths"]["int8"]
    assert faults({**demo, "paths": {**demo["paths"], "exact-int8": {**path, "search": search}}}) == []
    wrong = {**search, "identical_to": {"fp16": "yes"}, "pieces": -1}
    assert len(faults({**demo, "paths": {**demo["paths"], "exact-int8": {**path, "search": wrong}}})) >= 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("limits", {"limit_queries": 12, "limit_documents": 120, "limit_seed": 2}),
        ("one-query", {"limit_queries": 1}),  # intervals without ends
        ("deep", {"k": 5000}),
        ("shallow", {"k": 3}),
        ("no-reference", {"paths": ("fp16", "int8")}),
        ("reference-alone", {"paths": ("fp32",)}),
        ("paper", {"metrics": ("AnyHit@10", "nDCG-exp@10", "infAP")}),
        ("own", {"paths": ("fp32", "fused-fp32", "bf16", "int8-document", "int8-corpus", "fp8")}),
    ],
)
def test_other_evaluations(name: str, options: dict[str, Any], run: Callable[..., dict[str, Any]]) -> None:
    assert faults(run(name, **options)) == []


def test_reranking_and_comparing(
    run: Callable[..., dict[str, Any]], demo: dict[str, Any], folder: Path, demo_task: Task
) -> None:
    assert faults(run("reranked", candidates=folder / "demo" / "runs" / "fp32.trec")) == []
    comparison = compare_inputs([folder / "demo", f"{folder / 'demo'}:int8"])
    assert faults(json.loads(to_json(comparison.to_result()))) == []
    qrels = folder / "qrels.txt"
    qrels.write_text(
        "".join(f"{query} 0 {name} {value}\n" for query, row in demo_task.qrels.items() for name, value in row.items())
    )
    plain = folder / "bm25.trec"
    plain.write_text(f"{demo_task.query_ids[0]} Q0 {demo_task.document_ids[0]} 1 3.5 bm25\n")
    comparison = compare_inputs([folder / "demo", plain, folder / "demo" / "runs" / "int8.trec"], qrels)
    assert faults(json.loads(to_json(comparison.to_result()))) == []


def test_the_documented_example() -> None:
    text = (ROOT / "docs" / "result.md").read_text(encoding="utf-8")
    assert faults(json.loads(text.split("```json\n")[1].split("```")[0])) == []


def test_a_reread_result_is_the_same_and_still_valid(demo: dict[str, Any], folder: Path) -> None:
    text = (folder / "demo" / "result.json").read_text(encoding="utf-8")
    assert to_json(from_json(text)) == text


def test_numbers_that_are_none() -> None:
    odd = PathResult({"A": math.nan}, {"A": {"q": math.inf}}, {"total": math.nan})
    task = {"source": "local", "dataset": "x", "split": "test", "queries": 0, "documents": 0}
    result = Result(task, {"name": "x"}, 1, {"fp32": odd, "fp16": replace(odd, memory=None)}, {}, [])
    assert faults(json.loads(to_json(result))) == []


def test_files_of_earlier_versions_and_later_entries_are_valid(demo: dict[str, Any]) -> None:
    old = copy.deepcopy(demo)
    del old["task"]["lengths"]
    for path in old["paths"].values():
        del path["memory"], path["tie_bounds"]
        for name in ("statistics", "statistics_settings", "error_histogram", "same_order", "rank_shifts", "most_changed"):
            path.get("parity", {}).pop(name, None)
        path.get("parity", {}).get("spearman", {}).pop("percentiles", None)
    assert faults(old) == []
    old["later"] = old["paths"]["fp16"]["parity"]["later"] = [1]
    assert faults(old, OPEN) == []
    assert len(faults(old)) == 2


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("schema",), "maxsim-eval/result/2"),
        (("k",), 0),
        (("k",), 2.5),
        (("task", "queries"), -1),
        (("task", "lengths", "queries", "counts"), []),
        (("task", "limits"), {"seed": 0}),
        (("paths", "int8", "metrics", "nDCG@10"), "0.5"),
        (("paths", "int8", "memory", "host_peak_bytes"), -1),
        (("paths", "int8", "tie_bounds", "nDCG@10", "low"), "0"),
        (("paths", "int8", "parity", "overlap", "@10"), 1.5),
        (("paths", "int8", "parity", "overlap", "10"), 1.0),
        (("paths", "int8", "parity", "spearman", "min"), -2),
        (("paths", "int8", "parity", "statistics", "nDCG@10", "verdict"), "same"),
        (("paths", "int8", "parity", "statistics", "nDCG@10", "p_value"), 1.5),
        (("paths", "int8", "parity", "statistics_settings", "correction"), "bonferroni"),
        (("paths", "int8", "parity", "rank_shifts", "counts"), [[1, 2]]),
        (("paths", "int8", "parity", "error_histogram", "counts"), [-1]),
        (("paths", "int8", "parity", "most_changed"), [{"query": "1"}]),
        (("paths", "int8", "per_query", "nDCG@10"), [0.5]),
    ],
)
def test_damage_is_found(place: tuple[str, ...], value: Any, demo: dict[str, Any]) -> None:
    damaged = copy.deepcopy(demo)
    target = damaged
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    assert len(faults(damaged, OPEN)) == 1


@pytest.mark.parametrize("entry", ["schema", "task", "encoder", "k", "paths", "environment", "command"])
def test_what_every_file_has(entry: str, demo: dict[str, Any]) -> None:
    assert len(faults({key: value for key, value in demo.items() if key != entry}, OPEN)) == 1
