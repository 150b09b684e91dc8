"""INT8 and FP8 documents on a GPU against the float64 truth of their own codes; INT8 fidelity against FP32."""

from __future__ import annotations

import pytest
import torch

from inputs import on_gpu as make
from maxsim_kernels import Fp8Tokens, Int8Tokens, Packed, maxsim, maxsim_pairs, quantize_fp8, quantize_int8
from truth import agree

D = 128
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
COUNTS = [3, 0, 31, 1, 7, 100, 0, 1000, 63, 64, 65, 128, 129, 0]
FORMS = ["int8-token", "int8-document", "int8-corpus", "int8-affine-token", "int8-affine-document", "int8-affine-corpus"]
FORMS += ["fp8-token", "fp8-document", "fp8-corpus"]
USUAL = ["int8-token", "int8-document", "fp8-document"]


def quantized(form, tokens, **padding):
    kind, *words = form.split("-")
    if kind == "fp8":
        return quantize_fp8(tokens, words[-1], **padding)
    return quantize_int8(tokens, words[-1], affine="affine" in words, **padding)


def corpus(layout, d=D, seed=1):
    """Tokens of all sizes of norm: a coarse scale must serve long and short ones."""
    if layout == "packed":
        rows = make.packed(COUNTS, d, seed=seed)
        scale = torch.linspace(0.25, 1, rows.values.shape[0], device=make.device)
        return rows.with_values(rows.values * scale[:, None].to(HALF))
    return make.gauss(40, 63, d, seed=seed) * torch.linspace(0.25, 1, 40, device=make.device)[:, None, None].to(HALF)


@pytest.mark.parametrize("form", [form for form in FORMS if "affine" not in form])
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("Nq", [1, 70])
def test_forms(form, layout, Nq):
    """Every scale granularity with queries quantised on the fly."""
    agree(make.gauss(Nq, 31, D), quantized(form, corpus(layout)))


@pytest.mark.parametrize(
    ("granularity", "layout", "Nq"),
    [
        ("token", "dense", 1),
        ("token", "packed", 70),
        ("document", "packed", 1),
        ("document", "dense", 70),
        ("corpus", "dense", 70),
    ],
)
def test_affine_forms(granularity, layout, Nq):
    agree(make.gauss(Nq, 31, D), quantized(f"int8-affine-{granularity}", corpus(layout)))


@pytest.mark.parametrize(
    ("form", "layout", "dtype"),
    [
        ("int8-token", "dense", HALF),
        ("int8-token", "packed", SINGLE),
        ("int8-document", "packed", BFLOAT),
        ("int8-document", "dense", SINGLE),
        ("int8-corpus", "dense", HALF),
        ("int8-corpus", "packed", HALF),
        ("int8-affine-token", "dense", HALF),
        ("int8-affine-document", "packed", SINGLE),
        ("fp8-document", "dense", HALF),
        ("fp8-document", "packed", BFLOAT),
        ("fp8-token", "dense", SINGLE),
    ],
)
def test_float_queries(form, layout, dtype):
    """`quantize_queries=False`: float queries times codes, in the queries' own precision."""
    documents = quantized(form, corpus(layout))
    agree(make.gauss(7, 31, D, dtype=dtype), documents, quantize_queries=False)
    if dtype == HALF:
        agree(make.gauss(31, D, dtype=dtype), documents, quantize_queries=False)


@pytest.mark.parametrize(("form", "dtype"), [("int8-token", BFLOAT), ("int8-token", SINGLE), ("fp8-document", SINGLE)])
def test_queries_of_every_dtype_are_quantized(form, dtype):
    agree(make.gauss(7, 31, D, dtype=dtype), quantized(form, corpus("dense")))


@pytest.mark.parametrize("form", USUAL)
@pytest.mark.parametrize(
    ("Nq", "Lq", "B", "Ld"),
    [
        (1, 1, 1, 1),
        (1, 1000, 63, 100),
        (7, 1000, 31, 63),
        (31, 17, 63, 1000),
        (100, 31, 7, 129),
        (3, 17, 1000, 31),
        (0, 7, 7, 7),
        (7, 0, 7, 7),
        (7, 7, 0, 7),
        (7, 7, 7, 0),
    ],
)
def test_sizes(form, Nq, Lq, B, Ld):
    documents = make.gauss(B, Ld, D, seed=1)
    agree(make.gauss(Nq, Lq, D), quantized(form, documents))


@pytest.mark.parametrize(
    ("form", "d"),
    [
        *[("int8-token", d) for d in (1, 7, 31, 96, 100, 200, 384, 768, 1000, 1024)],
        *[("int8-document", d) for d in (96, 768, 1000)],
    ],
)
def test_widths(form, d):
    agree(make.gauss(7, 31, d), quantized(form, corpus("packed", d)))


