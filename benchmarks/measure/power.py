"""What a GPU draws, and how fast it is clocked, while one call follows another: by nvidia-smi, fifty times a second.

A GPU that would draw more than its limit is clocked down. Then a kernel is limited by the energy that its work takes, though no unit
of a multiprocessor is busy all the time.
"""

from __future__ import annotations

import subprocess
import threading
import time
from statistics import mean

import torch

from measure.timing import Call

FIELDS = ("power.draw.instant", "enforced.power.limit", "clocks.sm", "clocks.max.sm", "clocks_event_reasons.sw_power_cap")
EVERY = 20  # ms
SETTLE, SAMPLES = 20, 40  # samples that are left out, and that count
PATIENCE = 30.0  # seconds until there must be so many
CALLS = 10  # between two looks at the samples


def sampled(lines: list[str]) -> dict[str, float]:
    """Means of what nvidia-smi printed: watts, megahertz, the most of each, and the share of samples in which power held clocks down.

    Raises:
        ValueError: a line is none of these five values.
    """
    rows = [[word.strip() for word in line.split(",")] for line in lines]
    watts, most_watts, clock, most_clock, capped = zip(*rows, strict=True)
    numbers = {"watts": watts, "most_watts": most_watts, "mhz": clock, "most_mhz": most_clock}
    found = {name: mean(map(float, values)) for name, values in numbers.items()}
    return {**found, "capped": mean(word == "Active" for word in capped)}


def _kept(watching: subprocess.Popen[str], lines: list[str]) -> None:
    assert watching.stdout is not None
    for line in watching.stdout:
        lines.append(line)  # at once, for the other thread to count


def under_load(call: Call) -> dict[str, float]:
    """Power and clock of the current GPU while `call` runs again and again, as `sampled` gives them.

    Raises:
        RuntimeError: nvidia-smi did not give enough samples.
    """
    unit = f"--id=GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    command = ["nvidia-smi", unit, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", f"--loop-ms={EVERY}"]
    call()
    torch.cuda.synchronize()
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as watching:
        reader = threading.Thread(target=_kept, args=(watching, lines))
        reader.start()
        try:
            ending = time.monotonic() + PATIENCE
            while len(lines) < SETTLE + SAMPLES and time.monotonic() < ending and watching.poll() is None:
                for _ in range(CALLS):
                    call()
                torch.cuda.synchronize()
        finally:
            watching.terminate()
            reader.join()
    if len(lines) < SETTLE + SAMPLES:
        raise RuntimeError(f"nvidia-smi gave {len(lines)} lines in {PATIENCE:.0f} s: {' '.join(lines[-1:]).strip()}")
    return sampled(lines[SETTLE : SETTLE + SAMPLES])
