"""`maxsim_reference`: the truth for the other paths and the `fp32` path itself, checked against the brute-force loops."""

from __future__ import annotations

import pytest
import torch

import oracle
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import maxsim, maxsim_reference, quantize_int8

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "packed", "per query", "one query"])
def test_layouts(dtype, layout):
    queries, documents = cases.gauss(3, 9, 48, dtype=dtype), cases.gauss(4, 20, 48, dtype=dtype, seed=1)
    if layout == "packed":
        queries = cases.packed([9, 0, 7], 48, dtype=dtype, make=cases.gauss)
        documents = cases.packed([20, 0, 1], 48, dtype=dtype, seed=1, make=cases.gauss)
    elif layout == "per query":
        documents = cases.gauss(3, 4, 20, 48, dtype=dtype, seed=1)
    elif layout == "one query":
        queries = queries[0]
    truth = oracle.maxsim(queries, documents)
    scores, argmax = maxsim_reference(queries, documents, return_argmax=True)
    oracle.check(scores, truth, tol.SCORE)
    oracle.check_argmax(argmax, truth, tol.SCORE)
    oracle.check(maxsim_reference(queries, documents, dtype=torch.float64), truth, tol.REFERENCE_FLOAT64, torch.float64)


def test_masks():
    masks = {"query_mask": cases.mask(3, 9), "document_mask": cases.mask(5, 20, seed=1)}
    masks |= {"query_lengths": cases.lengths(3, high=9), "document_lengths": cases.lengths(5, high=20)}
    queries = cases.dirty(cases.grid(3, 9, 4), cases.valid(9, masks["query_mask"], masks["query_lengths"]))
    documents = cases.dirty(cases.grid(5, 20, 4), cases.valid(20, masks["document_mask"], masks["document_lengths"]))
    truth = oracle.maxsim(queries, documents, **masks)
    oracle.check(maxsim_reference(queries, documents, **masks), truth)
    oracle.check(maxsim_reference(queries, documents, **masks, dtype=torch.float64), truth, None, torch.float64)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("quantize_queries", [False, True])
def test_int8(affine, quantize_queries):
    queries, documents = cases.gauss(3, 9, 24), quantize_int8(cases.gauss(4, 20, 24, seed=1), affine=affine)
    used = quantize_int8(queries).dequantize() if quantize_queries else queries
    scores = maxsim_reference(queries, documents, quantize_queries=quantize_queries)
    oracle.check(scores, oracle.maxsim(used, documents), tol.SCORE_AFFINE)


def test_more_tokens_than_one_chunk():
    """Many documents, so that the reference works in several chunks."""
    queries, documents = cases.grid(2, 3, 4), cases.grid(1000, 5, 4, seed=1)
    oracle.check(maxsim_reference(queries, documents), oracle.maxsim(queries, documents))


def test_tf32_settings_do_not_reach_it():
    queries, documents = cases.gauss(3, 9, 48), cases.gauss(4, 20, 48, seed=1)
    plain, before = maxsim_reference(queries, documents), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert cases.same_bits(maxsim_reference(queries, documents), plain)
        assert torch.get_float32_matmul_precision() == "medium", "the caller's setting must come back"
    finally:
        torch.set_float32_matmul_precision(before)


def leaves(*shape, seed):
    return cases.gauss(*shape, seed=seed).double().requires_grad_()


def test_gradcheck_dense():
    def score(queries, documents):
        return maxsim_reference(queries, documents, dtype=torch.float64)

    inputs = (leaves(2, 3, 4, seed=0), leaves(3, 5, 4, seed=1))
    assert torch.autograd.gradcheck(score, inputs)
    assert torch.autograd.gradcheck(score, (leaves(2, 3, 4, seed=0), leaves(2, 3, 5, 4, seed=1)))


def test_gradcheck_masked():
    masks = {"query_lengths": torch.tensor([3, 1]), "document_mask": cases.mask(3, 5) | (torch.arange(5) == 0)}

    def score(queries, documents):
        return maxsim_reference(queries, documents, **masks, dtype=torch.float64)

    assert torch.autograd.gradcheck(score, (leaves(2, 3, 4, seed=0), leaves(3, 5, 4, seed=1)))


def test_gradcheck_packed():
    queries, documents = cases.packed([2, 0, 3], 4), cases.packed([5, 1, 3], 4)

    def score(q, d):
        return maxsim_reference(queries.with_values(q), documents.with_values(d), dtype=torch.float64)

    assert torch.autograd.gradcheck(score, (leaves(5, 4, seed=0), leaves(9, 4, seed=1)))


def test_impl_reference_is_the_reference():
    queries, documents = cases.gauss(3, 9, 48), cases.gauss(4, 20, 48, seed=1)
    assert cases.same_bits(maxsim(queries, documents, impl="reference"), maxsim_reference(queries, documents))
