"""Bad arguments: `ValueError` that names the argument, what it got and what it needs; never a silent guess."""

from __future__ import annotations

import pytest
import torch

from inputs import on_cpu as cases
from maxsim_kernels import Int8Tokens, Packed, maxsim, maxsim_pairs, maxsim_reference, pack, quantize_fp8, quantize_int8

FUNCTIONS = [maxsim, maxsim_reference]


def refused(*parts, error=ValueError):
    """Context that expects one message with every part in it, in any order."""
    return pytest.raises(error, match="".join(f"(?=.*(?:{part}))" for part in parts))


@pytest.fixture(params=FUNCTIONS, ids=lambda function: function.__name__)
def function(request):
    return request.param


@pytest.mark.parametrize("shape", [(), (8,), (2, 3, 4, 8)])
def test_query_rank(function, shape):
    with refused("queries", r"\[Nq, Lq, d\]|\[Lq, d\]|rank|dimension"):
        function(cases.grid(*shape), cases.grid(3, 5, 8))


@pytest.mark.parametrize("shape", [(), (8,), (5, 8), (1, 2, 3, 4, 8)])
def test_document_rank(function, shape):
    with refused("documents"):
        function(cases.grid(2, 4, 8), cases.grid(*shape))


@pytest.mark.parametrize("queries", [[[1.0]], None, "text"])
def test_not_a_tensor(function, queries):
    with pytest.raises((ValueError, TypeError), match="queries"):
        function(queries, cases.grid(2, 3, 1))
    with pytest.raises((ValueError, TypeError), match="documents"):
        function(cases.grid(2, 3, 1), queries)


@pytest.mark.parametrize("ragged", [True, False])
def test_width_mismatch(function, ragged):
    documents = cases.packed([2, 3], 16) if ragged else cases.grid(3, 5, 16)
    with refused("documents|queries", "8", "16"):
        function(cases.grid(2, 4, 8), documents)
    with refused("documents|queries", "8", "16"):
        function(cases.grid(4, 8), quantize_int8(documents))


def test_width_zero(function):
    with refused(r"^queries: got \[2, 4, 0\], need \[Lq, d\], \[Nq, Lq, d\] or Packed$"):
        function(cases.grid(2, 4, 0), cases.grid(3, 5, 0))


@pytest.mark.parametrize(
    ("one", "other"), [(torch.float32, torch.float16), (torch.bfloat16, torch.float16), (torch.float16, torch.float32)]
)
def test_dtype_mismatch(function, one, other):
    with refused("documents|queries", str(one).removeprefix("torch."), str(other).removeprefix("torch.")):
        function(cases.grid(2, 4, 8, dtype=one), cases.grid(3, 5, 8, dtype=other))
    with refused("documents|queries", str(one).removeprefix("torch."), str(other).removeprefix("torch.")):
        function(cases.packed([2, 3], 8, dtype=one), cases.packed([2, 3], 8, dtype=other))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float64, torch.complex64])
def test_dtypes_that_are_not_embeddings(dtype):
    with refused("queries|documents", str(dtype).removeprefix("torch.")):
        maxsim(torch.ones(2, 4, 8, dtype=dtype), torch.ones(3, 5, 8, dtype=dtype))
    with refused("queries", str(dtype).removeprefix("torch.")):
        maxsim(torch.ones(2, 4, 8, dtype=dtype), quantize_int8(cases.gauss(3, 5, 8)))


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_fp8])
@pytest.mark.parametrize("quantize_queries", [True, False])
@pytest.mark.parametrize("side", ["queries", "scales"])
def test_gradients_with_quantised_documents(function, quantize, quantize_queries, side):
    queries, documents = cases.gauss(2, 4, 8), quantize(cases.gauss(3, 5, 8))
    (queries if side == "queries" else documents.scales).requires_grad_()
    with refused("queries, documents: got requires_grad with quantised documents, which have no gradient; detach them"):
        function(queries, documents, quantize_queries=quantize_queries)
    with torch.no_grad():
        function(queries, documents, quantize_queries=quantize_queries)


