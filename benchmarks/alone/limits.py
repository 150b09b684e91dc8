"""What limits our kernels: the GPU's hardware counters during one call of each, by Nsight Compute (`ncu`), and its power under load.

    python benchmarks/alone/limits.py [--json FILE] [--only NAME;...] [--smoke]

Of every kernel that takes a twentieth of a call's time or more: its share of the call, the units that were busiest, in percent of what
they could sustain over the kernel's time (`ncu`'s breakdown of the multiprocessors' and the memory's throughput), and what its warps
waited for, in cycles an instruction. A unit near 100% is the limit: only less work for it makes the kernel faster. Where none is, the
waits say what is. Times under `ncu` are not those of a program, so none is given. Then, without `ncu`, what the GPU draws and how it is
clocked while the call runs again and again: at its limit of power it is clocked down, whatever its units could do. `--smoke`: the calls
alone, small and without either.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from cases.inputs import unit
from maxsim_kernels import Packed, chamfer_distance, maxsim, quantize_fp8, quantize_int8
from measure.power import under_load
from measure.session import PACKAGE, about
from measure.timing import Call
from results.file import write

SCHEMA = "maxsim-kernels/limits/2"
PERCENT = ".avg.pct_of_peak_sustained_elapsed"
METRICS = (
    "gpu__time_duration.sum",
    *(f"breakdown:{name}{PERCENT}" for name in ("sm__throughput", "gpu__compute_memory_throughput")),
)
WAIT, WAITED = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"  # of ncu's section WarpStateStats
MARK = "spin_kernel"  # what torch.cuda._sleep launches: a row begins after it
LEAST_SHARE = 0.05
UNITS, WAITS = 5, 3
SECONDS = 500
COLPALI, MANY, RAGGED = (1, 1024, 10_000, 1024), (256, 32, 8192, 128), (256, 32, 8192, (16, 240))


class Sizes:
    """Inputs of a row: random unit vectors, small ones in a smoke run."""

    def __init__(self, device: str, smoke: bool) -> None:
        self.device, self.smoke = torch.device(device), smoke
        self.draw = torch.Generator(device).manual_seed(0)
        torch.manual_seed(0)  # of the vectors

    def cut(self, number: int, most: int = 40) -> int:
        """A size, at most `most` in a smoke run."""
        return min(number, most) if self.smoke else number

    def pair(self, queries: int, rows: int, documents: int, tokens: Any, dim: int = 128) -> tuple[Tensor, Any]:
        """Queries `[Nq, Lq, d]`, and documents: dense, or packed where `tokens` is a range of lengths."""
        dim, count = self.cut(dim, 128), self.cut(documents)
        asked = unit(self.device, self.cut(queries, 3), self.cut(rows), dim)
        if isinstance(tokens, int):
            return asked, unit(self.device, count, self.cut(tokens), dim)
        least, most = map(self.cut, tokens)
        lengths = torch.randint(least, most + 1, (count,), device=self.device, generator=self.draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=self.device), lengths.cumsum(0)])
        return asked, Packed(unit(self.device, int(offsets[-1]), dim), offsets)


def scores(sizes: Sizes, *, shape: tuple[Any, ...], codes: Callable[[Any], Any] | None = None, **options: Any) -> Call:
    """`maxsim` of FP16 tokens, or of documents as `codes` makes them."""
    queries, documents = sizes.pair(*shape)
    held = documents if codes is None else codes(documents)
    return lambda: maxsim(queries, held, **options)


def masked(sizes: Sizes, *, shape: tuple[int, ...], holes: float) -> Call:
    """`maxsim` with a mask of padding, half of a document at most, and of holes in every document."""
    asked, held = sizes.pair(*shape)
    count, length = held.shape[:2]
    lengths = torch.randint(length // 2, length + 1, (count,), device=sizes.device, generator=sizes.draw)
    mask = torch.arange(length, device=sizes.device) < lengths[:, None]
    mask &= torch.rand(count, length, device=sizes.device, generator=sizes.draw) >= holes
    return lambda: maxsim(asked, held, document_mask=mask)


def step(sizes: Sizes, *, shape: tuple[int, ...]) -> Call:
    """Forward with winners, and both gradients, of as many queries as documents."""
    queries, documents = sizes.pair(*shape)
    held = queries.requires_grad_(), documents.requires_grad_()
    slope = torch.ones(queries.shape[0], documents.shape[0], device=sizes.device)
    return lambda: torch.autograd.grad(maxsim(*held), held, slope)


def chamfer(sizes: Sizes, *, points: int, dim: int) -> Call:
    """The distance of two clouds of normal numbers."""
    first, second = (torch.randn(sizes.cut(points), dim, device=sizes.device, generator=sizes.draw) for _ in range(2))
    return lambda: chamfer_distance(first, second)


DOCUMENT, TOKEN = partial(quantize_int8, granularity="document"), partial(quantize_int8, granularity="token")
ROWS: dict[str, Callable[[Sizes], Call]] = {
    "FP16, ColPali 10K": partial(scores, shape=COLPALI),
    "INT8, document scale, ColPali 10K": partial(scores, shape=COLPALI, codes=DOCUMENT),
    "INT8, token scale, ColPali 10K": partial(scores, shape=COLPALI, codes=TOKEN),
    "FP8, document scale, ColPali 10K": partial(scores, shape=COLPALI, codes=partial(quantize_fp8, granularity="document")),
    "FP16, 256 q x 8192 x 128": partial(scores, shape=MANY),
    "FP16, 256 q, ragged 16 to 240": partial(scores, shape=RAGGED),
    "INT8, document scale, 256 q, ragged": partial(scores, shape=RAGGED, codes=DOCUMENT),
    "INT8, token scale, 256 q, ragged": partial(scores, shape=RAGGED, codes=TOKEN),
    "FP16, 1 q x 10K x 300": partial(scores, shape=(1, 32, 10_000, 300)),
    "FP16, 1 q x 10K, ragged": partial(scores, shape=(1, 32, 10_000, (16, 300))),
    **{f"FP16, d = {dim}": partial(scores, shape=(1, 1024, 128, 1024, dim)) for dim in (1024, 2048, 4096)},
    "winners, B = 128, 1024 x 1024": partial(scores, shape=(128, 1024, 128, 1024), return_argmax=True),
    "step, B = 128, 1024 x 1024": partial(step, shape=(128, 1024, 128, 1024)),
    "mask of padding, 16 q x 4096 x 180": partial(masked, shape=(16, 32, 4096, 180), holes=0.0),
    "mask with holes, ColPali 1K": partial(masked, shape=(1, 1024, 1000, 1024), holes=0.1),
    "Chamfer 50K, d = 3": partial(chamfer, points=50_000, dim=3),
    "Chamfer 50K, d = 128": partial(chamfer, points=50_000, dim=128),
}


def call_all(names: Sequence[str], device: str, smoke: bool) -> None:
    """Call every row: on a GPU three times, then once in a profiler's range that begins with a mark."""
    for name in names:
        call = ROWS[name](Sizes(device, smoke))
        call()
        if not smoke:
            call()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda._sleep(1)
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        print(name, flush=True)


