"""The paper's forward tables on one GPU: correctness first, then interleaved medians with the L2 flushed, memory in fresh processes.

    python benchmarks/paper.py [--only fwd,int8,...] [--json FILE] [--seconds 540] [--runs 50] [--no-compile] [--peers none]

`--only` takes tables of the paper or groups of rows; several tables share a group:

    fwd, fwd_abs, nocg            shapes, and memory for the peaks
    fwd_chunked, chunked_sweep    frontier, shapes, and memory for the peaks
    op_abl, multiquery, varlen, int8, int8_B, precision, traffic    a group each
    fat_emb_cliff, splitd_perf    wide
    mem, twoaxis, scaling         memory
    side studies                  chunks (chunk sizes 1 to 16384), tiles (neighbours in the tile table), memory_compiled

The other tables have scripts of their own: training.py (train, bwd_abl, bwd_breakdown, bwd_mem), parity.py, chamfer.py, streaming.py
(ooc), second.py (a second harness for fwd). `page.py` makes docs/benchmarks.md of all their files.

The file is written after every row and keeps rows measured before, each with its commit; a row that is there with the same kernels
is not measured again (`--again` does) unless something is missing: its main method's time, cells that failed or hung, a peer installed
since, compiled methods that joined. A method that lost the GPU (exit status 3) is left out of that row when the command runs again.
`--rows TEXT` keeps rows whose name holds TEXT. A row starts only while `--seconds` allow it; the exit status is 1 when any was left
out. `--compile-only` fills Triton's cache on disk, for several processes at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from cases import memory, paper, quality, quantised, traffic
from measure.clocks import Bench
from measure.method import Options, Row
from measure.session import DeviceLostError, fill_cache, interruptible, surroundings
from results.paper_file import opened
from rivals import paper as paper_rivals
from run.campaign import SCHEMA, Plan, selected, work
from run.command import checked, common, compiling, smoking

GROUPS: dict[str, Callable[[Options], list[Plan]]] = {
    "memory": memory.memory,
    "memory_compiled": memory.memory_compiled,
    "traffic": traffic.traffic,
    "shapes": paper.shapes,
    "op_abl": paper.op_abl,
    "multiquery": paper.multiquery,
    "varlen": paper.varlen,
    "int8": quantised.int8,
    "int8_B": quantised.int8_sweep,
    "wide": quantised.wide,
    "frontier": paper.frontier,
    "precision": quality.precision,
    "chunks": paper.chunks,
    "tiles": quantised.tile_sweep,
}
APART = ("memory", "memory_compiled", "traffic")  # their processes need the GPU's memory for themselves: they come first
TABLES: dict[str, tuple[str, ...]] = {
    "fwd": ("shapes",),
    "fwd_abs": ("memory", "shapes"),
    "nocg": ("shapes",),
    "fwd_chunked": ("memory", "frontier"),
    "chunked_sweep": ("shapes", "frontier"),
    "fat_emb_cliff": ("wide",),
    "splitd_perf": ("wide",),
    "mem": ("memory",),
    "twoaxis": ("memory",),
    "scaling": ("memory",),
}


def groups_of(names: Sequence[str]) -> list[str]:
    """The groups behind tables and groups, in the order of `GROUPS`.

    Raises:
        ValueError: a name that is neither.
    """
    unknown = [name for name in names if name not in GROUPS and name not in TABLES]
    if unknown or not names:
        raise ValueError(f"got {', '.join(unknown) or 'nothing'}, need some of {', '.join(dict.fromkeys((*TABLES, *GROUPS)))}")
    wanted = {group for name in names for group in TABLES.get(name, (name,))}
    return [group for group in GROUPS if group in wanted]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; ends the program with a usage message when it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(GROUPS), help="tables or groups, by comma (default: all)")
    parser.add_argument("--rows", default="", help="only rows whose name holds one of these, by comma")
    common(parser, 50, ", the paper's")
    compiling(parser)
    smoking(parser)
    parser.add_argument("--again", action="store_true", help="measure rows anew that the file has of these kernels")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row that may end later than this")
    parser.add_argument(
        "--autotune-here",
        action="store_true",
        help="autotune torch.compile in this process (the protocol: a process of its own)",
    )
    parser.add_argument("--list", action="store_true", help="print the rows that would run, with expected seconds, and end")
    options = parser.parse_args(arguments)
    options.refuse = parser.error
    options.began = time.perf_counter()
    try:
        options.only = groups_of([name for name in options.only.split(",") if name])
    except ValueError as problem:
        parser.error(f"--only: {problem}")
    checked(parser, options)
    return options


def wanted(options: argparse.Namespace) -> Callable[[str], bool]:
    """A function of a row's name: whether the row was asked for."""
    parts = [part for part in options.rows.split(",") if part]
    return lambda name: not parts or any(part in name for part in parts)


