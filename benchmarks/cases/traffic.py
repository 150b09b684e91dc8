"""HBM traffic of one call (paper table traffic): bytes counted from shapes, and read from the GPU's own counters where `ncu` can.

    python -m cases.traffic METHOD SHAPE     (as ncu runs it: one warm call inside a profiler range)

Counted: operands once, scores once; naive adds S written and read; ours adds the row maxima that long queries store (written and read).
The counters see what reached the memory: an L2 of 50 MB keeps some of S between its writing and its reading.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from functools import partial

import torch

from cases import memory
from cases.inputs import DIM, sizes, unit
from measure.method import Options
from measure.names import SHAPES
from results.paper_file import Findings
from run.campaign import Plan

DOCUMENTS = 1000
TRAFFIC = ("medium", "visual", "ColPali")
METHODS = (memory.OURS, memory.HALF, memory.WIDE)
COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
SECONDS = 120


def counted(shape: str, documents: int, method: str) -> int:
    """Bytes the algorithm moves at least."""
    rows, tokens = SHAPES[shape]
    size = 4 if method == memory.WIDE else 2
    operands = size * DIM * (documents * tokens + rows) + 4 * documents
    if method != memory.OURS:
        return operands + 2 * size * documents * rows * tokens
    stored = rows if rows > 64 else 0  # beyond 64 tokens row maxima go through memory (FP32)
    return operands + 2 * 4 * documents * stored


def one(method: str, shape: str) -> None:
    """The profiled process: warm up, then one call between cudaProfilerStart and Stop."""
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    held = sizes(Options(device), SHAPES[shape], DOCUMENTS)
    dtype = memory.dtype_of(method)
    queries = unit(device, held.query_tokens, held.dim).to(dtype)
    call = memory.caller(method, queries, unit(device, held.documents, held.tokens, held.dim).to(dtype))
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def total(text: str) -> Findings:
    """Bytes of every counter over all kernels of ncu's CSV (units as ncu gives them)."""
    scale = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    start = text.index('"ID"')
    sums = dict.fromkeys(COUNTERS, 0.0)
    kernels = set()
    for row in csv.DictReader(io.StringIO(text[start:])):
        if row["Metric Name"] in sums:
            sums[row["Metric Name"]] += float(row["Metric Value"].replace(",", "")) * scale[row["Metric Unit"]]
            kernels.add(row["ID"])
    if not kernels:
        raise ValueError("no kernel in ncu's report")
    read, written = (sums[name] for name in COUNTERS)
    return {"read_bytes": read, "written_bytes": written, "bytes": read + written, "kernels": len(kernels)}


def counters(method: str, shape: str) -> Findings:
    """What ncu reads of one call, or why it does not."""
    tool = shutil.which("ncu")
    if tool is None:
        return {"failed": "ncu is not installed here"}
    script = [sys.executable, "-P", "-m", "cases.traffic", method, shape]
    command = [
        tool,
        "--csv",
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--metrics",
        ",".join(COUNTERS),
        *script,
    ]
    try:
        done = subprocess.run(command, env=memory.ENVIRONMENT, capture_output=True, text=True, check=False, timeout=SECONDS)
        return total(done.stdout)
    except subprocess.TimeoutExpired:
        return {"failed": f"ncu took more than {SECONDS} s"}
    except (ValueError, KeyError) as problem:
        said = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line or "rror" in line]
        return {"failed": (said or [str(problem)])[0][:200]}


def traffic_row(options: Options, shape: str) -> Findings:
    """Every method of a shape."""
    cuda = options.device.type == "cuda"
    found = {
        method: {
            "counted_bytes": counted(shape, DOCUMENTS, method),
            "ncu": counters(method, shape) if cuda else {"failed": "needs a GPU"},
        }
        for method in METHODS
    }
    return {"documents": DOCUMENTS, "traffic": found}


def traffic(options: Options) -> list[Plan]:
    return [Plan(shape, partial(traffic_row, options, shape), 50) for shape in TRAFFIC]


if __name__ == "__main__":
    one(*sys.argv[1:3])
