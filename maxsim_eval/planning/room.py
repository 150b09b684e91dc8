"""What this machine has free now: memory, disks, GPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from maxsim_eval.planning.plan import Room
from maxsim_eval.processes.free_memory import available_memory


def read_room(cache_dir: Path, out_dir: Path, device: str, in_page_cache: float | None = None) -> Room:
    """Free memory, disk (of the nearest folder that exists) and GPU memory; what cannot be told is None."""
    process, available = _resident(), available_memory()
    cache, out = nearest(cache_dir), nearest(out_dir)
    cuda = torch.device(device).type == "cuda"
    return Room(
        memory=None if available is None else available + process,
        process=process,
        cache_disk=shutil.disk_usage(cache).free,
        output_disk=shutil.disk_usage(out).free,
        one_disk=cache.stat().st_dev == out.stat().st_dev,
        gpu=torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) if cuda else None,
        gpus=torch.cuda.device_count() if cuda else 0,
        in_page_cache=in_page_cache,
    )


def nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.resolve().parents) if path.is_dir())


def _resident() -> int:
    """Bytes this process holds; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
