"""How much memory this process may still take."""

from __future__ import annotations

import resource
from pathlib import Path


def available_memory(proc: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that may still be taken, page cache included: of the machine, or of the container or the process where that is less."""
    try:
        lines = proc.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")] + _left_to_process()
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        parts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):  # no limit of that kind
        return min(found, default=None)
    if limit != "max":
        cached = int(parts.get("inactive_file", 0)) + int(parts.get("active_file", 0))  # page cache: can be had back
        found.append(max(int(limit) - used + cached, 0))
    return min(found, default=None)


def _left_to_process() -> list[int]:
    """What `ulimit -v` leaves; nothing where there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return []
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return [max(limit - pages * resource.getpagesize(), 0)]
