"""How much memory a call takes beyond its inputs."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

MEASURED = """
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
open("/proc/self/clear_refs", "w").write("5")  # the peak is what is held now
before = peak()
call()
print(peak() - before)
"""


def beyond_inputs(code: str, *given: object) -> int:
    """Bytes that `call()` of `code` holds at most beyond what is held before, in a process of its own; `code` reads `given`."""
    script = f"import json, sys\ngiven = json.loads(sys.argv[1])\n{textwrap.dedent(code)}{MEASURED}"
    done = subprocess.run([sys.executable, "-c", script, json.dumps(given)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
