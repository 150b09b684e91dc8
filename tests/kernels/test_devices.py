"""GPUs that NVIDIA did not make, and devices without a fused kernel: asked who made them before a number counts, one clear message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from maxsim_kernels import api, fallback, quantize_fp8, quantize_int8, warmup
from maxsim_kernels.chamfer import chamfer
from maxsim_kernels.checks import Call, Options, validate
from maxsim_kernels.gpu import geometry
from maxsim_kernels.gpu.forward import choice, dispatch, tuning

SAFE = {replace(row.config, programs=0) for row in tuning.ROWS if row.architecture == "any"}
MI300 = 304  # multiprocessors, whose numbers 9.4 look like Hopper's


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch built for ROCm, on an MI300."""
    geometry.hardware.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=MI300))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    yield
    geometry.hardware.cache_clear()


def call_of(queries: Any, documents: Any, **options: Any) -> Call:
    return validate(queries, documents, Options(**options))


def ones(*size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.float16)


def test_numbers_of_amd_are_no_compute_capability(rocm) -> None:
    assert geometry.hardware(torch.device("cuda", 0)) == (geometry.OTHER, MI300)


def test_numbers_of_nvidia_are(rocm, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert geometry.hardware(torch.device("cuda", 0)) == ((9, 4), MI300)


@pytest.mark.parametrize("winners", [False, True])
@pytest.mark.parametrize("tokens", [48, 180, 320, 1024])
@pytest.mark.parametrize("count", [1, 4, 64])
def test_amd_takes_kernels_without_descriptors(rocm, count, tokens, winners) -> None:
    gpu = geometry.hardware(torch.device("cuda", 0))
    queries, documents = ones(count, 32, 128), ones(8, tokens, 128)
    wide = call_of(ones(count, 32, 768), ones(8, tokens, 768), return_argmax=winners)
    lengths = call_of(queries, documents, document_lengths=torch.full((8,), tokens), return_argmax=winners)
    codes = [call_of(queries, quantize(documents)) for quantize in (quantize_int8, quantize_fp8)]
    for call in (call_of(queries, documents, return_argmax=winners), wide, lengths, *codes):
        chosen = choice.choose(call, gpu)
        assert chosen.kernel in ("stream", "general")
        assert replace(chosen.config, programs=0) in SAFE
        assert dispatch.supported(call, gpu.capability) == ""


def test_devices_without_a_fused_kernel_say_so() -> None:
    call = call_of(ones(1, 4, 16), ones(2, 5, 16))
    for kind in ("mps", "xpu"):
        elsewhere = replace(call, queries=SimpleNamespace(device=torch.device(kind)))  # type: ignore[arg-type]
        found = api.implementation(elsewhere, "auto")
        assert found.name == "reference"
        assert found.reason == f"no fused kernel for {kind} tensors: plain chunked torch in FP32 (slower)"
        with pytest.raises(ValueError, match=f"^impl: got 'triton', need 'auto': no fused kernel for {kind} tensors$"):
            api.implementation(elsewhere, "triton")
        with pytest.raises(ValueError, match=f"^impl: got 'cpu' with tensors on {kind}, need CPU tensors$"):
            api.implementation(elsewhere, "cpu")
        cloud: Any = SimpleNamespace(device=torch.device(kind))
        assert chamfer._not_fused(cloud, cloud) == f"no fused Chamfer kernel for {kind} tensors"
        assert warmup(kind) == f"{kind}: nothing to compile"


def test_a_device_that_runs_the_reference_is_said_once(monkeypatch) -> None:
    """The path of a call on MPS, with tensors that this machine has."""
    monkeypatch.setattr(fallback, "_SAID", set())
    monkeypatch.setattr(
        api, "implementation", lambda call, impl: api.Implementation("reference", "no fused kernel for mps tensors")
    )
    queries, documents = torch.ones(1, 4, 16), torch.ones(2, 5, 16)
    with pytest.warns(UserWarning, match=r"^maxsim_kernels: no fused kernel for mps tensors$"):
        scores = api.maxsim(queries, documents)
    assert torch.equal(scores, torch.full((1, 2), 64.0))  # type: ignore[arg-type]
    api.maxsim(queries, documents)  # another warning would be an error
