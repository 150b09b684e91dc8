"""What the tests of integrations share: every library is itself again after a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from maxsim_kernels import integrations


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    integrations.disable()
