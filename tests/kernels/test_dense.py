"""`maxsim` on dense tensors: shared candidates `[B, Ld, d]`."""

from __future__ import annotations

import pytest
import torch

import oracle
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import maxsim

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ODD_SIZES = [1, 7, 31, 63, 100, 1000]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", ["Lq", "Ld", "B", "d"])
@pytest.mark.parametrize("size", ODD_SIZES)
def test_sizes_exact(impl, dtype, axis, size):
    sizes = {"Lq": 3, "Ld": 5, "B": 3, "d": 6, axis: size}
    queries = cases.grid(2, sizes["Lq"], sizes["d"], dtype=dtype)
    documents = cases.grid(sizes["B"], sizes["Ld"], sizes["d"], dtype=dtype, seed=1)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (17, 33, 2, 128), (20, 9, 5, 96), (31, 17, 3, 64), (130, 70, 2, 16)])
def test_real_values_within_the_bound(impl, dtype, shape):
    Lq, Ld, B, d = shape
    queries, documents = cases.gauss(2, Lq, d, dtype=dtype), cases.gauss(B, Ld, d, dtype=dtype, seed=1)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents), tol.SCORE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", ["Lq", "d"])
def test_long_sums_within_the_bound(impl, dtype, axis):
    Lq, d = (1000, 24) if axis == "Lq" else (3, 1000)
    queries, documents = cases.gauss(1, Lq, d, dtype=dtype), cases.gauss(4, 9, d, dtype=dtype, seed=1)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents), tol.SCORE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_query_matrix_gives_one_row(impl, dtype):
    query, documents = cases.grid(5, 8, dtype=dtype), cases.grid(4, 6, 8, dtype=dtype, seed=1)
    scores = maxsim(query, documents, impl=impl)
    assert scores.shape == (4,)
    oracle.check(scores, oracle.maxsim(query, documents))
    assert cases.same_bits(scores, maxsim(query[None], documents, impl=impl)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", ["mask", "lengths", "both"])
@pytest.mark.parametrize("shape", [(4, 7), (20, 31), (130, 9)], ids=str)
def test_padding_is_never_read(impl, dtype, by, shape):
    (Lq, Ld), Nq, B, d = shape, 4, 5, 8
    masks = {}
    if by != "lengths":
        masks |= {"query_mask": cases.mask(Nq, Lq), "document_mask": cases.mask(B, Ld, seed=1)}
    if by != "mask":
        masks |= {"query_lengths": cases.lengths(Nq, high=Lq), "document_lengths": cases.lengths(B, high=Ld, seed=1)}
    q_valid = cases.valid(Lq, masks.get("query_mask"), masks.get("query_lengths"))
    d_valid = cases.valid(Ld, masks.get("document_mask"), masks.get("document_lengths"))
    queries = cases.dirty(cases.grid(Nq, Lq, d, dtype=dtype), q_valid)
    documents = cases.dirty(cases.grid(B, Ld, d, dtype=dtype, seed=1), d_valid)
    oracle.check(maxsim(queries, documents, **masks, impl=impl), oracle.maxsim(queries, documents, **masks))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_mask_dtypes(impl, dtype):
    queries, documents = cases.grid(3, 4, 8), cases.grid(5, 6, 8, seed=1)
    masks = {"query_mask": cases.mask(3, 4).to(dtype), "document_mask": cases.mask(5, 6, seed=1).to(dtype)}
    oracle.check(maxsim(queries, documents, **masks, impl=impl), oracle.maxsim(queries, documents, **masks))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_length_dtypes(impl, dtype):
    queries, documents = cases.grid(3, 4, 8), cases.grid(5, 6, 8, seed=1)
    counts = {"query_lengths": cases.lengths(3, high=4, dtype=dtype), "document_lengths": cases.lengths(5, high=6, dtype=dtype)}
    oracle.check(maxsim(queries, documents, **counts, impl=impl), oracle.maxsim(queries, documents, **counts))


def test_one_query_takes_a_mask_of_its_shape(impl):
    query, documents, mask = cases.grid(6, 8), cases.grid(3, 4, 8, seed=1), cases.mask(6)
    oracle.check(maxsim(query, documents, query_mask=mask, impl=impl), oracle.maxsim(query, documents, query_mask=mask))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_query_does_not_ignore_its_length(impl, shape):
    query, documents, count = cases.grid(6, 8), cases.grid(3, 4, 8, seed=1), torch.full(shape, 2)
    oracle.check(maxsim(query, documents, query_lengths=count, impl=impl), oracle.maxsim(query[:2], documents))


def test_masks_may_be_strided(impl):
    queries, documents = cases.grid(3, 4, 8), cases.grid(5, 6, 8, seed=1)
    masks = {"query_mask": cases.mask(4, 3).T, "document_mask": cases.mask(5, 12, seed=1)[:, ::2]}
    masks["document_lengths"] = torch.tensor([6]).expand(5)
    oracle.check(maxsim(queries, documents, **masks, impl=impl), oracle.maxsim(queries, documents, **masks))


@pytest.mark.parametrize(
    ("Nq", "B", "Lq", "Ld"), [(2, 3, 0, 4), (2, 3, 4, 0), (2, 3, 0, 0), (0, 3, 4, 5), (2, 0, 4, 5), (0, 0, 0, 0)]
)
def test_zero_sizes(impl, Nq, B, Lq, Ld):
    queries, documents = cases.grid(Nq, Lq, 8), cases.grid(B, Ld, 8, seed=1)
    scores, argmax = maxsim(queries, documents, return_argmax=True, impl=impl)
    truth = oracle.maxsim(queries, documents)
    oracle.check(scores, truth)
    oracle.check_argmax(argmax, truth)


@pytest.mark.parametrize(("Lq", "Ld", "B", "need"), [(0, 4, 2, 0.0), (3, 0, 2, float("-inf")), (0, 0, 2, 0.0)])
def test_zero_sizes_of_one_query(impl, Lq, Ld, B, need):
    assert maxsim(cases.grid(Lq, 8), cases.grid(B, Ld, 8), impl=impl).tolist() == [need] * B
    assert maxsim(cases.grid(3, 8), cases.grid(0, 5, 8), impl=impl).shape == (0,)


def test_empty_documents_and_empty_queries(impl):
    queries, documents = cases.grid(3, 2, 4), cases.grid(2, 3, 4, seed=1)
    scores = maxsim(
        queries,
        documents,
        query_lengths=torch.tensor([2, 0, 1]),
        document_mask=torch.tensor([[True, True, True], [False, False, False]]),
        impl=impl,
    )
    inf = float("inf")
    assert scores[:, 1].tolist() == [-inf, 0.0, -inf], "-inf against any non-empty query, 0.0 for the empty one"
    assert scores[1].tolist() == [0.0, 0.0]


def test_negative_maxima_are_kept(impl):
    queries, documents = cases.grid(3, 4, 8).abs() + 1, -cases.grid(5, 6, 8, seed=1).abs() - 1
    masks = {"document_lengths": torch.tensor([1, 2, 3, 6, 5]), "query_lengths": torch.tensor([1, 4, 2])}
    scores = maxsim(queries, documents, **masks, impl=impl)
    assert bool((scores <= -8).all()), "a padded position acted as a zero"
    oracle.check(scores, oracle.maxsim(queries, documents, **masks))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [0, 3, 6, 20, 34])
