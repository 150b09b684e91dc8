"""What the FP32 reference costs beside the floor of its own products and beside the fused paths, correctness first, in one run.

    python benchmarks/reference_speed.py [--json FILE] [--runs 7] [--texts SCIFACT_FOLDER]

On a GPU: 1, 32 and 256 queries of 32 tokens against 4096 ragged documents of 60 to 180 tokens, d = 128. `products` are the FP32 (ieee)
matrix products of the same operations alone. On a CPU: 11,000 documents of 21 tokens and, with `--texts`, SciFact by the `lexical`
encoder, beside our `fused-fp32` path. Before timing: the same bits for a permuted and for a cut corpus, and the error against FP64.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from maxsim_eval.processes import peak_memory
from maxsim_kernels import Packed, maxsim, maxsim_reference
from measure.session import kernels
from results.file import write

SCHEMA = "maxsim-eval/reference-speed/1"
ERROR = 2e-5  # relative to a score of unit tokens


def unit(lengths: torch.Tensor, device: str, dtype: torch.dtype) -> Packed:
    """Random unit tokens `[sum, 128]`, packed."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn(int(lengths.sum()), 128, generator=generator, device=device)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
    return Packed(torch.nn.functional.normalize(values, dim=1).to(dtype), offsets)


def seconds(call: Callable[[], Any], runs: int, device: str) -> list[float]:
    """Seconds of each of some calls, after one that is not counted; the L2 cache is flushed between calls on a GPU."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device) if device == "cuda" else None
    found = []
    for _ in range(runs + 1):
        if flush is not None:
            flush.zero_()
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if flush is not None:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found[1:]


def extra_bytes(call: Callable[[], Any], device: str) -> int:
    """The most that a call holds beside what is held before it; on a CPU by what Linux counts as resident."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls left to the allocator would be counted as held before
    peak, name = peak_memory.start(device), "device_peak_bytes" if device == "cuda" else "host_peak_bytes"
    before = peak()[name]  # what is held now
    call()
    after = peak()[name]
    if before is None or after is None:
        raise SystemExit("this system does not tell a process's peak; nothing timed")
    return after - before


def check(queries: Packed, documents: Packed) -> float:
    """Check that bits depend neither on order nor cuts of the corpus; returns the error against FP64, relative to the score."""
    whole = maxsim_reference(queries, documents)
    assert isinstance(whole, torch.Tensor)
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(1)).to(documents.values.device)
    if not torch.equal(maxsim_reference(queries, documents.select(order).compact()), whole[:, order]):  # type: ignore[arg-type]
        raise SystemExit("the reference's scores depend on the order of the documents; nothing timed")
    parts = [
        maxsim_reference(queries, documents.select(part).compact())
        for part in torch.arange(len(documents), device=order.device).tensor_split(7)
    ]
    if not torch.equal(torch.cat(parts, 1), whole):  # type: ignore[arg-type]
        raise SystemExit("the reference's scores depend on where the corpus is cut; nothing timed")
    some = documents.select(order[:200]).compact()
    truth = maxsim_reference(queries, some, dtype=torch.float64)
    error = float(((whole[:, order[:200]] - truth).abs() / truth.abs().clamp_min(1)).max())  # type: ignore[union-attr]
    if error > ERROR:
        raise SystemExit(f"the reference is {error:.1e} from FP64, need {ERROR:.0e}; nothing timed")
    return error


def row(queries: Packed, documents: Packed, runs: int, device: str) -> dict[str, Any]:
    """One shape: seconds of every run of every method, and what the reference holds beside its inputs."""
    error = check(queries, documents)
    half = Packed(queries.values.half(), queries.offsets), Packed(documents.values.half(), documents.offsets)
    left, right = documents.values.float(), queries.values.float().t().contiguous()
    pieces = left.split(max(1, (1 << 28) // right.shape[1]))

    def products() -> None:
        for piece in pieces:
            piece @ right

    torch.backends.fp32_precision = "ieee"
    methods: dict[str, Callable[[], Any]] = {
        "reference": lambda: maxsim_reference(queries, documents),
        "products": products,
        "fused-fp32": lambda: maxsim(queries, documents),
        "fused-fp16": lambda: maxsim(*half),
    }
    found: dict[str, Any] = {"fp64_error": error, "tokens": [len(queries.values), len(documents.values)]}
    found["extra_bytes"] = extra_bytes(lambda: maxsim_reference(queries, documents), device)
    for name, call in methods.items():
        found[name] = seconds(call, runs, device)
    return found


def scifact(folder: Path) -> tuple[Packed, Packed]:
    """SciFact's texts by the lexical encoder."""
    from maxsim_eval import load_task
    from maxsim_eval.cache.embeddings import embeddings

    with tempfile.TemporaryDirectory() as cache:
        found = embeddings(load_task("beir", "scifact", data_dir=folder, quiet=True), "lexical", cache, quiet=True)
        return found.queries.load(), found.documents.load()  # type: ignore[union-attr]


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--texts", type=Path, help="a data folder that holds SciFact (CPU only)")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": name,
        **kernels(),
        "rows": {},
    }
    if device == "cuda":
        generator = torch.Generator().manual_seed(0)
        documents = unit(torch.randint(60, 181, (4096,), generator=generator), device, torch.float32)
        cases = {
            f"{count} x 4096 ragged": (unit(torch.full((count,), 32), device, torch.float32), documents)
            for count in (1, 32, 256)
        }
    else:
        short = unit(torch.full((11_000,), 21), device, torch.float32)
        cases = {"93 x 11,000 of 21 tokens": (unit(torch.full((93,), 10), device, torch.float32), short)}
        if options.texts is not None:
            cases["SciFact, lexical"] = scifact(options.texts)
    for case, (queries, ready) in cases.items():
        found = report["rows"][case] = row(queries, ready, options.runs, device)
        median = {name: statistics.median(found[name]) * 1e3 for name in ("reference", "products", "fused-fp32", "fused-fp16")}
        print(case, ", ".join(f"{name} {value:.2f} ms ({median['reference'] / value:.2f}x)" for name, value in median.items()))
        print(f"  error {found['fp64_error']:.1e}, {found.get('extra_bytes', 0) / 1e9:.2f} GB beside its inputs", flush=True)
        write(options.json, report)


if __name__ == "__main__":
    sys.exit(main())
