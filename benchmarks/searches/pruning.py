"""How many documents a bound on scores over codes leaves in the race, for bounds of different size: SciFact, CPU.

    python benchmarks/searches/pruning.py --data-dir FOLDER [--encoder lexical] [--name NAME] [--codes "int8 token" ...] [--json FILE]

For every query the documents are counted that can still be among its k best: the upper bound is not below the threshold. Two
thresholds: the k-th best lower bound, and the k-th best *exact* score among the k documents whose lower bounds are best (which have to
be scored anyway; it is at least as high). The bounds here are those of real numbers; the first, as `maxsim_kernels.search` has it, has
both paths' rounding in it.

Variants: norms of residuals and tokens by document (the largest), by token, in parts of d by document or token, Hoelder's (the smaller
of 2-norms and 1-norm times largest component), and token norms about the corpus mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from maxsim_eval.codecs.names import codec_of
from maxsim_kernels import BitTokens, Fp8Tokens, Int8Tokens, Packed, ResidualTokens, maxsim, quantize_fp8, quantize_int8
from maxsim_kernels.search import residuals_of
from maxsim_kernels.search.bounds import query_terms
from measure.session import kernels
from results.file import added_to, write

SCHEMA = "maxsim-eval/pruning/1"
DEPTHS = (10, 100)
SAMPLE = 1 << 16  # tokens that a codebook is learned from


def stored_by(name: str) -> Callable[[Packed], BitTokens | ResidualTokens]:
    """Documents as a codec of the toolkit stores them."""

    def store(documents: Packed) -> BitTokens | ResidualTokens:
        codec = codec_of(name)
        rows = torch.randperm(len(documents.values), generator=torch.Generator().manual_seed(0))[:SAMPLE]
        sample = Packed(documents.values[rows], torch.tensor([0, len(rows)]))
        learned = codec.fit(lambda _: sample, documents.dim, len(documents.values))
        state = {key.removeprefix("0."): value for key, value in learned.items()}
        parts = [codec.coder.encode(block, state) for block in documents.values.split(SAMPLE)]
        return codec.coder.as_stored(documents, {key: torch.cat([part[key] for part in parts]) for key in parts[0]}, state)

    return store


Codes = Int8Tokens | Fp8Tokens | BitTokens | ResidualTokens
KINDS: dict[str, Callable[[Packed], Codes]] = {
    "int8 token": quantize_int8,
    "int8 document": lambda documents: quantize_int8(documents, "document"),
    "int8 corpus": lambda documents: quantize_int8(documents, "corpus"),
    "int8 token, affine": lambda documents: quantize_int8(documents, affine=True),
    "fp8 document": quantize_fp8,
    "4 bits token": stored_by("int4"),
    "4-bit residuals": stored_by("residual-4(centroids=1024)"),
}


@dataclass(frozen=True)
class Side:
    """Documents `D` and what their codes mean `C`, float32 `[T, d]`; `begins` `[N]` of the documents, none of which is empty."""

    tokens: Tensor
    meant: Tensor
    begins: np.ndarray
    mean: Tensor

    def largest(self, values: Tensor) -> Tensor:
        """`[..., T]` to `[..., N]`: the maximum of each document."""
        return torch.from_numpy(np.maximum.reduceat(values.numpy(), self.begins, axis=-1))


@dataclass(frozen=True)
class Variant:
    """Which norms bound the inner products of residuals: in how many `parts` of d, each token's own or a document's largest."""

    name: str
    parts: int = 1
    by_token: bool = False
    hoelder: bool = False
    centred: bool = False


VARIANTS = (
    Variant("document"),
    Variant("document, token norms about the corpus mean", centred=True),
    Variant("document, 4 parts", 4),
    Variant("document, the smaller of 2-norms and 1-norm times largest", hoelder=True),
    Variant("token", by_token=True),
    Variant("token, 4 parts", 4, by_token=True),
)


def norms(values: Tensor, parts: int) -> Tensor:
    """`[parts, rows]` norms of equal parts of d."""
    return values.unflatten(1, (parts, -1)).norm(dim=2).t()


class Widths:
    """A variant's widths for query tokens: of every document token, `[L, T]`, or of documents, `[L, N]`."""

    def __init__(self, variant: Variant, side: Side) -> None:
        self.variant, self.side = variant, side
        kept: Callable[[Tensor], Tensor] = (lambda one: one) if variant.by_token else side.largest
        residual = side.tokens - side.meant
        self.errors = kept(norms(residual, variant.parts))
        self.norms = kept(norms(side.tokens - side.mean if variant.centred else side.tokens, variant.parts))
        self.highest = kept(residual.abs().amax(1)) if variant.hoelder else None
        count = sum(one.numel() for one in (self.errors, self.norms, self.highest) if one is not None)
        self.bytes_a_document = 4 * count / len(side.begins)

    def __call__(self, queries: Tensor, multiplied: Tensor) -> Tensor:
        """Widths of the similarities of query tokens `[L, d]` that are multiplied as `multiplied`."""
        parts = self.variant.parts
        width = norms(multiplied, parts).t() @ self.errors
        if self.highest is not None:
            width = torch.minimum(width, torch.outer(multiplied.abs().sum(1), self.highest))
        return width + norms(queries - multiplied, parts).t() @ self.norms


