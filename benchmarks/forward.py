"""Forward kernels on one NVIDIA GPU against torch and the peers: correctness first, then interleaved medians with the L2 flushed.

    python benchmarks/forward.py [--only dense,many,...] [--json FILE] [--runs 20] [--no-compile] [--peers none]

Groups: dense (the paper's five shapes, one query, 1K and 10K documents, FP16), many (many queries against one corpus), ragged (16 to
240 tokens), int8 and fp8 (over our own FP16, and against dequantise-then-naive), wide (d = 96 to 4096), pairs (tiny independent pairs),
host (calls bound by the host, by its clock). d = 128 where not said.

In the same run, every method's scores on a part of the documents are first compared with `maxsim_reference` in FP64 on the same inputs
(of quantised documents: on their codes), after NaN was left in the memory that its output will get; all scores must be finite. A
method that is wrong, fails or is missing is reported so, and never timed. Then the methods of a row are timed in turn (`timing.py`
says how). The floor is max(document bytes / read rate, operations / library rate of that dtype), both measured in this run.

Compiling takes longer than timing. `--compile-only --only GROUP` in several processes at once fills Triton's cache on disk first; what
the peers' autotuners find there is not kept.

The file is written after every row; a group that ends replaces its predecessor, so a run may be cut into several with `--only`. Only
runs on the same machine, software and kernels (a digest of maxsim_kernels' sources) go into one file.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch

from cases.forward import GROUPS, Options, Row
from measure import installed, timing
from measure.method import Method
from measure.score_truth import Truth, error
from measure.session import (
    DeviceLostError,
    RefusedError,
    clear,
    environment,
    failures,
    fill_cache,
    interruptible,
    still_answers,
)
from measure.timing import Call, Flush
from measure.work import floor
from results.file import Figures, merge, opened, row_lines, shown, standing, write
from tables.forward_asked import table, verdicts

SLOWEST = 2.0  # seconds a call may take and still be timed
CHOOSING_RUNS = 3


def check(call: Call, method: Method, row: Row, against: Truth) -> dict[str, Any]:
    """Run an entry point until it is warm, compare its scores, measure its memory.

    Raises:
        RefusedError: it failed, is wrong, or is too slow to be timed.
        DeviceLostError: it left the GPU unusable.
    """
    try:
        try:
            before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            first = time.perf_counter() - start
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            second = time.perf_counter() - start
            if second > SLOWEST:
                raise RefusedError(f"too slow to be timed: {second:.1f} s a call")
            stale = call()  # a third time: only then does a compiled CUDA graph replay
            stale.fill_(torch.nan)
            count = stale.numel()
            del stale
            timing.poison(count)
            found = error(call(), against, row.shape)
            gc.collect()
            kept = max(0, torch.cuda.memory_allocated() - before)
            extra = timing.extra_bytes(call)
        except failures() as problem:
            text = f"{type(problem).__name__}: {str(problem).strip()}".splitlines()[0]
            raise RefusedError(f"failed: {text[:160]}") from None
    except RefusedError:
        still_answers(torch.cuda.synchronize, f"{row.name}, {method.name}")
        raise
    if not found <= method.bound:
        raise RefusedError(f"wrong: error {found:.2e}, bound {method.bound:.0e} (inf: a score is not finite)")
    return {"error": found, "bound": method.bound, "extra_bytes": extra, "kept_bytes": kept, "first_call_s": first}


def prepare(method: Method, row: Row, truths: dict[str, Truth], flush: Flush) -> tuple[Call, dict[str, Any]]:
    """The fastest correct entry point of a method, and what was found about it."""
    good: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    for name, call in method.entries.items():
        try:
            good[name] = check(call, method, row, truths[method.truth])
        except RefusedError as reason:
            refused[name] = str(reason)
    if not good:
        raise RefusedError("; ".join(f"{name}: {why}" if name else why for name, why in refused.items()))
    chosen, times = next(iter(good)), {}
    if len(good) > 1:
        tried = timing.measure({name: method.entries[name] for name in good}, CHOOSING_RUNS, flush)
        times = {name: found["median_ms"] for name, found in tried.items()}
        chosen = min(times, key=times.__getitem__)
    data = {"kind": method.kind, "entry": chosen, **good[chosen]}
    if times or refused:
        data |= {"entries_ms": times, "entries_refused": refused}
    if method.says:
        data["says"] = method.says
    return method.entries[chosen], data


def run_row(row: Row, library: timing.Library, runs: int, flush: Flush) -> dict[str, Any]:
    """Check and time everybody in a row."""
    calls: dict[str, Call] = {}
    methods: dict[str, dict[str, Any]] = {}
    skipped = dict(row.lineup.skipped)
    works, truths = {}, {name: make() for name, make in row.truths.items()}
    for method in row.lineup.methods:
        try:
            calls[method.name], methods[method.name] = prepare(method, row, truths, flush)
            works[method.name] = method.work or row.work
        except RefusedError as reason:
            skipped[method.name] = str(reason)
    ceilings = library.rates
    if row.host:
        found = timing.wall(calls, runs, flush)
    else:
        found = timing.measure(library.calls({work.unit for work in works.values()}) | calls, runs, flush)
        ceilings = library.taken(found)
    for name, times in found.items():
        methods[name] |= times
        if not row.host:
            methods[name]["of_floor"] = floor(works[name], ceilings)[0] / times["median_ms"]
    least, bound_by = floor(row.work, ceilings)
    return {
        "shape": row.about,
        "operations": row.work.operations,
        "bytes": row.work.size,
        "unit": row.work.unit,
        "floor_ms": least,
        "bound_by": bound_by,
        "ceilings": ceilings,
        "main": row.main,
        "host": row.host,
        "methods": methods,
        "skipped": skipped,
    }


def run_group(name: str, options: argparse.Namespace, report: dict[str, Any], here: dict[str, Any], flush: Flush) -> None:
    """All rows of a group into the report and the file."""
    start = time.perf_counter()
    library = timing.Library(flush, options.runs)
    ceilings = library.rates
    clear()
    rates = ", ".join(f"{unit} {rate / 1e12:.0f}" for unit, rate in ceilings.items() if unit != "read")
    print(f"\n== {name}: library products 8192^3, T/s: {rates}; read {ceilings['read'] / 1e12:.2f} TB/s", flush=True)
    group: dict[str, Any] = {"environment": here, "ceilings": ceilings, "runs": options.runs, "rows": {}}
    for row in GROUPS[name](Options(options.compile, options.peers)):
        group["rows"][row.name] = run_row(row, library, options.runs, flush)
        print("\n".join(row_lines(row.name, group["rows"][row.name])), flush=True)
        row.lineup.methods.clear()
        clear()
        merge(report, name, group, complete=False)
        write(options.json, report)
    merge(report, name, group, complete=True)
    report["verdicts"] = verdicts(report)
    write(options.json, report)
    print(f"== {name}: {time.perf_counter() - start:.0f} s", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, by comma (default: all)")
    parser.add_argument("--json", type=Path, help="add the raw figures to this file")
    parser.add_argument("--fresh", action="store_true", help="replace the file instead of adding to it")
    parser.add_argument("--runs", type=int, default=20, help="timed rounds (default 20)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave out torch.compile")
    parser.add_argument("--peers", default=",".join(installed.PEERS), help="peers, by comma, or none (default: both)")
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache on disk and time nothing")
    parser.add_argument("--revision", default="", help="what to record as the revision (default: git describe)")
    parser.add_argument("--show", type=Path, help="print the tables of a results file and end; needs no GPU")
    options = parser.parse_args(arguments)
    options.only = [name for name in options.only.split(",") if name]
    unknown = [name for name in options.only if name not in GROUPS]
    if unknown or not options.only:
        parser.error(f"--only: got {', '.join(unknown) or 'nothing'}, need some of {', '.join(GROUPS)}")
    options.peers = installed.asked(parser, options.peers)
    if options.runs < 1:
        parser.error(f"--runs: got {options.runs}, need 1 or more")
    return options


def show(report: dict[str, Any]) -> None:
    """Wins and losses, then what was asked."""
    print("\n".join(standing(Figures(report))))
    print("\n".join(table(verdicts(report))), flush=True)


@interruptible()
def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.show is not None:
        show(shown(options.show))
        return
    if not torch.cuda.is_available():
        raise SystemExit("forward.py measures a CUDA GPU, and torch sees none here; cpu_forward.py measures the CPU")
    if options.compile_only:
        for name in options.only:
            fill_cache(name, GROUPS[name](Options(compile=False, peers=options.peers)), lambda method: method.entries.values())
        return
    torch.set_float32_matmul_precision("high")  # naive FP32 accumulation runs in TF32, as in the paper
    here = environment(options.revision)
    try:
        report = opened(options.json, here, options.fresh)
    except ValueError as problem:
        raise SystemExit(str(problem)) from None
    print(f"{here['gpu']}, torch {here['torch']}, triton {here['triton']}, {here['peers']}, kernels {here['sources']}")
    flush = Flush()
    try:
        for name in options.only:
            run_group(name, options, report, here, flush)
    except DeviceLostError as lost:
        print(f"\nThe GPU answers no more after {lost}; rows so far are in the file under 'partial'.", file=sys.stderr)
        raise SystemExit(3) from None
    show(report)


if __name__ == "__main__":
    main()
