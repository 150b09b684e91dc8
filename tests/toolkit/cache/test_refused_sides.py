"""What the cache says of texts that cannot be encoded: which of the whole they are, by id; and of sides without any token."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import tiny_checkpoints
from maxsim_eval.cache.sides import embed
from maxsim_eval.encoders.lexical import LexicalEncoder
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.errors import DataError
from maxsim_eval.types import Role, Task
from task_cases import small_task

INVISIBLE = "\u200b\u200d"


def task(documents: Sequence[str], queries: Sequence[str] = ("glacier",)) -> Task:
    return small_task(queries, documents, dataset="refused")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A checkpoint that has no number for "cat"."""
    folder = tiny_checkpoints.stanford(tmp_path / "models" / "broken")
    weights = load_file(folder / "model.safetensors")
    cat = [*tiny_checkpoints.SPECIAL, *tiny_checkpoints.WORDS].index("cat")
    weights["bert.embeddings.word_embeddings.weight"][cat] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize(("role", "text", "said"), [
    ("document", "the cat", "NaN or infinity for document 'd400' (item 400 of 600) in float32; check its weights"),
    ("query", "the cat", "NaN or infinity for query 'q400' (item 400 of 600) in float32; check its weights"),
    ("document", "the \ud800", "document 'd400' (item 400 of 600) holds a lone surrogate, U+D800"),
    ("query", "the \ud800", "query 'q400' (item 400 of 600) holds a lone surrogate, U+D800"),
])  # fmt: skip
def test_an_item_is_named_by_its_id_and_its_place_in_the_whole(
    role: Role, text: str, said: str, at_once: int, broken: Path, tmp_path: Path
) -> None:
    texts = ["glacier melt"] * 600
    texts[400] = text
    given = task(texts) if role == "document" else task(["melt"], texts)
    encoder: Any = get_encoder(f"multi-vector:{broken}", device="cpu", dtype="float32")
    encoder.at_once = at_once
    with pytest.raises(DataError) as raised:
        embed(given, role, encoder, tmp_path, quiet=True)
    assert said in str(raised.value)


def test_a_model_must_give_some_query_a_token(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    encoder = get_encoder(f"hf:{checkpoint_of('pylate')}", device="cpu")
    for _ in range(2):  # the second finds nothing of the first
        with pytest.raises(DataError, match=r"local refused: none of the 3 queries has a token by hf:.*, need at least one"):
            embed(task(["melt"], [INVISIBLE, " ", ""]), "query", encoder, tmp_path, quiet=True)
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert embed(task(["melt"], [INVISIBLE, "cat", ""]), "query", encoder, tmp_path, quiet=True).tokens == 1


def test_words_alone_may_give_none_with_a_warning(tmp_path: Path) -> None:
    encoder = LexicalEncoder()
    with pytest.warns(UserWarning, match="none of the 2 documents has a token by lexical"):
        assert embed(task(["the", "\U0001f600"]), "document", encoder, tmp_path, quiet=True).tokens == 0
    with pytest.warns(UserWarning, match="none of the 1 queries has a token by lexical"):
        embed(task(["melt"], ["the"]), "query", encoder, tmp_path, quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embed(task(["the", "melt"]), "document", encoder, tmp_path, quiet=True)
        embed(task([]), "document", encoder, tmp_path, quiet=True)
