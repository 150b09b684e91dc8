"""The atlas: its rows are those of single evaluations, nothing finished is done twice, a failure loses one row, a broken codec is caught."""

from __future__ import annotations

import csv
import html.parser
import json
import sys
import warnings as said
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from maxsim_eval import evaluate
from maxsim_eval.atlas import Atlas, Row, atlas
from maxsim_eval.atlas import running as running_module
from maxsim_eval.atlas.judging import front
from maxsim_eval.atlas.page import facts_line, headline, warnings
from maxsim_eval.atlas.writing import read_atlas, to_csv, to_json, to_markdown
from maxsim_eval.comparison.statistics import bootstrap_interval
from maxsim_eval.data.trec import read_trec_run, write_trec_run
from maxsim_eval.errors import DataError, MissingPackageError, UsageError
from maxsim_eval.types import Run, Task

pytestmark = pytest.mark.slow

ENTRIES = [
    "int8",
    "rotate+sign(queries=int8)",
    "pool-4",
    "pool-4+rerank-5",
    "bm25+rerank-20",
    "single",
    "control",
    "residual-2(centroids=5000)",
    "residual-2(centroids=5000)+rerank-5",
]
METRICS = ["nDCG@10", "Recall@100"]


@pytest.fixture(scope="module")
def made(task: Task, place: Path, options: dict) -> Atlas:
    return atlas(task, "lexical", out_dir=place / "made", entries=ENTRIES, **options)


def row_of(made: Atlas, name: str) -> Row:
    return next(row for row in made.rows if row.name == name)


def test_rows_are_those_of_evaluations(made: Atlas, task: Task, place: Path, options: dict):
    names = ["fp32", "int8", "rotate+sign(queries=int8)", "pool-4", "control"]
    single = evaluate(task, "lexical", names, metrics=METRICS, out_dir=place / "single", **options)
    for name in names:
        assert row_of(made, name).metrics == single.paths[name].metrics
        assert row_of(made, name).document_bytes == pytest.approx(single.paths[name].memory["document_bytes"])
    first = {
        query: list(ranking)[:5]
        for query, ranking in read_trec_run(place / "single" / "runs" / "codec-pool-4.trec").rankings.items()
    }
    write_trec_run(place / "five.trec", Run("five", first))
    five = evaluate(task, "lexical", ["fused-fp32"], k=5, metrics=METRICS, candidates=place / "five.trec", **options)
    assert row_of(made, "pool-4+rerank-5").metrics == five.paths["fused-fp32"].metrics
    changes = row_of(made, "pool-4").changes["nDCG@10"]
    assert changes.mean == pytest.approx(single.paths["pool-4"].metrics["nDCG@10"] - single.paths["fp32"].metrics["nDCG@10"])
    per_query = [
        single.paths["pool-4"].per_query["nDCG@10"][query] - value
        for query, value in single.paths["fp32"].per_query["nDCG@10"].items()
    ]
    assert [changes.low, changes.high] == pytest.approx(
        bootstrap_interval(per_query, made.level, 20_000).ravel().tolist(), abs=2e-3
    )


def test_intervals_hold_together(made: Atlas):
    judged = sum(len(row.changes) for row in made.rows)
    assert judged == 2 * sum(not row.error for row in made.rows[1:])
    assert made.level == pytest.approx(1 - 0.05 / judged)
    adjusted = [change.p_adjusted for row in made.rows for change in row.changes.values()]
    raw = [change.p_value for row in made.rows for change in row.changes.values()]
    order = np.argsort(raw)
    holm = np.minimum(np.maximum.accumulate([(judged - rank) * raw[place] for rank, place in enumerate(order)]), 1)
    assert [adjusted[place] for place in order] == pytest.approx(holm.tolist())


