"""Baselines by the paper's names beyond those of `torch_rivals.py`, and our own kernels forced where the choice would take another.

Baselines: the listing compiled in both precisions (padded too), textbook, scorers of PyLate and colpali-engine, every chunk size
by itself. `torch.compile` runs as the paper's protocol says: max-autotune with CUDA graphs and without, over FP16 and over FP32
accumulation (casts outside), autotuning in a process of its own. Chunks are slices of the documents; sizes of compiled chunks
divide the number of documents, so that one graph serves all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from maxsim_kernels.checks import Options, validate
from maxsim_kernels.gpu.forward.tuning import Config
from maxsim_kernels.reference import true_precision
from measure import installed
from measure.method import EXACT, LOOSE, Lineup, Method
from measure.timing import Call
from rivals import torch_rivals
from rivals.torch_rivals import too_large

GRAPHS, NO_GRAPHS = "max-autotune", "max-autotune-no-cudagraphs"
BOTH = (NO_GRAPHS, GRAPHS)
GRID = (1, 4, 16, 64, 256, 1024, 4096, 16384)  # the paper's chunk sizes
MOST_CHUNKS = 2500  # of one call: beyond, a call is nothing but launches
HALF, WIDE = "FP16", "FP32"
TEXTBOOK = "textbook FP32, cast inside"


def compiled_name(precision: str, mode: str) -> str:
    """A compiled method's name."""
    return f"compiled {precision}, {mode}"


