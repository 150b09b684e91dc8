"""Calls on CPU tensors as a GPU's eager calls go, with launches that do nothing but count: what a step asks of the host, without a GPU.

Nothing is computed, so results are memory as it comes. Torch's own operators run, on the CPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from triton.runtime import jit

from maxsim_kernels import api, ops
from maxsim_kernels.gpu import geometry, launch, plans
from maxsim_kernels.gpu.forward import dispatch

H200 = geometry.Hardware((9, 0), 132)


class Compiled:
    """What Triton returns from a launch, as `plans.Plan` calls it."""

    function = packed_metadata = None

    def __init__(self, name: str, counted: Counter[str]) -> None:
        self.name, self.counted = name, counted

    def run(self, *_: Any) -> None:
        self.counted[self.name] += 1


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Launches by kernel, while every CPU tensor says that it is on an H200."""
    found: Counter[str] = Counter()

    def run(kernel: Any, *_: Any, **__: Any) -> Compiled:
        found[kernel.__name__] += 1
        return Compiled(kernel.__name__, found)

    with ExitStack() as patched:

        def replace(owner: Any, name: str, value: Any, **more: Any) -> None:
            patched.enter_context(mock.patch.object(owner, name, value, **more))

        replace(torch.Tensor, "is_cuda", True, create=True)
        replace(torch._C, "_cuda_getDevice", lambda: 0, create=True)
        replace(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True)
        replace(torch.cuda, "device", lambda device: nullcontext())
        for module in (plans, dispatch):
            replace(module, "ensure_context", lambda device: None)
        replace(jit.JITFunction, "run", run)
        for name, module in list(sys.modules.items()):
            if name.startswith("maxsim_kernels.gpu") and hasattr(module, "hardware"):
                replace(module, "hardware", lambda device: H200)
        replace(api, "implementation", lambda call, impl: api.Implementation("triton", "launches are counted"))
        replace(ops, "run", dispatch.forward)
        launch.forget()
        try:
            yield found
        finally:
            launch.forget()


def torch_calls(call: Callable[[], object]) -> Counter[str]:
    """Torch's operators that a call asks for, not those that these ask for."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return Counter(
        one.name
        for one in profile.events()
        if one.name.startswith("aten::") and (one.cpu_parent is None or not one.cpu_parent.name.startswith("aten::"))
    )
