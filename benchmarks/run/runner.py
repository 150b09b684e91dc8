"""How a row is measured: all methods are checked first, then timed in turns.

A row's methods are called until warm, compared with FP64 truth after NaN was left in the memory that their outputs will get, and asked
for their memory. A method that is wrong, fails (with the exception's text), is missing or takes seconds is reported with the reason
and never timed. The rest take turns with the library product of the row's dtype and a plain read, the L2 emptied before each call
(`timing.py`). Compiled methods run 100 times first. Steps of training take turns as `clocks.py` says: those that need more than 60 ms
a call (naive autograd, recomputation) among themselves in a few rounds, because beside a call a hundred times longer a short one would
not be measured any better. `busy` times are of the GPU alone: the host runs ahead of it. Calls above 5 ms have none, since they need
none.

Memory of what checks itself is that of a steady state: what the call before left behind (gradients, outputs) exists when the call
starts and is dropped by it. `peak_bytes` counts from that state, so it holds winners, lists, scratch, activations; `strict_bytes` adds
the gradients themselves.

On a CPU (`smoke`) wall clocks replace events and figures mean nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from measure import timing
from measure.clocks import SLOW, SLOWEST, Bench
from measure.method import Method, Row
from measure.score_truth import Truth, error
from measure.session import DeviceLostError, RefusedError, failures, reason, still_answers
from measure.timing import Call
from measure.work import Work, floor

CHOOSING, WARM_COMPILED, WARM_SECONDS = 3, 100, 3.0
SLOW_MS, SLOW_RUNS = 150.0, 5  # a method above this takes its turns apart, in fewer rounds
HOST_MS = 3.0  # a call that keeps the host longer takes its turns apart too: those after it would meet a host that is late
Findings = dict[str, Any]


@dataclass(frozen=True)
class Rules:
    """What differs between the benchmarks."""

    about: str = "about"  # the key of a row's shape in the file
    slowest: float = SLOWEST  # seconds a call may take and still be timed
    steps: bool = False  # rows of methods that check themselves: training's clocks, fastest entry by one call
    apart: bool = False  # slow methods, and those that keep the host, take turns of their own
    kept: bool = False  # count what a call leaves behind beside what it needs


FORWARD, STEPS, PAPER = Rules("shape", 2.0, kept=True), Rules(steps=True), Rules("shape", apart=True)


def prove(entry: str, method: Method, row: Row, truths: Mapping[str, Truth], bench: Bench, rules: Rules) -> Findings:
    """Warm an entry point up, compare what it makes, measure the memory of scores.

    Raises:
        RefusedError: it failed, is wrong, or is too slow to be timed.
        DeviceLostError: it left the GPU unusable.
    """
    call = method.entries[entry]
    try:
        before = bench.allocated()
        first, second = bench.seconds(call), bench.seconds(call)
        if second > rules.slowest:
            raise RefusedError(f"too slow to be timed: {second:.1f} s a call")
        if method.check is not None:
            bench.poison(method.gradient_bytes)
            return {**method.check(entry), "first_call_s": first, "second_call_s": second}
        count = _spoil(call)  # the third call: only then does a compiled CUDA graph replay
        bench.poison(4 * count)
        found = error(call(), truths[method.truth], row.shape)
        if not found <= method.bound:
            raise RefusedError(f"wrong: error {found:.2e}, bound {method.bound:.0e} (inf: a score is not finite)")
        data: Findings = {"error": found, "bound": method.bound, "first_call_s": first}
        if rules.kept:
            gc.collect()
            kept = max(0, bench.allocated() - before)
            return {**data, "extra_bytes": timing.extra_bytes(call), "kept_bytes": kept}
        return {**data, "extra_bytes": bench.peak(call)}
    except RefusedError as why:
        refused = str(why)
    except failures() as problem:
        refused = f"failed: {reason(problem)}"
    still_answers(bench.wait, f"{row.name}, {method.name}" if rules.kept else method.name)
    bench.clear()
    raise RefusedError(refused)


def _spoil(call: Call) -> int:
    stale = call()
    if stale.is_floating_point() and not stale.is_inference():
        stale.fill_(torch.nan)
    return stale.numel()


def prepare(method: Method, row: Row, truths: Mapping[str, Truth], bench: Bench, rules: Rules) -> tuple[Call, Findings, float]:
    """The fastest correct entry point of a method, warm, what was found about it, and about how many seconds it takes.

    Raises:
        RefusedError: no entry point is right.
        DeviceLostError: one left the GPU unusable.
    """
    good: dict[str, Findings] = {}
    refused: dict[str, str] = {}
    for name in method.entries:
        try:
            good[name] = prove(name, method, row, truths, bench, rules)
        except RefusedError as why:
            refused[name] = str(why)
    if not good:
        raise RefusedError("; ".join(f"{name}: {why}" if name else why for name, why in refused.items()))
    seconds = {name: found.pop("second_call_s", 0.0) for name, found in good.items()}
    times = {name: 1e3 * second for name, second in seconds.items()} if rules.steps and len(method.entries) > 1 else {}
    if not rules.steps and len(good) > 1:
        tried = timed({name: method.entries[name] for name in good}, bench, CHOOSING)
        times = {name: found["median_ms"] for name, found in tried.items()}
    chosen = min(times, key=times.__getitem__) if times else next(iter(good))
    call = method.entries[chosen]
    data = {"kind": method.kind, "entry": chosen, **good[chosen]}
    if rules.steps:
        peak = bench.peak(call)
        data |= {"peak_bytes": peak, "strict_bytes": None if peak is None else peak + method.gradient_bytes}
    if times or refused:
        data |= {"entries_ms": times, "entries_refused": refused}
    if method.kernels:
        data["kernels_ms"] = bench.kernels(call)
    if method.says:
        data["says"] = method.says
    if rules.apart and method.name.startswith("compiled"):
        _warm(call)
    return call, data, seconds[chosen]


def _warm(call: Call) -> None:
    start = time.perf_counter()
    for _ in range(WARM_COMPILED):
        call()
        if time.perf_counter() - start > WARM_SECONDS:
            break


def prepared(method: Method, row: Row, truths: Mapping[str, Truth], bench: Bench, rules: Rules) -> tuple[Call, Findings, float]:
    """`prepare`, with the method's name in what tells that the GPU is lost.

    Raises:
        RefusedError: the method does not take part.
        DeviceLostError: it left the GPU unusable.
    """
    try:
        try:
            return prepare(method, row, truths, bench, rules)
        except failures() as problem:
            failed = f"failed: {reason(problem)}"
        still_answers(bench.wait, method.name)
    except DeviceLostError as lost:
        lost.method = method.name
        raise
    bench.clear()
    raise RefusedError(failed)


def timed(calls: dict[str, Call], bench: Bench, runs: int) -> dict[str, dict[str, float]]:
    """Median and IQR of calls in turns."""
    if bench.flush is None:
        return bench.time(calls, set(), False)[0]
    return timing.measure(calls, runs, bench.flush)


def clocked(
    calls: dict[str, Call], units: set[str], bench: Bench, runs: int, *, apart: bool = True
) -> tuple[dict[str, Any], dict[str, float]]:
    """Times of all methods, in turns with the library (apart: very slow ones, and those that keep the host), and the ceilings."""
    if bench.flush is None or bench.library is None:
        return timed(calls, bench, runs), {}
    once = timing.measure(calls, 1, bench.flush, 0) if calls and apart else {}
    slow = {name for name, found in once.items() if found["median_ms"] > SLOW_MS}
    late = {name for name, call in calls.items() if apart and name not in slow and _keeps_host(call, bench)}
    fast = {name: call for name, call in calls.items() if name not in slow | late}
    found = timing.measure(bench.library.calls(units) | fast, runs, bench.flush)
    ceilings = bench.library.taken(found)
    for names, rounds in (*(({name}, runs) for name in late), *([(slow, SLOW_RUNS)] if slow else [])):
        rest = timing.measure({name: calls[name] for name in names}, rounds, bench.flush, 1)
        found |= {name: {**times, "rounds": rounds, "apart": True} for name, times in rest.items()}
    return {name: found[name] for name in calls}, ceilings


def _keeps_host(call: Call, bench: Bench) -> bool:
    """Whether a call returns so late that what the next one has to issue would not be hidden behind the flush."""

    def milliseconds() -> float:
        start = time.perf_counter()
        call()
        returned = time.perf_counter()
        bench.wait()
        return (returned - start) * 1e3

    return min(milliseconds() for _ in range(4)) > HOST_MS  # a call that is quick once does not keep the host


@contextmanager
def precision(asked: str) -> Iterator[None]:
    """Set the precision of torch's FP32 products for a block; "" leaves it alone."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(asked or before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def run_row(row: Row, bench: Bench, runs: int, rules: Rules, without: Mapping[str, str] = MappingProxyType({})) -> Findings:
    """Check and time all methods of a row but those in `without`, which gives the reasons."""
    with precision(row.precision):
        return _run_row(row, bench, runs, rules, without)


