"""What `quantize_int8` stores: codes, FP16 scales and offsets; what it refuses. `test_int8.py` scores with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracle
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import Int8Tokens, Packed, quantize_fp8, quantize_int8

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
GRANULARITIES = ["token", "document", "corpus"]
LENGTHS = [3, 0, 31, 1, 7]


def spread(per, codes, granularity):
    """Scales or offsets broadcast over `[..., L, d]` or `[T, d]` (packed end to end), in float64."""
    per = per.double()
    if granularity == "corpus":
        return per
    if granularity == "token":
        return per[..., None]
    if isinstance(codes, Packed):
        return torch.cat([per[n].expand(int(length)) for n, length in enumerate(codes.lengths)])[:, None]
    return per[..., None, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("affine", [False, True])
def test_codes_follow_the_rounded_scale(dtype, layout, granularity, affine):
    tokens = cases.either(layout, dtype=dtype)
    stored = quantize_int8(tokens, granularity, affine=affine)
    assert isinstance(stored, Int8Tokens)
    assert stored.granularity == granularity
    assert stored.scales.dtype == torch.float16
    assert cases.values_of(stored.codes).dtype == torch.int8
    assert (stored.offset is not None) == affine
    x, codes = cases.values_of(tokens).double(), cases.values_of(stored.codes).double()
    scale = spread(stored.scales, stored.codes, granularity)
    error = (x - codes * scale).abs()
    if affine:
        offset = spread(stored.offset, stored.codes, granularity)
        error = (x - codes * scale - offset).abs()
        assert bool((error <= tol.AFFINE_STEPS * scale + tol.HALF_ROUNDING * offset.abs()).all())
    else:
        assert codes.min() >= -127
        assert bool((error <= tol.INT8_STEPS * scale).all())


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_symmetric_scale_is_the_largest_magnitude(layout, granularity):
    tokens = cases.either(layout)
    x = cases.values_of(tokens).abs().double()
    scales = quantize_int8(tokens, granularity).scales.double()
    if granularity == "token":
        need = x.amax(-1)
    elif granularity == "corpus":
        need = x.max()
    elif layout == "dense":
        need = x.amax((-1, -2))
    else:
        need = torch.stack([row.abs().max() if len(row) else torch.tensor(127.0) for row in tokens]).double()
    assert torch.allclose(scales, need / 127, rtol=tol.HALF_ROUNDING * 1.01, atol=tol.HALF_FLOOR)


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("affine", [False, True])
def test_dequantize(layout, granularity, affine):
    stored = quantize_int8(cases.either(layout), granularity, affine=affine)
    need = torch.from_numpy(oracle.dequantized(stored)[0])
    back = stored.dequantize()
    assert cases.values_of(back).dtype == torch.float32
    assert torch.allclose(cases.values_of(back).double(), need, rtol=1e-6, atol=1e-6)
    if layout == "packed":
        assert torch.equal(back.offsets, stored.codes.offsets)


def test_storage_ratio():
    tokens = cases.gauss(10, 30, 128, dtype=torch.float16)
    stored = quantize_int8(tokens)
    parts = (stored.codes, stored.scales)
    size = sum(part.numel() * part.element_size() for part in parts)
    assert tokens.numel() * 2 / size == pytest.approx(tol.STORAGE_RATIO)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("affine", [False, True])
def test_zero_tokens(granularity, affine):
    stored = quantize_int8(torch.zeros(2, 3, 8), granularity, affine=affine)
    assert stored.scales.eq(1).all()
    assert stored.codes.eq(0).all()
    assert stored.dequantize().eq(0).all()


def test_one_zero_token_among_others():
    tokens = cases.gauss(2, 3, 8)
    tokens[1, 2] = 0
    stored = quantize_int8(tokens)
    assert stored.scales[1, 2] == 1
    assert stored.codes[1, 2].eq(0).all()


@pytest.mark.parametrize("value", [0.75, -3.0])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_constant_tokens_survive_affine(value, granularity):
    back = quantize_int8(torch.full((2, 3, 8), value), granularity, affine=True).dequantize()
    assert torch.allclose(back, torch.full((2, 3, 8), value), rtol=tol.HALF_ROUNDING)


@pytest.mark.parametrize("magnitude", [1e-3, 1e-5, 1e-6, 1e-7, 1e-30])
@pytest.mark.parametrize("affine", [False, True])
def test_tiny_tokens_stay_tiny(magnitude, affine):
    """Scales below FP16's normal range: no division by a scale that was rounded to zero, no blow-up."""
    tokens = torch.linspace(-1, 1, 16).mul(magnitude).view(1, 1, 16)
    stored = quantize_int8(tokens, affine=affine)
    back = stored.dequantize()
    assert back.isfinite().all()
    allowed = max(tol.AFFINE_STEPS * magnitude / 127, 255 * tol.HALF_FLOOR)
    assert float((back - tokens).abs().max()) <= allowed * 1.01


