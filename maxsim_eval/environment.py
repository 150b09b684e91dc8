"""What a number depends on besides data and code: versions and hardware; no host name, no path, no user name."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as handle:
            for line in handle:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the platform module knows less, but something
    return platform.processor() or platform.machine()


def environment(device: str = "cpu") -> dict[str, Any]:
    """Versions and hardware that a number depends on; no host name, no path, no user name.

    Args:
        device: the device scores were computed on; GPU facts are read only for a CUDA device.
    """
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "torch": torch.__version__,
        **{name: _version(name) for name in ("triton", "numpy", "scipy", "h5py")},
        "pytrec_eval": _version("pytrec-eval-terrier"),
        "maxsim_eval": _version("maxsim-eval"),
    }
    if torch.device(device).type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts
