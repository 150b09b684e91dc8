"""`BitTokens` and `ResidualTokens` on the CPU: against a decode of a few lines, and everything they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import coded_cases as cases
from inputs import on_cpu as make
from maxsim_eval.codecs.bits import pack_bits, packed_size
from maxsim_kernels import BitTokens, Int8Tokens, Packed, ResidualTokens, api, explain, maxsim, maxsim_pairs, maxsim_reference
from maxsim_kernels.coded import coded_blocks, packed_bytes, unpacked
from maxsim_kernels.cpu import integers

KINDS = ["bits", "unit", "free"]
BITS = [1, 2, 4]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [1, 7, 8, 9, 96, 128])
def test_bytes_are_those_of_the_codecs(bits, dim):
    codes = torch.randint(0, 2**bits, (5, dim), dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.shape[1] == packed_bytes(dim, bits) == packed_size(dim, bits)
    assert torch.equal(unpacked(packed, dim, bits), codes)
    assert torch.equal(cases.pack(codes, bits), packed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
def test_dequantized_values(kind, bits):
    documents = cases.coded(kind, bits, 31)
    found = documents.dequantize()
    assert found.dtype == torch.float32
    assert torch.equal(found.offsets, documents.codes.offsets)
    torch.testing.assert_close(found.values.double(), cases.values_of(documents), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["unit", "free"])
def test_decoded_residuals_are_differentiable_in_their_codebooks(kind):
    documents = cases.coded(kind, 2, 31)
    books = [documents.centroids.requires_grad_(), documents.weights.requires_grad_()]
    found = documents.dequantize().values
    tokens = documents.centroids[documents.ids.long()] + documents.weights[unpacked(documents.codes.values, 31, 2).int()]
    need = torch.nn.functional.normalize(tokens, dim=1) if kind == "unit" else tokens
    upstream = make.gauss(*need.shape, dtype=torch.float32)
    for got, want in zip(torch.autograd.grad(found, books, upstream), torch.autograd.grad(need, books, upstream), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [1, 7, 31, 63, 100, 128])
def test_scores(impl, kind, bits, dim):
    documents = cases.coded(kind, bits, dim)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        queries = make.gauss(3, 7, dim, dtype=dtype)
        for quantize_queries in (True, False):
            scores = cases.agree(queries, documents, impl=impl, quantize_queries=quantize_queries)
            assert bool((scores[:, [1, 7]] == -torch.inf).all())
        alone = maxsim(queries[0], documents, impl=impl, quantize_queries=False)
        assert alone.shape == (8,)
        torch.testing.assert_close(alone, scores[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_whole_numbers_are_scored_as_int8(impl, bits):
    documents = cases.coded("bits", bits, 100)
    levels = 2 * cases.digits_of(documents.codes.values, 100, bits) - (2**bits - 1)
    stored = Int8Tokens(documents.codes.with_values(levels.to(torch.int8)), documents.scales, granularity="token")
    queries = make.gauss(3, 7, 100)
    for quantize_queries in (True, False):
        got, need = (maxsim(queries, one, impl=impl, quantize_queries=quantize_queries) for one in (documents, stored))
        assert make.same_bits(got, need)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_and_packed_queries(impl, kind):
    documents = cases.coded(kind, 2, 31)
    asked = make.masks("both", "query", 4, 9)
    queries = make.dirty(make.gauss(4, 9, 31), asked["query_mask"], asked["query_lengths"])
    cases.agree(queries, documents, impl=impl, **asked)
    rows = make.packed([4, 0, 31, 1], 31)
    cases.agree(rows, documents, impl=impl)
    cases.agree(make.scattered(rows), documents, impl=impl)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs(impl, kind, monkeypatch):
    documents = cases.coded(kind, 4, 31)
    asked = make.masks("both", "query", 8, 9)
    queries = make.dirty(make.gauss(8, 9, 31), asked["query_mask"], asked["query_lengths"])
    whole = cases.agree(queries, documents, pairs=True, impl=impl, **asked)
    rows = make.packed([4, 0, 31, 1, 2, 3, 7, 1], 31)
    packed = cases.agree(rows, documents, pairs=True, impl=impl)
    monkeypatch.setattr(api, "CODED_TOKENS", 40)
    assert make.same_bits(whole, maxsim_pairs(queries, documents, impl=impl, **asked))
    assert make.same_bits(packed, maxsim_pairs(rows, documents, impl=impl))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 32, 64])
def test_blocks_change_no_bit(impl, kind, most, monkeypatch):
    documents = cases.coded(kind, 2, 100)
    queries = make.gauss(3, 7, 100)
    whole = maxsim(queries, documents, impl=impl)
    monkeypatch.setattr(api, "CODED_TOKENS", most)
    assert make.same_bits(whole, maxsim(queries, documents, impl=impl))
    blocks = list(coded_blocks(documents, most))
    assert all(len(block.codes.values) <= most or len(block) == 1 for block in blocks)
    assert sum(len(block) for block in blocks) == len(documents)


@pytest.mark.parametrize("kind", KINDS)
def test_views(impl, kind):
    documents = cases.coded(kind, 2, 31)
    queries = make.gauss(3, 7, 31)
    whole = maxsim(queries, documents, impl=impl)
    chosen = [5, 3, 3, 0, 7]
    assert make.same_bits(maxsim(queries, documents.select(chosen), impl=impl), whole[:, chosen])
    wide = torch.cat([documents.codes.values, torch.full_like(documents.codes.values, 255)], 1)[:, : documents.codes.dim]
    assert make.same_bits(maxsim(queries, replace(documents, codes=documents.codes.with_values(wide)), impl=impl), whole)
    with pytest.raises(IndexError):
        documents.select([8])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_score(impl, kind):
    for lengths, shape in (((), (3, 0)), ((0, 0), (3, 2))):
        scores = maxsim(make.gauss(3, 7, 16), cases.coded(kind, 1, 16, lengths), impl=impl)
        assert scores.shape == shape
        assert bool((scores == -torch.inf).all())
    documents = cases.coded(kind, 1, 16)
    assert bool((maxsim(make.gauss(3, 0, 16), documents, impl=impl) == 0).all())
    assert maxsim(make.gauss(0, 7, 16), documents, impl=impl).shape == (0, 8)


def test_nan_scales_are_never_hidden(impl):
    documents = cases.coded("bits", 2, 31)
    documents.scales[20] = torch.nan
    for quantize_queries in (True, False):
        scores = cases.agree(make.gauss(3, 7, 31), documents, impl=impl, quantize_queries=quantize_queries)
        assert scores.isnan().any(0).nonzero().tolist() == [[2]]


def test_nan_centroids_and_zero_tokens(impl):
    documents = cases.coded("unit", 2, 31, centroids=200)
    documents.centroids[int(documents.ids[20]), 3] = torch.nan
    scores = cases.agree(make.gauss(3, 7, 31), documents, impl=impl)
    assert bool(scores[:, 2].isnan().all())
    zeros = replace(documents, centroids=torch.zeros(200, 31), weights=torch.zeros(4))
    scores = maxsim(make.gauss(3, 7, 31), zeros, impl=impl)
    assert bool(((scores == 0) | (scores == -torch.inf)).all())


def test_the_reference_in_float64():
    for kind in KINDS:
        documents = cases.coded(kind, 4, 31)
        need, _ = cases.truth(make.gauss(3, 7, 31), documents)
        found = maxsim_reference(make.gauss(3, 7, 31), documents, dtype=torch.float64)
        torch.testing.assert_close(found, need, rtol=1e-6, atol=1e-6)


def test_ids_of_every_dtype(impl):
    documents = cases.coded("unit", 2, 31)
    queries = make.gauss(3, 7, 31)
    for dtype in (torch.int32, torch.int64):
        other = replace(documents, ids=documents.ids.to(dtype))
        assert make.same_bits(maxsim(queries, documents, impl=impl), maxsim(queries, other, impl=impl))
    cases.agree(queries, replace(documents, centroids=documents.centroids.half()), impl=impl)


PACKED = Packed(torch.zeros(3, 4, dtype=torch.uint8), torch.tensor([0, 1, 3]))
HALF = torch.ones(3).half()
TABLES = {"ids": torch.zeros(3, dtype=torch.int32), "centroids": torch.zeros(5, 16), "weights": torch.zeros(4)}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bits": 3}, "bits: got 3, need 1, 2 or 4"),
        ({"dim": 0}, "dim: got 0"),
        ({"dim": 17}, "codes: got 4 bytes a token, need 5 for 17 codes of 2 bits"),
        ({"codes": PACKED.values}, "codes: got Tensor, need Packed"),
        ({"codes": PACKED.to(torch.int8)}, "codes: got torch.int8, need torch.uint8"),
        ({"scales": torch.ones(2)}, r"scales: got \[2\], need \[3\]"),
        ({"scales": torch.ones(3, dtype=torch.int32)}, "scales: got torch.int32, need a floating dtype"),
        ({"scales": torch.ones(3, device="meta")}, "scales: got a tensor on meta"),
    ],
)
def test_bad_whole_numbers(change, match):
    with pytest.raises(ValueError, match=match):
        BitTokens(**{"codes": PACKED, "scales": HALF, "bits": 2, "dim": 16} | change)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"centroids": torch.zeros(16)}, r"centroids: got \[16\]"),
        ({"centroids": torch.zeros(0, 16)}, r"centroids: got \[0, 16\]"),
        ({"centroids": torch.zeros(5, 16, dtype=torch.float64)}, "centroids: got torch.float64"),
        ({"centroids": torch.zeros(5, 15)}, None),  # 15 codes take as many bytes as 16
        ({"centroids": torch.zeros(5, 17)}, "codes: got 4 bytes a token, need 5"),
        ({"weights": torch.zeros(8)}, r"weights: got \[8\]"),
        ({"weights": torch.zeros(4).half()}, "weights: got torch.float16"),
        ({"ids": torch.zeros(4, dtype=torch.int32)}, r"ids: got \[4\], need \[3\]"),
        ({"ids": torch.zeros(3, dtype=torch.int16)}, "ids: got torch.int16"),
        ({"ids": torch.tensor([0, 5, 1])}, r"ids: got 0\.\.5, need 0\.\.4"),
        ({"ids": torch.tensor([0, -1, 1])}, r"ids: got -1\.\.1, need 0\.\.4"),
    ],
)
def test_bad_residuals(change, match):
    if match is None:
        assert ResidualTokens(PACKED, **TABLES | change).dim == 15
        return
    with pytest.raises(ValueError, match=match):
        ResidualTokens(PACKED, **TABLES | change)


@pytest.mark.parametrize("kind", ["bits", "unit"])
def test_bad_calls(kind):
    documents, queries = cases.coded(kind, 2, 16), make.gauss(3, 7, 16)
    name = type(documents).__name__
    for function in (maxsim, explain):
        with pytest.raises(ValueError, match=f"return_argmax: got True with {name}"):
            function(queries, documents, return_argmax=True)
    for function in (maxsim, maxsim_reference):
        with pytest.raises(ValueError, match=f"requires_grad with {name}"):
            function(queries.requires_grad_(), documents)
        with torch.no_grad():
            function(queries, documents)
    queries = queries.detach()
    with pytest.raises(ValueError, match="documents: got d = 16, need the queries' d = 15"):
        maxsim(queries[..., 1:], documents)
    with pytest.raises(ValueError, match="document_lengths: got a value with Packed"):
        maxsim(queries, documents, document_lengths=torch.ones(8, dtype=torch.int64))
    with pytest.raises(ValueError, match="queries: got list"):
        maxsim([queries], documents)
    with pytest.raises(ValueError, match="impl: got 'triton'"):
        maxsim(queries, documents, impl="triton")
    with pytest.raises(ValueError, match="documents: got 8 documents"):
        maxsim_pairs(queries, documents)
    bad = replace(documents, codes=Packed.view(documents.codes.values, torch.tensor([-1]), torch.tensor([2])))
    with pytest.raises(ValueError, match="bad start"):
        maxsim(queries, bad)


@pytest.mark.parametrize(
    ("kind", "quantize", "line"),
    [
        (
            "bits",
            True,
            "products: whole numbers of 2 bits, INT8 queries (one scale a token), one scale a token after the product",
        ),
        ("bits", False, "products: whole numbers of 2 bits, float32 queries, one scale a token after the product"),
        ("unit", True, "products: centroids and 2-bit residuals in FP32, float32 queries, FP32 accumulation"),
    ],
)
def test_explained(kind, quantize, line):
    said = explain(make.gauss(3, 7, 16, dtype=torch.float32), cases.coded(kind, 2, 16), quantize_queries=quantize)
    slower = integers.said(16) if kind == "bits" and quantize else ""  # on CPUs without VNNI
    assert said.splitlines()[2] == line + slower
    assert said.startswith("cpu: ")
    assert "65,536 tokens at a time" in said
    assert "3 queries x 8 documents (packed), d = 16" in said
