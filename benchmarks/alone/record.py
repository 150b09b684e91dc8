"""What the scripts of single kernels share, those that no table of forward.py holds yet: options, a file of rows, medians in turns."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import maxsim_kernels
from measure import timing
from measure.session import described
from results.file import short, write

RUNS = 20


def unit(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16, device: str = timing.DEVICE) -> Tensor:
    """Random vectors of length 1."""
    random = torch.Generator(device).manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=random, device=device), dim=-1).to(dtype)


def require(holds: bool, what: str) -> None:
    """Ends the program where what is to be timed is wrong."""
    if not holds:
        raise SystemExit(f"{what}; not timed, and not written")


def medians(
    calls: Mapping[str, Callable[[], Any]], flush: Callable[[], None], runs: int = RUNS, *, wait: bool = False
) -> dict[str, float]:
    """Milliseconds between events, the methods taking turns.

    `wait`: the host waits for the flush, so what it does until it has queued a call's last kernel counts.
    """

    def waiting() -> None:
        flush()
        torch.cuda.synchronize()

    found = timing.measure(dict(calls), runs, waiting if wait else flush)
    return {name: times["median_ms"] for name, times in found.items()}


class Record:
    """The file of a run: written after every row, whole each time."""

    def __init__(self, schema: str, path: Path | None, seconds: float) -> None:
        import triton

        self._path, self._end = path, time.monotonic() + seconds
        self._seconds = seconds
        self.document: dict[str, Any] = {
            "schema": schema,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "revision": described(Path(str(maxsim_kernels.__file__)).parent),
            "rows": [],
            "left_out": {},
        }

    def late(self, row: str) -> bool:
        """Whether the time is over; the row is then left out."""
        over = time.monotonic() > self._end
        if over:
            self.leave_out(row, f"not begun within {self._seconds:.0f} seconds")
        return over

    def leave_out(self, what: str, why: str) -> None:
        """Say what is not in the file."""
        self.document["left_out"][what] = why
        self._keep(f"left out: {what}: {why}")

    def add(self, row: dict[str, Any]) -> None:
        """A row that is right and timed."""
        self.document["rows"].append(row)
        self._keep(json.dumps(short(row)))

    def _keep(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        write(self._path, self.document)


def begun(schema: str, description: str | None, seconds: float) -> Record:
    """The command line of a script, and its file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"begin no row after so many (default {seconds:.0f})")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    return Record(schema, options.json, options.seconds)
