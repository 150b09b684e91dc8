"""REAL-MM-RAG on a stand-in with its real layout: parquet files with an Image column, written by `datasets` itself."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from PIL import Image

import datasets
from maxsim_eval.cache.sides import content_hash
from maxsim_eval.data import real_mm_rag
from maxsim_eval.data.cards import load_card
from maxsim_eval.data.items import Pages
from maxsim_eval.data.loading import load_task
from maxsim_eval.errors import DataError, UnknownNameError, UsageError

# A page with two questions, one without, one whose questions lack a wording.
ROWS = [
    ("r_page_1.png", "red", "What is red?", ["Which is red?", "Red one?", "The scarlet one?"]),
    ("r_page_2.png", "lime", None, [None, None, None]),
    ("r_page_1.png", "red", "Is it red?", ["Red, is it?", "Reddish?", "Scarlet?"]),
    ("r_page_3.png", "blue", "What is blue?", ["Which is blue?", "Blue one?", ""]),
]


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf-cache"))


def table(rows=ROWS, **columns) -> datasets.Dataset:
    values = {
        "id": [f"{number}" for number in range(len(rows))],
        "image": [Image.new("RGB", (40, 30), row[1]) for row in rows],
        "image_filename": [row[0] for row in rows],
        "query": [row[2] for row in rows],
        **{f"rephrase_level_{level}": [row[3][level - 1] for row in rows] for level in (1, 2, 3)},
        "answer": [None if row[2] is None else "yes" for row in rows],
    }
    values = {name: value for name, value in {**values, **columns}.items() if value is not None}
    kinds = {name: datasets.Image() if name == "image" else datasets.Value("string") for name in values}
    return datasets.Dataset.from_dict(values, features=datasets.Features(kinds))


def store(folder: Path, found: datasets.Dataset | None = None, files: int = 2, split: str = "test") -> Path:
    """As on the Hub: data/<split>-0000i-of-0000n.parquet."""
    found = table() if found is None else found
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for number in range(files):
        shard = found.shard(files, number, contiguous=True)
        shard.to_parquet(folder / "data" / f"{split}-{number:05d}-of-{files:05d}.parquet")
    return folder


def load(tmp_path: Path, **options):
    return load_task("real-mm-rag", "finreport", data_dir=tmp_path, quiet=True, **options)


def colours(pages) -> list[tuple[int, ...]]:
    return [page.getpixel((0, 0)) for page in pages]


def test_pages_once_and_a_question_for_the_page_of_its_row(tmp_path):
    store(tmp_path / "real-mm-rag" / "finreport")
    task = load(tmp_path)
    assert (task.source, task.dataset, task.split) == ("real-mm-rag", "finreport", "test")
    assert task.document_ids == ["r_page_1.png", "r_page_2.png", "r_page_3.png"]
    assert isinstance(task.documents, Pages)
    assert colours(task.documents) == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    assert task.query_ids == ["0", "2", "3"]
    assert task.queries == ["What is red?", "Is it red?", "What is blue?"]
    assert task.qrels == {"0": {"r_page_1.png": 1}, "2": {"r_page_1.png": 1}, "3": {"r_page_3.png": 1}}
    assert "3 documents in split 'test', its card expects 2687" in task.warnings[-1]
    assert "the card pins no revision" in task.warnings[0]
    assert task.provenance["repository"] == "ibm-research/REAL-MM-RAG_FinReport"
    assert (task.provenance["rephrase"], task.provenance["pages"]) == (0, 3)


def test_images_are_decoded_one_at_a_time(tmp_path, monkeypatch):
    store(tmp_path / "finreport")
    decoded = []
    real = Image.open
    monkeypatch.setattr(Image, "open", lambda *args, **options: (decoded.append(1), real(*args, **options))[1])
    task = load(tmp_path)
    content_hash(task.document_ids, task.documents)
    assert not decoded
    assert task.documents[2].size == (40, 30)
    assert len(decoded) == 1


def test_rephrasings_change_the_questions_and_say_so(tmp_path):
    store(tmp_path / "finreport")
    first, second, third = (load(tmp_path, rephrase=level) for level in (1, 2, 3))
    assert first.queries == ["Which is red?", "Red, is it?", "Which is blue?"]
    assert second.queries == ["Red one?", "Reddish?", "Blue one?"]
    assert (first.split, third.split) == ("test-rephrase-1", "test-rephrase-3")
    assert first.query_ids == second.query_ids == ["0", "2", "3"]
    assert third.query_ids == ["0", "2"]
    assert any("1 of 3 queries lack 'rephrase_level_3' and were left out" in note for note in third.warnings)
    whole = load(tmp_path)
    assert content_hash(first.document_ids, first.documents) == content_hash(whole.document_ids, whole.documents)
    with pytest.raises(UsageError, match="rephrase level 4: need 0"):
        load(tmp_path, rephrase=4)


def test_pages_as_queries(tmp_path):
    store(tmp_path / "finreport")
    task = load(tmp_path, queries="pages")
    assert task.split == "test-pages"
    assert task.query_ids == task.document_ids
    assert isinstance(task.queries, Pages)
    assert task.qrels == {name: {name: 1} for name in task.document_ids}
    assert not task.exclude_same_id
    assert any("every page asks for itself" in note for note in task.warnings)


@pytest.mark.parametrize("ids", [None, ["1", "1", "1", "1"]])
def test_without_unique_ids_rows_are_numbered(tmp_path, ids):
    store(tmp_path / "finreport", table(id=ids))
    task = load(tmp_path)
    assert task.query_ids == ["row-0", "row-2", "row-3"]
    assert any("no column of unique query ids" in note for note in task.warnings)


def test_names_with_white_space_become_single_words(tmp_path):
    rows = [("a b.png", "red", "q", ["", "", ""]), ("a%20b.png", "blue", "q", ["", "", ""])]
    store(tmp_path / "finreport", table(rows), files=1)
    assert load(tmp_path).document_ids == ["a%20b.png", "a%2520b.png"]


def test_other_splits(tmp_path):
    folder = store(tmp_path / "finreport", split="train")
    with pytest.raises(DataError, match=r"no test-\*\.parquet.*splits there: train \(--split\)"):
        load(tmp_path)
    assert load(tmp_path, split="train").split == "train"
    store(folder, table(ROWS[:2]), files=1)
    assert len(load(tmp_path).document_ids) == 2


def damaged(folder: Path) -> None:
    path = folder / "data" / "test-00001-of-00002.parquet"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        (damaged, "cannot be loaded"),
        (lambda folder: (folder / "data" / "test-00001-of-00002.parquet").unlink(), "1 of the 2 files of split 'test'"),
        (lambda folder: store(folder, table().remove_columns("image_filename")), "no column 'image_filename'; found"),
        (lambda folder: store(folder, table().select([])), "cannot be loaded"),
        (lambda folder: store(folder, table(query=[None] * 4)), "no row has a query"),
        (lambda folder: store(folder, table(id=["a b", "1", "2", "3"])), "query id 'a b'"),
        (lambda folder: store(folder, table(image_filename=["x.png"] * 4)), "rows 0 and 1 hold different images, both named"),
        (lambda folder: store(folder, table(image_filename=["../x.png", "b", "../x.png", "c"])), "points outside its folder"),
        (lambda folder: store(folder, table(image_filename=["/x.png", "b", "/x.png", "c"])), "points outside its folder"),
        (lambda folder: store(folder, table(image_filename=[None, "b", "c", "d"])), "row 0: image_filename is None"),
    ],
    ids=["cut", "half", "column", "empty", "unasked", "id", "two", "outside", "root", "unnamed"],
)
def test_what_is_refused(tmp_path, change, needed):
    folder = store(tmp_path / "finreport")
    change(folder)
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    assert needed in str(caught.value)


def test_an_image_that_lacks_or_is_none_is_named(tmp_path):
    images = [{"bytes": b"no image", "path": None}, None, {"bytes": b"no image", "path": None}, {"bytes": b"x", "path": None}]
    store(tmp_path / "finreport", table(image=images))
    task = load(tmp_path)
    with pytest.raises(DataError, match=r"r_page_1\.png: not a whole image"):
        task.documents[0]
    with pytest.raises(DataError, match="row 1: no image in it"):
        task.documents[1]


def hub(monkeypatch, reply):
    """`datasets.load_dataset` as the Hub would answer it; the calls it got."""
    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        return reply()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_the_hub_is_asked_for_the_cards_repository(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    arrow = tmp_path / "hf" / "default" / commit / "x.arrow"
    arrow.parent.mkdir(parents=True)
    table().save_to_disk(tmp_path / "saved")
    next((tmp_path / "saved").glob("*.arrow")).rename(arrow)
    calls = hub(monkeypatch, lambda: datasets.Dataset.from_file(str(arrow)))
    task = load(tmp_path / "nowhere")
    assert calls == [(("ibm-research/REAL-MM-RAG_FinReport",), {"split": "test", "revision": None})]
    assert len(task.document_ids) == 3
    assert task.provenance["revision"] == commit
    assert f"pins no revision; loaded {commit}" in task.warnings[0]
    load(tmp_path / "nowhere", revision=commit)
    assert calls[1][1]["revision"] == commit


def test_the_revision_is_read_from_where_datasets_keeps_it():
    commit = "0123456789abcdef0123456789abcdef01234567"

    class Found:
        cache_files = ({"filename": f"/cache/ibm-research___real/default/0.0.0/{commit}/x-test.arrow"},)

    assert real_mm_rag._revision(Found()) == commit
    Found.cache_files = ({"filename": "/cache/x.arrow"},)
    assert real_mm_rag._revision(Found()) == ""


def test_without_a_network_the_message_says_what_to_do(tmp_path, monkeypatch):
    def fail():
        raise ConnectionError("Couldn't reach the Hub")

    hub(monkeypatch, fail)
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    for part in ("Couldn't reach the Hub", "hf download ibm-research/REAL-MM-RAG_FinReport --repo-type dataset", "--data-dir"):
        assert part in str(caught.value)
    assert f"--local-dir {tmp_path / 'real-mm-rag' / 'finreport'}" in str(caught.value)


def test_names_are_those_of_the_cards(tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'finreport'"):
        load_task("real-mm-rag", "FinReport", data_dir=tmp_path)


def test_a_pinned_card_says_nothing_about_its_revision(tmp_path):
    card = dataclasses.replace(load_card("real-mm-rag", "finreport"), revision="a" * 40, documents=3)
    store(tmp_path / "finreport")
    assert not real_mm_rag.load(card, tmp_path, quiet=True).warnings


def test_progress_bars_are_left_as_they_were(tmp_path):
    store(tmp_path / "finreport")
    before = datasets.are_progress_bars_disabled()
    load(tmp_path)
    assert datasets.are_progress_bars_disabled() == before


def test_the_stand_in_has_the_real_columns():
    names = ["id", "image", "image_filename", "query", "rephrase_level_1", "rephrase_level_2", "rephrase_level_3", "answer"]
    assert table().column_names == names
    assert isinstance(table().features["image"], datasets.Image)
    assert io.BytesIO(table().cast_column("image", datasets.Image(decode=False))[0]["image"]["bytes"]).read(4) == b"\x89PNG"
