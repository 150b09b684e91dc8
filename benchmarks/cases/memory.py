"""Peak memory, latency and the out-of-memory frontier: one process a method, the peak reset for every cell.

Tables fwd_abs, fwd_chunked, mem and twoaxis, and the scaling figure.

    python -m cases.memory METHOD CELL [CELL ...]     (as the benchmark starts it: JSON on stdout)

A cell is SHAPE:DOCUMENTS. Peaks are the allocator's, inputs included: documents as the method wants them (FP32 for FP32 accumulation),
nothing else on the GPU but the context. A cell that does not fit keeps the exception's text. Latency: the median of a few calls;
documents of 128 MB and more are larger than any L2, for smaller ones a flush comes first.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cases.inputs import sizes, unit
from maxsim_kernels import maxsim
from measure import installed
from measure.method import EXACT, LOOSE, Options
from measure.names import FLASH, LIK, SHAPES
from measure.score_truth import error, truth
from measure.session import RefusedError, failures, reason
from measure.timing import Call, Flush
from results.paper_file import Findings
from rivals import paper, peers, torch_rivals
from run.campaign import Plan

CHUNK = 1024
CALLS, TIMED = 3, 7
ROOM = 128 << 20  # documents larger than this are in no L2
COLPALI = (2000, 5000, 7000, 10000, 15000, 20000, 50000, 100000, 150000, 175000, 300000, 500000, 600000)
CELLS = (*(f"{shape}:1000" for shape in SHAPES), "visual:10000", "visual:20000", *(f"ColPali:{count}" for count in COLPALI))
COMPILED_CELLS = (*(f"{shape}:1000" for shape in SHAPES), "ColPali:10000", "ColPali:20000")
OURS, HALF, WIDE, CHUNKED = "ours", "naive FP16", "naive FP32 accumulation", f"chunked FP16, {CHUNK} documents"
GRAPHS_WIDE = paper.compiled_name(paper.WIDE, paper.GRAPHS)
PLAIN_HALF = paper.compiled_name(paper.HALF, paper.NO_GRAPHS)
EAGER = (OURS, HALF, WIDE, CHUNKED, FLASH, LIK)
COMPILED = (GRAPHS_WIDE, PLAIN_HALF)
HERE = "--autotune-here"
# Of a child process: it finds the folders of `benchmarks/` as the script does that starts it.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
SECONDS, POLL = 300.0, 0.1  # that a process may go without reporting a cell; between two looks at what it reported


def parts_of(cell: str) -> tuple[str, int]:
    """Shape and documents of a cell as the command line has it."""
    shape, _, documents = cell.partition(":")
    return shape, int(documents)


def key_of(cell: str) -> str:
    """A cell's name in the file."""
    shape, documents = parts_of(cell)
    return f"{shape} {documents}"


def size_of(cell: str) -> int:
    """Document tokens of a cell."""
    shape, documents = parts_of(cell)
    return SHAPES[shape][1] * documents


def caller(method: str, queries: Tensor, documents: Tensor) -> Call:
    """A method's call on inputs as it wants them.

    Raises:
        ValueError: a name that is none of the methods.
        ImportError: a peer that is not installed.
        RefusedError: inputs that would lose the GPU.
    """
    if method == OURS:
        return partial(maxsim, queries, documents)  # type: ignore[return-value]
    if method in (HALF, WIDE):
        return partial(torch_rivals.score_query, queries, documents)
    if method == CHUNKED:
        return lambda: torch.cat([torch_rivals.score_query(queries, part) for part in documents.split(CHUNK)])
    if method == FLASH:
        import flash_maxsim

        return partial(flash_maxsim.flash_maxsim, queries, documents)
    if method == LIK:
        import late_interaction_kernels

        why = peers.overflows(documents)
        if why:
            raise RefusedError(why)
        return partial(late_interaction_kernels.maxsim, queries, documents)
    if method not in COMPILED:
        raise ValueError(f"method: got {method!r}, need one of {', '.join((*EAGER, *COMPILED))}")
    return _compiled(method, queries, documents)


def _compiled(method: str, queries: Tensor, documents: Tensor) -> Call:
    import torch._dynamo

    mode = paper.GRAPHS if method == GRAPHS_WIDE else paper.NO_GRAPHS
    for tensor in (queries, documents):
        torch._dynamo.mark_static_address(tensor)
    return partial(torch.compile(torch_rivals.score_query, mode=mode, dynamic=False), queries, documents)


def dtype_of(method: str) -> torch.dtype:
    """What a method's inputs are held in."""
    return torch.float32 if method in (WIDE, GRAPHS_WIDE) else torch.float16