@pytest.mark.parametrize("side", ["query", "document"])
def test_nan_in_a_valid_token_is_never_hidden(impl, dtype, where, side):
    queries, documents = cases.grid(3, 35, 8, dtype=dtype), cases.grid(4, 35, 8, dtype=dtype, seed=1)
    (queries if side == "query" else documents)[1, where, 5] = float("nan")
    scores = maxsim(queries, documents, impl=impl)
    oracle.check(scores, oracle.maxsim(queries, documents))
    assert int(scores.isnan().sum()) == (4 if side == "query" else 3)


def _layouts(tensor):
    """The same values in other strides."""
    yield "transposed", tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    yield "batch last", tensor.movedim(0, -1).contiguous().movedim(-1, 0)
    yield "every second row", torch.stack([tensor, torch.full_like(tensor, float("nan"))], dim=2).flatten(1, 2)[:, ::2]
    yield (
        "every second column",
        torch.stack([tensor, torch.full_like(tensor, float("nan"))], dim=-1).flatten(-2)[..., ::2],
    )
    shifted = torch.full((tensor.numel() + 3,), float("nan"), dtype=tensor.dtype)
    shifted[3:] = tensor.flatten()
    yield "odd storage offset", shifted[3:].view(tensor.shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(impl, dtype):
    queries, documents = cases.grid(3, 7, 9, dtype=dtype), cases.grid(4, 5, 9, dtype=dtype, seed=1)
    truth = oracle.maxsim(queries, documents)
    for (name, q), (_, d) in zip(_layouts(queries), _layouts(documents), strict=True):
        assert torch.equal(q, queries), name
        assert torch.equal(d, documents), name
        oracle.check(maxsim(q, documents, impl=impl), truth)
        oracle.check(maxsim(queries, d, impl=impl), truth)
        oracle.check(maxsim(q, d, impl=impl), truth)


def test_expanded_inputs(impl):
    queries, documents = cases.grid(1, 7, 8).expand(5, 7, 8), cases.grid(4, 1, 8, seed=1).expand(4, 6, 8)
    oracle.check(maxsim(queries, documents, impl=impl), oracle.maxsim(queries, documents))
    zero_stride = torch.tensor(0.5).expand(4, 6, 8)
    oracle.check(maxsim(queries, zero_stride, impl=impl), oracle.maxsim(queries, zero_stride))


def test_large_float32_values_are_not_cast(impl):
    assert maxsim(torch.tensor([[1.0, 0.0]]), torch.tensor([[[70000.0, 3.0]]]), impl=impl).tolist() == [70000.0]
    assert maxsim(torch.tensor([[1.0]]), torch.tensor([[[3e38]]]), impl=impl).tolist() == [torch.tensor(3e38).item()]
    precise = torch.tensor([[[1.0 + 2.0**-20]]])
    assert maxsim(torch.tensor([[1.0]]), precise, impl=impl).tolist() == [1.0 + 2.0**-20]


def test_float16_products_do_not_overflow(impl):
    assert maxsim(torch.tensor([[300.0]]).half(), torch.tensor([[[300.0]]]).half(), impl=impl).tolist() == [90000.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_output_is_rounded_to_16_bits(impl, dtype):
    ones = torch.ones(1, 3, 257, dtype=dtype)
    assert maxsim(ones, ones, impl=impl).tolist() == [[771.0]], "257 is no bf16 number, 771 neither"


@pytest.mark.filterwarnings("ignore:maxsim_kernels. autocast")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(impl, dtype, cast):
    queries, documents = cases.gauss(3, 7, 64, dtype=dtype), cases.gauss(4, 9, 64, dtype=dtype, seed=1)
    plain = maxsim(queries, documents, impl=impl)
    with torch.autocast("cpu", dtype=cast):
        assert cases.same_bits(maxsim(queries, documents, impl=impl), plain)


def test_inputs_are_left_alone(impl):
    queries, documents = cases.grid(3, 4, 8), cases.grid(5, 6, 8, seed=1)
    masks = {"query_mask": cases.mask(3, 4), "document_lengths": cases.lengths(5, high=6)}
    before = [x.clone() for x in (queries, documents, *masks.values())]
    maxsim(queries, documents, **masks, impl=impl)
    for now, then in zip((queries, documents, *masks.values()), before, strict=True):
        assert torch.equal(now, then)


def test_default_dtype_does_not_matter(impl):
    queries, documents = cases.grid(3, 4, 8), cases.grid(5, 6, 8, seed=1)
    plain = maxsim(queries, documents, impl=impl)
    torch.set_default_dtype(torch.float64)
    try:
        assert cases.same_bits(maxsim(queries, documents, impl=impl), plain)
    finally:
        torch.set_default_dtype(torch.float32)
