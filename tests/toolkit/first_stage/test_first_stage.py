"""Every first stage against an independent implementation of a few lines."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.selection import Selection
from maxsim_eval.errors import DataError, MissingPackageError, UnknownNameError, UsageError
from maxsim_eval.first_stage import fde as fde_module
from maxsim_eval.first_stage.names import get_first_stage
from maxsim_eval.first_stage.stage import Texts, Tokens
from maxsim_kernels import Packed, maxsim, pack
from stored_cases import filled

DOCUMENTS = [
    "red fox runs far",
    "blue whale swims",
    "",
    "green frog jumps, frog leaps",
    "red fox runs far",
    "quiet owl",
    "the of and",
]
QUERIES = ["red fox", "a frog in green", "owl whale", "zebra", ""]


def words(text: str) -> list[str]:
    kept = "".join(one if one.isalnum() else " " for one in text.lower()).split()
    return [word for word in kept if len(word) > 1 and word not in {"the", "of", "and", "in", "a"}]


def bm25(query: str, k1: float, b: float) -> list[float]:
    """Lucene's BM25, a document at a time."""
    bags = [words(text) for text in DOCUMENTS]
    mean = sum(map(len, bags)) / len(bags)
    found = []
    for bag in bags:
        score = 0.0
        for word in words(query):
            having = sum(word in other for other in bags)
            if having:
                weight = math.log(1 + (len(bags) - having + 0.5) / (having + 0.5))
                count = bag.count(word)
                score += weight * count / (count + k1 * (1 - b + b * len(bag) / mean))
        found.append(score)
    return found


@pytest.mark.parametrize(("name", "k1", "b"), [("bm25", 1.5, 0.75), ("bm25(k1=0.9,b=0.4)", 0.9, 0.4)])
def test_bm25_is_lucenes(name, k1, b):
    found = get_first_stage(name).search(Texts(QUERIES, DOCUMENTS), 3, device="cpu", quiet=True)
    for row, query in enumerate(QUERIES):
        scores = bm25(query, k1, b)
        order = [place for place in sorted(range(len(scores)), key=lambda place: (-scores[place], place)) if scores[place] > 0][
            :3
        ]
        assert found.indices[row].tolist() == order + [-1] * (3 - len(order))
        np.testing.assert_allclose(found.scores[row][: len(order)], [scores[place] for place in order], rtol=1e-5)
        assert (found.scores[row][len(order) :] == -np.inf).all()
    assert found.stored_bytes > 0
    assert set(found.seconds) == {"index", "search"}


def test_texts_that_are_none_and_a_package_that_is_not_there(monkeypatch):
    stage = get_first_stage("bm25")
    with pytest.raises(DataError, match="bm25: the documents are no texts"):
        stage.search(Texts(["a"], [object()]), 1, device="cpu", quiet=True)
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(MissingPackageError, match=r"maxsim-eval\[atlas\]"):
        stage.search(Texts(["a"], ["b"]), 1, device="cpu", quiet=True)


def tokens(count: int, dim: int, seed: int) -> Packed:
    random = torch.Generator().manual_seed(seed)
    return pack([torch.randn(int(n), dim, generator=random) for n in torch.randint(0, 9, (count,), generator=random)], dim=dim)


def stored(folder: Path, documents: Packed) -> Entry:
    return filled(folder, documents, provenance={"role": "document"}, documents_per_shard=7)


def best(scores: np.ndarray, n: int) -> list[list[int]]:
    return [sorted(range(scores.shape[1]), key=lambda place: (-row[place], place))[:n] for row in scores]


def test_single_is_the_mean(tmp_path):
    documents, queries = tokens(40, 6, 0), tokens(5, 6, 1)
    found = get_first_stage("single").search(Tokens(queries, stored(tmp_path / "e", documents)), 9, device="cpu", quiet=True)

    def mean(rows: Packed) -> np.ndarray:
        sums = np.array([rows[n].sum(0).numpy() if len(rows[n]) else np.zeros(6) for n in range(len(rows))])
        return sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)

    scores = mean(queries) @ mean(documents).astype(np.float16).astype(np.float32).T
    np.testing.assert_allclose(found.scores, np.take_along_axis(scores, found.indices, 1), atol=1e-5)
    assert found.indices.tolist() == best(scores, 9)
    assert found.stored_bytes == 40 * 6 * 2


