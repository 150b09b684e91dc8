"""How the paper's tables are measured: rows one at a time, everybody checked first, then timed in turns; a file after every row.

A row's methods are called until warm, compared with FP64 on the same inputs after NaN was left where their output will lie, and
asked for their memory; who is wrong, fails (with the exception's text) or takes seconds is not timed and says so. The rest take turns
with the library product of the row's dtype and a plain read, the L2 emptied before each call (`timing.py`). Compiled methods run 100
times first. The results file is `paper_file.py`'s.

On a CPU (`smoke`) wall clocks replace events and figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from measure import timing
from measure.clocks import SLOWEST, Bench
from measure.method import Lineup, Method
from measure.score_truth import Truth, error
from measure.session import DeviceLostError, RefusedError, failures, still_answers
from measure.timing import Call
from measure.work import Work, floor
from results.paper_file import LINEUP, Findings, add, losers, remember, there

SCHEMA = "maxsim-kernels/paper/1"
CHOOSING, WARM_COMPILED, WARM_SECONDS = 3, 100, 3.0
SLOW_MS, SLOW_RUNS = 150.0, 5  # a method above this takes its turns apart, in fewer rounds
HOST_MS = 3.0  # a call that keeps the host longer takes its turns apart too: those after it would meet a host that is late


@dataclass
class Row:
    """One line of work with everybody who can do it; `more` adds findings about the calls that are timed."""

    about: dict[str, Any]
    work: Work
    shape: tuple[int, ...]  # of the scores
    truths: dict[str, Callable[[], Truth]]
    lineup: Lineup
    main: str = "ours"
    more: Callable[[dict[str, Call]], Findings] | None = None
    name: str = ""  # for messages while compiling


@dataclass(frozen=True)
class Plan:
    """A row that can be made: its name, how, and about how many seconds it takes on an H200 with everything compiled once."""

    name: str
    make: Callable[[], Row | Findings]  # findings: measured by the maker itself (in processes of its own)
    seconds: float = 10.0
    lineup: int = LINEUP  # raised when compiled methods join: rows of a lower one are measured again when those are asked for


@dataclass
class Options:
    """What plans depend on."""

    device: torch.device
    peers: tuple[str, ...] = ()
    compile: bool = True
    smoke: bool = False
    runs: int = 50
    autotune_here: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def reason(problem: BaseException) -> str:
    """An exception's text in one line; of an out-of-memory error what it tried to allocate."""
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text}"[:220]


def prove(call: Call, method: Method, row: Row, against: Truth, bench: Bench) -> Findings:
    """Warm a call up, compare its scores, measure its memory.

    Raises:
        RefusedError: it failed, is wrong, or is too slow to be timed.
        DeviceLostError: it left the GPU unusable.
    """
    try:
        first, second = bench.seconds(call), bench.seconds(call)
        if second > SLOWEST:
            raise RefusedError(f"too slow to be timed: {second:.1f} s a call")
        count = _spoil(call)  # the third call: only then does a compiled CUDA graph replay
        bench.poison(4 * count)
        found = error(call(), against, row.shape)
        if not found <= method.bound:
            raise RefusedError(f"wrong: error {found:.2e}, bound {method.bound:.0e} (inf: a score is not finite)")
        return {"error": found, "bound": method.bound, "first_call_s": first, "extra_bytes": bench.peak(call)}
    except failures() as problem:
        failed = f"failed: {reason(problem)}"
    still_answers(bench.wait, method.name)
    bench.clear()
    raise RefusedError(failed)


def _spoil(call: Call) -> int:
    stale = call()
    if stale.is_floating_point() and not stale.is_inference():
        stale.fill_(torch.nan)
    return stale.numel()


