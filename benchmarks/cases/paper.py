"""Rows of the paper's forward tables: shapes (fwd, fwd_abs, nocg), frontier (fwd_chunked, chunked_sweep), op_abl, multiquery, varlen.

'textual' has 300 document tokens in `shapes` and `frontier`, 180 in `op_abl` and `multiquery`, as in the paper.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cases.inputs import RAGGED, SHORT, Sizes, drawn, ragged, sizes, unit
from measure.method import Lineup, Options, Row
from measure.names import SHAPES
from measure.score_truth import truth
from measure.work import Work
from rivals import paper, peers, torch_rivals
from run.campaign import Plan

OP_ABL = {"textual": 1024, "long-doc": 1024, "medium": 512, "visual": 256, "ColPali": 128}
MULTIQUERY = {"textual": 1024, "long-doc": 1024, "ColPali": 128}
QUERIES = (1, 4, 8, 16, 32)
FRONTIER = (("visual", 5000), ("visual", 10000), ("visual", 20000), ("ColPali", 5000), ("ColPali", 10000), ("ColPali", 20000))
CHUNKS = (("ColPali", 1000), ("visual", 10000), ("ColPali", 10000), ("ColPali", 20000))
COMPILED_CHUNKS = (250, 500, 1000, 2000)
COMPILED_TOO = 2  # the lineup of rows that compiled methods joined later
GRAPH_SHARE = 4
VARLEN_DOCUMENTS, VARLEN_TOKENS = 1000, 32


def cell(shape: str, documents: int) -> str:
    """A row's name."""
    return f"{shape} {documents}"


def _row(held: Sizes, lineup: Lineup, queries: object, documents: object) -> Row:
    truths = {"float": partial(truth, queries, documents)}  # type: ignore[arg-type]
    return Row("", held.about, lineup, held.work(), (held.queries, held.documents), truths)


def graph_modes(options: Options, held: Sizes) -> tuple[str, ...]:
    """Compile flavours of a row: a CUDA graph keeps its similarity tensor, which must leave room for everybody else's."""
    if options.device.type != "cuda":
        return paper.BOTH
    cells = held.queries * held.query_tokens * held.documents * held.tokens
    room = torch.cuda.get_device_properties(options.device).total_memory
    return paper.BOTH if 2 * cells <= room / GRAPH_SHARE else (paper.NO_GRAPHS,)


def compiled_half(options: Options, held: Sizes, asked: Tensor, corpus: Tensor) -> Lineup:
    """Both compile flavours over FP16, where compiled rivals are asked for."""
    if not options.compile:
        return Lineup([], {})
    modes = graph_modes(options, held)
    found = paper.compiled(asked, corpus, modes, (paper.HALF,))
    if paper.GRAPHS not in modes:
        name = paper.compiled_name(paper.HALF, paper.GRAPHS)
        found.skipped[name] = f"its CUDA graph would keep more than 1/{GRAPH_SHARE} of the GPU's memory from the others"
    return found


def compile_seconds(options: Options) -> float:
    """What `compiled_half` adds to a row."""
    return 20.0 if options.compile else 0.0


def shape_row(options: Options, shape: str, documents: int, *, compiled: bool, graph: bool) -> Row:
    """One query, one shape: ours, eager in every precision, chunked, both compile flavours in both precisions, peers."""
    held = sizes(options, SHAPES[shape], documents)
    queries, asked, corpus = drawn(options, held)
    found = torch_rivals.ours(asked, corpus, graph=graph and options.device.type == "cuda")
    found.add(torch_rivals.naive(asked, corpus)).add(torch_rivals.chunked(asked, corpus))
    if compiled and options.compile:
        found.add(paper.compiled(asked, corpus))
    found.add(peers.dense(options.peers, asked, corpus))
    if options.peers:
        found.add(paper.scorers(asked, corpus))
    return _row(held, found, queries, corpus)


def shapes(options: Options) -> list[Plan]:
    more = 45.0 if options.compile else 0.0
    return [
        Plan(cell(shape, 1000), partial(shape_row, options, shape, 1000, compiled=True, graph=True), 10 + more)
        for shape in SHAPES
    ]


def frontier_row(options: Options, shape: str, documents: int) -> Row:
    """Large candidate sets: FP16 eager whole and in chunks, compiled, and (10K) chunks compiled."""
    held = sizes(options, SHAPES[shape], documents)
    queries, asked, corpus = drawn(options, held)
    found = torch_rivals.ours(asked, corpus)
    found.add(torch_rivals.naive(asked, corpus)).add(torch_rivals.chunked(asked, corpus))
    found.add(compiled_half(options, held, asked, corpus))
    if options.compile and documents == 10000:
        found.add(paper.chunked_compiled(asked, corpus, COMPILED_CHUNKS))
    found.add(peers.dense(options.peers, asked, corpus))
    return _row(held, found, queries, corpus)


