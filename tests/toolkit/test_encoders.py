"""Encoder names: what they become, and what is said where they cannot."""

from __future__ import annotations

import pytest

from maxsim_eval.encoders import ENCODERS, get_encoder
from maxsim_eval.errors import UnknownNameError, UsageError


def test_lexical_takes_the_common_options():
    encoder = get_encoder("lexical", device="cpu", batch_size=8, max_query_tokens=5, max_document_tokens=None)
    assert (encoder.name, encoder.dim) == ("lexical", 128)
    assert encoder.fingerprint("query")["max_tokens"] == 5
    assert encoder.fingerprint("document")["max_tokens"] == 256
    assert set(ENCODERS) == {"lexical", "hf"}


@pytest.mark.parametrize("name", ["colbertv2", "colpali", "gve", "multi-vector:org/model"])
def test_encoders_whose_weights_cannot_run_here_name_the_options(name):
    with pytest.raises(UsageError) as caught:
        get_encoder(name)
    for part in (repr(name), "evaluate.py import", "--encoder lexical", "--encoder hf:"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [("lexcal", "'lexical'"), ("colbert-v2", "'colbertv2'"), ("org/all-MiniLM", "'hf:org/all-MiniLM'"), ("", "Known")],
)
def test_unknown_encoders_offer_near_names(name, near):
    with pytest.raises(UnknownNameError, match=near):
        get_encoder(name)


def test_wrong_arguments():
    with pytest.raises(UsageError, match="no variants"):
        get_encoder("lexical:large")
    with pytest.raises(UsageError, match="unknown option 'bach_size'"):
        get_encoder("lexical", bach_size=3)
    with pytest.raises(UsageError, match="need an id or a path"):
        get_encoder("hf:")
