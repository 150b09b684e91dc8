"""What the training and the Chamfer benchmark share: prepare a row's methods, time them in turn, write one file, one command line.

A row's methods are prepared first: called until warm, compared with FP64 truth after NaN was left in the memory that its outputs will
get, and their memory measured. A method that is wrong, fails or is missing is reported with the reason and never timed. Then the row is
timed as `timing.py` says, in turns whose order changes each round. Methods that need more than 60 ms a call (naive autograd,
recomputation) take their turns among themselves in a few rounds: beside a call a hundred times longer, a short one would not be
measured any better. `busy` times are of the GPU alone: the host runs ahead of it. Calls above 5 ms have none, since they need none.

Memory is that of a steady state: what the call before left behind (gradients, outputs) exists when the call starts and is dropped by
it. `peak_bytes` counts from that state, so it holds winners, lists, scratch, activations; `strict_bytes` adds the gradients themselves.

`--smoke` runs the same flow on tiny shapes, also on a CPU, where wall clocks replace events and peers are left out. Its figures mean
nothing and go to files of their own schema.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from measure import installed
from measure.clocks import SLOW, SLOWEST, Bench
from measure.method import Lineup, Method
from measure.session import DeviceLostError, RefusedError, failures, fill_cache, interruptible, still_answers, surroundings
from measure.timing import Call
from results.file import merge, opened, short, shown, write


@dataclass
class Row:
    """One line of work with everybody who can do it."""

    name: str
    about: dict[str, Any]
    lineup: Lineup
    operations: float = 0.0  # of the least FP16 products, 2 a multiply-add; 0: no floor is given
    main: str = "ours"
    timed: bool = True
    busy: bool = False  # time short calls once more with the host ahead of the GPU
    precision: str = "high"  # of FP32 products in torch ("high": TF32, as the paper's naive)


@dataclass(frozen=True)
class Options:
    """What a group's rows depend on."""

    device: torch.device
    peers: tuple[str, ...] = tuple(installed.PEERS)
    smoke: bool = False


@dataclass(frozen=True)
class Tool:
    """A benchmark command: its groups of rows and how its figures are shown."""

    name: str
    text: str
    schema: str
    groups: dict[str, Callable[[Options], Iterator[Row]]]
    verdicts: Callable[[dict[str, Any]], list[dict[str, Any]]]
    markdown: Callable[[dict[str, Any], bool], list[str]]  # of a report; brief?


def prepare(method: Method, bench: Bench) -> tuple[Call, dict[str, Any], float]:
    """The fastest correct entry point of a method, what was found about it, and seconds a call.

    Raises:
        RefusedError: no entry point is right.
        DeviceLostError: the GPU answers no more.
    """
    good: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, call in method.entries.items():
        try:
            first = bench.seconds(call)
            seconds[name] = bench.seconds(call)
            if seconds[name] > SLOWEST:
                raise RefusedError(f"too slow to be timed: {seconds[name]:.1f} s a call")
            bench.poison(method.gradient_bytes)
            assert method.check is not None
            good[name] = {**method.check(name), "first_call_s": first}
        except RefusedError as reason:
            refused[name] = str(reason)
        except failures() as problem:
            refused[name] = f"failed: {type(problem).__name__}: {str(problem).strip()}".splitlines()[0][:180]
        if name in refused:
            still_answers(bench.wait, method.name)
            bench.clear()
    if not good:
        raise RefusedError("; ".join(f"{name}: {why}" if name else why for name, why in refused.items()))
    chosen = min(good, key=seconds.__getitem__)
    data = {"kind": method.kind, "entry": chosen, **good[chosen]}
    peak = bench.peak(method.entries[chosen])
    data |= {"peak_bytes": peak, "strict_bytes": None if peak is None else peak + method.gradient_bytes}
    if len(seconds) > 1:
        data["entries_ms"] = {name: 1e3 * seconds[name] for name in good}
    if refused:
        data["entries_refused"] = refused
    if method.kernels:
        data["kernels_ms"] = bench.kernels(method.entries[chosen])
    if method.says:
        data["says"] = method.says
    return method.entries[chosen], data, seconds[chosen]