def _own(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A copy with a code object of its own: modes that share one check each other's guards on every call."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)


def settle(subprocess: bool = True) -> None:
    """The protocol's settings of torch.compile."""
    import torch._inductor.config as settings

    settings.autotune_in_subproc = subprocess
    if hasattr(settings, "autotune_num_choices_displayed"):
        settings.autotune_num_choices_displayed = 0  # the tables stay readable


def one_padded(queries: Tensor, documents: Tensor, padding: Tensor) -> Tensor:
    """The listing for `[Lq, d]` and padded `[B, Ld, d]`, without writing in place: Inductor fuses the mask."""
    scores = torch.einsum("qd,bld->bql", queries, documents).masked_fill(padding[:, None, :], -torch.inf)
    return scores.max(2).values.sum(1)


def compiled(
    queries: Tensor,
    documents: Tensor,
    modes: tuple[str, ...] = BOTH,
    precisions: tuple[str, ...] = (HALF, WIDE),
    padding: Tensor | None = None,
) -> Lineup:
    """The listing compiled, each precision and mode a method of its own; documents are static, so that graphs do not copy them.

    Queries `[Lq, d]` or `[Nq, Lq, d]`; with `padding` `[B, Ld]` one query.
    """
    import torch._dynamo

    block, function = (
        queries,
        torch_rivals.score_queries if queries.dim() == 3 else torch_rivals.score_query if padding is None else one_padded,
    )
    cells = block.shape[:-1].numel() * documents.shape[0] * documents.shape[1]
    lineup = Lineup([], {})
    for precision in precisions:
        why = too_large(cells, 4 if precision == WIDE else 2)
        if why:
            lineup.skipped |= {compiled_name(precision, mode): why for mode in modes}
            continue
        held = (block, documents) if precision == HALF else (block.float(), documents.float())
        rest = held if padding is None else (*held, padding)
        for mode in modes:
            if mode == GRAPHS:
                for tensor in rest:
                    torch._dynamo.mark_static_address(tensor)
            run = torch.compile(_own(function), mode=mode, dynamic=False)
            lineup.methods.append(Method(compiled_name(precision, mode), "baseline", {"": partial(run, *rest)}))
    return lineup


def chunked_compiled(queries: Tensor, documents: Tensor, sizes: tuple[int, ...]) -> Lineup:
    """Chunks of documents, each scored by the compiled FP16 listing; the fastest of the sizes that divide their number."""
    entries: dict[str, Call] = {}

    def run(function: Callable[..., Tensor], size: int) -> Tensor:
        return torch.cat([function(queries, part) for part in documents.split(size)])

    for size in sizes:
        if size < documents.shape[0] and documents.shape[0] % size == 0:
            function = torch.compile(_own(torch_rivals.score_query), mode=NO_GRAPHS, dynamic=False)
            entries[f"{size} documents"] = partial(run, function, size)
    name = f"compiled chunks, {NO_GRAPHS}"
    return Lineup([Method(name, "baseline", entries)] if entries else [], {})


def chunk_name(size: int) -> str:
    """A chunk size as a method of its own."""
    return f"chunks of {size}"


def chunk_grid(queries: Tensor, documents: Tensor) -> Lineup:
    """The paper's chunk sizes one by one, FP16; `amax` is a method of its own in `rivals.chunked`."""
    lineup = Lineup([], {})
    for size in GRID:
        count = -(-documents.shape[0] // size)
        if size >= documents.shape[0]:
            lineup.skipped[chunk_name(size)] = "all documents at once: naive FP16"
        elif count > MOST_CHUNKS:
            lineup.skipped[chunk_name(size)] = f"{count} chunks of three launches each: bound by the host"
        else:
            lineup.methods.append(Method(chunk_name(size), "baseline", {"": partial(_in_chunks, queries, documents, size)}))
    return lineup


def _in_chunks(queries: Tensor, documents: Tensor, size: int) -> Tensor:
    return torch.cat([torch_rivals.score_query(queries, part) for part in documents.split(size)])


def textbook(queries: Tensor, documents: Tensor) -> Lineup:
    """The multi-query table's naive: casts to FP32 inside the call, products in true FP32."""
    block = queries if queries.dim() == 3 else queries.unsqueeze(0)
    cells = block.shape[:-1].numel() * documents.shape[0] * documents.shape[1]
    why = too_large(cells, 4)
    if why:
        return Lineup([], {TEXTBOOK: why})

    def call() -> Tensor:
        with true_precision():
            return torch_rivals.score_queries(block.float(), documents.float())

    return Lineup([Method(TEXTBOOK, "baseline", {"": call})], {})


# Scorers of the libraries that people use


def scorers(queries: Tensor, documents: Tensor) -> Lineup:
    """PyLate's and colpali-engine's scorers on the same tensors, where those import; scores stay on the device they come on."""
    block, lineup = (queries if queries.dim() == 3 else queries.unsqueeze(0)), Lineup([], {})
    made: dict[str, Callable[[Any], Call]] = {
        "PyLate": lambda module: partial(module.colbert_scores, block, documents),
        "colpali-engine": lambda module: partial(
            module.BaseVisualRetrieverProcessor.score_multi_vector, list(block), list(documents), device=documents.device
        ),
    }
    for name, make in made.items():
        module = installed.load(name)
        if isinstance(module, str):
            lineup.skipped[name] = module
        else:
            lineup.methods.append(Method(name, "peer", {"": make(module)}, LOOSE))
    return lineup


# Our own kernels, forced


def forced(queries: Tensor, documents: Tensor, kernel: str, config: Config) -> Call:
    """A launch of "general" or "tiles" with this configuration on `[Lq, d]` or `[Nq, Lq, d]` and `[B, Ld, d]`, past every choice."""
    from maxsim_kernels.gpu.forward import dense, general

    call = validate(queries, documents, Options())

    def run() -> Tensor:
        scores = torch.empty(call.query_count, call.document_count, device=documents.device)
        if kernel == "general":
            general.launch_general(call, call.queries, None, config, scores, None, False)
        else:
            dense.launch_tiles(call, call.queries, None, config, scores, None)
        return scores

    return run


def one_program_a_pair(queries: Tensor, documents: Tensor) -> Lineup:
    """A program walks all parts of a query over its documents in turn: the design without query chunks of their own."""
    name = "ours, a program a pair"
    if not queries.is_cuda:
        return Lineup([], {name: "needs a GPU"})
    from maxsim_kernels.gpu.forward.tuning import Key, configuration
    from maxsim_kernels.gpu.geometry import hardware

    config = configuration(Key("general"), hardware(queries.device).capability)
    assert config is not None  # every architecture has a row
    return Lineup([Method(name, "ours", {"": forced(queries, documents, "general", config)}, EXACT)], {})


def shared_bytes(shape: tuple[int, int, int, int], width: int) -> int:
    """What the whole-token kernel keeps in shared memory: two query tiles, and a document tile a stage."""
    rows, tokens, _, stages = shape
    return 2 * (2 * rows + tokens * stages) * (1 << (width - 1).bit_length())


def tiles(queries: Tensor, documents: Tensor, shapes: tuple[tuple[int, int, int, int], ...], name: str = "") -> Lineup:
    """The whole-token kernel with these (rows, tokens, warps, stages): each a method, or with `name` one method, the fastest.

    What cannot fit is not compiled: at d = 2048 that alone would take minutes.
    """
    if not queries.is_cuda:
        return Lineup([], {name or "tiles": "needs a GPU"})
    room, width = torch.cuda.get_device_properties(queries.device).shared_memory_per_block_optin, queries.shape[-1]
    entries: dict[str, Call] = {}
    unfit: dict[str, int] = {}
    for shape in shapes:
        rows, tokens, warps, stages = shape
        words = f"{rows} x {tokens}, {warps} warps, {stages} stages"
        if shared_bytes(shape, width) > room:
            unfit[words] = shared_bytes(shape, width)
            continue
        config = Config(rows, tokens, warps, stages, 8, "forced", "the benchmark's sweep")
        entries[words] = forced(queries, documents, "tiles", config)
    reasons = {words: f"does not fit: {size >> 10} KB of shared memory, {room >> 10} there" for words, size in unfit.items()}
    if name:
        return Lineup([Method(name, "ours", entries, EXACT)], {}) if entries else Lineup([], {name: min(reasons.values())})
    methods = [Method(f"tiles {words}", "ours", {"": call}, EXACT) for words, call in entries.items()]
    return Lineup(methods, {f"tiles {words}": why for words, why in reasons.items()})
