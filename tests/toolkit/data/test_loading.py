"""Loaders and the BEIR layout: what is read, and one clear message for everything that cannot be."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from maxsim_eval.data.beir import read_judgements, read_texts, write_folder
from maxsim_eval.data.loading import LOADERS, Unread, load_folder, load_task
from maxsim_eval.errors import DataError, MissingPackageError, UnknownNameError, UsageError

CORPUS = '{"_id": "d1", "title": "A title", "text": "first text"}\n{"_id": "d2", "text": "second"}\n'
QUERIES = '{"_id": "q1", "text": "one"}\n{"_id": "q2", "text": "two"}\n{"_id": "q3", "text": "unjudged"}\n'
HEADER = "query-id\tcorpus-id\tscore\n"
QRELS = HEADER + "q2\td2\t2\nq1\td1\t1\nq1\td2\t0\n"


def make(folder: Path, corpus=CORPUS, queries=QUERIES, qrels=QRELS, split="test") -> Path:
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, text in (("corpus.jsonl", corpus), ("queries.jsonl", queries), (f"qrels/{split}.tsv", qrels)):
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def fails(folder: Path, *needed: str, error: type[Exception] = DataError, split: str | None = None) -> str:
    with pytest.raises(error) as caught:
        load_folder("local", "x", folder, split=split)
    for part in needed:
        assert part in str(caught.value), str(caught.value)
    return str(caught.value)


def test_a_folder_becomes_a_task_by_beirs_rules(tmp_path):
    task = load_folder("local", "x", make(tmp_path))
    assert (task.source, task.dataset, task.split) == ("local", "x", "test")
    assert task.document_ids == ["d1", "d2"]
    assert task.documents == ["A title first text", "second"]  # title + " " + text, stripped
    assert task.query_ids == ["q1", "q2"]  # the file's order, judged ones only
    assert task.queries == ["one", "two"]
    assert task.qrels == {"q1": {"d1": 1, "d2": 0}, "q2": {"d2": 2}}
    assert task.judged_pairs == 3
    assert not task.warnings
    assert not task.exclude_same_id
    assert set(task.provenance["sha256"]) == {"corpus.jsonl", "queries.jsonl", "qrels/test.tsv"}


def test_texts_keep_their_own_spaces_empty_ones_and_every_script(tmp_path):
    rows = [{"_id": "a", "title": "", "text": ""}, {"_id": 17, "title": None, "text": " ü 日本 \u2028 x "}]
    make(tmp_path, corpus="\ufeff" + "".join(json.dumps(r, ensure_ascii=False) + "\r\n" for r in rows) + "\n\n")
    texts = read_texts(tmp_path / "corpus.jsonl", titles=True)
    assert texts.ids == ["a", "17"]
    assert texts.texts == ["", "ü 日本 \u2028 x"]
    assert read_texts(tmp_path / "corpus.jsonl", titles=False).texts == ["", " ü 日本 \u2028 x "]


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        ('{"_id": "d3", "text": "no end', ["not JSON"]),
        ('["d3", "text"]', ["list", "need an object"]),
        ("[" * 100_000, ["not"]),
        ('{"text": "x"}', ["'_id' is missing"]),
        ('{"_id": null, "text": "x"}', ["'_id' is None", "need a string"]),
        ('{"_id": true, "text": "x"}', ["'_id' is True"]),
        ('{"_id": "", "text": "x"}', ["'_id'", "empty"]),
        ('{"_id": "two words", "text": "x"}', ["'two words'", "white space"]),
        ('{"_id": "\\ud800", "text": "x"}', ["surrogate"]),
        ('{"_id": "d3"}', ["'text' is missing"]),
        ('{"_id": "d3", "text": null}', ["'text' is", "need a string"]),
        ('{"_id": "d3", "text": "x", "title": 3}', ["'title' is int 3"]),
        ('{"_id": "d1", "text": "again"}', ["'d1' is already that of line 1"]),
    ],
)
def test_a_bad_corpus_line_is_named(tmp_path, line, needed):
    fails(make(tmp_path, corpus=CORPUS + line + "\n"), f"{tmp_path / 'corpus.jsonl'}:3", *needed)


def test_queries_are_read_as_strictly(tmp_path):
    fails(make(tmp_path, queries=QUERIES + '{"_id": "q1", "text": "twice"}'), "queries.jsonl:4", "line 1")


def test_bytes_that_are_not_utf8_are_located(tmp_path):
    good = CORPUS.encode()
    bad = good + b'{"_id": "d3", "text": "caf' + b"\xe9" + b'"}\n'
    fails(make(tmp_path, corpus=bad), "corpus.jsonl:3", "not UTF-8", f"byte {bad.index(0xE9)} of the file", "iconv")


def test_an_unreadable_file(tmp_path):
    make(tmp_path)
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read"):
        read_texts(tmp_path / "gone.jsonl", titles=True)


# Judgements


def test_qrels_without_a_header_are_refused_and_the_fix_is_shown(tmp_path):
    folder = make(tmp_path, qrels=QRELS.removeprefix(HEADER))
    fails(folder, "test.tsv:1", "q2", "drop this judgement silently", "sed -i '1i query-id\\tcorpus-id\\tscore'")


@pytest.mark.parametrize(
    ("qrels", "needed"),
    [
        ("query-id,corpus-id,score\nq1,d1,1\n", ["test.tsv:1", "commas", "need tabs"]),
        (HEADER + "q1,d1,1\n", ["test.tsv:2", "commas"]),
        ("q1 0 d1 1\n", ["test.tsv:1", "TREC qrels", "awk"]),
        ("qid\tdocid\trel\nq1\td1\t1\n", ["test.tsv:1", "need the header"]),
        ("", ["test.tsv", "empty"]),
        (HEADER + "q1\td1\n", ["test.tsv:2", "2 columns"]),
        (HEADER + "q1\td1\t1\textra\n", ["test.tsv:2", "4 columns"]),
        (HEADER + "q1\td1\t0.5\n", ["test.tsv:2", "'0.5'", "whole number"]),
        (HEADER + "q1\td1\t1_0\n", ["test.tsv:2", "'1_0'"]),
        (HEADER + "q1\t\t1\n", ["test.tsv:2", "corpus-id", "empty"]),
        (HEADER + 'q1\t"d1\t1\n', ["test.tsv:2", "quoting"]),
        (HEADER.encode() + b"q1\t\xff\t1\n", ["test.tsv:2", "not UTF-8"]),
        (HEADER, ["no judged queries"]),
        (HEADER + "nobody\td1\t1\n", ["no judged queries", "1 judgements of 1 queries", "'nobody'"]),
        (HEADER + "q1\tnothing\t1\n", ["none of the 1 judged documents", "'nothing'"]),
    ],
)
def test_bad_qrels(tmp_path, qrels, needed):
    fails(make(tmp_path, qrels=qrels), *needed)


def test_unknown_ids_are_counted_and_warned_about(tmp_path):
    task = load_folder("local", "x", make(tmp_path, qrels=QRELS + "q9\td1\t1\nq8\td1\t1\nq9\td2\t1\nq1\td9\t1\n"))
    assert task.query_ids == ["q1", "q2"]
    assert task.qrels["q1"] == {"d1": 1, "d2": 0, "d9": 1}  # stays: judged and never retrieved, as in BEIR
    left_out, stays = task.warnings
    assert "3 judgements of 2 queries" in left_out
    assert "'q9'" in left_out
    assert "1 judgements name documents that corpus.jsonl lacks, first 'd9'" in stays


def test_pairs_judged_twice_take_the_later_score_and_warn(tmp_path):
    task = load_folder("local", "x", make(tmp_path, qrels=QRELS + "q1\td1\t3\nq1\td2\t0\n"))
    assert task.qrels["q1"] == {"d1": 3, "d2": 0}
    assert "1 pairs are judged twice" in task.warnings[0]


def test_negative_scores_and_quoted_ids_are_read_as_beir_writes_them(tmp_path):
    path = tmp_path / "test.tsv"
    path.write_text(HEADER + 'q1\t"""Weird_Al""_Yankovic"\t-1\n')
    assert read_judgements(path).qrels == {"q1": {'"Weird_Al"_Yankovic': -1}}


