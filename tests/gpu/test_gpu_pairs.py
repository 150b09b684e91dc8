"""Dense documents of each query's own, `[Nq, B, Ld, d]`, and independent pairs on a GPU, against the float64 truth."""

from __future__ import annotations

import pytest
import torch

from inputs import on_gpu as make
from maxsim_kernels import maxsim, maxsim_pairs
from truth import agree

D = 128
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = [HALF, BFLOAT, SINGLE]


@pytest.mark.parametrize(
    ("dtype", "Nq", "Lq", "B", "Ld"),
    [
        (HALF, 1, 7, 31, 31),
        (HALF, 7, 31, 7, 100),
        (HALF, 3, 1000, 7, 63),
        (HALF, 31, 1, 1, 1000),
        (HALF, 100, 130, 3, 17),
        (BFLOAT, 7, 31, 7, 100),
        (SINGLE, 7, 31, 7, 100),
        (HALF, 0, 7, 3, 7),
        (HALF, 7, 0, 3, 7),
        (HALF, 7, 7, 0, 7),
        (HALF, 7, 7, 3, 0),
    ],
)
def test_per_query_documents(dtype, Nq, Lq, B, Ld):
    agree(make.gauss(Nq, Lq, D, dtype=dtype), make.gauss(Nq, B, Ld, D, dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_per_query_documents_masked(dtype):
    masks = make.masks("both", "query", 7, 31) | make.masks("both", "document", 7, 5, 63, seed=1)
    queries = make.dirty(make.gauss(7, 31, D, dtype=dtype), masks["query_mask"], masks["query_lengths"])
    documents = make.dirty(make.gauss(7, 5, 63, D, dtype=dtype, seed=1), masks["document_mask"], masks["document_lengths"])
    agree(queries, documents, **masks)


def test_per_query_documents_strided():
    queries, documents = make.gauss(7, 31, D), make.gauss(5, 7, 63, D, seed=1).transpose(0, 1)
    agree(queries, documents)
    agree(queries, make.strided(documents, "transposed"))
    agree(make.packed([4, 0, 31, 1, 7, 100, 2], D), documents)


def test_one_query_with_documents_of_its_own():
    """`[Lq, d]` is one query: `[1, B, Ld, d]` documents give `[B]`."""
    agree(make.gauss(31, D), make.gauss(1, 40, 63, D, seed=1))


@pytest.mark.parametrize(
    ("dtype", "N", "Lq", "Ld"),
    [
        (HALF, 1, 7, 31),
        (HALF, 16, 64, 64),
        (HALF, 31, 31, 31),
        (HALF, 63, 17, 31),
        (HALF, 1000, 7, 63),
        (HALF, 7, 1000, 1000),
        (HALF, 100, 64, 17),
        (BFLOAT, 31, 100, 63),
        (SINGLE, 31, 100, 63),
        (HALF, 0, 7, 7),
        (HALF, 7, 0, 7),
        (HALF, 7, 7, 0),
    ],
)
def test_pairs(dtype, N, Lq, Ld):
    scores = agree(make.gauss(N, Lq, D, dtype=dtype), make.gauss(N, Ld, D, dtype=dtype, seed=1), pairs=True)
    assert scores.shape == (N,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "Lq", "Ld"), [(31, 31, 63), (7, 300, 500)])
def test_pairs_masked(dtype, N, Lq, Ld):
    masks = make.masks("both", "query", N, Lq) | make.masks("both", "document", N, Ld, seed=1)
    queries = make.dirty(make.gauss(N, Lq, D, dtype=dtype), masks["query_mask"], masks["query_lengths"])
    documents = make.gauss(N, Ld, D, dtype=dtype, seed=1)
    agree(queries, make.dirty(documents, masks["document_mask"], masks["document_lengths"]), pairs=True, **masks)


@pytest.mark.parametrize("d", [7, 96, 1000])
def test_pairs_widths(d):
    agree(make.gauss(31, 20, d), make.gauss(31, 63, d, seed=1), pairs=True)


def test_pairs_strided():
    queries, documents = make.gauss(31, 20, D), make.gauss(31, 63, D, seed=1)
    for how in ("transposed", "unaligned", "batch inside"):
        agree(make.strided(queries, how), make.strided(documents, how), pairs=True)


def test_pairs_of_one_matrix():
    """`maxsim_pairs` equals the diagonal of `maxsim` within twice the bound."""
    queries, documents = make.gauss(31, 20, D), make.gauss(31, 63, D, seed=1)
    both = maxsim(queries, documents).diagonal()
    assert torch.allclose(maxsim_pairs(queries, documents), both, rtol=1e-6, atol=1e-3)
