"""Hypothesis properties: every operator equals the brute-force loops, whatever the sizes, layouts and masks.

Inputs lie on a grid of 1/8, so FP32 arithmetic is exact and every comparison is bit for bit. Everything is repeatable
(`derandomize`), as CI must be.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import Packed, maxsim, maxsim_pairs, maxsim_reference, quantize_int8

REPEATABLE = settings(deadline=None, derandomize=True, max_examples=50, database=None)
MORE = settings(REPEATABLE, max_examples=80)

DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
INDEX = st.sampled_from([torch.int32, torch.int64])
SEED = st.integers(0, 10**6)
SMALL = st.integers(0, 5)
LENGTH = st.one_of(st.integers(0, 9), st.sampled_from([31, 33, 63, 65]))
WIDTH = st.one_of(st.integers(1, 9), st.sampled_from([31, 64, 100]))
RAGGED = st.lists(LENGTH, max_size=5)
BITS = st.sampled_from(["mask", "lengths", "both", "none"])


@pytest.fixture(params=["cpu", "reference"], scope="module")
def impl(request):
    return request.param


def some_masks(side, how, shape, seed):
    """Mask and lengths for tokens of `shape` `[..., L]`, as keyword arguments, and the validity they mean."""
    masks, valid = {}, torch.ones(shape, dtype=torch.bool)
    if how in ("mask", "both"):
        masks[f"{side}_mask"] = cases.mask(*shape, seed=seed)
        valid &= masks[f"{side}_mask"]
    if how in ("lengths", "both"):
        count = int(np.prod(shape[:-1]))
        masks[f"{side}_lengths"] = cases.lengths(count, high=shape[-1], seed=seed).view(shape[:-1])
        valid &= torch.arange(shape[-1]) < masks[f"{side}_lengths"][..., None]
    return masks, valid


def compare(impl, queries, documents, *, function=maxsim, **masks):
    truth = (oracle.maxsim if function is maxsim else oracle.pairs)(queries, documents, **masks)
    scores, argmax = function(queries, documents, return_argmax=True, impl=impl, **masks)
    oracle.check(scores, truth)
    oracle.check_argmax(argmax, truth)
    return truth


@MORE
@given(dtype=DTYPES, Nq=SMALL, B=SMALL, Lq=LENGTH, Ld=LENGTH, d=WIDTH, q_bits=BITS, d_bits=BITS, seed=SEED)
def test_dense(impl, dtype, Nq, B, Lq, Ld, d, q_bits, d_bits, seed):
    masks, q_valid = some_masks("query", q_bits, (Nq, Lq), seed)
    more, d_valid = some_masks("document", d_bits, (B, Ld), seed + 1)
    queries = cases.dirty(cases.grid(Nq, Lq, d, dtype=dtype, seed=seed), q_valid)
    documents = cases.dirty(cases.grid(B, Ld, d, dtype=dtype, seed=seed + 1), d_valid)
    compare(impl, queries, documents, **masks, **more)


@MORE
@given(
    dtype=DTYPES,
    q_sizes=RAGGED,
    d_sizes=RAGGED,
    d=WIDTH,
    index=INDEX,
    kind=st.sampled_from(["packed", "view"]),
    seed=SEED,
)
def test_packed(impl, dtype, q_sizes, d_sizes, d, index, kind, seed):
    queries = cases.packed(q_sizes, d, dtype=dtype, index=index, seed=seed)
    documents = cases.packed(d_sizes, d, dtype=dtype, index=index, seed=seed + 1)
    truth = compare(impl, queries, documents)
    if kind == "view":
        oracle.check(maxsim(cases.scattered(queries), cases.scattered(documents, seed=seed), impl=impl), truth)


@REPEATABLE
@given(
    dtype=DTYPES,
    T=st.integers(0, 40),
    d=WIDTH,
    index=INDEX,
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6),
    Lq=SMALL,
    seed=SEED,
)
def test_overlapping_views(impl, dtype, T, d, index, rows, Lq, seed):
    values = cases.grid(T, d, dtype=dtype, seed=seed)
    starts = [min(start, T) for start, _ in rows]
    lengths = [min(length, T - start) for start, (_, length) in zip(starts, rows, strict=True)]
    view = Packed.view(values, torch.tensor(starts, dtype=index), torch.tensor(lengths, dtype=index))
    compare(impl, cases.grid(2, Lq, d, dtype=dtype, seed=seed + 1), view)


@REPEATABLE
@given(dtype=DTYPES, Nq=SMALL, B=SMALL, Lq=LENGTH, Ld=LENGTH, d=WIDTH, q_bits=BITS, d_bits=BITS, seed=SEED)
def test_per_query(impl, dtype, Nq, B, Lq, Ld, d, q_bits, d_bits, seed):
    masks, q_valid = some_masks("query", q_bits, (Nq, Lq), seed)
    more, d_valid = some_masks("document", d_bits, (Nq, B, Ld), seed + 1)
    queries = cases.dirty(cases.grid(Nq, Lq, d, dtype=dtype, seed=seed), q_valid)
    documents = cases.dirty(cases.grid(Nq, B, Ld, d, dtype=dtype, seed=seed + 1), d_valid)
    compare(impl, queries, documents, **masks, **more)


@REPEATABLE
@given(
    dtype=DTYPES,
    sizes=st.lists(st.tuples(LENGTH, LENGTH), max_size=5),
    d=WIDTH,
    ragged=st.sampled_from(["queries", "documents", "both", "neither"]),
    seed=SEED,
)
def test_pairs(impl, dtype, sizes, d, ragged, seed):
    queries = cases.packed([size for size, _ in sizes], d, dtype=dtype, seed=seed)
    documents = cases.packed([size for _, size in sizes], d, dtype=dtype, seed=seed + 1)
    lengths = {}
    if ragged in ("documents", "neither"):
        queries, lengths["query_lengths"] = cases.padded(queries)
    if ragged in ("queries", "neither"):
        documents, lengths["document_lengths"] = cases.padded(documents)
    compare(impl, queries, documents, function=maxsim_pairs, **lengths)


@REPEATABLE
@given(
    dtype=DTYPES,
    Nq=SMALL,
    B=SMALL,
    Lq=LENGTH,
    Ld=LENGTH,
    d=WIDTH,
    layout=st.sampled_from(["dense", "packed", "per query"]),
    bits=BITS,
    seed=SEED,
)
def test_gradients(impl, dtype, Nq, B, Lq, Ld, d, layout, bits, seed):
    masks, q_valid = some_masks("query", bits, (Nq, Lq), seed)
    queries = cases.dirty(cases.grid(Nq, Lq, d, dtype=dtype, seed=seed), q_valid).requires_grad_()
    if layout == "packed":
        documents = cases.packed(cases.lengths(B, high=Ld, seed=seed), d, dtype=dtype, seed=seed + 1)
        leaf = documents.values.requires_grad_()
    else:
        shape = (B, Ld) if layout == "dense" else (Nq, B, Ld)
        more, d_valid = some_masks("document", bits, shape, seed + 1)
        masks |= more
        documents = leaf = cases.dirty(cases.grid(*shape, d, dtype=dtype, seed=seed + 1), d_valid).requires_grad_()
    scores = maxsim(queries, documents, **masks, impl=impl)
    upstream = cases.grid(*scores.shape, seed=seed + 2)
    truth = oracle.maxsim(queries, documents, **masks)
    need = oracle.gradients(queries, documents, truth, upstream)
    for got, exact in zip(torch.autograd.grad(scores, (queries, leaf), upstream), need[:2], strict=True):
        assert torch.equal(got, torch.from_numpy(exact).to(dtype))


@MORE
@given(
    dtype=DTYPES,
    sizes=RAGGED,
    Nq=SMALL,
    Lq=LENGTH,
    d=WIDTH,
    granularity=st.sampled_from(["token", "document", "corpus"]),
    affine=st.booleans(),
    quantize_queries=st.booleans(),
    dense=st.booleans(),
    seed=SEED,
)
def test_int8(impl, dtype, sizes, Nq, Lq, d, granularity, affine, quantize_queries, dense, seed):
    queries = cases.gauss(Nq, Lq, d, dtype=dtype, seed=seed)
    rows, masks = cases.packed(sizes, d, dtype=dtype, seed=seed + 1, make=cases.gauss), {}
    if dense:
        padded, lengths = cases.padded(rows)
        documents, masks = (
            quantize_int8(padded, granularity, affine=affine, lengths=lengths),
            {"document_lengths": lengths},
        )
    else:
        documents = quantize_int8(rows, granularity, affine=affine)
    used = quantize_int8(queries).dequantize() if quantize_queries else queries
    truth = oracle.maxsim(used, documents, **masks)
    scores = maxsim(queries, documents, **masks, quantize_queries=quantize_queries, impl=impl)
    oracle.check(scores, truth, tol.SCORE_AFFINE if affine else tol.SCORE_QUANTIZED)


@REPEATABLE
@given(dtype=DTYPES, sizes=RAGGED, Lq=LENGTH, d=WIDTH, seed=SEED)
def test_real_values_stay_within_the_bound(impl, dtype, sizes, Lq, d, seed):
    queries = cases.gauss(2, Lq, d, dtype=dtype, seed=seed)
    documents = cases.packed(sizes, d, dtype=dtype, seed=seed + 1, make=cases.gauss)
    truth = oracle.maxsim(queries, documents)
    scores, argmax = maxsim(queries, documents, return_argmax=True, impl=impl)
    oracle.check(scores, truth, tol.SCORE)
    oracle.check_argmax(argmax, truth, tol.SCORE)
    oracle.check(maxsim_reference(queries, documents, dtype=torch.float64), truth, tol.REFERENCE_FLOAT64, torch.float64)


SPOTS = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from([np.nan, np.inf, -np.inf])), max_size=4
)


@REPEATABLE
@given(dtype=DTYPES, q_sizes=RAGGED, d_sizes=RAGGED, d=WIDTH, q_spots=SPOTS, d_spots=SPOTS, dense=st.booleans(), seed=SEED)
def test_non_finite_values_in_valid_tokens(impl, dtype, q_sizes, d_sizes, d, q_spots, d_spots, dense, seed):
    """NaN and Inf reach exactly the scores that their tokens belong to, as IEEE arithmetic has them."""
    queries = cases.packed(q_sizes, d, dtype=dtype, seed=seed)
    documents = cases.packed(d_sizes, d, dtype=dtype, seed=seed + 1)
    for rows, spots in ((queries, q_spots), (documents, d_spots)):
        for token, column, value in spots:
            if len(rows.values):
                rows.values[token % len(rows.values), column % d] = value
    truth, lengths = oracle.maxsim(queries, documents), {}
    if dense:
        documents, lengths["document_lengths"] = cases.padded(documents)
    scores, argmax = maxsim(queries, documents, return_argmax=True, impl=impl, **lengths)
    oracle.check(scores, truth)
    oracle.check_argmax(argmax, truth)


@REPEATABLE
@given(sizes=st.lists(LENGTH, min_size=1, max_size=6), Lq=LENGTH, d=WIDTH, seed=SEED, data=st.data())
def test_order_and_company_leave_the_bits_alone(impl, sizes, Lq, d, seed, data):
    queries, documents = cases.gauss(3, Lq, d, seed=seed), cases.packed(sizes, d, seed=seed + 1, make=cases.gauss)
    scores = maxsim(queries, documents, impl=impl)
    order = torch.tensor(data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8)), dtype=torch.int64)
    assert cases.same_bits(maxsim(queries, documents.select(order), impl=impl), scores[:, order])
    assert cases.same_bits(maxsim(queries.flip(0), documents, impl=impl), scores.flip(0))
    dense, lengths = cases.padded(documents, max(sizes) + data.draw(st.integers(0, 70)))
    assert cases.same_bits(maxsim(queries, dense, document_lengths=lengths, impl=impl), scores)


@REPEATABLE
@given(Lq=st.integers(1, 9), Ld=st.integers(1, 40), d=WIDTH, seed=SEED, data=st.data())
def test_algebra(impl, Lq, Ld, d, seed, data):
    """Exact on the grid: token order is irrelevant, scaling by 2 scales, queries add up, a document's maximum only grows."""
    queries, documents = cases.grid(2, Lq, d, seed=seed), cases.grid(3, Ld, d, seed=seed + 1)
    scores = maxsim(queries, documents, impl=impl)
    generator = torch.Generator().manual_seed(seed)
    shuffled = documents[:, torch.randperm(Ld, generator=generator)]
    assert torch.equal(maxsim(queries[:, torch.randperm(Lq, generator=generator)], shuffled, impl=impl), scores)
    assert torch.equal(maxsim(2 * queries, documents, impl=impl), 2 * scores)
    cut = data.draw(st.integers(0, Lq))
    assert torch.equal(maxsim(queries[:, :cut], documents, impl=impl) + maxsim(queries[:, cut:], documents, impl=impl), scores)
    fewer = data.draw(st.integers(1, Ld))
    assert bool((maxsim(queries, documents[:, :fewer], impl=impl) <= scores).all())
    assert torch.equal(maxsim(queries, torch.cat([documents, documents[:, :1]], dim=1), impl=impl), scores)