def test_bytes_are_by_arithmetic(made: Atlas, task: Task):
    tokens, documents, dim = made.task["document_tokens"], made.task["documents"], made.encoder["dim"]
    assert row_of(made, "fp32").document_bytes == pytest.approx(tokens / documents * 4 * dim)
    assert row_of(made, "rotate+sign(queries=int8)").document_bytes == pytest.approx(tokens / documents * (dim / 8 + 2))
    base = row_of(made, "pool-4").document_bytes
    assert row_of(made, "pool-4+rerank-5").document_bytes == pytest.approx(base + tokens / documents * 4 * dim)
    assert row_of(made, "single").document_bytes == 2 * dim


def test_what_fails_says_why_and_loses_nothing_else(made: Atlas):
    failed, reranked = (row for row in made.rows if row.error)
    assert failed.name == "residual-2(centroids=5000)"
    assert "tokens are too few for 5,000 centroids" in failed.error
    assert reranked.error == f"{failed.name}+rerank-5: {failed.name} gave nothing to rerank"
    assert failed.verdict == reranked.verdict == "failed"
    assert [row.name for row in made.rows] == ["fp32", *ENTRIES[:4], "bm25", *ENTRIES[4:]], (
        "what is reranked is there by itself"
    )


def test_the_broken_codec_is_caught(made: Atlas):
    assert row_of(made, "control").verdict == "different"
    assert warnings(made) == list(made.task["warnings"])
    smallest = made.smallest()
    assert smallest is not None
    blind = replace(made, rows=[*made.rows, replace(smallest, name="control", document_bytes=1.0, control=True)])
    assert blind.smallest() == smallest, "a control is never an answer"
    assert "negative control control is not found different" in warnings(blind)[-1]


def test_losses_add_up(made: Atlas, task: Task, place: Path, options: dict):
    """They are of the ranking itself, so of a rerank of all its documents, whatever other reranks there are."""
    entries = ["pool-4+rerank-5", "pool-4+rerank-100", "pool-4+rerank-60"]
    found = atlas(task, "lexical", out_dir=place / "losses", entries=entries, **options)
    losses = row_of(found, "pool-4").losses
    assert [loss.metric for loss in losses] == METRICS
    for loss in losses:
        exact, own, reranked = (row_of(found, name).metrics[loss.metric] for name in ("fp32", "pool-4", "pool-4+rerank-100"))
        assert loss.total == pytest.approx(exact - own) == pytest.approx(loss.truncation + loss.candidates + loss.scores)
        assert loss.scores == pytest.approx(reranked - own)
        assert loss.truncation == 0, "it keeps as many documents as the reference"
    assert row_of(made, "pool-4").losses == (), "five of its hundred documents do not tell what it lost"


def test_a_foreign_run_is_taken_apart(task: Task, place: Path, options: dict, made: Atlas):
    """Its first two documents in the wrong order, and the last of its ten never found: losses by scores and by candidates."""
    exact = read_trec_run(place / "made" / "entries" / "fp32" / "run.trec")
    swapped = {}
    for query, ranking in exact.rankings.items():
        kept = [document for document, _ in ranking][1:10]
        kept[0], kept[1] = kept[1], kept[0]
        swapped[query] = [(document, float(-place)) for place, document in enumerate(kept)]
    write_trec_run(place / "plaid.trec", Run("engine", swapped, ordered=False))
    found = atlas(task, "lexical", out_dir=place / "foreign", entries=["int8"], runs=[place / "plaid.trec"], **options)
    assert [row.name for row in found.rows] == ["fp32", "run:plaid", "run:plaid+rerank-9", "int8"]
    (loss, recall) = row_of(found, "run:plaid").losses
    for one in (loss, recall):
        assert one.total == pytest.approx(one.truncation + one.candidates + one.scores)
    assert loss.candidates > 0.05, "the best document is never found"
    assert loss.scores > 0
    assert recall.scores == 0, "recall knows no order"
    assert recall.truncation > 0, "Recall@100 of nine documents"
    assert row_of(found, "run:plaid").document_bytes is None
    (place / "other.trec").write_text("nobody Q0 d 1 1.0 x\n")
    with pytest.raises(DataError, match="ranks none of the"):
        atlas(
            task, "none", out_dir=place / "foreign", entries=["int8"], runs=[place / "other.trec"], **options
        )  # before the rest


