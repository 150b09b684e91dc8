"""Subsets of a task: what is kept, that nothing but seed and ids decides it, and how a Result names it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsim_eval.data import subsets
from maxsim_eval.data.subsets import (
    describe,
    idle_limits,
    limit_documents,
    limit_queries,
    limit_task,
    limits_of,
    rows_of,
    same_subset,
)
from maxsim_eval.errors import UsageError
from maxsim_eval.report.result_json import jsonable
from maxsim_eval.types import Task
from task_cases import small_task


def task_of(documents: list[str], qrels: dict[str, dict[str, int]], queries: list[str] | None = None) -> Task:
    names = list(qrels) if queries is None else queries
    texts = [[f"text of {name}" for name in side] for side in (names, documents)]
    return small_task(*texts, query_ids=names, document_ids=documents, qrels=qrels)


def plain(queries: int, documents: int, judged: int = 1) -> Task:
    """Query n judged `judged` documents from n * judged on (round the corpus)."""
    return task_of(
        [f"d{n}" for n in range(documents)],
        {f"q{n}": {f"d{(n * judged + m) % documents}": 1 for m in range(judged)} for n in range(queries)},
    )


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    names = st.text("abcé", min_size=1, max_size=3)
    documents = draw(st.lists(names, min_size=1, max_size=25, unique=True))
    queries = draw(st.lists(names, min_size=1, max_size=8, unique=True))  # a query may have a document's id
    judged = st.dictionaries(st.sampled_from([*documents, "gone"]), st.integers(-1, 3), min_size=1, max_size=4)
    return task_of(documents, {query: draw(judged) for query in queries})


def judged_in(task: Task) -> set[str]:
    return {name for row in task.qrels.values() for name in row} & set(task.document_ids)


def shuffled(task: Task, seed: int) -> Task:
    """The same task from files in another order."""
    random = np.random.default_rng(seed)
    queries = [task.query_ids[row] for row in random.permutation(len(task.query_ids))]
    documents = [task.document_ids[row] for row in random.permutation(len(task.document_ids))]
    qrels = {query: dict(list(task.qrels[query].items())[::-1]) for query in random.permutation(np.array(queries)).tolist()}
    return task_of(documents, qrels, queries)


@settings(max_examples=200, deadline=None)
@given(task=tasks(), queries=st.integers(1, 9), documents=st.integers(1, 26), seed=st.integers(-3, 2**70))
def test_what_a_subset_keeps(task: Task, queries: int, documents: int, seed: int) -> None:
    asked = limit_queries(task, queries, seed)
    judged = judged_in(asked)
    if documents < len(judged):
        with pytest.raises(UsageError, match=f"got {documents}, need {len(judged)} or more"):
            limit_task(task, queries=queries, documents=documents, seed=seed)
        return
    kept = limit_task(task, queries=queries, documents=documents, seed=seed)
    assert len(kept.query_ids) == min(queries, len(task.query_ids))
    assert len(kept.document_ids) == min(documents, len(task.document_ids))
    assert judged <= set(kept.document_ids)
    # In their order, with their texts, and with every judgement of theirs.
    assert list(kept.query_ids) == [name for name in task.query_ids if name in kept.qrels]
    assert list(kept.document_ids) == [name for name in task.document_ids if name in set(kept.document_ids)]
    assert list(kept.queries) == [f"text of {name}" for name in kept.query_ids]
    assert list(kept.documents) == [f"text of {name}" for name in kept.document_ids]
    assert kept.qrels == {name: task.qrels[name] for name in kept.query_ids}
    assert [task.document_ids[row] for row in rows_of(task.document_ids, kept.document_ids)] == list(kept.document_ids)
    whole = queries >= len(task.query_ids) and documents >= len(task.document_ids)
    assert (kept is task) == whole


@settings(max_examples=150, deadline=None)
@given(task=tasks(), queries=st.integers(1, 9), documents=st.integers(1, 26), seed=st.integers(0, 9), order=st.integers(0, 99))
def test_the_order_of_the_files_changes_nothing(task: Task, queries: int, documents: int, seed: int, order: int) -> None:
    documents = max(documents, len(judged_in(task)), 1)
    other = shuffled(task, order)
    one, two = (limit_task(made, queries=queries, documents=documents, seed=seed) for made in (task, other))
    assert set(one.query_ids) == set(two.query_ids)
    assert set(one.document_ids) == set(two.document_ids)
    found = [
        limits_of(made, kept, queries=queries, documents=documents, seed=seed) for made, kept in ((task, one), (other, two))
    ]
    assert found[0] == found[1]


@settings(max_examples=100, deadline=None)
@given(task=tasks(), small=st.integers(1, 25), more=st.integers(0, 25), seed=st.integers(0, 9))
def test_a_smaller_subset_lies_within_a_larger_one(task: Task, small: int, more: int, seed: int) -> None:
    small = max(small, len(judged_in(task)), 1)
    one, two = limit_documents(task, small, seed), limit_documents(task, small + more, seed)
    assert set(one.document_ids) <= set(two.document_ids)
    few, many = limit_queries(task, small, seed), limit_queries(task, small + more, seed)
    assert set(few.query_ids) <= set(many.query_ids)


@settings(max_examples=60, deadline=None)
@given(task=tasks(), seed=st.integers(0, 9), order=st.integers(0, 99))
def test_names_decide_between_equal_hashes(task: Task, seed: int, order: int) -> None:
    judged = judged_in(task)
    count = min(len(judged) + 3, len(task.document_ids))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subsets, "_hash", lambda name, seed: 7)
        one, two = (set(limit_documents(made, count, seed).document_ids) for made in (task, shuffled(task, order)))
    assert one == two == judged | set(sorted(set(task.document_ids) - judged)[: count - len(judged)])


def test_the_same_on_every_machine_and_version() -> None:
    task = plain(50, 60)
    assert limit_queries(task, 5).query_ids == ["q13", "q16", "q26", "q33", "q48"]
    kept = limit_task(task, queries=3, documents=9)
    assert kept.query_ids == ["q16", "q26", "q48"]
    assert kept.document_ids == ["d7", "d11", "d16", "d23", "d26", "d33", "d48", "d49", "d52"]
    limits = limits_of(task, kept, queries=3, documents=9, seed=0)
    assert limits == {
        "seed": 0,
        "queries": {"limit": 3, "before": 50, "after": 3},
        "documents": {"limit": 9, "before": 60, "after": 9, "judged": 3},
        "judged_pairs": {"before": 50, "after": 3},
        "ids_sha256": "98b5c1459e2b74df0cb38859c8d168e2618d2d9fde237dff0f6c1e586ce6899b",
    }
    assert jsonable(limits) == limits


def test_another_seed_another_subset() -> None:
    task = plain(50, 60)
    found = [limit_task(task, queries=10, documents=30, seed=seed) for seed in range(5)]
    assert len({tuple(kept.query_ids) for kept in found}) == 5
    assert len({tuple(kept.document_ids) for kept in found}) == 5
    assert found[3].provenance == {"limit_queries": 10, "limit_documents": 30, "limit_seed": 3}


def test_every_document_is_drawn_equally_often() -> None:
    task = plain(1, 21)  # one judged document, 20 others
    drawn = Counter(name for seed in range(800) for name in limit_documents(task, 6, seed).document_ids)
    assert drawn.pop("d0") == 800
    assert len(drawn) == 20
    assert all(140 <= count <= 260 for count in drawn.values()), drawn  # 200 expected, standard deviation 12


def test_documents_are_not_drawn_because_their_query_was() -> None:
    names = [f"n{n}" for n in range(400)]
    task = task_of(names, {name: {"n0": 1} for name in names})
    queries, documents = limit_queries(task, 100), limit_documents(task, 100)
    both = set(queries.query_ids) & set(documents.document_ids)
    assert 10 <= len(both) <= 40  # 25 expected


def test_just_the_judged_documents() -> None:
    task = plain(8, 40, judged=3)
    kept = limit_task(task, queries=2, documents=6)
    assert set(kept.document_ids) == judged_in(kept)
    with pytest.raises(UsageError, match=r"got 5, need 6 or more: the 2 queries have 6 judged documents"):
        limit_task(task, queries=2, documents=5)
    assert len(limit_task(task, queries=1, documents=5).document_ids) == 5


def test_judgements_of_any_grade_keep_a_document_and_missing_ones_do_not_count() -> None:
    task = task_of(["a", "b", "c", "d"], {"q": {"b": 0, "c": -1, "gone": 2}})
    kept = limit_documents(task, 2)
    assert kept.document_ids == ["b", "c"]
    assert kept.qrels == task.qrels


def test_queries_nobody_judged_are_never_drawn() -> None:
    task = task_of(["a"], {"q1": {"a": 1}, "q3": {"a": 0}}, ["q0", "q1", "q2", "q3"])
    assert {limit_queries(task, 1, seed).query_ids[0] for seed in range(20)} == {"q1", "q3"}
    assert limit_queries(task, 2) is task
    assert limit_documents(replace(task, document_ids=["a", "b"], documents=["", ""]), 1).document_ids == ["a"]


@pytest.mark.parametrize("bad", [0, -1])
def test_limits_below_one(bad: int) -> None:
    with pytest.raises(UsageError, match=f"limit of queries: got {bad}, need 1 or more"):
        limit_task(plain(3, 3), queries=bad)
    with pytest.raises(UsageError, match=f"limit of documents: got {bad}, need 1 or more"):
        limit_task(plain(3, 3), documents=bad)


def test_limits_that_leave_nothing_out() -> None:
    task = plain(3, 5)
    assert limit_task(task) is task
    assert limit_task(task, queries=3, documents=500) is task
    assert limits_of(task, task, queries=3, documents=500, seed=0) is None
    assert list(idle_limits(task, queries=2, documents=None)) == []
    assert list(idle_limits(task, queries=3, documents=500)) == [
        "the limit of 3 queries leaves none out: there are 3",
        "the limit of 500 documents leaves none out: there are 5",
    ]


def limits(**changes: Any) -> dict[str, Any]:
    task = plain(20, 2000)
    asked = {"queries": 7, "documents": 1500, "seed": 4, **changes}
    found = limits_of(task, limit_task(task, **asked), **asked)
    assert found is not None
    return dict(json.loads(json.dumps(found)))


def test_subsets_are_told_apart() -> None:
    one = limits()
    assert same_subset(one, limits())
    assert same_subset(None, None)
    assert not same_subset(one, None)
    assert not same_subset(None, one)
    for change in ({"seed": 5}, {"queries": None}, {"documents": 1499}, {"documents": None}):
        assert not same_subset(one, limits(**change)), change
        assert describe(one, ids=True) != describe(limits(**change), ids=True)
    # One subset of a collection that has grown since: what it is compared with is another thing.
    assert not same_subset(one, {**one, "documents": {**one["documents"], "before": 2001}})


def test_a_subset_in_words() -> None:
    assert describe(None) == "the whole collection"
    assert describe(limits()) == "7 of 20 queries and 1,500 of 2,000 documents (seed 4)"
    assert describe(limits(), ids=True) == f"{describe(limits())[:-1]}, ids {limits()['ids_sha256'][:12]})"
