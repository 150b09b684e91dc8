"""The kernels of the search on a GPU without one: interpreted against the CPU's answers, and compiled for sm_80 and sm_90."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("TRITON_INTERPRET is set: kernels are interpreted, not compiled", allow_module_level=True)

import record_architectures as architectures
import record_resources as recorder
from maxsim_kernels import Packed, maxsim
from maxsim_kernels.gpu.geometry import fp32_precision
from maxsim_kernels.search import trust

Run = Callable[[str, str, int], None]


@pytest.mark.slow
@pytest.mark.every_change
@pytest.mark.parametrize(
    ("group", "checks"),
    [("search", 72), ("queries", 25), ("sample", 25), ("parts", 4), ("streams", 15), ("ahead", 2), ("kth", 6)],
)
def test_a_search_with_interpreted_kernels_gives_brute_forces_answers(interpreted: Run, group: str, checks: int) -> None:
    interpreted("search", group, checks)


@pytest.mark.slow
@pytest.mark.every_change
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "d", "longest"),
    [
        (torch.float16, 128, 32),
        (torch.bfloat16, 128, 300),
        (torch.float16, 128, 1024),
        (torch.float16, 24, 5),
        (torch.float16, 256, 64),
    ],
)
def test_kernels_compile_within_their_resources(tmp_path, architecture, dtype, d, longest) -> None:
    found = architectures.search_launches(dtype, d, longest, recorder.CAPABILITIES[architecture])
    marks = ["_mark_kernel", "_kth_kernel", "_mark_kernel"]
    names = ["_terms_kernel", "_leads_kernel", *marks, "_leads_kernel", "_kth_kernel", *marks, "_left_kernel"]
    names += (["_survivors_kernel", "_add_parts_kernel"] if longest > 128 else ["_survivors_kernel"]) * 2
    names += ["_fetch_kernel", "_groups_kernel", "_candidates_kernel", "_scores_kernel"]
    assert [one.kernel.__name__ for one in found] == names
    for one in found:
        binary = recorder.compiled(one, architecture)
        used = recorder.resources(binary, tmp_path)
        assert used["shared"] <= recorder.LIMITS[architecture], (one.kernel.__name__, used)
        # The square root of FP64 is a call, which takes some stack.
        assert used["spill_bytes"] <= 16 * (one.kernel.__name__ == "_terms_kernel"), (one.kernel.__name__, used)
        if one.kernel.__name__ == "_survivors_kernel":
            # The instructions that brute force's kernel takes on that GPU.
            assert ("wgmma.mma_async" if architecture == 90 else "mma.sync") in binary.asm["ptx"]


def _form(dtype: torch.dtype = torch.float32) -> trust.Form:
    return trust.form_of(torch.device("cpu"), dtype, 5, 7, 32, False)


def test_products_within_bounds_are_trusted_and_others_are_not(monkeypatch) -> None:
    trust.looked_at.cache_clear()
    assert trust.looked_at(_form(), None) == trust.Trust("", False)
    whole = trust.maxsim
    assert trust.looked_at(_form(), alone(whole)).pairs
    assert not trust.looked_at(_form(), alone(lambda *given: whole(*given) * (1 + 2.0**-22))).pairs
    for match, broken in {
        "of what the bounds allow": lambda queries, documents: whole(queries, documents) * (1 + 2.0**-10),
        "has other bits among other documents": lambda queries, documents: (
            whole(queries, documents) * (1 + 2.0**-22 * (len(documents) < 90))
        ),
    }.items():
        monkeypatch.setattr(trust, "maxsim", broken)
        trust.looked_at.cache_clear()
        found = trust.looked_at(_form(), None)
        assert match in found.bounded
        assert not found.pairs
    trust.looked_at.cache_clear()


def alone(score: Callable[..., torch.Tensor]) -> trust.Alone:
    """Pairs scored alone: all documents right, then all as `score` has them."""

    def found(values, starts, lengths, documents):
        queries = Packed(values, torch.cat([starts, starts[-1:] + 7]))  # of seven tokens
        numbers = torch.arange(len(documents))
        yield numbers, maxsim(queries, documents)
        yield numbers, score(queries, documents)

    return found


def test_the_model_of_tensor_cores_is_within_what_is_allowed() -> None:
    """Products aligned to the largest exponent and cut off, in steps of 4 to 32: the error stays below half of what bounds count."""
    for d in (1, 16, 128, 512):
        form = trust.form_of(torch.device("cpu"), torch.float16, 12, 1, d, False)
        one, other = (trust._hard(form, 48, seed).double() for seed in (5, 6))
        products = one[:, None, :] * other[None, :, :]
        exact, size = products.sum(2), products.abs().sum(2)
        for step in (4, 8, 16, 32):
            total = torch.zeros_like(exact)
            for first in range(0, d, step):
                terms = torch.cat([total[:, :, None], products[:, :, first : first + step]], 2)
                unit = torch.exp2(torch.floor(torch.log2(terms.abs().amax(2, keepdim=True).clamp(min=2.0**-60))) - 23)
                total = cut((torch.trunc(terms / unit) * unit).sum(2))
            allowed = trust.gamma_of(d, trust.HALF) * size
            assert ((total - exact).abs() <= allowed / 2).all(), (d, step)


def cut(values: torch.Tensor) -> torch.Tensor:
    """FP64 to 24 bits, towards zero."""
    found = values.float()
    return torch.where(found.double().abs() > values.abs(), torch.nextafter(found, torch.zeros_like(found)), found).double()


def test_reduced_float32_is_not_bounded() -> None:
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32"
    try:
        assert fp32_precision(torch.float32) == "tf32"
        assert fp32_precision(torch.float16) == "ieee"
        assert trust.looked_at(_form(), None).bounded.startswith("products of float32 may be rounded to tf32")
    finally:
        setting.fp32_precision = before
