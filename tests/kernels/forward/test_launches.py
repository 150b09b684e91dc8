"""Launches past Triton's launcher (`launch.py`), without a GPU: of new shapes, by versions of Triton, while a CUDA graph is captured."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from fake_kernels import (  # noqa: F401
    CPU,
    ENSURE_CONTEXT,
    OTHERS,
    STREAM,
    FakeCompiled,
    FakeKernel,
    base,
    no_plans,
    recorded,
    scored,
)
from maxsim_kernels import Packed, fallback
from maxsim_kernels.checks import Options, validate
from maxsim_kernels.gpu import launch, plans
from maxsim_kernels.gpu.forward import dispatch

# Launches of new shapes, past Triton's launcher


def other_launch(change: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and options that differ from (base, base, 4; BLOCK 16, 8 warps) in one thing."""
    unaligned = OTHERS["alignment"]()
    arguments = {
        "size": (base(), base(), 5),
        "aligned size": (base(), base(), 64),
        "shape": (OTHERS["shape"](), base(), 1),
        "large size": (base(), base(), 2**31),
        "alignment": (unaligned, base(), 4),
        "dtype": (OTHERS["dtype"](), base(), 4),
        "kind": (base(), base(), 4.0),
        "descriptor": (TensorDescriptor(base(), [8, 32], [32, 1], [4, 32]), base(), 4),
    }
    options = {"constant": {"BLOCK": 32}, "warps": {"warps": 4}, "registers": {"registers": 128}}
    return arguments.get(change, (base(), base(), 4)), {"BLOCK": 16, "warps": 8} | options.get(change, {})


@pytest.mark.parametrize("change", ["size", "aligned size", "shape"])
def test_other_sizes_go_past_tritons_launcher(monkeypatch, change) -> None:
    monkeypatch.setattr(launch, "_is_cuda", lambda tensor: True)
    kernel = FakeKernel()
    launch.launch(kernel, 3, base(), base(), 4, BLOCK=16, warps=8)
    assert len(kernel.launches) == 1
    assert not kernel.compiled.runs
    (source, out, size), options = other_launch(change)
    launch.launch(kernel, 7, source, out, size, **options)
    assert len(kernel.launches) == 1
    expected = (7, 1, 1, STREAM, "function", "metadata", None, None, None, source.data_ptr(), out.data_ptr(), size, 16)
    assert kernel.compiled.runs == [expected]


@pytest.mark.parametrize("change", ["large size", "alignment", "dtype", "kind", "descriptor", "constant", "warps", "registers"])
def test_what_tells_kernels_apart_goes_through_triton(monkeypatch, change) -> None:
    monkeypatch.setattr(launch, "_is_cuda", lambda tensor: True)
    kernel = FakeKernel()
    launch.launch(kernel, 3, base(), base(), 4, BLOCK=16, warps=8)
    arguments, options = other_launch(change)
    for number in (2, 2):
        launch.launch(kernel, 3, *arguments, **options)
        assert len(kernel.launches) == number
    assert len(kernel.compiled.runs) == 1


def test_watched_launches_and_untried_versions_go_through_triton(monkeypatch) -> None:
    monkeypatch.setattr(launch, "_is_cuda", lambda tensor: True)
    kernel = FakeKernel()
    with monkeypatch.context() as watching:
        watching.setattr(knobs.runtime, "launch_exit_hook", lambda metadata: None)
        for _ in range(2):
            scored(kernel, base())
    with monkeypatch.context() as later:
        later.setattr(launch, "VERSION", "4.0")
        for _ in range(2):
            scored(kernel, base())
    assert len(kernel.launches) == 4
    assert not kernel.compiled.runs


def test_a_launch_past_triton_is_recorded_like_any_other(monkeypatch) -> None:
    monkeypatch.setattr(launch, "_is_cuda", lambda tensor: True)
    kernel, fresh = FakeKernel(), base()
    scored(kernel, base())
    plan = recorded(kernel, base())
    assert plan is not None
    assert len(kernel.launches) == 1
    result = plan.run((fresh,), CPU)
    assert kernel.compiled.runs[-1][9:] == (fresh.data_ptr(), result.data_ptr(), 4, 16)


