"""Rows of the paper's INT8 tables: int8 (five shapes) and int8_B (ColPali, 128 to 10,000 documents), with rankings against FP64.

'naive' is FP32 accumulation (TF32) with its casts outside; dequantise-then-naive makes the FP32 documents inside the call. Queries are
quantised inside the call where ours takes codes, documents outside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from cases.inputs import SHORT, drawn, sizes
from cases.paper import COMPILED_TOO, OP_ABL, cell, compile_seconds, compiled_half
from cases.quality import ranked
from maxsim_kernels import Int8Tokens, quantize_int8
from measure.method import Options, Row
from measure.names import GRANULARITIES, quantised_name
from measure.score_truth import Truth, truth
from measure.timing import Call
from results.paper_file import Findings
from rivals import paper, peers, torch_rivals
from run.campaign import Plan

SWEEP = (128, 256, 512, 1024, 2048, 4096, 10000)
HALF, NAIVE = "ours FP16", "naive FP32 accumulation"


def storage(held: Int8Tokens) -> int:
    """Bytes of codes and scales."""
    codes = held.codes
    assert isinstance(codes, torch.Tensor)
    return codes.numel() * codes.element_size() + held.scales.numel() * held.scales.element_size()


def int8_row(options: Options, shape: str, documents: int) -> Row:
    """INT8 at every granularity, FP16, naive, compiled FP16, dequantise first, the peer's INT8."""
    held = sizes(options, SHORT[shape], documents)
    queries, asked, corpus = drawn(options, held)
    codes = {kind: quantize_int8(corpus, kind) for kind in GRANULARITIES}  # type: ignore[arg-type]
    truths: dict[str, Callable[[], Truth]] = {"float": partial(truth, queries, corpus)}
    found = torch_rivals.ours(asked, corpus, name=HALF, work=held.work())
    for kind, tokens in codes.items():
        truths[kind] = partial(truth, queries, tokens)
        work = held.work("int8", tokens.scales.numel())
        found.add(torch_rivals.ours(asked, tokens, name=quantised_name("INT8", kind), truth=kind, work=work))
    found.add(torch_rivals.naive(asked, corpus)).add(torch_rivals.chunked(asked, corpus)).add(
        torch_rivals.dequantised(asked, codes["token"])
    )
    found.add(compiled_half(options, held, asked, corpus)).add(peers.int8(options.peers, asked, corpus))
    stored = {kind: storage(tokens) for kind, tokens in codes.items()} | {"FP16": corpus.numel() * corpus.element_size()}

    def more(calls: dict[str, Call]) -> Findings:
        kept = {name: call for name, call in calls.items() if name.startswith("ours") or "INT8" in name}
        return {"stored_bytes": stored, **ranked(asked, corpus, kept)}

    main, work = quantised_name("INT8", "token"), held.work("int8", held.documents * held.tokens)
    return Row("", held.about, found, work, (1, held.documents), truths, main, more=more)


def int8(options: Options) -> list[Plan]:
    seconds = 9 + compile_seconds(options)
    return [
        Plan(cell(shape, count), partial(int8_row, options, shape, count), seconds, COMPILED_TOO)
        for shape, count in OP_ABL.items()
    ]


def int8_sweep(options: Options) -> list[Plan]:
    seconds = 9 + compile_seconds(options)
    return [
        Plan(cell("ColPali", count), partial(int8_row, options, "ColPali", count), seconds + count / 700, COMPILED_TOO)
        for count in SWEEP
    ]


# Wide embeddings

DIMS = (128, 256, 384, 512, 768, 1024, 2048, 4096)
WIDE_DOCUMENTS = 128
ONE_SHOT = "ours, whole tokens in one tile"
# Small enough for d = 512 to 1024; `paper.tiles` leaves out those that a multiprocessor cannot hold.
WHOLE = ((128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1))


def wide_row(options: Options, dim: int) -> Row:
    """What our choice takes (split-d above 128), the whole-token kernel forced at every d, eager, peers."""
    held = sizes(options, SHORT["ColPali"], WIDE_DOCUMENTS, dim=dim)
    queries, asked, corpus = drawn(options, held)
    found = torch_rivals.ours(asked, corpus).add(paper.tiles(asked, corpus, WHOLE, ONE_SHOT))
    found.add(paper.one_program_a_pair(asked, corpus))
    found.add(torch_rivals.naive(asked, corpus)).add(torch_rivals.chunked(asked, corpus))
    if options.compile:
        found.add(paper.compiled(asked, corpus, (paper.NO_GRAPHS,), (paper.HALF,)))
    found.add(peers.dense(options.peers, asked, corpus))
    return Row("", held.about, found, held.work(), (1, held.documents), {"float": partial(truth, queries, corpus)})


def wide(options: Options) -> list[Plan]:
    return [Plan(f"d = {dim}", partial(wide_row, options, dim), 25 if options.compile else 15) for dim in DIMS]


# Flatness of the tile table

TILES = tuple(
    (rows, tokens, warps, stages) for rows in (64, 128) for tokens in (64, 128) for warps in (4, 8) for stages in (2, 3, 4)
)


def tiles_row(options: Options, documents: int) -> Row:
    """The whole-token kernel with neighbours of its row in the table."""
    held = sizes(options, SHORT["ColPali"], documents)
    queries, asked, corpus = drawn(options, held)
    found = torch_rivals.ours(asked, corpus).add(paper.tiles(asked, corpus, TILES))
    return Row("", held.about, found, held.work(), (1, held.documents), {"float": partial(truth, queries, corpus)})


def tile_sweep(options: Options) -> list[Plan]:
    return [Plan(cell("ColPali", 1000), partial(tiles_row, options, 1000), 60)]
