"""`return_argmax=True`: int32, the scores' shape plus the query length, first index, -1 where there is nothing to choose."""

from __future__ import annotations

import pytest
import torch

import oracle
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import Packed, maxsim, maxsim_pairs

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def both(queries, documents, tolerance=None, function=maxsim, **options):
    """Scores and argmax are right, and asking for argmax does not change the scores."""
    masks = {name: value for name, value in options.items() if name != "impl"}
    truth = (oracle.maxsim if function is maxsim else oracle.pairs)(queries, documents, **masks)
    scores, argmax = function(queries, documents, return_argmax=True, **options)
    oracle.check(scores, truth, tolerance)
    oracle.check_argmax(argmax, truth, tolerance)
    assert cases.same_bits(scores, function(queries, documents, **options))
    return argmax


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (3, 63, 2, 6), (31, 17, 3, 3), (20, 100, 2, 8), (2, 1000, 2, 2), (130, 5, 2, 4)]
)
def test_first_index_on_ties(impl, dtype, shape):
    Lq, Ld, B, d = shape  # narrow grid vectors: most maxima are tied
    both(cases.grid(2, Lq, d, dtype=dtype), cases.grid(B, Ld, d, dtype=dtype, seed=1), impl=impl)


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_values(impl, dtype):
    queries, documents = cases.gauss(3, 20, 96, dtype=dtype), cases.gauss(4, 33, 96, dtype=dtype, seed=1)
    both(queries, documents, tol.SCORE, impl=impl)


@pytest.mark.parametrize("Ld", [2, 7, 31, 64, 65, 129, 300])
def test_all_tokens_equal_gives_index_zero(impl, Ld):
    documents = cases.gauss(3, 1, 64).expand(3, Ld, 64)
    _, argmax = maxsim(cases.gauss(2, 5, 64, seed=1), documents, return_argmax=True, impl=impl)
    assert argmax.eq(0).all(), "equal tokens have equal products: the first index wins"


