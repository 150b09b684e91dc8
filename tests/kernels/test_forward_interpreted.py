"""Every forward kernel under Triton's interpreter against the FP64 reference: no GPU needed (`interpreted_forward.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(("group", "checks"), [("general", 102), ("split", 20), ("tiles", 80), ("codes", 243)])
def test_forward_kernels_agree_with_the_reference(group: str, checks: int) -> None:
    script = Path(__file__).with_name("interpreted_forward.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), group], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"{checks} checked"