def test_two_runs_of_one_name_are_refused_before_the_rest(task: Task, place: Path, options: dict):
    runs = [place / "one" / "plaid.trec", place / "two" / "plaid.txt"]
    with pytest.raises(UsageError, match=r"one/plaid\.trec and .*two/plaid\.txt would share the name run:plaid"):
        atlas(task, "none", out_dir=place / "twice", entries=["int8"], runs=runs, **options)


def _named_alike(task: Task, place: Path, stages: list[str], options: dict) -> tuple[Task, str]:
    """The task with the first query's id on a document that all of these stages find for it, and that id."""
    atlas(task, "lexical", out_dir=place / "unlike", entries=stages, **options)
    query = task.query_ids[0]
    runs = [read_trec_run(place / "unlike" / "entries" / stage / "run.trec").rankings[query] for stage in stages]
    best = next(document for document, _ in runs[0][1:] if all(document in dict(run) for run in runs))
    names = {best: query}
    return replace(
        task,
        document_ids=[names.get(document, document) for document in task.document_ids],
        qrels={
            one: {names.get(document, document): grade for document, grade in row.items()} for one, row in task.qrels.items()
        },
    ), query


def test_the_document_with_the_querys_id_is_never_found(task: Task, place: Path, options: dict):
    """As by scoring paths; what the stage found next takes its place, and other queries may find that document."""
    stages = ["bm25", "single", "fde"]
    alike, query = _named_alike(task, place, stages, options)
    ruled = replace(alike, exclude_same_id=True)
    deep = atlas(alike, "lexical", out_dir=place / "alike", entries=stages, k=21, **options)
    for k in (20, 20, 300):  # the second time read back, then as many as there are documents
        found = atlas(ruled, "lexical", out_dir=place / "ruled", entries=[*stages, "single+rerank-20"], k=k, **options)
        assert not any(row.error for row in found.rows)
    for stage in stages:
        run = read_trec_run(place / "alike" / "entries" / stage / "run.trec").rankings
        assert query in dict(run[query])
        rest = {one: [pair for pair in ranking if pair[0] != one][:20] for one, ranking in run.items()}
        own = read_trec_run(place / "ruled" / "entries" / stage / "run.trec").rankings
        assert {one: ranking[:20] for one, ranking in own.items()} == rest
        assert query not in dict(own[query])
    assert any(query in dict(ranking) for ranking in own.values())
    again = atlas(alike, "lexical", out_dir=place / "ruled", entries=["single"], k=21, **options)
    assert row_of(again, "single").metrics == row_of(deep, "single").metrics, "another rule is another question"


def test_a_foreign_run_loses_the_document_with_the_querys_id(task: Task, place: Path, options: dict):
    alike, query = _named_alike(task, place, ["single"], options)
    ruled = replace(alike, exclude_same_id=True)
    atlas(ruled, "lexical", out_dir=place / "strict", entries=["single"], k=10, **options)
    run = read_trec_run(place / "strict" / "entries" / "single" / "run.trec")
    with_it = {**run.rankings, query: [(query, 9.0), *run.rankings[query]]}
    for name, rankings in (("without", run.rankings), ("with", with_it)):
        write_trec_run(place / f"{name}.trec", Run(name, rankings))
    runs = [place / "without.trec", place / "with.trec"]
    found = atlas(ruled, "lexical", out_dir=place / "strict", entries=["single"], runs=runs, k=10, **options)
    names = ["run:without", "run:without+rerank-10", "run:with", "run:with+rerank-10"]
    assert [row.name for row in found.rows[1:5]] == names
    assert row_of(found, "run:with").metrics == row_of(found, "run:without").metrics == row_of(found, "single").metrics
    assert row_of(found, names[1]).metrics == row_of(found, names[3]).metrics


def test_without_matplotlib_nothing_is_begun(task: Task, place: Path, options: dict, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=r"matplotlib.*maxsim-eval\[atlas\]"):
        atlas(task, "none", out_dir=place / "unpictured", entries=["int8"], **options)
    assert not (place / "unpictured").exists()


