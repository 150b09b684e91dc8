"""`maxsim` with `Packed` documents, queries or both: ragged, views, selections."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch

import oracle
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import Packed, maxsim, pack

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
LENGTHS = [3, 0, 31, 1, 7, 0, 20]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_documents(impl, dtype, index):
    queries, documents = cases.grid(3, 5, 8, dtype=dtype), cases.packed(LENGTHS, 8, dtype=dtype, index=index, seed=1)
    scores = maxsim(queries, documents, impl=impl)
    assert scores.shape == (3, 7)
    oracle.check(scores, oracle.maxsim(queries, documents))
    one = maxsim(queries[0], documents, impl=impl)
    assert one.shape == (7,)
    oracle.check(one, oracle.maxsim(queries[0], documents))


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_values_within_the_bound(impl, dtype):
    queries = cases.packed([20, 0, 33, 5], 96, dtype=dtype, make=cases.gauss)
    documents = cases.packed(LENGTHS, 96, dtype=dtype, seed=1, make=cases.gauss)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents), tol.SCORE)


@pytest.mark.parametrize(
    "lengths", [[1], [7], [31], [63], [100], [1000], [1] * 63, [0] * 7, list(range(31)), [1000, 1, 1]], ids=str
)
def test_lengths(impl, lengths):
    queries, documents = cases.grid(2, 4, 6), cases.packed(lengths, 6, seed=1)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents))


@pytest.mark.parametrize("n", [100, 1000])
def test_many_documents(impl, n):
    queries, documents = cases.grid(2, 3, 4), cases.packed(cases.lengths(n, high=6), 4, seed=1)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents))


@pytest.mark.parametrize("d", [1, 7, 31, 63, 100, 1000])
def test_widths(impl, d):
    queries, documents = cases.packed([3, 1], d), cases.packed([5, 0, 9], d, seed=1)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[4, 0, 20, 1], [1], [31, 33], [130, 7], [0, 0]], ids=str)
def test_packed_queries(impl, dtype, index, lengths):
    queries = cases.packed(lengths, 8, dtype=dtype, index=index)
    dense, counts = cases.padded(cases.packed(LENGTHS, 8, dtype=dtype, seed=1))
    truth = oracle.maxsim(queries, dense, document_lengths=counts)
    oracle.check(maxsim(queries, dense, document_lengths=counts, impl=impl), truth)
    ragged = cases.packed(LENGTHS, 8, dtype=dtype, index=index, seed=1)
    oracle.check(maxsim(queries, ragged, impl=impl), truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_view_with_overlapping_unordered_rows(impl, dtype):
    values = cases.grid(40, 8, dtype=dtype, seed=1)
    starts, lengths = torch.tensor([30, 0, 5, 5, 39, 40, 12]), torch.tensor([10, 40, 7, 9, 1, 0, 0])
    documents = Packed.view(values, starts, lengths)
    queries = cases.grid(3, 5, 8, dtype=dtype)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents))
    as_queries = Packed.view(values, starts, lengths)
    oracle.check(maxsim(as_queries, documents, impl=impl), oracle.maxsim(as_queries, documents))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_view_never_reads_between_its_rows(impl, index):
    rows = cases.packed(LENGTHS, 8, seed=1)
    scattered = cases.scattered(rows)
    view = Packed.view(scattered.values, scattered.starts.to(index), scattered.lengths.to(index))
    queries = cases.grid(3, 5, 8)
    oracle.check(maxsim(queries, view, impl=impl), oracle.maxsim(queries, rows))
    oracle.check(maxsim(view, rows, impl=impl), oracle.maxsim(rows, rows))


def test_view_of_a_models_output(impl):
    output = cases.grid(4, 9, 8, seed=1)  # [B, Ld, d] with real lengths: reranked in place
    lengths = torch.tensor([9, 2, 0, 5])
    documents = Packed.view(output.flatten(0, 1), torch.arange(4) * 9, lengths)
    queries = cases.grid(2, 3, 8)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, output, document_lengths=lengths))


def test_select(impl):
    queries, documents = cases.grid(3, 5, 8), cases.packed(LENGTHS, 8, seed=1)
    chosen = torch.tensor([4, 4, 0, 1, 6])
    whole = oracle.maxsim(queries, documents).scores
    scores = maxsim(queries, documents.select(chosen), impl=impl)
    assert scores.tolist() == whole[:, chosen.numpy()].tolist()
    assert maxsim(queries, documents.select([]), impl=impl).shape == (3, 0)
    again = documents.select(chosen).select(torch.tensor([2]))
    assert maxsim(queries, again, impl=impl).tolist() == whole[:, [0]].tolist()


def test_no_documents_no_queries(impl):
    nothing = pack([], dim=8)
    assert maxsim(cases.grid(3, 5, 8), nothing, impl=impl).shape == (3, 0)
    assert maxsim(cases.grid(5, 8), nothing, impl=impl).shape == (0,)
    assert maxsim(nothing, cases.packed(LENGTHS, 8), impl=impl).shape == (0, 7)
    scores, argmax = maxsim(nothing, nothing, return_argmax=True, impl=impl)
    assert scores.shape == (0, 0)
    assert argmax.shape == (0, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_values(impl, dtype):
    rows = cases.packed(LENGTHS, 9, dtype=dtype, seed=1)
    queries = cases.grid(3, 5, 9, dtype=dtype)
    truth = oracle.maxsim(queries, rows)
    hole = torch.full_like(rows.values, float("nan"))
    for values in (
        rows.values.T.contiguous().T,
        torch.stack([rows.values, hole], dim=1).flatten(0, 1)[::2],
        torch.stack([rows.values, hole], dim=2).flatten(1)[:, ::2],
    ):
        assert not values.is_contiguous()
        oracle.check(maxsim(queries, rows.with_values(values), impl=impl), truth)
    one_token = cases.grid(1, 9, dtype=dtype).expand(62, 9)
    oracle.check(maxsim(queries, rows.with_values(one_token), impl=impl), oracle.maxsim(queries, rows.with_values(one_token)))


def test_query_masks_with_packed_documents(impl):
    documents = cases.packed(LENGTHS, 8, seed=1)
    masks = {"query_mask": cases.mask(3, 20), "query_lengths": torch.tensor([20, 0, 9])}
    queries = cases.dirty(cases.grid(3, 20, 8), cases.valid(20, **{k[6:]: v for k, v in masks.items()}))
    oracle.check(maxsim(queries, documents, **masks, impl=impl), oracle.maxsim(queries, documents, **masks))


def test_document_masks_with_packed_queries(impl):
    queries = cases.packed([4, 0, 20], 8)
    masks = {"document_mask": cases.mask(5, 9), "document_lengths": cases.lengths(5, high=9)}
    documents = cases.dirty(cases.grid(5, 9, 8, seed=1), cases.valid(9, masks["document_mask"], masks["document_lengths"]))
    oracle.check(maxsim(queries, documents, **masks, impl=impl), oracle.maxsim(queries, documents, **masks))


@pytest.mark.parametrize("side", ["queries", "documents"])
def test_nan_in_a_token_is_never_hidden(impl, side):
    queries, documents = cases.packed([4, 1, 20], 8), cases.packed(LENGTHS, 8, seed=1)
    (queries if side == "queries" else documents).values[[3, -1], 2] = float("nan")
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents))


def test_nan_stays_with_its_document(impl):
    documents = cases.packed([3, 4, 5], 8, seed=1)
    documents.values[3:7] = float("nan")
    assert maxsim(cases.grid(2, 8), documents, impl=impl).isnan().tolist() == [False, True, False]


@pytest.mark.slow
def test_buffers_of_more_than_two_to_the_31_elements():
    """Addresses past 2^31 elements; only the few pages that are touched take memory."""
    tokens, d = 2**31 // 64 + 100, 64
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    values = torch.from_numpy(np.zeros((tokens, d), dtype=np.float16))  # calloc: untouched pages take no memory
    last = cases.grid(50, d, dtype=torch.float16, seed=1)
    values[-50:] = last
    resource.setrlimit(resource.RLIMIT_AS, (used + 6 * 2**30, hard))  # a whole-buffer copy to float32 must fail, not swap
    try:
        documents = Packed.view(values, torch.tensor([tokens - 50, tokens - 20, 0]), torch.tensor([30, 20, 5]))
        queries = cases.grid(2, 4, d, dtype=torch.float16)
        small = Packed(torch.cat([last, torch.zeros(5, d).half()]), torch.tensor([0, 30, 50, 55]))
        assert torch.equal(maxsim(queries, documents), maxsim(queries, small))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
