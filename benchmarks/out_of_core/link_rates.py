"""What the machine gives: pinned copies to the device, copies on the host, reads from the page cache, library products."""

from __future__ import annotations

import ctypes
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from out_of_core.measure import Bench, rate

PIECE = 16 << 20  # bytes that a thread copies or reads at once
THREADS = (1, 4, 8)
PRODUCTS = 20


class Link:
    """Copies of a host buffer to the device in blocks, back to back on a stream of their own, two device buffers in turn."""

    def __init__(self, bench: Bench, source: Tensor, block: int) -> None:
        self._bench, self._parts = bench, source.view(torch.uint8).flatten().split(block)
        self._targets = [torch.empty(min(block, source.nbytes), dtype=torch.uint8, device=bench.device) for _ in range(2)]
        self._stream = torch.cuda.Stream(bench.device) if bench.cuda else None

    def __call__(self, size: int | None = None) -> None:
        """Copy `size` bytes, from the beginning again and again (default: all of the buffer once)."""
        if self._stream is None:
            self._copy(size)
        else:
            with torch.cuda.stream(self._stream):
                self._copy(size)

    def _copy(self, size: int | None) -> None:
        left = sum(map(len, self._parts)) if size is None else size
        while left > 0:
            for number, part in enumerate(self._parts):
                count = min(left, len(part))
                self._targets[number % 2][:count].copy_(part[:count], non_blocking=True)
                left -= count
                if left == 0:
                    return

    def events(self, size: int | None = None) -> float:
        """Seconds between events around the copies (a CPU: by the host's clock)."""
        if self._stream is None:
            return self._bench.timed(lambda: self(size))[0]
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(self._stream)
        self(size)
        end.record(self._stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def by_threads(work: Callable[[int, int], None], size: int, threads: int) -> float:
    """Seconds of `work(first, count)` over `size` bytes in pieces taken by some threads."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))  # threads start
        start = time.perf_counter()
        list(pool.map(lambda first: work(first, min(PIECE, size - first)), range(0, size, PIECE)))
        return time.perf_counter() - start


def moves(target: Tensor, source: Tensor) -> Callable[[int, int], None]:
    """memmove between two byte tensors; ctypes lets go of the interpreter lock."""

    def work(first: int, count: int) -> None:
        ctypes.memmove(target.data_ptr() + first, source.data_ptr() + first, count)

    return work


def machine(bench: Bench) -> dict[str, dict[str, Any]]:
    """All rates: GB/s of copies and reads by threads and block sizes, FLOP/s of a product."""
    sizes, arena = bench.sizes, bench.arena
    size = sizes.read
    pinned = arena.scratch(size)
    pageable = torch.ones(size, dtype=torch.uint8)  # written once: its pages exist
    found: dict[str, dict[str, Any]] = {
        "pin memory": {"bytes": arena.bytes.numel(), "median_s": arena.seconds, "GB_s": len(arena.bytes) / arena.seconds / 1e9}
    }
    for block in sizes.blocks:
        link = Link(bench, pinned, block)
        link.events()
        found[f"pinned copy, blocks of {block / 2**20:g} MiB"] = rate(size, [link.events() for _ in range(bench.runs)])
    link = Link(bench, pageable, sizes.block)
    link.events()
    found["pageable copy by the driver"] = rate(size, [bench.timed(link)[0] for _ in range(bench.runs)])
    for threads in THREADS:
        copy = moves(pinned, pageable)
        by_threads(copy, size, threads)
        times = [by_threads(copy, size, threads) for _ in range(bench.runs)]
        found[f"pageable to pinned, {threads} threads"] = rate(size, times)
    found |= page_cache(bench, pinned)
    found["library product, FP16"] = product(bench)
    return found


def page_cache(bench: Bench, pinned: Tensor) -> dict[str, dict[str, Any]]:
    """`preadv` of a plain file that was just written, into pinned memory."""
    bench.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        path = Path(folder) / "plain"
        start = time.perf_counter()
        with open(path, "wb") as handle:
            handle.write(pinned.numpy().data)
        found = {"write a file into the page cache": rate(len(pinned), [time.perf_counter() - start])}
        target = pinned.numpy().data
        descriptor = os.open(path, os.O_RDONLY)

        def work(first: int, count: int) -> None:
            while count:
                done = os.preadv(descriptor, [target[first : first + count]], first)
                if not done:
                    raise OSError(f"{path}: ended at byte {first}")
                first, count = first + done, count - done

        try:
            by_threads(work, len(pinned), THREADS[0])
            for threads in THREADS:
                times = [by_threads(work, len(pinned), threads) for _ in range(bench.runs)]
                found[f"page cache to pinned, {threads} threads"] = rate(len(pinned), times)
        finally:
            os.close(descriptor)
    return found


def product(bench: Bench) -> dict[str, Any]:
    """A square FP16 product of random numbers by torch's library."""
    side = bench.sizes.side
    left, right = (torch.randn(side, side, device=bench.device).half() for _ in range(2))

    def call() -> None:
        for _ in range(PRODUCTS):
            left @ right

    call()
    found = rate(0, [bench.timed(call)[0] / PRODUCTS for _ in range(bench.runs)])
    return {**found, "operations": 2.0 * side**3, "TFLOP_s": 2.0 * side**3 / found["median_s"] / 1e12}


def filesystem(folder: Path) -> str:
    """Kind of file system that holds a folder, as /proc/mounts says."""
    folder = folder.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    fitting = [(len(point), kind) for point, kind in mounts if folder.is_relative_to(point)]
    return max(fitting, default=(0, "unknown"))[1]


def host() -> dict[str, Any]:
    """Processor, cores and memory of this machine."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"processor": model, "cores": len(os.sched_getaffinity(0)), "memory_bytes": memory}
