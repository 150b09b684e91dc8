"""Ragged documents and queries on a GPU: packed end to end, views in any order, pairs, against the float64 truth."""

from __future__ import annotations

import pytest
import torch

from inputs import on_gpu as make
from maxsim_kernels import Packed, maxsim
from truth import agree

D = 128
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
COUNTS = [3, 0, 31, 1, 7, 100, 0, 1000, 63, 64, 65, 128, 129, 0]
ASKED = [4, 0, 31, 1, 100, 0]


def queries_of(kind, d=D, dtype=HALF):
    """One matrix, a batch, a batch longer than a tile, or ragged ones."""
    if kind == "one":
        return make.gauss(32, d, dtype=dtype)
    if kind == "packed":
        return make.packed(ASKED, d, dtype=dtype)
    return make.gauss(*{"few": (7, 31), "many": (100, 32), "long": (3, 1000)}[kind], d, dtype=dtype)


@pytest.mark.parametrize("kind", ["one", "few", "many", "long", "packed"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_lengths(kind, index):
    agree(queries_of(kind), make.packed(COUNTS, D, index=index, seed=1))


@pytest.mark.parametrize("dtype", [BFLOAT, SINGLE])
@pytest.mark.parametrize("kind", ["one", "many", "packed"])
def test_dtypes(dtype, kind):
    agree(queries_of(kind, dtype=dtype), make.packed(COUNTS, D, dtype=dtype, seed=1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["one", "many"])
def test_ragged_corpus(kind, seed):
    """The benchmark's lengths."""
    agree(queries_of(kind), make.packed(make.sizes(200, 240, seed=seed), D, seed=seed + 1))


@pytest.mark.parametrize("d", [1, 31, 96, 200, 384, 768, 1000])
def test_widths(d):
    rows = make.packed(COUNTS, d, seed=1)
    agree(queries_of("few", d), rows)
    agree(queries_of("one", d), rows)


@pytest.mark.parametrize(("dtype", "d"), [(BFLOAT, 96), (SINGLE, 1000)])
def test_widths_in_other_dtypes(dtype, d):
    agree(queries_of("few", d, dtype), make.packed(COUNTS, d, dtype=dtype, seed=1))


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0], [1], [1] * 300])
@pytest.mark.parametrize("kind", ["one", "few", "packed"])
def test_empties(counts, kind):
    agree(queries_of(kind), make.packed(counts, D, seed=1))


@pytest.mark.parametrize("asked", [[], [0], [0, 0], [1, 0, 3]])
def test_empty_queries(asked):
    agree(make.packed(asked, D), make.packed(COUNTS, D, seed=1))
    agree(make.packed(asked, D), make.gauss(5, 9, D, seed=1))


