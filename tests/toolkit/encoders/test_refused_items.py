"""Items that a model encoder refuses: texts with half a character, embeddings that are no numbers; each is named by whoever knows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from maxsim_eval.encoders.gve import GveEncoder
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.encoders.refused_items import ItemError, not_finite, surrogates_named
from maxsim_eval.errors import DataError
from maxsim_eval.types import Role

TEXTS = ["glacier melt", "", "two cat \ud83d", "the \ude00"]


@pytest.mark.parametrize("count", [1, 30], ids=["few", "many"])  # many are read past the libraries' Python
@pytest.mark.parametrize("role", ["query", "document"])
@pytest.mark.parametrize(("kind", "layout"), [("hf", "pylate"), ("multi-vector", "pylate"), ("multi-vector", "stanford")])
def test_a_text_with_a_lone_surrogate_is_named(
    kind: str, layout: str, role: Role, count: int, checkpoint_of: Callable[[str], Path]
) -> None:
    encoder = get_encoder(f"{kind}:{checkpoint_of(layout)}", device="cpu")
    texts = [*TEXTS[:1] * (3 * count), *TEXTS]
    said = f"item {3 * count + 2} of {len(texts)} holds a lone surrogate, U\\+D83D, half a character, which no tokenizer takes; replace"
    with pytest.raises(DataError, match=said) as raised:
        encoder.encode(texts, role)
    assert "Options" not in str(raised.value), "another checkpoint would not help"
    assert len(encoder.encode(["two cat \U0001f600"], role)) == 1, "a whole pair is a character"


def test_a_query_of_pages_with_a_lone_surrogate_is_named(checkpoint_of: Callable[[str], Path]) -> None:
    with pytest.raises(DataError, match="item 2 of 4 holds a lone surrogate"):
        get_encoder(f"multi-vector:{checkpoint_of('colpali')}", device="cpu").encode(TEXTS, "query")


def test_gve_names_it_too(checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class Processor:
        def process_queries(self, texts: list[str]) -> None:
            raise TypeError("TextEncodeInput must be Union[...]")

    encoder = GveEncoder(str(checkpoint_of("stanford")), device="cpu", dtype="float32")
    encoder._model, encoder._processor = object(), Processor()
    with pytest.raises(DataError, match="item 2 of 4 holds a lone surrogate"):
        encoder.encode(TEXTS, "query")


def test_other_failures_stay_what_they_are() -> None:
    with pytest.raises(TypeError, match="other"), surrogates_named("x", ["cat", 7]):
        raise TypeError("other")
    with pytest.raises(DataError, match=r"^own$"), surrogates_named("x", TEXTS):
        raise DataError("own")


def test_whoever_knows_the_item_names_it() -> None:
    error = ItemError("x: ", 3, 8, " is odd")
    assert str(error) == "x: item 3 of 8 is odd"
    assert str(error.named("document 'd259'")) == "x: document 'd259' is odd"


@pytest.mark.parametrize(
    ("largest", "computed", "stored", "advice"),
    [
        (torch.nan, "float32", "float32", "in float32; check its weights"),
        (torch.nan, "bfloat16", "float32", "in bfloat16; use --dtype float32, or check its weights"),
        (torch.inf, "float16", "float32", "in float16; use --dtype float32 or bfloat16, or check its weights"),
        (7e4, "float32", "float16", "float16 cannot hold; store --embedding-dtype float32 or bfloat16"),
        (3.4e38, "float32", "bfloat16", "bfloat16 cannot hold; store --embedding-dtype float32"),
    ],
)
def test_only_another_dtype_is_recommended(largest: float, computed: str, stored: str, advice: str) -> None:
    error = not_finite("x", 0, 1, largest, getattr(torch, computed), getattr(torch, stored))
    assert str(error).endswith(advice)
