"""Processes that read texts give what the tokenizer gives here, begin for many texts alone, and say when one is gone."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from maxsim_eval.encoders import readers
from maxsim_eval.encoders.hf import HfEncoder
from maxsim_eval.encoders.model_encoder import ModelEncoder
from maxsim_eval.encoders.multi_vector import MultiVectorEncoder
from tiny_checkpoints import SPECIAL, WORDS, bert, stanford

TEXTS = [" ".join(["glacier", "cat", "the", "zebra"][(n + k) % 4] for k in range(1 + n % 69)) for n in range(200)]


def waited(pool: readers.Readers) -> None:
    """Until all of its processes have begun."""
    ending = time.monotonic() + 60
    while pool._ready.qsize() < pool.most:
        assert time.monotonic() < ending
        time.sleep(0.01)


@pytest.fixture(params=["hf", "multi-vector"])
def encoder(request: pytest.FixtureRequest, tmp_path: Path) -> ModelEncoder:
    if request.param == "hf":
        bert(tmp_path, [*SPECIAL, *WORDS]).save_pretrained(tmp_path)
        return HfEncoder(str(tmp_path), device="cpu")
    return MultiVectorEncoder(str(stanford(tmp_path / "colbert")), device="cpu")


def test_processes_give_the_same_tokens(encoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert encoder.readers is None, "on a CPU texts are read by the process that runs the model"
    expected = encoder.encode(TEXTS, "document")
    encoder.readers = readers.Readers(2)
    assert torch.equal(encoder.encode(TEXTS, "document").values, expected.values)
    assert not encoder.readers._begun, "few texts begin none"
    monkeypatch.setattr(readers, "BEGIN", 100)
    encoder.encode(TEXTS, "document")
    waited(encoder.readers)
    asked = []
    pieces = encoder.readers.pieces
    monkeypatch.setattr(encoder.readers, "pieces", lambda *request: asked.append(len(request[-1])) or pieces(*request))
    found = encoder.encode(TEXTS, "document")
    assert asked == [len(TEXTS)]
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.lengths, expected.lengths)


def test_those_who_expect_many_begin_with_few(encoder: Any) -> None:
    encoder.expect(readers.BEGIN)  # without readers nobody listens
    encoder.readers = readers.Readers(1)
    encoder.expect(readers.BEGIN - 100)
    encoder.encode(TEXTS[:80], "document")
    assert not encoder.readers._begun
    encoder.expect(readers.BEGIN)
    encoder.encode(TEXTS[:80], "document")
    assert encoder.readers._begun


def test_a_process_that_is_killed_is_named_and_the_others_end_with_their_owner(
    encoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BEGIN", 100)
    encoder.readers = readers.Readers(1)
    encoder.encode(TEXTS, "document")
    waited(encoder.readers)
    process = encoder.readers._ready.queue[0]
    process.kill()
    with pytest.raises(readers.ReaderError, match=r"word pieces ended \(exit status -9\)"):
        encoder.encode(TEXTS, "document")
    encoder.readers = pool = readers.Readers(1)
    encoder.encode(TEXTS, "document")
    waited(pool)
    process = pool._ready.queue[0]
    with pytest.raises(TypeError):  # the tokenizer's own refusals come back
        pool.pieces({"max_length": "many"}, False, ["cat"])
    assert process.poll() is None
    encoder.readers = None
    del pool
    gc.collect()  # the error above holds what raised it
    assert process.wait(10) == -9


def test_texts_are_shared_and_an_answer_is_always_taken(encoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BEGIN", 100)
    monkeypatch.setattr(readers, "_AT_ONCE", 67)
    encoder.readers = pool = readers.Readers(3)
    expected = encoder.encode(TEXTS, "document")
    waited(pool)
    told: list[tuple[int, int]] = []
    tell = readers._tell
    monkeypatch.setattr(
        readers, "_tell", lambda process, request: told.append((process.pid, len(request[-1]))) or tell(process, request)
    )
    encoder.encode(TEXTS, "document")
    assert sorted(size for _, size in told) == [66, 67, 67]
    processes = list(pool._ready.queue)
    processes[1].kill()
    processes[1].wait(10)
    with pytest.raises(readers.ReaderError):  # three parts to three processes that wait in a line
        encoder.encode(TEXTS, "document")
    waited(pool)
    assert [process.poll() for process in processes] == [None, -9, None]
    living = readers.Readers(2)
    living._asking, living._begun = pool._asking, True
    living._answering.set()
    for process in (processes[0], processes[2]):
        living._ready.put(process)
    encoder.readers = living
    assert torch.equal(encoder.encode(TEXTS, "document").values, expected.values), (
        "no answer was left for the next one who asks"
    )


def test_a_process_that_cannot_begin_is_said_and_not_waited_for(
    encoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = encoder.encode(TEXTS, "document")
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(3)")
    monkeypatch.setattr(readers, "BEGIN", 100)
    monkeypatch.setattr(readers, "_PROGRAM", broken)
    said: list[str] = []
    monkeypatch.setattr(readers.warnings, "warn", lambda text, *rest, **options: said.append(text))
    encoder.readers = pool = readers.Readers(1)
    ending = time.monotonic() + 60
    while not said:
        assert torch.equal(encoder.encode(TEXTS, "document").values, expected.values)
        assert time.monotonic() < ending
    assert "did not begin (exit status 3" in said[0]
    assert not pool._answering.is_set()