def point(method: str, shape: str, documents: int, device: torch.device, smoke: bool) -> Findings:
    """One cell: error, peak, latency; raises what the method raises."""
    held = sizes(Options(device, smoke=smoke), SHAPES[shape], documents)
    cuda = device.type == "cuda"
    torch.manual_seed(0)
    # Drawn in FP16 and then cast, so that every method sees the same tokens.
    queries = unit(device, held.query_tokens, held.dim).to(dtype_of(method))
    corpus = unit(device, held.documents, held.tokens, held.dim).to(dtype_of(method))
    if cuda:
        torch.cuda.empty_cache()
    call = caller(method, queries, corpus)
    for _ in range(CALLS):
        call()
    found: Findings = {"documents": held.documents, "inputs_bytes": (queries.nbytes + corpus.nbytes)}
    if cuda:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    scores = call()
    if cuda:
        torch.cuda.synchronize()
        found |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    found["error"] = error(scores.float(), truth(queries.unsqueeze(0), corpus), (1, held.documents))
    if not found["error"] <= (EXACT if method == OURS else LOOSE):
        return {**found, "wrong": True}
    return found | (latency(call, corpus.nbytes) if cuda else {})


def latency(call: Call, size: int) -> Findings:
    """The median of a few calls in ms."""
    flush: Callable[[], None] = Flush() if size < ROOM else (lambda: None)
    samples = []
    for _ in range(TIMED):
        flush()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end))
    return {"median_ms": statistics.median(samples), "samples_ms": samples}


def measure(method: str, cells: list[str], device: torch.device, smoke: bool) -> Iterator[tuple[str, Findings]]:
    """Every cell in the order given; what failed keeps its exception's text. Ends early when the GPU answers no more."""
    for cell in cells:
        try:
            found = point(method, *parts_of(cell), device, smoke)
        except RefusedError as why:
            found = {"failed": f"not tried: {why}"}
        except (*failures(), ImportError) as problem:
            found = {"failed": reason(problem)}
        lost = ""
        try:
            torch.compiler.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        except RuntimeError as problem:
            lost = reason(problem)
        yield key_of(cell), found | ({"lost": lost} if lost else {})
        if lost:
            return


def command(method: str, cells: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The command line of a child process."""
    return [sys.executable, "-P", "-m", "cases.memory", method, *cells, *flags]


def reported(held: Path) -> dict[str, Findings]:
    """The cells in a process's output so far: whole lines only, since it may be in the middle of one."""
    lines = held.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return dict(json.loads(line) for line in lines if line.startswith('["') and line.endswith("\n"))


def child(method: str, cells: Sequence[str], flags: Sequence[str], seconds: float) -> tuple[dict[str, Findings], str]:
    """What a process of its own reported, and how it ended; it is killed when it reports no new cell for `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        held = Path(folder) / "cells"
        with held.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(command(method, cells, flags), stdout=output, env=ENVIRONMENT)
        count, deadline = 0, time.monotonic() + seconds
        try:
            while process.poll() is None:
                time.sleep(POLL)
                now = len(reported(held))
                if now > count:
                    count, deadline = now, time.monotonic() + seconds
                elif time.monotonic() > deadline:
                    return reported(held), f"timed out after {seconds:.0f} s"
            return reported(held), f"the process ended with {process.returncode}"
        finally:  # Ctrl-C too: nothing may go on using the GPU
            process.kill()
            process.wait()


def memory_row(options: Options, method: str, cells: tuple[str, ...]) -> Findings:
    """A process of its own for one method; a new one for the rest when it died. Cells beyond one that lost the GPU are not tried."""
    module = installed.load(method) if method in installed.PEERS else None
    if isinstance(module, str):
        return {"cells": {key_of(cell): {"failed": module} for cell in cells}}
    flags = [flag for flag, asked in (("--smoke", options.smoke), (HERE, options.autotune_here)) if asked]
    found: dict[str, Findings] = {}
    left = list(cells)
    while left:
        new, end = child(method, left, flags, SECONDS)
        found |= new
        rest = [cell for cell in left if key_of(cell) not in found]
        lost = [cell for cell in left if "lost" in found.get(key_of(cell), {})]
        for cell in rest:
            if lost and size_of(cell) >= size_of(lost[-1]):
                found[key_of(cell)] = {"failed": f"not tried: a fault at {key_of(lost[-1])}"}
        if rest and not lost:  # the process died or hung at the first of them, and reported nothing
            found[key_of(rest[0])] = {"failed": end}
        left = [cell for cell in rest if key_of(cell) not in found]
    return {"cells": found}


def memory(options: Options) -> list[Plan]:
    names = [name for name in EAGER if name not in (FLASH, LIK) or name in options.peers]
    cells = CELLS if not options.smoke else CELLS[:3]
    return [Plan(name, partial(memory_row, options, name, cells), 40) for name in names]


def memory_compiled(options: Options) -> list[Plan]:
    if not options.compile:
        return []
    return [Plan(name, partial(memory_row, options, name, COMPILED_CELLS), 90) for name in COMPILED]


def main(arguments: list[str]) -> None:
    """The child process."""
    smoke = "--smoke" in arguments
    method, *cells = [argument for argument in arguments if argument not in ("--smoke", HERE)]
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not smoke:
        raise SystemExit("cases/memory.py measures a CUDA GPU, and torch sees none here")
    if method in COMPILED:
        paper.settle(HERE not in arguments)
    for key, found in measure(method, cells, device, smoke):
        print(json.dumps([key, found]), flush=True)
        print(f"{method}, {key}: {json.dumps(found)[:160]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:  # the benchmark that started this process says so
        raise SystemExit(130) from None
