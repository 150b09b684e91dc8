"""`explain` on the command line: tables, JSON and pictures of texts, and of pages whose embeddings were imported."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

PAIR = ("--query", "q07", "--document", "d032")


def test_the_table_is_what_json_says(demo: Any, cli: Any) -> None:
    found = json.loads(cli("explain", "demo", "small", *PAIR, "--path", "int8", "--json", cwd=demo.folder).fine().out)
    shown = cli("explain", "demo", "small", *PAIR, "--path", "int8", cwd=demo.folder).fine().out
    rows = re.findall(r"^ +(\d+) +(\S+) +(-?[\d.]+) +(-?[\d.]+)% +(\d+) (\S+)", shown, flags=re.MULTILINE)
    assert [(int(row[0]), row[1], row[2], int(row[4]), row[5]) for row in rows] == [
        (token["position"], token["text"], f"{token['contribution']:.6f}", token["document_position"], token["document_text"])
        for token in found["tokens"]
    ]
    assert f"sum of contributions {found['sum_of_contributions']:.6f}" in shown
    runs = (demo.results / "runs" / "int8.trec").read_text()
    (score,) = re.findall(r"^q07 Q0 d032 \d+ (\S+) ", runs, flags=re.MULTILINE)
    assert found["score"] == pytest.approx(float(score), rel=1e-7)


@pytest.mark.parametrize("name", ["pair.svg", "pair.png", "pair.html"])
def test_a_picture_is_written_whole(name: str, demo: Any, cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'maxsim-eval[pictures]'")
    outcome = cli("explain", "demo", "small", *PAIR, "--out", tmp_path / name, cwd=demo.folder).fine()
    assert f"picture: {tmp_path / name}" in outcome.out
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).stat().st_size > 2000
    cli("explain", "demo", "small", *PAIR, "--out", tmp_path / name / "x.svg", cwd=demo.folder).refused(3, "cannot be written")


def test_a_query_alone_shows_three_documents_of_its_ranking(demo: Any, cli: Any) -> None:
    """Ranks, scores and relevance are those of the evaluation; the texts are the dataset's."""
    texts = {}
    for line in (demo.folder / "datasets" / "demo" / "small" / "corpus.jsonl").read_text().splitlines():
        record = json.loads(line)
        texts[record["_id"]] = record["text"]
    for query in ("q07", "q00", "q33"):
        found = json.loads(
            cli("explain", "demo", "small", "--query", query, "--path", "int8", "--json", cwd=demo.folder).fine().out
        )
        run = [
            line.split()
            for line in (demo.results / "runs" / "int8.trec").read_text().splitlines()
            if line.startswith(f"{query} ")
        ]
        rows = (demo.folder / "datasets" / "demo" / "small" / "qrels" / "test.tsv").read_text().splitlines()[1:]
        relevant = {row.split("\t")[1] for row in rows if row.startswith(f"{query}\t") and int(row.split("\t")[2]) > 0}
        ranks = {row[2]: int(row[3]) for row in run}
        top = found["documents"][0]
        assert (top["document"], top["rank"]) == (run[0][2], 1)
        best = min(relevant, key=lambda name: ranks.get(name, 1000))
        missed = sorted(ranks[name] for name in relevant if ranks.get(name, 0) > 10)
        whys = {one["why"]: one for one in found["documents"]}
        assert next(one["document"] for why, one in whys.items() if "best relevant document" in why) == best
        assert [one["rank"] for why, one in whys.items() if "beyond rank 10" in why] == missed[:1]
        assert found["relevant_in_first_10"] == sum(ranks.get(name, 1000) <= 10 for name in relevant)
        for one in found["documents"]:
            assert one["score"] == pytest.approx(float(run[one["rank"] - 1][4]), rel=1e-6)
            assert one["document_text"].endswith(texts[one["document"]])
        shown = cli("explain", "demo", "small", "--query", query, "--path", "int8", cwd=demo.folder).fine().out
        for one in found["documents"]:
            assert f"{one['why']}: {one['document']} (rank {one['rank']}, relevance" in shown or one["relevance"] is None
        assert f"{found['relevant_in_first_10']} of {found['relevant']} relevant documents are among the first 10" in shown
        legend = shown.splitlines()[2]
        assert legend.startswith("query token > place and text of the document token that matches it best")
        assert legend.endswith("tokens are stems of words")
        assert len(shown.splitlines()) <= 3 + 3 * len(found["documents"])


def test_a_query_for_which_nothing_is_retrieved(collection: Callable[..., Path], cli: Any, tmp_path: Path) -> None:
    """No document has a token: one that is relevant is shown all the same; without any the answer is a sentence."""
    judged = (("q1", "d1", 1), ("q2", "d2", 0))
    collection(tmp_path / "datasets" / "local" / "pets", corpus={"d1": "", "d2": "of the"}, qrels=judged)
    cli("encode", "local", "pets", "--encoder", "lexical", "--quiet", cwd=tmp_path).fine()
    words = ("explain", "local", "pets", "--encoder", "lexical", "--query")
    assert ": d1 (not retrieved, relevance 1)" in cli(*words, "q1", cwd=tmp_path).fine().out
    assert cli(*words, "q2", cwd=tmp_path).fine().out == "query q2: nothing is retrieved\n"
    assert json.loads(cli(*words, "q2", "--json", cwd=tmp_path).fine().out)["documents"] == []


