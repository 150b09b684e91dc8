"""`maxsim` where every query has its own candidates: documents `[Nq, B, Ld, d]` (distillation)."""

from __future__ import annotations

import pytest
import torch

import oracle
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import maxsim

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("Lq", [1, 17, 31, 32, 129, 200])
def test_query_lengths(impl, dtype, Lq):
    queries, documents = cases.grid(3, Lq, 8, dtype=dtype), cases.grid(3, 4, 7, 8, dtype=dtype, seed=1)
    scores = maxsim(queries, documents, impl=impl)
    assert scores.shape == (3, 4)
    oracle.check(scores, oracle.maxsim(queries, documents))


@pytest.mark.parametrize(
    ("Nq", "B", "Ld", "d"),
    [(1, 1, 1, 1), (7, 2, 63, 5), (31, 3, 5, 7), (2, 100, 5, 7), (100, 1, 5, 7), (2, 3, 1000, 4), (2, 3, 5, 1000)],
)
def test_sizes(impl, Nq, B, Ld, d):
    queries, documents = cases.grid(Nq, 3, d), cases.grid(Nq, B, Ld, d, seed=1)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents))


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_values_within_the_bound(impl, dtype):
    queries, documents = cases.gauss(3, 20, 96, dtype=dtype), cases.gauss(3, 4, 17, 96, dtype=dtype, seed=1)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents), tol.SCORE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", ["mask", "lengths", "both"])
@pytest.mark.parametrize("Lq", [5, 130])
def test_masks_and_lengths(impl, dtype, by, Lq):
    Nq, B, Ld, d = 3, 4, 9, 8
    masks = {}
    if by != "lengths":
        masks |= {"query_mask": cases.mask(Nq, Lq), "document_mask": cases.mask(Nq, B, Ld, seed=1)}
    if by != "mask":
        masks["query_lengths"] = cases.lengths(Nq, high=Lq)
        masks["document_lengths"] = cases.lengths(Nq * B, high=Ld, seed=1).view(Nq, B)
    q_valid = cases.valid(Lq, masks.get("query_mask"), masks.get("query_lengths"))
    d_valid = cases.valid(Ld, masks.get("document_mask"), masks.get("document_lengths"))
    queries = cases.dirty(cases.grid(Nq, Lq, d, dtype=dtype), q_valid)
    documents = cases.dirty(cases.grid(Nq, B, Ld, d, dtype=dtype, seed=1), d_valid)
    truth = oracle.maxsim(queries, documents, **masks)
    scores, argmax = maxsim(queries, documents, **masks, return_argmax=True, impl=impl)
    oracle.check(scores, truth)
    oracle.check_argmax(argmax, truth)


@pytest.mark.parametrize(("Nq", "B", "Lq", "Ld"), [(0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0), (2, 3, 0, 0)])
def test_zero_sizes(impl, Nq, B, Lq, Ld):
    queries, documents = cases.grid(Nq, Lq, 8), cases.grid(Nq, B, Ld, 8)
    scores, argmax = maxsim(queries, documents, return_argmax=True, impl=impl)
    truth = oracle.maxsim(queries, documents)
    oracle.check(scores, truth)
    oracle.check_argmax(argmax, truth)


def test_packed_queries(impl):
    queries, documents = cases.packed([4, 0, 20], 8), cases.grid(3, 2, 7, 8, seed=1)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents))


def test_shared_documents_repeated(impl):
    queries, documents = cases.grid(3, 5, 8), cases.grid(4, 7, 8, seed=1)
    repeated = documents.expand(3, 4, 7, 8)
    assert torch.equal(maxsim(queries, repeated, impl=impl), maxsim(queries, documents, impl=impl))


def test_strides(impl):
    queries, documents = cases.grid(3, 5, 8), cases.grid(8, 7, 4, 3, seed=1).permute(3, 2, 1, 0)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents))


def test_nan_stays_with_its_document(impl):
    queries, documents = cases.grid(3, 5, 8), cases.grid(3, 4, 7, 8, seed=1)
    documents[1, 2, 6, 0] = float("nan")
    assert maxsim(queries, documents, impl=impl).isnan().nonzero().tolist() == [[1, 2]]


def test_negative_maxima_are_kept(impl):
    queries, documents = cases.grid(3, 5, 8).abs() + 1, -cases.grid(3, 4, 7, 8, seed=1).abs() - 1
    lengths = cases.lengths(12, high=6).view(3, 4) + 1
    scores = maxsim(queries, documents, document_lengths=lengths, impl=impl)
    assert bool((scores <= -40).all())
    oracle.check(scores, oracle.maxsim(queries, documents, document_lengths=lengths))


def test_number_of_queries_must_agree(impl):
    with pytest.raises(ValueError, match="documents"):
        maxsim(cases.grid(2, 5, 8), cases.grid(3, 4, 7, 8), impl=impl)