@pytest.mark.parametrize("kind", ["one", "few", "many", "packed"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_views(kind, index):
    """A view into a larger buffer, in any order, with NaN between the documents, starting anywhere."""
    rows = make.packed(COUNTS, D, seed=1)
    view = make.scattered(rows)
    view = Packed.view(view.values, view.starts.to(index), view.lengths.to(index))
    queries = queries_of(kind)
    scores = agree(queries, view)
    assert make.same_bits(scores, maxsim(queries, rows))


def test_views_of_queries():
    agree(make.scattered(make.packed(ASKED, D)), make.packed(COUNTS, D, seed=1))
    agree(make.scattered(make.packed(ASKED, D)), make.gauss(40, 63, D, seed=1))


@pytest.mark.parametrize("kind", ["one", "many"])
def test_overlapping_views(kind):
    """Sliding windows and the same document twice: token counts of a view may exceed the buffer's."""
    values = make.gauss(500, D, seed=1)
    starts = torch.arange(0, 400, 4, device=make.device)
    lengths = torch.full_like(starts, 100)
    agree(queries_of(kind), Packed.view(values, starts, lengths))
    agree(queries_of(kind), Packed.view(values, starts[:7] * 0, lengths[:7]))


def test_a_view_uses_a_small_part_of_its_buffer():
    """Reranking ten documents of a large output: the rest of the buffer is NaN."""
    values = torch.full((20000, D), float("nan"), device=make.device).to(HALF)
    starts = torch.arange(1, 20000, 2000, device=make.device)
    for start in starts.tolist():
        values[start : start + 50] = make.gauss(50, D, seed=start)
    agree(make.gauss(7, 31, D), Packed.view(values, starts, torch.full_like(starts, 50)))


def test_select():
    rows = make.packed(COUNTS, D, seed=1)
    for chosen in ([7, 3, 3, 0, 13], list(range(len(COUNTS)))[::-1], []):
        picked = rows.select(torch.tensor(chosen, dtype=torch.int64, device=make.device))
        scores = agree(make.gauss(7, 31, D), picked)
        assert make.same_bits(scores, maxsim(make.gauss(7, 31, D), rows)[:, chosen])


def test_rows_that_leave_the_buffer_end_with_it():
    """Values of offsets are not checked on a GPU (that would wait for it): reads are clamped instead. Beyond lies NaN."""
    room = torch.full((400, D), float("nan"), device=make.device).to(HALF)
    room[:300] = make.gauss(300, D, seed=1)
    starts = torch.tensor([0, 290, 299, 300, 10], device=make.device)
    lengths = torch.tensor([20, 60, 1, 5, 2**31 - 1], device=make.device)
    for queries in (make.gauss(31, D), make.gauss(70, 31, D)):
        agree(queries, Packed.view(room[:300], starts, lengths))


@pytest.mark.parametrize("how", ["transposed", "every second element", "wider rows", "odd rows", "unaligned"])
@pytest.mark.parametrize("kind", ["one", "many"])
def test_strides(kind, how):
    rows = make.packed(COUNTS, D, seed=1)
    agree(queries_of(kind), rows.with_values(make.strided(rows.values, how)))


def test_strided_queries():
    rows, asked = make.packed(COUNTS, D, seed=1), make.packed(ASKED, D)
    for how in ("transposed", "unaligned"):
        agree(asked.with_values(make.strided(asked.values, how)), rows)
    agree(make.strided(make.gauss(7, 31, D), "transposed"), rows)


def test_strided_offsets():
    """Every second entry of a larger table."""
    rows = make.packed(COUNTS, D, seed=1)
    starts, lengths = (torch.stack([x, x * 0 - 7], 1).view(-1)[::2] for x in (rows.starts, rows.lengths))
    assert starts.stride() == (2,)
    agree(make.gauss(7, 31, D), Packed.view(rows.values, starts, lengths))


@pytest.mark.parametrize("kind", ["one", "many", "packed"])
def test_one_long_document_among_short_ones(kind):
    agree(queries_of(kind), make.packed([5] * 200 + [5000] + [7] * 100 + [0, 3000], D, seed=1))


@pytest.mark.parametrize("kind", ["one", "few", "long"])
def test_few_long_documents(kind):
    """The token axis must be split for the GPU to fill, empty documents or not."""
    agree(queries_of(kind), make.packed([20000, 20000, 20000], D, seed=1))
    agree(queries_of(kind), make.packed([20001, 0, 1, 15000], D, seed=2))


def test_thousands_of_tiny_documents():
    counts = make.sizes(5000, 3)
    agree(make.gauss(32, D), make.packed(counts, D, seed=1))
    agree(make.gauss(40, 7, D), make.packed(counts, D, seed=1))


@pytest.mark.parametrize("kind", ["one", "many", "long"])
def test_a_long_document_and_an_empty_one(kind):
    """As many pieces as documents: the long one's second piece is not the empty document's."""
    for counts in ([40000, 0], [0, 40000], [0, 0, 100000, 5]):
        agree(queries_of(kind), make.packed(counts, D, seed=1))


@pytest.mark.parametrize("kind", ["one", "many"])
def test_nan_and_negative_maxima(kind):
    rows = make.packed(COUNTS, D, seed=1)
    queries = queries_of(kind).abs()
    assert bool((agree(queries, rows.with_values(-rows.values.abs())) < 0).all())
    values = rows.values.clone()
    values[rows.starts[5] + 99, 3] = float("nan")
    values[rows.starts[7], D - 1] = float("nan")
    scores = agree(queries, rows.with_values(values))
    assert scores.reshape(-1, len(COUNTS)).isnan().all(0).nonzero().flatten().tolist() == [5, 7]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE])
