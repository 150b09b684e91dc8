"""`evaluate` of a subset: which embeddings it reads, that scores and ties are those of the whole, and what the Result says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from import_cases import import_sides
from maxsim_eval.api import evaluate
from maxsim_eval.data.subsets import limit_task
from maxsim_eval.data.trec import read_trec_run
from maxsim_eval.encoders.lexical import LexicalEncoder
from maxsim_eval.errors import UsageError
from maxsim_eval.report.result_json import from_json, to_json
from maxsim_eval.types import Result, Role, Task
from maxsim_kernels import Packed

PATHS = ("fp32", "fused-fp32", "fp16", "int8", "int8-document")
LIMITS: dict[str, Any] = {"limit_queries": 6, "limit_documents": 90, "limit_seed": 3}


class Counting(LexicalEncoder):
    """The lexical encoder, and what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded: dict[str, int] = {"query": 0, "document": 0}
        self.offered = 0

    def prepare(self, documents: Sequence[Any]) -> None:
        self.offered += len(documents)
        super().prepare(documents)

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        self.encoded[role] += len(items)
        return super().encode(items, role)


def run(task: Task, folder: Path, name: str, encoder: Any = None, **options: Any) -> Result:
    options = {"k": 300, "paths": PATHS, "cache_dir": folder / "cache", "quiet": True, **options}
    return evaluate(task, encoder or Counting(), out_dir=folder / name, **options)


def kept_of(task: Task, **limits: Any) -> Task:
    given = {**LIMITS, **limits}
    return limit_task(task, queries=given["limit_queries"], documents=given["limit_documents"], seed=given["limit_seed"])


def runs(folder: Path) -> dict[str, dict[str, list[tuple[str, float]]]]:
    read = {name: read_trec_run(folder / "runs" / f"{name}.trec").rankings for name in PATHS}
    return {name: {query: list(ranking) for query, ranking in found.items()} for name, found in read.items()}


