"""Candidates: what a run lists becomes rows of the task; refusals name what they refuse."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsim_eval.data.subsets import limit_documents
from maxsim_eval.data.trec import write_trec_run
from maxsim_eval.errors import DataError
from maxsim_eval.scoring.candidates import Candidates, places, read_candidates
from maxsim_eval.types import Run, Task
from scoring_cases import of_sets

QUERIES, DOCUMENTS = 7, 60


def task(queries: int = QUERIES, documents: int = DOCUMENTS) -> Task:
    ids = [f"d{n:02d}" for n in range(documents)]
    names = [f"q{n}" for n in range(queries)]
    return Task("local", "t", "test", names, names, ids, ids, {name: {"d00": 1} for name in names})


def write(path: Path, lines: Sequence[tuple[str, str]], tag: str = "bm25") -> Path:
    """A run of another tool: ranks and scores in the order given."""
    path.write_text("".join(f"{query} Q0 {document} {n + 1} {1000 - n}.5 {tag}\n" for n, (query, document) in enumerate(lines)))
    return path


def sets_of(candidates: Candidates) -> list[set[int]]:
    return [set(row.tolist()) for row in candidates.of(range(candidates.queries))]


def test_a_run_becomes_rows_in_the_order_of_the_task(tmp_path: Path) -> None:
    path = write(tmp_path / "run.trec", [("q1", "d09"), ("q0", "d03"), ("q1", "d02"), ("q0", "d50"), ("q1", "d11")])
    found = read_candidates(path, task(2))
    assert found.name == "bm25"
    assert found.offsets.tolist() == [0, 2, 5]
    assert found.rows.tolist() == [3, 50, 2, 9, 11]
    assert found.union().tolist() == [2, 3, 9, 11, 50]
    assert (found.queries, found.pairs, found.warnings) == (2, 5, ())
    assert found.facts() == {
        "name": "bm25", "sha256": found.sha256, "pairs": 5, "documents": 5, "queries": 2, "queries_without": 0,
    }  # fmt: skip


def test_our_own_runs_are_read(tmp_path: Path) -> None:
    write_trec_run(tmp_path / "int8.trec", Run("int8", {"q1": [("d05", 2.0), ("d01", 2.0)], "q0": [("d01", -1.0)]}))
    found = read_candidates(tmp_path / "int8.trec", task(2))
    assert (found.name, sets_of(found)) == ("int8", [{1}, {1, 5}])


def test_the_hash_is_of_the_pairs_alone(tmp_path: Path) -> None:
    lines = [(f"q{query}", f"d{document:02d}") for query in range(7) for document in range(query, 60, 9)]
    first = read_candidates(write(tmp_path / "a.trec", lines), task())
    random.Random(0).shuffle(lines)
    again = read_candidates(write(tmp_path / "b.trec", lines, tag="other"), task())
    assert again.sha256 == first.sha256
    assert np.array_equal(again.rows, first.rows)
    fewer = read_candidates(write(tmp_path / "c.trec", lines[1:]), task())
    query, document = lines[0]
    moved = read_candidates(write(tmp_path / "d.trec", [(query, "d59" if document != "d59" else "d58"), *lines[1:]]), task())
    assert len({first.sha256, fewer.sha256, moved.sha256}) == 3


def test_foreign_and_missing_queries_are_said(tmp_path: Path) -> None:
    path = write(tmp_path / "run.trec", [("q1", "d00"), ("x1", "elsewhere"), ("x2", "d01")])
    with pytest.warns(UserWarning, match="candidates 'bm25'") as said:
        found = read_candidates(path, task(6))
    assert sets_of(found) == [set(), {0}, set(), set(), set(), set()]
    assert [str(one.message) for one in said] == list(found.warnings) == [
        "candidates 'bm25': 2 of 3 queries are not scored, the task lacks them ('x1', 'x2')",
        "candidates 'bm25': 5 of the task's 6 queries have none ('q0', 'q2', 'q3', ...): they retrieve nothing and score 0",
    ]  # fmt: skip
    assert found.facts()["queries_without"] == 5


def test_documents_that_are_not_the_tasks_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run.trec", [("q0", "d00"), ("q1", "d60"), ("q1", "d61"), ("q0", "d60"), ("x", "d99")])
    with pytest.raises(DataError, match=r"run\.trec: query 'q0' lists document 'd60', .*\(2 of 3 listed.*over this collection"):
        read_candidates(path, task(2))


def test_documents_outside_a_limited_task_are_refused(tmp_path: Path) -> None:
    limited = limit_documents(task(2), 10)
    gone = next(name for name in task().document_ids if name not in limited.document_ids)
    with pytest.raises(DataError, match=rf"'{gone}', which is not among the 10 documents.*same subset \(.*limited to 10\)"):
        read_candidates(write(tmp_path / "run.trec", [("q0", gone), ("q1", "d00")]), limited)
    last = limited.document_ids[-1]
    found = read_candidates(write(tmp_path / "run.trec", [("q0", last), ("q1", "d00")]), limited)
    assert sets_of(found) == [{9}, {0}]


def test_a_run_of_something_else_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run.trec", [("x1", "d00"), ("x2", "d00")])
    with pytest.raises(DataError, match="none of its 2 queries is among the 7 of local t") as refused:
        read_candidates(path, task())
    assert "it has 'x1', 'x2', the task 'q0', 'q1', 'q2', ..." in str(refused.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("q0 Q0 d01 1 2 t\nq0 Q0 d01 2 1 t\n", "lists document 'd01' twice"),
        ("q0 Q0 d01 1 nan t\n", "NaN"),
        ("q0 Q0 d01 1\n", "4 columns, need 6"),
        ("", "holds no result line"),
    ],
)
def test_malformed_runs_are_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "run.trec").write_text(text)
    with pytest.raises(DataError, match=problem):
        read_candidates(tmp_path / "run.trec", task())
    with pytest.raises(DataError, match="cannot be read"):
        read_candidates(tmp_path / "none.trec", task())


SETS = st.lists(st.sets(st.integers(0, DOCUMENTS - 1), max_size=12), min_size=1, max_size=8)


@settings(max_examples=80, deadline=None)
@given(SETS, st.integers(0, DOCUMENTS), st.integers(0, DOCUMENTS))
def test_numbers_against_sets(sets: list[set[int]], first: int, stop: int) -> None:
    found = of_sets(sets)
    assert sets_of(found) == sets
    union = found.union().tolist()
    assert union == sorted(set().union(*sets))
    inside = found.within(found.union())
    assert [{union[n] for n in one} for one in sets_of(inside)] == sets
    queries, documents = found.block(first, max(first, stop))
    pairs = list(zip(documents.tolist(), queries.tolist(), strict=True))
    assert pairs == sorted((n - first, query) for query, one in enumerate(sets) for n in one if first <= n < stop)
    where = places(found.union(), np.arange(-1, DOCUMENTS + 1))
    assert where.tolist() == [union.index(n) if n in union else -1 for n in range(-1, DOCUMENTS + 1)]


def test_numbers_that_cannot_be_are_refused() -> None:
    zero, two = np.array([0, 0, 2, 2]), np.array([3, 5])
    assert Candidates("x", zero, two).pairs == 2
    for offsets, rows in ((zero, two[::-1]), (zero, two * 0), (zero, two - 9), (zero, two.astype(np.int32)), (zero[:2], two)):
        with pytest.raises(ValueError, match="need"):
            Candidates("x", offsets, rows)
    assert Candidates("x", np.array([0, 1, 2]), two[::-1]).pairs == 2  # each query begins anew
    with pytest.raises(ValueError, match="1 listed pairs are of documents it lacks"):
        Candidates("x", zero, two).within(np.array([5]))
