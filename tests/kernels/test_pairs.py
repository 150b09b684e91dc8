"""`maxsim_pairs`: query n with document n, dense and ragged on either side."""

from __future__ import annotations

import pytest
import torch

import oracle
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import Packed, maxsim, maxsim_pairs, pack

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("Lq", [1, 16, 17, 20, 31, 32, 33, 130])
def test_dense_query_lengths(impl, dtype, Lq):
    queries, documents = cases.grid(4, Lq, 8, dtype=dtype), cases.grid(4, 9, 8, dtype=dtype, seed=1)
    scores = maxsim_pairs(queries, documents, impl=impl)
    assert scores.shape == (4,)
    oracle.check(scores, oracle.pairs(queries, documents))


@pytest.mark.parametrize(
    ("N", "Lq", "Ld", "d"),
    [(1, 1, 1, 1), (7, 3, 63, 5), (100, 3, 5, 7), (1000, 2, 3, 4), (3, 1000, 3, 4), (3, 3, 1000, 4), (2, 3, 5, 1000)],
)
def test_sizes(impl, N, Lq, Ld, d):
    queries, documents = cases.grid(N, Lq, d), cases.grid(N, Ld, d, seed=1)
    oracle.check(maxsim_pairs(queries, documents, impl=impl), oracle.pairs(queries, documents))


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_values_within_the_bound(impl, dtype):
    queries, documents = cases.gauss(5, 33, 96, dtype=dtype), cases.gauss(5, 20, 96, dtype=dtype, seed=1)
    oracle.check(maxsim_pairs(queries, documents, impl=impl), oracle.pairs(queries, documents), tol.SCORE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ragged", ["queries", "documents", "both", "neither"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_ragged_sides(impl, dtype, ragged, index):
    q_rows = cases.packed([4, 0, 20, 1, 0], 8, dtype=dtype, index=index)
    d_rows = cases.packed([7, 5, 0, 33, 0], 8, dtype=dtype, index=index, seed=1)
    truth = oracle.pairs(q_rows, d_rows)
    queries, documents, lengths = q_rows, d_rows, {}
    if ragged in ("documents", "neither"):
        queries, lengths["query_lengths"] = cases.padded(q_rows)
    if ragged in ("queries", "neither"):
        documents, lengths["document_lengths"] = cases.padded(d_rows)
    lengths = {name: value.to(index) for name, value in lengths.items()}
    oracle.check(maxsim_pairs(queries, documents, **lengths, impl=impl), truth)


def test_masks_and_lengths(impl):
    masks = {"query_mask": cases.mask(5, 6), "document_mask": cases.mask(5, 9, seed=1)}
    masks |= {"query_lengths": cases.lengths(5, high=6), "document_lengths": cases.lengths(5, high=9, seed=1)}
    queries = cases.dirty(cases.grid(5, 6, 8), cases.valid(6, masks["query_mask"], masks["query_lengths"]))
    documents = cases.dirty(cases.grid(5, 9, 8), cases.valid(9, masks["document_mask"], masks["document_lengths"]))
    truth = oracle.pairs(queries, documents, **masks)
    scores, argmax = maxsim_pairs(queries, documents, **masks, return_argmax=True, impl=impl)
    oracle.check(scores, truth)
    oracle.check_argmax(argmax, truth)


def test_views_and_argmax(impl):
    values = cases.grid(30, 8, seed=1)
    queries = Packed.view(values, torch.tensor([0, 2, 25, 0]), torch.tensor([3, 5, 0, 1]))
    documents = Packed.view(values, torch.tensor([20, 2, 5, 0]), torch.tensor([10, 5, 6, 0]))
    truth = oracle.pairs(queries, documents)
    scores, argmax = maxsim_pairs(queries, documents, return_argmax=True, impl=impl)
    oracle.check(scores, truth)
    oracle.check_argmax(argmax, truth)


@pytest.mark.parametrize(("N", "Lq", "Ld"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (3, 0, 0)])
def test_zero_sizes(impl, N, Lq, Ld):
    queries, documents = cases.grid(N, Lq, 8), cases.grid(N, Ld, 8)
    scores, argmax = maxsim_pairs(queries, documents, return_argmax=True, impl=impl)
    truth = oracle.pairs(queries, documents)
    oracle.check(scores, truth)
    oracle.check_argmax(argmax, truth)


def test_no_ragged_pairs(impl):
    assert maxsim_pairs(pack([], dim=8), pack([], dim=8), impl=impl).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_are_the_diagonal(impl, dtype):
    queries, documents = cases.grid(6, 5, 8, dtype=dtype), cases.grid(6, 9, 8, dtype=dtype, seed=1)
    assert torch.equal(maxsim_pairs(queries, documents, impl=impl), maxsim(queries, documents, impl=impl).diagonal())


@pytest.mark.parametrize("d", [384, 385, 700, 5000])
def test_pairs_have_the_bits_of_the_diagonal(d):
    """Long sums are cut in the same places, also where a pair is scored alone."""
    queries, documents = cases.gauss(6, 5, d), cases.gauss(6, 9, d, seed=1)
    assert torch.equal(maxsim_pairs(queries, documents), maxsim(queries, documents).diagonal())


def test_nan_stays_with_its_pair(impl):
    queries, documents = cases.grid(4, 5, 8), cases.grid(4, 9, 8, seed=1)
    documents[2, 8, 0] = float("nan")
    queries[1, 0, 0] = float("nan")
    assert maxsim_pairs(queries, documents, impl=impl).isnan().tolist() == [False, True, True, False]


def test_strides(impl):
    queries = cases.grid(8, 5, 4).permute(2, 1, 0)
    documents = cases.grid(1, 9, 8, seed=1).expand(4, 9, 8)
    oracle.check(maxsim_pairs(queries, documents, impl=impl), oracle.pairs(queries, documents))


@pytest.mark.parametrize("ragged", [True, False])
def test_counts_must_agree(impl, ragged):
    queries = cases.packed([1, 2, 3], 8) if ragged else cases.grid(3, 4, 8)
    with pytest.raises(ValueError, match=r"3.*4|4.*3"):
        maxsim_pairs(queries, cases.grid(4, 5, 8), impl=impl)
    with pytest.raises(ValueError, match=r"3.*2|2.*3"):
        maxsim_pairs(queries, cases.packed([1, 2], 8), impl=impl)
