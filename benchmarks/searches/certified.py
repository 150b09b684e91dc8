"""Whole evaluations through certified search beside brute force on a CPU: seconds of each path, run files compared to the last byte.

    python benchmarks/searches/certified.py --cache-dir FOLDER --json FILE [--encoder lexical] [--k 10,100] [--runs 5] WORD ...

WORD ...: the collection and its options as `evaluate.py` takes them (`beir scifact --data-dir FOLDER`); embeddings are encoded and
converted first where they are not in the cache. Each run is one command that evaluates `fused-fp32`, `exact-int8`, and `int8-document`,
the scan alone; a row is written only where every run's first two files are equal. Rows of other encoders and depths stay in the file as
they are, with the revision that made them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from cold_start import seconds_of
from measure.session import kernels
from results.file import added_to, write

SCHEMA = "maxsim-eval/certified/1"
BRUTE, CERTIFIED, SCAN = "fused-fp32", "exact-int8", "int8-document"
PATHS = (BRUTE, CERTIFIED, SCAN)
FACTS = ("survivors", "documents", "code_bytes", "row_bytes", "stored_bytes")


def command(name: str, words: list[str], options: argparse.Namespace) -> list[str]:
    """A command of `evaluate.py` on this collection."""
    collection = words if name in ("", "encode") else words[:2]  # convert reads the cache alone
    started = [sys.executable, "evaluate.py", *([name] if name else []), *collection]
    return [*started, "--encoder", options.encoder, "--cache-dir", str(options.cache_dir)]


def once(words: list[str], options: argparse.Namespace, k: int) -> dict[str, Any]:
    """One evaluation by all paths: their seconds and what the search did."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"
        more = ["--device", "cpu", "--paths", ",".join(PATHS), "--k", str(k), "--quiet", "--out", str(out)]
        seconds_of([*command("", words, options), *more])
        result = json.loads((out / "result.json").read_text(encoding="utf-8"))
        files = [(out / result["paths"][name]["run"]).read_bytes() for name in (BRUTE, CERTIFIED)]
    if files[0] != files[1]:
        raise SystemExit(f"{options.encoder}, k = {k}: the run files of {BRUTE} and {CERTIFIED} differ")
    found = {name: result["paths"][name]["seconds"]["total"] for name in PATHS}
    return {"seconds": found, "queries": result["task"]["queries"], "search": result["paths"][CERTIFIED]["search"]}


def measured(words: list[str], options: argparse.Namespace, k: int) -> dict[str, Any]:
    """The row of an encoder and a depth."""
    runs = [once(words, options, k) for _ in range(options.runs)]
    seconds = {name: [run["seconds"][name] for run in runs] for name in PATHS}
    return {
        "encoder": options.encoder, "k": k, "task": " ".join(words[:2]), "queries": runs[0]["queries"], "seconds": seconds,
        "times": [one / other for one, other in zip(seconds[BRUTE], seconds[CERTIFIED], strict=True)],
        "run_files_identical": True, **{name: runs[-1]["search"][name] for name in FACTS},
        "torch": torch.__version__, "threads": torch.get_num_threads(), **kernels(),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=Path, required=True, help="the embedding cache")
    parser.add_argument("--json", type=Path, required=True, help="the raw figures; rows are replaced or added")
    parser.add_argument("--encoder", default="lexical")
    parser.add_argument("--k", default="10,100", help="depths (default 10,100)")
    parser.add_argument("--runs", type=int, default=5)
    options, words = parser.parse_known_args(arguments)
    if len(words) < 2:
        parser.error("name a collection, as `beir scifact --data-dir FOLDER`")
    options.cache_dir = options.cache_dir.resolve()
    seconds_of([*command("encode", words, options), "--quiet"])
    seconds_of([*command("convert", words, options), "--to", "int8-document"])
    report = added_to(options.json, SCHEMA, runs={})
    for k in map(int, options.k.split(",")):
        report["runs"][f"{options.encoder}, k = {k}"] = measured(words, options, k)
        write(options.json, report)


if __name__ == "__main__":
    main()
