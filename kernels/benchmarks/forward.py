"""Forward kernels on an NVIDIA GPU against torch and the peers: correctness first, then interleaved medians with the L2 flushed.

    python kernels/benchmarks/forward.py [--json FILE] [--runs 20]

Shapes are the paper's (d = 128, FP16): one query against 1K and 10K documents, many queries against one corpus, ragged documents. The
floor is max(document bytes / measured read rate, operations / measured cuBLAS 8192^3 rate) of the same run. Every method's scores on
a part of the documents are compared with the FP64 reference before it is timed; a method that is wrong or fails is reported so, never
timed. Peers (flash-maxsim, late-interaction-kernels) are used where they are installed. Covers what has a fused kernel so far.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

from maxsim_kernels import Packed, explain, maxsim, maxsim_reference

DIM = 128
BOUND = 2e-6  # the contract's, times the number of (unit) query tokens
LOOSE = 2e-3  # FP16 accumulation or output: what naive FP16 and a peer may lose, per query token
SHAPES = {
    "textual 1K": (1, 32, 1000, 300),
    "long-doc 1K": (1, 32, 1000, 1024),
    "medium 1K": (1, 128, 1000, 1024),
    "visual 1K": (1, 512, 1000, 1024),
    "ColPali 1K": (1, 1024, 1000, 1024),
    "textual 10K": (1, 32, 10000, 300),
    "long-doc 10K": (1, 32, 10000, 1024),
    "visual 10K": (1, 512, 10000, 1024),
    "ColPali 10K": (1, 1024, 10000, 1024),
    "256 queries x 8192 x 128": (256, 32, 8192, 128),
    "32 queries x 1024 x 1024": (32, 32, 1024, 1024),
}
Method = Callable[[], Tensor]


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, device="cuda"), dim=-1).half()


def measure(methods: dict[str, Method], runs: int) -> dict[str, dict[str, float]]:
    """Interleaved CUDA-event medians and IQR, ms; a 100 MB write before every call empties the L2."""
    flush = torch.empty(100 << 20, dtype=torch.int8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for step in range(runs + 3):
        for name, method in methods.items():
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            method()
            end.record()
            torch.cuda.synchronize()
            if step >= 3:
                samples[name].append(start.elapsed_time(end))
    found = {}
    for name, values in samples.items():
        quarter = statistics.quantiles(values, n=4)
        found[name] = {"median_ms": statistics.median(values), "iqr_ms": quarter[2] - quarter[0]}
    return found


def ceilings(runs: int) -> tuple[float, float]:
    """cuBLAS FP16 8192^3 in FLOP/s and device reads in bytes/s, as this run sees them."""
    left, right = (torch.randn(8192, 8192, device="cuda").half() for _ in range(2))
    block = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    times = measure({"matmul": lambda: left @ right, "read": block.sum}, runs)
    return 2 * 8192**3 / times["matmul"]["median_ms"] * 1e3, block.numel() * 4 / times["read"]["median_ms"] * 1e3


def dense_methods(queries: Tensor, documents: Tensor) -> dict[str, Method]:
    one = queries.shape[0] == 1
    methods: dict[str, Method] = {"ours": lambda: maxsim(queries, documents)}
    if one and documents.shape[0] * queries.shape[1] * documents.shape[1] <= 1 << 31:
        methods["naive FP16"] = lambda: torch.einsum("qd,bld->bql", queries[0], documents).max(2).values.sum(1).unsqueeze(0)
    try:
        import flash_maxsim

        scorer = flash_maxsim.flash_maxsim if one else flash_maxsim.flash_maxsim_batched
        methods["flash-maxsim"] = lambda: scorer(queries[0] if one else queries, documents).view(queries.shape[0], -1)
    except ImportError:
        pass
    try:
        import late_interaction_kernels

        methods["late-interaction-kernels"] = lambda: late_interaction_kernels.maxsim(queries, documents)
    except ImportError:
        pass
    return methods


def ragged_methods(queries: Tensor, packed: Packed) -> dict[str, Method]:
    methods: dict[str, Method] = {"ours": lambda: maxsim(queries, packed)}
    if queries.shape[0] == 1:
        try:
            import flash_maxsim

            rows = [packed[n] for n in range(len(packed))]
            held = flash_maxsim.pack_docs(rows)
            methods["flash-maxsim"] = lambda: flash_maxsim.flash_maxsim_packed(queries[0], *held).view(1, -1)
        except ImportError:
            pass
    return methods


def checked(methods: dict[str, Method], truth: Tensor, tokens: int) -> tuple[dict[str, Method], dict[str, str]]:
    """Methods that agree with the truth on the documents it covers, and why the others do not take part."""
    good: dict[str, Method] = {}
    refused: dict[str, str] = {}
    for name, method in methods.items():
        try:
            scores = method()[:, : truth.shape[1]].double().cpu()
        except (RuntimeError, ValueError, TypeError, AssertionError, triton.CompilationError) as error:
            refused[name] = f"failed: {str(error).splitlines()[0][:120]}"
            continue
        error_ = float((scores - truth).abs().max())
        bound = (BOUND if name == "ours" else LOOSE) * tokens
        if error_ <= bound:
            good[name] = method
        else:
            refused[name] = f"wrong: error {error_:.3g}, bound {bound:.3g}"
    return good, refused


def run_case(
    case: str, methods: dict[str, Method], truth: Tensor, shape: tuple[int, int, int], rates: tuple[float, float], runs: int
) -> dict:
    """Check, time and print one case; `shape` is (query rows, document tokens, tokens a query)."""
    rows, tokens, size = shape
    good, refused = checked(methods, truth, size)
    times = measure(good, runs)
    flops, size_bytes = 2.0 * rows * tokens * DIM, 2.0 * tokens * DIM
    floor = max(flops / rates[0], size_bytes / rates[1]) * 1e3
    print(f"\n{case}: floor {floor:.4f} ms")
    for name, row in times.items():
        row["times_ours"] = row["median_ms"] / times["ours"]["median_ms"] if "ours" in times else 0.0
        row["of_floor"] = floor / row["median_ms"]
        timing = f"{row['median_ms']:9.4f} ms  IQR {row['iqr_ms']:.4f}"
        print(f"  {name:26} {timing}  {row['times_ours']:6.2f}x ours  {row['of_floor']:.3f} of floor")
    for name, why in refused.items():
        print(f"  {name:26} {why}")
    return {"floor_ms": floor, "methods": times, "refused": refused}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    rates = ceilings(options.runs)
    print(f"{torch.cuda.get_device_name()}: cuBLAS {rates[0] / 1e12:.0f} TFLOP/s, read {rates[1] / 1e12:.2f} TB/s")
    cases = {}
    for case, (count, size, documents, length) in SHAPES.items():
        queries, corpus = unit(count, size, DIM), unit(documents, length, DIM)
        truth = maxsim_reference(queries.cpu(), corpus[:16].cpu(), dtype=torch.float64)
        assert isinstance(truth, Tensor)
        print(explain(queries, corpus).splitlines()[0])
        shape = (count * size, documents * length, size)
        cases[case] = run_case(case, dense_methods(queries, corpus), truth, shape, rates, options.runs)
        del corpus
    lengths = torch.randint(16, 241, (8192,), device="cuda")
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device="cuda"), lengths.cumsum(0)])
    packed = Packed(unit(int(offsets[-1]), DIM), offsets)
    few = packed.select(list(range(16))).to("cpu")
    for count in (1, 256):
        queries = unit(count, 32, DIM)
        truth = maxsim_reference(queries.cpu(), few, dtype=torch.float64)
        assert isinstance(truth, Tensor)
        shape = (count * 32, packed.values.shape[0], 32)
        case = f"ragged 16 to 240, 8192 documents, {count} queries"
        cases[case] = run_case(case, ragged_methods(queries, packed), truth, shape, rates, options.runs)
    if options.json is not None:
        environment = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        report = {
            "environment": environment,
            "cublas_flops": rates[0],
            "read_bytes": rates[1],
            "runs": options.runs,
            "cases": cases,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
