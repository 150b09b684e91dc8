"""How the GPU benchmarks measure: flushed and interleaved events, host clocks, extra memory, and this run's ceilings.

Before each timed call the L2 is emptied by WRITING 128 MB and then READING another 1 GB: the read pushes the written lines out,
so the timed call neither finds its inputs nor pays for writing back the flush's own dirty lines. The flush keeps the GPU busy for about
0.3 ms in which the host is already issuing the timed call, so event times are GPU times: host cost up to that length does not show
in them. `wall` measures it instead. The library products that give a row's matrix rate, and the plain read, take turns with the row's
methods, because a GPU that has just been busy for long runs at other clocks than one that has rested. Every round has another order,
because a call pays for what came before it: threads that slept through a long product wake up late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from measure.work import summary

DEVICE = "cuda"
DIRTY_BYTES, CLEAN_BYTES = 128 << 20, 1 << 30
WARM_UPS = 3
SIDE = 8192  # of the square products that give the matrix rates
READ_VALUES = 1 << 30  # FP32: 4 GiB
BACK_TO_BACK = 300
Call = Callable[[], Tensor]


class Flush:
    """Empties the L2 when called."""

    def __init__(self) -> None:
        self._dirty = torch.empty(DIRTY_BYTES, dtype=torch.int8, device=DEVICE)
        self._clean = torch.zeros(CLEAN_BYTES // 4, dtype=torch.float32, device=DEVICE)

    def __call__(self) -> None:
        """Write 128 MB, read another 1 GB; does not wait."""
        self._dirty.zero_()
        self._clean.sum()


def turns(count: int, step: int) -> list[int]:
    """The order of `count` calls in round `step`, by number: over `count` rounds each call has every place once.

    Each call also follows each other one equally often, over `count` rounds when it is even and over twice as many when it is odd
    (the rows of a Williams square: a zigzag 0, count - 1, 1, count - 2, ... moved on by one each round, later rounds backwards).
    """
    zigzag = [count - 1 - place // 2 if place % 2 else place // 2 for place in range(count)]
    found = [(number + step) % count for number in zigzag]
    return found[::-1] if count and step // count % 2 else found


def measure(
    calls: dict[str, Call], runs: int, flush: Callable[[], None], warm_ups: int = WARM_UPS
) -> dict[str, dict[str, float]]:
    """CUDA-event medians and IQR in ms of `runs` rounds, every call once a round, after some rounds that do not count."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for step in range(runs + warm_ups):
        for name in (names[number] for number in turns(len(names), step)):
            flush()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            calls[name]()
            end.record()
            torch.cuda.synchronize()
            if step >= warm_ups:
                samples[name].append(start.elapsed_time(end))
    return {name: summary(values, "ms") for name, values in samples.items()}


def wall(calls: dict[str, Call], runs: int, flush: Flush) -> dict[str, dict[str, float]]:
    """Host clocks in microseconds a call.

    call: back to back without a flush, 300 calls and one wait at the end. enqueue: the same without the wait, what the host
    spends to issue a call (where the GPU is slower, the launch queue may fill and hold the host). idle: one call and a wait, from an
    idle GPU with the L2 flushed: what a caller waits for who sends one request at a time.
    """
    samples: dict[str, dict[str, list[float]]] = {name: {"call": [], "enqueue": [], "idle": []} for name in calls}
    for step in range(-1, 5):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BACK_TO_BACK):
                call()
            issued = time.perf_counter()
            torch.cuda.synchronize()
            done = time.perf_counter()
            if step >= 0:
                samples[name]["call"].append((done - start) / BACK_TO_BACK * 1e6)
                samples[name]["enqueue"].append((issued - start) / BACK_TO_BACK * 1e6)
    names = list(calls)
    for step in range(runs + WARM_UPS):
        for name in (names[number] for number in turns(len(names), step)):
            flush()
            torch.cuda.synchronize()
            start = time.perf_counter()
            calls[name]()
            torch.cuda.synchronize()
            if step >= WARM_UPS:
                samples[name]["idle"].append((time.perf_counter() - start) * 1e6)
    found: dict[str, dict[str, float]] = {}
    for name, kinds in samples.items():
        found[name] = {}
        for kind, values in kinds.items():
            found[name] |= {f"{kind}_{key}": value for key, value in summary(values, "us").items()}
    return found


def poison(count: int) -> None:
    """Leave NaN in the memory that the next call's output and workspace will get, so that an unwritten value shows."""
    torch.cuda.empty_cache()
    blocks = [torch.full((size,), torch.nan, device=DEVICE) for size in (max(count, 1), 16 << 20)]
    torch.cuda.synchronize()
    del blocks


def extra_bytes(call: Call) -> int:
    """Peak memory of a call above what it found and what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scores = call()
    torch.cuda.synchronize()
    peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del scores
    return peak - max(held, before)


class Graphed:
    """A call captured in a CUDA graph on first use and replayed from then on."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._graph: Any = None
        self._scores: Tensor | None = None

    def __call__(self) -> Tensor:
        """Replay; every call returns the same tensor."""
        if self._scores is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._call()
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._scores = self._call()
        self._graph.replay()
        return self._scores


class Library:
    """What this GPU reaches: library 8192^3 products by dtype and a plain 4 GiB read, in the form that was fastest here."""

    def __init__(self, flush: Flush, runs: int) -> None:
        self.forms = _forms()
        self.rates: dict[str, float] = {}
        self._best: dict[str, str] = {}
        for name, times in measure(self.forms, runs, flush).items():
            unit, rate = name.split()[0], _work(name) / times["median_ms"] * 1e3
            if rate > self.rates.get(unit, 0.0):
                self.rates[unit], self._best[unit] = rate, name

    def calls(self, units: set[str]) -> dict[str, Call]:
        """The fastest form of each unit and of the read, to take turns with the methods of a row."""
        return {f"library {unit}": self.forms[self._best[unit]] for unit in sorted(units | {"read"}) if unit in self._best}

    def taken(self, times: dict[str, dict[str, float]]) -> dict[str, float]:
        """Take the library's entries out of a row's times; returns their rates."""
        names = [name for name in times if name.startswith("library ")]
        return {name.split()[1]: _work(name.split()[1]) / times.pop(name)["median_ms"] * 1e3 for name in names}


def _work(form: str) -> float:
    return 4.0 * READ_VALUES if form.startswith("read") else 2.0 * SIDE**3


def _forms() -> dict[str, Call]:
    """Several forms each: both layouts of the second matrix, FP8 with and without fast accumulation, sums of FP32 and INT64."""
    left, right = (torch.randn(SIDE, SIDE, device=DEVICE) for _ in range(2))
    half_left, half_right = left.half(), right.half()
    int_left, int_right = (torch.randint(-127, 128, (SIDE, SIDE), dtype=torch.int8, device=DEVICE) for _ in range(2))
    block = torch.rand(READ_VALUES, device=DEVICE)
    calls: dict[str, Call] = {
        "fp16": lambda: half_left @ half_right,
        "fp16 transposed": lambda: half_left @ half_right.t(),
        "int8": lambda: torch._int_mm(int_left, int_right),
        "int8 transposed": lambda: torch._int_mm(int_left, int_right.t()),
        "read fp32": block.sum,
        "read int64": block.view(torch.int64).sum,
    }
    if torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9):
        tiny_left, tiny_right = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=DEVICE)
        product = partial(torch._scaled_mm, tiny_left, tiny_right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        calls |= {"fp8": product, "fp8 fast": partial(product, use_fast_accum=True)}
    return calls
