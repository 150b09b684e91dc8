"""The device that is worked on, and what a number depends on besides data and code: versions and hardware."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import sys
import warnings
from typing import Any

import torch

from maxsim_eval.errors import UsageError
from maxsim_eval.printing import printable


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


def versions() -> dict[str, str | None]:
    """Versions of the packages that numbers are computed with, both of ours among them."""
    found = {name: _version(name) for name in ("maxsim-eval", "maxsim-kernels", "torch", "triton", "numpy", "scipy", "h5py")}
    return {"python": platform.python_version(), **found, "pytrec_eval": _version("pytrec-eval-terrier")}


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


def cores() -> int:
    """How many cores this process may use: its share, where `torchrun` started several processes on this machine.

    1 on systems other than Linux, where that cannot be asked; callers then start no worker processes.
    """
    if sys.platform != "linux":
        return 1
    beside = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(beside) if beside.isdecimal() else 1))


def resolve_device(device: str, *, quiet: bool = False) -> str:
    """The device that `device` means: `auto` is `cuda` where a CUDA device works, else `cpu`.

    Where `auto` had a choice, it is printed once on stderr, before the work; the report names the device in any case.

    Args:
        device: auto, cpu, cuda or cuda:<number>.
        quiet: say nothing; a CUDA device that is there and does not work is warned of all the same.

    Raises:
        UsageError: a device that torch does not know, that this machine does not have, or that does not work.
    """
    if device == "auto":
        chosen, why = _automatic()
        if why and not quiet:
            _say(f"device: {chosen} ({why})")
        return chosen
    if not re.fullmatch(r"cpu(:0)?|cuda(:[0-9]{1,3})?", device):
        raise UsageError(f"device {device!r} cannot be used: need auto, cpu, cuda or cuda:<number>")
    if (broken := _broken(device)) is not None:
        raise UsageError(f"device {device!r} cannot be used: {broken}")
    return device


@functools.cache
def _automatic() -> tuple[str, str]:
    """What `auto` means here, and why; no reason where a CPU is all there is."""
    if not torch.cuda.is_available():
        return "cpu", ""
    if (broken := _broken("cuda")) is not None:
        warnings.warn(f"a CUDA device is there and does not work: {broken}; the CPU is used", RuntimeWarning, stacklevel=4)
        return "cpu", "the CUDA device does not work"
    return "cuda", torch.cuda.get_device_name()


def _broken(device: str) -> str | None:
    """Why a device cannot compute; None: it can. One number is computed there and brought back."""
    try:
        return None if torch.ones(1, device=device).add(1).item() == 2 else "it computes 1 + 1 wrongly"
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:  # the last derives from Exception alone
        return (str(error).splitlines() or [type(error).__name__])[0]


@functools.cache
def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)
