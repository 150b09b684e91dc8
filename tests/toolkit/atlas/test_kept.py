"""Finished entries of an atlas: taken as they are only where they are what was written, made by these versions, and in their own place."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval import evaluate
from maxsim_eval.atlas import atlas
from maxsim_eval.atlas import running as running_module
from maxsim_eval.data.trec import read_trec_run, write_trec_run
from maxsim_eval.errors import DataError
from maxsim_eval.types import Run, Task

pytestmark = pytest.mark.slow


def _edited(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """A change of `entry.json`, whose text stays JSON."""

    def damage(entry: Path) -> None:
        facts = json.loads((entry / "entry.json").read_text())
        change(facts)
        (entry / "entry.json").write_text(json.dumps(facts))

    return damage


def _pipe(entry: Path) -> None:
    (entry / "entry.json").unlink()
    os.mkfifo(entry / "entry.json")


def _cut(entry: Path) -> None:
    run = (entry / "run.trec").read_text().splitlines(keepends=True)
    (entry / "run.trec").write_text("".join(run[: len(run) // 2]))


DAMAGE = {
    "no JSON": lambda entry: (entry / "entry.json").write_text("{"),
    "no object": lambda entry: (entry / "entry.json").write_text("[]"),
    "another mean": _edited(lambda facts: facts["metrics"].update({"nDCG@10": 0.999})),
    "other values": _edited(lambda facts: [row.update(dict.fromkeys(row, 1.0)) for row in facts["per_query"].values()]),
    "a fact is missing": _edited(lambda facts: facts.pop("seconds")),
    "a fact of another type": _edited(lambda facts: facts.update(metrics=[])),
    "no checksum": _edited(lambda facts: facts.pop("sha256")),
    "a run cut": _cut,
    "no run": lambda entry: (entry / "run.trec").unlink(),
    "a pipe": _pipe,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_damaged_finished_entries_are_done_again(damage, task: Task, place: Path, options: dict):
    first = atlas(task, "lexical", out_dir=place / "damaged", entries=["int8"], **options)
    entry = place / "damaged" / "entries" / "int8"
    run = (entry / "run.trec").read_bytes()
    damage(entry)
    with pytest.warns(UserWarning, match="the entry is evaluated anew"):
        again = atlas(task, "lexical", out_dir=place / "damaged", entries=["int8"], **options)
    assert [row.metrics for row in again.rows] == [row.metrics for row in first.rows]
    assert (entry / "run.trec").read_bytes() == run


def test_finished_entries_of_other_versions_are_done_again(task: Task, place: Path, options: dict, monkeypatch):
    atlas(task, "lexical", out_dir=place / "versions", entries=["int8"], **options)
    calls = []
    monkeypatch.setattr(running_module, "evaluate", lambda *given, **named: calls.append(given) or evaluate(*given, **named))
    atlas(task, "lexical", out_dir=place / "versions", entries=["int8"], **options)
    assert not calls
    monkeypatch.setattr(running_module, "versions", lambda: {"torch": "another"})
    atlas(task, "lexical", out_dir=place / "versions", entries=["int8"], **options)
    assert len(calls) == 2


def _rotated(items: Iterable[Any]) -> list[Any]:
    first, *rest = items
    return [*rest, first]


@pytest.mark.parametrize("what", ["judgements", "queries", "documents", "metrics"])
def test_finished_entries_of_another_question_are_done_again(what: str, task: Task, options: dict, tmp_path: Path):
    """Corrected judgements, edited queries, other documents, a grid with other metrics: all as from a folder of their own."""
    part = {"limit_documents": 250}
    first, second = {
        "judgements": ({}, {"task": replace(task, qrels=dict(zip(task.qrels, _rotated(task.qrels.values()), strict=True)))}),
        "queries": ({}, {"task": replace(task, queries=_rotated(task.queries))}),
        "documents": (part, {**part, "limit_seed": 1}),
        "metrics": ({}, {"metric": "nDCG@5"}),
    }[what]

    def asked(out: str, *, task: Task = task, metric: str = "nDCG@10", **limits: int) -> list[object]:
        """Metrics by row, and the run of one."""
        (tmp_path / "grid.toml").write_text(f"entries = ['int8']\nmetrics = ['{metric}']")
        found = atlas(task, "lexical", out_dir=tmp_path / out, grid=tmp_path / "grid.toml", **limits, **options)
        return [*(row.metrics for row in found.rows), (tmp_path / out / "entries" / "int8" / "run.trec").read_bytes()]

    before = asked("one", **first)
    after = asked("one", **second)
    assert after == asked("fresh", **second)
    assert after != before


def test_another_run_of_one_name_is_reranked_anew(task: Task, place: Path, options: dict, monkeypatch):
    atlas(task, "lexical", out_dir=place / "exact", entries=["int8"], **options)
    exact = read_trec_run(place / "exact" / "entries" / "fp32" / "run.trec")

    def asked(out: str, first: int) -> dict[str, object]:
        """Metrics by row, of a run whose five documents a query begin at a rank of the exact ranking."""
        rankings = {query: ranking[first : first + 5] for query, ranking in exact.rankings.items()}
        write_trec_run(place / "plaid.trec", Run("engine", rankings))
        found = atlas(task, "lexical", out_dir=place / out, entries=["int8"], runs=[place / "plaid.trec"], **options)
        return {row.name: row.metrics for row in found.rows}

    before = asked("replaced", 0)
    after = asked("replaced", 5)
    assert after == asked("fresh", 5)
    assert after["run:plaid+rerank-5"] != before["run:plaid+rerank-5"]
    monkeypatch.setattr(running_module, "evaluate", lambda *given, **named: pytest.fail("evaluated again"))
    assert asked("replaced", 5) == after


def test_what_an_edited_function_ranks_is_reranked_anew(task: Task, place: Path, options: dict, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "python:atlas_scorer:score"

    def asked(out: str, sign: str) -> dict[str, object]:
        """Metrics by row, of a function that ranks by the documents' lengths."""
        text = f"def score(queries, documents):\n    return {sign}documents.lengths.float().expand(len(queries), -1).contiguous()\n"
        (tmp_path / "atlas_scorer.py").write_text(text)
        sys.modules.pop("atlas_scorer", None)  # as in another process
        found = atlas(task, "lexical", out_dir=place / out, entries=[f"{name}+rerank-10"], **options)
        assert not any(row.error for row in found.rows), found.rows
        return {row.name: row.metrics for row in found.rows}

    before = asked("edited", "")
    after = asked("edited", "-1 * ")
    assert after == asked("edited_fresh", "-1 * ")
    assert after[f"{name}+rerank-10"] != before[f"{name}+rerank-10"]


def test_nothing_is_written_through_a_link(task: Task, place: Path, options: dict):
    outside, entries = place / "outside", place / "linked" / "entries"
    outside.mkdir()
    entries.mkdir(parents=True)
    (entries / "int8").symlink_to(outside)
    with pytest.warns(UserWarning, match="was a link, which is removed"):
        atlas(task, "lexical", out_dir=place / "linked", entries=["int8"], **options)
    assert not list(outside.iterdir())
    assert (entries / "int8" / "run.trec").is_file()
    entries.rename(place / "elsewhere")
    entries.symlink_to(outside)
    with pytest.raises(DataError, match="entries: is a link"):
        atlas(task, "lexical", out_dir=place / "linked", entries=["int8"], **options)
    assert not list(outside.iterdir())
