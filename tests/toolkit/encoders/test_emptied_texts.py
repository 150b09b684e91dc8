"""Texts that are not blank and still keep no token: punctuation that is skipped, characters a tokenizer drops.

Such a document has no tokens in the cache, scores -inf and is not retrieved; everything behind the cache takes that.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from maxsim_eval.api import evaluate
from maxsim_eval.cache.converting import convert_entry
from maxsim_eval.cache.inspecting import inspect_entry
from maxsim_eval.cache.sides import embed
from maxsim_eval.data.trec import read_trec_run
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.report.result_json import to_json
from maxsim_eval.scoring.job import digest
from maxsim_eval.types import Encoder, Task
from task_cases import small_task

INVISIBLE = "\u200b\u200d\u2060"  # format characters: str.strip leaves them, a BERT tokenizer does not
TEXTS = {"hf": ["glacier melt", INVISIBLE, "two cat", "the valley", f"{INVISIBLE} "],
         "multi-vector": ["glacier melt", ". , .", "two cat.", "the valley", ","]}  # fmt: skip
EMPTIED = [1, 4]
PATHS = ("fp32", "fused-fp32", "fp16", "bf16", "int8", "int8-document", "int8-corpus", "fp8")


def task(texts: list[str]) -> Task:
    return small_task(["glacier", "two cat"], texts, qrels={"q0": {"d0": 1, "d1": 1}, "q1": {"d4": 1}})


@pytest.fixture(params=["hf", "multi-vector"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint; the late-interaction one skips its markers too, so that nothing of punctuation is left."""
    folder = Path(shutil.copytree(checkpoint_of("pylate"), tmp_path / "models" / "tiny"))
    if kind == "hf":
        for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
            (folder / name).unlink()
        return folder
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    settings["skiplist_words"] = [".", ",", "[CLS]", "[SEP]", "[D]"]
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def encoder(kind: str, folder: Path) -> Encoder:
    return get_encoder(f"{kind}:{folder}")


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_it_has_no_tokens_whatever_shares_its_batch(kind: str, folder: Path, batch: int) -> None:
    texts = TEXTS[kind]
    assert all(texts[row].strip() for row in EMPTIED), "blank texts are another matter"
    encoder = get_encoder(f"{kind}:{folder}", batch_size=batch)
    assert encoder.encode(texts, "document").lengths.tolist() == [2, 0, 2, 2, 0]
    only = encoder.encode([texts[row] for row in EMPTIED], "document")
    assert (only.lengths.tolist(), only.values.shape, only.dtype) == ([0, 0], (0, encoder.dim), torch.float32)


def test_it_is_never_retrieved_on_any_path(kind: str, encoder: Encoder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = task(TEXTS[kind])
    entry = embed(given, "document", encoder, tmp_path / "cache", quiet=True)
    assert entry.lengths().tolist() == [2, 0, 2, 2, 0]
    result = evaluate(given, encoder, PATHS, k=5, cache_dir=tmp_path / "cache", out_dir=out, metrics=["R@5"], quiet=True)
    for name in PATHS:
        run = read_trec_run(out / "runs" / f"{name}.trec").rankings
        for query, ranked in run.items():
            assert {document for document, _ in ranked} == {"d0", "d2", "d3"}, (name, query)
            assert all(math.isfinite(score) for _, score in ranked)
        assert result.paths[name].per_query["R@5"] == {"q0": 0.5, "q1": 0.0}, "judged, and never found"
        parity = result.paths[name].parity
        assert (parity is None) == (name == "fp32")
    assert "Infinity" not in to_json(result)
    assert "NaN" not in to_json(result)


def test_it_is_inspected_and_converted(kind: str, encoder: Encoder, tmp_path: Path) -> None:
    given = task(TEXTS[kind])
    entry = embed(given, "document", encoder, tmp_path, quiet=True)
    found = json.loads(json.dumps(inspect_entry(entry.folder, verify=True, quiet=True).as_json(), allow_nan=False))
    assert (found["documents"], found["tokens"]) == (5, 6)
    assert found["histogram"][0] == [0, 0, 2], "two documents of no token"
    before = evaluate(given, encoder, ["int8", "int8-document"], k=5, cache_dir=tmp_path, quiet=True)
    for name in ("int8-token", "int8-document"):
        convert_entry(entry, name, quiet=True)
    after = evaluate(given, encoder, ["int8", "int8-document"], k=5, cache_dir=tmp_path, quiet=True)
    for name in ("int8", "int8-document"):
        assert "copy in the cache" in after.paths[name].description
        assert after.paths[name].per_query == before.paths[name].per_query


def test_a_corpus_of_nothing_else(kind: str, encoder: Encoder, tmp_path: Path) -> None:
    given = task([TEXTS[kind][row] for row in EMPTIED] * 3)
    with pytest.warns(UserWarning, match=r"none of the 6 documents has a token by .*: none is ever retrieved"):
        entry = embed(given, "document", encoder, tmp_path / "cache", quiet=True)
    assert (entry.documents, entry.tokens) == (6, 0)
    result = evaluate(given, encoder, PATHS, k=5, cache_dir=tmp_path / "cache", out_dir=tmp_path / "out", quiet=True)
    for name in PATHS:
        assert (tmp_path / "out" / "runs" / f"{name}.trec").read_text() == ""
        assert np.isfinite(list(result.paths[name].metrics.values())).all()
        assert not any(result.paths[name].metrics.values())


# Whole chunks of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [256, 0], ids=["the last chunk", "all"])
def test_chunks_in_which_no_text_keeps_a_token(words: int, tmp_path: Path) -> None:
    """An encoder gets 256 texts at a time; what it gives for blank ones has strides of its own."""
    given = task([*["glacier"] * words, " ", ""])
    given = dataclasses.replace(given, queries=["the", "a"], qrels={"q0": {"d1": 1}})
    with nullcontext() if words else pytest.warns(UserWarning, match="none of the 2 documents has a token by lexical"):
        entry = embed(given, "document", get_encoder("lexical"), tmp_path / "cache", quiet=True)
    assert (entry.documents, entry.tokens) == (words + 2, words)
    assert entry.lengths().tolist() == [*[1] * words, 0, 0]
    entry.verify()
    with pytest.warns(UserWarning, match="none of the 2 queries has a token by lexical"):
        found = evaluate(
            given, "lexical", ["fp32", "fp16"], k=2, cache_dir=tmp_path / "cache", out_dir=tmp_path / "out", quiet=True
        )
    run = read_trec_run(tmp_path / "out" / "runs" / "fp16.trec").rankings
    assert [name for name, _ in run["q0"]] == ["d0", "d1"], "a query without tokens scores 0 with everything"
    assert found.paths["fp16"].metrics == found.paths["fp32"].metrics


def test_tokens_of_nothing_have_a_digest_whatever_their_strides() -> None:
    nothing = torch.empty(0, 4)
    assert digest(nothing.as_strided((0, 4), (0, 0))) == digest(nothing) != digest(torch.empty(0, 5))
