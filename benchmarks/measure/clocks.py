"""What the training and Chamfer benchmarks measure with: times, peaks, kernels of a call, on a CUDA device or (smoke runs) a CPU."""

from __future__ import annotations

import gc
import time

import torch

from measure import timing
from measure.timing import Call
from measure.work import summary

SLOW, SLOWEST = 0.06, 3.0  # seconds: above the first a method is timed apart, above the second not at all
SLOW_RUNS, SLOW_WARM_UPS = 3, 1  # of methods timed apart; the calls before have warmed them too
PROFILED = 5
BUSY = 5.0  # ms: the host is long done when a longer call ends
AHEAD = 5_000_000  # GPU clocks, 2.5 ms and more, of waiting before a call whose host cost is not to count


def kernel_times(call: Call) -> dict[str, float]:
    """Milliseconds of each kernel of a call by torch's profiler, the L2 warm; empty where it sees none."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as held:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in held.key_averages():
        if event.self_device_time_total > 0:
            name = event.key[:160]  # templates differ late in their names; those that agree so far are added up
            found[name] = found.get(name, 0.0) + event.self_device_time_total / PROFILED / 1e3
    return found


class Bench:
    """Clocks and memory of the device: CUDA events with the L2 flushed, or wall time on a CPU."""

    def __init__(self, device: torch.device, runs: int) -> None:
        self.cuda, self.runs = device.type == "cuda", runs
        self.flush = timing.Flush() if self.cuda else None
        self.library = timing.Library(self.flush, runs) if self.flush is not None else None
        self._frozen = False
        self.ceilings: dict[str, float] = {} if self.library is None else dict(self.library.rates)

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.cuda:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Bytes that tensors hold on a GPU."""
        return torch.cuda.memory_allocated() if self.cuda else 0

    def seconds(self, call: Call) -> float:
        """One call by the host's clock."""
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - start

    def peak(self, call: Call) -> int | None:
        """Peak bytes of a call above the state that the same call left behind; None on a CPU."""
        if not self.cuda:
            return None
        call()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)

    def kernels(self, call: Call) -> dict[str, float]:
        """Milliseconds of each kernel of a call by torch's profiler, the L2 warm; empty where it sees none."""
        return kernel_times(call) if self.cuda else {}

    def poison(self, size: int) -> None:
        """Leave NaN where the next outputs will lie."""
        if self.cuda:
            timing.poison(size // 4)

    def time(
        self, calls: dict[str, Call], slow: set[str], busy: bool, *, floor: bool = True
    ) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        """Medians and IQR of every call, and (`floor`) the row's own ceilings; `busy`: short calls also with the host ahead."""
        if self.library is None or self.flush is None:
            return {name: self._wall(call) for name, call in calls.items()}, {}
        library = self.library.calls({"fp16"}) if floor else {}
        library.pop("library read", None)
        fast = {name: call for name, call in calls.items() if name not in slow}
        found = timing.measure(library | fast, self.runs, self.flush)
        ceilings = self.library.taken(found)
        if slow:
            rest = {name: calls[name] for name in slow}
            found |= timing.measure(rest, min(self.runs, SLOW_RUNS), self.flush, SLOW_WARM_UPS)
        short = {name: call for name, call in fast.items() if found[name]["median_ms"] <= BUSY}
        if busy and short:
            for name, times in timing.measure(short, self.runs, self._ahead).items():
                found[name] |= {f"busy_{key}": value for key, value in times.items()}
        return found, ceilings

    def _ahead(self) -> None:
        assert self.flush is not None
        self.flush()
        torch.cuda._sleep(AHEAD)

    def _wall(self, call: Call) -> dict[str, float]:
        return summary([self.seconds(call) * 1e3 for _ in range(self.runs)], "ms")

    def clear(self) -> None:
        """Drop what the last method or row held."""
        gc.collect()
        if not self._frozen:
            self._frozen = True
            gc.freeze()  # later collections, one a method, need not walk over every module
        if self.cuda:
            torch.cuda.empty_cache()
