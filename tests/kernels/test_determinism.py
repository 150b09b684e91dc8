"""The same inputs give the same bits: for every position, batch composition, cut of the corpus and layout."""

from __future__ import annotations

import pytest
import torch

from inputs import on_cpu as cases
from maxsim_kernels import Packed, maxsim, maxsim_pairs, pack, quantize_fp8, quantize_int8

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
LENGTHS = [3, 40, 0, 31, 1, 7, 129, 20, 64, 65]
D = 128


@pytest.fixture
def rows():
    return lambda dtype=torch.float32: cases.packed(LENGTHS, D, dtype=dtype, seed=1, make=cases.gauss)


@pytest.fixture(params=[1, 16], ids=lambda n: f"{n} queries")
def queries(request):
    return lambda dtype=torch.float32: cases.gauss(request.param, 9, D, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_calls(impl, rows, queries, dtype):
    q, documents = queries(dtype), rows(dtype)
    first = maxsim(q, documents, impl=impl)
    for _ in range(2):
        assert cases.same_bits(maxsim(q, documents, impl=impl), first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(impl, rows, queries, dtype):
    """Dense with any amount of padding, packed, scattered view, lengths or mask."""
    q, documents = queries(dtype), rows(dtype)
    first = maxsim(q, documents, impl=impl)
    assert cases.same_bits(maxsim(q, cases.scattered(documents), impl=impl), first)
    for size in (129, 200, 256):
        dense, lengths = cases.padded(documents, size)
        assert cases.same_bits(maxsim(q, dense, document_lengths=lengths, impl=impl), first), size
        mask = torch.arange(size) < lengths[:, None]
        assert cases.same_bits(maxsim(q, dense, document_mask=mask, impl=impl), first), size


@pytest.mark.parametrize("dtype", DTYPES)
def test_cuts(impl, rows, queries, dtype):
    q, documents = queries(dtype), rows(dtype)
    first, n = maxsim(q, documents, impl=impl), len(LENGTHS)
    for size in (1, 3, 7):
        parts = [documents.select(torch.arange(start, min(start + size, n))) for start in range(0, n, size)]
        for compact in (False, True):
            cut = [maxsim(q, part.compact() if compact else part, impl=impl) for part in parts]
            assert cases.same_bits(torch.cat(cut, dim=1), first), (size, compact)


def test_cuts_of_a_larger_corpus(impl, queries, two_threads):
    """100 documents of some 60 tokens: many tiles, cut where no tile ends."""
    documents = cases.packed(cases.lengths(100, high=120), D, seed=1, make=cases.gauss)
    q = queries()
    first = maxsim(q, documents, impl=impl)
    for size in (1, 37, 99):
        chunks = torch.arange(100).split(size)
        assert cases.same_bits(torch.cat([maxsim(q, documents.select(chunk), impl=impl) for chunk in chunks], dim=1), first)


def test_more_query_tokens_than_one_block(impl, two_threads):
    """5,000 query tokens, which the reference takes in two blocks of columns: cuts and orders of the corpus change no bit."""
    q = cases.packed([40] * 100 + [1000], D, make=cases.gauss)
    documents = cases.packed([*cases.lengths(50, high=90).tolist(), 0, 300], D, seed=1, make=cases.gauss)
    first = maxsim(q, documents, impl=impl)
    for size in (1, 19):
        chunks = torch.arange(52).split(size)
        assert cases.same_bits(torch.cat([maxsim(q, documents.select(chunk), impl=impl) for chunk in chunks], dim=1), first)
    order = torch.randperm(52, generator=torch.Generator().manual_seed(0))
    assert cases.same_bits(maxsim(q, documents.select(order).compact(), impl=impl), first[:, order])


def test_dense_batches(impl, queries, two_threads):
    q, documents = queries(), cases.gauss(50, 60, D, seed=1)
    first = maxsim(q, documents, impl=impl)
    for size in (1, 7, 49):
        assert cases.same_bits(torch.cat([maxsim(q, part, impl=impl) for part in documents.split(size)], dim=1), first), size
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert cases.same_bits(maxsim(q, documents[order], impl=impl), first[:, order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_document_order(impl, rows, queries, dtype):
    q, documents = queries(dtype), rows(dtype)
    first = maxsim(q, documents, impl=impl)
    for seed in range(2):
        order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(seed))
        assert cases.same_bits(maxsim(q, documents.select(order), impl=impl), first[:, order])
        assert cases.same_bits(maxsim(q, documents.select(order).compact(), impl=impl), first[:, order])


def test_neighbours_do_not_matter(impl, rows, queries, two_threads):
    """A document's score with quite other documents around it, NaN and huge ones included."""
    q, documents = queries(), rows()
    first = maxsim(q, documents, impl=impl)
    for n in range(len(LENGTHS)):
        for other in (float("nan"), 1e30, 0.0):
            near = torch.full((11, D), other)
            among = pack([near, documents[n], near[:3], near[:0], documents[n]])
            scores = maxsim(q, among, impl=impl)
            assert cases.same_bits(scores[:, 1], first[:, n])
            assert cases.same_bits(scores[:, 4], first[:, n])


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_positions(impl, rows, dtype):
    """The same number of queries: any order, any company."""
    q, documents = cases.gauss(6, 20, D, dtype=dtype), rows(dtype)
    first = maxsim(q, documents, impl=impl)
    for shift in range(1, 6):
        assert cases.same_bits(maxsim(q.roll(shift, 0), documents, impl=impl), first.roll(shift, 0))
    company = cases.gauss(6, 20, D, dtype=dtype, seed=5)
    for n in range(6):
        company[n] = q[2]
        assert cases.same_bits(maxsim(company, documents, impl=impl)[n], first[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(impl, rows, queries, dtype):
    q, documents = queries(dtype), rows(dtype)
    first = maxsim(q, documents, impl=impl)
    values = documents.values.T.contiguous().T
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert cases.same_bits(maxsim(strided, documents.with_values(values), impl=impl), first)


@pytest.mark.parametrize("granularity", ["token", "document", "corpus"])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("quantize_queries", [True, False])
def test_int8(impl, rows, queries, granularity, affine, quantize_queries):
    q, documents = queries(), quantize_int8(rows(), granularity, affine=affine)
    options = {"quantize_queries": quantize_queries, "impl": impl}
    first = maxsim(q, documents, **options)
    assert cases.same_bits(maxsim(q, documents, **options), first)
    for size in (1, 3):
        parts = torch.arange(len(LENGTHS)).split(size)
        assert cases.same_bits(torch.cat([maxsim(q, documents.select(part), **options) for part in parts], dim=1), first)
    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(0))
    assert cases.same_bits(maxsim(q, documents.select(order), **options), first[:, order])
    dense, lengths = cases.padded(rows(), 150)
    same = quantize_int8(dense, granularity, affine=affine, lengths=lengths)
    assert cases.same_bits(maxsim(q, same, document_lengths=lengths, **options), first)


def test_fp8(impl, rows, queries):
    q, documents = queries(), quantize_fp8(rows())
    first = maxsim(q, documents, impl=impl)
    parts = [documents.select(part) for part in torch.arange(len(LENGTHS)).split(3)]
    assert cases.same_bits(torch.cat([maxsim(q, part, impl=impl) for part in parts], dim=1), first)


def test_argmax_and_gradient_requests_do_not_change_scores(impl, rows, queries):
    q, documents = queries(), rows()
    first = maxsim(q, documents, impl=impl)
    assert cases.same_bits(maxsim(q, documents, return_argmax=True, impl=impl)[0], first)
    documents.values.requires_grad_()
    assert cases.same_bits(maxsim(q.requires_grad_(), documents, impl=impl).detach(), first)


def test_gradients_repeat(impl, rows, queries, two_threads):
    q, documents = queries().requires_grad_(), rows()
    documents.values.requires_grad_()
    upstream = cases.gauss(len(q), len(LENGTHS))
    runs = [torch.autograd.grad(maxsim(q, documents, impl=impl), (q, documents.values), upstream) for _ in range(3)]
    for again in runs[1:]:
        assert torch.equal(again[0], runs[0][0])
        assert torch.equal(again[1], runs[0][1])


def test_per_query_documents(impl):
    q, documents = cases.gauss(4, 20, D), cases.gauss(4, 6, 40, D, seed=1)
    first = maxsim(q, documents, impl=impl)
    assert cases.same_bits(torch.cat([maxsim(q, part, impl=impl) for part in documents.split(2, dim=1)], dim=1), first)
    assert cases.same_bits(maxsim(q.flip(0), documents.flip(0), impl=impl), first.flip(0))
    assert cases.same_bits(maxsim(q, documents.flip(1), impl=impl), first.flip(1))


def test_pairs(impl, rows):
    documents = rows()
    q = cases.packed([20, 1, 7, 0, 33, 20, 5, 5, 64, 2], D, make=cases.gauss)
    first = maxsim_pairs(q, documents, impl=impl)
    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(0))
    assert cases.same_bits(maxsim_pairs(q.select(order), documents.select(order), impl=impl), first[order])
    assert cases.same_bits(maxsim_pairs(cases.scattered(q), cases.scattered(documents), impl=impl), first)


def test_pairs_by_themselves(impl):
    """Also of lengths that are no whole runs of rows, which a matrix library would leave to kernels that add in another order."""
    q = cases.packed([1 + n % 37 for n in range(80)], 48, make=cases.gauss)
    documents = cases.packed([n * 7 % 61 for n in range(80)], 48, make=cases.gauss, seed=1)
    first = maxsim_pairs(q, documents, impl=impl)
    for size in (1, 7, 33):
        cuts = torch.arange(80).split(size)
        parts = [maxsim_pairs(q.select(cut), documents.select(cut), impl=impl) for cut in cuts]
        assert cases.same_bits(torch.cat(parts), first), f"{size} pairs a call"


def test_deterministic_mode_changes_no_bit(impl, rows, queries, deterministic):
    q, documents = queries(), rows()
    inside = maxsim(q, documents, impl=impl)
    torch.use_deterministic_algorithms(False)
    assert cases.same_bits(maxsim(q, documents, impl=impl), inside)


def test_views_of_one_buffer(impl, queries):
    """Overlapping rows score as copies of them do."""
    values, q = cases.gauss(200, D), queries()
    starts, lengths = torch.tensor([100, 0, 3, 50, 199]), torch.tensor([64, 200, 65, 50, 1])
    view = Packed.view(values, starts, lengths)
    assert cases.same_bits(maxsim(q, view, impl=impl), maxsim(q, view.compact(), impl=impl))
