"""Word pieces of printable ASCII come from a BERT tokenizer without its normalizer, and are the ones that it gives with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, BertWordPieceTokenizer, Tokenizer, normalizers
from tokenizers.processors import TemplateProcessing

from maxsim_eval.encoders.piece_process import Plain, pieces
from tiny_checkpoints import SPECIAL

LETTERS = [chr(number) for number in range(33, 127)]
VOCABULARY = [
    *SPECIAL,
    *LETTERS,
    *(f"##{one}" for one in LETTERS),
    "glacier",
    "##melt",
    "CLS",
    "cls",
    "e\u0301",
    "\u4e2d",
    "\u00e9",
]
PARTS = [*SPECIAL, *(one.lower() for one in SPECIAL), "[Unused1]", "[UNUSED1]", "[", "]", " ", "  ", "\t", "\n", "\r\n", "\0", "\x7f",
         "\x1c", "\u00a0", "\u200b", "\u00e9", "E\u0301", "\u4e2d", "\u0130", "\ufffd", "Glacier", "MELT", "a" * 120, "aa", "A", " aa "]  # fmt: skip
TEXT = st.lists(st.one_of(st.sampled_from(PARTS), st.text(st.characters(codec="ascii"), max_size=6)), max_size=12).map("".join)


def tokenizer(lowercase: bool, strip_accents: bool | None = None, clean_text: bool = True, **flags: bool) -> Tokenizer:
    """As `BertTokenizerFast` has it: special tokens looked for before a text is normalized."""
    made = BertWordPieceTokenizer(
        {one: number for number, one in enumerate(dict.fromkeys(VOCABULARY))},
        lowercase=lowercase, strip_accents=strip_accents, clean_text=clean_text,
    )  # fmt: skip
    found = Tokenizer.from_str(made.to_str())
    found.add_special_tokens([AddedToken(one, normalized=False) for one in SPECIAL])
    found.add_tokens([AddedToken("aa", normalized=False, **flags)])  # may overlap itself
    ids = {one: found.token_to_id(one) for one in ("[CLS]", "[SEP]")}
    found.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=list(ids.items()))
    return found


TOKENIZERS = [
    tokenizer(lowercase, strip_accents, clean_text)
    for lowercase in (True, False)
    for strip_accents in (None, True, False)
    for clean_text in (True, False)
]
TOKENIZERS += [tokenizer(True, **{flag: True}) for flag in ("single_word", "lstrip", "rstrip")]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("truncation", [None, {"max_length": 9}, {"max_length": 6, "direction": "left"}])
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TOKENIZERS), st.lists(TEXT, max_size=6))
@example(
    TOKENIZERS[0], ["", " ", "[unused1] Glacier [UNUSED1]", "[unused1] [sep]", "[UNK]", "Glacier[unused1]MELT", "[[unused1]]"]
)
def test_pieces_are_those_of_the_whole_tokenizer(special: bool, truncation: Any, whole: Tokenizer, texts: list[str]) -> None:
    expected = pieces(whole, truncation, special, texts)
    found = pieces(whole, truncation, special, texts, Plain.of(whole.to_str()))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


def test_which_texts_go_past_the_normalizer() -> None:
    plain = Plain.of(TOKENIZERS[0].to_str())
    assert plain is not None
    assert plain.text("A Glacier, 2 [cats]") == "a glacier, 2 [cats]"
    assert plain.text("[unused1] A Glacier") == "[unused1] a glacier", "a prompt's token"
    for kept in (
        "A caf\u00e9",
        "two\nlines",
        "[UNK]",
        "[unk]",
        "[Unused1] a",
        "[unused1] [unused0]",
        "[unused1] [UNUSED1]",
        "Aaa",
    ):
        assert plain.text(kept) is None
    cased = Plain.of(tokenizer(False).to_str())
    assert cased is not None
    assert cased.text("A Glacier [SEP]") == "A Glacier [SEP]"


def test_other_tokenizers_have_no_shorter_way() -> None:
    assert Plain.of(Tokenizer.from_str(TOKENIZERS[0].to_str()).to_str()) is not None
    other = Tokenizer.from_str(TOKENIZERS[0].to_str())
    other.normalizer = normalizers.Lowercase()
    assert Plain.of(other.to_str()) is None
    other.normalizer = None
    assert Plain.of(other.to_str()) is None
    for added in (AddedToken("Glaciers", normalized=True), AddedToken("\u4e2d", normalized=False)):
        more = Tokenizer.from_str(TOKENIZERS[0].to_str())
        more.add_tokens([added])
        assert Plain.of(more.to_str()) is None
