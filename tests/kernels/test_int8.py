"""`maxsim` and `maxsim_pairs` over INT8 tokens, symmetric and affine, at every granularity."""

from __future__ import annotations

import pytest
import torch

import oracle
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import Int8Tokens, Packed, maxsim, maxsim_pairs, quantize_int8

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
GRANULARITIES = ["token", "document", "corpus"]
LENGTHS = [3, 0, 31, 1, 7]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("affine", [False, True])
def test_non_finite_tokens(impl, bad, layout, affine):
    tokens = cases.either(layout)
    where = (2, 4) if layout == "dense" else (5,)  # in the third document either way
    cases.values_of(tokens)[where][7] = bad
    stored = quantize_int8(tokens, "token", affine=affine)
    scales = stored.scales.isnan()
    assert bool(scales[where])
    assert int(scales.sum()) == 1
    for quantize_queries in (True, False):
        scores = maxsim(cases.gauss(2, 3, 24), stored, quantize_queries=quantize_queries, impl=impl)
        assert scores.isnan().any(0).nonzero().tolist() == [[2]]
        assert scores[:, 2].isnan().all()
    for granularity in ("document", "corpus"):
        with pytest.raises(ValueError, match="finite"):
            quantize_int8(tokens, granularity, affine=affine)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("by", ["mask", "lengths", "both"])