def prepare(method: Method, row: Row, truths: dict[str, Truth], bench: Bench) -> tuple[Call, Findings]:
    """The fastest correct entry point of a method, warm, and what was found about it."""
    good: dict[str, Findings] = {}
    refused: dict[str, str] = {}
    for name, call in method.entries.items():
        try:
            good[name] = prove(call, method, row, truths[method.truth], bench)
        except RefusedError as why:
            refused[name] = str(why)
    if not good:
        raise RefusedError("; ".join(f"{name}: {why}" if name else why for name, why in refused.items()))
    chosen, times = next(iter(good)), {}
    if len(good) > 1:
        tried = timed({name: method.entries[name] for name in good}, bench, CHOOSING)
        times = {name: found["median_ms"] for name, found in tried.items()}
        chosen = min(times, key=times.__getitem__)
    data = {"kind": method.kind, "entry": chosen, **good[chosen]}
    if times or refused:
        data |= {"entries_ms": times, "entries_refused": refused}
    if method.says:
        data["says"] = method.says
    if method.name.startswith("compiled"):
        start = time.perf_counter()
        for _ in range(WARM_COMPILED):
            method.entries[chosen]()
            if time.perf_counter() - start > WARM_SECONDS:
                break
    return method.entries[chosen], data


def timed(calls: dict[str, Call], bench: Bench, runs: int) -> dict[str, dict[str, float]]:
    """Median and IQR of calls in turns."""
    if bench.flush is None:
        return bench.time(calls, set(), False)[0]
    return timing.measure(calls, runs, bench.flush)