def frontier(options: Options) -> list[Plan]:
    more = compile_seconds(options)

    def seconds(count: int) -> float:
        return 12 + count / 1000 + more + (1.5 * more if count == 10000 else 0)

    return [
        Plan(cell(shape, count), partial(frontier_row, options, shape, count), seconds(count), COMPILED_TOO)
        for shape, count in FRONTIER
    ]


def chunks_row(options: Options, shape: str, documents: int) -> Row:
    """The paper's grid of chunk sizes, one by one."""
    held = sizes(options, SHAPES[shape], documents)
    queries, asked, corpus = drawn(options, held)
    found = torch_rivals.ours(asked, corpus).add(paper.chunk_grid(asked, corpus))
    return _row(held, found, queries, corpus)


def chunks(options: Options) -> list[Plan]:
    return [Plan(cell(shape, count), partial(chunks_row, options, shape, count), 12 + count / 1000) for shape, count in CHUNKS]


def op_abl_row(options: Options, shape: str) -> Row:
    """Naive at matched precision, a program a pair, and the kernel that cuts queries into tiles of their own programs."""
    held = sizes(options, SHORT[shape], OP_ABL[shape])
    queries, asked, corpus = drawn(options, held)
    found = torch_rivals.ours(asked, corpus).add(paper.one_program_a_pair(asked, corpus))
    found.add(torch_rivals.naive(asked, corpus)).add(torch_rivals.chunked(asked, corpus))
    found.add(compiled_half(options, held, asked, corpus)).add(peers.dense(options.peers, asked, corpus))
    return _row(held, found, queries, corpus)


def op_abl(options: Options) -> list[Plan]:
    seconds = 8 + compile_seconds(options)
    return [
        Plan(cell(shape, count), partial(op_abl_row, options, shape), seconds, COMPILED_TOO) for shape, count in OP_ABL.items()
    ]


def multiquery_name(shape: str, queries: int) -> str:
    """A row's name."""
    return f"{shape} {MULTIQUERY[shape]}, {queries} queries"


def multiquery_row(options: Options, shape: str, queries: int) -> Row:
    """Several queries at once against one corpus, the textbook naive with its casts inside the call."""
    held = sizes(options, SHORT[shape], MULTIQUERY[shape], queries)
    block, asked, corpus = drawn(options, held)
    found = torch_rivals.ours(asked, corpus).add(paper.textbook(asked, corpus))
    found.add(torch_rivals.naive(asked, corpus)).add(torch_rivals.chunked(asked, corpus))
    found.add(compiled_half(options, held, asked, corpus)).add(peers.dense(options.peers, asked, corpus))
    return _row(held, found, block, corpus)


def multiquery(options: Options) -> list[Plan]:
    seconds = 8 + compile_seconds(options)
    return [
        Plan(multiquery_name(shape, count), partial(multiquery_row, options, shape, count), seconds, COMPILED_TOO)
        for shape in MULTIQUERY
        for count in QUERIES
    ]


def varlen_row(options: Options, kind: str) -> Row:
    """Packed documents against everything that pads them, the compiled padded listing too."""
    packed, padded, held, padding = ragged(options, kind, VARLEN_DOCUMENTS)
    tokens, dim = packed.values.shape
    queries = unit(options.device, 1, 16 if options.smoke else VARLEN_TOKENS, dim)
    asked = queries[0]
    found = torch_rivals.ours(asked, packed)
    found.add(torch_rivals.naive(asked, padded, padding=padding)).add(torch_rivals.chunked(asked, padded, padding))
    if options.compile:
        found.add(paper.compiled(asked, padded, padding=padding))
    found.add(peers.ragged(options.peers, queries, packed, padded, held))
    longest = padded.shape[1]
    about = {
        "queries": 1,
        "query_tokens": queries.shape[1],
        "documents": len(packed),
        "tokens": tokens,
        "longest": longest,
        "mean_tokens": tokens / len(packed),
        "fill": tokens / (len(packed) * longest),
        "dim": dim,
    }
    work = Work(2.0 * queries.shape[1] * tokens * dim, 2.0 * tokens * dim)
    return Row("", about, found, work, (1, len(packed)), {"float": partial(truth, queries, packed)})


def varlen(options: Options) -> list[Plan]:
    return [Plan(kind, partial(varlen_row, options, kind), 40 if options.compile else 8) for kind in RAGGED]
