"""Query tokens that come up again and again, as lexical encoders and static embeddings give them: found once, counted each time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maxsim_kernels import Packed, maxsim, maxsim_reference, quantize_int8
from maxsim_kernels.tokens import distinct_rows

WIDTH = 48


def _grid(seed: int, *shape: int) -> torch.Tensor:
    """Multiples of 1/8: products and sums of them are exact, so that scores can be compared bit for bit."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 8


def _repeating(dtype: torch.dtype) -> tuple[Packed, Packed]:
    """Nine queries of 0 to 40 tokens out of 12 vectors, one of them NaN in its last place, one of zeros, one of negative zeros."""
    words = _grid(1, 12, WIDTH)
    words[3], words[4] = 0.0, -0.0
    words[5, -1] = torch.nan
    lengths = torch.tensor([7, 0, 40, 1, 33, 12, 2, 31, 5])
    drawn = torch.randint(0, 12, (int(lengths.sum()),), generator=torch.Generator().manual_seed(2))
    drawn[:7] = torch.arange(6, 13) % 12  # the first query without the NaN
    documents = torch.tensor([100, 0, 1, 63, 1000, 31])
    return tuple(  # type: ignore[return-value]
        Packed(values.to(dtype), torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
        for values, counts in ((words[drawn], lengths), (_grid(3, int(documents.sum()), WIDTH), documents))
    )


def _alone(operator, queries: Packed, documents, count: int = 6, **options):
    """Every query token in a call of its own: nothing repeats there."""
    scores = torch.zeros(len(queries.lengths), count)
    winners = torch.full((*scores.shape, int(queries.lengths.max())), -1, dtype=torch.int32)
    for n, (start, length) in enumerate(zip(queries.starts.tolist(), queries.lengths.tolist(), strict=True)):
        for place in range(length):
            row = queries.values[start + place : start + place + 1]
            found, where = operator(row, documents, return_argmax=True, **options)
            scores[n] += found
            winners[n, :, place] = where[:, 0]
    return scores, winners


@pytest.mark.parametrize("operator", [maxsim, maxsim_reference], ids=["fused", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_packed(operator, dtype) -> None:
    queries, documents = _repeating(dtype)
    assert distinct_rows(queries.values) is not None, "they repeat"
    scores, winners = operator(queries, documents, return_argmax=True)
    truth, places = _alone(operator, queries, documents)
    torch.testing.assert_close(scores, truth, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(winners, places)
    torch.testing.assert_close(operator(queries, documents), truth, rtol=0, atol=0, equal_nan=True)
    assert scores.isnan().any(), "the NaN is in some queries"
    assert not scores[0].isnan().any()


@pytest.mark.parametrize("operator", [maxsim, maxsim_reference], ids=["fused", "reference"])
def test_padded_with_holes(operator) -> None:
    words = _grid(1, 5, WIDTH)
    generator = torch.Generator().manual_seed(4)
    queries = words[torch.randint(0, 5, (6, 20), generator=generator)]
    mask = torch.rand(6, 20, generator=generator) < 0.6
    documents = _grid(3, 9, 31, WIDTH)
    scores, winners = operator(queries, documents, query_mask=mask, return_argmax=True)
    cells = torch.einsum("qid,bjd->qbij", queries, documents)
    best = cells.max(-1)
    assert torch.equal(scores, (best.values * mask[:, None]).sum(-1))
    assert torch.equal(winners.long(), torch.where(mask[:, None], best.indices, -1))


@pytest.mark.parametrize("granularity", ["token", "document", "corpus"])
@pytest.mark.parametrize("quantize_queries", [True, False])
def test_codes(granularity, quantize_queries) -> None:
    queries, documents = _repeating(torch.float32)
    queries = Packed(queries.values.nan_to_num(), queries.offsets)
    codes = quantize_int8(documents, granularity)
    scores, winners = maxsim(queries, codes, return_argmax=True, quantize_queries=quantize_queries)
    truth, places = _alone(maxsim, queries, codes, quantize_queries=quantize_queries)
    torch.testing.assert_close(scores, truth, rtol=1e-5, atol=1e-4)
    assert torch.equal(winners, places)


def test_gradients_of_the_reference_are_each_tokens_own() -> None:
    queries, documents = _repeating(torch.float32)
    values = queries.values.nan_to_num().double().requires_grad_()
    scores = maxsim_reference(
        Packed(values, queries.offsets), Packed(documents.values.double(), documents.offsets), dtype=torch.float64
    )
    scores[:, documents.lengths > 0].sum().backward()
    copies = [values.grad[(values == row).all(1)] for row in values.detach()[:40]]
    assert all(torch.equal(copy, copy[:1].expand_as(copy)) for copy in copies), "equal tokens have equal gradients"
    assert values.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 3, 128])
@pytest.mark.parametrize("rows", [0, 1, 2, 31, 1000])
def test_distinct_rows(dtype, width, rows) -> None:
    few = _grid(7, 3, width).to(dtype)
    values = few[torch.randint(0, 3, (rows,), generator=torch.Generator().manual_seed(8))]
    found = distinct_rows(values)
    if rows < 4:
        assert found is None or torch.equal(found[0][found[1]], values)
        return
    assert found is not None
    assert torch.equal(found[0][found[1]], values)
    assert len(found[0]) == len(np.unique(values.float().numpy(), axis=0)) <= 3
    strided = values.repeat(1, 2)[:, ::2]
    assert torch.equal(distinct_rows(strided)[0][distinct_rows(strided)[1]], strided)


def test_distinct_rows_of_few_repeats_is_none() -> None:
    values = torch.randn(100, 16, generator=torch.Generator().manual_seed(9))
    assert distinct_rows(values) is None
    values[1] = values[0]
    assert distinct_rows(values) is None, "one in a hundred is not worth gathering the others"
    assert distinct_rows(torch.zeros(5, 0)) is None


def test_rows_of_one_sum_are_told_apart() -> None:
    """Rows are grouped by a weighted sum of their halves first, and these two have the same."""
    values = torch.tensor([[2, 0], [0, 1]] * 4, dtype=torch.int16).view(torch.float16)
    found = distinct_rows(values)
    assert found is not None
    assert len(found[0]) == 2
    assert torch.equal(found[0][found[1]].view(torch.int16), values.view(torch.int16))


def test_zeros_of_two_signs_are_two_rows() -> None:
    values = torch.zeros(8, 4)
    values[::2] = -0.0
    found = distinct_rows(values)
    assert found is not None
    assert len(found[0]) == 2
    assert torch.equal(found[0][found[1]].view(torch.int32), values.view(torch.int32))