def matched(options: argparse.Namespace, plans: dict[str, list[Plan]]) -> None:
    """End the program with a usage message where a part of `--rows` is in no row's name."""
    names = [plan.name for rows in plans.values() for plan in rows]
    lost = [part for part in options.rows.split(",") if part and not any(part in name for name in names)]
    if lost:
        options.refuse(f"--rows: got {', '.join(lost)}, need parts of names of rows (--list prints them)")


def fill(todo: Sequence[tuple[str, Plan]]) -> None:
    """Compile what Triton compiles for these rows."""

    def rows() -> Iterator[Row]:
        for group, plan in todo:
            made = plan.make() if group not in APART else None
            if isinstance(made, Row):
                made.name = f"{group}: {plan.name}"
                yield made

    fill_cache("paper", rows(), lambda method: method.entries.values())


def told(lost: DeviceLostError, options: argparse.Namespace) -> str:
    """What to say when the GPU is lost."""
    said = f"\nThe GPU answers no more after {lost}"
    if options.json is None:
        return f"{said}; --json FILE would have kept the rows so far"
    what = f"{lost.method} is left out of that row" if lost.method else "that row is left out"
    flags = " and ".join(flag for flag, given in (("--fresh", options.fresh), ("--again", options.again)) if given)
    again = f"Run the same command again{f', without {flags}' if flags else ''}"
    return f"{said}; rows so far are in {options.json}. {again}: {what} ({lost.row})."


@interruptible()
def main(arguments: list[str] | None = None) -> None:
    """The command."""
    options = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not (options.smoke or options.list):
        raise SystemExit(
            "paper.py measures a CUDA GPU, and torch sees none here; --smoke runs the flow, cpu_forward.py measures CPUs"
        )
    asked = options.peers if device.type == "cuda" else ()
    held = Options(device, asked, options.compile, options.smoke, options.runs, options.autotune_here)
    plans = {name: GROUPS[name](held) for name in options.only}
    matched(options, plans)
    todo = list(selected(plans, wanted(options)))
    if options.list:
        for group, plan in todo:
            print(f"{group:16} {plan.name:34} {plan.seconds:5.0f} s")
        print(f"{len(todo)} rows, about {sum(plan.seconds for _, plan in todo):.0f} s")
        return
    torch.set_float32_matmul_precision("high")  # naive FP32 accumulation runs in TF32, as in the paper
    paper_rivals.settle(not options.autotune_here)
    if options.compile_only:
        fill(todo)
        return
    here = surroundings(options.revision, device)
    try:
        report = opened(options.json, here, options.fresh, f"{SCHEMA}/smoke" if options.smoke else SCHEMA)
    except ValueError as problem:
        raise SystemExit(str(problem)) from None
    print(" ".join(f"{key} {here[key]}" for key in ("gpu", "torch", "triton", "peers", "sources")), flush=True)
    left: list[str] = []
    try:
        for apart in (True, False):
            part = [(group, plan) for group, plan in todo if (group in APART) == apart]
            if part:
                left += work(part, report, None if apart else Bench(device, min(options.runs, 20)), options, here)
    except DeviceLostError as lost:
        print(told(lost, options), file=sys.stderr)
        raise SystemExit(3) from None
    if left:
        print("\n".join(["", *left, f"{len(left)} rows left out"]), file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
