"""CPU MaxSim: our paths against torch (einsum, chunked products), maxsim-cpu and numkong, correctness first, in one interleaved run.

    python benchmarks/cpu_forward.py [--json FILE] [--runs 15] [--quiet]

Torch baselines: the paper's Listing 1, its faster form with `amax`, and one matrix product for 32 documents at a time. Shapes:
1000 documents x 180 tokens, d = 128, 32 query tokens; one query, 16 queries, and both over ragged documents (lengths 16 to 180,
padded for the methods that need it).
Every method's scores are compared with the FP64 reference before anything is timed; padding, casting, packing and quantising of
documents happen outside the timed region, quantising of queries inside. A peer that is missing or wrong is reported and not timed.
A second part measures the peak memory of scoring a large corpus, in a process of its own. The file is written after every case.
"""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from maxsim_kernels import Packed, maxsim, maxsim_reference, pack, quantize_int8
from measure.session import kernels
from results.file import write

SCHEMA = "maxsim-kernels/cpu/1"
DOCUMENTS, LENGTH, DIM, QUERY_TOKENS = 1000, 180, 128, 32
LISTING, AMAX, CHUNKED = "torch einsum + max, padded", "torch einsum + amax, padded", "torch products of 32 documents, padded"
CHUNK = 32
EXACT = 2e-6  # the contract's bound, relative to sum_i |Q_i| * max_j |D_j| (unit tokens: the number of query tokens)
ROUGH = 5e-2  # numkong chooses winners by coarser products
QUANTISED = 2e-2  # INT8 against FP32 inputs, per query token: what the codes cost, not an arithmetic error


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def einsum(queries: Tensor, documents: Tensor, lengths: Tensor | None, *, listing: bool) -> Tensor:
    """Padded torch: the paper's Listing 1 (`max(...).values`), or with `amax`, which keeps no indices and is faster."""
    scores = torch.einsum("qid,bjd->qbij", queries, documents)
    if lengths is not None:
        padding = torch.arange(documents.shape[1]) >= lengths[:, None]
        scores.masked_fill_(padding[None, :, None, :], -torch.inf)
    return (scores.max(-1).values if listing else scores.amax(-1)).sum(-1)


def chunks(queries: Tensor, documents: Tensor, lengths: Tensor | None) -> Tensor:
    """Padded torch: one product of all tokens of 32 documents with all query tokens, then `amax`."""
    rows, tokens, parts = queries.flatten(0, 1).t(), documents.shape[1], []
    for first in range(0, len(documents), CHUNK):
        part = documents[first : first + CHUNK]
        scores = (part.flatten(0, 1) @ rows).view(len(part), tokens, -1)
        if lengths is not None:
            padding = torch.arange(tokens) >= lengths[first : first + CHUNK, None]
            scores.masked_fill_(padding[:, :, None], -torch.inf)
        parts.append(scores.amax(1).view(len(part), *queries.shape[:2]).sum(-1))
    return torch.cat(parts).t()


def maxsim_cpu_calls(queries: Tensor, documents: list[Tensor]) -> Callable[[], Tensor]:
    """maxsim-cpu, which takes one query at a time."""
    import maxsim_cpu

    rows = [query.numpy() for query in queries]
    if len({len(document) for document in documents}) == 1:
        block = torch.stack(documents).numpy()
        return lambda: torch.stack([torch.from_numpy(maxsim_cpu.maxsim_scores(row, block)) for row in rows])
    ragged = [document.numpy() for document in documents]
    return lambda: torch.stack([torch.from_numpy(maxsim_cpu.maxsim_scores_variable(row, ragged)) for row in rows])


def numkong_calls(queries: Tensor, documents: list[Tensor]) -> Callable[[], Tensor]:
    """numkong's packed MaxSim: one pair at a time, as angular distances, whose sum over unit tokens is Lq - MaxSim."""
    import numkong

    packed = [numkong.maxsim_pack(document.numpy()) for document in documents]

    def call() -> Tensor:
        asked = [numkong.maxsim_pack(query.numpy()) for query in queries]
        return torch.tensor([[len(query) - numkong.maxsim_packed(one, document) for document in packed]
                             for one, query in zip(asked, queries, strict=True)])  # fmt: skip

    return call


PEERS = {"maxsim-cpu": maxsim_cpu_calls, "numkong": numkong_calls}


