"""Streaming a corpus through one GPU, or several of one host: every answer checked bit for bit, walls against measured floors.

    python benchmarks/streaming.py [--only rates,hotpotqa,...] [--json FILE] [--runs 3] [--seconds 480] [--profile ROW] [--tiny]
    torchrun --nproc-per-node 2 benchmarks/streaming.py --ranks [--json FILE]
    python benchmarks/streaming.py --show FILE [--brief]

Rows: rates (what the machine gives), hotpotqa (500 queries of 32 tokens, 500K documents of 120 tokens on average, FP16, pinned memory),
pageable and stored (the same from ordinary memory, and from HDF5 files in the page cache, by number of readers), reference (the FP32
truth and a padded FP32 einsum beside it), int8, blocks (by block size and memory budget), nq (2.68M documents, a tenth of them kept
and cycled, under a memory budget), colpali (one query, 100K to 750K pages, a part kept and cycled), cpu (files of two sizes without
a GPU; only where named). --ranks: the first of these shapes over all processes of torchrun.

The wall goes from the call to the results on the host. The floor is the larger of the bytes at the rate of pinned copies that took
turns with the stream, and of one pass over the same documents resident on the GPU, both of the same run. How it is measured and
checked: `out_of_core/measure.py`; what the documents are: `out_of_core/corpora.py`.

The file is written after every line, so a run that is stopped keeps what it has. A row starts only while `--seconds` allow it. Rows
need up to 17 GB of pinned memory, 17 GB more for `pageable` and 9 for `int8`; `stored` needs 15 GB of disk under `--folder`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from maxsim_eval.errors import MaxsimEvalError
from measure.session import failures, interruptible, surroundings
from out_of_core.cases import DEFAULT, ROWS, Lines
from out_of_core.corpora import TINY, Sizes
from out_of_core.link_rates import host
from out_of_core.measure import Bench
from out_of_core.tables import markdown, text, verdicts
from results.file import empty, merge, opened, short, shown, write

SCHEMA = "maxsim-kernels/streaming/1"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; ends the program with a usage message when it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(DEFAULT), help="rows, by comma, in this order (default: all but cpu)")
    parser.add_argument("--ranks", action="store_true", help="one corpus over all processes of torchrun, and nothing else")
    parser.add_argument("--json", type=Path, help="add the raw figures to this file")
    parser.add_argument("--fresh", action="store_true", help="replace the file instead of adding to it")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each stream (default 3)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row that may end later than this")
    parser.add_argument("--folder", type=Path, help="where files are written and read again (default: a temporary folder)")
    parser.add_argument(
        "--store-seconds", type=float, default=90.0, help="for writing the stored entry; then it is cut (default 90)"
    )
    parser.add_argument(
        "--profile", default="", help="rows, by comma, whose streams run once more under torch's profiler, by stage"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on a CPU too: shows mistakes, measures nothing")
    parser.add_argument("--revision", default="", help="what to record as the revision (default: git describe)")
    parser.add_argument("--show", type=Path, help="print the Markdown tables of a results file and end; needs no GPU")
    parser.add_argument("--brief", action="store_true", help="print what was asked only, not one table a row")
    options = parser.parse_args(arguments)
    for what in ("only", "profile"):
        names = [name for name in getattr(options, what).split(",") if name]
        unknown = [name for name in names if name not in ROWS]
        if unknown or (what == "only" and not names):
            parser.error(f"--{what}: got {', '.join(unknown) or 'nothing'}, need some of {', '.join(ROWS)}")
        setattr(options, what, names)
    if options.runs < 1:
        parser.error(f"--runs: got {options.runs}, need 1 or more")
    if options.ranks and "RANK" not in os.environ:
        parser.error("--ranks: got no process group, need torchrun --nproc-per-node N")
    return options


def run_group(name: str, lines: Lines, report: dict[str, Any], options: argparse.Namespace, here: dict[str, Any]) -> bool:
    """One row into the report and the file; whether it went through. `report` is empty in processes that only take part."""
    start, speaks = time.perf_counter(), bool(report)
    if speaks:
        print(f"\n== {name}", flush=True)
    group: dict[str, Any] = {"environment": here, "runs": options.runs, "tiny": options.tiny, "rows": {}}
    problem = ""
    known: tuple[type[BaseException], ...] = (*failures(), OSError, MaxsimEvalError)
    try:
        for line, data in lines:
            group["rows"][line] = data
            if speaks:
                print(f"{line}: {text(short(data))}", flush=True)
                merge(report, name, group, complete=False)
                write(options.json, report)
    except known as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        group["failed"] = problem
        if options.ranks:
            raise  # the others wait for this one: torchrun ends them
    if speaks:
        merge(report, name, group, complete=not problem)
        report["verdicts"] = verdicts(report)
        write(options.json, report)
        print(f"== {name}: {time.perf_counter() - start:.0f} s {problem}", flush=True)
    return not problem


def run_rows(bench: Bench, report: dict[str, Any], options: argparse.Namespace, here: dict[str, Any]) -> int:
    """All rows that fit into the time; how many failed or were left out."""
    start, lost = time.perf_counter(), 0
    for name in options.only:
        row, seconds = ROWS[name]
        bench.profiled = name in options.profile
        spent = time.perf_counter() - start
        if spent + seconds > options.seconds:
            print(f"\n== {name}: left out, may take {seconds:.0f} s after {spent:.0f} of {options.seconds:.0f} s", flush=True)
            lost += 1
        elif not run_group(name, row(bench), report, options, here):
            lost += 1
        bench.clear()
    return lost


def document(options: argparse.Namespace, here: dict[str, Any], schema: str) -> dict[str, Any]:
    """The report to add to."""
    try:
        return opened(options.json, here, options.fresh, schema) if options.json else empty(here, schema)
    except ValueError as problem:
        raise SystemExit(str(problem)) from None


def run_ranks(make: Callable[..., Bench], options: argparse.Namespace, schema: str) -> None:
    """The `--ranks` command: every process runs it, the first one writes."""
    from out_of_core.ranks import World, ranks

    world = World()
    bench = make(world.device)
    here = surroundings(options.revision, world.device) | host()
    report = document(options, here, schema) if world.rank == 0 else {}
    run_group(f"ranks {world.size}", ranks(bench, world), report, options, here)
    world.close()
    if world.rank == 0:
        print("\n".join(markdown(short(report), options.brief)), flush=True)


@interruptible()
def main(arguments: list[str] | None = None) -> None:
    """The command."""
    options = parse(arguments)
    schema = f"{SCHEMA}/tiny" if options.tiny else SCHEMA
    if options.show is not None:
        print("\n".join(markdown(shown(options.show, schema), options.brief)), flush=True)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny and options.only != ["cpu"]:
        raise SystemExit("streaming.py measures a CUDA GPU, and torch sees none here; --tiny runs the flow, --only cpu one row")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:

        def make(device: torch.device) -> Bench:
            sizes = TINY if options.tiny else Sizes()
            return Bench(device, sizes, options.runs, Path(folder), options.store_seconds)

        if options.ranks:
            run_ranks(make, options, schema)
            return
        here = surroundings(options.revision, device) | host()
        report = document(options, here, schema)
        print(" ".join(f"{key} {here[key]}" for key in ("gpu", "torch", "triton", "sources", "cores")), flush=True)
        lost = run_rows(make(device), report, options, here)
    print("\n".join(markdown(short(report), options.brief)), flush=True)
    if lost:
        print(f"\n{lost} rows failed or were left out", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
