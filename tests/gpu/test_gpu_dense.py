"""Dense documents shared by all queries on a GPU, against the float64 truth."""

from __future__ import annotations

import pytest
import torch

import truth
from inputs import on_gpu as make
from maxsim_kernels import maxsim, maxsim_reference, quantize_fp8, quantize_int8
from maxsim_kernels.api import run
from maxsim_kernels.checks import Options
from maxsim_kernels.gpu.forward import combine
from truth import agree

D = 128  # the width of ColBERT and ColPali tokens; other widths have tests of their own
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = [HALF, BFLOAT, SINGLE]
BIG = 2**31 - 1
# Queries, tokens of each, documents, tokens of each: odd sizes, one above a tile, one of each size missing.
SIZES = [
    (1, 1, 1, 1),
    (1, 7, 31, 63),
    (1, 63, 7, 1000),
    (1, 100, 1000, 31),
    (1, 1000, 63, 100),
    (7, 31, 100, 100),
    (7, 1000, 31, 63),
    (31, 7, 63, 1000),
    (63, 1, 1000, 7),
    (100, 100, 7, 31),
    (1000, 31, 31, 1),
    (7, 17, 1, 1000),
    (0, 7, 7, 7),
    (7, 0, 7, 7),
    (7, 7, 0, 7),
    (7, 7, 7, 0),
    (0, 0, 0, 0),
]
FEW_SIZES = [(1, 31, 100, 63), (7, 31, 100, 100), (7, 1000, 31, 63), (63, 1, 1000, 7), (7, 7, 7, 0)]
BY_DTYPE = [(HALF, *size) for size in SIZES] + [(dtype, *size) for dtype in (BFLOAT, SINGLE) for size in FEW_SIZES]
# Which of mask and lengths either side has: each alone, each with each, not the full product.
SIDES = [
    ("none", "mask"),
    ("none", "lengths"),
    ("none", "both"),
    ("mask", "none"),
    ("lengths", "none"),
    ("both", "none"),
    ("mask", "lengths"),
    ("lengths", "mask"),
    ("lengths", "lengths"),
    ("both", "both"),
]


@pytest.mark.parametrize(
    "layout", ["shared", "one query", "packed", "view", "per query", "pairs", "ragged pairs", "int8", "fp8"]
)
def test_truth_is_the_reference(layout):
    """The oracle of these tests against the package's own reference in float64, on CPU copies, argmax included."""
    queries, rows = make.gauss(3, 5, 24), make.packed([4, 0, 9], 24, seed=1)
    ragged = make.packed([2, 5, 0], 24, seed=2)
    dense, masks = make.gauss(3, 9, 24, seed=1), make.masks("both", "query", 3, 5) | make.masks("both", "document", 3, 9)
    pairs, options = layout in ("pairs", "ragged pairs"), {}
    if layout in ("shared", "pairs", "int8", "fp8"):
        options = masks
    documents = {
        "packed": rows,
        "view": make.scattered(rows),
        "per query": dense[:, None].expand(3, 4, 9, 24),
        "ragged pairs": rows,
        "int8": quantize_int8(dense, "token", affine=True),
        "fp8": quantize_fp8(dense),
    }.get(layout, dense)
    if layout == "one query":
        queries = queries[0]
    if layout in ("view", "ragged pairs"):
        queries = ragged
    need = truth.oracle(queries, documents, pairs=pairs, **options)
    scores, argmax = maxsim_reference(queries, documents, pairs=pairs, return_argmax=True, dtype=torch.float64, **options)
    assert scores.shape == need.scores.shape
    assert torch.equal(scores.isinf(), need.scores.isinf())
    assert torch.allclose(scores, need.scores, rtol=1e-12, atol=1e-12)
    assert torch.equal(argmax.long(), need.argmax)


@pytest.mark.parametrize(("dtype", "Nq", "Lq", "B", "Ld"), BY_DTYPE)
def test_sizes(dtype, Nq, Lq, B, Ld):
    agree(make.gauss(Nq, Lq, D, dtype=dtype), make.gauss(B, Ld, D, dtype=dtype, seed=1))


