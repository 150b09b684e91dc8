"""What our calls are compared with: the plain and compiled torch baselines.

"naive FP16" is the paper's listing (`einsum`, `max(...).values`, `sum`); "amax" is the same without indices. "FP32 accumulation" is the
paper's matched precision: casts to FP32 outside the timed call, products in TF32. "chunked" is the deployed workaround, the best of
several chunk sizes. A baseline whose similarity tensor would need more than 60 GB is skipped and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType

import torch
from torch import Tensor

from maxsim_kernels import Int8Tokens, explain, maxsim, maxsim_pairs
from measure.method import EXACT, INT8_LOOSE, Lineup, Method
from measure.score_truth import Documents
from measure.timing import Call, Graphed
from measure.work import Work

CHUNKS = (64, 256, 1024)
LARGEST = 60e9  # bytes of a similarity tensor
MODES = ("default", "max-autotune-no-cudagraphs", "max-autotune")


def ours(
    queries: Tensor,
    documents: Documents,
    *,
    name: str = "ours",
    pairs: bool = False,
    bound: float = EXACT,
    truth: str = "float",
    work: Work | None = None,
    graph: bool = False,
) -> Lineup:
    """Our public call on these inputs; with `graph` also captured in a CUDA graph. Skipped where no fused kernel would run."""
    says = explain(queries, documents, pairs=pairs).splitlines()[0]
    if says.startswith("reference"):
        return Lineup([], {name: f"no fused kernel ({says})"})
    scorer = maxsim_pairs if pairs else maxsim

    call: Call = partial(scorer, queries, documents)  # type: ignore[assignment]
    methods = [Method(name, "ours", {"": call}, bound, truth, work, says)]
    if graph:
        methods.append(Method(f"{name}, CUDA graph", "ours", {"": Graphed(call)}, bound, truth, work, says))
    return Lineup(methods, {})


def score_query(queries: Tensor, documents: Tensor) -> Tensor:
    """The listing for `[Lq, d]` and `[B, Ld, d]`: `[B]`."""
    return torch.einsum("qd,bld->bql", queries, documents).max(2).values.sum(1)


def score_query_amax(queries: Tensor, documents: Tensor) -> Tensor:
    """The same without indices."""
    return torch.einsum("qd,bld->bql", queries, documents).amax(2).sum(1)


def score_queries(queries: Tensor, documents: Tensor, padding: Tensor | None = None) -> Tensor:
    """The listing for `[Nq, Lq, d]` and `[B, Ld, d]`: `[Nq, B]`; `padding` `[B, Ld]` is True where there is no token."""
    scores = torch.einsum("qid,bjd->qbij", queries, documents)
    if padding is not None:
        scores.masked_fill_(padding[None, :, None, :], -torch.inf)
    return scores.max(3).values.sum(2)


def score_queries_amax(queries: Tensor, documents: Tensor, padding: Tensor | None = None) -> Tensor:
    """The same without indices."""
    scores = torch.einsum("qid,bjd->qbij", queries, documents)
    if padding is not None:
        scores.masked_fill_(padding[None, :, None, :], -torch.inf)
    return scores.amax(3).sum(2)


def score_pairs(queries: Tensor, documents: Tensor) -> Tensor:
    """The listing for N pairs, `[N, Lq, d]` and `[N, Ld, d]`: `[N]`."""
    return torch.einsum("nid,njd->nij", queries, documents).max(2).values.sum(1)


def score_pairs_amax(queries: Tensor, documents: Tensor) -> Tensor:
    """The same without indices."""
    return torch.einsum("nid,njd->nij", queries, documents).amax(2).sum(1)


def too_large(cells: int, size: int) -> str:
    """Why a similarity tensor of `cells` values of `size` bytes is not made; empty when it is."""
    needed = cells * size
    return f"its similarity tensor would need {needed / 1e9:.0f} GB" if needed > LARGEST else ""


def naive(queries: Tensor, documents: Tensor, *, pairs: bool = False, padding: Tensor | None = None) -> Lineup:
    """Naive FP16 in both forms and naive FP32 accumulation; queries `[Lq, d]`, `[Nq, Lq, d]` or pairs."""
    single = queries.dim() == 2
    cells = queries.shape[:-1].numel() * (1 if pairs else documents.shape[0]) * documents.shape[1]
    listing: Callable[..., Tensor] = score_pairs if pairs else score_query if single and padding is None else score_queries
    amax: Callable[..., Tensor] = (
        score_pairs_amax if pairs else score_query_amax if single and padding is None else score_queries_amax
    )
    block = queries.unsqueeze(0) if single and padding is not None else queries
    rest = () if padding is None else (padding,)
    lineup = Lineup([], {})
    for name, function in (("naive FP16", listing), ("naive FP16, amax", amax)):
        reason = too_large(cells, 2)
        if reason:
            lineup.skipped[name] = reason
        else:
            lineup.methods.append(Method(name, "baseline", {"": partial(function, block, documents, *rest)}))
    name, reason = "naive FP32 accumulation", too_large(cells, 4)
    if reason:
        lineup.skipped[name] = reason
    else:
        lineup.methods.append(Method(name, "baseline", {"": partial(listing, block.float(), documents.float(), *rest)}))
    return lineup


def chunked(queries: Tensor, documents: Tensor, padding: Tensor | None = None) -> Lineup:
    """Chunks of documents, FP16, the fastest of both forms and several sizes."""
    single = queries.dim() == 2 and padding is None
    block = queries if single or queries.dim() == 3 else queries.unsqueeze(0)
    forms: dict[str, Callable[..., Tensor]] = (
        {"max": score_query, "amax": score_query_amax} if single else {"max": score_queries, "amax": score_queries_amax}
    )

    def run(form: Callable[..., Tensor], size: int) -> Tensor:
        parts = []
        for first in range(0, documents.shape[0], size):
            rest = () if padding is None else (padding[first : first + size],)
            parts.append(form(block, documents[first : first + size], *rest))
        return torch.cat(parts, -1)

    entries: dict[str, Call] = {
        f"{size} documents, {name}": partial(run, form, size)
        for size in CHUNKS
        if size < documents.shape[0]
        for name, form in forms.items()
    }
    return Lineup([Method("chunked FP16", "baseline", entries)] if entries else [], {})


def compiled(queries: Tensor, documents: Tensor, modes: tuple[str, ...], *, pairs: bool = False) -> Lineup:
    """torch.compile of the naive FP16 listing; the documents are marked static, so that CUDA graphs do not copy them each call."""
    function = score_pairs if pairs else score_query if queries.dim() == 2 else score_queries
    import torch._dynamo
    import torch._inductor.config as settings

    if hasattr(settings, "autotune_num_choices_displayed"):
        settings.autotune_num_choices_displayed = 0  # the tables stay readable
    lineup = Lineup([], {})
    for mode in modes:
        if mode == "max-autotune":
            torch._dynamo.mark_static_address(documents)
        # A code object of its own: modes that share one check each other's guards on every call.
        own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
        run = torch.compile(own, mode=mode, dynamic=False)
        lineup.methods.append(Method(f"compiled FP16, {mode}", "baseline", {"": partial(run, queries, documents)}))
    return lineup


def dequantised(queries: Tensor, documents: Int8Tokens) -> Lineup:
    """Dequantise INT8 documents `[B, Ld, d]` (token scale), then naive: to FP32 (the paper's), to FP16, and in chunks."""
    codes, scales = documents.codes, documents.scales.unsqueeze(-1)
    assert isinstance(codes, Tensor)
    cells, wide = queries.shape[0] * codes.shape[0] * codes.shape[1], queries.float()

    def in_chunks(size: int) -> Tensor:
        starts = range(0, codes.shape[0], size)
        return torch.cat([score_query_amax(queries, codes[n : n + size].half() * scales[n : n + size]) for n in starts])

    lineup = Lineup([], {})
    whole: tuple[tuple[str, int, Call], ...] = (
        ("dequantise to FP32, naive", 4, lambda: score_query(wide, codes.float() * scales.float())),
        ("dequantise to FP16, naive", 2, lambda: score_query(queries, codes.half() * scales)),
        ("dequantise to FP16, amax", 2, lambda: score_query_amax(queries, codes.half() * scales)),
    )
    for name, size, call in whole:
        reason = too_large(cells, size)
        if reason:
            lineup.skipped[name] = reason
        else:
            lineup.methods.append(Method(name, "baseline", {"": call}, INT8_LOOSE))
    sizes = [size for size in CHUNKS if size < codes.shape[0]]
    if sizes:
        entries: dict[str, Call] = {f"{size} documents": partial(in_chunks, size) for size in sizes}
        lineup.methods.append(Method("dequantise to FP16, chunked", "baseline", entries, INT8_LOOSE))
    return lineup
