"""Datasets of ir_datasets as tasks, on a small one registered here; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ir_datasets", reason="ir_datasets is not installed here: test_environments.py runs this file")
import ir_datasets

from maxsim_eval.cli import main
from maxsim_eval.data.loading import load_task
from maxsim_eval.errors import DataError, UnknownNameError, UsageError

DOCUMENTS = {"d1": "glacier melt in the valley ", "d2": "two cats", "d3": "the bread oven"}
QUERIES = {"q1": "melt valley", "q2": "oven", "q3": "not judged"}
QRELS = [("q1", "d1", 2), ("q2", "d3", 1), ("q2", "d2", 0), ("q2", "gone", 1)]


@pytest.fixture(scope="module", autouse=True)
def registered(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("irds")

    def written(name: str, rows: Any) -> str:
        (folder / name).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        return str(folder / name)

    docs, queries = (
        written(f"{name}.tsv", (f"{key}\t{text}" for key, text in rows.items()))
        for name, rows in (("docs", DOCUMENTS), ("queries", QUERIES))
    )
    qrels = written("qrels", (f"{query} 0 {name} {value}" for query, name, value in QRELS))
    whole = ir_datasets.create_dataset(docs, queries, qrels)
    twice = ir_datasets.create_dataset(written("twice.tsv", ["d1\ta", "d1\tb"]), queries, qrels)
    absent = ir_datasets.create_dataset(str(folder / "absent.tsv"), queries, qrels)
    empty = ir_datasets.create_dataset(written("empty.tsv", []), queries, qrels)
    sets = {"": whole, "/test": whole, "/dev": whole, "/twice": twice, "/absent": absent, "/empty": empty}
    for name, one in sets.items():
        ir_datasets.registry.register(f"maxsim-tiny{name}", one)
    ir_datasets.registry.register("maxsim-tiny/docs", ir_datasets.create_dataset(docs))


def test_an_id_is_a_task(tmp_path: Path) -> None:
    task = load_task("irds", "maxsim-tiny/test", data_dir=tmp_path)
    assert (task.source, f"{task.dataset}/{task.split}") == ("irds", "maxsim-tiny/test")
    assert dict(zip(task.query_ids, task.queries, strict=True)) == {name: QUERIES[name] for name in ("q1", "q2")}
    assert dict(zip(task.document_ids, task.documents, strict=True)) == {name: text.strip() for name, text in DOCUMENTS.items()}
    assert task.qrels == {"q1": {"d1": 2}, "q2": {"d3": 1, "d2": 0, "gone": 1}}
    assert any("names documents that its documents lacks" in line or "gone" in line for line in task.warnings)
    assert load_task("irds", "maxsim-tiny", data_dir=tmp_path).split == "test"


def test_what_cannot_be_evaluated_is_said_in_one_line(tmp_path: Path) -> None:
    for name, error, text in (
        ("maxsim-tny/test", UnknownNameError, "unknown ir_datasets id 'maxsim-tny/test'. Did you mean"),
        ("maxsim-tiny/docs", DataError, "ir_datasets maxsim-tiny/docs: has no queries, need an id with"),
        ("maxsim-tiny/twice", DataError, "doc id 'd1' is there twice"),
        ("maxsim-tiny/empty", DataError, "ir_datasets maxsim-tiny/empty: the corpus is empty, need at least one document"),
        ("maxsim-tiny/absent", DataError, "ir_datasets maxsim-tiny/absent: could not be read (FileNotFoundError: "),
    ):
        with pytest.raises(error) as raised:
            load_task("irds", name, data_dir=tmp_path)
        assert text in str(raised.value)
        assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match="an id of ir_datasets names its split"):
        load_task("irds", "maxsim-tiny", data_dir=tmp_path, split="test")


@pytest.mark.parametrize("words", [("irds:maxsim-tiny/test",), ("irds", "maxsim-tiny/test")])
def test_the_command(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*words, "--encoder", "lexical", "--paths", "fp32", "--out", "out", "--quiet", "--k", "3"])
    assert not ended.value.code
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["task"]["dataset"] == "maxsim-tiny"
    assert result["paths"]["fp32"]["metrics"]["nDCG@10"] > 0.5


def test_splits_of_one_corpus_have_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ids = ["maxsim-tiny/dev", "maxsim-tiny/test", "maxsim-tiny"]
    assert {load_task("irds", name, data_dir=tmp_path).dataset for name in ids} == {"maxsim-tiny"}
    with pytest.raises(SystemExit) as ended:
        main(["irds", *ids, "--encoder", "lexical", "--paths", "fp32", "--out", "out", "--quiet", "--k", "3"])
    assert not ended.value.code
    folders = {path.name for path in (tmp_path / "out").iterdir()}
    assert folders == {f"irds-{name.replace('/', '-')}-lexical" for name in ids}
