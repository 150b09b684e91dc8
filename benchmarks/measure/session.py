"""A run on one machine: how it fails and is stopped, what is cleared between rows, and which machine, software and kernels it saw."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import maxsim_kernels
from measure import installed, sources
from measure.timing import Call

PACKAGE = Path(str(maxsim_kernels.__file__)).parent
os.environ["MAXSIM_CACHE"] = ""  # figures are of the table, not of what somebody tuned on this machine
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # of whole commands: Python compiles a file once, not at every start


class DeviceLostError(Exception):
    """The GPU answers no more after a method; nothing else can be measured in this process."""

    method = ""  # which one, where that is known
    row = ""


class RefusedError(Exception):
    """A method does not take part, and why."""


def failures() -> tuple[type[BaseException], ...]:
    """What a method of somebody else may raise: torch's errors, wrong arguments, Triton's compiler and launcher."""
    from triton.errors import TritonError

    return (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError, TritonError)


def reason(problem: BaseException) -> str:
    """An exception's type and the beginning of its text, in one line: of an out-of-memory error what it tried to allocate too."""
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text}"[:220]


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends a command with one line and status 130."""
    try:
        yield
    except KeyboardInterrupt:
        print("\nStopped by Ctrl-C; with --json the file holds the rows so far.", file=sys.stderr)
        raise SystemExit(130) from None


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """An environment variable for a block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def still_answers(wait: Callable[[], None], name: str) -> None:
    """Wait for the GPU after a method failed.

    Raises:
        DeviceLostError: it answers no more.
    """
    try:
        wait()
    except RuntimeError as problem:
        raise DeviceLostError(f"{name}: {str(problem).splitlines()[0]}") from problem


def clear() -> None:
    """Between rows: drop compiled graphs, caches and the last row's tensors."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def environment(revision: str) -> dict[str, Any]:
    """The machine, the software and the kernels, as far as figures depend on them."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": list(torch.cuda.get_device_capability()),
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "peers": installed.versions(),
        "sources": digest_of_all(),
        **kernels(revision),
    }


def digest_of_all() -> str:
    """Digest of every byte of the operator's sources: a file of `results/file.py` holds rows of one such state alone."""
    digest = hashlib.sha256()
    for source in sorted(PACKAGE.rglob("*.py")):
        digest.update(source.relative_to(PACKAGE).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def kernels(revision: str = "") -> dict[str, Any]:
    """Which operator is measured and when: its commit, and the digests that tell later whether its figures are still of today's."""
    day = datetime.now(UTC).date().isoformat()
    return {"revision": revision or described(PACKAGE), "measured": day, "families": sources.digests(PACKAGE)}


def about() -> dict[str, Any]:
    """What a script of one kernel records of itself: torch, the GPU, and the kernels."""
    return {"torch": torch.__version__, "device": torch.cuda.get_device_name(), **kernels()}


def described(folder: Path) -> str:
    """The git revision of a folder, or "unknown" outside a repository."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True, check=False, timeout=10
        )
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def fill_cache(name: str, rows: Iterable[Any], calls_of: Callable[[Any], Iterable[Call]]) -> None:
    """Call every Triton method of a group's rows twice, so that its kernels are in Triton's cache on disk."""
    from triton.runtime.autotuner import Autotuner

    def sweep(self: Any, key: Any, configs: Any, bench: Any) -> bool:  # as check_disk_cache, without the disk
        bench()
        return False

    Autotuner.check_disk_cache = sweep  # a sweep beside other processes must not choose for the timed run
    start = time.perf_counter()
    for row in rows:
        for method in row.lineup.methods:
            for call in calls_of(method) if method.kind != "baseline" else ():
                try:
                    call()
                    call()
                    torch.cuda.synchronize()
                except failures() as problem:
                    print(f"{row.name}, {method.name}: {str(problem).strip().splitlines()[:1]}")
        row.lineup.methods.clear()
        del row
        clear()
    print(f"{name}: compiled in {time.perf_counter() - start:.0f} s", flush=True)


def surroundings(revision: str, device: torch.device) -> dict[str, Any]:
    """The machine, the software and the kernels; of a CPU smoke run only what the file's shape needs."""
    if device.type == "cuda":
        return environment(revision)
    keys = {"gpu": "none", "capability": [0, 0], "cuda": None, "triton": "none", "sources": "none"}
    return {**keys, **kernels(revision), "torch": torch.__version__, "peers": {}}
