"""Finite embeddings whose scores are infinite: refused on every path, the pair named, and the remedy said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fixtures import one_thread  # noqa: F401 - for every test here
from maxsim_eval.cache import corpus as corpora
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.selection import Selection
from maxsim_eval.errors import DataError
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.candidates import Candidates
from maxsim_eval.scoring.finite import reason
from maxsim_eval.scoring.own_functions import find_paths
from maxsim_eval.scoring.records import Records
from maxsim_eval.scoring.scoring import score_path
from maxsim_kernels import Packed, maxsim_reference, pack
from maxsim_kernels.topk import TopK
from stored_cases import filled

WIDTH, COUNT, ODD = 4, 12, 7
WIDE = ("fp32", "fused-fp32", "bf16")  # whose tokens may be as large as a float32
SAID = "the embeddings are finite, but with components up to 1e+20 the score outgrows the numbers that this path computes with"


def stored(folder: Path, odd: float) -> Entry:
    """Documents of ones, number 5 empty, number 7 of `odd`: finite, and too large for a product."""
    documents = [torch.ones(2, WIDTH) for _ in range(COUNT)]
    documents[5], documents[ODD] = torch.ones(0, WIDTH), torch.full((3, WIDTH), odd)
    return filled(folder, documents, documents_per_shard=5)


def asked_of(documents: int = COUNT, k: int = 3, candidates: Candidates | None = None) -> Asked:
    names = [f"d{n}" for n in range(documents)]
    return Asked(["q0", "q1", "q2"], names, k, np.full(3, -1, np.int64), np.arange(3), candidates)


QUERIES = pack([torch.ones(2, WIDTH), torch.ones(0, WIDTH), torch.full((1, WIDTH), 1e20)])  # q2 is too large for document 7


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("block", [1, 1 << 25])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_score_that_outgrows_float32_is_refused(
    name: str, block: int, sign: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative ones too: they became -inf, which is "not retrieved", and the document was lost without a word."""
    monkeypatch.setattr(corpora, "BLOCK_BYTES", block)
    corpus = Corpus(stored(tmp_path / "e", sign * 1e20), quiet=True)
    with pytest.raises(DataError) as refused:
        score_path(name, QUERIES, corpus, asked_of(), units=[(0, 4), (4, COUNT)])
    assert str(refused.value) == (
        f"path {name}: infinite score for query 'q2' and document 'd7'; {SAID}; scale them, or normalise them to unit vectors, "
        "before they are stored"
    )


@pytest.mark.parametrize("name", [*WIDE, "fp16", "int8", "int8-document", "int8-corpus", "fp8"])
def test_no_path_gives_infinite_scores_for_finite_embeddings(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        score_path(name, QUERIES, Corpus(stored(tmp_path / "e", 1e20), quiet=True), asked_of())
    small = pack([torch.ones(2, WIDTH), torch.ones(0, WIDTH), torch.ones(1, WIDTH)])
    fits = score_path(name, small, Corpus(stored(tmp_path / "f", 2.0), quiet=True), asked_of())
    assert fits is not None
    assert np.isfinite(fits.scores[fits.indices >= 0]).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", WIDE)
def test_candidates(sign: int, name: str, tmp_path: Path) -> None:
    """What is not listed, and a document without tokens, is -inf and no mistake."""
    entry = stored(tmp_path / "e", sign * 1e20)

    def score(*listed: Sequence[int]) -> None:
        rows = np.concatenate([np.asarray(row, np.int64) for row in listed])
        candidates = Candidates("run", np.cumsum([0, *map(len, listed)]), rows)
        score_path(name, QUERIES, Corpus(entry, quiet=True), asked_of(candidates=candidates))

    score([1, 5, 7], [2], [4, 5, 8])
    with pytest.raises(
        DataError, match=rf"path {name}: infinite score for query 'q2' and document 'd7'; the embeddings are finite"
    ):
        score([1, 5], [2], [4, 5, 7])


def test_a_selection_names_its_own_document(tmp_path: Path) -> None:
    entry = Selection(stored(tmp_path / "e", -1e20), np.array([2, 5, 7, 9]))
    with pytest.raises(DataError, match=f"infinite score for query 'q2' and document 'd2'; {SAID}".replace("+", r"\+")):
        score_path("fp32", QUERIES, Corpus(entry, quiet=True), asked_of(4))


@pytest.mark.parametrize(("value", "word"), [(np.inf, "infinite"), (np.nan, "NaN")])
def test_a_finished_part_is_no_way_around(value: float, word: str, tmp_path: Path) -> None:
    entry = stored(tmp_path / "e", 1.0)
    best = TopK(3, 3, first=4)
    with Records(tmp_path / "records", {}) as records:
        scores = torch.zeros(3, COUNT - 4)
        scores[1, ODD - 4] = np.inf
        best.add(scores)
        keys = best.keys.numpy().copy()
        if word == "NaN":
            keys[1, 0] += 0x400000 << 32  # from infinity's bits to NaN's
        records.put(4, COUNT, keys, None, {"total": 1.0})
    with Records(tmp_path / "records", {}) as records, pytest.raises(DataError) as refused:
        score_path("fp32", QUERIES, Corpus(entry, quiet=True), asked_of(), units=[(0, 4), (4, COUNT)], records=records)
    assert f"path fp32: {word} score for query 'q1' and document 'd7'; " in str(refused.value)


def test_a_users_function_may_leave_documents_out(tmp_path: Path) -> None:
    def some(queries: Packed, documents: Packed) -> Tensor:
        scores = maxsim_reference(queries, documents)
        assert isinstance(scores, Tensor)
        return scores.masked_fill(scores.abs() > 1e30, -torch.inf)

    asked = asked_of()
    asked = Asked(
        *(getattr(asked, name) for name in ("query_ids", "document_ids", "k", "excluded", "kept_rows")),
        None,
        find_paths([("some", some)]),
    )
    found = score_path("some", QUERIES, Corpus(stored(tmp_path / "e", 1e20), quiet=True), asked)
    assert found is not None
    assert ODD not in found.indices[2]


def test_embeddings_are_blamed_only_where_they_are_not_finite() -> None:
    fine, large = torch.ones(2, WIDTH), torch.full((1, WIDTH), 3e25)
    assert "up to 3e+25 the score outgrows" in reason(fine, large)
    for value in (torch.nan, torch.inf):
        bad = torch.tensor([[1.0, value]])
        assert reason(bad, large) == "the embeddings must be finite, and those of this query are not"
        assert reason(fine, bad) == "the embeddings must be finite, and those of this document are not"
