"""A folder of page images: ids, lazily opened pages, text queries and pages as queries, and what is refused."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from maxsim_eval.cache.sides import embed
from maxsim_eval.data.items import Pages
from maxsim_eval.data.loading import load_task
from maxsim_eval.data.subsets import limit_task
from maxsim_eval.errors import DataError, UnknownNameError, UsageError
from maxsim_kernels import Packed, pack

HEADER = "query-id\tcorpus-id\tscore\n"
COLOURS = {"a/p1": "red", "a/p2": "lime", "b": "blue", "c": "white"}


def make(folder: Path, qrels: str = "q1\ta/p1\t1\nq2\tb\t2\n", pages: str | None = "a/p1\ta/p2\t1\nb\tc\t1\n") -> Path:
    (folder / "qrels").mkdir(parents=True)
    for name, colour in COLOURS.items():
        path = folder / "pages" / f"{name}.{'jpg' if name == 'c' else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3), colour).save(path)
    (folder / "queries.jsonl").write_text(
        '{"_id": "q1", "text": "red"}\n{"_id": "q2", "text": "blue"}\n{"_id": "q3", "text": "?"}\n'
    )
    (folder / "qrels" / "test.tsv").write_text(HEADER + qrels)
    if pages is not None:
        (folder / "qrels" / "pages.tsv").write_text(HEADER + pages)
    return folder


class Colours:
    """A stand-in for a page encoder: the mean colour of a page, the colour a word names."""

    name, revision, dim = "colours", "1", 3

    def fingerprint(self, role):
        return {"code": 1}

    def prepare(self, documents):
        assert isinstance(documents, Pages)

    def encode(self, items, role) -> Packed:
        rows = []
        assert role == "query" or isinstance(items, Pages)  # the cache hands pages on unopened
        for item in items:
            pixel = item.getpixel((0, 0)) if hasattr(item, "getpixel") else {"red": (255, 0, 0), "blue": (0, 0, 255)}[item]
            rows.append(torch.tensor([pixel], dtype=torch.float32) / 255)
        return pack(rows)


def test_text_queries_against_pages(tmp_path):
    task = load_task("local", "set", data_dir=make(tmp_path / "set").parent)
    assert task.document_ids == ["a/p1", "a/p2", "b", "c"]
    assert (task.query_ids, task.queries, task.split) == (["q1", "q2"], ["red", "blue"], "test")
    assert task.qrels == {"q1": {"a/p1": 1}, "q2": {"b": 2}}
    assert isinstance(task.documents, Pages)
    assert not task.exclude_same_id
    assert not task.warnings
    assert task.provenance["pages"] == 4
    assert set(task.provenance["sha256"]) == {"queries.jsonl", "qrels/test.tsv"}


def test_pages_as_queries(tmp_path):
    task = load_task("local", "set", data_dir=make(tmp_path / "set").parent, queries="pages")
    assert (task.query_ids, task.split) == (["a/p1", "b"], "pages")
    assert isinstance(task.queries, Pages)
    assert [page.getpixel((0, 0)) for page in task.queries] == [(255, 0, 0), (0, 0, 255)]
    assert task.exclude_same_id  # a page is not retrieved for itself
    assert task.qrels == {"a/p1": {"a/p2": 1}, "b": {"c": 1}}
    (tmp_path / "set" / "queries.jsonl").unlink()
    assert load_task("local", "set", data_dir=tmp_path, queries="pages").query_ids == task.query_ids


def test_a_page_may_be_asked_to_find_itself(tmp_path):
    make(tmp_path / "set", pages="a/p1\ta/p1\t1\n")
    assert not load_task("local", "set", data_dir=tmp_path, queries="pages").exclude_same_id


def test_encoding_reads_one_page_at_a_time_and_subsets_stay_lazy(tmp_path):
    task = load_task("local", "set", data_dir=make(tmp_path / "set").parent, queries="pages")
    documents = embed(task, "document", Colours(), tmp_path / "cache", quiet=True)
    assert documents.ids() == task.document_ids
    assert documents.lengths().tolist() == [1, 1, 1, 1]  # vectors of each page: the entry holds them
    assert documents.manifest["documents_per_shard"] == 64, "of pages, a set of two thousand is work for many GPUs"
    assert embed(task, "query", Colours(), tmp_path / "cache", quiet=True).ids() == ["a/p1", "b"]
    kept = limit_task(task, queries=1, documents=2)
    assert isinstance(kept.queries, Pages)
    assert isinstance(kept.documents, Pages)
    assert (len(kept.queries), len(kept.documents)) == (1, 2)
    expected = {"red": (255, 0, 0), "lime": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
    for name, page in zip(kept.document_ids, kept.documents):
        assert page.getpixel((0, 0)) == expected[COLOURS[name]]


def test_another_image_under_the_same_name_is_another_entry(tmp_path):
    folder = make(tmp_path / "set")
    first = embed(load_task("local", "set", data_dir=tmp_path), "document", Colours(), tmp_path / "cache", quiet=True)
    Image.new("RGB", (4, 3), "black").save(folder / "pages" / "b.png")
    second = embed(load_task("local", "set", data_dir=tmp_path), "document", Colours(), tmp_path / "cache", quiet=True)
    assert first.folder != second.folder


def test_a_card_of_its_own_is_checked_against_the_folder(tmp_path):
    folder = make(tmp_path / "set")
    (folder / "card.toml").write_text('name = "set"\ntitle = "Mine"\ndocuments = 5\nqueries = 2\nlicence = "CC0"\n')
    task = load_task("local", "set", data_dir=tmp_path)
    assert len(task.warnings) == 1
    assert "4 documents in split 'test', its card expects 5" in task.warnings[0]
    assert task.provenance["licence"] == "CC0"


def test_other_files_are_said_and_hidden_ones_ignored(tmp_path):
    folder = make(tmp_path / "set")
    (folder / "pages" / "notes.txt").write_text("x")
    (folder / "pages" / ".thumbs.png").write_text("x")
    task = load_task("local", "set", data_dir=tmp_path)
    assert len(task.document_ids) == 4
    assert "1 files are neither PNG nor JPEG and were left out, first 'notes.txt'" in task.warnings[0]


def test_ids_never_become_paths(tmp_path):
    Image.new("RGB", (2, 2), "red").save(tmp_path / "secret.png")
    make(tmp_path / "set", qrels="q1\t../../secret\t1\nq1\ta/p1\t1\n")
    task = load_task("local", "set", data_dir=tmp_path)
    assert "../../secret" not in task.document_ids
    assert "1 judgements name documents that pages/ lacks, first '../../secret'" in task.warnings[0]
    with pytest.raises(UsageError, match=r"split '\.\./test'"):
        load_task("local", "set", data_dir=tmp_path, split="../test")


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        (lambda f: (f / "pages" / "a" / "p1.jpg").write_bytes(b"x"), "its page id 'a/p1' is already that of p1.jpg"),
        (lambda f: (f / "pages" / "two words.png").write_bytes(b"x"), "the page id 'two words' is empty or holds white space"),
        (lambda f: (f / "pages" / "b.png").write_bytes(b""), "b.png: an empty file"),
        (lambda f: (f / "qrels" / "test.tsv").unlink(), "qrels/test.tsv: missing; a folder of page images holds"),
        (lambda f: (f / "queries.jsonl").unlink(), "queries.jsonl: missing"),
        (
            lambda f: (f / "qrels" / "test.tsv").write_text(HEADER + "q1\tnowhere\t1\n"),
            "none of the 1 judged documents is in pages/",
        ),
        (lambda f: (f / "corpus.jsonl").write_text(""), "holds corpus.jsonl and pages/, need one of them"),
        (lambda f: [path.unlink() for path in (f / "pages").rglob("*.*")], "no PNG or JPEG file in it"),
        (lambda f: (f / "card.toml").write_text("x = 1"), "unknown field 'x'"),
    ],
    ids=["same-id", "space", "empty", "qrels", "queries", "foreign", "both", "none", "card"],
)
def test_what_is_refused(tmp_path, change, needed):
    folder = make(tmp_path / "set")
    change(folder)
    with pytest.raises(DataError) as caught:
        load_task("local", "set", data_dir=tmp_path)
    assert needed in str(caught.value)


@pytest.mark.timeout(60)
def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path):
    folder = make(tmp_path / "set")
    os.mkfifo(folder / "pages" / "z.png")
    with pytest.raises(DataError, match=r"z\.png: a pipe, a device or a dead link"):
        load_task("local", "set", data_dir=tmp_path)


def test_only_png_and_jpeg_are_parsed(tmp_path):
    written = io.BytesIO()
    Image.new("RGB", (2, 2)).save(written, "TIFF")
    pages = Pages(["a.png"], lambda _: written.getvalue())
    with pytest.raises(
        DataError, match=r"^a\.png: not a whole image \(neither PNG nor JPEG\); \d+ bytes, need a PNG or JPEG file$"
    ):
        pages[0]


def test_a_damaged_page_is_named_when_it_is_encoded(tmp_path):
    folder = make(tmp_path / "set")
    (folder / "pages" / "b.png").write_bytes(b"\x89PNG but cut")
    task = load_task("local", "set", data_dir=tmp_path)
    with pytest.raises(DataError, match=r"b\.png: not a whole image"):
        embed(task, "document", Colours(), tmp_path / "cache", quiet=True)
    (folder / "pages" / "b.png").unlink()
    with pytest.raises(DataError, match=r"b\.png: cannot be read"):
        task.documents[2]


def test_options_belong_to_their_sources(tmp_path):
    make(tmp_path / "set", pages=None)
    with pytest.raises(DataError, match=r"qrels/pages\.tsv: missing.*Splits there: test"):
        load_task("local", "set", data_dir=tmp_path, queries="pages")
    with pytest.raises(UnknownNameError, match="kind of queries 'page'"):
        load_task("local", "set", data_dir=tmp_path, queries="page")
    with pytest.raises(UsageError, match="source 'local' has no such option, only real-mm-rag"):
        load_task("local", "set", data_dir=tmp_path, rephrase=1)
    with pytest.raises(UsageError, match="source 'beir' has no such option, only real-mm-rag, local"):
        load_task("beir", "scifact", data_dir=tmp_path, queries="text")
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "corpus.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"queries 'pages': .*texts holds texts"):
        load_task("local", "texts", data_dir=tmp_path, queries="pages")


def test_tasks_are_plain_data(tmp_path):
    task = load_task("local", "set", data_dir=make(tmp_path / "set").parent)
    assert dataclasses.replace(task, dataset="other").documents is task.documents