def cached(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:k was clamped")
def test_rows_of_the_whole_corpus_are_read_where_they_lie(demo_task: Task, tmp_path: Path) -> None:
    run(demo_task, tmp_path, "whole")
    before = cached(tmp_path / "cache")
    encoder = Counting()
    limits = {**LIMITS, "limit_documents": 250}
    result = run(demo_task, tmp_path, "some", encoder, **limits)
    assert encoder.encoded == {"query": 0, "document": 0}
    assert encoder.offered == 0
    assert cached(tmp_path / "cache") == before, "nothing is written for a subset of what is there"
    kept = kept_of(demo_task, **limits)
    names = set(kept.document_ids)
    whole, some = runs(tmp_path / "whole"), runs(tmp_path / "some")
    for path in PATHS:  # the whole's ranking without what was left out, ties in corpus order and scores to the last bit
        assert list(some[path]) == list(kept.query_ids)
        for query, ranking in some[path].items():
            assert ranking == [pair for pair in whole[path][query] if pair[0] in names], (path, query)
    ties = sum(a[1] == b[1] for ranking in some["fp32"].values() for a, b in pairwise(ranking))
    assert ties > 0, "the subset has no ties, so their order was not tested"
    assert [result.task[key] for key in ("queries", "documents", "judged_pairs")] == [6, 250, kept.judged_pairs]


@pytest.mark.filterwarnings("ignore:k was clamped")
def test_without_the_whole_in_the_cache_only_the_subset_is_encoded(demo_task: Task, tmp_path: Path) -> None:
    first, again, other = Counting(), Counting(), Counting()
    run(demo_task, tmp_path, "own", first, **LIMITS)
    assert first.encoded == {"query": 40, "document": 90}
    assert first.offered == 300, "a query's weights are those of the whole corpus"
    run(demo_task, tmp_path, "again", again, **LIMITS)
    assert again.encoded == {"query": 0, "document": 0}
    run(demo_task, tmp_path, "other", other, **{**LIMITS, "limit_seed": 4})
    assert other.encoded == {"query": 0, "document": 90}, "another subset must not find the entry of the first"
    folders = [path.name for path in (tmp_path / "cache" / "demo" / "small").iterdir()]
    assert sorted(name.rpartition("-")[0] for name in folders) == ["lexical-documents"] * 2 + ["lexical-queries"]
    whole = Counting()
    run(demo_task, tmp_path, "whole", whole)
    assert whole.encoded == {"query": 0, "document": 300}, "the whole must not find the entry of a subset"
    run(demo_task, tmp_path, "rows", Counting(), **LIMITS)
    assert runs(tmp_path / "own") == runs(tmp_path / "again") == runs(tmp_path / "rows")
    results = [from_json((tmp_path / name / "result.json").read_text()) for name in ("own", "rows")]
    for name in PATHS:
        assert results[0].paths[name].per_query == results[1].paths[name].per_query
        assert results[0].paths[name].parity == results[1].paths[name].parity
    assert results[0].task == results[1].task


@pytest.mark.filterwarnings("ignore:k was clamped")
def test_a_whole_corpus_that_was_only_begun_is_not_used(demo_task: Task, tmp_path: Path) -> None:
    run(demo_task, tmp_path, "whole", paths=["fp32"])
    (shard,) = (tmp_path / "cache").rglob("lexical-documents-*/00000.h5")
    shard.unlink()
    encoder = Counting()
    run(demo_task, tmp_path, "some", encoder, paths=["fp32"], **LIMITS)
    assert encoder.encoded == {"query": 0, "document": 90}
    assert not shard.exists()


def test_imported_embeddings(demo_task: Task, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    sides = {"query": demo_task.queries, "document": demo_task.documents}
    rows = {role: [torch.randn(3, 8, generator=random).half() for _ in texts] for role, texts in sides.items()}
    import_sides(tmp_path, demo_task, "mine", rows)
    options: dict[str, Any] = {"encoder": "mine", "paths": ["fp32"]}
    whole = run(demo_task, tmp_path, "whole", **options)
    before = cached(tmp_path / "cache")
    some = run(demo_task, tmp_path, "some", k=90, **options, **LIMITS)
    assert cached(tmp_path / "cache") == before
    assert some.encoder == whole.encoder
    assert some.encoder["origin"] == "imported"
    assert some.task["document_tokens"] == 3 * 90
    names = set(kept_of(demo_task).document_ids)
    everything, found = (read_trec_run(tmp_path / name / "runs" / "fp32.trec").rankings for name in ("whole", "some"))
    assert len(found) == 6
    for query, ranking in found.items():
        assert list(ranking) == [pair for pair in everything[query] if pair[0] in names]


@pytest.mark.filterwarnings("ignore:k was clamped")
def test_the_result_says_what_was_left_out(demo_task: Task, tmp_path: Path) -> None:
    whole = run(demo_task, tmp_path, "whole", paths=["fp32"])
    assert whole.task["limits"] is None
    some = run(demo_task, tmp_path, "some", paths=["fp32"], **LIMITS)
    kept = kept_of(demo_task)
    limits = some.task["limits"]
    assert limits["seed"] == 3
    assert limits["queries"] == {"limit": 6, "before": 40, "after": 6}
    judged = len({name for row in kept.qrels.values() for name in row})
    assert limits["documents"] == {"limit": 90, "before": 300, "after": 90, "judged": judged}
    assert limits["judged_pairs"] == {"before": 293, "after": kept.judged_pairs}
    assert some.task["query_tokens"] < whole.task["query_tokens"]
    assert some.task["document_tokens"] < whole.task["document_tokens"]
    assert some.task["warnings"] == ["k was clamped to the 90 documents of the subset"]
    again = from_json((tmp_path / "some" / "result.json").read_text())
    assert again.task["limits"] == limits
    assert to_json(again) == to_json(some)
    few = run(demo_task, tmp_path, "queries", paths=["fp32"], k=301, limit_queries=6, limit_seed=3)
    assert few.task["warnings"] == ["k was clamped to the 300 documents of the corpus"]
    queries_only = few.task["limits"]
    assert queries_only["documents"] == {"limit": None, "before": 300, "after": 300, "judged": judged}
    assert queries_only["ids_sha256"] != limits["ids_sha256"]


def test_a_limit_that_leaves_nothing_out_is_the_whole_and_is_said(demo_task: Task, tmp_path: Path) -> None:
    whole = run(demo_task, tmp_path, "whole", paths=["fp32"])
    same = run(demo_task, tmp_path, "same", paths=["fp32"], limit_queries=40, limit_documents=10**6, limit_seed=9)
    assert same.task["limits"] is None
    assert same.task["warnings"] == [
        "the limit of 40 queries leaves none out: there are 40",
        "the limit of 1000000 documents leaves none out: there are 300",
    ]
    assert same.paths["fp32"].per_query == whole.paths["fp32"].per_query


def test_the_same_id_rule_holds_in_a_subset(demo_task: Task, tmp_path: Path) -> None:
    ids = list(demo_task.document_ids)
    own = list(dict.fromkeys(next(iter(row)) for row in demo_task.qrels.values()))[:20]
    renamed = {name: f"q{number:02d}" for number, name in enumerate(own)}  # these documents carry the ids of queries
    made = replace(
        demo_task,
        document_ids=[renamed.get(name, name) for name in ids],
        qrels={
            query: {renamed.get(name, name): grade for name, grade in row.items()} for query, row in demo_task.qrels.items()
        },
    )
    for exclude in (False, True):
        name = f"same-id-{exclude}"
        run(replace(made, exclude_same_id=exclude), tmp_path, name, k=150, limit_documents=290)
        for path, rankings in runs(tmp_path / name).items():
            own_found = [query for query, ranking in rankings.items() if query in dict(ranking)]
            assert bool(own_found) is not exclude, path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_documents": 0}, "limit of documents: got 0, need 1 or more"),
        ({"limit_queries": -1}, "limit of queries: got -1, need 1 or more"),
        ({"limit_queries": 6, "limit_documents": 5}, r"limit of documents: got 5, need \d+ or more: the 6 queries have \d+ "),
    ],
)
def test_limits_are_checked_before_hours_of_work(
    options: dict[str, Any], message: str, demo_task: Task, tmp_path: Path
) -> None:
    encoder = Counting()
    with pytest.raises(UsageError, match=message):
        run(demo_task, tmp_path, "out", encoder, **options)
    assert encoder.encoded == {"query": 0, "document": 0}
    assert list(tmp_path.iterdir()) == []


def test_limits_reach_the_file_as_plain_json(demo_task: Task, tmp_path: Path) -> None:
    result = run(demo_task, tmp_path, "some", paths=["fp32"], k=50, **LIMITS)
    text = (tmp_path / "some" / "result.json").read_text()
    assert json.loads(text)["task"]["limits"] == result.task["limits"]
    report = (tmp_path / "some" / "report.md").read_text()
    assert "SUBSET: 6 of 40 queries and 90 of 300 documents (seed 3); figures are not those of the whole collection" in report