def _run_row(row: Row, bench: Bench, runs: int, rules: Rules, without: Mapping[str, str]) -> Findings:
    calls: dict[str, Call] = {}
    methods: dict[str, Findings] = {}
    works: dict[str, Work] = {}
    slow: set[str] = set()
    skipped, truths = dict(row.lineup.skipped), {name: make() for name, make in row.truths.items()}
    for method in row.lineup.methods:
        bench.clear()
        try:
            if method.name in without:
                raise RefusedError(without[method.name])
            calls[method.name], methods[method.name], seconds = prepared(method, row, truths, bench, rules)
        except RefusedError as why:
            skipped[method.name] = str(why)
            continue
        slow |= {method.name} if seconds > SLOW else set()
        if work := method.work or row.work:
            works[method.name] = work
    bench.clear()
    found, ceilings = _clocks(row, calls, works, slow, bench, runs, rules)
    for name, times in found.items():
        methods[name] |= times
        if ceilings and name in works and not (rules.steps or row.host):
            methods[name]["of_floor"] = floor(works[name], ceilings)[0] / times["median_ms"]
    least = floor(row.work, ceilings) if ceilings and row.work is not None else (None, None)
    data = {
        rules.about: row.about,
        "operations": row.work.operations if row.work else 0.0,
        "bytes": row.work.size if row.work else 0,
        "unit": row.work.unit if row.work else "fp16",
        "floor_ms": least[0],
        "bound_by": least[1],
        "ceilings": ceilings,
        "main": row.main,
        "host": row.host,
        "methods": methods,
        "skipped": skipped,
    }
    return data if row.more is None else data | row.more(calls)


def _clocks(
    row: Row, calls: dict[str, Call], works: dict[str, Work], slow: set[str], bench: Bench, runs: int, rules: Rules
) -> tuple[dict[str, Findings], dict[str, float]]:
    """Times of all methods by the row's clocks, and its ceilings."""
    if not row.timed:
        return {}, bench.ceilings
    if rules.steps:
        return bench.time(calls, slow, row.busy, floor=row.work is not None)
    if row.host and bench.flush is not None:
        return timing.wall(calls, runs, bench.flush), bench.ceilings
    return clocked(calls, {work.unit for work in works.values()}, bench, runs, apart=rules.apart)