def test_padding_never_sets_a_scale(impl, granularity, affine, by):
    tokens, masks = cases.gauss(5, 9, 24, seed=1), {}
    if by != "lengths":
        masks["mask"] = cases.mask(5, 9)
    if by != "mask":
        masks["lengths"] = cases.lengths(5, high=9)
    valid = cases.valid(9, **{"mask": None, "lengths": None} | masks)
    clean = quantize_int8(tokens.masked_fill(~valid[..., None], 0.0), granularity, affine=affine, **masks)
    stored = quantize_int8(cases.dirty(tokens, valid), granularity, affine=affine, **masks)
    if granularity == "token":
        assert torch.equal(stored.scales[valid], clean.scales[valid])
    else:
        assert torch.equal(stored.scales, clean.scales)
        assert stored.scales.isfinite().all()
    assert torch.equal(stored.codes[valid], clean.codes[valid])
    queries, names = cases.gauss(3, 4, 24), {f"document_{name}": value for name, value in masks.items()}
    truth = oracle.maxsim(queries, stored, **names)
    tolerance = tol.SCORE_AFFINE if affine else tol.SCORE_QUANTIZED
    oracle.check(maxsim(queries, stored, **names, quantize_queries=False, impl=impl), truth, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("quantize_queries", [True, False])
def test_scores(impl, dtype, layout, granularity, affine, quantize_queries):
    queries = cases.gauss(3, 20, 24, dtype=dtype)
    documents = quantize_int8(cases.either(layout), granularity, affine=affine)
    used = quantize_int8(queries).dequantize() if quantize_queries else queries
    truth = oracle.maxsim(used, documents)
    scores = maxsim(queries, documents, quantize_queries=quantize_queries, impl=impl)
    oracle.check(scores, truth, tol.SCORE_AFFINE if affine else tol.SCORE_QUANTIZED)


@pytest.mark.parametrize("d", [1, 7, 31, 63, 100, 1000])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("quantize_queries", [True, False])
def test_widths(impl, d, granularity, quantize_queries):
    queries, documents = cases.gauss(2, 3, d), quantize_int8(cases.either("packed", d), granularity)
    used = quantize_int8(queries).dequantize() if quantize_queries else queries
    scores = maxsim(queries, documents, quantize_queries=quantize_queries, impl=impl)
    oracle.check(scores, oracle.maxsim(used, documents), tol.SCORE_QUANTIZED)


def test_integer_products_are_exact(impl):
    """Codes of 127 at d = 1000: 16,129,000 needs all 24 bits; with unit scales the score is that integer."""
    documents = Int8Tokens(torch.full((1, 1, 1000), 127, dtype=torch.int8), torch.ones((), dtype=torch.float16))
    documents.codes[0, 0, 0] = 126
    queries = torch.full((1, 1000), 127.0)
    for quantize_queries in (True, False):
        score = maxsim(queries, documents, quantize_queries=quantize_queries, impl=impl)
        assert score.tolist() == [127.0 * 127 * 999 + 127 * 126]


def test_quantized_queries_are_the_default(impl):
    queries, documents = cases.gauss(3, 4, 24), quantize_int8(cases.either("dense"))
    scores = maxsim(queries, documents, impl=impl)
    assert cases.same_bits(scores, maxsim(queries, documents, quantize_queries=True, impl=impl))
    assert not torch.equal(scores, maxsim(queries, documents, quantize_queries=False, impl=impl))


@pytest.mark.parametrize("quantize_queries", [True, False])
def test_packed_and_masked_queries(impl, quantize_queries):
    documents = quantize_int8(cases.either("packed"))
    rows = cases.packed([4, 0, 20], 24, make=cases.gauss)
    used = quantize_int8(rows).dequantize() if quantize_queries else rows
    truth = oracle.maxsim(used, documents)
    oracle.check(maxsim(rows, documents, quantize_queries=quantize_queries, impl=impl), truth, tol.SCORE_QUANTIZED)
    dense, lengths = cases.padded(rows)
    scores = maxsim(dense, documents, query_lengths=lengths, quantize_queries=quantize_queries, impl=impl)
    oracle.check(scores, truth, tol.SCORE_QUANTIZED)


@pytest.mark.parametrize("quantize_queries", [True, False])
def test_nan_in_a_query_token_is_never_hidden(impl, quantize_queries):
    queries = cases.gauss(3, 4, 24)
    queries[1, 2, 3] = float("nan")
    scores = maxsim(queries, quantize_int8(cases.either("dense")), quantize_queries=quantize_queries, impl=impl)
    assert scores.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("affine", [False, True])
def test_negative_maxima_and_empty_documents(impl, layout, granularity, affine):
    rows = cases.packed(LENGTHS, 24, seed=1, make=cases.gauss)
    rows = rows.with_values(-rows.values.abs())
    queries, masks = cases.gauss(2, 3, 24).abs(), {}
    if layout == "packed":
        documents = quantize_int8(rows, granularity, affine=affine)
    else:
        dense, lengths = cases.padded(rows)
        documents = quantize_int8(dense, granularity, affine=affine, lengths=lengths)
        masks = {"document_lengths": lengths}
    scores = maxsim(queries, documents, **masks, quantize_queries=False, impl=impl)
    assert bool((scores < 0).all())
    assert scores[:, 1].eq(float("-inf")).all()
    truth = oracle.maxsim(queries, documents, **masks)
    oracle.check(scores, truth, tol.SCORE_AFFINE if affine else tol.SCORE_QUANTIZED)


@pytest.mark.parametrize(("Nq", "Lq", "B", "Ld"), [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zero_sizes(impl, Nq, Lq, B, Ld, granularity):
    queries, documents = cases.grid(Nq, Lq, 8), quantize_int8(cases.grid(B, Ld, 8), granularity)
    for quantize_queries in (True, False):
        scores = maxsim(queries, documents, quantize_queries=quantize_queries, impl=impl)
        oracle.check(scores, oracle.maxsim(queries, documents))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("affine", [False, True])
def test_select(impl, granularity, affine):
    documents = quantize_int8(cases.either("packed"), granularity, affine=affine)
    queries, chosen = cases.gauss(2, 3, 24), torch.tensor([4, 0, 4, 1])
    assert cases.same_bits(
        maxsim(queries, documents.select(chosen), impl=impl), maxsim(queries, documents, impl=impl)[:, chosen]
    )


@pytest.mark.parametrize("granularity", ["token", "corpus"])
def test_quantized_views(impl, granularity):
    view = Packed.view(cases.gauss(30, 24), torch.tensor([20, 0, 5, 5]), torch.tensor([10, 3, 12, 0]))
    documents = quantize_int8(view, granularity)
    queries = cases.gauss(2, 3, 24, seed=2)
    truth = oracle.maxsim(queries, documents)
    oracle.check(maxsim(queries, documents, quantize_queries=False, impl=impl), truth, tol.SCORE_QUANTIZED)


@pytest.mark.parametrize("quantize_queries", [True, False])
@pytest.mark.parametrize("affine", [False, True])
def test_per_query_documents(impl, quantize_queries, affine):
    queries, tokens = cases.gauss(3, 5, 24), cases.gauss(3, 4, 9, 24, seed=1)
    lengths = cases.lengths(12, high=9).view(3, 4)
    used = quantize_int8(queries).dequantize() if quantize_queries else queries
    for granularity in GRANULARITIES:
        documents = quantize_int8(tokens, granularity, affine=affine, lengths=lengths)
        scores = maxsim(queries, documents, document_lengths=lengths, quantize_queries=quantize_queries, impl=impl)
        truth = oracle.maxsim(used, documents, document_lengths=lengths)
        oracle.check(scores, truth, tol.SCORE_AFFINE if affine else tol.SCORE_QUANTIZED)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("ragged", [True, False])
def test_pairs(impl, granularity, affine, ragged):
    tokens = cases.packed([9, 0, 4], 24, make=cases.gauss) if ragged else cases.gauss(3, 9, 24)
    documents, queries = quantize_int8(tokens, granularity, affine=affine), cases.gauss(3, 5, 24, seed=1)
    for quantize_queries in (True, False):
        used = quantize_int8(queries).dequantize() if quantize_queries else queries
        scores = maxsim_pairs(queries, documents, quantize_queries=quantize_queries, impl=impl)
        oracle.check(scores, oracle.pairs(used, documents), tol.SCORE_AFFINE if affine else tol.SCORE_QUANTIZED)


@pytest.mark.parametrize("quantize_queries", [True, False])
def test_strided_codes(impl, quantize_queries):
    stored, queries = quantize_int8(cases.either("dense")), cases.gauss(3, 5, 24)
    scales = torch.stack([stored.scales, stored.scales], dim=-1)[..., 0]
    strided = Int8Tokens(stored.codes.transpose(1, 2).contiguous().transpose(1, 2), scales)
    need = maxsim(queries, stored, quantize_queries=quantize_queries, impl=impl)
    assert cases.same_bits(maxsim(queries, strided, quantize_queries=quantize_queries, impl=impl), need)
    expanded = Int8Tokens(stored.codes[:1].expand(4, 9, 24), stored.scales[:1].expand(4, 9))
    scores = maxsim(queries, expanded, quantize_queries=quantize_queries, impl=impl)
    assert cases.same_bits(scores, need[:, :1].expand(3, 4).contiguous())


@pytest.mark.parametrize("d", [1030, 1050, 3000])
@pytest.mark.parametrize("quantize_queries", [True, False])
def test_very_wide(impl, d, quantize_queries):
    """Past d = 1040 an integer sum may need more than FP32's 24 bits."""
    queries, documents = cases.gauss(2, 3, d).abs(), quantize_int8(cases.gauss(3, 4, d, seed=1).abs(), "document")
    used = quantize_int8(queries).dequantize() if quantize_queries else queries
    scores = maxsim(queries, documents, quantize_queries=quantize_queries, impl=impl)
    oracle.check(scores, oracle.maxsim(used, documents), tol.SCORE_QUANTIZED)


def test_one_corpus_scale_for_every_block(impl):
    """Streaming: blocks quantised with the corpus's scale score as the corpus does."""
    rows = cases.packed([5, 3, 7, 2, 9, 1], 24, make=cases.gauss)
    whole, queries = quantize_int8(rows, "corpus"), cases.gauss(2, 3, 24, seed=3)
    parts = [quantize_int8(rows.select(torch.arange(n, n + 2)).compact(), "corpus", scale=whole.scales) for n in (0, 2, 4)]
    scores = torch.cat([maxsim(queries, part, impl=impl) for part in parts], dim=1)
    assert cases.same_bits(scores, maxsim(queries, whole, impl=impl))


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_gradients_are_refused(impl, layout):
    documents = quantize_int8(cases.either(layout))
    for quantize_queries in (True, False):
        with pytest.raises(ValueError, match="gradient"):
            maxsim(cases.gauss(2, 3, 24).requires_grad_(), documents, quantize_queries=quantize_queries, impl=impl)
    with torch.no_grad():
        maxsim(cases.gauss(2, 3, 24).requires_grad_(), documents, impl=impl)
