"""The loop of the paper's tables: one row at a time, the file written after each; rows that it has are not measured again.

The results file is `paper_file.py`'s.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from measure.clocks import Bench
from measure.method import Row
from measure.session import DeviceLostError, RefusedError, failures, reason, still_answers
from results.paper_file import LINEUP, Findings, add, losers, remember, there
from run.runner import PAPER, run_row

SCHEMA = "maxsim-kernels/paper/1"


@dataclass(frozen=True)
class Plan:
    """A row that can be made: its name, how, and about how many seconds it takes on an H200 with everything compiled once."""

    name: str
    make: Callable[[], Row | Findings]  # findings: measured by the maker itself (in processes of its own)
    seconds: float = 10.0
    lineup: int = LINEUP  # raised when compiled methods join: rows of a lower one are measured again when those are asked for


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
    return run_row(drawn, _needed(bench), runs, PAPER, without) if isinstance(drawn, Row) else drawn


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
    """Measure rows into report and file, as time allows; returns what was left out. `bench`: None where no row is timed here."""
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
