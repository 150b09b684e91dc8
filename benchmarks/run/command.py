"""The command line of a benchmark whose groups of rows go into one file: forward.py, training.py, chamfer.py.

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
from measure.clocks import Bench
from measure.method import Options, Row
from measure.session import DeviceLostError, fill_cache, interruptible, surroundings
from results.file import merge, opened, short, shown, write
from run.runner import STEPS, Rules, run_row


@dataclass(frozen=True)
class Tool:
    """A benchmark command: its groups of rows, how they are measured and how their figures are shown."""

    name: str
    text: str
    schema: str
    groups: dict[str, Callable[[Options], Iterator[Row]]]
    verdicts: Callable[[dict[str, Any]], list[dict[str, Any]]]
    markdown: Callable[[dict[str, Any], bool], list[str]]  # of a report; brief?
    rules: Rules = STEPS
    lines: Callable[[str, dict[str, Any]], list[str]] | None = None  # of one row; None: `lines` below
    elsewhere: str = "--smoke runs the flow on a CPU"
    compiled: bool = False  # rows hold compiled rivals, which --no-compile leaves out


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
    """Measure all rows of a group into the report and the file, with a bar on stderr."""
    from tqdm import tqdm

    start = time.perf_counter()
    print(f"\n== {name}{_rates(bench) if tool.compiled else ''}", flush=True)
    group: dict[str, Any] = {"environment": options.here, "ceilings": bench.ceilings, "runs": bench.runs, "rows": {}}
    group |= {"smoke": options.smoke} if tool.rules.steps else {}
    # Moved by hand: a bar around the rows would keep the last one's tensors while the next one's are made.
    with tqdm(unit="row", desc=name, disable=True if options.quiet else None) as bar:
        for row in tool.groups[name](options.rows):
            bar.set_description(f"{name}: {row.name}"[:48])
            group["rows"][row.name] = run_row(row, bench, bench.runs, tool.rules)
            bar.write("\n".join((tool.lines or lines)(row.name, group["rows"][row.name])))
            sys.stdout.flush()
            row.lineup.methods.clear()
            del row
            torch.compiler.reset()
            bench.clear()
            merge(report, name, group, complete=False)
            write(options.json, report)
            bar.update()
    merge(report, name, group, complete=True)
    report["verdicts"] = tool.verdicts(report)
    write(options.json, report)
    print(f"== {name}: {time.perf_counter() - start:.0f} s", flush=True)


def _rates(bench: Bench) -> str:
    rates = ", ".join(f"{unit} {rate / 1e12:.0f}" for unit, rate in bench.ceilings.items() if unit != "read")
    return f": library products 8192^3, T/s: {rates}; read {bench.ceilings['read'] / 1e12:.2f} TB/s"


def common(parser: argparse.ArgumentParser, runs: int, rounds: str = "") -> None:
    """Add the options that every benchmark on a GPU has."""
    parser.add_argument("--json", type=Path, help="add the raw figures to this file" + (", after every row" if rounds else ""))
    parser.add_argument("--fresh", action="store_true", help="replace the file instead of adding to it")
    parser.add_argument("--runs", type=int, default=runs, help=f"timed rounds (default {runs}{rounds})")
    parser.add_argument("--peers", default=",".join(installed.PEERS), help="peers, by comma, or none (default: both)")
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache on disk and time nothing")
    parser.add_argument("--revision", default="", help="what to record as the revision (default: git describe)")


def compiling(parser: argparse.ArgumentParser) -> None:
    """Add the options of benchmarks with compiled rivals."""
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave out torch.compile")


def smoking(parser: argparse.ArgumentParser) -> None:
    """Add the options of benchmarks that also run without a GPU."""
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU too: shows mistakes, measures nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def checked(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """`--peers` and `--runs` as they are meant; ends the program with a usage message when they are wrong."""
    options.peers = installed.asked(parser, options.peers)
    if options.runs < 1:
        parser.error(f"--runs: got {options.runs}, need 1 or more")


def parse(tool: Tool, arguments: list[str] | None) -> argparse.Namespace:
    """The command line; ends the program with a usage message when it is wrong."""
    parser = argparse.ArgumentParser(description=tool.text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(compile=True, smoke=False, quiet=False, brief=False)
    parser.add_argument("--only", default=",".join(tool.groups), help="groups, by comma (default: all)")
    common(parser, 20)
    if tool.compiled:
        compiling(parser)
        parser.set_defaults(quiet=True)
        parser.add_argument("--show", type=Path, help="print the tables of a results file and end; needs no GPU")
    else:
        smoking(parser)
        parser.add_argument("--show", type=Path, help="print the Markdown tables of a results file and end; needs no GPU")
        parser.add_argument("--brief", action="store_true", help="print the summary tables only, not one table a row")
    options = parser.parse_args(arguments)
    options.only = [name for name in options.only.split(",") if name]
    unknown = [name for name in options.only if name not in tool.groups]
    if unknown or not options.only:
        parser.error(f"--only: got {', '.join(unknown) or 'nothing'}, need some of {', '.join(tool.groups)}")
    checked(parser, options)
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
        raise SystemExit(f"{tool.name} measures a CUDA GPU, and torch sees none here; {tool.elsewhere}")
    asked = options.peers if device.type == "cuda" else ()
    options.rows = Options(device, asked, options.compile and not options.compile_only, options.smoke)
    if options.compile_only:
        for name in options.only:
            fill_cache(name, tool.groups[name](options.rows), lambda method: method.entries.values())
        return
    if tool.compiled:
        torch.set_float32_matmul_precision("high")  # naive FP32 accumulation runs in TF32, as in the paper
    options.here = surroundings(options.revision, device)
    try:
        report = opened(options.json, options.here, options.fresh, schema)
    except ValueError as problem:
        raise SystemExit(str(problem)) from None
    if tool.compiled:
        print("{gpu}, torch {torch}, triton {triton}, {peers}, kernels {sources}".format(**options.here))
    else:
        print(" ".join(f"{key} {options.here[key]}" for key in ("gpu", "torch", "triton", "peers", "sources")), flush=True)
    bench = Bench(device, options.runs)
    try:
        for number, name in enumerate(options.only):
            if number and tool.compiled:  # ceilings of its own
                bench = Bench(device, options.runs)
            run_group(tool, name, report, bench, options)
    except DeviceLostError as lost:
        print(f"\nThe GPU answers no more after {lost}; rows so far are in the file under 'partial'.", file=sys.stderr)
        raise SystemExit(3) from None
    print("\n".join(tool.markdown(short(report), options.brief)), flush=True)
