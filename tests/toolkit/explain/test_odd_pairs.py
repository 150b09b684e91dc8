"""Pairs that are odd: a score that is no number, texts of another number of tokens, a document that has the query's id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures import one_thread  # noqa: F401 - for every test here
from import_cases import DIM, import_sides
from maxsim_eval.api import evaluate
from maxsim_eval.encoders.lexical import LexicalEncoder
from maxsim_eval.errors import DataError
from maxsim_eval.explain.explaining import explain_pair
from maxsim_eval.explain.ranking import explain_query
from maxsim_eval.types import Role, Task
from task_cases import small_task

BIG = torch.full((1, DIM), 1e20)


@pytest.mark.parametrize(
    ("asked", "word"),
    [((BIG, -BIG), "NaN"), ((BIG,), "infinite"), ((-BIG,), "infinite")],
    ids=["nan", "above", "below"],
)
def test_a_score_that_overflows_is_refused(asked: Sequence[torch.Tensor], word: str, tmp_path: Path) -> None:
    """A document with tokens is never explained as one that is not retrieved."""
    task = small_task(["fox"], ["fox", "owl"])
    import_sides(tmp_path, task, "big", {"query": [torch.cat([*asked])], "document": [BIG, torch.ones(1, DIM)]})
    text = rf"path fp32: {word} score; the embeddings are finite, but with components up to 1e\+20 .*normalise them"
    with pytest.raises(DataError, match=text):
        explain_pair(task, "big", "q0", "d0", cache_dir=tmp_path / "cache")
    assert explain_pair(task, "big", "q0", "d1", cache_dir=tmp_path / "cache").score is not None


class OneShort(LexicalEncoder):
    """`lexical`, which does not say what the last token of a document stands for."""

    def token_texts(self, item: Any, role: Role) -> list[str]:
        found = super().token_texts(item, role)
        return found[:-1] if role == "document" else found


def test_texts_of_another_number_of_tokens_are_left_out_and_it_is_said(demo_home: Path, demo_task: Task) -> None:
    whole = explain_pair(demo_task, "lexical", "q07", "d032", cache_dir=demo_home / "cache")
    found = explain_pair(demo_task, OneShort(), "q07", "d032", cache_dir=demo_home / "cache")
    named = f"names {whole.document_tokens - 1} tokens of this document and the cache holds {whole.document_tokens}"
    assert found.notes == (f"encoder lexical {named}: positions are given alone",)
    assert found.tokens == tuple(replace(token, document_text=None) for token in whole.tokens)


def test_a_document_of_the_querys_id_is_not_retrieved_where_the_dataset_has_that_rule(tmp_path: Path) -> None:
    texts, ids = ["red fox", "a fox runs", "whale"], ["q0", "d1", "d2"]
    task = small_task(["red fox"], texts, document_ids=ids, qrels={"q0": {"q0": 1}})
    evaluate(task, "lexical", ["fp32"], k=3, cache_dir=tmp_path, quiet=True)
    note = "an evaluation of this dataset never retrieves a document for the query of the same id"
    top, best, missed = "top hit", "best relevant document", "first relevant document beyond rank 10"
    for rule, shown in (
        (False, [(f"{top}, {best}", 1, "q0", ())]),
        (True, [(top, 1, "d1", ()), (f"{best}, {missed}", None, "q0", (note,))]),
    ):
        found = explain_query(replace(task, exclude_same_id=rule), "lexical", "q0", cache_dir=tmp_path, quiet=True).documents
        assert [(one.why, one.rank, one.explanation.document, one.explanation.notes) for one in found] == shown
