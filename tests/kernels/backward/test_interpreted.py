"""Every gradient kernel under Triton's interpreter against sums in FP64: no GPU needed (`interpreted_backward.py`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
Run = Callable[[str, str, int], None]

pytestmark = [pytest.mark.slow, pytest.mark.every_change]


@pytest.mark.parametrize(("group", "checks"), [("shared", 36), ("own", 80), ("packed", 80), ("edges", 295), ("long lists", 32)])
def test_gradient_kernels_agree_with_sums_in_float64(interpreted: Run, group: str, checks: int) -> None:
    interpreted("lists" if group == "long lists" else "backward", group, checks)


@pytest.mark.parametrize(("group", "checks"), [("forward", 168), ("backward", 42)])
def test_broken_offsets_touch_nothing_outside(interpreted: Run, group: str, checks: int) -> None:
    interpreted("broken", group, checks)


@pytest.mark.parametrize(("group", "checks"), [("values", 42), ("masks", 6), ("edges", 3)])
def test_the_contrastive_loss_as_one_node_agrees_with_float64(interpreted: Run, group: str, checks: int) -> None:
    interpreted("contrast", group, checks)
