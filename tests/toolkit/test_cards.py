"""Dataset cards: complete, truthful where it can be checked, and strict."""

from __future__ import annotations

import pytest

from maxsim_eval import cards
from maxsim_eval.cards import known, load_card
from maxsim_eval.errors import DataError, UnknownNameError

PUBLIC = [
    "msmarco",
    "trec-covid",
    "nfcorpus",
    "nq",
    "hotpotqa",
    "fiqa",
    "arguana",
    "webis-touche2020",
    "quora",
    "dbpedia-entity",
    "scidocs",
    "fever",
    "climate-fever",
    "scifact",
]
FORUMS = [
    "android",
    "english",
    "gaming",
    "gis",
    "mathematica",
    "physics",
    "programmers",
    "stats",
    "tex",
    "unix",
    "webmasters",
    "wordpress",
]


def test_every_public_beir_set_has_a_card():
    assert known("beir") == sorted([*PUBLIC, "cqadupstack", *(f"cqadupstack/{name}" for name in FORUMS)])
    assert known("demo") == ["small"]
    assert known("nowhere") == []


@pytest.mark.parametrize("name", [*PUBLIC, "cqadupstack"])
def test_beir_cards_are_complete(name):
    card = load_card("beir", name)
    assert card.url == f"https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/{name}.zip"
    assert len(card.md5) == 32
    assert card.documents
    assert card.queries
    assert card.relevance
    assert card.metrics[0] == "nDCG@10"
    assert card.split == ("dev" if name == "msmarco" else "test")
    assert card.exclude_same_id == (name in ("arguana", "quora"))


def test_the_parts_of_a_collection_add_up():
    whole = load_card("beir", "cqadupstack")
    parts = [load_card("beir", f"cqadupstack/{name}") for name in whole.subsets]
    assert tuple(FORUMS) == whole.subsets
    assert sum(part.documents or 0 for part in parts) == whole.documents
    assert sum(part.queries or 0 for part in parts) == whole.queries
    assert not parts[0].subsets
    assert parts[0].url == whole.url


def test_checksums_are_those_beir_publishes():
    from importlib.metadata import metadata

    readme = str(metadata("beir").get_payload() or metadata("beir")["Description"])
    for name in PUBLIC:
        assert load_card("beir", name).md5 in readme


def test_unknown_names_offer_near_ones():
    with pytest.raises(UnknownNameError, match=r"unknown beir dataset 'hotpot'\. Did you mean 'hotpotqa'"):
        load_card("beir", "hotpot")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "not TOML"),
        ('name = "x"\ntitle = "x"\nlicense = "y"', "unknown field 'license'"),
        ('name = "x"\ntitle = "x"\ndocuments = true', "documents is True"),
        ('name = "x"', "'title' is missing"),
    ],
)
def test_a_wrong_card_is_refused(text, message):
    with pytest.raises(DataError, match=message):
        cards._parse("beir", "beir/x.toml", text)
