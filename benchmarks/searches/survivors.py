"""How the share of documents that bounds leave falls as a corpus grows: clustered embeddings, codes of INT8.

    python benchmarks/searches/survivors.py --json FILE [--documents 1000000] [--device cuda] [--growth wider] [--queries 16]
    python benchmarks/searches/survivors.py --json FILE --table

Documents are made by seed in blocks and scored on the spot, through codes and exactly, so that memory holds scores alone: 20 bytes a
pair, and as much again while a size is counted. Every corpus of the sizes below `--documents` is the beginning of the next. Counted for
each size: the documents that `exact_topk` over one piece scores exactly on a CPU (those whose upper bound reaches its guess of the
threshold, or the k-th best exact score of these), and, for comparison, those that reach the true k-th best score: what scoring in the
order of upper bounds, one by one, would come to. `--table` writes the table of docs/search.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from maxsim_kernels import maxsim, quantize_int8
from maxsim_kernels.search import residuals_of
from maxsim_kernels.search.bounds import query_terms
from maxsim_kernels.search.searching import GUESSED
from measure.clustered import BLOCK, GROWTH, Clustered, packed
from measure.session import kernels
from results.file import added_to, write

SCHEMA = "maxsim-eval/survivors/1"
SIZES = (10_000, 32_000, 100_000, 320_000, 1_000_000, 3_200_000, 10_000_000)
DEPTHS = (10, 100)
KINDS = ("document", "token")  # what has a scale
DIM, TOKENS, QUERY_TOKENS = 128, 16, 16


class Scored:
    """Scores of all documents so far: exact `[Nq, N]`, and bounds by kind of codes."""

    def __init__(self, queries: int, documents: int, device: str) -> None:
        shape = (queries, documents)
        self.exact = torch.empty(shape, device=device)
        self.middle = {kind: torch.empty(shape, device=device) for kind in KINDS}
        self.width = {kind: torch.empty(shape, device=device) for kind in KINDS}

    def add(self, queries: Tensor, documents: Tensor, first: int) -> None:
        """The next documents `[n, tokens, d]`."""
        held, asked = packed(documents), packed(queries.cpu())
        span = slice(first, first + len(held))
        self.exact[:, span] = maxsim(queries, held)  # type: ignore[assignment]
        for kind in KINDS:
            codes = quantize_int8(held, kind)
            stored = residuals_of(held, codes)
            terms = query_terms(asked, codes)
            self.middle[kind][:, span] = maxsim(queries, codes)  # type: ignore[assignment]
            width = terms.width(type(stored)(stored.errors.cpu(), stored.norms.cpu()))
            self.width[kind][:, span] = width.to(self.exact.device) * (1 + 2.0**-20)  # for FP32 sums with it

    def row(self, count: int) -> dict[str, Any]:
        """What bounds leave of the first `count` documents."""
        exact, found = self.exact[:, :count], dict[str, Any]()
        for kind in KINDS:
            middle, width = self.middle[kind][:, :count], self.width[kind][:, :count]
            assert bool(((exact - middle).abs() <= width).all())
            found[kind] = {f"k={k}": _left(exact, middle, width, k) for k in DEPTHS}
        return {"documents": count, "codes": found}


def _left(exact: Tensor, middle: Tensor, width: Tensor, k: int) -> dict[str, float]:
    upper = middle + width
    first = upper >= (middle - GUESSED * width).topk(k, dim=1).values[:, -1:]
    threshold = exact.masked_fill(~first, -torch.inf).topk(k, dim=1).values[:, -1:]
    scored = (first | (upper >= threshold)).sum(1)
    least = (upper >= exact.topk(k, dim=1).values[:, -1:]).sum(1)
    return {"mean": float(scored.double().mean()), "most": int(scored.max()), "in_order": float(least.double().mean())}


def measured(growth: str, documents: int, queries: int, device: str) -> list[dict[str, Any]]:
    """A row for every size."""
    corpus = Clustered(growth, DIM, TOKENS, device)
    asked, scored = corpus.queries(queries, QUERY_TOKENS), Scored(queries, documents, device)
    for number in tqdm(range(-(-documents // BLOCK)), desc=growth):
        block = corpus.block(number)[: documents - number * BLOCK]
        scored.add(asked, block, number * BLOCK)
    sizes = sorted({size for size in SIZES if size <= documents} | {documents})
    return [scored.row(size) for size in sizes]


def table(report: dict[str, Any]) -> list[str]:
    """Markdown: a line a size."""
    heads = [f"{kind}, k = {k}" for kind in KINDS for k in DEPTHS]
    lines = [f"| documents | {' | '.join(heads)} |", "| ---: |" + " ---: |" * len(heads)]
    for growth, found in report["growth"].items():
        for row in found["rows"]:
            cells = []
            for kind in KINDS:
                for k in DEPTHS:
                    mean = row["codes"][kind][f"k={k}"]["mean"]
                    cells.append(f"{mean:,.0f} ({100 * mean / row['documents']:.2g}%)")
            lines.append(f"| {row['documents']:,} {growth} | {' | '.join(cells)} |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the raw figures; those of another growth stay")
    parser.add_argument("--table", action="store_true", help="write the table of a file that is there")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--growth", choices=GROWTH, action="append", help="default: both")
    options = parser.parse_args(arguments)
    report = added_to(options.json, SCHEMA)
    if options.table:
        sys.stdout.write("\n".join(table(report)) + "\n")
        return
    report |= {"schema": SCHEMA, "dim": DIM, "tokens": TOKENS, "query_tokens": QUERY_TOKENS}
    held = report.setdefault("growth", {})
    for growth in options.growth or GROWTH:
        rows = measured(growth, options.documents, options.queries, options.device)
        held[growth] = {
            "torch": torch.__version__,
            "device": options.device,
            **kernels(),
            "queries": options.queries,
            "rows": rows,
        }
        write(options.json, report)


if __name__ == "__main__":
    main()