def test_an_empty_text_stays_a_document_and_a_query(tmp_path):
    make(tmp_path, corpus=CORPUS + '{"_id": "d3", "title": "", "text": ""}\n', queries='{"_id": "q1", "text": ""}\n')
    task = load_folder("local", "x", tmp_path)
    assert (task.documents[2], task.queries) == ("", [""])


def test_graded_and_negative_judgements_are_kept_as_they_are(tmp_path):
    task = load_folder("local", "x", make(tmp_path, qrels=HEADER + "q1\td1\t3\nq1\td2\t-2\nq2\td1\t+1\nq2\td2\t0\n"))
    assert task.qrels == {"q1": {"d1": 3, "d2": -2}, "q2": {"d1": 1, "d2": 0}}
    assert not task.warnings


def test_ids_that_look_like_paths_are_only_ids(tmp_path):
    """Titles such as /dev/null or AC/DC are ids of FEVER: they name nothing in the file system."""
    make(
        tmp_path / "x",
        corpus='{"_id": "../../d1", "text": "a"}\n{"_id": "/dev/null", "text": "b"}\n',
        qrels=HEADER + "q1\t../../d1\t1\n",
    )
    before = sorted(path.name for path in tmp_path.rglob("*"))
    task = load_task("local", "x", data_dir=tmp_path)
    assert task.document_ids == ["../../d1", "/dev/null"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_card_in_the_folder_gives_split_rule_and_counts(tmp_path):
    make(tmp_path / "x", split="dev")
    card = 'name = "x"\ntitle = "X"\nsplit = "dev"\nexclude_same_id = true\ndocuments = 2\nqueries = 2\njudgements = 4\n'
    (tmp_path / "x" / "card.toml").write_text(card)
    task = load_task("local", "x", data_dir=tmp_path)
    assert (task.split, task.exclude_same_id) == ("dev", True)
    assert len(task.warnings) == 1
    assert "local x: 3 judgements in split 'dev', its card expects 4" in task.warnings[0]


def test_an_empty_corpus(tmp_path):
    fails(make(tmp_path, corpus=""), "corpus.jsonl", "the corpus is empty")


# Places and splits


def test_missing_files_and_splits(tmp_path):
    folder = make(tmp_path, split="dev")
    fails(folder, "qrels/test.tsv: missing", "Splits there: dev", "--split")
    assert load_folder("local", "x", folder, split="dev").split == "dev"
    (folder / "qrels" / "test.csv").write_text("query-id,corpus-id,score\n")
    fails(folder, "found test.csv", "tab-separated")
    fails(folder, "../test", error=UsageError, split="../test")
    (folder / "queries.jsonl").unlink()
    fails(folder, "queries.jsonl: missing", "corpus.jsonl, queries.jsonl and qrels/<split>.tsv", split="dev")


def test_local_takes_a_name_a_named_subfolder_or_a_path(tmp_path, monkeypatch):
    make(tmp_path / "here")
    make(tmp_path / "local" / "sub")
    assert load_task("local", "here", data_dir=tmp_path).dataset == "here"
    assert load_task("local", "sub", data_dir=str(tmp_path)).dataset == "sub"
    monkeypatch.chdir(tmp_path)
    task = load_task("local", "./here/", data_dir=tmp_path / "nowhere")
    assert (task.dataset, task.documents[1]) == ("here", "second")
    with pytest.raises(DataError, match=r"Looked for .*nowhere/gone, .*nowhere/local/gone, gone"):
        load_task("local", "gone", data_dir=tmp_path / "nowhere")


def test_what_is_there_may_be_read_by_several_processes_at_once(tmp_path, monkeypatch):
    """Nothing is fetched or made by reading it."""

    def unread(source: str, name: str) -> Unread:
        return Unread(source, name, {"data_dir": tmp_path, "quiet": True})

    make(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    for name in ("here", "./here/", str(tmp_path / "here")):
        assert unread("local", name).there == ("local", unread("local", name)().dataset) == ("local", "here")
    assert unread("beir", "scifact").there is None
    make(tmp_path / "beir" / "scifact")
    assert unread("beir", "scifact").there == ("beir", "scifact")
    assert unread("beir", "scifact")().dataset == "scifact"
    for source, name in (("local", "gone"), ("demo", "small"), ("irds", "x/y")):
        assert unread(source, name).there is None


def test_unknown_source_and_dataset_offer_near_names(tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'beir'"):
        load_task("bier", "scifact", data_dir=tmp_path)
    with pytest.raises(UnknownNameError, match="Did you mean 'scifact'"):
        load_task("beir", "sci-fact", data_dir=tmp_path)
    with pytest.raises(UnknownNameError, match="demo dataset"):
        load_task("demo", "large", data_dir=tmp_path)
    with pytest.raises(UsageError, match="empty name"):
        load_task("local", "", data_dir=tmp_path)
    with pytest.raises(UsageError, match=r"dataset 'two\\nlines': holds the control character U\+000A"):
        load_task("local", "two\nlines", data_dir=tmp_path)
    assert set(LOADERS) == {"beir", "real-mm-rag", "local", "demo", "irds"}


@pytest.mark.parametrize(
    ("source", "name", "package", "extra"),
    [("irds", "beir/x/test", "ir_datasets", "irds"), ("real-mm-rag", "finreport", "datasets", "encoders")],
)
def test_the_package_that_a_source_needs_is_named(tmp_path, monkeypatch, source, name, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"needs the package '{package}'.* 'maxsim-eval\[{extra}\]'"):
        load_task(source, name, data_dir=tmp_path)


def test_a_collection_must_be_named_by_part(tmp_path):
    with pytest.raises(UsageError, match="cqadupstack/android, cqadupstack/english"):
        load_task("beir", "cqadupstack", data_dir=tmp_path)
    make(tmp_path / "beir" / "cqadupstack" / "android")
    task = load_task("beir", "cqadupstack/android", data_dir=tmp_path)
    assert task.dataset == "cqadupstack/android"
    assert any("22998" in note for note in task.warnings)


@pytest.mark.parametrize("place", ["scifact", "beir/scifact"])
def test_beir_is_found_in_both_places_and_counts_are_compared_with_the_card(tmp_path, place):
    make(tmp_path / place)
    (tmp_path / "scifact").mkdir(exist_ok=True)  # an empty folder does not hide a complete one
    task = load_task("beir", "scifact", data_dir=tmp_path)
    assert len(task.warnings) == 3
    assert "2 documents in split 'test', its card expects 5183" in task.warnings[0]
    assert "NOT the published set" in task.warnings[1]
    assert task.provenance["url"].endswith("/scifact.zip")


def test_the_card_gives_split_and_same_id_rule(tmp_path):
    make(tmp_path / "msmarco", split="dev")
    assert load_task("beir", "msmarco", data_dir=tmp_path).split == "dev"
    make(tmp_path / "quora")
    assert load_task("beir", "quora", data_dir=tmp_path).exclude_same_id


def test_a_folder_that_lacks_files_is_an_error_not_a_download(tmp_path):
    (tmp_path / "scifact").mkdir()
    with pytest.raises(DataError, match=r"scifact/corpus\.jsonl: missing"):
        load_task("beir", "scifact", data_dir=tmp_path)


@pytest.mark.scifact
def test_scifact_is_as_published(scifact_data):
    task = load_task("beir", "scifact", data_dir=scifact_data)
    assert (len(task.documents), len(task.queries), task.judged_pairs) == (5183, 300, 339)
    assert not task.warnings
    assert load_task("beir", "scifact", data_dir=scifact_data.parent, split="train").judged_pairs == 919


# Writing


def test_write_folder_is_all_or_nothing(tmp_path, monkeypatch):
    target = tmp_path / "set"
    write_folder(target, {"a.txt": b"1", "qrels/test.tsv": b"2"})
    assert (target / "qrels" / "test.tsv").read_bytes() == b"2"
    write_folder(target, {"a.txt": b"3"})
    assert [path.name for path in target.iterdir()] == ["a.txt"]

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("maxsim_eval.data.beir.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_folder(target, {"a.txt": b"4"})
    assert (target / "a.txt").read_bytes() == b"3"
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_wrong_name_is_answered_where_somebody_elses_folder_lies(tmp_path, monkeypatch):
    make(tmp_path / "ice")
    (tmp_path / "private").mkdir()
    status = os.stat

    def refused(path, *rest, **options):
        if "private/" in os.fspath(path):
            raise PermissionError(13, "Permission denied", path)
        return status(path, *rest, **options)

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(DataError, match=r"local dataset 'icy': no such folder\. Did you mean 'ice'"):
        load_task("local", "icy", data_dir=tmp_path, quiet=True)