@pytest.mark.parametrize(
    ("Lq", "B", "Ld"), [(1, 1, 1), (31, 100, 63), (1000, 7, 100), (17, 1000, 7), (0, 3, 4), (3, 0, 4), (3, 4, 0)]
)
def test_one_query(Lq, B, Ld):
    """`[Lq, d]` gives `[B]`."""
    scores = agree(make.gauss(Lq, D), make.gauss(B, Ld, D, seed=1))
    assert scores.shape == (B,)


@pytest.mark.parametrize("seed", range(8))
def test_random_sizes(seed):
    """Sizes nobody chose, small enough that a wrong edge shows."""
    Nq, Lq, B, Ld = (n + 1 for n in make.sizes(4, 150, seed=seed))
    agree(make.gauss(Nq, Lq, D, seed=seed), make.gauss(B, Ld, D, seed=seed + 1))


@pytest.mark.parametrize("Lq", [16, 17, 24, 31, 32, 33, 48, 64, 65, 127, 128, 129, 256, 257])
@pytest.mark.parametrize("Nq", [5, 30])
def test_query_lengths_around_tiles(Nq, Lq):
    """Peers fail between 17 and 31 and above 128."""
    agree(make.gauss(Nq, Lq, D), make.gauss(40, 33, D, seed=1))


@pytest.mark.parametrize("Ld", [15, 16, 17, 32, 33, 64, 65, 127, 128, 129, 191, 255, 256, 257])
@pytest.mark.parametrize("Nq", [1, 70])
def test_document_lengths_around_tiles(Nq, Ld):
    agree(make.gauss(Nq, 32, D), make.gauss(37, Ld, D, seed=1))


@pytest.mark.parametrize("winners", [False, True])
@pytest.mark.parametrize(("d", "dtype"), [(D, HALF), (D, SINGLE), (768, HALF)])
def test_many_rows_and_many_documents(monkeypatch, d, dtype, winners):
    """Row maxima of more documents than a workspace holds at once (made small here): several launches, one result."""
    monkeypatch.setattr(combine, "ROWS_BYTES", 1 << 20)
    agree(make.gauss(30, 100, d, dtype=dtype), make.gauss(400, 7, d, dtype=dtype, seed=1), return_argmax=winners)
    if dtype == HALF:
        agree(make.packed(make.sizes(100, 60, low=0), d), make.packed(make.sizes(400, 9), d, seed=1), return_argmax=winners)


@pytest.mark.parametrize(("query", "document"), SIDES)
def test_masks(query, document):
    """NaN and Inf stand in every invalid position and are never read into a result."""
    masks = make.masks(query, "query", 7, 31) | make.masks(document, "document", 100, 63, seed=1)
    queries = make.dirty(make.gauss(7, 31, D), masks.get("query_mask"), masks.get("query_lengths"))
    documents = make.dirty(make.gauss(100, 63, D, seed=1), masks.get("document_mask"), masks.get("document_lengths"))
    agree(queries, documents, **masks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 31, 63, 100), (100, 31, 63, 100)])
def test_masks_in_every_dtype(dtype, shape):
    Nq, Lq, B, Ld = shape
    masks = make.masks("both", "query", Nq, Lq) | make.masks("both", "document", B, Ld, seed=1)
    queries = make.dirty(make.gauss(Nq, Lq, D, dtype=dtype), masks["query_mask"], masks["query_lengths"])
    documents = make.gauss(B, Ld, D, dtype=dtype, seed=1)
    agree(queries, make.dirty(documents, masks["document_mask"], masks["document_lengths"]), **masks)


