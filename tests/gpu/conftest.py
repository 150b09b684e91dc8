"""What the GPU tests share: poisoned memory, no silent detour, a counter of compilations. Inputs and truths are in tests/helpers."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import maxsim_kernels.fallback
from fixtures import poison  # noqa: F401 - a fixture of every test here
from maxsim_kernels.streaming import streaming
from maxsim_kernels.streaming.blocks import Limits
from places import NVIDIA

HERE = Path(__file__).parent
# Without a GPU nothing here could run: it is not collected, and tests/conftest.py says so at the end.
collect_ignore_glob = [] if NVIDIA else ["test_*.py"]
os.environ["MAXSIM_CACHE"] = ""  # what is tested is the table, not what somebody tuned on this machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make a silent detour an error.

    On CUDA tensors `maxsim` says once per reason that it runs plain torch instead of a fused kernel ("maxsim_kernels: ..."). The
    reference is right, so every comparison with the truth would pass without a kernel having run. pytest's settings make warnings
    errors already; the filter is repeated here because the tests lose their meaning without it.
    """
    for item in items:
        if HERE in item.path.parents:
            # A test's own come later, and win.
            item.add_marker(pytest.mark.filterwarnings("error:maxsim_kernels"), append=False)


@pytest.fixture(autouse=True)
def warn_again() -> None:
    """Forget what was said, so that every test hears of a fallback and not only the first."""
    maxsim_kernels.fallback._SAID.clear()


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


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int] | None], None]:
    """Set what a piece of a stream may hold; None: what the budget gives."""
    usual = streaming._limits

    def cut(limits: tuple[int, int] | None) -> None:
        monkeypatch.setattr(streaming, "_limits", usual if limits is None else lambda *args: Limits(*limits))

    return cut


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that was compiled before, nor after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
