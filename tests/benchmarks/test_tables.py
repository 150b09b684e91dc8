"""How the GPU benchmarks take turns and time long calls, and the Markdown that the training and Chamfer benchmarks share."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from measure import clocks, timing
from tables import markdown


def timed(kind: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "entry": "", "median_ms": ms, "peak_bytes": 1e6, **more}


def report(methods: dict[str, Any]) -> dict[str, Any]:
    row = {"methods": methods, "skipped": {}, "main": "ours", "floor_ms": None}
    return {"groups": {"g": {"rows": {"r": row}}}, "partial": {}}


def test_cells_of_tables() -> None:
    assert markdown.cell({"median_ms": 1.0, "busy_median_ms": 0.95, "peak_bytes": 2e9}) == "1 (2)"
    assert markdown.cell({"median_ms": 1.0, "busy_median_ms": 0.2, "peak_bytes": None}) == "1 / 0.2"
    assert markdown.cell({"peak_bytes": 2e9}) == "(2)"
    assert markdown.cell({"peak_bytes": None}) == "-"
    assert markdown.gap({"cosine": 1.0, "cosine_gap": 2.1e-8}) == "2.1e-08"
    assert markdown.gap({"cosine": 1.0, "cosine_gap": -1e-16}) == "< 1e-12"
    assert markdown.gap({"cosine": 0.998}) == "2e-03"
    assert markdown.gap({}) == "-"
    zero = "void at::native::vectorized_elementwise_kernel<4, at::native"
    assert markdown.kernel_name(zero + "::FillFunctor<int>, std::array<char*, 1ul> >") == markdown.kernel_name(zero) == "zero"
    assert markdown.kernel_name(zero + "::CUDAFunctor_add<float> >").startswith("void at::native")
    assert markdown.kernel_name("_count_kernel") == "count"
    assert markdown.kernel_name("void at_cuda_detail::cub::detail::scan::DeviceScanInitKernel<x>") == "cumulative sum (init)"
    assert markdown.kernel_name("void at_cuda_detail::cub::detail::scan::DeviceScanKernel<at_") == "cumulative sum"
    assert markdown.reason("failed: OutOfMemoryError: CUDA out of memory") == "out of memory"
    assert markdown.reason("too slow to be timed: 3.1 s a call") == "too slow"
    assert markdown.reason("wrong: cosine 0.9") == "wrong"
    assert markdown.reason("failed: RuntimeError: no") == "failed"
    assert markdown.reason("no fused kernel (reference: d = 5)") == "no fused kernel"
    assert markdown.grid(["a", "b", "c", "d"], [["1", "2", "-", "3"], ["x", "why"]])[2:4] == ["| 1 | 2 | 3 |", "| x | why |  |"]


def test_time_of_the_gpu_alone_in_verdicts() -> None:
    figures, found = markdown.Figures, markdown.Lines()
    methods = {
        "ours": timed("ours", 1.0, busy_median_ms=0.5),
        "quick": timed("peer", 1.5, busy_median_ms=1.4),
        "quicker": timed("peer", 1.6, busy_median_ms=1.2),
        "long": timed("baseline", 50.0),  # above 5 ms a call is timed once
    }
    found.faster(figures(report(methods)), "r", 2.0)
    found.faster(figures(report(methods)), "r", 2.0, kind="baseline")
    assert [(line["what"], line["measured"]) for line in found.all] == [
        ("times faster than quick, the fastest peer", pytest.approx(1.5)),
        ("times faster than quicker, the fastest peer, GPU time alone", pytest.approx(2.4)),
        ("times faster than long, the fastest baseline", pytest.approx(50)),
        ("times faster than long, the fastest baseline, GPU time alone", pytest.approx(100)),
    ]
    del methods["quick"]["busy_median_ms"], methods["quicker"]["busy_median_ms"]
    unknown = markdown.Lines()
    unknown.faster(figures(report(methods)), "r", 2.0)
    assert len(unknown.all) == 1
    del methods["ours"]["busy_median_ms"]
    again = markdown.Lines()
    again.faster(figures(report(methods)), "r", 2.0)
    assert len(again.all) == 1


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_rounds_have_every_order(count: int) -> None:
    rounds = [timing.turns(count, step) for step in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in rounds)
    assert all(sorted(order[place] for order in rounds[:count]) == list(range(count)) for place in range(count))
    pairs = [pair for order in rounds for pair in pairwise(order)]
    assert all(pairs.count((first, then)) == 2 for first in range(count) for then in range(count) if first != then)
    assert timing.turns(0, 3) == []


def test_measured_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def call(name: str, milliseconds: float) -> torch.Tensor:
        seen.append(name)
        clock[0] += milliseconds
        return torch.zeros(())

    def flush() -> None:
        clock[0] += 100

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = {name: partial(call, name, length) for name, length in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    found = timing.measure(calls, 2, flush, 1)
    assert {name: times["median_ms"] for name, times in found.items()} == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert len(seen) == 9
    assert {seen[0], seen[3], seen[6]} == {"a", "b", "c"}


def test_long_calls_are_timed_apart_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, asked = clocks.Bench(torch.device("cpu"), 20), []
    lengths = {"short": 1.0, "long": 30.0, "endless": 900.0}

    def measure(calls: dict[str, Any], runs: int, flush: Any, warm_ups: int = 3) -> dict[str, dict[str, float]]:
        asked.append((sorted(calls), runs, warm_ups))
        return {name: {"median_ms": lengths[name], "iqr_ms": 0.0} for name in calls}

    monkeypatch.setattr(timing, "measure", measure)
    measured.flush = lambda: None
    measured.library = SimpleNamespace(calls=lambda units: {}, taken=lambda found: {"fp16": 8e14})
    found, _ = measured.time(dict.fromkeys(lengths), {"endless"}, True)
    assert asked == [(["long", "short"], 20, 3), (["endless"], 3, 1), (["short"], 20, 3)]
    assert {name for name, times in found.items() if "busy_median_ms" in times} == {"short"}
