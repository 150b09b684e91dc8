"""What all operator tests share: poisoned memory, one thread, every implementation, Triton's interpreter.

The oracle, the makers of inputs and the table of tolerances are in tests/helpers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fixtures import interpreted, one_thread, poison  # noqa: F401 - fixtures of every test here


@pytest.fixture(params=["cpu", "reference"])
def impl(request: pytest.FixtureRequest) -> str:
    """Every implementation that must meet the contract on this machine."""
    return str(request.param)


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
