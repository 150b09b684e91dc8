"""Every Chamfer kernel under Triton's interpreter against FP64 brute force: no GPU needed (`interpreted_chamfer.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "checks"), [("values", 22), ("edges", 25), ("gradients", 17), ("lists", 8), ("bound", 5), ("autograd", 2)]
)
def test_chamfer_kernels_agree_with_brute_force(group: str, checks: int) -> None:
    script = Path(__file__).with_name("interpreted_chamfer.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), group], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"{checks} checked"
