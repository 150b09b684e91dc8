"""What a Task holds: texts in one buffer, page images opened one at a time; both behave as plain sequences."""

from __future__ import annotations

import io
import json
import sys
import tracemalloc

import pytest
from PIL import Image

from maxsim_eval.cache.sides import content_hash
from maxsim_eval.data.beir import read_texts
from maxsim_eval.data.items import PackedTexts, Pages, take
from maxsim_eval.errors import DataError, MissingPackageError

TEXTS = ["plain", "", "ü 日本 \u2013 x", "\ud800 half a pair", "nul \0 and \u2028 line"]


def png(color, size=(3, 2), mode="RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, format="PNG")
    return buffer.getvalue()


class Counted:
    """Bytes of images that remember what was read."""

    def __init__(self, images: list[bytes]) -> None:
        self.images, self.read = images, []

    def __call__(self, row: int) -> bytes:
        self.read.append(row)
        return self.images[row]


def test_packed_texts_are_a_sequence_of_strings():
    packed = PackedTexts(TEXTS)
    assert list(packed) == TEXTS
    assert packed == TEXTS
    assert [*TEXTS] == packed
    assert packed != [*TEXTS[:-1], "other"]
    assert packed != TEXTS[:-1]
    assert packed != "plain"
    assert packed[-1] == TEXTS[-1]
    assert packed[1:3] == TEXTS[1:3]
    assert packed[::-2] == TEXTS[::-2]
    assert packed.index("") == 1
    assert "plain" in packed
    with pytest.raises(IndexError):
        packed[5]
    with pytest.raises(IndexError):
        packed[-6]
    assert take(packed, [4, 0]) == [TEXTS[4], TEXTS[0]]
    assert content_hash(list("abcde"), packed) == content_hash(list("abcde"), TEXTS)
    assert "5 texts" in repr(packed)


def test_a_corpus_costs_little_more_than_its_own_bytes(tmp_path):
    """What lets five million documents of 500 characters load within 6 GB: at most 200 bytes a document beside its text."""
    count, text = 20_000, "a \u2013 dash doubles what a Python string costs " * 11
    path = tmp_path / "corpus.jsonl"
    with open(path, "w", encoding="utf-8") as handle:
        for number in range(count):
            handle.write(json.dumps({"_id": str(10_000_000 + number), "title": "t", "text": text}, ensure_ascii=False) + "\n")
    tracemalloc.start()
    try:
        texts = read_texts(path, titles=True)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(texts.ids) == len(texts.texts) == count
    own = len(f"t {text}".strip().encode())
    assert kept / count < 1.13 * own + 100  # a growing buffer keeps an eighth to grow into
    assert peak / count < 1.13 * own + 250
    assert texts.texts.nbytes == count * (own + 8) + 8


def test_a_repeated_id_names_both_lines_although_only_ids_are_kept(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"_id": "a", "text": ""}\n\n{"_id": 7, "text": ""}\n{"_id": "b", "text": ""}\n{"_id": "7", "text": ""}\n')
    with pytest.raises(DataError, match=r"corpus\.jsonl:5: '_id' '7' is already that of line 3"):
        read_texts(path, titles=True)


def test_pages_are_opened_when_asked_for_and_one_at_a_time():
    source = Counted([png("red"), png("green", (5, 4)), png(7, mode="L")])
    pages = Pages(["a", "b", "c"], source)
    assert len(pages) == 3
    assert not source.read
    image = pages[1]
    assert source.read == [1]
    assert (image.size, image.mode, image.getpixel((0, 0))) == ((5, 4), "RGB", (0, 128, 0))
    some = pages.select([2, 0])[::-1]
    assert isinstance(some, Pages)
    assert isinstance(take(pages, [1]), Pages)
    assert source.read == [1]
    assert [page.mode for page in some] == ["RGB", "L"]
    assert source.read == [1, 0, 2]
    assert pages[-1].mode == "L"
    with pytest.raises(IndexError):
        pages[3]
    assert "3 images" in repr(pages)


def test_the_content_hash_reads_files_and_decodes_nothing(monkeypatch):
    images = [png("red"), png("blue")]
    monkeypatch.setattr("maxsim_eval.data.items._decode", lambda name, data: pytest.fail("decoded"))
    first = content_hash(["a", "b"], Pages(["a", "b"], Counted(images)))
    assert first == content_hash(["a", "b"], Pages(["x", "y"], Counted(images)))  # the names are only for messages
    assert first != content_hash(["a", "b"], Pages(["a", "b"], Counted(images[::-1])))
    assert first != content_hash(["a", "c"], Pages(["a", "b"], Counted(images)))
    assert first == content_hash(["a", "b"], Pages(["b", "a"], Counted(images[::-1])).select([1, 0]))


@pytest.mark.parametrize("data", [b"", b"no image", png("red")[:45], png("red")[:10]], ids=["empty", "text", "cut", "begun"])
def test_what_is_no_whole_image_is_named(data):
    with pytest.raises(DataError, match=r"pages/p7\.png: not a whole image"):
        Pages(["pages/p7.png"], lambda row: data)[0]


def test_without_pillow_pages_are_counted_and_not_opened(monkeypatch):
    pages = Pages(["a"], Counted([png("red")]))
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert len(pages) == 1
    with pytest.raises(MissingPackageError, match=r"needs the package 'pillow'.* 'maxsim-eval\[encoders\]'"):
        pages[0]