def run_row(row: Row, bench: Bench) -> dict[str, Any]:
    """Check everybody in a row, measure memory, time those that are right."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(row.precision)
    try:
        return _run_row(row, bench)
    finally:
        torch.set_float32_matmul_precision(before)


def _run_row(row: Row, bench: Bench) -> dict[str, Any]:
    calls: dict[str, Call] = {}
    methods: dict[str, dict[str, Any]] = {}
    skipped, slow = dict(row.lineup.skipped), set()
    for method in row.lineup.methods:
        bench.clear()
        try:
            calls[method.name], methods[method.name], seconds = prepare(method, bench)
        except RefusedError as reason:
            skipped[method.name] = str(reason)
        else:
            slow |= {method.name} if seconds > SLOW else set()
    bench.clear()
    ceilings = bench.ceilings
    if row.timed:
        found, ceilings = bench.time(calls, slow, row.busy, floor=row.operations > 0)
        for name, times in found.items():
            methods[name] |= times
    rate = ceilings.get("fp16")
    return {
        "about": row.about,
        "operations": row.operations,
        "bytes": 0,
        "floor_ms": row.operations / rate * 1e3 if rate and row.operations else None,
        "ceilings": ceilings,
        "main": row.main,
        "host": False,
        "methods": methods,
        "skipped": skipped,
    }


def lines(name: str, row: dict[str, Any]) -> list[str]:
    """One row as text."""
    floor = "" if row["floor_ms"] is None else f" (forward floor {row['floor_ms']:.4f} ms)"
    shown = [f"\n{name}{floor}"]
    for method, data in row["methods"].items():
        ms = f"{data['median_ms']:10.4f} ms" if "median_ms" in data else " " * 13
        busy = f"busy {data['busy_median_ms']:9.4f}" if "busy_median_ms" in data else " " * 14
        peak = "" if data["peak_bytes"] is None else f"{data['peak_bytes'] / 1e6:10.2f} MB"
        found = "  ".join(
            f"{key} {data[key]:.2e}" for key in ("error", "shifted_error", "gradient_error") if data.get(key) is not None
        )
        cosine = f"  1-cos {data['cosine_gap']:.1e}" if "cosine_gap" in data else ""
        entry = f"  [{data['entry']}]" if data["entry"] else ""
        wrong = f"  WRONG: {data['wrong']}" if data.get("wrong") else ""
        shown.append(f"  {method:44} {ms} {busy} {peak}  {found}{cosine}{entry}{wrong}")
    return [*shown, *(f"  {method:44} {reason}" for method, reason in row["skipped"].items())]


def run_group(tool: Tool, name: str, report: dict[str, Any], bench: Bench, options: argparse.Namespace) -> None:
    """All rows of a group into the report and the file, a bar on stderr meanwhile."""
    from tqdm import tqdm

    start = time.perf_counter()
    print(f"\n== {name}", flush=True)
    group: dict[str, Any] = {
        "environment": options.here,
        "ceilings": bench.ceilings,
        "runs": bench.runs,
        "smoke": options.smoke,
        "rows": {},
    }
    # Moved by hand: a bar around the rows would keep the last one's tensors while the next one's are made.
    with tqdm(unit="row", desc=name, disable=True if getattr(options, "quiet", False) else None) as bar:
        for row in tool.groups[name](options.rows):
            bar.set_description(f"{name}: {row.name}"[:48])
            group["rows"][row.name] = run_row(row, bench)
            bar.write("\n".join(lines(row.name, group["rows"][row.name])))
            sys.stdout.flush()
            row.lineup.methods.clear()
            del row
            bench.clear()
            merge(report, name, group, complete=False)
            write(options.json, report)
            bar.update()
    merge(report, name, group, complete=True)
    report["verdicts"] = tool.verdicts(report)
    write(options.json, report)
    print(f"== {name}: {time.perf_counter() - start:.0f} s", flush=True)


def parse(tool: Tool, arguments: list[str] | None) -> argparse.Namespace:
    """The command line; ends the program with a usage message when it is wrong."""
    parser = argparse.ArgumentParser(description=tool.text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(tool.groups), help="groups, by comma (default: all)")
    parser.add_argument("--json", type=Path, help="add the raw figures to this file")
    parser.add_argument("--fresh", action="store_true", help="replace the file instead of adding to it")
    parser.add_argument("--runs", type=int, default=20, help="timed rounds (default 20)")
    parser.add_argument("--peers", default=",".join(installed.PEERS), help="peers, by comma, or none (default: both)")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU too: shows mistakes, measures nothing")
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache on disk and time nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--revision", default="", help="what to record as the revision (default: git describe)")
    parser.add_argument("--show", type=Path, help="print the Markdown tables of a results file and end; needs no GPU")
    parser.add_argument("--brief", action="store_true", help="print the summary tables only, not one table a row")
    options = parser.parse_args(arguments)
    options.only = [name for name in options.only.split(",") if name]
    unknown = [name for name in options.only if name not in tool.groups]
    if unknown or not options.only:
        parser.error(f"--only: got {', '.join(unknown) or 'nothing'}, need some of {', '.join(tool.groups)}")
    options.peers = installed.asked(parser, options.peers)
    if options.runs < 1:
        parser.error(f"--runs: got {options.runs}, need 1 or more")
    return options


@interruptible()
def main(tool: Tool, arguments: list[str] | None = None) -> None:
    """The command."""
    options = parse(tool, arguments)
    schema = f"{tool.schema}/smoke" if options.smoke else tool.schema
    if options.show is not None:
        print("\n".join(tool.markdown(shown(options.show, schema), options.brief)), flush=True)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and (options.compile_only or not options.smoke):
        raise SystemExit(f"{tool.name} measures a CUDA GPU, and torch sees none here; --smoke runs the flow on a CPU")
    options.rows = Options(device, options.peers if device.type == "cuda" else (), options.smoke)
    if options.compile_only:
        for name in options.only:
            fill_cache(name, tool.groups[name](options.rows), lambda method: method.entries.values())
        return
    options.here = surroundings(options.revision, device)
    try:
        report = opened(options.json, options.here, options.fresh, schema)
    except ValueError as problem:
        raise SystemExit(str(problem)) from None
    print(" ".join(f"{key} {options.here[key]}" for key in ("gpu", "torch", "triton", "peers", "sources")), flush=True)
    bench = Bench(device, options.runs)
    try:
        for name in options.only:
            run_group(tool, name, report, bench, options)
    except DeviceLostError as lost:
        print(f"\nThe GPU answers no more after {lost}; rows so far are in the file under 'partial'.", file=sys.stderr)
        raise SystemExit(3) from None
    print("\n".join(tool.markdown(short(report), options.brief)), flush=True)