@pytest.mark.parametrize("d", [31, 384, 1000])
def test_widths_fp8(d):
    agree(make.gauss(7, 31, d), quantized("fp8-document", corpus("dense", d)))


@pytest.mark.parametrize("d", [100, 768])
def test_widths_of_float_queries(d):
    agree(make.gauss(7, 31, d), quantized("int8-token", corpus("dense", d)), quantize_queries=False)


@pytest.mark.parametrize("d", [1030, 3000])
@pytest.mark.parametrize("form", ["int8-token", "int8-corpus"])
def test_very_wide(form, d):
    """Past d = 1040 an integer sum may need more than FP32's 24 bits: it must be rounded, never cut."""
    agree(make.gauss(3, 7, d).abs(), quantized(form, make.gauss(5, 9, d, seed=1).abs()))


def test_integer_products_are_exact():
    """Codes of 127 at d = 1000: 16,128,873 needs all 24 bits; with unit scales the score is that integer."""
    codes = torch.full((3, 40, 1000), 127, dtype=torch.int8, device=make.device)
    codes[:, 0, 0] = 126
    codes[:, 1:] = -127
    for scales in (
        torch.ones((), device=make.device),
        torch.ones(3, device=make.device),
        torch.ones(3, 40, device=make.device),
    ):
        documents = Int8Tokens(codes, scales.to(HALF))
        queries = torch.full((5, 1, 1000), 127.0, device=make.device)
        assert maxsim(queries, documents).tolist() == [[127.0 * 127 * 999 + 127 * 126] * 3] * 5
        assert maxsim(-queries, documents).tolist() == [[127.0 * 127 * 1000] * 3] * 5


@pytest.mark.parametrize(
    ("form", "padding"),
    [
        *[(form, padding) for form in USUAL for padding in ("lengths", "both")],
        ("int8-token", "mask"),
        ("int8-affine-token", "both"),
    ],
)
def test_masks(form, padding):
    """Codes of padding are 127 and its scales NaN here: neither is read into a result."""
    masks = make.masks(padding, "document", 40, 63, seed=1)
    mask, lengths = masks.get("document_mask"), masks.get("document_lengths")
    stored = quantized(form, make.dirty(make.gauss(40, 63, D, seed=1), mask, lengths), mask=mask, lengths=lengths)
    invalid = ~make.valid(63, mask, lengths)
    if isinstance(stored, Int8Tokens):
        stored.codes[invalid] = 127
    if stored.granularity == "token":
        stored.scales[invalid] = float("nan")
    asked = make.masks("both", "query", 7, 31)
    queries = make.dirty(make.gauss(7, 31, D), asked["query_mask"], asked["query_lengths"])
    agree(queries, stored, **masks, **asked)
    if padding == "both":
        agree(queries, stored, quantize_queries=False, **masks, **asked)


@pytest.mark.parametrize("form", USUAL)
def test_lengths_beyond_the_padded_size(form):
    documents = make.gauss(40, 63, D, seed=1)
    documents[1::2] *= 50
    lengths = torch.full((40,), 2**31 - 1, device=make.device)
    agree(make.gauss(7, 31, D), quantized(form, documents), document_lengths=lengths)


@pytest.mark.parametrize("form", [*USUAL, "int8-corpus", "int8-affine-document"])
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_negative_maxima(form, layout):
    """An integer maximum that starts at zero would win here; so would padding."""
    rows = corpus(layout)
    rows = rows.with_values(-rows.values.abs()) if isinstance(rows, Packed) else -rows.abs()
    assert bool((agree(make.gauss(7, 31, D).abs(), quantized(form, rows)) < 0).all())


@pytest.mark.parametrize("form", [*USUAL, "int8-corpus", "int8-affine-token"])
def test_zero_tokens(form):
    """A zero token has scale 1 and codes 0: its products are 0, which beat negative ones; zero queries score 0."""
    documents = -make.gauss(40, 63, D, seed=1).abs()
    documents[::2, 5] = 0
    documents[7] = 0
    queries = make.gauss(7, 31, D).abs()
    queries[3] = 0
    scores = agree(queries, quantized(form, documents))
    if "affine" not in form:
        assert bool((scores[:, ::2] == 0).all())
        assert bool((scores[3] == 0).all())
    if form in USUAL:
        agree(queries, quantized(form, documents), quantize_queries=False)


@pytest.mark.parametrize("form", ["int8-token", "int8-affine-token", "fp8-token"])
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_tokens(form, layout, bad):
    """A token that is not finite has a NaN scale, and its document a NaN score, for every query."""
    tokens = corpus(layout)
    if isinstance(tokens, Packed):
        tokens.values[int(tokens.starts[7]) + 500, 9] = bad
    else:
        tokens[7, 62, 9] = bad
    stored = quantized(form, tokens)
    for Nq, quantize_queries in ((1, True), (70, True), (7, False)):
        scores = agree(make.gauss(Nq, 31, D), stored, quantize_queries=quantize_queries)
        assert scores.isnan().all(0).nonzero().flatten().tolist() == [7]
        assert not bool(scores[:, :7].isnan().any())


