"""`Options.fp32`, without a GPU: what a call says of its float32 products decides its kernel and its recorded launch, torch's setting not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import jit

import fake_launches
from maxsim_kernels import api
from maxsim_kernels.checks import Options, validate
from maxsim_kernels.gpu.forward import choice

HOPPER = ((9, 0), 132)
SETTINGS = (None, "tf32", "ieee")
# Query rows -> the kernel in true FP32, and in TF32.
KERNELS = {20: ("general", "wide"), 1: ("general", "stream")}


@pytest.fixture
def setting() -> Iterator[Any]:
    """torch's own, as it was."""
    held = torch.backends.cuda.matmul
    before = held.fp32_precision
    yield held
    held.fp32_precision = before


def inputs(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(count, 32, 128, dtype=dtype), torch.zeros(300, 70, 128, dtype=dtype)


@pytest.mark.parametrize("general", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("count", KERNELS)
def test_the_call_decides_before_torch_does(setting: Any, count: int, general: str) -> None:
    setting.fp32_precision = general
    for asked in SETTINGS:
        kernel = choice.choose(validate(*inputs(count), Options(fp32=asked)), HOPPER).kernel
        assert kernel == KERNELS[count][(asked or general) == "tf32"], (general, asked)
    for dtype in (torch.float16, torch.bfloat16):
        found = {choice.choose(validate(*inputs(count, dtype), Options(fp32=asked)), HOPPER) for asked in SETTINGS}
        assert len(found) == 1, "only float32 has another precision"


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("count", KERNELS)
def test_a_recorded_launch_is_of_one_precision(setting: Any, count: int, grad: bool) -> None:
    q, d = inputs(count)
    q.requires_grad_(grad)
    seen: dict[tuple[str, str | None], list[Any]] = {}
    with fake_launches.counted() as launches:

        def run(kernel: Any, *_: Any, PRECISION: str = "", **__: Any) -> fake_launches.Compiled:
            name = f"{kernel.__name__} {PRECISION}"
            launches[name] += 1
            return fake_launches.Compiled(name, launches)

        with mock.patch.object(jit.JITFunction, "run", run):
            for number in range(4 * 2 * len(SETTINGS)):  # four rounds; the third is a replay
                general, asked = ("ieee", "tf32")[number // len(SETTINGS) % 2], SETTINGS[number % len(SETTINGS)]
                setting.fp32_precision = general
                launches.clear()
                api.run(q, d, Options(fp32=asked))
                seen.setdefault((general, asked), []).append(dict(launches))
    for rounds in seen.values():
        assert rounds[0]
        assert all(one == rounds[0] for one in rounds)
    true, fast = seen["ieee", "ieee"][0], seen["tf32", "tf32"][0]
    assert true != fast
    for (general, asked), rounds in seen.items():
        assert rounds[0] == (fast if (asked or general) == "tf32" else true), (general, asked)


def test_a_call_that_says_it_never_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    held = inputs(20)
    monkeypatch.setattr(torch.backends, "cuda", None)  # whoever looked for the setting would fail
    assert api._precision(held, Options(fp32="tf32")) is None
    assert choice.choose(validate(*held, Options(fp32="tf32")), HOPPER).kernel == "wide"
    with pytest.raises(AttributeError):
        api._precision(held, Options())
