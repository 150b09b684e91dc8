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


@pytest.mark.parametrize("affine", [None, False, True])
def test_scores_beyond_float32_are_infinite_without_a_warning(affine):
    """numpy's casts and products would warn, and a program that turns warnings into errors would stop."""
    tokens = torch.full((8, 8), 1e19)
    documents = pack([torch.full((3, 8), 1e4)])
    held = documents if affine is None else quantize_int8(documents, "document", affine=affine)
    scores = maxsim(tokens * 1e14, held, quantize_queries=False)
    assert torch.isinf(scores).all()
    assert torch.isfinite(maxsim(tokens, held, quantize_queries=False)).all()
