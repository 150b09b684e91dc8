"""The rows of the forward benchmark: inputs, truths and the methods that take part, built one row at a time.

Tokens are random unit vectors from a fixed seed, so `--only` changes no row's data. Lengths of ragged documents are uniform from 16
to 240. "256 queries" have 32 tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from maxsim_kernels import Packed, quantize_fp8, quantize_int8
from measure.method import EXACT, FP8_BOUND, Lineup, Method, Options, Row
from measure.names import (
    AFFINE,
    COUNTS,
    DEQUANTISED,
    GRANULARITIES,
    MANY,
    PAIRS,
    RAGGED_MANY,
    RAGGED_ONE,
    SHAPES,
    WIDE,
    quantised_name,
    quantised_row_name,
)
from measure.score_truth import Documents, Truth, truth
from measure.timing import DEVICE
from measure.work import Work
from rivals import peers, torch_rivals
from rivals.torch_rivals import MODES

DIM = 128
RAGGED_DOCUMENTS, SHORTEST, LONGEST = 8192, 16, 240
BATCHES = {MANY: (256, 32, 8192, 128), "32 queries x 1024 x 1024": (32, 32, 1024, 1024)}
WIDE_SHAPE = (128, 1024, 1024)


def unit(*shape: int) -> Tensor:
    """Random unit vectors in FP16, drawn in blocks so that the FP32 draft stays small."""
    found = torch.empty(shape, dtype=torch.float16, device=DEVICE)
    flat = found.view(-1, shape[-1])
    step = max(1, (1 << 28) // shape[-1])
    for start in range(0, flat.shape[0], step):
        draft = torch.randn(flat[start : start + step].shape, device=DEVICE)
        flat[start : start + step] = torch.nn.functional.normalize(draft, dim=-1).half()
    return found


def product(rows: int, tokens: int, dim: int = DIM, unit: str = "fp16", scales: int = 0) -> Work:
    """Work of `rows` query tokens against `tokens` document tokens; `scales` FP16 scales are read too."""
    return Work(2.0 * rows * tokens * dim, float(tokens * dim * (2 if unit == "fp16" else 1) + 2 * scales), unit)


def dense_row(
    name: str,
    shape: tuple[int, int, int, int],
    options: Options,
    modes: tuple[str, ...] = (),
    *,
    dim: int = DIM,
    graph: bool = False,
) -> Row:
    """FP16 queries `[Nq, Lq, d]` (one: `[Lq, d]`) against `[B, Ld, d]`; `shape` is (Nq, Lq, B, Ld); `modes` of torch.compile."""
    torch.manual_seed(0)
    count, size, documents, length = shape
    queries, corpus = unit(count, size, dim), unit(documents, length, dim)
    asked = queries[0] if count == 1 else queries
    found = torch_rivals.ours(asked, corpus, graph=graph)
    found.add(torch_rivals.naive(asked, corpus)).add(torch_rivals.chunked(asked, corpus))
    if options.compile:
        found.add(torch_rivals.compiled(asked, corpus, modes))
    found.add(peers.dense(options.peers, asked, corpus))
    about = {"queries": count, "query_tokens": size, "documents": documents, "document_tokens": length, "dim": dim}
    work = product(count * size, documents * length, dim)
    return Row(name, about, found, work, (count, documents), {"float": partial(truth, queries, corpus)})


def dense(options: Options) -> Iterator[Row]:
    for thousands, documents in COUNTS.items():
        for shape, (size, length) in SHAPES.items():
            small = thousands == "1K"
            modes = MODES if small else ()
            yield dense_row(f"{shape} {thousands}", (1, size, documents, length), options, modes, graph=small)


def many(options: Options) -> Iterator[Row]:
    for name, shape in BATCHES.items():
        yield dense_row(name, shape, options)


def ragged_corpus() -> tuple[Packed, Tensor]:
    """The ragged documents and their lengths `[N]`."""
    torch.manual_seed(0)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (RAGGED_DOCUMENTS,)).to(DEVICE)
    offsets = torch.zeros(RAGGED_DOCUMENTS + 1, dtype=torch.int64, device=DEVICE)
    offsets[1:] = lengths.cumsum(0)
    return Packed(unit(int(offsets[-1]), DIM), offsets), lengths


def ragged(options: Options) -> Iterator[Row]:
    packed, lengths = ragged_corpus()
    padding = torch.arange(int(lengths.max()), device=DEVICE) >= lengths[:, None]
    padded = torch.zeros(*padding.shape, DIM, dtype=torch.float16, device=DEVICE)
    padded[~padding] = packed.values
    for name, count in ((RAGGED_ONE, 1), (RAGGED_MANY, 256)):
        queries = unit(count, 32, DIM)
        asked = queries[0] if count == 1 else queries
        found = torch_rivals.ours(asked, packed)
        found.add(torch_rivals.naive(asked, padded, padding=padding)).add(torch_rivals.chunked(asked, padded, padding))
        found.add(peers.ragged(options.peers, queries, packed, padded, lengths))
        tokens = packed.values.shape[0]
        about = {"queries": count, "query_tokens": 32, "documents": len(packed), "tokens": tokens, "dim": DIM}
        truths = {"float": partial(truth, queries, packed)}
        yield Row(name, about, found, product(count * 32, tokens), (count, len(packed)), truths)


def quantised_inputs() -> Iterator[tuple[str, Tensor, Documents]]:
    """The shapes of the quantised rows: name, queries `[Nq, Lq, d]`, FP16 documents."""
    torch.manual_seed(0)
    size, length = SHAPES["ColPali"]
    yield "ColPali 10K", unit(1, size, DIM), unit(COUNTS["10K"], length, DIM)
    count, size, documents, length = BATCHES[MANY]
    yield MANY, unit(count, size, DIM), unit(documents, length, DIM)
    packed, _ = ragged_corpus()
    yield RAGGED_MANY, unit(256, 32, DIM), packed


def quantised_row(kind: Literal["INT8", "FP8"], shape: str, queries: Tensor, documents: Documents, options: Options) -> Row:
    """Every kind of scale over our own FP16 on the same documents; queries are quantised inside the timed call."""
    asked = queries[0] if queries.shape[0] == 1 else queries
    values = documents.values if isinstance(documents, Packed) else documents
    assert isinstance(values, Tensor)
    tokens, rows = values.shape[:-1].numel(), queries.shape[:-1].numel()
    found = torch_rivals.ours(asked, documents, name="ours FP16", work=product(rows, tokens))
    truths: dict[str, Callable[[], Truth]] = {"float": partial(truth, queries, documents)}
    unit_name, bound = ("int8", EXACT) if kind == "INT8" else ("fp8", FP8_BOUND)
    quantise = quantize_int8 if kind == "INT8" else quantize_fp8
    coded = {granularity: quantise(documents, granularity) for granularity in GRANULARITIES}  # type: ignore[arg-type]
    if kind == "INT8":
        coded[AFFINE] = quantize_int8(documents, "token", affine=True)
    for scaled, held in coded.items():
        truths[scaled] = partial(truth, queries, held)
        numbers = held.scales.numel() * (2 if scaled == AFFINE else 1)
        work, name = product(rows, tokens, DIM, unit_name, numbers), quantised_name(kind, scaled)
        found.add(torch_rivals.ours(asked, held, name=name, bound=bound, truth=scaled, work=work))
    if isinstance(documents, Tensor):
        found.add((peers.int8 if kind == "INT8" else peers.fp8)(options.peers, asked, documents))
    about = {
        "queries": queries.shape[0],
        "query_tokens": queries.shape[1],
        "documents": len(documents),
        "tokens": tokens,
        "dim": DIM,
    }
    main = quantised_name(kind, "document")
    shape_of_scores = (queries.shape[0], len(documents))
    name = quantised_row_name(kind, shape)
    return Row(name, about, found, product(rows, tokens, DIM, unit_name, len(documents)), shape_of_scores, truths, main)


def int8(options: Options) -> Iterator[Row]:
    for name, queries, documents in quantised_inputs():
        yield quantised_row("INT8", name, queries, documents, options)
    for count in DEQUANTISED:
        yield dequantised_row(count)


def dequantised_row(documents: int) -> Row:
    """INT8 against dequantise-then-naive, the ColPali shape."""
    torch.manual_seed(0)
    size, length = SHAPES["ColPali"]
    queries, corpus = unit(1, size, DIM), unit(documents, length, DIM)
    truths: dict[str, Callable[[], Truth]] = {"float": partial(truth, queries, corpus)}
    found = Lineup([], {})
    held = {granularity: quantize_int8(corpus, granularity) for granularity in GRANULARITIES}  # type: ignore[arg-type]
    for granularity, codes in held.items():
        truths[granularity] = partial(truth, queries, codes)
        found.add(torch_rivals.ours(queries[0], codes, name=quantised_name("INT8", granularity), truth=granularity))
    found.add(torch_rivals.dequantised(queries[0], held["token"]))
    about = {"queries": 1, "query_tokens": size, "documents": documents, "document_tokens": length, "dim": DIM}
    work = product(size, documents * length, DIM, "int8", documents)
    name, main = f"INT8 or dequantise, B = {documents}", quantised_name("INT8", "document")
    return Row(name, about, found, work, (1, documents), truths, main)


def fp8(options: Options) -> Iterator[Row]:
    for name, queries, documents in quantised_inputs():
        if isinstance(documents, Tensor):
            yield quantised_row("FP8", name, queries, documents, options)


def wide(options: Options) -> Iterator[Row]:
    documents, size, length = WIDE_SHAPE
    for dim in WIDE:
        yield dense_row(f"wide, d = {dim}", (1, size, documents, length), options, MODES[:1], dim=dim)


def pairs_row(count: int, length: int, options: Options, prefix: str = "") -> Row:
    """N independent pairs of `length` x `length` tokens."""
    torch.manual_seed(0)
    queries, documents = unit(count, length, DIM), unit(count, length, DIM)
    found = torch_rivals.ours(queries, documents, pairs=True, graph=True).add(
        torch_rivals.naive(queries, documents, pairs=True)
    )
    if options.compile:
        found.add(torch_rivals.compiled(queries, documents, MODES[:2], pairs=True))
    found.add(peers.pairs(options.peers, queries, documents))
    about = {"pairs": count, "query_tokens": length, "document_tokens": length, "dim": DIM}
    name, work = f"{prefix}pairs {count} x {length}", product(length, count * length)
    return Row(name, about, found, work, (count,), {"float": partial(truth, queries, documents, pairs=True)})


def pairs(options: Options) -> Iterator[Row]:
    for count, length in PAIRS:
        yield pairs_row(count, length, options)


def host(options: Options) -> Iterator[Row]:
    """Calls bound by the host: what ours and the others cost by the host's clock."""
    for shape in ("textual", "ColPali"):
        size, length = SHAPES[shape]
        without = replace(options, compile=False)
        row = dense_row(f"host {shape} 1K", (1, size, COUNTS["1K"], length), without, graph=True)
        row.host, row.lineup.methods = True, [method for method in row.lineup.methods if _for_host(method)]
        yield row
    for count, length in PAIRS:
        row = pairs_row(count, length, options, "host ")
        row.host = True
        yield row


def _for_host(method: Method) -> bool:
    return method.kind != "baseline" or method.name in ("naive FP16", "naive FP16, amax")


GROUPS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "dense": dense,
    "many": many,
    "ragged": ragged,
    "int8": int8,
    "fp8": fp8,
    "wide": wide,
    "pairs": pairs,
    "host": host,
}
