"""Documents longer than a tile of the CPU path, next to empty ones: their pieces' maxima belong to the right document."""

from __future__ import annotations

import pytest
import torch

import tolerances as tol
from maxsim_kernels import Packed, maxsim, maxsim_reference, pack, quantize_int8

# With 32 query rows a tile holds 16384 tokens: a document beyond is two pieces or more, an empty one has none, and here there are
# as many pieces as documents.
LENGTHS = [[20001, 0, 1, 15000], [0, 20001, 0, 1, 33000, 0], [16384, 0, 16385, 1]]
INTEGER_LENGTHS = [7000, 0, 1, 300]  # of integer products a tile holds 6144 tokens


def _inputs(lengths: list[int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Packed]:
    generator = torch.Generator().manual_seed(5)
    # A grid of 1/8: every product and sum is exact in FP32, so scores and winners are compared bit for bit.
    queries = torch.randint(-8, 9, (32, 128), generator=generator) / 8
    values = torch.randint(-8, 9, (sum(lengths), 128), generator=generator) / 8
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).cumsum(0)])
    return queries.to(dtype), Packed(values.to(dtype), offsets)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_pieces_next_to_empty_documents(lengths) -> None:
    queries, documents = _inputs(lengths)
    truth, places = maxsim_reference(queries, documents, return_argmax=True)
    assert torch.equal(maxsim(queries, documents), truth)
    scores, winners = maxsim(queries, documents, return_argmax=True)
    assert torch.equal(scores, truth)
    assert torch.equal(winners, places)


@pytest.mark.parametrize("granularity", ["token", "document", "corpus"])
@pytest.mark.parametrize("quantize_queries", [True, False])
def test_pieces_of_codes_next_to_empty_documents(granularity, quantize_queries) -> None:
    queries, documents = _inputs(INTEGER_LENGTHS if quantize_queries else LENGTHS[0])
    codes = quantize_int8(documents, granularity)
    options = {"quantize_queries": quantize_queries}
    truth, places = maxsim_reference(queries, codes, dtype=torch.float64, return_argmax=True, **options)
    scores, winners = maxsim(queries, codes, return_argmax=True, **options)
    bound = tol.SCORE_QUANTIZED * float(queries.norm(dim=-1).sum() * documents.values.norm(dim=-1).max())
    for found in (scores, maxsim(queries, codes, **options)):
        torch.testing.assert_close(found.double(), truth, rtol=0.0, atol=bound)
    assert torch.equal(winners, places)
    assert winners[1].eq(-1).all()


# Documents of one length apart from each other, and some of several pieces.
MIXED = [3, 700, 0, 21, 2500, 1, 21, 0, 64, 4100, 20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_queries_take_documents_in_order_of_length(dtype: torch.dtype) -> None:
    """From 96 query tokens on: packed, at scattered places, and padded with holes; a NaN spoils its own document alone."""
    queries, documents = _inputs(MIXED, dtype)
    queries = torch.stack([queries, queries.flip(0), -queries, queries.roll(1, 1)])
    truth = maxsim_reference(queries, documents)
    assert torch.equal(maxsim(queries, documents), truth)
    back = torch.arange(len(MIXED) - 1, -1, -1)
    scattered = Packed.view(documents.values, documents.starts[back], documents.lengths[back])
    assert torch.equal(maxsim(queries, scattered), truth[:, back])
    padded = torch.full((len(MIXED), max(MIXED) + 5, 128), torch.nan, dtype=dtype)
    mask = torch.zeros(padded.shape[:2], dtype=torch.bool)
    for number, (start, length) in enumerate(zip(documents.starts.tolist(), MIXED, strict=True)):
        places = torch.randperm(padded.shape[1], generator=torch.Generator().manual_seed(number))[:length].sort().values
        padded[number, places], mask[number, places] = documents.values[start : start + length], True
    assert torch.equal(maxsim(queries, padded, document_mask=mask), truth)
    spoilt = documents.values.clone()
    spoilt[int(documents.starts[6]) + 20, 5] = torch.nan
    found = maxsim(queries, documents.with_values(spoilt))
    assert torch.isnan(found[:, 6]).all()
    others = torch.arange(len(MIXED)) != 6
    assert torch.equal(found[:, others], truth[:, others])


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("granularity", ["token", "document", "corpus"])
def test_many_queries_take_codes_in_order_of_length(granularity: str, affine: bool) -> None:
    queries, documents = _inputs(MIXED)
    queries = torch.stack([queries, queries.flip(0), -queries, queries.roll(1, 1)])
    codes = quantize_int8(documents, granularity, affine=affine)
    truth = maxsim_reference(queries, codes, dtype=torch.float64)
    bound = tol.SCORE_QUANTIZED * float(queries.norm(dim=-1).sum(1).max() * documents.values.norm(dim=-1).max())
    found = maxsim(queries, codes)
    torch.testing.assert_close(found.double(), truth, rtol=0.0, atol=bound)
    back = torch.arange(len(MIXED) - 1, -1, -1)
    assert torch.equal(maxsim(queries, codes.select(back)), found[:, back])


@pytest.mark.parametrize("affine", [None, False, True])
def test_scores_beyond_float32_are_infinite_without_a_warning(affine):
    """numpy's casts and products would warn, and a program that turns warnings into errors would stop."""
    tokens = torch.full((8, 8), 1e19)
    documents = pack([torch.full((3, 8), 1e4)])
    held = documents if affine is None else quantize_int8(documents, "document", affine=affine)
    scores = maxsim(tokens * 1e14, held, quantize_queries=False)
    assert torch.isinf(scores).all()
    assert torch.isfinite(maxsim(tokens, held, quantize_queries=False)).all()