def survivors(upper: Tensor, lower: Tensor, exact: Tensor) -> dict[str, int]:
    """How many of `[N]` documents are left at each depth, by both thresholds."""
    found = {}
    for k in DEPTHS:
        order = lower.topk(k)
        found[f"k={k}, lower bounds"] = int((upper >= order.values[-1]).sum())
        found[f"k={k}"] = int((upper >= exact[order.indices].min()).sum())
    return found


def counted(side: Side, queries: list[Tensor], codes: Codes, quantised: bool) -> dict[str, Any]:
    """Mean and most survivors over the queries, a variant at a time."""
    made = {variant.name: Widths(variant, side) for variant in VARIANTS}
    rows: dict[str, list[dict[str, int]]] = {name: [] for name in made}
    ratios = []
    for query in queries:
        multiplied = as_multiplied(query, codes) if quantised else query
        cells = multiplied @ side.meant.t()
        approximate, exact = (side.largest(one).sum(0) for one in (cells, query @ side.tokens.t()))
        for name, widths in made.items():
            width = widths(query, multiplied)
            middle = approximate
            if widths.variant.centred:  # the mean's share of the query's residual is known: the same for every document
                middle = approximate + ((query - multiplied) @ side.mean).sum()
            if widths.variant.by_token:
                upper = side.largest(cells + width).sum(0)
                lower = side.largest(cells - width).sum(0)
            else:
                upper, lower = middle + width.sum(0), middle - width.sum(0)
                if name == "document":
                    ratios.append(float((exact - approximate).abs().mean() / width.sum(0).mean()))
            assert (exact <= upper + 1e-3).all(), name
            assert (exact >= lower - 1e-3).all(), name
            rows[name].append(survivors(upper, lower, exact))
    found: dict[str, Any] = {}
    for name, widths in made.items():
        counts = {key: [row[key] for row in rows[name]] for key in rows[name][0]}
        table = {key: {"mean": float(np.mean(values)), "most": max(values)} for key, values in counts.items()}
        found[name] = {"bytes_a_document": widths.bytes_a_document, **table}
    return {"error_over_width": float(np.mean(ratios)), "variants": found}


def as_multiplied(query: Tensor, codes: Codes) -> Tensor:
    """A query as the scan multiplies it: what its own codes mean or, beside residual codes, the query itself."""
    if isinstance(codes, ResidualTokens):
        return query  # decoded tokens meet queries as they are
    made = quantize_int8(query) if isinstance(codes, Int8Tokens | BitTokens) else quantize_fp8(query, "token")
    found = made.dequantize()
    assert isinstance(found, Tensor)
    return found


