"""Every gradient kernel under Triton's interpreter against sums in FP64: no GPU needed (`interpreted_backward.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


def run(script: str, group: str, checks: int) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), group], env=env, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"{checks} checked"


@pytest.mark.slow
@pytest.mark.parametrize(("group", "checks"), [("shared", 36), ("own", 80), ("packed", 80), ("edges", 295), ("long lists", 32)])
def test_gradient_kernels_agree_with_sums_in_float64(group: str, checks: int) -> None:
    run("interpreted_lists.py" if group == "long lists" else "interpreted_backward.py", group, checks)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "checks"), [("forward", 168), ("backward", 42)])
def test_broken_offsets_touch_nothing_outside(group: str, checks: int) -> None:
    run("interpreted_broken.py", group, checks)
