"""Every Chamfer kernel under Triton's interpreter against FP64 brute force: no GPU needed (`interpreted_chamfer.py`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
Run = Callable[[str, str, int], None]

pytestmark = [pytest.mark.slow, pytest.mark.every_change]


@pytest.mark.parametrize(
    ("group", "checks"), [("values", 22), ("edges", 25), ("gradients", 17), ("lists", 8), ("bound", 5), ("autograd", 2)]
)
def test_chamfer_kernels_agree_with_brute_force(interpreted: Run, group: str, checks: int) -> None:
    interpreted("chamfer", group, checks)
