"""The most memory that was in use while something ran: of the process, and of its GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _restart_host() -> bool:
    """Set the process's peak (Linux's VmHWM) to what it holds now; False where that cannot be done."""
    try:
        _RESET.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _host_peak() -> int | None:
    try:
        with open(_STATUS, encoding="ascii", errors="replace") as handle:
            return next((int(line.split()[1]) * 1024 for line in handle if line.startswith("VmHWM:")), None)
    except OSError:
        return None


def start(device: str) -> Callable[[], dict[str, int | None]]:
    """Begin to watch; the function that is returned gives `host_peak_bytes` and `device_peak_bytes` since then.

    Host: the largest resident size of the whole process, everything it held before and pages of mapped files included (what one part
    of a process adds to it is not known to anybody); None where the system does not tell (not Linux, or /proc is closed). Device: the
    most bytes of tensors on a CUDA device, by torch; None elsewhere.

    This resets the peak of the whole process, also for anybody else who reads it.
    """
    host = _restart_host()
    gpu = torch.device(device).type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)

    def found() -> dict[str, int | None]:
        return {
            "host_peak_bytes": _host_peak() if host else None,
            "device_peak_bytes": int(torch.cuda.max_memory_allocated(device)) if gpu else None,
        }

    return found


def largest(peaks: Iterable[Mapping[str, int | None]]) -> dict[str, int | None]:
    """Of several processes: the largest of each; None where one of them does not know."""
    every = list(peaks)
    known = {name: [peak[name] for peak in every] for name in every[0]}
    return {
        name: None if None in values else max(value for value in values if value is not None) for name, values in known.items()
    }