def kernels_of(text: str) -> list[list[dict[str, Any]]]:
    """Kernels of every row, in order, from ncu's CSV of raw values: a line of names, one of units, then a line a kernel.

    Raises:
        ValueError: there is no such table in the text.
    """
    start = text.find('"ID"')
    if start < 0:
        raise ValueError("no table in what ncu printed")
    table = list(csv.DictReader(io.StringIO(text[start:])))[1:]
    found: list[list[dict[str, Any]]] = []
    for line in table:
        if MARK in line["Kernel Name"]:
            found.append([])
        elif found:
            found[-1].append(line)
    return found


def number(text: str | None) -> float | None:
    """A number of ncu's, which writes 1,234.5; None where it is none."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def most(found: dict[str, float], count: int) -> dict[str, float]:
    """The largest of them, in order."""
    return dict(sorted(found.items(), key=lambda one: -one[1])[:count])


def summary(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels that take a twentieth of a call's time or more: share, busiest units in percent, longest waits in cycles."""
    durations = [number(line.get("gpu__time_duration.sum")) or 0.0 for line in lines]
    whole, found = sum(durations), []
    for line, duration in zip(lines, durations, strict=True):
        if duration < LEAST_SHARE * whole or not whole:
            continue
        numbers = {name: value for name, text in line.items() if (value := number(text)) is not None}
        units = {name.removesuffix(PERCENT): value for name, value in numbers.items() if name.endswith(PERCENT)}
        waits = {
            name.removeprefix(WAIT).removesuffix(WAITED): value
            for name, value in numbers.items()
            if name.startswith(WAIT) and name.endswith(WAITED)
        }
        named = {"kernel": line["Kernel Name"].split("(")[0], "share": duration / whole}
        found.append({**named, "units": most(units, UNITS), "waits": most(waits, WAITS)})
    return found


def profiled(names: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Kernels of every row as `ncu` saw them.

    Raises:
        SystemExit: it is not here, or could not read the counters; with what it said.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise SystemExit("limits.py needs Nsight Compute's ncu on the PATH")
    script = [sys.executable, str(Path(__file__).resolve()), "--called", "--only", ";".join(names)]
    options = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
    command = [tool, *options, "--metrics", ",".join(METRICS), "--section", "WarpStateStats", *script]
    paths = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "MAXSIM_CACHE": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS)
    try:
        found = kernels_of(done.stdout)
    except ValueError as problem:
        said = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
        raise SystemExit(f"ncu: {problem}: {' '.join(said[:3]) or done.stderr[-300:]}") from None
    if done.returncode or len(found) != len(names):
        raise SystemExit(f"ncu: exit {done.returncode}, {len(found)} of {len(names)} rows: {done.stderr[-300:]}")
    return found


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--only", help="rows whose names begin with one of these, by semicolon")
    parser.add_argument("--smoke", action="store_true", help="small calls, on a CPU too, and no counters")
    parser.add_argument("--called", action="store_true", help=argparse.SUPPRESS)  # by ncu
    options = parser.parse_args(arguments)
    parts = tuple(options.only.split(";")) if options.only else ("",)
    names = [name for name in ROWS if name.startswith(parts)]
    if options.smoke or options.called:
        return call_all(names, "cuda" if torch.cuda.is_available() else "cpu", options.smoke)
    rows = {name: summary(lines) for name, lines in zip(names, profiled(names), strict=True)}
    for name, kernels in rows.items():
        for one in kernels:
            units = ", ".join(f"{unit} {value:.0f}%" for unit, value in one["units"].items())
            print(f"{name}: {one['kernel']} ({one['share']:.0%}): {units}", flush=True)
    loads = {}
    for name in names:
        loads[name] = found = under_load(ROWS[name](Sizes("cuda", False)))
        print(f"{name}: {found['watts']:.0f} of {found['most_watts']:.0f} W at {found['mhz']:.0f} MHz", flush=True)
        torch.cuda.empty_cache()
    write(options.json, {"schema": SCHEMA, **about(), "rows": rows, "loads": loads})


if __name__ == "__main__":
    main()