# Versions of Triton


@pytest.mark.parametrize("version", ["3.5", "3.8", "4.0"])
def test_a_version_that_was_not_tried_goes_through_the_public_call(monkeypatch, version) -> None:
    """Every call launches by Triton's own `kernel[grid](...)`, and nothing of what a replay would call is touched; said once."""
    monkeypatch.setattr(launch, "VERSION", version)
    monkeypatch.setattr(fallback, "_SAID", set())
    kernel, source = FakeKernel(), base()
    with pytest.warns(UserWarning, match=f"Triton {version} is not one that launches were replayed with"):
        assert recorded(kernel, source) is None
    for _ in range(2):
        assert recorded(kernel, source) is None  # another warning would be an error
    assert len(kernel.launches) == 3
    assert not kernel.compiled.runs
    assert launch.planned("key") is None


def test_gpus_of_other_makers_go_through_the_public_call(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(fallback, "_SAID", set())
    kernel, source = FakeKernel(), base()
    with pytest.warns(
        UserWarning, match="launches were replayed on NVIDIA's GPUs alone: every call goes through Triton's own launcher"
    ):
        assert recorded(kernel, source) is None
    assert recorded(kernel, source) is None
    assert not kernel.compiled.runs


def test_the_installed_version_was_tried() -> None:
    assert launch.VERSION in launch.TRIED, "try tests/gpu with it, then add it"


# Capture in a CUDA graph


class Cached(FakeKernel):
    """A kernel that asks Triton's hook whenever it would compile, as `JITFunction` does."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.ready = compiled

    def __getitem__(self, grid: tuple[int]) -> Any:
        start = super().__getitem__(grid)

        def look(*arguments: Any, **options: Any) -> FakeCompiled:
            if not self.ready:
                hook = knobs.runtime.jit_cache_hook
                assert hook is None or not hook(key="key", repr="repr", fn=None, compile={}, is_manual_warmup=False)
                self.ready = True
            return start(*arguments, **options)

        return look


@pytest.fixture
def captured(monkeypatch) -> None:
    """A stream that is being captured."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_capture_that_would_compile_is_refused_clearly(captured, monkeypatch) -> None:
    kernel, source = Cached(compiled=False), base()
    heard: list[Any] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **about: heard.append(about))
    before = knobs.runtime.jit_cache_hook
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cannot capture a call whose kernels are not compiled yet.*warmup"):
            recorded(kernel, source)
        assert knobs.runtime.jit_cache_hook is before
    assert not kernel.launches
    assert not heard
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert recorded(kernel, source) is not None
    assert len(heard) == 1


def test_a_first_call_is_captured_where_its_kernels_are_compiled(captured) -> None:
    """After `warmup`, or a call of another signature."""
    kernel, source = Cached(compiled=True), base()
    assert recorded(kernel, source) is not None
    assert len(kernel.launches) == 1


def test_another_thread_may_compile_during_a_capture(captured, monkeypatch) -> None:
    capturing = threading.get_ident()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: threading.get_ident() == capturing)
    other = Cached(compiled=False)
    with launch._nothing_compiled():
        thread = threading.Thread(target=scored, args=(other, base()))
        thread.start()
        thread.join()
    assert len(other.launches) == 1


def test_no_memory_is_asked_about_during_a_capture(captured, monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked.append)
    monkeypatch.setattr(plans._ready, "devices", set())
    ENSURE_CONTEXT(0)
    assert not asked
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ENSURE_CONTEXT(0)
    ENSURE_CONTEXT(0)
    assert asked == [0]


def test_winners_of_packed_queries_are_refused_during_a_capture(captured) -> None:
    rows = Packed(torch.zeros(6, 8), torch.tensor([0, 2, 6]))
    call = validate(rows, torch.zeros(3, 5, 8), Options(return_argmax=True))
    with pytest.raises(RuntimeError, match=r"^queries: got packed ones whose winners are wanted.*need padded queries"):
        dispatch._longest(call)