@pytest.mark.parametrize(
    ("form", "quantize_queries"),
    [*[(form, True) for form in [*USUAL, "int8-corpus"]], ("int8-document", False), ("fp8-document", False)],
)
def test_nan_in_a_query_token(form, quantize_queries):
    queries = make.gauss(7, 31, D)
    queries[4, 30, 0] = float("nan")
    scores = agree(queries, quantized(form, corpus("packed")), quantize_queries=quantize_queries)
    filled = [n for n, count in enumerate(COUNTS) if count]
    assert scores[:, filled].isnan().all(1).nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("form", [*USUAL, "int8-corpus"])
def test_packed_and_masked_queries(form):
    asked = make.packed([4, 0, 31, 1, 100, 0], D)
    stored = quantized(form, corpus("packed"))
    agree(asked, stored)
    if form == "int8-token":
        agree(asked, stored, quantize_queries=False)
    masks = make.masks("lengths", "query", 7, 31)
    agree(make.dirty(make.gauss(7, 31, D), None, masks["query_lengths"]), stored, **masks)


@pytest.mark.parametrize("form", [*USUAL, "int8-corpus", "int8-affine-token"])
def test_per_query_documents(form):
    masks = make.masks("both", "document", 7, 5, 63, seed=1)
    documents = make.gauss(7, 5, 63, D, seed=1)
    agree(make.gauss(7, 31, D), quantized(form, documents))
    stored = quantized(form, documents, mask=masks["document_mask"], lengths=masks["document_lengths"])
    agree(make.gauss(7, 31, D), stored, **masks)
    if form == "int8-token":
        agree(make.gauss(7, 31, D), stored, quantize_queries=False, **masks)


@pytest.mark.parametrize("form", [*USUAL, "int8-affine-token"])
def test_pairs(form):
    dense, rows = quantized(form, corpus("dense")), quantized(form, corpus("packed"))
    agree(make.gauss(40, 31, D), dense, pairs=True)
    agree(make.packed(make.sizes(len(rows), 100), D), rows, pairs=True)
    if form == "int8-token":
        agree(make.gauss(len(rows), 31, D), rows, pairs=True)
        agree(make.gauss(40, 31, D), dense, pairs=True, quantize_queries=False)


@pytest.mark.parametrize("form", USUAL)
def test_selected_documents(form):
    """A view shares the codes; scales of documents are gathered with it."""
    stored = quantized(form, corpus("packed"))
    chosen = torch.tensor([7, 3, 3, 0, 13, 8], device=make.device)
    scores = agree(make.gauss(7, 31, D), stored.select(chosen))
    assert make.same_bits(scores, maxsim(make.gauss(7, 31, D), stored)[:, chosen])


def test_tokens_shared_by_documents_with_scales_of_their_own():
    """Overlapping windows over one buffer of codes, each with its own scale."""
    codes = quantize_int8(make.gauss(500, D, seed=1).unsqueeze(0)).codes[0]
    starts = torch.arange(0, 400, 4, device=make.device)
    windows = Packed.view(codes, starts, torch.full_like(starts, 100))
    scales = torch.linspace(0.001, 0.02, 100, device=make.device).to(HALF)
    agree(make.gauss(7, 31, D), Int8Tokens(windows, scales, granularity="document"))


@pytest.mark.parametrize(
    ("form", "how"),
    [
        *[("int8-token", how) for how in ("transposed", "every second element", "wider rows", "unaligned")],
        ("int8-document", "transposed"),
        ("fp8-document", "unaligned"),
        ("int8-affine-token", "wider rows"),
    ],
)
def test_strides(form, how):
    """Codes and scales with any strides."""
    stored = quantized(form, corpus("dense"))
    codes = make.strided(stored.codes.view(torch.int8), how).view(stored.codes.dtype)
    offset = (every_second(stored.offset),) if "affine" in form else ()
    agree(make.gauss(7, 31, D), type(stored)(codes, every_second(stored.scales), *offset))


def every_second(values):
    return torch.stack([values, values * 0 + 7], -1)[..., 0]


@pytest.mark.parametrize("form", USUAL)
def test_expanded_codes(form):
    stored = quantized(form, corpus("dense"))
    one = type(stored)(stored.codes[:1].expand(40, 63, D), stored.scales[:1].expand(stored.scales.shape))
    agree(make.strided(make.gauss(7, 31, D), "transposed"), one)


