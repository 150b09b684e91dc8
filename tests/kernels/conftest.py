"""What all operator tests share: poisoned memory, one thread, every implementation, Triton's interpreter.

The oracle, the makers of inputs and the table of tolerances are in tests/helpers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from fixtures import one_thread, poison  # noqa: F401 - fixtures of every test here
from places import TESTS

SCRIPTS = TESTS / "kernels" / "interpreted"


@pytest.fixture(scope="session")
def interpreted() -> Callable[[str, str, int], None]:
    """Runs a group of one of the scripts `interpreted_*.py` under Triton's interpreter; it must say how much it has checked."""

    def run(script: str, group: str, checks: int) -> None:
        path = os.pathsep.join(filter(None, (str(TESTS / "helpers"), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, str(SCRIPTS / f"interpreted_{script}.py"), group]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip() == f"{checks} checked"

    return run


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
