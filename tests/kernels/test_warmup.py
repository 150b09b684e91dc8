"""`warmup` where there is nothing to compile, and its refusals."""

from __future__ import annotations

import pytest
import torch

from maxsim_kernels import fallback, warm, warmup


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_cpu_has_nothing_to_compile(device) -> None:
    assert warmup(device, forms=warm.FORMS, return_argmax=True) == "cpu: nothing to compile"


def test_without_a_gpu_the_default_is_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert warmup() == "cpu: nothing to compile"


def test_without_triton_nothing_is_compiled(monkeypatch) -> None:
    monkeypatch.setattr(fallback, "HAS_TRITON", False)
    assert warmup("cuda") == "cuda: nothing to compile, Triton is not installed"


def test_an_unknown_form_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^forms: got \['int4', 'ragged'\], need some of ") as caught:
        warmup("cpu", forms=("dense", "ragged", "int4"))
    for form in ("dense", "lengths", "mask", "packed", "pairs", "training", "int8", "fp8"):
        assert form in str(caught.value)


@pytest.mark.parametrize("form", warm.FORMS)
@pytest.mark.parametrize("winners", [False, True])
def test_the_calls_of_every_form_are_valid(form, winners) -> None:
    calls = list(warm._calls(torch.zeros(3, 4, 16), (3, 5), [form]))
    assert len(calls) == (6 if form in ("int8", "fp8") else 1)  # three granularities, dense and packed
    for call in calls:
        found = call(winners)
        scores = found[0] if isinstance(found, tuple) else found
        assert scores.shape == ((3,) if form == "pairs" else (3, 3))
        assert not scores.any()
