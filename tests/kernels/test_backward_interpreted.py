"""Every gradient kernel under Triton's interpreter against sums in FP64: no GPU needed (`interpreted_backward.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "checks"), [("shared", 36), ("own", 80), ("packed", 80), ("edges", 295), ("broken", 42), ("long lists", 32)]
)
def test_gradient_kernels_agree_with_sums_in_float64(group: str, checks: int) -> None:
    own = {"long lists": "interpreted_lists.py", "broken": "interpreted_broken.py"}
    script = Path(__file__).with_name(own.get(group, "interpreted_backward.py"))
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), group], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"{checks} checked"
