"""Bad names, options and data: one clear message, the right exit code, nothing half written."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

USAGE, DATA = 2, 3


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.fixture
def pets(collection: Callable[..., Path], tmp_path: Path) -> Path:
    """A small local set at datasets/local/pets below tmp_path."""
    return collection(tmp_path / "datasets" / "local" / "pets")


def untouched(folder: Path) -> bool:
    """Whether the command made neither a cache nor results."""
    return {path.name for path in folder.iterdir()} <= {"datasets"}


# Names and options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("beir", "scifct"), ("unknown", "'scifct'", "Did you mean 'scifact'")),
        (("beir", "zzzzzz"), ("unknown", "'zzzzzz'", "Known: ", "scifact")),
        (("demo", "smal"), ("'smal'", "Did you mean 'small'")),
        (("local", "pets", "--encoder", "lexicl"), ("unknown encoder 'lexicl'", "Did you mean 'lexical'")),
        (("local", "pets", "--paths", "fp32,int9"), ("unknown path 'int9'", "Did you mean 'int8'")),
        (("local", "pets", "--paths", "fp32;fp16"), ("unknown path 'fp32;fp16'", "Known: ")),
        (("local", "pets", "--paths", ""), ("paths: got none",)),
        (("local", "pets", "--paths", " , "), ("paths: got none",)),
        (("local", "pets", "--k", "0"), ("--k: got 0, need 1 or more",)),
        (("local", "pets", "--k", "-7"), ("--k: got -7, need 1 or more",)),
        (("local", "pets", "--readers", "0"), ("--readers: got 0, need 1 or more",)),
        (("local", "pets", "--limit-queries", "0"), ("--limit-queries: got 0, need 1 or more",)),
        (("local", "pets", "--limit-documents", "-2"), ("--limit-documents: got -2, need 1 or more",)),
        (
            ("local", "pets", "--limit-documents", "4"),
            ("documents: got 4, need 5 or more", "3 queries have 5 judged documents"),
        ),
        (("local", "pets", "--device", "cuda:77"), ("device 'cuda:77' cannot be used",)),
        (("local", "pets", "--device", "gpu"), ("device 'gpu' cannot be used",)),
        (("local", "pets", "--split", "../test"), ("split '../test'",)),
    ],
)
def test_names_and_options(arguments: tuple[str, ...], texts: tuple[str, ...], pets: Path, cli: Any, tmp_path: Path) -> None:
    cli(*arguments, cwd=tmp_path).refused(USAGE, *texts)
    assert untouched(tmp_path)


@pytest.mark.parametrize("name", ["colbertv2", "colpali", "gve", "multi-vector:org/model", "hf:org/model"])
def test_weights_that_are_not_here_and_no_network(
    name: str, pets: Path, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    said = (f"encoder {name}", "evaluate.py import", "--encoder lexical", "hf download")
    cli("local", "pets", "--encoder", name, cwd=tmp_path).refused(DATA, *said, ways=True)
    assert untouched(tmp_path)


@pytest.mark.parametrize(
    "arguments", [("evaluat",), ("local", "pets", "--colour", "red"), ("local", "pets", "--k", "ten"), ("local",)]
)
def test_what_the_command_line_itself_refuses(arguments: tuple[str, ...], pets: Path, cli: Any, tmp_path: Path) -> None:
    outcome = cli(*arguments, cwd=tmp_path)
    assert outcome.code == USAGE
    assert "error: " in outcome.err.lower()
    assert outcome.out == ""
    assert untouched(tmp_path)


# Data -----------------------------------------------------------------------------------------------------------------


def test_a_missing_beir_folder_says_where_it_looked_and_how_to_get_it(
    cli: Any, offline: None, clean: Any, tmp_path: Path
) -> None:
    outcome = cli("beir", "scifact", "--encoder", "lexical", "--data-dir", "my/data", cwd=tmp_path)
    outcome.refused(DATA, "my/data/scifact", "my/data/beir/scifact", "scifact.zip", "md5", "--data-dir", "no route to host")
    clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_local_folder_says_where_it_looked(cli: Any, tmp_path: Path) -> None:
    outcome = cli("local", "pets", cwd=tmp_path)
    outcome.refused(DATA, "'pets'", "datasets/pets", "datasets/local/pets", "corpus.jsonl", "--data-dir")
    assert list(tmp_path.iterdir()) == []


def edit(file: Path, line: int, text: str | bytes) -> None:
    """Replace one line (counted from 1)."""
    lines = file.read_bytes().splitlines(keepends=True)
    lines[line - 1] = (text if isinstance(text, bytes) else text.encode()) + b"\n"
    file.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("file", "line", "text", "texts"),
    [
        ("corpus.jsonl", 3, '{"_id": "d3", "text": "cut o', ("corpus.jsonl:3", "not JSON")),
        ("corpus.jsonl", 4, '["d4", "a list"]', ("corpus.jsonl:4", "list", "need an object")),
        ("corpus.jsonl", 2, '{"text": "no id"}', ("corpus.jsonl:2", "'_id' is missing")),
        ("corpus.jsonl", 2, '{"_id": "d2"}', ("corpus.jsonl:2", "'text' is missing")),
        ("corpus.jsonl", 5, '{"_id": "d1", "text": "again"}', ("corpus.jsonl:5", "'d1'", "line 1")),
        ("corpus.jsonl", 6, b'{"_id": "d6", "text": "caf\xe9"}', ("corpus.jsonl:6", "not UTF-8")),
        ("queries.jsonl", 1, "{]", ("queries.jsonl:1", "not JSON")),
        ("queries.jsonl", 2, '{"_id": "q 2", "text": "white space"}', ("queries.jsonl:2", "'q 2'", "white space")),
        ("qrels/test.tsv", 3, "q1\td5", ("test.tsv:3", "2 columns", "need 3")),
        ("qrels/test.tsv", 2, "q1\td1\tyes", ("test.tsv:2", "'yes'", "whole number")),
        ("qrels/test.tsv", 1, "q1\td2\t1", ("test.tsv:1", "header", "query-id")),
        ("qrels/test.tsv", 1, "q1 0 d2 1", ("test.tsv:1", "TREC", "query-id")),
    ],
)
def test_malformed_files_are_named_with_the_line(
    file: str, line: int, text: str | bytes, texts: tuple[str, ...], pets: Path, cli: Any, tmp_path: Path
) -> None:
    edit(pets / file, line, text)
    cli("local", "pets", cwd=tmp_path).refused(DATA, *texts)
    assert untouched(tmp_path)


@pytest.mark.parametrize("file", ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"])
def test_a_missing_file_of_the_folder(file: str, pets: Path, cli: Any, tmp_path: Path) -> None:
    (pets / file).unlink()
    cli("local", "pets", cwd=tmp_path).refused(DATA, file, "missing")
    assert untouched(tmp_path)


def test_an_unknown_split_names_those_there_are(pets: Path, cli: Any, tmp_path: Path) -> None:
    cli("local", "pets", "--split", "dev", cwd=tmp_path).refused(DATA, "dev.tsv", "missing", "Splits there: test")
    assert untouched(tmp_path)


def test_an_empty_corpus(collection: Callable[..., Path], cli: Any, tmp_path: Path) -> None:
    collection(tmp_path / "datasets" / "local" / "pets", corpus={})
    cli("local", "pets", cwd=tmp_path).refused(DATA, "corpus.jsonl", "the corpus is empty", "at least one document")
    assert untouched(tmp_path)


@pytest.mark.parametrize("qrels", [(), (("q8", "d1", 1), ("q9", "d2", 1))])
def test_no_judged_query(qrels: tuple[Any, ...], collection: Callable[..., Path], cli: Any, tmp_path: Path) -> None:
    collection(tmp_path / "datasets" / "local" / "pets", qrels=qrels)
    cli("local", "pets", cwd=tmp_path).refused(DATA, "test.tsv", "no judged queries", f"{len(qrels)} judgements")
    assert untouched(tmp_path)


def test_qrels_of_another_set(collection: Callable[..., Path], cli: Any, tmp_path: Path) -> None:
    collection(tmp_path / "datasets" / "local" / "pets", qrels=(("q1", "x1", 1), ("q2", "x2", 1)))
    cli("local", "pets", cwd=tmp_path).refused(DATA, "test.tsv", "none of the 2 judged documents", "'x1'")
    assert untouched(tmp_path)


def test_judgements_of_unknown_ids_are_counted_and_warned_of(collection: Callable[..., Path], cli: Any, tmp_path: Path) -> None:
    qrels = (("q1", "d1", 1), ("q1", "lost", 1), ("q7", "d2", 1), ("q7", "d4", 1), ("q8", "d2", 1), ("q2", "d4", 1))
    collection(tmp_path / "datasets" / "local" / "pets", qrels=qrels)
    outcome = cli("local", "pets", "--paths", "fp32", "--k", "6", cwd=tmp_path).fine()
    folder = tmp_path / "results" / "local-pets-lexical"
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    unknown, missing = result["task"]["warnings"]
    assert "3 judgements of 2 queries that queries.jsonl lacks were left out, first 'q7'" in unknown
    assert "1 judgements name documents that corpus.jsonl lacks, first 'lost'" in missing
    assert result["task"]["queries"] == 2
    assert result["paths"]["fp32"]["per_query"]["Recall@100"] == {"q1": 0.5, "q2": 1.0}
    report = (folder / "report.md").read_text(encoding="utf-8")
    shown = " ".join(outcome.out.split())  # the console wraps long lines
    for text in ("3 judgements of 2 queries", "first 'lost'"):
        assert text in report
        assert text in shown


def test_a_path_as_the_name_of_a_local_set(pets: Path, cli: Any, tmp_path: Path) -> None:
    where = tmp_path / "elsewhere"
    where.mkdir()
    cli("local", pets, "--paths", "fp32", "--k", "6", "--quiet", cwd=where).fine()
    result = json.loads(next(where.rglob("result.json")).read_text(encoding="utf-8"))
    assert result["task"]["dataset"] == "pets"
    assert {path.name for path in where.iterdir()} == {"embeddings_cache", "results"}


def test_the_report_of_a_path_is_named_after_the_dataset(pets: Path, cli: Any, tmp_path: Path) -> None:
    cli("local", pets, "--paths", "fp32", "--k", "6", "--quiet", cwd=tmp_path).fine()
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["local-pets-lexical"]


def test_a_report_folder_that_cannot_be_written(pets: Path, cli: Any, clean: Any, tmp_path: Path) -> None:
    (tmp_path / "report").write_text("a file")
    outcome = cli("local", "pets", "--out", "report", "--k", "6", "--quiet", cwd=tmp_path)
    outcome.refused(DATA, "report", "cannot be written")
    clean(tmp_path)


def test_a_cache_folder_that_cannot_be_made(pets: Path, cli: Any, clean: Any, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    outcome = cli("local", "pets", "--cache-dir", "cache", "--k", "6", "--quiet", cwd=tmp_path)
    outcome.refused(DATA, "cache", "cannot be created")
    clean(tmp_path)


def test_a_data_folder_that_cannot_be_made(cli: Any, clean: Any, tmp_path: Path) -> None:
    (tmp_path / "datasets").write_text("a file")
    cli("demo", "--quiet", cwd=tmp_path).refused(DATA, "datasets/demo/small", "cannot be written")
    clean(tmp_path)


# Judgements -----------------------------------------------------------------------------------------------------------

COMMAND = ("-c", "from maxsim_eval.cli.app import main; main()")
NEGATIVE = (("q1", "d1", -2), ("q1", "d5", -3), ("q2", "d4", 1), ("q3", "d6", -1))


@pytest.mark.slow
def test_grades_below_0_do_not_kill_a_command(collection: Callable[..., Path], start: Any, tmp_path: Path) -> None:
    """Each in a process of its own: trec_eval died of them, after all scoring was done."""
    pets = collection(tmp_path / "datasets" / "local" / "pets", qrels=NEGATIVE)
    words = ("local", "pets", "--paths", "fp32", "--k", "6", "--metrics", "MRR,Bpref", "--json", "--out", "out")
    evaluated = start((*COMMAND, *words), tmp_path)
    out, err = evaluated.communicate(timeout=300)
    assert evaluated.returncode == 0, err
    assert json.loads(out)["paths"]["fp32"]["per_query"]["MRR"] == {"q1": 0.0, "q2": 1.0, "q3": 0.0}
    words = ("metrics", str(pets / "qrels" / "test.tsv"), "out/runs/fp32.trec", "--metrics", "MRR,Bpref", "--json")
    measured = start((*COMMAND, *words), tmp_path)
    out, err = measured.communicate(timeout=300)
    assert measured.returncode == 0, err
    assert json.loads(out)["runs"]["fp32.trec"]["metrics"] == pytest.approx({"MRR": 1 / 3, "Bpref": 1 / 3})
