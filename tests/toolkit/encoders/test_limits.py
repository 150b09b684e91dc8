"""Token limits against what a checkpoint reads: special tokens, markers, positions that no token has, limits that are no numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import BertTokenizerFast, RobertaConfig, RobertaModel

from maxsim_eval.encoders.hf import HfEncoder
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.errors import DataError, UsageError
from tiny_checkpoints import SPECIAL, WORDS


@pytest.mark.parametrize("layout", ["stanford", "pylate"])
@pytest.mark.parametrize("role", ["query", "document"])
def test_a_limit_must_leave_a_token_to_the_text(layout: str, role: Any, checkpoint_of: Callable[[str], Path]) -> None:
    folder = checkpoint_of(layout)

    def encoded(limit: int, **options: Any) -> int:
        encoder = get_encoder(f"multi-vector:{folder}", device="cpu", **{f"max_{role}_tokens": limit}, **options)
        return int(encoder.encode(["glacier melt valley cat two"], role).lengths[0])

    for limit in (1, 2, 3):  # [CLS], a marker and [SEP]
        with pytest.raises(
            UsageError, match=f"max_{role}_tokens: got {limit}, but .* puts 3 tokens of its own .*need 4 or more"
        ):
            encoded(limit)
    assert encoded(4) == 4
    with pytest.raises(UsageError, match=f"max_{role}_tokens: got 5, but .* puts 5 tokens of its own .*need 6 or more"):
        encoded(5, **{f"{role}_prompt": "glacier melt the "})
    assert encoded(3, **{f"{role}_prompt": ""}) == 3, "no marker"


@pytest.fixture
def roberta(tmp_path: Path) -> Path:
    """A model of 34 positions that begin behind padding 1, whose tokenizer says no limit."""
    folder = tmp_path / "roberta"
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    BertTokenizerFast(vocab=vocabulary, do_lower_case=True).save_pretrained(folder)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = RobertaConfig(vocab_size=len(vocabulary), max_position_embeddings=34, pad_token_id=1, **shape)
    RobertaModel(config).save_pretrained(folder)
    change(folder, model_max_length=None)
    return folder


def change(folder: Path, **settings: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_positions_before_the_first_are_no_room(roberta: Path) -> None:
    encoder = HfEncoder(str(roberta), device="cpu")
    assert encoder.max_tokens == {"query": 30, "document": 30}, "34 positions without the padding's two, and two special tokens"
    assert encoder.encode(["cat " * 50], "document").lengths.tolist() == [30]
    with pytest.raises(UsageError, match=r"max_document_tokens: got 31, but .* reads at most 30 tokens"):
        HfEncoder(str(roberta), max_document_tokens=31)


def test_limits_of_a_bert_are_as_they_were(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint_of("pylate"), tmp_path / "bert"))
    change(folder, model_max_length=None)
    assert HfEncoder(str(folder)).max_tokens == {"query": 46, "document": 46}


@pytest.mark.parametrize("value", ["many", [7], {}])
def test_a_tokenizers_limit_that_is_no_number(value: Any, roberta: Path) -> None:
    change(roberta, model_max_length=value)
    with pytest.raises(
        DataError, match=r"encoder hf:.*roberta: tokenizer_config.json: model_max_length is .*need a whole number"
    ):
        HfEncoder(str(roberta))


@pytest.mark.parametrize("value", [1, 2])
def test_a_tokenizers_limit_without_room_for_a_text(value: int, roberta: Path) -> None:
    change(roberta, model_max_length=value)
    with pytest.raises(DataError, match=f"encoder hf:.*roberta: it reads {value} tokens .* need 3 or more"):
        HfEncoder(str(roberta))
    change(roberta, model_max_length=3)
    assert HfEncoder(str(roberta), device="cpu").encode(["cat two"], "document").lengths.tolist() == [1]
