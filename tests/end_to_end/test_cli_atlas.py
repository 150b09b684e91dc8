"""`atlas`, codecs among `--paths` and first stages among `--candidates`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.data.trec import read_trec_run
from maxsim_eval.errors import DataError

pytestmark = pytest.mark.slow

USAGE, DATA = 2, 3


@pytest.fixture(scope="module")
def home(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("atlas")
    demo.copy(folder, "datasets", "embeddings_cache")
    return folder


@pytest.fixture(scope="module")
def made(home: Path, cli: Any) -> Any:
    return cli(
        "atlas", "demo", "--entries", "int8,rotate+int2(queries=int8),bm25+rerank-30,control", "--quiet", cwd=home
    ).fine()


def test_the_answer_is_one_sentence_and_where_the_page_is(made: Any, home: Path) -> None:
    first, second = made.out.splitlines()
    assert "is the smallest storage that is equivalent within 0.003 in nDCG@10 and Recall@100" in first
    assert second == "atlas: results/atlas-demo-small-lexical/atlas.html"
    assert (home / "results" / "atlas-demo-small-lexical" / "atlas.html").is_file()


def test_the_table_fits_a_terminal(made: Any, home: Path, cli: Any) -> None:
    lines = cli("atlas", "demo", "--entries", "int8,control", cwd=home).fine().out.splitlines()
    assert len(lines) < 15
    assert any("control" in line and "different (control)" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((), "lexical"),
        (("--limit-queries", "7", "--limit-documents", "90"), "lexical-q7-d90"),
        (("--split", "test"), "test-lexical"),
        (("--encoder", "hf:org/x"), "hf-org-x"),
        (("--encoder", "multi-vector:org/x"), "multi-vector-org-x"),
    ],
)
def test_what_is_chosen_has_a_folder_of_its_own(
    home: Path, cli: Any, monkeypatch: Any, words: tuple[str, ...], name: str
) -> None:
    def refuse(*given: object, out_dir: Path, **options: object) -> None:
        raise DataError(f"would go to {out_dir}")

    monkeypatch.setattr("maxsim_eval.atlas.atlas", refuse)
    outcome = cli("atlas", "demo", *words, cwd=home)
    assert outcome.err.splitlines()[-1] == f"error: would go to results/atlas-demo-small-{name}"


def test_as_json(made: Any, home: Path, cli: Any) -> None:
    held = json.loads(cli("atlas", "demo", "--entries", "int8", "--json", "--quiet", cwd=home).fine().out)
    assert [row["name"] for row in held["rows"]] == ["fp32", "int8"]
    assert held["rows"][1]["changes"]["nDCG@10"]["verdict"] == held["rows"][1]["verdict"] == "equivalent"


def test_a_grid_and_a_bound_of_ones_own(home: Path, cli: Any) -> None:
    """The grid says what is compared, by which metrics and within what; `--within` says the last instead."""
    (home / "grid.toml").write_text("entries = ['int8', 'prune-50']\nmetrics = ['nDCG@5']\nwithin = 0.01\n")
    command = ("atlas", "demo", "--grid", "grid.toml", "--out", "own", "--json", "--quiet")
    for options, within, verdict in (((), 0.01, "different"), (("--within", "0.5"), 0.5, "equivalent")):
        held = json.loads(cli(*command, *options, cwd=home).fine().out)
        assert held["within"] == within
        assert held["metrics"] == ["nDCG@5"]
        assert [(row["name"], row["verdict"]) for row in held["rows"][1:]] == [("int8", "equivalent"), ("prune-50", verdict)]


def test_a_run_of_another_engine(made: Any, home: Path, cli: Any) -> None:
    run = home / "results" / "atlas-demo-small-lexical" / "entries" / "bm25" / "run.trec"
    (home / "engine.trec").write_text(run.read_text().replace("maxsim-eval/", "other-"))
    outcome = cli("atlas", "demo", "--entries", "int8", "--run", "engine.trec", "--out", "foreign", "--quiet", cwd=home).fine()
    assert "warning" not in outcome.err
    page = (home / "foreign" / "atlas.md").read_text()
    assert "Where it is lost" in page
    assert "run:engine" in page


def test_first_stages_as_candidates_are_their_runs(made: Any, home: Path, cli: Any) -> None:
    cli("demo", "--candidates", "bm25:30", "--paths", "fp32", "--quiet", "--out", "by_name", cwd=home).fine()
    run = home / "results" / "atlas-demo-small-lexical" / "entries" / "bm25-rerank-30" / "candidates.trec"
    cli("demo", "--candidates", run, "--paths", "fp32", "--quiet", "--out", "by_run", cwd=home).fine()
    assert (home / "by_name" / "runs" / "fp32.trec").read_bytes() == (home / "by_run" / "runs" / "fp32.trec").read_bytes()
    named = json.loads((home / "by_name" / "result.json").read_text())["task"]["candidates"]
    assert named["name"] == "bm25:30"
    given = json.loads((home / "by_run" / "result.json").read_text())["task"]["candidates"]
    assert named["sha256"] == given["sha256"]


def test_codecs_are_paths(home: Path, cli: Any) -> None:
    paths = "fp32,pool-2+int4,residual-2(centroids=40,seed=7),rotate+sign(queries=int8)"
    cli("demo", "--paths", paths, "--quiet", "--out", "codecs", cwd=home).fine()
    result = json.loads((home / "codecs" / "result.json").read_text())
    assert list(result["paths"]) == ["fp32", "pool-2+int4", "residual-2(centroids=40,seed=7)", "rotate+sign(queries=int8)"]
    for path in result["paths"].values():
        run = read_trec_run(home / "codecs" / path["run"])
        assert len(run.rankings) == 40
    assert result["paths"]["pool-2+int4"]["parity"]["spearman"]["mean"] < 1
    before = {path.name for path in (home / "codecs" / "runs").iterdir()}
    cli("demo", "--paths", "fp32,int4", "--quiet", "--out", "codecs", cwd=home).fine()
    assert {path.name for path in (home / "codecs" / "runs").iterdir()} == {"fp32.trec", "codec-int4.trec"} != before


def test_pruning_by_words(home: Path, cli: Any) -> None:
    """Every document keeps the half of its words that fewest documents hold: the same as from a cache of these tokens alone."""
    cli("demo", "--paths", "fp32,prune-50(by=idf),prune-50", "--quiet", "--out", "idf", cwd=home).fine()
    whole = json.loads((home / "idf" / "result.json").read_text())["paths"]
    assert whole["prune-50(by=idf)"]["metrics"]["nDCG@10"] != whole["prune-50"]["metrics"]["nDCG@10"]
    limited = ("--limit-documents", "200", "--k", "50")
    cli("demo", "--paths", "fp32,prune-50(by=idf)", "--quiet", "--out", "few", *limited, cwd=home).fine()
    outcome = cli("demo", "--paths", "prune-50(by=idf)", "--candidates", "bm25", "--quiet", "--out", "c", cwd=home)
    assert outcome.code == DATA
    assert "the words that tokens stand for are not known" in outcome.err


@pytest.mark.parametrize(
    ("words", "code", "texts"),
    [
        (("atlas", "demo", "--entries", "itn8"), USAGE, ("unknown entry 'itn8'", "Did you mean 'int8'")),
        (("atlas", "demo", "--entries", ","), USAGE, ("--entries: got ','",)),
        (
            ("atlas", "demo", "--entries", "residual-2(centroid=3)"),
            USAGE,
            ("unknown option of residual", "Did you mean 'centroids'"),
        ),
        (("atlas", "demo", "--within", "0"), USAGE, ("within is 0.0",)),
        (("atlas", "demo", "--grid", "none.toml"), USAGE, ("none.toml: cannot be read",)),
        (("atlas", "demo", "--k", "0"), USAGE, ("--k: got 0",)),
        (("atlas", "dmeo"), USAGE, ("unknown source 'dmeo'",)),
        (("atlas", "demo", "--run", "none.trec"), DATA, ("none.trec: cannot be read",)),
        (("demo", "--paths", "fp32,pool"), USAGE, ("pool needs a number, as pool-2",)),
        (("demo", "--paths", "fp32,residual-2(centroids=900)"), DATA, ("too few for 900 centroids", "would do")),
        (("demo", "--paths", "fp32,pca-999"), USAGE, ("1 to the embeddings' width, 128",)),
        (("demo", "--candidates", "bm25(k1=x)"), USAGE, ("k1 is 'x'",)),
        (("demo", "--candidates", "bm25:0"), USAGE, ("got 0 documents a query, need a whole number from 1",)),
        (
            ("atlas", "demo", "--entries", "python:os:system"),
            DATA,
            ("none of its entries could be evaluated; the first, python:os",),
        ),
        (("demo", "--paths", "fp3"), USAGE, ("unknown path 'fp3'",)),
        (("plan", "demo", "--paths", "fp32,int4"), USAGE, ("plan knows no rates of codecs, got int4",)),
        (("explain", "demo", "small", "--query", "q0", "--path", "int4"), USAGE, ("a codec's tokens are not the document's",)),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_bad_input_gets_one_line(home: Path, cli: Any, words: tuple[str, ...], code: int, texts: tuple[str, ...]) -> None:
    outcome = cli(*words, "--quiet", cwd=home)
    assert outcome.code == code, outcome.err
    lines = [line for line in outcome.err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert all(text in lines[0] for text in texts), lines[0]
    known = lines[0].partition("Known: ")[2].split(", ")
    assert len(set(known)) == len(known)


def test_a_name_that_is_also_a_file(home: Path, cli: Any) -> None:
    (home / "single").write_text("q Q0 d 1 1.0 x\n")
    outcome = cli("demo", "--candidates", "single", "--quiet", cwd=home)
    assert outcome.code == USAGE
    assert "the name of a first stage, and a file; ./single is the file" in outcome.err