def encoding(rows: torch.Tensor, planes: np.ndarray, signs: np.ndarray, document: bool) -> np.ndarray:
    """MUVERA's encoding of one item, part by part."""
    found = []
    for plane, sign in zip(planes, signs, strict=True):
        bits = plane.shape[1]
        parts = [sum(int(row @ plane[:, bit] > 0) << bit for bit in range(bits)) for row in rows.numpy()]
        small = rows.numpy() @ sign
        for part in range(2**bits):
            inside = [small[n] for n in range(len(rows)) if parts[n] == part]
            if inside:
                found.append(np.mean(inside, axis=0) if document else np.sum(inside, axis=0))
            elif document and len(rows):
                found.append(small[min(range(len(rows)), key=lambda n: ((parts[n] ^ part).bit_count(), n))])
            else:
                found.append(np.zeros(small.shape[1]))
    return np.concatenate(found)


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_fde_is_muveras(tmp_path, monkeypatch, block):
    monkeypatch.setattr(fde_module, "_BLOCK", block)
    documents, queries = tokens(30, 6, 0), tokens(5, 6, 1)
    stage = get_first_stage("fde(repetitions=3,bits=2,projected=4,seed=5)")
    found = stage.search(Tokens(queries, stored(tmp_path / "e", documents)), 30, device="cpu", quiet=True)
    planes, signs = (part.numpy() for part in stage._drawn(6, "cpu"))
    assert set(np.unique(np.abs(signs))) == {0.5}
    left = np.array([encoding(queries[n], planes, signs, False) for n in range(5)])
    right = np.array([encoding(documents[n], planes, signs, True) for n in range(30)]).astype(np.float16).astype(np.float32)
    scores = left @ right.T
    np.testing.assert_allclose(found.scores, np.take_along_axis(scores, found.indices, 1), rtol=2e-2, atol=2e-2)
    close = np.take_along_axis(scores, np.array(best(scores, 30)), 1)
    np.testing.assert_allclose(found.scores, close, rtol=2e-2, atol=2e-2)
    assert found.stored_bytes == 30 * 3 * 4 * 4 * 2
    again = stage.search(Tokens(queries, stored(tmp_path / "f", documents)), 30, device="cpu", quiet=True)
    assert np.array_equal(again.indices, found.indices)


def test_fde_finds_what_maxsim_finds(tmp_path):
    """Many repetitions: near enough to MaxSim that its best documents are found. Random vectors, unit length."""
    random = torch.Generator().manual_seed(3)
    rows = torch.nn.functional.normalize(torch.randn(200, 8, 24, generator=random), dim=2)
    documents = pack(list(rows))
    asked = torch.nn.functional.normalize(rows[:20] + 0.05 * torch.randn(20, 8, 24, generator=random), dim=2)
    queries = pack(list(asked))
    found = get_first_stage("fde").search(Tokens(queries, stored(tmp_path / "e", documents)), 10, device="cpu", quiet=True)
    assert found.indices[:, 0].tolist() == list(range(20)) == maxsim(queries, documents).argmax(1).tolist()


def test_selections_and_few_documents(tmp_path):
    documents = tokens(30, 6, 0)
    chosen = Selection(stored(tmp_path / "e", documents), np.array([3, 4, 20, 29]))
    for name in ("single", "fde(projected=2,repetitions=2)"):
        found = get_first_stage(name).search(Tokens(tokens(2, 6, 1), chosen), 6, device="cpu", quiet=True)
        assert sorted(found.indices[0].tolist()) == [-1, -1, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("bm52", UnknownNameError, "unknown first stage 'bm52'. Did you mean 'bm25'"),
        ("bm25(k=1)", UnknownNameError, "unknown option of bm25 'k'. .*b, k1"),
        ("bm25(k1=x)", UsageError, "k1 is 'x', need a number"),
        ("fde(bits=1.5)", UsageError, "bits is '1.5', need a whole number"),
        ("fde bits", UnknownNameError, "unknown first stage 'fdebits'"),
        ("fde[3]", UsageError, "need name or name"),
    ],
)
def test_names_that_cannot_be(name, error, match):
    with pytest.raises(error, match=match):
        get_first_stage(name)


@pytest.mark.parametrize(
    ("name", "match"), [("fde(bits=0)", "bits is 0, need 1 to 12"), ("fde(projected=7)", "projected is 7, need 1 to 6")]
)
def test_options_that_do_not_fit(tmp_path, name, match):
    with pytest.raises(UsageError, match=match):
        get_first_stage(name).search(
            Tokens(tokens(2, 6, 1), stored(tmp_path / "e", tokens(9, 6, 0))), 3, device="cpu", quiet=True
        )
    with pytest.raises(UsageError, match="need k1 of 0 or more"):
        get_first_stage("bm25(b=2)").search(Texts(QUERIES, DOCUMENTS), 1, device="cpu", quiet=True)
