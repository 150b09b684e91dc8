"""Fixtures that several folders of tests share; a conftest.py, or a test file, imports those it wants for every test in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


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
