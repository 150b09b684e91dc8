"""Encoder names: what they become, and what is said where they cannot."""

from __future__ import annotations

import pytest

from maxsim_eval.encoders.names import ENCODERS, get_encoder
from maxsim_eval.errors import UnknownNameError, UsageError


def test_lexical_takes_the_common_options():
    encoder = get_encoder("lexical", device="cpu", batch_size=8, max_query_tokens=5, max_document_tokens=None)
    assert (encoder.name, encoder.dim) == ("lexical", 128)
    assert encoder.fingerprint("query")["max_tokens"] == 5
    assert encoder.fingerprint("document")["max_tokens"] == 256
    assert set(ENCODERS) == {"lexical", "hf", "multi-vector", "colbertv2", "colpali", "gve"}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("lexcal", "'lexical'"),
        ("colbert-v2", "'colbertv2'"),
        ("org/all-MiniLM", "'hf:org/all-MiniLM'"),
        ("org/all-MiniLM", "'multi-vector:org/all-MiniLM'"),
        ("colpal@main", "'colpali'"),
        ("", "Known"),
    ],
)
def test_unknown_encoders_offer_near_names(name, near):
    with pytest.raises(UnknownNameError, match=near):
        get_encoder(name)


def test_wrong_arguments():
    with pytest.raises(UsageError, match="no variants"):
        get_encoder("lexical:large")
    with pytest.raises(UsageError, match="colbertv2 has no variants; for another model use multi-vector:org/model"):
        get_encoder("colbertv2:org/model")
    for option, value in (("dtype", "float16"), ("query_prompt", "find "), ("revision", "v1"), ("trust_remote_code", True)):
        with pytest.raises(UsageError, match=f"option '{option}' means nothing to it"):
            get_encoder("lexical", **{option: value})
    with pytest.raises(UsageError, match="unknown option 'bach_size'"):
        get_encoder("lexical", bach_size=3)
    with pytest.raises(UsageError, match="need an id or a path"):
        get_encoder("hf:")
