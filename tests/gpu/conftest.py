"""What the GPU tests share: float64 truth, input makers, poisoned memory, a counter of compilations.

Test files cannot import their neighbours (`--import-mode=importlib`), so the helper modules of this folder arrive as fixtures:
`make` (gpu_inputs.py), `truth` (gpu_truth.py) and `gradients` (gpu_gradients.py); `agree` and `agree_gradients` are the ones most
tests need.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import maxsim_kernels.fallback

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder where there is no GPU; where there is one, make a silent detour an error.

    On CUDA tensors `maxsim` says once per reason that it runs plain torch instead of a fused kernel ("maxsim_kernels: ..."). The
    reference is right, so every comparison with the truth would pass without a kernel having run. pytest's settings make warnings
    errors already; the filter is repeated here because the tests lose their meaning without it.
    """
    missing = not torch.cuda.is_available() or torch.version.cuda is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("error:maxsim_kernels"))
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def warn_again() -> None:
    """Forget what was said, so that every test hears of a fallback and not only the first."""
    maxsim_kernels.fallback._SAID.clear()


def _load(name: str) -> ModuleType:
    qualified = f"maxsim_kernels_test_{name}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    spec = importlib.util.spec_from_file_location(qualified, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = module  # before execution: dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def make() -> ModuleType:
    """Makers of inputs."""
    return _load("gpu_inputs")


@pytest.fixture(scope="session")
def truth() -> ModuleType:
    """Dense float64 oracle and the checks against it."""
    return _load("gpu_truth")


@pytest.fixture(scope="session")
def agree(truth: ModuleType) -> Callable[..., torch.Tensor]:
    """`agree(queries, documents, ...)`: call the operator, compare with the truth, return the scores."""
    return truth.agree


@pytest.fixture(scope="session")
def gradients() -> ModuleType:
    """Float64 sums over winners, one training step, and the checks of its gradients."""
    return _load("gpu_gradients")


@pytest.fixture(scope="session")
def agree_gradients(gradients: ModuleType, truth: ModuleType, make: ModuleType) -> Callable[..., Any]:
    """`agree_gradients(queries, documents, ...)`: train one step, compare winners and gradients with the truth, return the step."""
    return partial(gradients.agree, truth, make)


def _poisoned(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensor = function(*args, **kwargs)
        if type(tensor) is not torch.Tensor:  # a fake tensor of a tracer
            return tensor
        with torch.no_grad():
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)

    return call


@pytest.fixture(autouse=True, scope="module")
def poison(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill "uninitialised" memory with NaN and extreme integers, so a store that was missed fails loudly.

    A test file whose subjects are memory, tracing or capture turns it off with `POISON = False`.
    """
    if not getattr(request.module, "POISON", True):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in (
            (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
            (torch.Tensor, ("new_empty", "new_empty_strided")),
        ):
            for name in names:
                patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield


@pytest.fixture(autouse=True, scope="module")
def free_memory() -> Iterator[None]:
    """Give cached blocks back between files: some tests need several gigabytes."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Kernels that Triton compiled (or fetched from its disk cache) since the test began: every miss of its in-memory cache."""
    knobs = pytest.importorskip("triton").knobs.runtime
    seen: list[str] = []
    before = knobs.jit_post_compile_hook

    def note(**about: Any) -> None:
        seen.append(str(about.get("repr", about.get("key"))))

    knobs.jit_post_compile_hook = note
    yield seen
    knobs.jit_post_compile_hook = before
