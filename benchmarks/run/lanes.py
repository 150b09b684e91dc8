"""Measurements on several GPUs at once: dealt out by what they take, and a process for each GPU with a share of the CPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

HEAD = "[[measurement]]"
CACHES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
)  # one for each process: two that compile one kernel would wait for each other


def dealt(takes: Mapping[str, float], lanes: int, seconds: float) -> list[list[str]]:
    """Names by lane: each measurement in turn to the lane with the least to do, where it fits into the seconds.

    Args:
        takes: seconds of each, the most urgent first.
    """
    found: list[list[str]] = [[] for _ in range(lanes)]
    for name, needs in takes.items():
        least = min(found, key=lambda lane: sum(takes[other] for other in lane))
        if sum(takes[other] for other in least) + needs <= seconds:
            least.append(name)
    return found


def tables(table: Path, lanes: Sequence[Sequence[str]], outs: Sequence[Path]) -> list[Path]:
    """A table for each lane, in its folder: its measurements as they stand in `table`."""
    blocks = {tomllib.loads(block)["name"]: block for block in table.read_text(encoding="utf-8").split(HEAD)[1:]}
    for names, out in zip(lanes, outs, strict=True):
        out.mkdir(parents=True, exist_ok=True)
        (out / "lane.toml").write_text("".join(HEAD + blocks[name] for name in names), encoding="utf-8")
    return [out / "lane.toml" for out in outs]


def run(commands: Sequence[list[str]], outs: Sequence[Path]) -> list[int]:
    """Run all at once, each on a GPU and a share of the CPUs of its own; their exits. Ctrl-C ends all of them."""
    cpus = sorted(os.sched_getaffinity(0))
    share = max(1, len(cpus) // len(commands)) if commands else 0
    processes = []
    try:
        for lane, (words, out) in enumerate(zip(commands, outs, strict=True)):
            caches = {name: str(out / name.lower()) for name in CACHES}
            process = subprocess.Popen(words, env={**os.environ, "CUDA_VISIBLE_DEVICES": str(lane), **caches})
            processes.append(process)
            os.sched_setaffinity(process.pid, cpus[lane * share : (lane + 1) * share] or cpus)
        return [process.wait() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # which ends what it runs
                process.wait()