@pytest.mark.parametrize("affine", [False, True])
def test_a_scale_beyond_float16_is_nan_or_refused(affine):
    """NaN marks the token where it has a scale of its own; a scale of several tokens is refused."""
    tokens = torch.tensor([[[1e8, -1e8, 1.0], [3.0, -1.0, 1.0]]])
    stored = quantize_int8(tokens, affine=affine)
    assert stored.scales.isnan().tolist() == [[True, False]]
    assert stored.codes[0, 0].eq(0).all()
    assert stored.dequantize().isnan().all(-1).tolist() == [[True, False]]
    for granularity in ("document", "corpus"):
        with pytest.raises(ValueError, match=f"^tokens: values too large, a {granularity} scale does not fit FP16"):
            quantize_int8(tokens, granularity, affine=affine)


def test_70000_is_kept():
    tokens = torch.tensor([[[70000.0, -35000.0, 0.0]]])
    assert torch.allclose(quantize_int8(tokens).dequantize(), tokens, atol=70000 / 127)


def test_view_with_poison_between_its_rows():
    view = cases.scattered(cases.packed(LENGTHS, 24, make=cases.gauss))
    whole = quantize_int8(cases.packed(LENGTHS, 24, make=cases.gauss), "corpus")
    assert torch.equal(quantize_int8(view, "corpus").scales, whole.scales), "tokens of no document never set a scale"


def test_given_corpus_scale():
    tokens = cases.gauss(4, 9, 24)
    for scale in (0.05, torch.tensor(0.05)):
        stored = quantize_int8(tokens, "corpus", scale=scale)
        rounded = np.float16(0.05)
        assert stored.scales.shape == ()
        assert float(stored.scales) == float(rounded)
        steps = tokens.double() / float(rounded)
        exact = steps.clamp(-127, 127)
        assert float((stored.codes.double() - exact).abs().max()) <= 0.5 + 1e-3
        assert bool(stored.codes[steps.abs() > 127.6].abs().eq(127).all())


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_corpus_scale(bad):
    with pytest.raises(ValueError, match="scale"):
        quantize_int8(cases.gauss(2, 3, 8), "corpus", scale=bad)


def test_bad_arguments():
    with pytest.raises(ValueError, match="granularity"):
        quantize_int8(cases.gauss(2, 3, 8), "row")
    with pytest.raises(ValueError, match="scale"):
        quantize_int8(cases.gauss(2, 3, 8), "token", scale=0.1)
    with pytest.raises(ValueError, match="mask"):
        quantize_int8(cases.packed([1, 2], 8), mask=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask"):
        quantize_int8(cases.gauss(2, 3, 8), mask=torch.ones(2, 4, dtype=torch.bool))
    for bad in (4, -1):
        with pytest.raises(ValueError, match=f"lengths.*{bad}"):
            quantize_int8(cases.gauss(2, 3, 8), lengths=torch.tensor([3, bad]))
    with pytest.raises(ValueError, match="int32"):
        quantize_int8(torch.ones(2, 3, 8, dtype=torch.int32))


@pytest.mark.parametrize("quantise", [quantize_int8, quantize_fp8])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": torch.tensor([[0.0, -torch.inf, 0.0]]).expand(2, 3)}, "mask: got .*float32.*need bool or 0/1 integers"),
        ({"mask": torch.tensor([[1, 2, 0]]).expand(2, 3)}, "mask: got integers other than 0 and 1"),
        ({"mask": [[1, 1, 1]]}, "mask: got list"),
        ({"lengths": torch.tensor([2.5, 1.0])}, "lengths: got .*float32.*need int32 or int64"),
        ({"lengths": torch.tensor([True, False])}, "lengths: got .*bool"),
    ],
)
def test_masks_and_lengths_are_checked_as_of_scores(quantise, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        quantise(cases.gauss(2, 3, 8), **options)
