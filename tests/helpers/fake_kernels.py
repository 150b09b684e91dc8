"""Kernels and a driver that are not there, so that launches can be recorded and replayed without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maxsim_kernels.gpu import launch, plans
from maxsim_kernels.gpu.plans import Plan

CPU = torch.device("cpu")
STREAM = 77
ENSURE_CONTEXT = plans.ensure_context  # the tests have none


class FakeCompiled:
    """What Triton returns from a launch: `run` notes what a replay passes to the driver."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.runs.append(arguments)


class FakeKernel:
    """Triton's `kernel[grid](*arguments, **constants)`."""

    arg_names = ("source", "out", "size", "BLOCK")
    params = tuple(SimpleNamespace(do_not_specialize=name == "size") for name in arg_names)

    def __init__(self) -> None:
        self.compiled = FakeCompiled()
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def start(*arguments: Any, **options: Any) -> FakeCompiled:
            self.launches.append((grid, arguments, options))
            return self.compiled

        return start


@pytest.fixture(autouse=True)
def no_plans(monkeypatch) -> None:
    """Plans of this test only, and a driver that is not there."""
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(plans, "ensure_context", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)


def base() -> torch.Tensor:
    """A tensor that a signature is of."""
    return torch.zeros(8, 32, dtype=torch.float16)


OTHERS = {
    "shape": lambda: torch.zeros(7, 32, dtype=torch.float16),
    "rank": lambda: torch.zeros(1, 8, 32, dtype=torch.float16),
    "stride": lambda: torch.zeros(8, 64, dtype=torch.float16)[:, :32],
    "order": lambda: torch.zeros(32, 8, dtype=torch.float16).t(),
    "dtype": lambda: torch.zeros(8, 32, dtype=torch.bfloat16),
    "alignment": lambda: torch.zeros(8 * 32 + 1, dtype=torch.float16)[1:].view(8, 32),
    "device": lambda: torch.zeros(8, 32, dtype=torch.float16, device="meta"),
    "class": lambda: torch.nn.Parameter(base(), requires_grad=False),
    "none": lambda: None,
}


def scored(kernel: FakeKernel, source: torch.Tensor, after: Any = None) -> torch.Tensor:
    """A call: one result, one launch."""
    out = launch.empty((4,), torch.float32, CPU)
    launch.launch(kernel, 3, source, out, 4, BLOCK=16, warps=8)
    if after is not None:
        after()
    return out


def recorded(kernel: FakeKernel, source: torch.Tensor, inputs: tuple[Any, ...] | None = None, after: Any = None) -> Plan | None:
    """The plan of such a call, if it leaves one."""
    launch.record("key", (source,) if inputs is None else inputs, CPU, lambda: scored(kernel, source, after))
    assert launch._recording.recorder is None
    return launch.planned("key")