def peers(queries: Tensor, documents: list[Tensor]) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Installed peers with their versions, and why the others are missing."""
    found, skipped = {}, {}
    for name, make in PEERS.items():
        try:
            found[f"{name} {version(name)}"] = make(queries, documents)
        except (ImportError, PackageNotFoundError) as problem:
            skipped[name] = f"not installed ({problem})"
    return found, skipped


def methods(count: int, ragged: bool) -> tuple[dict[str, Callable[[], Tensor]], Tensor, dict[str, str]]:
    """The methods of one case, the FP64 truth `[queries, documents]`, and who is missing."""
    torch.manual_seed(0)
    queries = unit(count, QUERY_TOKENS, DIM)
    lengths = torch.randint(16, LENGTH + 1, (DOCUMENTS,)) if ragged else None
    dense = unit(DOCUMENTS, LENGTH, DIM)
    rows = [document[:size] for document, size in zip(dense, lengths.tolist())] if lengths is not None else list(dense)
    held: Packed | Tensor = pack(rows) if ragged else dense
    half = held.to(torch.float16)
    codes = {kind: quantize_int8(held, kind) for kind in ("token", "document")}  # type: ignore[arg-type]
    half_queries = queries.half()
    found: dict[str, Callable[[], Tensor]] = {
        LISTING: lambda: einsum(queries, dense, lengths, listing=True),
        AMAX: lambda: einsum(queries, dense, lengths, listing=False),
        CHUNKED: lambda: chunks(queries, dense, lengths),
        "ours FP32": lambda: maxsim(queries, held),
        "ours FP16 inputs": lambda: maxsim(half_queries, half),
        "ours INT8, token scale": lambda: maxsim(queries, codes["token"]),
        "ours INT8, document scale": lambda: maxsim(queries, codes["document"]),
        "our reference, FP32": lambda: maxsim_reference(queries, held),
    }
    others, skipped = peers(queries, rows)
    return found | others, maxsim_reference(queries, held, dtype=torch.float64), skipped


def check(name: str, scores: Tensor, truth: Tensor) -> float:
    """The largest error per query token.

    Raises:
        ValueError: it is above what the method may lose.
    """
    error = float((scores.double() - truth).abs().max()) / QUERY_TOKENS
    # FP16 inputs are rounded ones: their arithmetic is checked by the tests against their own reference.
    known = {"INT8": QUANTISED, "numkong": ROUGH, "FP16": 1e-3, "maxsim-cpu": 1e-5}
    bound = next((held for part, held in known.items() if part in name), EXACT)
    if not error <= bound:
        raise ValueError(f"wrong: error {error:.2g} per query token, above {bound:g}")
    return error


def measure(
    case: str, count: int, ragged: bool, runs: int, skipped: dict[str, str], bar: tqdm | None = None
) -> dict[str, dict[str, float]]:
    """Check and time every method of a case; `bar` counts rounds."""
    found, truth, missing = methods(count, ragged)
    skipped |= missing
    table: dict[str, dict[str, float]] = {}
    for name, run in list(found.items()):
        try:
            table[name] = {"max_error": check(name, run(), truth)}
        except ValueError as why:
            if not name.startswith(tuple(PEERS)):
                raise SystemExit(f"{name}: {why}; nothing timed") from None
            skipped[f"{name}, {case}"] = str(why)
            del found[name]
    samples: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(runs):
        for name, run in found.items():  # interleaved, so that a busy moment hits every method
            start = time.perf_counter()
            run()
            samples[name].append((time.perf_counter() - start) * 1e3)
        if bar is not None:
            bar.update()  # between rounds: no method's time holds it
    listing, amax = statistics.median(samples[LISTING]), statistics.median(samples[AMAX])
    lines = [f"\n{case}\n{'method':40} {'ms':>9} {'IQR':>7} {'x max':>7} {'x amax':>7} {'max error':>10}"]
    for name, values in samples.items():
        quarter = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3  # one round has no spread
        row = table[name]
        row |= {"median_ms": statistics.median(values), "iqr_ms": quarter[2] - quarter[0]}
        row |= {"times_max": listing / row["median_ms"], "times_amax": amax / row["median_ms"]}
        times = f"{row['times_max']:7.2f} {row['times_amax']:7.2f}"
        lines.append(f"{name:40} {row['median_ms']:9.2f} {row['iqr_ms']:7.2f} {times} {row['max_error']:10.1e}")
    tqdm.write("\n".join(lines))
    sys.stdout.flush()
    return table


MEMORY = """
import resource, torch
from maxsim_kernels import Packed, maxsim, quantize_int8
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
documents, length, dim, queries = {documents}, 120, 128, 100
def run(n):
    held = Packed(values[: n * length], torch.arange(n + 1) * length)
    for dtype in (torch.float32, torch.float16):
        maxsim(question.to(dtype), held if dtype == torch.float32 else Packed(halves[: n * length], held.offsets))
    maxsim(question, codes) if n == documents else maxsim(question, quantize_int8(held))
values = torch.rand(documents * length, dim); halves = values.half(); question = torch.rand(queries, 32, dim)
codes = quantize_int8(Packed(values, torch.arange(documents + 1) * length)) if documents else None
values.sum(), halves.sum()
import ctypes
results = 3 * 4 * queries * documents / 2**20
open("/proc/self/clear_refs", "w").write("5")
def high():
    return [int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
before = high()
run(documents)
print(high() - before - results)
"""


def memory() -> dict[str, float]:
    """Peak megabytes of scoring beyond inputs and results, for two corpus sizes (it must not grow with the corpus)."""
    found = {}
    for documents in (5_000, 40_000):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY.format(documents=documents)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"memory measurement failed:\n{done.stderr}")
        found[f"{documents} documents x 120 tokens, 100 queries"] = round(float(done.stdout), 1)
    print("\npeak memory beyond inputs and results, MB")
    for case, value in found.items():
        print(f"{case:48} {value:8.1f}")
    return found


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the raw figures here, after every case")
    parser.add_argument("--runs", type=int, default=15, help="timed rounds (default 15)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"--runs: got {options.runs}, need 1 or more")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}", flush=True)
    cases = {"1 query": (1, False), "16 queries": (16, False), "1 query, ragged": (1, True), "16 queries, ragged": (16, True)}
    skipped: dict[str, str] = {}
    report: dict[str, Any] = {
        "schema": SCHEMA,
        **kernels(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "shape": {"documents": DOCUMENTS, "length": LENGTH, "dim": DIM, "query_tokens": QUERY_TOKENS},
        "runs": options.runs,
        "cases": {},
        "skipped": skipped,
    }
    with tqdm(total=len(cases) * options.runs, unit="round", disable=True if options.quiet else None) as bar:
        for case, shape in cases.items():
            bar.set_description(case)
            report["cases"][case] = measure(case, *shape, options.runs, skipped, bar)
            write(options.json, report)
    for name, why in skipped.items():
        print(f"{name}: {why}")
    report["peak_mb_beyond_inputs_and_results"] = memory()
    report["script_peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    write(options.json, report)


if __name__ == "__main__":
    main()
