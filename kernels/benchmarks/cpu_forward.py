"""CPU MaxSim: our paths against padded torch einsum and maxsim-cpu, correctness first, ratios of one interleaved run.

    python kernels/benchmarks/cpu_forward.py [--json FILE] [--runs 15]

Two torch baselines: the paper's Listing 1, and its faster form with `amax`. Shapes: 1000 documents x 180 tokens, d = 128, 32 query
tokens; one query, 16 queries, and both over ragged documents (lengths 16 to 180, padded for the methods that need it).
Every method's scores are compared with the FP64 reference before anything is timed; padding, casting and quantising of documents
happen outside the timed region, quantising of queries inside. A second part measures the peak memory of scoring a large corpus, in
a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from maxsim_kernels import Packed, maxsim, maxsim_reference, pack, quantize_int8

DOCUMENTS, LENGTH, DIM, QUERY_TOKENS = 1000, 180, 128, 32
LISTING, AMAX = "torch einsum + max, padded", "torch einsum + amax, padded"
EXACT = 2e-6  # the contract's bound, relative to sum_i |Q_i| * max_j |D_j| (unit tokens: the number of query tokens)
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


def peer(queries: Tensor, documents: list[Tensor] | Tensor) -> Callable[[], Tensor] | None:
    """maxsim-cpu where it is installed: one query at a time is all it takes."""
    try:
        import maxsim_cpu
    except ImportError:
        return None
    rows = [query.numpy() for query in queries]
    if isinstance(documents, Tensor):
        block = documents.numpy()
        return lambda: torch.stack([torch.from_numpy(maxsim_cpu.maxsim_scores(row, block)) for row in rows])
    ragged = [document.numpy() for document in documents]
    return lambda: torch.stack([torch.from_numpy(maxsim_cpu.maxsim_scores_variable(row, ragged)) for row in rows])


def methods(count: int, ragged: bool) -> tuple[dict[str, Callable[[], Tensor]], Tensor]:
    """The methods of one case and the FP64 truth `[queries, documents]`."""
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
        "ours FP32": lambda: maxsim(queries, held),
        "ours FP16 inputs": lambda: maxsim(half_queries, half),
        "ours INT8, token scale": lambda: maxsim(queries, codes["token"]),
        "ours INT8, document scale": lambda: maxsim(queries, codes["document"]),
        "our reference, FP32": lambda: maxsim_reference(queries, held),
    }
    other = peer(queries, rows if ragged else dense)
    if other is not None:
        found["maxsim-cpu 0.1.0"] = other
    return found, maxsim_reference(queries, held, dtype=torch.float64)


def check(name: str, scores: Tensor, truth: Tensor) -> float:
    """The largest error per query token; a method that is wrong is not timed."""
    error = float((scores.double() - truth).abs().max()) / QUERY_TOKENS
    # FP16 inputs are rounded ones: their arithmetic is checked by the tests against their own reference.
    bound = QUANTISED if "INT8" in name else 1e-3 if "FP16" in name else 1e-5 if "maxsim-cpu" in name else EXACT
    if not error <= bound:
        raise SystemExit(f"{name}: error {error:.2g} per query token, above {bound:g}; nothing timed")
    return error


def measure(case: str, count: int, ragged: bool, runs: int) -> dict[str, dict[str, float]]:
    found, truth = methods(count, ragged)
    table: dict[str, dict[str, float]] = {name: {"max_error": check(name, run(), truth)} for name, run in found.items()}
    samples: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(runs):
        for name, run in found.items():  # interleaved, so that a busy moment hits every method
            start = time.perf_counter()
            run()
            samples[name].append((time.perf_counter() - start) * 1e3)
    listing, amax = statistics.median(samples[LISTING]), statistics.median(samples[AMAX])
    print(f"\n{case}\n{'method':28} {'ms':>9} {'IQR':>7} {'x max':>7} {'x amax':>7} {'max error':>10}")
    for name, values in samples.items():
        quarter = statistics.quantiles(values, n=4)
        row = table[name]
        row |= {"median_ms": statistics.median(values), "iqr_ms": quarter[2] - quarter[0]}
        row |= {"times_max": listing / row["median_ms"], "times_amax": amax / row["median_ms"]}
        times = f"{row['times_max']:7.2f} {row['times_amax']:7.2f}"
        print(f"{name:28} {row['median_ms']:9.2f} {row['iqr_ms']:7.2f} {times} {row['max_error']:10.1e}")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    cases = {"1 query": (1, False), "16 queries": (16, False), "1 query, ragged": (1, True), "16 queries, ragged": (16, True)}
    results = {case: measure(case, *shape, options.runs) for case, shape in cases.items()}
    report = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "shape": {"documents": DOCUMENTS, "length": LENGTH, "dim": DIM, "query_tokens": QUERY_TOKENS},
        "runs": options.runs,
        "cases": results,
        "peak_mb_beyond_inputs_and_results": memory(),
        "script_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