def test_what_is_finished_is_not_done_again(made: Atlas, task: Task, place: Path, options: dict, monkeypatch):
    asked: list[str] = []
    evaluating = running_module.evaluate

    def counted(*given, **named):
        asked.append(given[2][0])
        return evaluating(*given, **named)

    monkeypatch.setattr(running_module, "evaluate", counted)
    again = atlas(task, "lexical", out_dir=place / "made", entries=ENTRIES, **options)
    assert asked == ["residual-2(centroids=5000)"], "which may have become possible"
    assert [(row.name, row.metrics, row.document_bytes, row.verdict) for row in again.rows] == [
        (row.name, row.metrics, row.document_bytes, row.verdict) for row in made.rows
    ]
    atlas(task, "lexical", out_dir=place / "made", entries=["int8"], k=50, **options)
    assert asked[1:] == ["fp32", "int8"], "another k is another question"


def test_an_interrupted_atlas_goes_on_to_the_same_bytes(made: Atlas, task: Task, place: Path, options: dict, monkeypatch):
    evaluating = running_module.evaluate

    def interrupted(*given, **named):
        if given[2][0] == "pool-4":
            raise KeyboardInterrupt
        return evaluating(*given, **named)

    monkeypatch.setattr(running_module, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atlas(task, "lexical", out_dir=place / "cut", entries=ENTRIES[:4], **options)
    assert not (place / "cut" / "atlas.json").exists()
    monkeypatch.setattr(running_module, "evaluate", evaluating)
    atlas(task, "lexical", out_dir=place / "cut", entries=ENTRIES[:4], **options)
    atlas(task, "lexical", out_dir=place / "whole", entries=ENTRIES[:4], **options)
    for name in ("fp32", "int8", "rotate-sign-queries-int8", "pool-4", "pool-4-rerank-5"):
        cut, whole = ((place / part / "entries" / name / "run.trec").read_bytes() for part in ("cut", "whole"))
        assert cut == whole


def test_limits_are_those_of_evaluations(task: Task, place: Path, options: dict):
    limits = {"limit_queries": 7, "limit_documents": 90, "limit_seed": 3, "k": 50}
    found = atlas(task, "lexical", out_dir=place / "limited", entries=["int4", "single+rerank-10"], **limits, **options)
    single = evaluate(task, "lexical", ["fp32", "int4"], metrics=METRICS, **limits, **options)
    assert {name: row_of(found, name).metrics for name in ("fp32", "int4")} == {
        name: path.metrics for name, path in single.paths.items()
    }
    assert (found.task["queries"], found.task["documents"]) == (7, 90)
    assert found.task["limits"] == single.task["limits"]
    line = "SUBSET: 7 of 40 queries and 90 of 300 documents (seed 3), figures are not those of the whole collection"
    assert line in facts_line(found)
    assert line in to_markdown(found)
    assert line in (place / "limited" / "atlas.html").read_text()
    assert to_json(read_atlas(place / "limited" / "atlas.json")) == to_json(found)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"k": 10}, "k is 10: Recall@100 look at more documents"),
        ({"limit_documents": 300, "limit_queries": 40}, "leaves none out: there are 300"),
        ({"k": 301}, "k was clamped to the 300 documents of the corpus"),
        ({"k": 100, "limit_queries": 3, "limit_documents": 60}, "k was clamped to the 60 documents of the subset"),
    ],
)
def test_it_says_what_an_evaluation_says(task: Task, place: Path, options: dict, asked: dict, match: str):
    found = atlas(task, "lexical", out_dir=place / "said", entries=["int8"], **asked, **options)
    with said.catch_warnings():
        said.filterwarnings("ignore", "k was clamped")
        single = evaluate(task, "lexical", ["fp32"], metrics=METRICS, **asked, **options)
    assert warnings(found) == list(found.task["warnings"]) == single.task["warnings"]
    assert any(match in line for line in warnings(found))
    assert found.task["limits"] == single.task["limits"]


