"""Every forward kernel under Triton's interpreter against the FP64 reference: no GPU needed (`interpreted_forward.py`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
Run = Callable[[str, str, int], None]

pytestmark = [pytest.mark.slow, pytest.mark.every_change]


@pytest.mark.parametrize(
    ("group", "checks"),
    [("general", 102), ("split", 20), ("tiles", 80), ("codes", 243), ("nan", 90), ("exact", 16), ("masks", 96), ("asked", 45)],
)
def test_forward_kernels_agree_with_the_reference(interpreted: Run, group: str, checks: int) -> None:
    interpreted("forward", group, checks)
