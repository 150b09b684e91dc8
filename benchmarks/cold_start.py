"""SciFact from process start to report on a CPU, with an empty cache and with a filled one, beside what no program could avoid.

    python benchmarks/cold_start.py --data-dir FOLDER [--json FILE] [--runs 5]

Three paths, the `lexical` encoder, everything else by default. The floor of a warm run: starting Python with torch, and the distinct
query tokens' products of each path at the rate that `torch.mm` (`torch._int_mm` where that is faster) reaches alone, in tiles as the
paths use. nDCG@10 of every run must be the first run's, or nothing is written. Python keeps its bytecode from run to run, as it does
by default.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from maxsim_kernels.tokens import distinct_rows
from measure.session import kernels
from reference_speed import scifact
from results.file import write

SCHEMA = "maxsim-eval/cold-start/1"
ROOT = Path(__file__).resolve().parents[1]
ROWS, TILE = 512, 2048
IMPORTS = {"python": "pass", "torch": "import torch", "operator": "import torch, maxsim_kernels"}
# The import alone: what a process takes for it holds what its end takes too, and the spread of starting torch.
BEYOND = "import time, torch; began = time.perf_counter(); import maxsim_kernels; print(time.perf_counter() - began)"


def said_by(command: list[str]) -> str:
    """What a process prints; one that fails ends the program with its stderr."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


def seconds_of(command: list[str]) -> float:
    """Wall seconds of a process."""
    began = time.perf_counter()
    said_by(command)
    return time.perf_counter() - began


def evaluated(data: Path, folder: Path) -> dict[str, Any]:
    """One evaluation: its seconds, those of each path and its metrics."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "evaluate.py", "beir", "scifact", "--encoder", "lexical", "--quiet", "--device", "cpu"]
    wall = seconds_of([*command, "--data-dir", str(data), "--cache-dir", str(folder / "cache"), "--out", str(out)])
    result = json.loads((out / "result.json").read_text())
    paths = result["paths"]
    return {
        "seconds": wall,
        "paths": {name: path["seconds"]["total"] for name, path in paths.items()},
        "ndcg": {name: path["metrics"]["nDCG@10"] for name, path in paths.items()},
    }


def rate(dtype: torch.dtype) -> float:
    """Operations a second of products one after another, in the tile that the paths use: the best of some turns."""
    torch.backends.fp32_precision = "ieee"
    left = torch.ones(ROWS, 128, dtype=dtype)
    tokens = torch.ones(64 * TILE, 128, dtype=dtype)
    out = torch.empty(ROWS, TILE, dtype=torch.float32 if dtype.is_floating_point else torch.int32)
    product = torch.mm if dtype.is_floating_point else torch._int_mm
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        for tile in tokens.split(TILE):
            product(left, tile.t(), out=out)
        best = min(best, time.perf_counter() - began)
    return 2.0 * ROWS * 128 * len(tokens) / best


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="a data folder that holds SciFact")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    imports: dict[str, list[float]] = {name: [] for name in (*IMPORTS, "beyond torch")}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.runs):
            shutil.rmtree(Path(folder) / "cache", ignore_errors=True)
            for found in runs.values():
                found.append(evaluated(options.data_dir.resolve(), Path(folder)))
            for name, source in IMPORTS.items():
                imports[name].append(seconds_of([sys.executable, "-c", source]))
            imports["beyond torch"].append(float(said_by([sys.executable, "-c", BEYOND])))
    if any(run["ndcg"] != runs["cold"][0]["ndcg"] for found in runs.values() for run in found):
        raise SystemExit("nDCG@10 differs between runs; nothing written")
    queries, documents = scifact(options.data_dir)
    distinct = distinct_rows(queries.values)
    rows = len(queries.values) if distinct is None else len(distinct[0])
    rates = {"float32": rate(torch.float32), "int8": rate(torch.int8)}
    work = 2.0 * rows * 128 * len(documents.values)
    floor = statistics.median(imports["torch"]) + work * (2 / rates["float32"] + 1 / max(rates.values()))
    report = {
        "schema": SCHEMA,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **kernels(),
        "query_tokens": [len(queries.values), rows],
        "document_tokens": len(documents.values),
        "rates": rates,
        "warm_floor": floor,
        "imports": imports,
        **runs,
    }
    write(options.json, report)
    for name, found in runs.items():
        print(f"{name}: {statistics.median(run['seconds'] for run in found):.1f} s")
    print(f"a warm run's floor: {floor:.1f} s")
    print(f"import maxsim_kernels beyond torch: {statistics.median(imports['beyond torch']) * 1e3:.0f} ms")


if __name__ == "__main__":
    sys.exit(main())
