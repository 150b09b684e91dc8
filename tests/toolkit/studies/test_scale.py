"""docs/scale.md says what its script computes, from rates that lie where the JSON says, by formulas checked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.errors import DataError
from maxsim_eval.studies.scale import MEAN_TOKENS, TABLES, all_tables, break_even, fill, main, pages, passages, read_rates
from places import ROOT
from tables.cells import keys_of

PAGE = ROOT / "docs" / "scale.md"
RATES = ROOT / "docs" / "results" / "h200" / "rates.json"


@pytest.fixture
def document() -> dict[str, Any]:
    return dict(json.loads(RATES.read_text(encoding="utf-8")))


@pytest.fixture
def plain(document: dict[str, Any], tmp_path: Path) -> Path:
    """Round rates: a link of 100 GB/s, 10^15 operations a second, drives of 1 GB/s, 4 GPUs a node."""
    for entries in (document["measured"], document["assumed"]):
        for name, entry in entries.items():
            entry["value"] = 1e15 if name.startswith("score") else entry["value"]
    document["measured"]["gpu memory"]["value"] = 4e12
    document["measured"]["link"]["value"] = 100e9
    document["measured"]["page cache thread"]["value"] = 1e12
    document["assumed"]["drive"]["value"] = 1e9
    document["assumed"]["gpus"]["value"] = 4
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_the_page_holds_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert fill(text, all_tables(RATES)) == text, "run: python -m maxsim_eval.studies.scale --write docs/scale.md"
    assert text.count("<!-- end -->") == len(TABLES) + 1  # and the rates themselves; a table of page.py ends in another mark


def test_rates_come_from_where_they_say(document: dict[str, Any]) -> None:
    digests = {}
    for name, entry in document["measured"].items():
        file, keys = keys_of(entry["from"])
        found = json.loads((RATES.parents[1] / file).read_text(encoding="utf-8"))
        digests |= found[keys[0]][keys[1]]["environment"]["families"]
        held = [found := found[key] for key in keys]
        rate = held[-1]
        if isinstance(rate, dict):
            rate = held[3]["operations"] / (rate["median_ms"] * 1e-3)
        unit = {"link": 1e9, "page cache thread": 1e9 / 8}.get(name, 1.0)
        assert entry["value"] == pytest.approx(rate * unit, rel=1e-5), name
    assert document["families"] == {name: digests[name] for name in ("codes", "streaming")}
    for kind in ("measured", "assumed"):
        assert all(entry["how"] for entry in document[kind].values())


def cells(path: Path, table: str, row: int) -> list[str]:
    return [cell.strip() for cell in TABLES[table](read_rates(path))[2 + row].strip("|").split("|")]


def test_beir_by_hand(plain: Path) -> None:
    name, documents, queries, size, link, score, *_ = cells(plain, "beir", 0)
    assert (name, documents, queries) == ("nq", "2,681,468", "3,452")
    tokens = 2_681_468 * MEAN_TOKENS
    assert size == f"{tokens * 256 / 1e9:.3g} GB"
    assert link == f"{tokens * 256 / 100e9 * 1e3:.3g} ms"
    assert score == f"{2 * 3452 * 32 * tokens * 128 / 1e15:.3g} s"
    assert "169 tokens" in cells(plain, "beir", 7)[0]


def test_cluster_by_hand(plain: Path) -> None:
    nodes, form, each, place, disk, link, score, _, merge = cells(plain, "cluster", 0)
    assert (nodes, form, each, place) == ("1 (4)", "FP16", "26.2 TB", "NVMe")
    assert disk == f"{26.2144e12 / 8e9 / 60:.1f} min"  # 8 drives
    assert link == f"{26.2144e12 / 4 / 100e9:.3g} s"
    share = 6104 / 24415  # units of 1 GiB
    assert score == f"{2 * 32_000 * 1024 * 1e8 * 128 * share / 1e15:.0f} s"
    assert merge.startswith(f"{4 * 1000 * 100 * 8 / 1e6:.3g} MB")


def test_one_query_by_hand(plain: Path) -> None:
    _, _, work, score, link, memory, holders = cells(plain, "query", 0)
    assert work == "8.4e+14"
    assert score == f"{2 * 32 * 1024 * 1e8 * 128 / 1e15:.2f}"
    assert link == "262"
    assert memory == f"{26.2144e12 / 4e12:.1f}"
    assert holders == "202"


def test_break_even_balances_both() -> None:
    tokens = break_even(50e9, 500e12, "float16")
    sizes = passages(10**6, 1)
    seconds = sizes.stored / 50e9
    assert 2 * tokens * sizes.document_tokens * 128 / 500e12 == pytest.approx(seconds)
    assert pages(1).stored == 26_214_400_000_000


def test_the_command_writes_the_page(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rates", str(plain)])
    assert "| nq |" in capsys.readouterr().out
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    main(["--rates", str(plain), "--write", str(page)])
    changed = page.read_text(encoding="utf-8")
    assert changed != PAGE.read_text(encoding="utf-8")
    assert fill(changed, all_tables(RATES)) == PAGE.read_text(encoding="utf-8")


def test_refusals(plain: Path, tmp_path: Path, document: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="table: beir"):
        fill("no markers", {"beir": ["|"]})
    with pytest.raises(DataError, match=r"missing\.json"):
        read_rates(tmp_path / "missing.json")
    for broken in ({**document, "schema": "other/1"}, {"schema": document["schema"]}, [1]):
        plain.write_text(json.dumps(broken), encoding="utf-8")
        with pytest.raises(DataError, match=r"rates\.json"):
            read_rates(plain)
    del document["measured"]["link"]
    plain.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(DataError, match="'link' is missing"):
        all_tables(plain)
