"""A process under TRITON_INTERPRET=1 that has imported what the scripts `interpreted_*.py` share, and forks one child a group.

    TRITON_INTERPRET=1 python prepared.py

Every line of its input is JSON: a script, its group, files for its output and its errors. A child runs the script as `python script group`
would, in a process of its own; the answer is its exit status. The imports take as long as many a group.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path

import quick_interpreter  # noqa: F401 - kernels run under it
import torch  # noqa: F401
import triton  # noqa: F401

import maxsim_kernels  # noqa: F401


def child(script: str, group: str, *files: str) -> int:
    """The group; an exit status."""
    for stream, file in enumerate((os.devnull, *files)):
        os.dup2(os.open(file, os.O_WRONLY if stream else os.O_RDONLY), stream)
    sys.argv = [script, group]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:  # noqa: BLE001 - a child must not go on with its parent's work
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


for line in sys.stdin:
    assert threading.active_count() == 1, "a child would lack the other threads"
    process = os.fork()
    if not process:
        os._exit(child(*json.loads(line)))
    sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}\n")
    sys.stdout.flush()
