"""FP8 (e4m3) tokens: what `quantize_fp8` stores, and `maxsim` over it."""

from __future__ import annotations

import pytest
import torch

import oracle
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import Fp8Tokens, maxsim, quantize_fp8

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 1e4])
def test_round_trip(dtype, layout, magnitude):
    tokens = cases.either(layout)
    tokens = tokens.with_values((tokens.values * magnitude).to(dtype)) if layout == "packed" else (tokens * magnitude).to(dtype)
    stored = quantize_fp8(tokens)
    assert isinstance(stored, Fp8Tokens)
    assert cases.values_of(stored.codes).dtype == torch.float8_e4m3fn
    assert stored.scales.dtype == torch.float16
    back = stored.dequantize()
    assert cases.values_of(back).dtype == torch.float32
    x, y = cases.values_of(tokens).double(), cases.values_of(back).double()
    largest = float(stored.scales.double().max())
    assert y.isfinite().all(), "a value beyond 448 scales became NaN"
    assert bool(((x - y).abs() <= tol.FP8_RELATIVE * x.abs() + tol.FP8_FLOOR_STEPS * largest).all())


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_dequantize_is_code_times_scale(layout):
    stored = quantize_fp8(cases.either(layout))
    need = torch.from_numpy(oracle.dequantized(stored)[0])
    assert torch.allclose(cases.values_of(stored.dequantize()).double(), need, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_scores(impl, dtype, layout):
    queries, documents = cases.gauss(3, 20, 24, dtype=dtype), quantize_fp8(cases.either(layout))
    truth = oracle.maxsim(queries, documents)
    oracle.check(maxsim(queries, documents, quantize_queries=False, impl=impl), truth, tol.SCORE_QUANTIZED)


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_scores_with_quantized_queries(impl, layout):
    """The default may round the queries to FP8 too, never more coarsely than that."""
    queries, documents = cases.gauss(3, 20, 24), quantize_fp8(cases.either(layout))
    truth = oracle.maxsim(queries, documents)
    oracle.check(maxsim(queries, documents, impl=impl), truth, tol.FP8_RELATIVE)


@pytest.mark.parametrize("d", [1, 7, 31, 63, 100, 1000])
def test_widths(impl, d):
    queries, documents = cases.gauss(2, 3, d), quantize_fp8(cases.either("packed", d))
    scores = maxsim(queries, documents, quantize_queries=False, impl=impl)
    oracle.check(scores, oracle.maxsim(queries, documents), tol.SCORE_QUANTIZED)


def test_padding_is_never_read(impl):
    tokens, lengths = cases.gauss(5, 9, 24), cases.lengths(5, high=9)
    documents = quantize_fp8(tokens)
    documents.codes.view(torch.uint8)[~cases.valid(9, None, lengths)] = 0x7F  # NaN in e4m3
    queries = cases.gauss(2, 3, 24, seed=1)
    scores = maxsim(queries, documents, document_lengths=lengths, quantize_queries=False, impl=impl)
    oracle.check(scores, oracle.maxsim(queries, documents, document_lengths=lengths), tol.SCORE_QUANTIZED)


def test_zero_tokens_and_empty_documents(impl):
    stored = quantize_fp8(torch.zeros(2, 3, 8))
    assert stored.dequantize().eq(0).all()
    assert stored.scales.isfinite().all()
    scores = maxsim(cases.grid(2, 3, 8), quantize_fp8(cases.packed([2, 0], 8)), impl=impl)
    assert scores[:, 1].eq(float("-inf")).all()


def test_non_finite_tokens_are_never_hidden(impl):
    tokens = cases.either("dense")
    tokens[2, 4, 7] = float("nan")
    try:
        stored = quantize_fp8(tokens)
    except ValueError as error:
        assert "finite" in str(error)  # noqa: PT017 - both answers are allowed, a finite score is not
        return
    assert maxsim(cases.gauss(2, 3, 24), stored, impl=impl)[:, 2].isnan().all()


def test_select(impl):
    documents, queries = quantize_fp8(cases.either("packed")), cases.gauss(2, 3, 24)
    chosen = torch.tensor([4, 0, 4, 1])
    assert cases.same_bits(
        maxsim(queries, documents.select(chosen), impl=impl), maxsim(queries, documents, impl=impl)[:, chosen]
    )


def test_gradients_are_refused(impl):
    with pytest.raises(ValueError, match="gradient"):
        maxsim(cases.gauss(2, 3, 24).requires_grad_(), quantize_fp8(cases.either("dense")), impl=impl)
