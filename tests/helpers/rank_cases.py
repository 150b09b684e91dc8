"""Commands by several ranks: the scripts that fork them, torchrun itself, and how all of them end when one fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from places import ROOT, TESTS

USAGE, DATA, UNFORESEEN, INTERRUPTED, KILLED = 2, 3, 4, 130, -9
KEPT = "finished parts are kept, the same command continues"


def driven(script: str, scenario: str, folder: Path) -> dict[str, Any]:
    """What a scenario of `drive.py` or `drive_encode.py` gave."""
    words = [sys.executable, TESTS / "end_to_end" / script, scenario, folder]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


def torchrun(folder: Path, *words: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """The command line by two processes that torchrun starts in `folder`; it must end well, within `seconds`."""
    processes = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *processes, ROOT / "evaluate.py", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended


def ended_as_one(found: dict[str, Any], code: int, message: str) -> None:
    """Three ranks must have ended with this code, at once, and only the first must have said why, in one line."""
    assert found["codes"] == [code] * 3
    assert message in found["err"][0]
    assert found["err"][0].count("\n") == 1
    assert found["err"][1:] == ["", ""]
    assert found["seconds"] < 30