def clocked(calls: dict[str, Call], units: set[str], bench: Bench, runs: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Times of everybody in turns with the library, very slow ones and those that keep the host apart; and this row's ceilings."""
    if bench.flush is None or bench.library is None:
        return timed(calls, bench, runs), {}
    once = timing.measure(calls, 1, bench.flush, 0) if calls else {}
    slow = {name for name, found in once.items() if found["median_ms"] > SLOW_MS}
    late = {name for name, call in calls.items() if name not in slow and _keeps_host(call, bench)}
    fast = {name: call for name, call in calls.items() if name not in slow | late}
    found = timing.measure(bench.library.calls(units) | fast, runs, bench.flush)
    ceilings = bench.library.taken(found)
    for apart, rounds in (*(({name}, runs) for name in late), *([(slow, SLOW_RUNS)] if slow else [])):
        rest = timing.measure({name: calls[name] for name in apart}, rounds, bench.flush, 1)
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

    return min(milliseconds() for _ in range(4)) > HOST_MS  # whoever is quick once does not


def prepared(method: Method, row: Row, truths: dict[str, Truth], bench: Bench) -> tuple[Call, Findings]:
    """`prepare`, with the method's name in what tells that the GPU is lost.

    Raises:
        RefusedError: the method does not take part.
        DeviceLostError: it left the GPU unusable.
    """
    try:
        try:
            return prepare(method, row, truths, bench)
        except failures() as problem:
            failed = f"failed: {reason(problem)}"
        still_answers(bench.wait, method.name)
    except DeviceLostError as lost:
        lost.method = method.name
        raise
    bench.clear()
    raise RefusedError(failed)


def run_row(row: Row, bench: Bench, runs: int, without: Mapping[str, str] = MappingProxyType({})) -> Findings:
    """Check and time everybody in a row but who is in `without`, with the reason."""
    calls: dict[str, Call] = {}
    methods: dict[str, Findings] = {}
    skipped = dict(row.lineup.skipped)
    truths = {name: make() for name, make in row.truths.items()}
    works: dict[str, Work] = {}
    for method in row.lineup.methods:
        bench.clear()
        try:
            if method.name in without:
                raise RefusedError(without[method.name])
            calls[method.name], methods[method.name] = prepared(method, row, truths, bench)
            works[method.name] = method.work or row.work
        except RefusedError as why:
            skipped[method.name] = str(why)
    bench.clear()
    found, ceilings = clocked(calls, {work.unit for work in works.values()}, bench, runs)
    least = floor(row.work, ceilings) if ceilings else (None, None)
    for name, times in found.items():
        methods[name] |= times
        if ceilings:
            methods[name]["of_floor"] = floor(works[name], ceilings)[0] / times["median_ms"]
    data = {
        "shape": row.about,
        "operations": row.work.operations,
        "bytes": row.work.size,
        "unit": row.work.unit,
        "floor_ms": least[0],
        "bound_by": least[1],
        "ceilings": ceilings,
        "main": row.main,
        "methods": methods,
        "skipped": skipped,
    }
    if row.more is not None:
        data |= row.more(calls)
    return data


# The command's loop


def _needed(bench: Bench | None) -> Bench:
    if bench is None:
        raise RuntimeError("a row that is timed in this process needs its clocks")
    return bench


def clear(bench: Bench | None) -> None:
    """Drop compiled graphs and the last row's tensors."""
    torch.compiler.reset()
    if bench is not None:
        bench.clear()


def lines(name: str, row: Findings) -> list[str]:
    """A row for people."""
    methods = row.get("methods")
    if methods is None:
        return [f"\n{name}: {json.dumps(row)[:400]}"]
    floor_ms = "" if row["floor_ms"] is None else f": floor {row['floor_ms']:.4f} ms ({row['bound_by']})"
    shown, main = [f"\n{name}{floor_ms}"], methods.get(row["main"], {}).get("median_ms")
    for method, data in methods.items():
        if "median_ms" not in data:
            shown.append(f"  {method:46} {json.dumps(data)[:100]}")
            continue
        ratio = f"{data['median_ms'] / main:6.2f}x ours" if main else ""
        share = f"{data['of_floor']:.3f} of floor" if "of_floor" in data else ""
        entry = f"  [{data['entry']}]" if data.get("entry") else ""
        extra = "" if data.get("extra_bytes") is None else f"{data['extra_bytes'] / 1e6:9.1f} MB"
        shown.append(
            f"  {method:46} {data['median_ms']:9.4f} ms  IQR {data['iqr_ms']:7.4f} {ratio:>12}  {share} {extra}"
            f"  error {data['error']:.0e}{entry}"
        )
    return [*shown, *(f"  {method:46} {why}" for method, why in row["skipped"].items())]


def selected(plans: dict[str, Sequence[Plan]], wanted: Callable[[str], bool]) -> Iterator[tuple[str, Plan]]:
    """(group, plan) of every row asked for."""
    for group, rows in plans.items():
        for plan in rows:
            if wanted(plan.name):
                yield group, plan


def made(plan: Plan, bench: Bench | None, runs: int, without: Mapping[str, str]) -> Findings:
    """A row's figures.

    Raises:
        RefusedError: it cannot be measured here.
        DeviceLostError: a method left the GPU unusable.
    """
    if "" in without:
        raise RefusedError(without[""])
    drawn: Row | Findings = plan.make()
    return run_row(drawn, _needed(bench), runs, without) if isinstance(drawn, Row) else drawn


def measured(plan: Plan, name: str, bench: Bench | None, runs: int, without: Mapping[str, str]) -> tuple[Findings, str]:
    """A row's figures, or none and why.

    Raises:
        DeviceLostError: a method left the GPU unusable; with the row's name.
    """
    data, why = Findings(), ""
    try:
        try:
            data = made(plan, bench, runs, without)
        except RefusedError as problem:
            why = str(problem)
        except failures() as problem:
            why = reason(problem)
        still_answers(bench.wait if bench is not None else (lambda: None), name)
    except DeviceLostError as lost:
        lost.row = name
        raise
    return data, why


def work(
    todo: Sequence[tuple[str, Plan]], report: Findings, bench: Bench | None, options: argparse.Namespace, here: Findings
) -> list[str]:
    """Rows into the report and the file, as many as the time allows; what was left out. `bench`: None where no row is timed here."""
    from tqdm import tqdm

    start, left = options.began, []
    bar = tqdm(todo, unit="row", disable=None if not options.quiet else True)
    for group, plan in bar:
        bar.set_description(f"{group}: {plan.name}"[:48])
        name = f"{group}: {plan.name}"
        if not options.again and there(report, group, plan.name, here, options, plan.lineup):
            bar.write(f"\n{name}: in the file already")
            continue
        spent = time.perf_counter() - start
        if spent + plan.seconds > options.seconds:
            left.append(f"{name}: left out, may take {plan.seconds:.0f} s after {spent:.0f} of {options.seconds:.0f} s")
            continue
        began = time.perf_counter()
        try:
            data, why = measured(plan, name, bench, options.runs, {} if options.again else losers(report, name, here))
        except DeviceLostError as lost:
            remember(report, name, lost, here, options)
            raise
        clear(bench)
        if why:
            left.append(f"{name}: {why}")
            continue
        data["seconds"] = time.perf_counter() - began
        add(report, group, plan.name, data, here, options, plan.lineup)
        bar.write("\n".join(lines(name, data)))
    return left
