"""Would a first scan of 1, 2 or 4 bits before INT8 read fewer bytes? The survivors of every stage, by proven bounds, and bytes: CPU.

    python benchmarks/searches/stages.py --json FILE --data-dir FOLDER [--encoder lexical] [--name NAME] [--queries 20]
    python benchmarks/searches/stages.py --json FILE --clustered 100000
    python benchmarks/searches/stages.py --json FILE --table

The first scan's best case: float queries, a random rotation or none, scales fitted to each token, and a threshold that nobody knows
before the end, the k-th best exact score. Two bounds of a few bits, where C is what a token's code means, at the scale that leaves
the residual R orthogonal to it: by document, `||Q|| max ||R||`; and by token, `||R|| sqrt(||Q||^2 - <Q, C>^2 / ||C||^2)`, the part of
Q that C does not see, 2 bytes a token more. INT8 has document scale and quantised queries, as the toolkit's copies. Bytes: codes of
all documents, INT8 codes of those that the first scan leaves, and full precision (FP32) of what is left then; of one query by itself,
and of all of them at once, where what any of them wants is read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from maxsim_kernels import Packed, quantize_int8
from measure.clustered import BLOCK, Clustered, packed
from measure.session import kernels
from results.file import added_to, write

SCHEMA = "maxsim-eval/stages/1"
DEPTHS = (10, 100)
BITS = (1, 2, 4)
STEPS = {2: 0.498, 4: 0.168}  # half the steps that are best for normal numbers of deviation 1
TRIED = (0.8, 0.9, 1.0, 1.15, 1.3)
DOCUMENTS = 256  # at once
FULL_BYTES = 4


def levels(tokens: Tensor, bits: int) -> Tensor:
    """The odd whole numbers that are nearest to each token in direction, of the steps tried."""
    if bits == 1:
        return torch.where(tokens >= 0, 1.0, -1.0)
    deviation, most = tokens.square().mean(1, keepdim=True).sqrt().clamp(min=1e-12), 2**bits - 1
    best, cosine = torch.empty_like(tokens), torch.full((len(tokens), 1), -torch.inf)
    for tried in TRIED:
        made = (tokens / (2 * tried * STEPS[bits] * deviation)).floor().mul_(2).add_(1).clamp_(-most, most)
        found = (made * tokens).sum(1, keepdim=True) / made.norm(dim=1, keepdim=True)
        better = found > cosine
        best, cosine = torch.where(better, made, best), torch.where(better, found, cosine)
    return best


class Stages:
    """Upper bounds `[Nq, N]` of every first scan and of INT8, and exact scores, document block by document block."""

    def __init__(self, queries: list[Tensor]) -> None:
        self.sizes = [len(query) for query in queries]
        self.queries = torch.cat(queries)
        made = quantize_int8(self.queries).dequantize()
        assert isinstance(made, Tensor)
        self.multiplied = made
        draw = torch.Generator().manual_seed(0)
        self.turn = torch.linalg.qr(torch.randn(self.queries.shape[1], self.queries.shape[1], generator=draw))[0]
        self.norms = self.queries.norm(dim=1, keepdim=True)
        self.found: dict[str, list[Tensor]] = {}

    def add(self, documents: Packed) -> None:
        """The next documents, none of which is empty."""
        tokens, begins = documents.values.float(), documents.starts.numpy()
        self._keep("exact", self.queries @ tokens.t(), begins)
        self._int8(documents, begins)
        for turned in (False, True):
            values, asked = (tokens @ self.turn, self.queries @ self.turn) if turned else (tokens, self.queries)
            for bits in BITS:
                self._few(f"{bits} bits{', rotated' if turned else ''}", values, asked, bits, begins)

    def _int8(self, documents: Packed, begins: np.ndarray) -> None:
        codes = quantize_int8(documents, "document").dequantize()
        assert isinstance(codes, Packed)
        residual = (documents.values - codes.values).norm(dim=1)[None]
        norm = documents.values.norm(dim=1)[None]
        of_error, of_norm = (
            self.multiplied.norm(dim=1, keepdim=True),
            (self.queries - self.multiplied).norm(dim=1, keepdim=True),
        )
        cells = self.multiplied @ codes.values.t()
        width = of_error * _largest(residual, begins) + of_norm * _largest(norm, begins)
        self._keep("int8", cells, begins, width)

    def _few(self, name: str, tokens: Tensor, asked: Tensor, bits: int, begins: np.ndarray) -> None:
        made = levels(tokens, bits)
        made *= (made * tokens).sum(1, keepdim=True) / made.square().sum(1, keepdim=True)  # its residual is orthogonal
        residual = (tokens - made).norm(dim=1)[None]
        cells = asked @ made.t()
        self._keep(f"{name}, by document", cells, begins, self.norms * _largest(residual, begins))
        unseen = (self.norms.square() - (cells / made.norm(dim=1).clamp(min=1e-12)).square()).clamp_(min=0).sqrt_()
        self._keep(f"{name}, by token", cells + residual * unseen, begins)

    def _keep(self, name: str, cells: Tensor, begins: np.ndarray, width: Tensor | None = None) -> None:
        best = _largest(cells, begins)
        best = best if width is None else best + width
        self.found.setdefault(name, []).append(torch.stack([part.sum(0) for part in best.split(self.sizes)]))

    def rows(self, lengths: Tensor, dim: int) -> dict[str, Any]:
        """Survivors and bytes."""
        held = {name: torch.cat(parts, 1) for name, parts in self.found.items()}
        exact, second = held.pop("exact"), held.pop("int8")
        for name, upper in (*held.items(), ("int8", second)):
            assert bool((upper >= exact - 1e-3).all()), name
        whole, report = float(lengths.sum()), dict[str, Any]()
        for k in DEPTHS:
            kth = exact.topk(k, dim=1).values[:, -1:] - 1e-4
            left = second >= kth
            rows: dict[str, Any] = {"int8": _facts(left, torch.zeros_like(left), left, lengths, dim, whole * dim)}
            for name, upper in held.items():
                first, bits = upper >= kth, int(name.split()[0])
                token_bytes = bits * dim / 8 + (4 if name.endswith("token") else 2)
                rows[name] = _facts(first, first, first & left, lengths, dim, whole * token_bytes)
                for way in ("one", "all"):
                    rows[name][f"times_{way}"] = rows["int8"][f"bytes_{way}"] / rows[name][f"bytes_{way}"]
            report[f"k={k}"] = rows
        return report


def _facts(shown: Tensor, first: Tensor, last: Tensor, lengths: Tensor, dim: int, scanned: float) -> dict[str, float]:
    """Survivors (`shown`), and bytes read: `scanned`, then INT8 codes of pairs `first`, full precision of pairs `last`."""

    def read(pairs: Tensor, way: str) -> float:
        tokens = lengths.double()
        return float((pairs.any(0) * tokens).sum() if way == "all" else (pairs * tokens).sum(1).mean())

    found = {f"bytes_{way}": scanned + dim * read(first, way) + FULL_BYTES * dim * read(last, way) for way in ("one", "all")}
    counts = shown.sum(1)
    return {"survivors": float(counts.double().mean()), "most": int(counts.max()), **found}


def _largest(values: Tensor, begins: np.ndarray) -> Tensor:
    """`[rows, T]` to `[rows, N]`: the maximum of each document."""
    return torch.from_numpy(np.maximum.reduceat(values.numpy(), begins, axis=-1))


def scifact(folder: Path, encoder: str, cache: str, count: int) -> tuple[list[Tensor], Iterator[Packed], Tensor]:
    """Some queries, blocks of documents, and their lengths."""
    from maxsim_eval import load_task
    from maxsim_eval.cache.embeddings import embeddings

    made = embeddings(load_task("beir", "scifact", data_dir=folder, quiet=True), encoder, cache, quiet=True)
    asked, documents = made.queries.load(), made.documents.load()  # type: ignore[union-attr]
    step = max(1, len(asked) // count)
    chosen = [asked[n].float() for n in range(0, len(asked), step)][:count]
    lengths = documents.lengths
    spans = (range(first, min(first + DOCUMENTS, len(lengths))) for first in range(0, len(lengths), DOCUMENTS))
    return chosen, (documents.select(span).compact() for span in spans), lengths


def clustered(documents: int, count: int) -> tuple[list[Tensor], Iterator[Packed], Tensor]:
    """The same of the corpus of `survivors.py`, growing wider."""
    corpus = Clustered("wider", 128, 16)

    def blocks() -> Iterator[Packed]:
        for number in range(-(-documents // BLOCK)):
            block = corpus.block(number)[: documents - number * BLOCK]
            yield from (packed(block[first : first + 2 * DOCUMENTS]) for first in range(0, len(block), 2 * DOCUMENTS))

    return list(corpus.queries(count, 16)), blocks(), torch.full((documents,), 16)


def table(report: dict[str, Any]) -> list[str]:
    """Markdown: survivors, and bytes of INT8 alone over bytes of two stages, the better of rotated or not."""
    ways = [(bits, bound) for bits in BITS for bound in ("document", "token")]
    lines = [
        "| corpus | INT8 alone leaves | "
        + " | ".join(f"{bits} bit{'s' * (bits > 1)}, by {bound}" for bits, bound in ways)
        + " |",
        "| --- | ---: |" + " ---: |" * len(ways),
    ]
    for name, found in report["corpora"].items():
        for k in DEPTHS:
            rows, cells = found[f"k={k}"], []
            for bits, bound in ways:
                both = (rows[f"{bits} bits{turned}, by {bound}"] for turned in ("", ", rotated"))
                best = max(both, key=lambda row: float(row["times_one"]))
                cells.append(f"{_percent(best, found)}, {best['times_one']:.2f}x")
            lines.append(f"| {name}, k = {k} | {_percent(rows['int8'], found)} | {' | '.join(cells)} |")
    return lines


def _percent(row: dict[str, Any], found: dict[str, Any]) -> str:
    share = 100 * row["survivors"] / found["documents"]
    return f"{share:.0f}%" if share >= 10 else f"{share:.2g}%"


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the raw figures; those of other corpora stay")
    parser.add_argument("--table", action="store_true", help="write the table of a file that is there")
    parser.add_argument("--data-dir", type=Path, help="a data folder that holds SciFact")
    parser.add_argument("--encoder", default="lexical")
    parser.add_argument("--name", help="of the encoder in the file (default: as --encoder)")
    parser.add_argument("--cache-dir", default="embeddings_cache", help="where embeddings are kept (default: embeddings_cache)")
    parser.add_argument("--clustered", type=int, help="so many made documents instead of SciFact")
    parser.add_argument("--queries", type=int, default=20)
    options = parser.parse_args(arguments)
    report = added_to(options.json, SCHEMA, torch=torch.__version__, corpora={})
    if options.table:
        sys.stdout.write("\n".join(table(report)) + "\n")
        return
    if options.clustered is None and options.data_dir is None:
        parser.error("need --data-dir, --clustered or --table")
    if options.clustered is not None:
        name, made = f"clustered, {options.clustered:,}", clustered(options.clustered, options.queries)
    else:
        name = f"SciFact, {options.name or options.encoder}"
        made = scifact(options.data_dir, options.encoder, options.cache_dir, options.queries)
    queries, blocks, lengths = made
    stages = Stages(queries)
    for block in tqdm(blocks, desc=name):
        stages.add(block)
    about = {"documents": len(lengths), "tokens": int(lengths.sum()), "dim": stages.queries.shape[1], "queries": len(queries)}
    report["corpora"][name] = {**about, **kernels(), **stages.rows(lengths, stages.queries.shape[1])}
    write(options.json, report)


if __name__ == "__main__":
    main()
