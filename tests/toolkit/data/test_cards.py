"""Dataset cards: complete, truthful where it can be checked, and strict."""

from __future__ import annotations

import pytest

from maxsim_eval.comparison.metrics import parse_metric
from maxsim_eval.data import cards
from maxsim_eval.data.cards import known, load_card, read_card
from maxsim_eval.errors import DataError, UnknownNameError

PAPER = 'name = "x"\ntitle = "x"\n[[paper]]\nencoder = "e"\npath = "fp32"\nmetric = "nDCG@10"\n'
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
    assert known("real-mm-rag") == ["finreport", "finslides", "techreport", "techslides"]
    assert known("demo") == ["small"]
    assert known("nowhere") == []


@pytest.mark.parametrize("name", [*PUBLIC, "cqadupstack"])
def test_beir_cards_are_complete(name):
    card = load_card("beir", name)
    assert card.url == f"https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/{name}.zip"
    assert len(card.md5) == 32
    assert card.documents
    assert card.queries
    assert card.judgements
    assert card.relevance
    assert card.licence
    assert card.metrics[0] == "nDCG@10"
    assert card.split == ("dev" if name == "msmarco" else "test")
    assert card.exclude_same_id == (name in ("arguana", "quora"))


def test_the_parts_of_a_collection_add_up():
    whole = load_card("beir", "cqadupstack")
    parts = [load_card("beir", f"cqadupstack/{name}") for name in whole.subsets]
    assert tuple(FORUMS) == whole.subsets
    assert sum(part.documents or 0 for part in parts) == whole.documents
    assert sum(part.queries or 0 for part in parts) == whole.queries
    assert sum(part.judgements or 0 for part in parts) == whole.judgements
    assert not parts[0].subsets
    assert parts[0].url == whole.url


@pytest.mark.parametrize("name", ["FinReport", "FinSlides", "TechReport", "TechSlides"])
def test_real_mm_rag_cards_are_complete(name):
    card = load_card("real-mm-rag", name.lower())
    assert card.repository == f"ibm-research/REAL-MM-RAG_{name}"
    assert card.split == "test"
    assert card.licence == "CDLA-Permissive-2.0"
    assert card.documents
    figures = {(row.encoder, row.path, row.metric): row.value for row in card.paper}
    assert len(figures) == len(card.paper) == 10  # two encoders: nDCG of three paths, recall of two
    for encoder in ("ColPali v1.2", "Granite Vision Embedding"):
        assert abs(figures[encoder, "int8", "nDCG@10"] - figures[encoder, "fp32", "nDCG@10"]) <= 0.003


def test_every_name_of_a_metric_is_one():
    for source in ("beir", "real-mm-rag", "demo"):
        for name in known(source):
            card = load_card(source, name)
            for metric in (*card.metrics, *(row.metric for row in card.paper)):
                assert parse_metric(metric).canonical == metric


def test_the_papers_figures_are_those_of_its_tables():
    hotpotqa = {(row.path, row.metric): row for row in load_card("beir", "hotpotqa").paper}
    assert hotpotqa["fused", "nDCG@10"].value == hotpotqa["fp32", "nDCG@10"].value == 0.5681
    assert (hotpotqa["fused", "AnyHit@10"].queries, hotpotqa["fused", "AnyHit@10"].documents) == (500, 500_000)
    assert {(row.path, row.metric): row.value for row in load_card("beir", "nq").paper} == {
        ("fused", "nDCG@10"): 0.5223,
        ("fused", "AnyHit@10"): 0.746,
    }
    assert {row.metric: row.value for row in load_card("beir", "arguana").paper} == {
        "nDCG-exp@5": 0.2844, "AnyHit@5": 0.5277, "nDCG-exp@10": 0.3308, "AnyHit@10": 0.6707,
    }  # fmt: skip
    assert {row.metric: row.value for row in load_card("beir", "scidocs").paper} == {
        "nDCG-exp@5": 0.1341,
        "nDCG-exp@10": 0.1565,
    }
    report = {(row.encoder[:3], row.path, row.metric): row.value for row in load_card("real-mm-rag", "finreport").paper}
    assert report["Col", "int8", "nDCG@10"] == 0.6048
    assert report["Gra", "fused", "AnyHit@10"] == 0.9484
    assert not load_card("beir", "cqadupstack/android").paper


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
        ('name = "x"\ntitle = "x"\nexclude_same_id = 1', "exclude_same_id is 1, need bool"),
        ('name = "x"\ntitle = "x"\nqueries = -1', "queries is -1, need 0 or more"),
        ('name = "x"\ntitle = "x"\nmd5 = "abc"', "md5 is 'abc', need 32 hex digits"),
        ('name = "x"\ntitle = "x"\nrevision = "main"', "revision is 'main', need a commit"),
        ('name = "x"\ntitle = "x"\nrepository = "../x"', "repository is '../x', need <owner>/<name>"),
        ('name = "x"\ntitle = "x"\nurl = "file:///etc/passwd"', "need an http"),
        ('name = "x"\ntitle = "x"\nsplit = "../test"', "split is '../test', need one word"),
        ('name = "x"\ntitle = "x"\nmetrics = [1]', "need a list of names"),
        ('name = "x"\ntitle = "x"\n[subsets.a]\nrows = 1', "subset 'a': unknown field 'rows'"),
        ('name = "x"\ntitle = "x"\nsubsets = {a = 1}', "subset 'a' is 1, need a table"),
        ('name = "x"\ntitle = "x"\npaper = [1]', "paper row 1: 1, need a table"),
        (f"{PAPER}value = 0.5", "paper row 1: 'table' is missing"),
        (f'{PAPER}value = 50\ntable = "t"', "value is 50, need 0 to 1"),
        (f'{PAPER}value = "0.5"\ntable = "t"', "value is '0.5', need float"),
        (f'{PAPER}value = 0.5\ntable = "t"\nnote = "n"', "paper row 1: unknown field 'note'"),
        (f'{PAPER}value = 0.5\ntable = "t"', "without 'paper_caveat'"),
    ],
)
def test_a_wrong_card_is_refused(text, message):
    with pytest.raises(DataError, match=message):
        cards._parse("beir", "beir/x.toml", text)


def test_a_dataset_of_ones_own_brings_its_card(tmp_path):
    path = tmp_path / "card.toml"
    path.write_text('name = "x"\ntitle = "X"\ndocuments = 3\n')
    card = read_card(path, "local")
    assert (card.source, card.name, card.documents) == ("local", "x", 3)
    path.write_text('name = "x"\ntitle = "X"\n[subsets.a]\n')
    with pytest.raises(DataError, match=r"card\.toml: has subsets"):
        read_card(path, "local")
    path.write_bytes(b'title = "\xff"')
    with pytest.raises(DataError, match=r"card\.toml: not UTF-8"):
        read_card(path, "local")
    with pytest.raises(DataError, match="cannot be read"):
        read_card(tmp_path, "local")