@pytest.mark.parametrize("form", USUAL)
def test_few_long_documents(form):
    stored = quantized(form, make.packed([20000, 0, 15000], D, seed=1))
    agree(make.gauss(32, D), stored)
    agree(make.gauss(3, 1000, D), stored)
    agree(make.gauss(32, D), quantized(form, make.gauss(2, 20000, D, seed=1)))


@pytest.mark.parametrize("form", USUAL)
def test_scales_of_any_float_dtype(form):
    """Scales are FP16 by default, and may be FP32."""
    stored = quantized(form, corpus("dense"))
    finer = type(stored)(stored.codes, stored.scales.float() * 1.0001)
    agree(make.gauss(7, 31, D), finer)


def test_extreme_scales():
    """A token of 60000 beside one of 1e-6: FP16 scales from subnormal to large, applied in FP32."""
    factors = torch.logspace(-6, 4.5, 63, device=make.device)
    documents = make.gauss(40, 63, D, dtype=SINGLE, seed=1) * factors[:, None]
    stored = quantize_int8(documents)
    agree(make.gauss(7, 31, D, dtype=SINGLE) * 1e3, stored)
    lengths = torch.arange(40, device=make.device) + 1
    agree(make.gauss(7, 31, D, dtype=SINGLE) * 1e-4, stored, document_lengths=lengths)


def ranks(values):
    return values.argsort(-1).argsort(-1).double()


def spearman(one, other):
    """Per row; continuous scores, so ties need no care."""
    one, other = (x - x.mean(-1, keepdim=True) for x in (ranks(one), ranks(other)))
    return (one * other).sum(-1) / (one.norm(dim=-1) * other.norm(dim=-1))


@pytest.mark.parametrize(
    ("granularity", "Lq", "Ld"), [("token", 32, 180), ("token", 128, 512), ("document", 32, 180), ("corpus", 32, 180)]
)
def test_int8_fidelity(granularity, Lq, Ld):
    """The paper's table (tab:int8): rank correlation and top-20 overlap with FP32 on normalised random tokens."""
    queries, documents = make.unit(32, Lq, D, dtype=SINGLE), make.unit(1000, Ld, D, dtype=SINGLE, seed=1)
    need, got = maxsim(queries, documents), maxsim(queries, quantize_int8(documents, granularity))
    correlation = spearman(need, got)
    # The paper's figure is for a scale a token: it holds for each query there, for the mean with coarser scales.
    assert float(correlation.min() if granularity == "token" else correlation.mean()) >= 0.999
    best = torch.zeros_like(need).scatter_(1, need.topk(20).indices, 1.0)
    assert float(best.gather(1, got.topk(20).indices).mean()) >= 0.95


def test_fp8_is_close_to_fp32():
    """e4m3 rounds each coordinate by up to 1/16: no rank guarantee, a correlation all the same."""
    queries, documents = make.unit(32, 32, D, dtype=SINGLE), make.unit(1000, 180, D, dtype=SINGLE, seed=1)
    got = maxsim(queries, quantize_fp8(documents))
    assert float(spearman(maxsim(queries, documents), got).min()) >= 0.95


def test_pairs_equal_the_diagonal():
    stored = quantize_int8(make.gauss(31, 63, D, seed=1))
    queries = make.gauss(31, 20, D)
    assert torch.allclose(maxsim_pairs(queries, stored), maxsim(queries, stored).diagonal(), rtol=1e-5, atol=1e-2)


def test_fp8_needs_hardware_that_has_it():
    """Before sm_89 there are no FP8 tensor cores: a clear error, never a silent detour."""
    if torch.cuda.get_device_capability() >= (8, 9):
        pytest.skip("this GPU has FP8")
    codes = torch.zeros(4, 9, D, dtype=torch.uint8, device=make.device).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"sm_89|8\.9"):
        maxsim(make.gauss(7, 31, D), Fp8Tokens(codes, torch.ones(4, device=make.device).to(HALF)))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE])
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("form", FORMS)
def test_codes_and_scales_are_those_of_a_cpu(form, layout, dtype):
    """One cache entry may be quantised on either: every division and rounding is the same."""
    tokens = corpus(layout)
    values = (tokens.values if layout == "packed" else tokens).to(dtype)
    spread = torch.logspace(-6, 3, values.shape[0], device=make.device).view(-1, *[1] * (values.dim() - 1))
    values = (values.float() * spread).to(dtype)
    tokens = tokens.with_values(values) if layout == "packed" else values
    here, there = quantized(form, tokens), quantized(form, tokens.to("cpu"))
    for mine, theirs in zip(parts(here), parts(there), strict=True):
        assert torch.equal(mine.cpu().view(torch.int8), theirs.view(torch.int8))


def parts(held):
    """Codes, scales and offset."""
    codes = held.codes.values if isinstance(held.codes, Packed) else held.codes
    offset = getattr(held, "offset", None)
    return [part.reshape(-1) for part in (codes, held.scales, offset) if part is not None]