def test_what_is_for_one_document_needs_it(demo: Any, cli: Any, tmp_path: Path) -> None:
    for option in (("--out", tmp_path / "x.svg"), ("--grid", "2x2")):
        cli("explain", "demo", "small", "--query", "q07", *option, cwd=demo.folder).refused(2, f"{option[0]}: needs --document")
    outcome = cli("explain", "demo", "small", "--query", "q7", cwd=demo.folder)
    outcome.refused(2, "no query 'q7'", "Did you mean")
    assert "first ids" not in outcome.err, "one hint, not two"


def test_nothing_is_encoded(demo: Any, cli: Any, tmp_path: Path) -> None:
    outcome = cli("explain", "demo", "small", *PAIR, "--cache-dir", tmp_path / "none", cwd=demo.folder)
    outcome.refused(3, "no complete embeddings of the queries and documents", "evaluate.py encode demo small --encoder lexical")
    outcome = cli("explain", "demo", "small", *PAIR, "--max-document-tokens", "9", cwd=demo.folder)
    outcome.refused(3, "no complete embeddings of the documents")
    assert not (tmp_path / "none").exists()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, cli: Any) -> Path:
    """A folder of two pages of 16 and 17 imported tokens; patch 6 of the first is what the query's first token looks for."""
    folder = tmp_path_factory.mktemp("pages")
    home = folder / "datasets" / "scans"
    (home / "pages").mkdir(parents=True)
    (home / "qrels").mkdir()
    for name, colour in (("a", "white"), ("b", "pink")):
        Image.new("RGB", (40, 60), colour).save(home / "pages" / f"{name}.png")
    (home / "queries.jsonl").write_text('{"_id": "q", "text": "which?"}\n')
    (home / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
    rng = torch.Generator().manual_seed(1)
    asked = torch.nn.functional.normalize(torch.randn(3, 8, generator=rng), dim=1)
    held = [torch.nn.functional.normalize(torch.randn(n, 8, generator=rng), dim=1) * 0.1 for n in (16, 17)]
    held[0][6] = asked[0]
    content = {"query_embeddings": asked[None], "query_lengths": torch.tensor([3]), "doc_embeddings": held}
    torch.save({**content, "meta": {"query_ids": ["q"], "doc_ids": ["a", "b"]}}, folder / "scans.pt")
    cli("import", "local", "scans", "scans.pt", "--encoder", "colpali", "--quiet", cwd=folder).fine()
    return folder


def explained(cli: Any, folder: Path, document: str, *more: str) -> dict[str, Any]:
    words = ("explain", "local", "scans", "--encoder", "colpali", "--query", "q", "--document", document, "--json")
    return dict(json.loads(cli(*words, *more, cwd=folder).fine().out))


def test_pages_with_imported_embeddings(pages: Path, cli: Any, tmp_path: Path) -> None:
    found = explained(cli, pages, "a")
    assert (found["patches"]["rows"], found["patches"]["columns"], found["patches"]["known_from"]) == (4, 4, "square")
    assert found["tokens"][0]["document_position"] == 6
    assert found["patches"]["contributions"][1][2] >= 0.99
    assert {token["text"] for token in found["tokens"]} == {None}
    assert any("were imported" in note for note in found["notes"])
    other = explained(cli, pages, "b")
    assert other["patches"] is None
    assert any("17 tokens" in note and "--grid" in note for note in other["notes"])
    given = explained(cli, pages, "b", "--grid", "2x8", "--grid-first", "1")
    assert (given["patches"]["first"], given["patches"]["known_from"]) == (1, "given")
    assert [len(row) for row in given["patches"]["contributions"]] == [8, 8]
    words = ("explain", "local", "scans", "--encoder", "colpali", "--query", "q", "--document", "b")
    cli(*words, "--grid", "3x6", cwd=pages).refused(2, "3 x 6 patches", "17 tokens")
    cli(*words, "--grid-first", "3", cwd=pages).refused(2, "--grid-first", "--grid")


def test_the_picture_of_a_page(pages: Path, cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'maxsim-eval[pictures]'")
    explained(cli, pages, "a", "--out", str(tmp_path / "a.svg"))
    text = (tmp_path / "a.svg").read_text()
    assert "6 (patch 2, 3)" in text
    assert "what each patch adds to the score" in text
    explained(cli, pages, "a", "--out", str(tmp_path / "a0.html"), "--query-token", "0")
    assert "similarity to query token 0" in (tmp_path / "a0.html").read_text()
    words = ("explain", "local", "scans", "--encoder", "colpali", "--query", "q", "--document")
    cli(*words, "a", "--out", tmp_path / "x.svg", "--query-token", "9", cwd=pages).refused(2, "query token: got 9", "0 to 2")
    cli(*words, "b", "--out", tmp_path / "x.svg", "--query-token", "0", cwd=pages).refused(2, "heat map")
    explained(cli, pages, "b", "--out", str(tmp_path / "b.svg"))
    assert "what each patch adds" not in (tmp_path / "b.svg").read_text(), "no grid, no heat map; the bars all the same"