def test_packed_queries_on_dense_documents(dtype):
    masks = make.masks("both", "document", 40, 63, seed=1)
    documents = make.dirty(make.gauss(40, 63, D, dtype=dtype, seed=1), masks["document_mask"], masks["document_lengths"])
    asked = make.packed(ASKED, D, dtype=dtype)
    agree(asked, documents, **masks)
    agree(asked, documents.nan_to_num(0, 0, 0).clamp(-30000, 30000))  # as real tokens, whose sums no dtype may lose


def test_masked_queries_on_packed_documents():
    for kind in ("mask", "lengths", "both"):
        masks = make.masks(kind, "query", 7, 31)
        queries = make.dirty(make.gauss(7, 31, D), masks.get("query_mask"), masks.get("query_lengths"))
        agree(queries, make.packed(COUNTS, D, seed=1), **masks)


def test_packed_equals_padded():
    """The same bits whether documents are padded or packed is not promised; the same numbers are."""
    rows = make.packed(COUNTS, D, seed=1)
    dense, lengths = make.padded(rows)
    queries = make.gauss(7, 31, D)
    one, other = maxsim(queries, rows), maxsim(queries, dense, document_lengths=lengths)
    finite = one.isfinite()
    assert torch.equal(finite, other.isfinite())
    assert torch.allclose(one[finite], other[finite], rtol=1e-6, atol=1e-3)


PAIRS_ASKED = [4, 0, 31, 1, 100, 0, 7, 64, 2, 300]
PAIRS_FOUND = [3, 5, 0, 1000, 63, 0, 129, 1, 64, 31]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_ragged_pairs(dtype, index):
    asked = make.packed(PAIRS_ASKED, D, dtype=dtype, index=index)
    agree(asked, make.packed(PAIRS_FOUND, D, dtype=dtype, index=index, seed=1), pairs=True)


def test_pairs_ragged_on_one_side():
    asked, found = make.packed(PAIRS_ASKED, D), make.packed(PAIRS_FOUND, D, seed=1)
    masks = make.masks("both", "query", 10, 31) | make.masks("both", "document", 10, 63, seed=1)
    queries = make.dirty(make.gauss(10, 31, D), masks["query_mask"], masks["query_lengths"])
    documents = make.dirty(make.gauss(10, 63, D, seed=1), masks["document_mask"], masks["document_lengths"])
    agree(queries, found, pairs=True, **{name: value for name, value in masks.items() if name.startswith("query")})
    agree(asked, documents, pairs=True, **{name: value for name, value in masks.items() if name.startswith("document")})


def test_pairs_of_views():
    asked, found = make.scattered(make.packed(PAIRS_ASKED, D)), make.scattered(make.packed(PAIRS_FOUND, D, seed=1), seed=3)
    agree(asked, found, pairs=True)


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]])
def test_pairs_of_nothing(counts):
    agree(make.packed(counts, D), make.packed([3] * len(counts), D, seed=1), pairs=True)
    agree(make.packed([3] * len(counts), D), make.packed(counts, D, seed=1), pairs=True)


def test_many_ragged_pairs():
    asked, found = make.packed(make.sizes(1000, 40), D), make.packed(make.sizes(1000, 200, seed=1), D, seed=1)
    agree(asked, found, pairs=True)


def test_a_long_pair_among_short_ones():
    asked = make.packed([8] * 20 + [300] + [8] * 20, D)
    agree(asked, make.packed([30] * 20 + [8000] + [0] * 20, D, seed=1), pairs=True)


@pytest.mark.parametrize("d", [31, 1000])
def test_pairs_widths(d):
    agree(make.packed(PAIRS_ASKED, d), make.packed(PAIRS_FOUND, d, seed=1), pairs=True)
