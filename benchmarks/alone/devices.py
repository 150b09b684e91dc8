"""A collection by every path on a CPU and on a GPU, from one cache of embeddings: metrics, and rankings compared as `runs.py` does.

    python benchmarks/alone/devices.py --texts FOLDER/beir/scifact/corpus.jsonl [--encoder lexical] [--json FILE]
    python benchmarks/alone/devices.py --texts FOLDER/local/semanlink/corpus.jsonl ...      # a folder of your own

The embeddings are made once, on the GPU, and copied to INT8 for the certified paths; then the same command scores them on either
device. Both compute a score within a bound of the truth, which grows with the norms of the query's tokens (`bounds`), so rankings may
differ in near ties alone. The GPU's Result is compared with its own fp32, and gated against the CPU's, with a path that adds in BF16
beside ours (`bf16_sums`), which a gate should catch. Exit status: 0 rankings differ in ties alone, 1 in more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from alone.runs import OPERATOR_BOUND, compared, described, rankings
from cold_start import seconds_of
from maxsim_eval.cache.entries import MANIFEST, open_entry
from maxsim_eval.data.trec import read_trec_run
from maxsim_eval.gate.baselines import baseline_of
from maxsim_eval.gate.checking import check
from maxsim_eval.report.result_json import read_result
from maxsim_eval.scoring.paths import our_paths
from maxsim_eval.types import Result
from maxsim_kernels import Packed
from measure.names import OTHER
from measure.session import kernels
from results.file import added_to, write

SCHEMA = "maxsim-eval/devices/1"
DEVICES = ("cpu", "cuda")
CONTROL = "python:benchmarks.alone.devices:bf16_sums"


def bf16_sums(queries: Packed, documents: Packed) -> Tensor:
    """`[Nq, N]`: inputs, similarities and the sum over a query's tokens are BF16, each addition rounded: what no operator should do."""
    queries, documents = queries.to(torch.bfloat16), documents.to(torch.bfloat16)
    owner = torch.repeat_interleave(torch.arange(len(documents), device=documents.device), documents.lengths)
    scores = torch.zeros(len(queries), len(documents), dtype=torch.bfloat16, device=documents.device)
    for row in range(len(queries)):
        similar = queries[row] @ documents.values.T
        best = similar.new_full((len(similar), len(documents)), -torch.inf)
        for token in best.scatter_reduce(1, owner.expand_as(similar), similar, "amax"):
            scores[row] += token
    return scores.float()


def norms(cache: Path) -> dict[str, float]:
    """The product that a score's error grows with, of each query: the norms of its tokens, summed, by the documents' largest."""
    queries, documents = (
        open_entry(found.parent) for role in ("queries", "documents") for found in cache.glob(f"**/*-{role}-*/{MANIFEST}")
    )
    largest = max(float(block.values.float().norm(dim=1).max()) for block in documents.blocks())
    held = queries.load()
    sums = [float(tokens.float().norm(dim=1).sum()) for tokens in held.values.split(queries.lengths().tolist())]
    return {query: largest * total for query, total in zip(queries.ids(), sums, strict=True)}


def bounds(path: str, dim: int, products: Mapping[str, float]) -> dict[str, float]:
    """How much each query's scores may be off: FP8's contract is wider (docs/kernels.md), and codes may exceed a norm by 1/16."""
    each = 2.0**-11 * ceil(dim / 32) * (1 + 2.0**-4) if path == "fp8" else OPERATOR_BOUND
    return {query: each * product for query, product in products.items()}


def measure(texts: Path, encoder: str, folder: Path, devices: tuple[str, str] = DEVICES) -> dict[str, Any]:
    """The entry of an encoder: by path what `runs.compared` counts, the metrics of either device, and how the second's stand."""
    home = texts.resolve().parents[1]
    words = ["local" if home.name == "local" else "beir", texts.parent.name, "--data-dir", str(home)]
    more = ["--encoder", encoder, "--cache-dir", str(folder / "cache")]
    program = [sys.executable, "evaluate.py"]
    seconds_of([*program, "encode", *words, *more, "--device", devices[1], "--quiet"])
    seconds_of([*program, "convert", *words[:2], *more, "--to", "int8-document"])
    results, seconds = [], {}
    for number, device in enumerate(devices):
        out = folder / str(number)
        asked = ["--paths", ",".join([*our_paths(), *[CONTROL][:number]]), "--device", device, "--quiet", "--out", str(out)]
        seconds[f"{number}: {device}"] = seconds_of([*program, *words, *more, *asked])
        results.append(json.loads((out / "result.json").read_text(encoding="utf-8")))
    products, paths = norms(folder / "cache"), {}
    failed = gated(*(read_result(folder / str(number)) for number in range(2)))
    for name in our_paths():
        one, other = (
            rankings(read_trec_run(folder / str(n) / result["paths"][name]["run"])) for n, result in enumerate(results)
        )
        allowed = bounds(name, results[0]["encoder"]["dim"], products)
        metrics = [result["paths"][name]["metrics"] for result in results]
        paths[name] = {**described(compared(one, other, allowed), max(allowed.values())), "metrics": metrics}
    paths[CONTROL] = {"metrics": [results[1]["paths"][CONTROL]["metrics"]]}
    for name, path in paths.items():
        if parity := results[1]["paths"][name].get("parity"):
            path["parity"] = {key: parity[key] for key in ("delta", "spearman", "max_rel_error", "overlap", "identical_order")}
        path["gate"] = failed.pop(name, [])
    return {
        "devices": [result["environment"].get("gpu") or result["environment"]["cpu"] for result in results],
        "task": {key: results[0]["task"][key] for key in ("source", "dataset", "queries", "documents")},
        "encoder": results[0]["encoder"], "k": results[0]["k"], "seconds": seconds, "paths": paths,
        "gate": [what for left in failed.values() for what in left],
        "torch": torch.__version__, **kernels(),
    }  # fmt: skip


def gated(baseline: Result, found: Result) -> dict[str, list[str]]:
    """What the gate refuses of a Result, by the path it is about; the rest under an empty name."""
    failed: dict[str, list[str]] = {"": []}
    for finding in check(found, baseline_of(baseline)):
        if not finding.ok:
            name, _, what = finding.what.partition(": ")
            name, what = (name, what) if name in found.paths else ("", finding.what)
            failed.setdefault(name, []).append(f"{what}: {finding.found}, needed {finding.needed}")
    return failed


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--texts", type=Path, required=True, help="corpus.jsonl of a BEIR folder, its queries and judgements beside it"
    )
    parser.add_argument("--encoder", default="lexical", help="those of others stay in FILE (default lexical)")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    options = parser.parse_args(arguments)
    report = added_to(options.json, SCHEMA, encoders={})
    with tempfile.TemporaryDirectory() as place:
        found = measure(options.texts, options.encoder, Path(place))
    name, dataset = options.encoder, found["task"]["dataset"]
    report["encoders"][name if dataset == "scifact" else f"{dataset}, {name}"] = found
    write(options.json, report)
    for name, path in found["paths"].items():
        counts = ", ".join(f"{count} {what}" for what, count in path.get("counts", {}).items())
        ndcg = " and ".join(f"{metrics['nDCG@10']:.4f}" for metrics in path["metrics"])
        print(f"{name}: {counts or 'on the GPU alone'}; nDCG@10 {ndcg}")
        print("".join(f"  {line}\n" for line in [*path.get("first", []), *(f"gate: {line}" for line in path["gate"])]), end="")
    return int(any(path["counts"][OTHER] for path in found["paths"].values() if "counts" in path))


if __name__ == "__main__":
    sys.exit(main())
