"""What all operator tests share: the oracle, the input makers, the tolerance table, poisoned memory.

Test files cannot import their neighbours (`--import-mode=importlib`), so the helper modules of this folder arrive as fixtures:
`oracle` (oracle.py), `cases` (cases.py), `tol` (tolerances.py).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent


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
def oracle() -> ModuleType:
    """Brute-force float64 loops over queries, documents and tokens."""
    return _load("oracle")


@pytest.fixture(scope="session")
def cases() -> ModuleType:
    """Makers of inputs."""
    return _load("cases")


@pytest.fixture(scope="session")
def tol() -> ModuleType:
    """The one tolerance table."""
    return _load("tolerances")


@pytest.fixture(scope="session")
def interpreted() -> Callable[[str, str, int], None]:
    """Runs a group of one of the scripts `interpreted_*.py` under Triton's interpreter; it must say how much it has checked."""

    def run(script: str, group: str, checks: int) -> None:
        env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / f"interpreted_{script}.py"), group]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip() == f"{checks} checked"

    return run


@pytest.fixture(params=["cpu", "reference"])
def impl(request: pytest.FixtureRequest) -> str:
    """Every implementation that must meet the contract on this machine."""
    return str(request.param)


def _fill(tensor: Any) -> Any:
    """NaN where the dtype has one, else the most negative integer: a value nobody stores by accident."""
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.kind in "fc":
            tensor.fill(np.nan)
        elif tensor.dtype.kind in "iu":
            tensor.fill(np.iinfo(tensor.dtype).max)
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor


def _poisoned(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _fill(function(*args, **kwargs))

    return call


@pytest.fixture(autouse=True, scope="module")
def poison(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill "uninitialised" memory with NaN and extreme integers, so a store that was missed fails loudly.

    A test file whose subject is torch's own tracing turns it off with `POISON = False`.
    """
    if not getattr(request.module, "POISON", True):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in (
            (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
            (torch.Tensor, ("new_empty", "new_empty_strided")),
            (np, ("empty", "empty_like")),
        ):
            for name in names:
                patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread, because tiny products on several threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads, for tests of how threads share the work."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch's deterministic mode, which also fills uninitialised memory inside torch's own C++ code."""
    before, filled = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled
