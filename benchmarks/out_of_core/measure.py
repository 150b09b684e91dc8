"""How the streaming benchmark measures: the wall from call to results on the host, each result checked; peaks; stages of one run.

A stream is compared bit for bit, scores and indices, with one `maxsim` over the same documents resident on the device and a stable sort
of all its scores, each time it is run; a stream that is wrong has no figures. Its first run, over block shapes the process has not
seen, is reported beside the median of the others. The pinned copy that gives the link's floor takes turns with the stream.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from maxsim_kernels import Int8Tokens, Packed, maxsim
from measure.session import RefusedError
from measure.work import summary
from out_of_core.corpora import Arena, Sizes

Found = tuple[Tensor, Tensor]  # scores and indices [Nq, k]
Stream = Callable[[], Found]
T = TypeVar("T")
SAMPLED = 0.01  # seconds between two looks at the process's memory
GAP = 50e-6  # seconds between two busy spells of the GPU that count as one


@dataclass
class Bench:
    """The device, its clock and its memory, and the buffers that rows share."""

    device: torch.device
    sizes: Sizes
    runs: int
    folder: Path
    store_seconds: float = 90.0
    profiled: bool = False
    arena_bytes: int = 0  # of the pinned buffer; 0: as the sizes say
    held: dict[str, Any] = field(default_factory=dict)  # what one row leaves for the next

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @cached_property
    def arena(self) -> Arena:
        """The pinned buffer."""
        return Arena(self.arena_bytes or self.sizes.arena, self.device)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """`make()`, kept for later rows."""
        if name not in self.held:
            self.held[name] = make()
        found: T = self.held[name]
        return found

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        """Seconds of a call and of what it left to the device, by the host's clock; what it returned."""
        self.wait()
        start = time.perf_counter()
        found = call()
        self.wait()
        return time.perf_counter() - start, found

    def clear(self) -> None:
        """Give unused memory back."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def host(self, stream: Stream) -> Found:
        """A stream's results on the host: the end of what is timed."""
        scores, indices = stream()
        return scores.cpu(), indices.cpu()


def rate(size: float, samples: Iterable[float]) -> dict[str, Any]:
    """GB/s over the median time."""
    times = summary(list(samples), "s")
    return {**times, "bytes": size, "GB_s": size / times["median_s"] / 1e9}


# The machine's memory


class Watch:
    """Peaks while it is open: GPU memory above what was held, growth of the process, pinned memory that torch handed out."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self.found = bench, dict[str, int]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._bench.clear()
        self._bench.wait()
        if self._bench.cuda:
            torch.cuda.reset_peak_memory_stats(self._bench.device)
            self._allocated = torch.cuda.memory_allocated(self._bench.device)
            self._reserved = torch.cuda.memory_reserved(self._bench.device)
            self._free = torch.cuda.mem_get_info(self._bench.device)[0]
            torch.cuda.reset_peak_host_memory_stats()
            self._pinned = _pinned("current")
        self._resident = self._peak = resident()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._peak = max(self._peak, resident())
        self.found = {"host_bytes": self._peak - self._resident}
        if self._bench.cuda:
            device = self._bench.device
            self.found |= {
                "gpu_bytes": torch.cuda.max_memory_allocated(device) - self._allocated,
                "gpu_reserved_bytes": torch.cuda.max_memory_reserved(device) - self._reserved,
                "gpu_free_bytes": self._free - torch.cuda.mem_get_info(device)[0],
                "pinned_bytes": _pinned("peak") - self._pinned,
            }

    def _look(self) -> None:
        while not self._stop.wait(SAMPLED):
            self._peak = max(self._peak, resident())


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _pinned(which: str) -> int:
    stats = torch.cuda.host_memory_stats()
    key = f"active_bytes.{which}"  # handed out; older versions of torch call it allocated
    return int(stats[key] if key in stats else stats[f"allocated_bytes.{which}"])


# Truth and time in memory


def ordered(scores: Tensor, k: int, first: int = 0) -> Found:
    """The k best of `[Nq, n]` by a stable sort of everything: score descending, then index ascending."""
    values, indices = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :k], indices[:, :k] + first


def expected(scores: Tensor, k: int, documents: int) -> Found:
    """The k best of `documents` documents whose scores are those of `[Nq, n]` again and again, so that every score has ties."""
    count = scores.shape[1]
    whole, rest = divmod(documents, count)
    parts: list[Found] = []
    if whole:
        values, indices = ordered(scores, k)
        parts += [(values, indices + count * turn) for turn in range(whole)]
    if rest:
        parts.append(ordered(scores[:, :rest], k, count * whole))
    values, indices = (torch.cat(held, 1) for held in zip(*parts, strict=True))
    values, places = values.sort(dim=1, descending=True, stable=True)  # parts stand in the order of their indices
    return values[:, :k].cpu(), indices.gather(1, places)[:, :k].cpu()


@dataclass(frozen=True)
class Known:
    """What one pass over resident documents says: the answer for each number of streamed documents, seconds a pass."""

    answers: dict[int, Found]
    seconds: dict[str, float]
    documents: int


def known(bench: Bench, queries: Tensor, documents: Packed | Int8Tokens, counts: Iterable[int]) -> Known:
    """Score documents that are on the device; a first call compiles and warms up."""

    def call() -> Tensor:
        found = maxsim(queries, documents)
        assert isinstance(found, Tensor)
        return found

    bench.timed(call)
    samples = []
    for _ in range(bench.runs):
        seconds, scores = bench.timed(call)
        samples.append(seconds)
    answers = {count: expected(scores, bench.sizes.k, count) for count in counts}
    return Known(answers, summary(samples, "s"), scores.shape[1])


def differs(found: Found, answer: Found) -> str:
    """What is wrong with a result; empty where nothing is."""
    wrong_scores, wrong_places = ((mine != true).sum().item() for mine, true in zip(found, answer, strict=True))
    if wrong_scores or wrong_places:
        return (
            f"wrong: {wrong_scores} scores and {wrong_places} indices of {answer[0].numel()} are not those of one sorted pass"
        )
    return ""


# A stream


def measure(bench: Bench, stream: Stream, answer: Found, turn: Callable[[], Any] | None = None) -> dict[str, Any]:
    """Check and time a stream; before each timed run `turn()` (the link's copy) is timed too.

    Raises:
        RefusedError: a result is not the answer.
    """
    with Watch(bench) as watch:
        first, found = bench.timed(lambda: bench.host(stream))
    results, samples, turns = [found], [], []
    for _ in range(bench.runs):
        if turn is not None:
            turns.append(bench.timed(turn)[0])
        seconds, found = bench.timed(lambda: bench.host(stream))
        samples.append(seconds)
        results.append(found)
    for found in results:
        if wrong := differs(found, answer):
            raise RefusedError(wrong)
    data = {**summary(samples, "s"), "samples_s": samples, "first_s": first, "memory": watch.found, "checked": len(results)}
    if turns:
        data["copy"] = summary(turns, "s")
    if bench.profiled and bench.cuda:
        data["stages"] = stages(bench, stream)
    return data


def floored(data: dict[str, Any], size: float, operations: float, link: float, memory: float) -> dict[str, Any]:
    """Add the floor: the larger of bytes at the link's rate (`link` seconds) and the pass in memory (`memory` seconds)."""
    least = max(link, memory)
    return data | {
        "bytes": size,
        "operations": operations,
        "link_s": link,
        "memory_s": memory,
        "floor_s": least,
        "bound_by": "link" if link >= memory else "matrix",
        "ratio": data["median_s"] / least,
    }


# Stages of one run


def stages(bench: Bench, stream: Stream) -> dict[str, float]:
    """Seconds that copies, Triton kernels and the rest kept the GPU busy in one profiled run, and shares of its wall."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as held:
        wall, _ = bench.timed(lambda: bench.host(stream))
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in held.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
            spans[stage(event.name)].append(span)
    every = [span for held_spans in spans.values() for span in held_spans]
    kernels = [span for name, held_spans in spans.items() if "copies" not in name for span in held_spans]
    found = {name: union(held_spans) for name, held_spans in sorted(spans.items())}
    return {"wall": wall, **found, "any kernel": union(kernels), "anything": union(every)}


def stage(name: str) -> str:
    """What an event of the profiler belongs to."""
    if "HtoD" in name:
        return "copies to the device"
    if name.startswith(("Memcpy", "Memset")):
        return "other copies"
    return "maxsim" if name.isidentifier() and "topk" not in name else "top-k and the rest"


def union(spans: list[tuple[float, float]]) -> float:
    """Seconds covered by spans, gaps of up to `GAP` included."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        if begin > end + GAP:
            total += stop - begin
        elif stop > end:
            total += stop - end
        end = max(end, stop)
    return total