@pytest.mark.parametrize("Ld", [31, 129, 300])
def test_equal_tokens_far_apart(impl, Ld):
    documents = cases.gauss(2, Ld, 64) * 0.1
    documents[:, [Ld // 3, Ld - 2, Ld - 1]] = cases.gauss(64, seed=2)
    _, argmax = maxsim(cases.gauss(64, seed=2)[None], documents, return_argmax=True, impl=impl)
    assert argmax.eq(Ld // 3).all()


def test_masks(impl):
    masks = {"query_mask": cases.mask(3, 9), "document_mask": cases.mask(5, 20, seed=1)}
    masks |= {"query_lengths": cases.lengths(3, high=9), "document_lengths": cases.lengths(5, high=20)}
    queries = cases.dirty(cases.grid(3, 9, 4), cases.valid(9, masks["query_mask"], masks["query_lengths"]))
    documents = cases.dirty(cases.grid(5, 20, 4), cases.valid(20, masks["document_mask"], masks["document_lengths"]))
    both(queries, documents, **masks, impl=impl)


def test_one_query(impl):
    argmax = both(cases.grid(7, 4), cases.grid(3, 9, 4, seed=1), impl=impl)
    assert argmax.shape == (3, 7)


def test_per_query_documents(impl):
    argmax = both(cases.grid(2, 7, 4), cases.grid(2, 3, 9, 4, seed=1), impl=impl)
    assert argmax.shape == (2, 3, 7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed(impl, dtype):
    queries, documents = cases.packed([4, 0, 20], 4, dtype=dtype), cases.packed([3, 0, 31, 1], 4, dtype=dtype, seed=1)
    argmax = both(queries, documents, impl=impl)
    assert argmax.shape == (3, 4, 20)
    assert argmax[0, :, 4:].eq(-1).all(), "shorter queries are padded with -1"
    assert argmax[:, 1].eq(-1).all(), "an empty document has no token to choose"
    both(cases.grid(5, 4, dtype=dtype), documents, impl=impl)
    both(cases.grid(2, 5, 4, dtype=dtype), documents, impl=impl)


def test_packed_queries_with_dense_documents(impl):
    queries, documents = cases.packed([4, 0, 20], 4), cases.grid(5, 9, 4, seed=1)
    both(queries, documents, document_lengths=cases.lengths(5, high=9), impl=impl)


def test_view_gives_the_index_inside_the_document(impl):
    values = cases.grid(30, 4, seed=1)
    documents = Packed.view(values, torch.tensor([20, 0, 5, 5]), torch.tensor([10, 3, 12, 0]))
    both(cases.grid(2, 5, 4), documents, impl=impl)


def test_packed_queries_without_any_token(impl):
    argmax = both(cases.packed([0, 0], 4), cases.packed([3, 0], 4, seed=1), impl=impl)
    assert argmax.shape == (2, 2, 0)


@pytest.mark.parametrize("function", [maxsim, maxsim_pairs])
@pytest.mark.parametrize("side", ["queries", "documents"])
def test_the_first_nan_wins(impl, function, side):
    """As `torch.max` has it, whatever larger numbers stand around; masked NaN never wins."""
    queries, documents = cases.grid(3, 5, 4), cases.grid(3, 40, 4, seed=1)
    (queries if side == "queries" else documents)[:, 2:4] = float("nan")
    queries[0, 0, :2] = float("inf")
    mask = torch.ones(3, 40, dtype=torch.bool)
    for lengths in (torch.tensor([40, 33, 4]), torch.tensor([40, 40, 40])):
        argmax = both(queries, documents, document_lengths=lengths, impl=impl, function=function)
        both(queries, documents, document_lengths=lengths, document_mask=mask, impl=impl, function=function)
        assert argmax[..., 2].eq(0 if side == "queries" else 2).all()
        mask[:, :3] = False  # the first of both NaN tokens


@pytest.mark.parametrize("Ld", [300, 20001])
def test_the_first_nan_of_a_long_document(impl, Ld):
    """Beyond the pieces in which a document is scored."""
    documents = cases.gauss(2, Ld, 8)
    documents[0, [Ld // 2, Ld - 1], 3] = float("nan")
    documents[1, [5, Ld // 2], 3] = float("nan")
    _, argmax = maxsim(cases.gauss(2, 40, 8, seed=1), documents, return_argmax=True, impl=impl)
    assert argmax.eq(torch.tensor([Ld // 2, 5])[None, :, None]).all()


@pytest.mark.parametrize("ragged", ["queries", "documents", "both", "neither"])
def test_pairs(impl, ragged):
    queries, documents = cases.packed([4, 0, 20, 3], 4), cases.packed([7, 5, 33, 0], 4, seed=1)
    lengths = {}
    if ragged in ("documents", "neither"):
        queries, lengths["query_lengths"] = cases.padded(queries)
    if ragged in ("queries", "neither"):
        documents, lengths["document_lengths"] = cases.padded(documents)
    both(queries, documents, function=maxsim_pairs, impl=impl, **lengths)


@pytest.mark.parametrize("granularity", ["token", "document", "corpus"])
def test_int8(impl, granularity):
    from maxsim_kernels import quantize_int8

    queries = cases.gauss(3, 5, 32)
    documents = quantize_int8(cases.gauss(4, 20, 32, seed=1), granularity)
    truth = oracle.maxsim(queries, documents)
    scores, argmax = maxsim(queries, documents, quantize_queries=False, return_argmax=True, impl=impl)
    oracle.check(scores, truth, tol.SCORE_QUANTIZED)
    oracle.check_argmax(argmax, truth, tol.SCORE_QUANTIZED)


def test_argmax_carries_no_gradient(impl):
    queries, documents = cases.grid(2, 5, 4).requires_grad_(), cases.grid(3, 9, 4, seed=1).requires_grad_()
    scores, argmax = maxsim(queries, documents, return_argmax=True, impl=impl)
    assert scores.requires_grad
    assert not argmax.requires_grad
