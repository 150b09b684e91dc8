"""`exact-int8` as a user types it: its copy asked for by the command that makes it, the run of full precision, what the report says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rank_cases import torchrun

pytestmark = pytest.mark.slow

USAGE = 2


@pytest.fixture(scope="module")
def home(demo: Any, cli: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's embeddings, without a copy at first."""
    folder: Path = demo.copy(tmp_path_factory.mktemp("certified") / "work", "datasets", "embeddings_cache")
    said = cli("demo", "--paths", "fp32,exact-int8", "--quiet", cwd=folder)
    said.refused(USAGE, "path exact-int8: scans the int8-document copy")
    command = re.search(r"make it first: evaluate\.py (.*)$", said.err.strip())
    assert command is not None
    cli(*command[1].split(), "--quiet", cwd=folder).fine()
    return folder


@pytest.fixture(scope="module")
def made(home: Path, cli: Any) -> Any:
    return cli("demo", "--paths", "fp32,fused-fp32,exact-int8,exact-int8-fp32", "--k", "10", "--out", "out", cwd=home).fine()


def test_the_run_is_that_of_the_path_it_certifies(made: Any, home: Path) -> None:
    runs = [(home / "out" / "runs" / f"{name}.trec").read_bytes() for name in ("fused-fp32", "exact-int8", "exact-int8-fp32")]
    assert len(set(runs)) == 1
    found = json.loads((home / "out" / "result.json").read_text())["paths"]["exact-int8"]
    assert found["search"]["identical_to"] == {"fused-fp32": True}
    assert found["search"]["survivors"] < 0.5 * found["search"]["documents"]
    assert found["search"]["brute_pieces"] == 0
    assert found["metrics"] == json.loads((home / "out" / "result.json").read_text())["paths"]["fused-fp32"]["metrics"]


def test_console_and_reports_say_what_it_took(made: Any, home: Path) -> None:
    assert re.search(
        r"Certified, run identical to fused-fp32's: [\d.]+ of 300 \([\d.]+%\) documents a query", " ".join(made.out.split())
    )
    for name in ("report.md", "report.html"):
        text = (home / "out" / name).read_text()
        assert "Certified search" in text
        assert "documents scored exactly, a query" in text


def test_the_gate_holds_its_ranking(made: Any, home: Path, cli: Any) -> None:
    for options in (("--update-baseline",), ()):
        cli("gate", "out", "--baseline", "base.json", *options, cwd=home).fine()
    document = json.loads((home / "out" / "result.json").read_text())
    document["paths"]["exact-int8"]["parity"]["overlap"]["@10"] = 0.99
    (home / "worse").mkdir()
    (home / "worse" / "result.json").write_text(json.dumps(document))
    assert cli("gate", "worse", "--baseline", "base.json", cwd=home).code == 1


def test_a_subset_reads_the_copy_of_the_whole(made: Any, home: Path, cli: Any) -> None:
    cli(
        "demo", "--paths", "fused-fp32,exact-int8", "--limit-documents", "220", "--k", "7", "--out", "part", "--quiet", cwd=home
    ).fine()
    assert len({(home / "part" / "runs" / f"{name}.trec").read_bytes() for name in ("fused-fp32", "exact-int8")}) == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("demo --paths exact-int8 --candidates bm25", "every listed pair"),
        ("plan demo small --paths exact-int8 --gpu h400", "h400"),
        ("demo --paths exact-int9", "Did you mean 'exact-int8'"),
    ],
)
def test_what_it_does_not_do(words: str, text: str, home: Path, cli: Any) -> None:
    cli(*words.split(), cwd=home).refused(USAGE, text)


def test_two_processes_prune_by_what_both_have_found(made: Any, home: Path) -> None:
    torchrun(home, "demo", "--paths", "fused-fp32,exact-int8", "--k", "10", "--out", "two", "--quiet")
    runs = {(home / out / "runs" / "exact-int8.trec").read_bytes() for out in ("out", "two")}
    assert runs == {(home / "two" / "runs" / "fused-fp32.trec").read_bytes()}
    one, two = (json.loads((home / out / "result.json").read_text()) for out in ("out", "two"))
    assert two["environment"]["processes"] == 2
    survivors = [found["paths"]["exact-int8"]["search"]["survivors"] for found in (one, two)]
    assert survivors[1] <= 1.1 * survivors[0], "each process alone would score its own k best"


def test_plan_and_explain_know_it(home: Path, cli: Any) -> None:
    planned = cli("plan", "demo", "small", "--paths", "fp32,exact-int8", cwd=home).fine()
    assert "exact-int8" in planned.out
    explained = cli(
        "explain", "demo", "small", "--query", "q07", "--document", "d032", "--path", "exact-int8", "--json", cwd=home
    )
    assert json.loads(explained.fine().out)["score"] is not None


@pytest.mark.parametrize("path", ["exact-int8", "exact-int8-fp32"])
def test_explain_ranks_as_brute_force_does(path: str, made: Any, home: Path, cli: Any) -> None:
    words = ("explain", "demo", "small", "--query", "q07", "--json", "--path")
    brute, found = (json.loads(cli(*words, name, cwd=home).fine().out) for name in ("fused-fp32", path))
    assert [(one["document"], one["rank"]) for one in found["documents"]] == [
        (one["document"], one["rank"]) for one in brute["documents"]
    ]