@pytest.mark.parametrize("mask_dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_mask_dtypes(mask_dtype):
    masks = make.masks("mask", "query", 7, 31, mask_dtype=mask_dtype)
    masks |= make.masks("mask", "document", 40, 63, seed=1, mask_dtype=mask_dtype)
    agree(
        make.dirty(make.gauss(7, 31, D), masks["query_mask"]),
        make.dirty(make.gauss(40, 63, D), masks["document_mask"]),
        **masks,
    )


@pytest.mark.parametrize("length_dtype", [torch.int32, torch.int64])
def test_length_dtypes(length_dtype):
    masks = make.masks("lengths", "query", 7, 31, length_dtype=length_dtype)
    masks |= make.masks("lengths", "document", 40, 63, seed=1, length_dtype=length_dtype)
    queries = make.dirty(make.gauss(7, 31, D), None, masks["query_lengths"])
    agree(queries, make.dirty(make.gauss(40, 63, D), None, masks["document_lengths"]), **masks)


def test_masks_of_one_query():
    """`[Lq]` masks and `[]` lengths belong to a query `[Lq, d]`."""
    mask, length = make.mask(31), torch.tensor(20, device=make.device)
    query = make.dirty(make.gauss(31, D), mask, length)
    agree(query, make.gauss(40, 63, D, seed=1), query_mask=mask, query_lengths=length)


def test_strided_masks_and_lengths():
    """Views of larger masks, and one mask expanded over all documents."""
    mask = make.mask(100, 126, seed=1)[:, ::2]
    documents = make.dirty(make.gauss(100, 63, D, seed=1), mask)
    lengths = make.lengths(14, high=31)[::2]
    queries = make.dirty(make.gauss(7, 31, D), None, lengths)
    agree(queries, documents, document_mask=mask, query_lengths=lengths)
    one, length = make.mask(1, 63, seed=2).expand(100, 63), make.lengths(1, high=63, seed=3).expand(100)
    documents = make.dirty(make.gauss(100, 63, D, seed=1), one, length)
    agree(queries, documents, document_mask=one, document_lengths=length, query_lengths=lengths)


@pytest.mark.parametrize("beyond", [1, 5, 1000, BIG, 2**32 + 3, 2**40])
@pytest.mark.parametrize("Nq", [1, 70])
def test_lengths_beyond_the_padded_size(Nq, beyond):
    """Clamped: the next document, whose tokens would win every maximum, is never read."""
    documents = make.gauss(40, 63, D, seed=1)
    documents[1::2] *= 50
    dtype = torch.int32 if beyond <= BIG else torch.int64
    lengths = torch.full((40,), beyond, dtype=dtype, device=make.device)
    if beyond < BIG:
        lengths += 63
    queries = make.gauss(Nq, 31, D)
    scores = agree(queries, documents, document_lengths=lengths)
    assert make.same_bits(scores, maxsim(queries, documents, document_lengths=torch.full_like(lengths, 63)))
    longer = torch.full((Nq,), min(beyond, BIG), dtype=torch.int32, device=make.device)
    agree(queries, documents, query_lengths=longer)
    agree(make.gauss(40, 31, D), documents, pairs=True, document_lengths=lengths, query_lengths=lengths)


def test_negative_lengths_mean_nothing():
    lengths = make.lengths(40, high=63) - 20
    agree(make.gauss(7, 31, D), make.dirty(make.gauss(40, 63, D), None, lengths), document_lengths=lengths)


@pytest.mark.parametrize("Nq", [1, 7, 100])
def test_nan_in_valid_tokens_is_never_hidden(Nq):
    """First, last, in the middle, beside larger values; other documents and queries stay what they were."""
    queries, documents = make.gauss(Nq, 31, D), make.gauss(60, 200, D, seed=1)
    for number, token in enumerate([0, 1, 15, 16, 63, 64, 100, 127, 128, 198, 199]):
        documents[5 * number, token, (37 * number) % D] = float("nan")
        documents[5 * number, (token + 1) % 200] *= 30
    if Nq > 1:
        queries[Nq // 2, 30, 5] = float("nan")
    scores = agree(queries, documents)
    assert bool(scores[:, ::5].isnan().all(0)[:11].all())
    lengths = torch.full((60,), 199, device=make.device)
    agree(queries, documents, document_lengths=lengths)


def test_infinite_values_of_valid_tokens_follow_the_arithmetic():
    queries, documents = make.gauss(7, 31, D), make.gauss(40, 63, D, seed=1)
    documents[3, 5, 7] = float("inf")
    documents[4, 62, 7] = float("-inf")
    documents[5, :, 7] = float("-inf")
    agree(queries, documents)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("Nq", [1, 70])
def test_negative_maxima(dtype, Nq):
    """Padding never acts as a zero, in a tile's tail neither."""
    queries, documents = make.gauss(Nq, 31, D, dtype=dtype).abs(), -make.gauss(40, 70, D, dtype=dtype, seed=1).abs()
    lengths = make.lengths(40, high=70).clamp(min=1)
    assert bool((agree(queries, documents) < 0).all())
    assert bool((agree(queries, documents, document_lengths=lengths) < 0).all())


@pytest.mark.parametrize("Nq", [1, 7, 70])
def test_empty_documents_and_queries(Nq):
    queries, documents = make.gauss(Nq, 31, D), make.gauss(40, 63, D, seed=1)
    lengths = make.lengths(40, high=63)
    lengths[::3] = 0
    asked = torch.full((Nq,), 31, device=make.device)
    asked[Nq // 2] = 0
    scores = agree(
        make.dirty(queries, None, asked), make.dirty(documents, None, lengths), document_lengths=lengths, query_lengths=asked
    )
    assert bool((scores[Nq // 2] == 0).all())
    agree(queries, documents, document_mask=torch.zeros(40, 63, dtype=torch.bool, device=make.device))
    agree(queries, documents, query_mask=torch.zeros(Nq, 31, dtype=torch.bool, device=make.device))
    agree(queries, documents[:, :0])
    agree(queries[:, :0], documents[:, :0])


@pytest.mark.parametrize(
    ("which", "how"),
    [
        *[
            ("documents", how)
            for how in ("transposed", "batch inside", "every second element", "wider rows", "odd rows", "unaligned")
        ],
        *[("queries", how) for how in ("transposed", "odd rows", "unaligned")],
        ("both", "transposed"),
        ("both", "unaligned"),
    ],
)
def test_strides(which, how):
    queries, documents = make.gauss(7, 31, D), make.gauss(40, 63, D, seed=1)
    if which != "documents":
        queries = make.strided(queries, how)
    if which != "queries":
        documents = make.strided(documents, how)
    agree(queries, documents)
    if which == "documents":
        agree(make.gauss(31, D), documents)


@pytest.mark.parametrize(
    ("dtype", "how"), [(BFLOAT, "unaligned"), (SINGLE, "unaligned"), (SINGLE, "transposed"), (BFLOAT, "odd rows")]
)
def test_strides_in_other_dtypes(dtype, how):
    queries, documents = make.gauss(70, 31, D, dtype=dtype), make.gauss(40, 63, D, dtype=dtype, seed=1)
    agree(make.strided(queries, how), make.strided(documents, how))


def test_expanded_inputs():
    """Stride 0 over queries, documents, tokens and width."""
    queries, documents = make.gauss(1, 31, D).expand(7, 31, D), make.gauss(1, 63, D, seed=1).expand(40, 63, D)
    agree(queries, documents)
    agree(make.gauss(7, 31, D), make.gauss(40, 1, D).expand(40, 63, D))
    agree(make.gauss(7, 31, 1).expand(7, 31, D), make.gauss(40, 63, 1, seed=1).expand(40, 63, D))
    agree(queries, make.gauss(40, 63, D, seed=1).expand(7, 40, 63, D))
    agree(queries, documents[:7], pairs=True)


def test_a_slice_of_a_larger_tensor():
    """Neighbours of the slice are NaN: a read outside of it shows."""
    room = torch.full((44, 70, 160), float("nan"), device=make.device).to(HALF)
    room[2:42, 3:66, 16:144] = make.gauss(40, 63, D, seed=1)
    queries = torch.full((9, 40, 160), float("nan"), device=make.device).to(HALF)
    queries[1:8, 5:36, 16:144] = make.gauss(7, 31, D)
    agree(queries[1:8, 5:36, 16:144], room[2:42, 3:66, 16:144])
    agree(queries[1, 5:36, 16:144], room[2:42, 3:66, 16:144])


@pytest.mark.parametrize("d", [1, 7, 31, 63, 96, 100, 128, 200, 256, 384, 768, 1000, 1024, 2048, 4096])
def test_widths(d):
    documents = make.gauss(31, 63, d, seed=1)
    agree(make.gauss(7, 31, d), documents)
    if d in (1, 96, 100, 384, 768, 1000):
        agree(make.gauss(31, d), documents)


@pytest.mark.parametrize(
    ("dtype", "d"), [(BFLOAT, 96), (BFLOAT, 1000), (SINGLE, 1), (SINGLE, 31), (SINGLE, 384), (SINGLE, 1024)]
)
def test_widths_in_other_dtypes(dtype, d):
    agree(make.gauss(7, 31, d, dtype=dtype), make.gauss(31, 63, d, dtype=dtype, seed=1))


@pytest.mark.parametrize("d", [96, 768, 1000])
def test_widths_masked(d):
    masks = make.masks("both", "query", 7, 100) | make.masks("both", "document", 31, 300, seed=1)
    queries = make.dirty(make.gauss(7, 100, d), masks["query_mask"], masks["query_lengths"])
    documents = make.dirty(make.gauss(31, 300, d, seed=1), masks["document_mask"], masks["document_lengths"])
    agree(queries, documents, **masks)


@pytest.mark.parametrize("d", [768, 1000])
def test_wide_and_strided(d):
    documents = make.strided(make.gauss(31, 63, d, seed=1), "odd rows")
    agree(make.gauss(7, 31, d), documents)
    agree(make.gauss(7, 31, d), documents.unsqueeze(0).expand(7, 31, 63, d))


def test_large_values():
    """70000 is infinite in FP16, and so is a product of FP16 numbers: neither FP32 inputs nor sums may pass through it."""
    queries, documents = make.gauss(7, 31, D, dtype=SINGLE), make.gauss(40, 63, D, dtype=SINGLE, seed=1)
    scores = agree(queries * 70000, documents * 70000)
    assert bool(scores.isfinite().all())
    scores = agree(make.gauss(7, 31, D) * 300, make.gauss(40, 63, D, seed=1) * 300)
    assert float(scores.max()) > 1e6
    agree(queries * 1e-12, documents * 1e-12)


def test_fp32_inputs_keep_their_bits():
    """Tokens that differ in the last bits only: TF32 or 16-bit products would not tell them apart."""
    base = make.unit(1, 1, D, dtype=SINGLE)
    documents = base * (1 + torch.arange(100, device=make.device)[:, None, None] * 2.0**-18)
    scores = agree(base.expand(3, 31, D), documents)
    assert bool((scores.diff(dim=1) > 0).all())
    agree(make.gauss(40, 63, D, dtype=SINGLE)[0], documents)


def test_tf32_where_torch_allows_it():
    """The user's own setting lets FP32 inputs round to TF32 (10 bits): looser, still right, and read through torch's new API."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    queries, documents = make.gauss(7, 31, D, dtype=SINGLE), make.gauss(40, 63, D, dtype=SINGLE, seed=1)
    need = truth.oracle(queries, documents)
    try:
        setting.fp32_precision = "tf32"
        truth.check_scores(maxsim(queries, documents), need, 2.0**-10)
        setting.fp32_precision = "ieee"
        truth.check_scores(maxsim(queries, documents), need)
    finally:
        setting.fp32_precision = before


@pytest.mark.parametrize("pairs", [False, True])
def test_few_long_documents(pairs):
    """Three documents cannot fill a GPU unless their token axis is split."""
    documents = make.gauss(3, 20000, D, seed=1)
    queries = make.gauss(3, 32, D)
    lengths = torch.tensor([20000, 1, 12345], device=make.device)
    agree(queries, documents, pairs=pairs)
    agree(queries, make.dirty(documents, None, lengths), pairs=pairs, document_lengths=lengths)
    if not pairs:
        agree(queries[0], documents)
        agree(queries[0], make.dirty(documents, None, lengths * 0), document_lengths=lengths * 0)
        agree(make.gauss(1000, D), documents[:1])


def test_few_long_documents_with_nan():
    documents = make.gauss(3, 20000, D, seed=1)
    documents[1, 17000, 3] = float("nan")
    agree(make.gauss(32, D), documents)


@pytest.mark.parametrize("dtype", [BFLOAT, SINGLE])
def test_few_long_documents_in_other_dtypes(dtype):
    agree(make.gauss(32, D, dtype=dtype), make.gauss(2, 30000, D, dtype=dtype, seed=1))


@pytest.mark.parametrize("out", [torch.float16, torch.bfloat16], ids=str)
def test_scores_of_another_dtype_where_counts_change(out):
    """As integrations ask for them; a call of new counts takes a recorded launch."""
    queries, documents = make.gauss(2, 8, 32), make.gauss(60, 9, 32, seed=1)
    for count in (40, 41, 42, 43, 60):
        found = run(queries, documents[:count], Options(out=out))
        assert torch.equal(found, maxsim(queries, documents[:count]).to(out))