def shipped(documents: Packed, queries: list[Tensor], codes: Codes, quantised: bool) -> dict[str, Any]:
    """The package's own bound, rounding included, on the paths' own scores."""
    rows = []
    residuals = residuals_of(documents, codes)
    for query in queries:
        packed = Packed(query, torch.tensor([0, len(query)]))
        width = query_terms(packed, codes, quantised).width(residuals)[0]
        approximate, exact = maxsim(query, codes, quantize_queries=quantised), maxsim(query, documents)
        assert isinstance(approximate, Tensor)
        assert isinstance(exact, Tensor)
        rows.append(survivors(approximate + width, approximate - width, exact))
    table = {key: [row[key] for row in rows] for key in rows[0]}
    counts = {key: {"mean": float(np.mean(values)), "most": max(values)} for key, values in table.items()}
    return {"bytes_a_document": 8.0, **counts}


def cases(queries: Packed, documents: Packed, count: int, kinds: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kind of codes with quantised queries (not residual codes) and with float queries."""
    step = max(1, len(queries) // count)
    chosen = [queries[n].float() for n in range(0, len(queries), step)][:count]
    whole = Packed(documents.compact().values.float(), documents.compact().offsets)  # type: ignore[arg-type]
    assert bool((whole.lengths > 0).all())
    for kind in kinds:
        codes = KINDS[kind](whole)
        meant = codes.dequantize()
        assert isinstance(meant, Packed)
        side = Side(whole.values, meant.values, whole.starts.numpy(), whole.values.mean(0))
        for quantised in (True, False)[isinstance(codes, ResidualTokens) :]:
            found = counted(side, chosen, codes, quantised)
            found["variants"]["maxsim_kernels.search"] = shipped(whole, chosen, codes, quantised)
            yield f"{kind}, {'quantised' if quantised else 'float'} queries", found


def embedded(folder: Path, encoder: str, cache: str) -> tuple[Packed, Packed]:
    """SciFact's queries and documents."""
    from maxsim_eval import load_task
    from maxsim_eval.cache.embeddings import embeddings

    found = embeddings(load_task("beir", "scifact", data_dir=folder, quiet=True), encoder, cache, quiet=True)
    return found.queries.load(), found.documents.load()  # type: ignore[union-attr]


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="a data folder that holds SciFact")
    parser.add_argument("--encoder", default="lexical")
    parser.add_argument("--name", help="of the encoder in the file (default: as --encoder)")
    parser.add_argument("--codes", action="append", choices=list(KINDS), help="default: all")
    parser.add_argument("--cache-dir", default="embeddings_cache", help="where embeddings are kept (default: embeddings_cache)")
    parser.add_argument("--json", type=Path, help="write the raw figures here; those of other encoders stay")
    parser.add_argument("--queries", type=int, default=20)
    options = parser.parse_args(arguments)
    report = added_to(options.json, SCHEMA, corpus="SciFact, test", encoders={})
    name, kinds = options.name or options.encoder, options.codes or list(KINDS)
    queries, documents = embedded(options.data_dir, options.encoder, options.cache_dir)
    sizes = {"documents": len(documents), "tokens": len(documents.values), "dim": documents.dim}
    about = {"torch": torch.__version__, **kernels(), "queries": options.queries}
    found: dict[str, Any] = {**about, **sizes, "cases": {}}
    report["encoders"][name] = found
    for case, counts in tqdm(cases(queries, documents, options.queries, kinds), total=2 * len(kinds), desc=name):
        found["cases"][case] = counts
        write(options.json, report)
    for case, counts in found["cases"].items():
        print(f"{name}: {case}; mean error / width {counts['error_over_width']:.4f}")
        for variant, row in counts["variants"].items():
            shown = ", ".join(f"{key} {row[key]['mean']:.1f} ({row[key]['most']})" for key in row if key.startswith("k="))
            print(f"  {variant} ({row['bytes_a_document']:.0f} bytes a document): {shown}")


if __name__ == "__main__":
    main()
