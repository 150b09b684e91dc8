"""The bounds hold: adversarial tokens, every kind of codes, float and quantised queries, against the scores as computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from inputs import on_cpu as cases
from maxsim_kernels import Int8Tokens, Packed, maxsim, maxsim_reference, pack, quantize_int8
from maxsim_kernels.search import Residuals, residuals_of
from maxsim_kernels.search.bounds import query_terms
from search_cases import CPU_KINDS, coded

SHAPES = ("gauss", "codes", "near ties", "spike", "constant", "shifted", "zeros", "half codes")


def tokens(shape: str, count: int, d: int, exponent: int, seed: int) -> Tensor:
    """Adversarial tokens: `shape` says how they are made, `exponent` how large they are (FP32 denormals to 2^126)."""
    draw = np.random.default_rng(seed)
    made = {
        "gauss": lambda: draw.normal(size=(count, d)),
        "codes": lambda: draw.integers(-127, 128, (count, d)) * 1.0,
        "half codes": lambda: draw.integers(-127, 127, (count, d)) + 0.5,  # the largest residual there is
        "near ties": lambda: np.repeat(draw.normal(size=(1, d)), count, 0) * (1 + draw.integers(-3, 4, (count, 1)) * 2.0**-22),
        "spike": lambda: np.eye(d)[draw.integers(0, d, count)] * 1e4 + draw.normal(size=(count, d)),
        "constant": lambda: np.repeat(draw.normal(size=(count, 1)), d, 1),
        "shifted": lambda: 100 + draw.normal(size=(count, d)),
        "zeros": lambda: draw.normal(size=(count, d)) * (draw.random((count, 1)) < 0.5),
    }[shape]()
    return torch.from_numpy(np.ldexp(made, exponent)).clamp(-3e38, 3e38).float()


@st.composite
def corpora(draw, dtype: torch.dtype = torch.float32):
    d = draw(st.sampled_from([1, 2, 3, 8, 31, 128, 513]))
    sides = []
    for least in (1, 0):
        lengths = draw(st.lists(st.integers(least, 6), min_size=1, max_size=4))
        shape, exponent = draw(st.sampled_from(SHAPES)), draw(st.sampled_from([0, 0, 0, -8, 7, 20, -30, -140, 60, 118]))
        seed = draw(st.integers(0, 2**32))
        sides.append(pack([tokens(shape, n, d, exponent, seed + i).to(dtype) for i, n in enumerate(lengths)], dim=d))
    return tuple(sides)


def check(queries: Packed, documents: Packed, kind: str, quantize_queries: bool) -> None:
    """|exact - approximate| <= width wherever the width is finite; both scores are what the paths compute."""
    try:
        codes = coded(documents, kind)
    except ValueError:
        assume(False)
    width = query_terms(queries, codes, quantize_queries).width(residuals_of(documents, codes))
    exact = maxsim(queries, documents).double()
    approximate = maxsim(queries, codes, quantize_queries=quantize_queries).double()
    true = maxsim_reference(queries, documents, dtype=torch.float64)
    judged = torch.isfinite(width) & (documents.lengths > 0)
    for score in (exact, true):
        assert ((score - approximate).abs() <= width)[judged].all(), (score - approximate, width)
    sound = torch.isfinite(exact) & torch.isfinite(approximate)
    assert (sound | ~torch.isfinite(width) | (documents.lengths == 0)).all(), "what is not finite has no bound"


@pytest.mark.parametrize("quantize_queries", [True, False])
@pytest.mark.parametrize("kind", CPU_KINDS)
@settings(max_examples=60, deadline=None)
@given(corpora())
def test_no_score_leaves_its_bounds(kind, quantize_queries, sides):
    check(*sides, kind, quantize_queries)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sixteen_bits(dtype, data):
    sides = data.draw(corpora(dtype))
    check(*sides, data.draw(st.sampled_from(CPU_KINDS)), data.draw(st.booleans()))


@pytest.mark.parametrize("kind", CPU_KINDS)
def test_the_worst_residual_reaches_most_of_its_bound(kind):
    """A query that points where the residual does: the bound cannot be made much smaller, so the test above can fail."""
    d = 64
    documents = pack([cases.gauss(1, d, seed=n) for n in range(20)])
    codes = coded(documents, kind)
    meant = codes.dequantize()
    assert isinstance(meant, Packed)
    queries = pack([documents[n] - meant[n] for n in range(20)])
    width = query_terms(queries, codes, False).width(residuals_of(documents, codes)).diagonal()
    exact, approximate = (maxsim(queries, one, quantize_queries=False).diagonal() for one in (documents, codes))
    gap = (exact - approximate).abs().double()
    assert (gap <= width).all()
    assert (gap / width).max() > 0.9


def test_flushed_denormals():
    """With flush-to-zero on, denormal inputs and results are lost: the bounds have room for that."""
    queries = pack([tokens("gauss", 3, 40, -126, 1), tokens("gauss", 2, 40, 20, 2)])
    documents = pack([tokens("gauss", 4, 40, exponent, exponent % 97) for exponent in (-20, -126, -130, 0)])
    codes = quantize_int8(documents, "document")
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    try:
        for quantize_queries in (True, False):
            scores = [maxsim(queries, one, quantize_queries=quantize_queries).double() for one in (documents, codes)]
            width = query_terms(queries, codes, quantize_queries).width(residuals_of(documents, codes))
            assert ((scores[0] - scores[1]).abs() <= width).all()
    finally:
        torch.set_flush_denormal(False)


def test_what_is_not_finite_has_no_bound():
    documents = pack([torch.randn(3, 8), torch.tensor([[torch.nan] * 8]), torch.tensor([[torch.inf] * 8]), torch.randn(0, 8)])
    codes = quantize_int8(documents)
    residuals = residuals_of(documents, codes)
    assert torch.isfinite(residuals.errors).tolist() == [True, False, False, True]
    queries = pack([torch.randn(2, 8), torch.full((1, 8), torch.nan), torch.full((1, 8), 1e38), torch.randn(0, 8)])
    finite = torch.isfinite(query_terms(queries, codes).width(residuals)).tolist()
    assert finite[0] == [True, False, False, True]
    assert finite[1] == finite[2] == [False] * 4
    for scale in (0.0, -1.0, torch.nan):
        odd = Int8Tokens(codes.codes, torch.full_like(codes.scales, scale), None, "token")
        assert not torch.isfinite(residuals_of(documents, odd).errors[:3]).any()


def test_residuals_are_rounded_up_and_small():
    documents = cases.packed([4, 0, 7, 1], 96, make=cases.gauss)
    codes = quantize_int8(documents, "document")
    residuals = residuals_of(documents, codes)
    meant = codes.dequantize(torch.float64)
    assert isinstance(meant, Packed)
    for n in (0, 2, 3):
        true = (documents[n].double() - meant[n]).norm(dim=1).max()
        assert true <= residuals.errors[n].double() <= true * (1 + 2.0**-20)
        assert documents[n].double().norm(dim=1).max() <= residuals.norms[n].double()
    assert residuals.errors[1] == residuals.norms[1] == 0
    scattered = residuals_of(cases.scattered(documents), codes)
    assert torch.equal(scattered.errors, residuals.errors)


def test_refusals():
    documents = cases.packed([4, 2], 8)
    codes = quantize_int8(documents)
    with pytest.raises(ValueError, match=r"codes: got 2 documents of d = 8, need 1 of d = 8"):
        residuals_of(documents.select([0]), codes)
    with pytest.raises(ValueError, match=r"codes: document 0 has 4 tokens, need 2 as in documents"):
        residuals_of(documents.select([1, 0]), codes)
    with pytest.raises(ValueError, match=r"codes: got Int8Tokens of a view, need .* end to end"):
        residuals_of(documents, codes.select([0, 1]))
    with pytest.raises(ValueError, match=r"residuals\.errors: got torch\.float64"):
        Residuals(torch.zeros(2, dtype=torch.float64), torch.zeros(2))
    with pytest.raises(ValueError, match=r"residuals\.norms: got 3 entries, need 2 as errors"):
        Residuals(torch.zeros(2), torch.zeros(3))
