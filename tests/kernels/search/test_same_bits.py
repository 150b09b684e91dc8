"""Exact scores of a few documents on a CPU have the bits of a call with all of them, or that is noticed."""

from __future__ import annotations

import pytest
import torch

from inputs import on_cpu as cases
from maxsim_kernels import Packed, maxsim, pack, quantize_int8, stream_topk
from maxsim_kernels.cpu import batches, some, tiles
from maxsim_kernels.search import exact_topk, rescoring
from search_cases import about, clustered, same


def need_one_order(queries: Packed, documents: Packed) -> None:
    """MKL adds in one order for every shape; skips where another library does not, of long sums, and so nothing is pruned."""
    why = rescoring.why_not_some(queries, documents.dim)
    if why and documents.dim > tiles.INNER and not torch.backends.mkl.is_available():
        assert same(queries, documents, 5, quantize_int8(documents)).fell_back == why
        pytest.skip(why)
    assert why == ""


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("d", [1, 24, 128, 513])
def test_scores_of_some_pairs_have_the_bits_of_a_call_with_all(two_threads, d, share):
    documents = cases.packed([3, 700, 0, 1100, 64, 1, 256, 255, 257], d, make=cases.gauss)
    queries = pack([cases.gauss(n, d, seed=n) for n in (1, 40, 300, 700, 0, 31)])
    need_one_order(queries, documents)
    together, pairs = maxsim(queries, documents), rescoring.Some(queries)
    wanted = torch.rand(6, 9, generator=torch.Generator().manual_seed(d)) < share
    for numbers in (torch.arange(9), torch.tensor([5, 1, 8, 3])):
        few = Packed.view(documents.values, documents.starts[numbers], documents.lengths[numbers])
        asked, found = wanted[:, numbers] & (few.lengths > 0), torch.full((6, len(numbers)), 7.0)
        pairs.score(few, asked, found)
        assert cases.same_bits(found, torch.where(asked, together[:, numbers], torch.tensor(7.0)))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("d", [24, 600])
@pytest.mark.parametrize("refused", ["none", "some", "all"])
def test_documents_one_by_one_have_the_bits_of_a_call_with_all(d, refused, monkeypatch):
    """Queries that want different documents; where a shape's batched products have other bits, all pairs are scored."""
    taken, add = [], batches.add_maxima
    monkeypatch.setattr(some, "add_maxima", lambda *a: taken.append(add(*a)) or taken[-1])
    look = batches.same_bits
    monkeypatch.setattr(batches, "same_bits", {"none": look, "some": lambda r, t, _: t != 32, "all": lambda *_: False}[refused])
    draw = torch.Generator().manual_seed(d)
    lengths = [0, *torch.randint(1, 90, (60,), generator=draw).tolist(), 300, 2, 0]
    documents = cases.packed(lengths, d, make=cases.gauss)
    for held in (documents, cases.scattered(documents), documents.with_values(documents.values.half())):
        queries = pack([cases.gauss(n, d, seed=n).to(held.values.dtype) for n in (5, 40, 0, 12, 9, 300, 7, 31, 8)])
        need_one_order(queries, held)
        together = maxsim(queries, held)
        wanted = (torch.rand(9, len(lengths), generator=draw) < 0.12) & (held.lengths > 0)
        found = torch.full(wanted.shape, 7.0)
        rescoring.Some(queries).score(held, wanted, found)
        assert cases.same_bits(found, torch.where(wanted, together, torch.tensor(7.0)))
    assert taken == [refused == "none"] * 3


def test_batched_products_of_another_order_are_noticed(monkeypatch):
    assert batches.same_bits(64, 96, 128)
    batches.same_bits.cache_clear()
    product = batches.batched
    monkeypatch.setattr(batches, "batched", lambda a, b, out: product(a.flip(2).contiguous(), b.flip(2).contiguous(), out))
    try:
        assert not batches.same_bits(64, 96, 128)
    finally:
        batches.same_bits.cache_clear()


def test_a_matrix_library_that_adds_in_another_order_is_noticed(monkeypatch):
    product = rescoring.product_of

    def other(queries, tokens):
        half = queries.shape[1] // 2
        if tokens.shape[0] == rescoring.LONGEST:
            return product(queries, tokens)
        return product(queries[:, :half].contiguous(), tokens[:, :half].contiguous()) + product(
            queries[:, half:].contiguous(), tokens[:, half:].contiguous()
        )

    monkeypatch.setattr(rescoring, "product_of", other)
    rescoring.same_order.cache_clear()
    try:
        documents = clustered(300, 64, 3)
        stats = same(about(documents, 5, 4), documents, 5, quantize_int8(documents))
        assert stats.fell_back.startswith("the matrix library adds in another order for products of 24 x 16128")
        assert stats.survivors.tolist() == [300] * 5
    finally:
        rescoring.same_order.cache_clear()


def test_shapes_are_those_of_queries_as_they_are_padded(monkeypatch):
    """Padding decides how many queries a product of brute force takes: a shape that adds in another order there is noticed."""
    documents = clustered(300, 64, 3)
    queries, lengths = torch.zeros(128, 186, 64), torch.full((128,), 8)
    queries[:, :8] = cases.gauss(128, 8, 64)
    rows = set()
    product, multiply = rescoring.product_of, tiles.multiply

    def other(left, tokens, out=None):
        """Halves of d, for products that brute force's blocks of 44 padded queries have, and only those."""
        if (left.shape[0], len(tokens) if out is None else tokens.shape[1]) != (384, 2016):
            return product(left, tokens) if out is None else multiply(left, tokens, out)
        rows.add(left.shape[0])
        tokens = tokens if out is not None else tokens.t()
        found = left[:, :32] @ tokens[:32] + left[:, 32:] @ tokens[32:]
        return found if out is None else out.copy_(found)

    monkeypatch.setattr(rescoring, "product_of", other)
    monkeypatch.setattr(tiles, "multiply", other)
    rescoring.same_order.cache_clear()
    try:
        expected = stream_topk(queries, [documents], 5, query_lengths=lengths)
        found = exact_topk(queries, documents, 5, codes=quantize_int8(documents), query_lengths=lengths)
    finally:
        rescoring.same_order.cache_clear()
    assert rows == {384}
    assert cases.same_bits(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2].fell_back.startswith("the matrix library adds in another order for products of 384 x 2016")


def test_reduced_precision_products_are_not_bounded():
    documents = clustered(300, 64, 3)
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        stats = same(about(documents, 5, 4), documents, 5, quantize_int8(documents))
    finally:
        setting.fp32_precision = before
    assert stats.fell_back.startswith("products of float32 may be rounded to bf16")
