"""The generated collection: always the same bytes, and the awkward cases it is there for."""

from __future__ import annotations

import hashlib
import json

import pytest

from maxsim_eval.data.generated import DEFAULT, Stream, ensure, generate
from maxsim_eval.data.loading import load_task
from maxsim_eval.errors import UnknownNameError


def test_the_bytes_never_change():
    digest = hashlib.sha256()
    for name, data in sorted(generate().items()):
        digest.update(name.encode() + b"\0" + data)
    assert digest.hexdigest() == "bc79bed6bc6d80130576f163dc18ae401dd4f1eef60bf282e2412fd1bf06cfc8"


def test_it_holds_the_awkward_cases(tmp_path):
    task = load_task("demo", DEFAULT, data_dir=tmp_path)
    assert not task.warnings
    assert (len(task.documents), len(task.queries)) == (300, 40)
    lengths = [len(text.split()) for text in task.documents]
    assert sum(not text for text in task.documents) >= 3
    assert sum(length > 2000 for length in lengths) >= 3
    assert len(set(lengths)) > 80
    full = [text for text in task.documents if len(text) > 20]
    assert len(full) - len(set(full)) >= 10  # exact duplicates: ties
    assert {grade for row in task.qrels.values() for grade in row.values()} == {0, 1, 2}
    assert all(max(row.values()) == 2 for row in task.qrels.values())
    assert any(not text.isascii() for text in task.documents)
    in_file = (tmp_path / "demo" / DEFAULT / "queries.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(in_file) == 41  # one query is unjudged and left out


def test_it_is_reused_when_intact_and_made_anew_when_not(tmp_path):
    folder, replaced = ensure(DEFAULT, tmp_path)
    assert not replaced
    corpus = folder / "corpus.jsonl"
    before = corpus.stat().st_mtime_ns, corpus.stat().st_ino
    assert ensure(DEFAULT, tmp_path) == (folder, False)
    assert (corpus.stat().st_mtime_ns, corpus.stat().st_ino) == before
    corpus.write_text(json.dumps({"_id": "d000", "text": "edited"}) + "\n", encoding="utf-8")
    assert ensure(DEFAULT, tmp_path) == (folder, True)
    assert corpus.read_bytes() == generate()["corpus.jsonl"]
    assert [path.name for path in tmp_path.iterdir()] == [DEFAULT]


def test_a_changed_folder_is_said(tmp_path):
    load_task("demo", DEFAULT, data_dir=tmp_path)
    (tmp_path / "demo" / DEFAULT / "qrels" / "test.tsv").unlink()
    assert "generated anew" in load_task("demo", DEFAULT, data_dir=tmp_path).warnings[0]


def test_unknown_collection():
    with pytest.raises(UnknownNameError, match="Did you mean 'small'"):
        generate("smal")


def test_stream_is_fixed():
    rng = Stream("x")
    assert [rng.below(1000) for _ in range(4)] == [875, 504, 502, 732]
    assert sorted(rng.sample(range(10), 10)) == list(range(10))