@pytest.mark.parametrize("seed", range(5))
def test_fronts_are_those_of_brute_force(seed):
    random = np.random.default_rng(seed)
    rows = [Row(str(n), "codec", "", {"m": float(random.integers(6))}, {}, float(random.integers(1, 6))) for n in range(12)]
    rows += [
        Row("broken", "codec", "", {"m": 9.0}, {}, 0.1, control=True),
        Row("failed", "codec", "", error="x"),
        Row("run", "run", "", {"m": 9.0}),
    ]
    known = rows[:12]
    better = {
        row.name
        for row in known
        if not any(
            other.document_bytes <= row.document_bytes
            and other.metrics["m"] >= row.metrics["m"]
            and (other.document_bytes, -other.metrics["m"]) != (row.document_bytes, -row.metrics["m"])
            for other in known
        )
    }
    found = front(rows, lambda row: row.document_bytes, "m")
    points = {(row.document_bytes, row.metrics["m"]) for row in known if row.name in better}
    assert {(row.document_bytes, row.metrics["m"]) for row in known if row.name in found} == points
    assert len(found) == len(points)


class Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert all(not name.startswith("on") for name, _ in attrs)

    def handle_data(self, data):
        self.text += data


def test_every_file_is_written_and_says_the_same(made: Atlas, place: Path, task: Task, options: dict):
    folder = made.report(place / "pages").parent
    assert {path.name for path in folder.iterdir()} == {"atlas.html", "atlas.md", "atlas.csv", "atlas.svg", "atlas.json"}
    page = Page()
    page.feed((folder / "atlas.html").read_text())
    assert "script" not in page.tags
    assert headline(made) in " ".join(page.text.split())
    for row in made.rows:
        assert row.name in page.text
    held = json.loads((folder / "atlas.json").read_text())
    assert held["schema"] == "maxsim-eval/atlas/1"
    assert held["headline"] == headline(made)
    assert [row["verdict"] for row in held["rows"]] == [row.verdict for row in made.rows]
    rows = list(csv.DictReader((folder / "atlas.csv").read_text().splitlines()))
    assert [row["entry"] for row in rows] == [row.name for row in made.rows]
    assert float(rows[1]["nDCG@10 change"]) == made.rows[1].changes["nDCG@10"].mean
    again = (folder / "atlas.svg").read_bytes()
    made.report(folder)
    assert (folder / "atlas.svg").read_bytes() == again, "one picture of one atlas"
    assert repr(made).startswith("Atlas(small, lexical, 11 rows: ")


def test_as_a_data_frame(made: Atlas):
    pandas = pytest.importorskip("pandas")
    found = made.to_dataframe()
    assert isinstance(found, pandas.DataFrame)
    assert found.set_index("entry").loc["int8", "verdict"] == row_of(made, "int8").verdict


def test_names_are_escaped(made: Atlas, place: Path):
    evil = replace(made.rows[1], name="<script>alert(1)</script>\x1b[31m", description="<b>")
    replace(made, rows=[made.rows[0], evil]).report(place / "evil")
    page = Page()
    page.feed((place / "evil" / "atlas.html").read_text())
    assert "script" not in page.tags
    assert "\x1b" not in (place / "evil" / "atlas.md").read_text()


def test_the_headline_without_an_equivalent():
    rows = [Row("fp32", "path", ""), Row("x", "codec", "", error="no")]
    assert headline(Atlas({}, {}, rows, ["nDCG@10"], 0.003, 1, 0.95, {})) == "no entry is equivalent within 0.003 in nDCG@10"


def test_a_depth_beyond_what_is_kept(task: Task, place: Path, options: dict):
    found = atlas(task, "lexical", out_dir=place / "deep", entries=["single+rerank-20"], k=10, **options)
    assert "only the first 10 documents of single are kept, need --k 20" in row_of(found, "single+rerank-20").error


def test_an_atlas_is_read_as_it_was_written(made: Atlas, place: Path):
    made.report(place / "read")
    again = read_atlas(place / "read" / "atlas.json")
    assert to_json(again) == to_json(made) == (place / "read" / "atlas.json").read_text()
    assert to_csv(again) == to_csv(made)