@pytest.mark.parametrize("shape", [(2, 5), (3, 4), (4,), (2, 4, 1), ()])
def test_query_mask_shape(function, shape):
    with refused("query_mask", "2", "4"):
        function(cases.grid(2, 4, 8), cases.grid(3, 5, 8), query_mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(3, 6), (2, 5), (5,), (3, 5, 8), ()])
def test_document_mask_shape(function, shape):
    with refused("document_mask", "3", "5"):
        function(cases.grid(2, 4, 8), cases.grid(3, 5, 8), document_mask=torch.ones(shape, dtype=torch.bool))


def test_per_query_mask_and_lengths_shape(function):
    queries, documents = cases.grid(2, 4, 8), cases.grid(2, 3, 5, 8)
    with refused("document_mask", "2", "3", "5"):
        function(queries, documents, document_mask=torch.ones(2, 5, dtype=torch.bool))
    with refused("document_lengths", "2", "3"):
        function(queries, documents, document_lengths=torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("name", ["query_mask", "document_mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_mask_dtype(function, name, dtype):
    with refused(name, str(dtype).removeprefix("torch."), "bool"):
        function(cases.grid(3, 4, 8), cases.grid(3, 4, 8), **{name: torch.ones(3, 4, dtype=dtype)})


@pytest.mark.parametrize("name", ["query_lengths", "document_lengths"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_length_dtype(function, name, dtype):
    with refused(name, str(dtype).removeprefix("torch."), "int32|int64"):
        function(cases.grid(3, 4, 8), cases.grid(3, 4, 8), **{name: torch.ones(3, dtype=dtype)})


@pytest.mark.parametrize("name", ["query_lengths", "document_lengths"])
@pytest.mark.parametrize("count", [2, 4])
def test_length_shape(function, name, count):
    with refused(name, "3", str(count)):
        function(cases.grid(3, 4, 8), cases.grid(3, 4, 8), **{name: torch.ones(count, dtype=torch.int64)})


@pytest.mark.parametrize("name", ["query_lengths", "document_lengths"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_lengths_out_of_range(impl, name, index):
    with refused(name, "5", "4"):
        maxsim(cases.grid(3, 4, 8), cases.grid(3, 4, 8), **{name: torch.tensor([1, 5, 2], dtype=index)}, impl=impl)
    with refused(name, "-1"):
        maxsim(cases.grid(3, 4, 8), cases.grid(3, 4, 8), **{name: torch.tensor([1, -1, 2], dtype=index)}, impl=impl)


@pytest.mark.parametrize("name", ["query_lengths", "document_lengths"])
def test_pair_lengths_out_of_range(impl, name):
    for bad in (5, -1):
        with refused(name, str(bad)):
            maxsim_pairs(cases.grid(3, 4, 8), cases.grid(3, 4, 8), **{name: torch.tensor([1, bad, 2])}, impl=impl)


def test_per_query_lengths_out_of_range(impl):
    for bad in (6, -1):
        lengths = torch.tensor([[1, 2, 3], [5, bad, 0]])
        with refused("document_lengths", str(bad)):
            maxsim(cases.grid(2, 4, 8), cases.grid(2, 3, 5, 8), document_lengths=lengths, impl=impl)


def test_masks_that_are_not_tensors(function):
    with pytest.raises((ValueError, TypeError), match="document_mask"):
        function(cases.grid(2, 4, 8), cases.grid(1, 2, 8), document_mask=[[True, False]])
    with pytest.raises((ValueError, TypeError), match="document_lengths"):
        function(cases.grid(2, 4, 8), cases.grid(1, 2, 8), document_lengths=[1])


@pytest.mark.parametrize("name", ["document_mask", "document_lengths"])
def test_document_masks_with_packed(function, name):
    value = torch.ones(2, 3, dtype=torch.bool) if name == "document_mask" else torch.tensor([1, 2])
    with refused(name, "Packed"):
        function(cases.grid(2, 4, 8), cases.packed([2, 3], 8), **{name: value})
    with refused(name, "Packed"):
        function(cases.grid(2, 4, 8), quantize_int8(cases.packed([2, 3], 8)), **{name: value})


@pytest.mark.parametrize("name", ["query_mask", "query_lengths"])
def test_query_masks_with_packed(function, name):
    value = torch.ones(2, 3, dtype=torch.bool) if name == "query_mask" else torch.tensor([1, 2])
    with refused(name, "Packed"):
        function(cases.packed([2, 3], 8), cases.grid(2, 4, 8), **{name: value})


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("offsets", "why"),
    [
        ([1, 3, 6], "1"),
        ([0, 4, 2], "falling|decreasing|order"),
        ([0, 3, 7], "7"),
        ([0, -1, 6], "-1|falling|decreasing"),
        ([-2, 3, 6], "-2"),
        ([0, 9, 6], "9|falling|decreasing"),
    ],
)
@pytest.mark.parametrize("side", ["queries", "documents"])
def test_bad_offsets(impl, index, offsets, why, side):
    good = cases.packed([2, 3], 8)
    for function in (maxsim, maxsim_pairs):
        with refused("offsets", why):  # whether the values are looked at on construction or on use
            broken = Packed(cases.grid(6, 8), torch.tensor(offsets, dtype=index))
            function(*((broken, good) if side == "queries" else (good, broken)), impl=impl)


@pytest.mark.parametrize(
    ("starts", "lengths"), [([-1, 0], [2, 2]), ([0, 5], [2, 2]), ([0, 3], [2, -1]), ([7, 0], [0, 1]), ([0, 0], [7, 1])]
)
@pytest.mark.parametrize("side", ["queries", "documents"])
def test_bad_views(impl, starts, lengths, side):
    broken = Packed.view(cases.grid(6, 8), torch.tensor(starts), torch.tensor(lengths))
    good = cases.packed([2, 3], 8)
    with refused("starts|lengths|rows"):
        maxsim(*((broken, good) if side == "queries" else (good, broken)), impl=impl)


def test_bad_offsets_under_int8(impl):
    good = quantize_int8(cases.packed([2, 4], 8))
    with refused("offsets"):
        rows = Packed(good.codes.values, torch.tensor([0, 7, 6]))
        maxsim(cases.grid(2, 3, 8), Int8Tokens(rows, good.scales, granularity="token"), impl=impl)


@pytest.mark.parametrize("name", ["impl", "backward"])
def test_unknown_names(name):
    with refused(name, "fastest", "auto"):
        maxsim(cases.grid(2, 4, 8), cases.grid(3, 5, 8), **{name: "fastest"})
    with refused(name, "fastest", "auto"):
        maxsim_pairs(cases.grid(3, 4, 8), cases.grid(3, 5, 8), **{name: "fastest"})


def test_triton_needs_a_gpu():
    for documents in (cases.grid(3, 5, 8), cases.packed([2, 3], 8), quantize_int8(cases.grid(3, 5, 8))):
        with refused("impl", "triton", "cpu|GPU|CUDA"):
            maxsim(cases.grid(2, 4, 8), documents, impl="triton")
    with refused("impl", "triton", "cpu|GPU|CUDA"):
        maxsim_pairs(cases.grid(3, 4, 8), cases.grid(3, 5, 8), impl="triton")


def test_two_devices():
    meta = cases.grid(3, 5, 8).to("meta")
    with refused("documents|queries", "cpu", "meta"):
        maxsim(cases.grid(2, 4, 8), meta)
    with refused("document_mask", "cpu", "meta"):
        maxsim(cases.grid(2, 4, 8), cases.grid(3, 5, 8), document_mask=torch.ones(3, 5, dtype=torch.bool, device="meta"))
    with refused("query_lengths", "cpu", "meta"):
        maxsim(cases.grid(2, 4, 8), cases.grid(3, 5, 8), query_lengths=torch.ones(2, dtype=torch.int64, device="meta"))


def test_options_are_keywords():
    with pytest.raises(TypeError):
        maxsim(cases.grid(2, 4, 8), cases.grid(3, 5, 8), torch.ones(2, 4, dtype=torch.bool))


def test_pairs_take_pairs():
    with refused("queries|documents"):
        maxsim_pairs(cases.grid(4, 8), cases.grid(3, 5, 8))
    with refused("documents"):
        maxsim_pairs(cases.grid(2, 4, 8), cases.grid(2, 3, 5, 8))


def test_an_empty_list_needs_a_width():
    with refused("documents", "dim"):
        pack([])
