"""Fixtures that several folders of tests share; a conftest.py, or a test file, imports those it wants for every test in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from places import TESTS

SCRIPTS = TESTS / "kernels" / "interpreted"


@pytest.fixture(scope="session")
def interpreted() -> Callable[..., None]:
    """Runs a group of one of the scripts `interpreted_*.py` under Triton's interpreter; it must say how much it has checked."""

    def run(script: str, group: str, checks: int, folder: str = "kernels/interpreted") -> None:
        places = (str(TESTS / "helpers"), str(SCRIPTS), os.environ.get("PYTHONPATH"))
        env = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
        }
        command = [sys.executable, str(TESTS / folder / f"interpreted_{script}.py"), group]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip() == f"{checks} checked"

    return run


def _fill(tensor: Any) -> Any:
    """NaN where the dtype has one, else an extreme integer: a value nobody stores by accident."""
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.kind in "fc":
            tensor.fill(np.nan)
        elif tensor.dtype.kind in "iu":
            tensor.fill(np.iinfo(tensor.dtype).max)
        return tensor
    if type(tensor) is not torch.Tensor:  # a fake tensor of a tracer
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(float("nan"))
        return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)


def _poisoned(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _fill(function(*args, **kwargs))

    return call


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill "uninitialised" memory with NaN and extreme integers, so a store that was missed fails loudly."""
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
def poison(request: pytest.FixtureRequest) -> Iterator[None]:
    """Memory of every test of a file is poisoned; one about memory, tracing or capture turns it off with `POISON = False`."""
    if not getattr(request.module, "POISON", True):
        yield
        return
    with poisoned_memory():
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread, because tiny products on several threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
