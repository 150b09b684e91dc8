"""How close scores are: error, rank correlation and top-k overlap against FP64 over all documents; the paper's table of precisions.

FP64 is computed where the tensors lie, by `maxsim_reference`, which shares nothing with a fused path. `own` compares with FP64 on the
very inputs a path got (rounded to BF16, say): what its arithmetic loses. `true` compares with FP64 on the FP32 tokens before any
rounding: what a user loses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cases.inputs import Sizes, sizes, unit
from maxsim_kernels import maxsim, maxsim_reference, quantize_int8
from maxsim_kernels.reference import true_precision
from measure.method import Options
from measure.names import SHAPES
from measure.session import reason
from measure.timing import Call
from results.paper_file import Findings
from rivals import paper, torch_rivals
from run.campaign import Plan

PRECISION = ("textual", "ColPali")
DOCUMENTS = 1000
TOPS = (20, 50)


def ranks(scores: Tensor) -> Tensor:
    """Average ranks `[N]` (ties share one), FP64."""
    from scipy.stats import rankdata

    return torch.from_numpy(rankdata(scores.cpu().numpy()))


def spearman(scores: Tensor, truth: Tensor) -> float | None:
    """Rank correlation of two `[N]`; None where one is constant."""
    left, right = (ranks(one.double()) for one in (scores, truth))
    left, right = left - left.mean(), right - right.mean()
    norm = float(left.norm() * right.norm())
    return float((left * right).sum()) / norm if norm else None


def top(scores: Tensor, count: int) -> set[int]:
    """The best documents: score descending, then index ascending."""
    order = torch.sort(-scores.double().cpu(), stable=True).indices
    return set(order[:count].tolist())


def overlap(scores: Tensor, truth: Tensor, count: int) -> float:
    """Share of the true best documents that are among the found ones."""
    count = min(count, truth.numel())
    return len(top(scores, count) & top(truth, count)) / count


def exact(queries: Tensor, documents: Any) -> Tensor:
    """FP64 scores `[N]` of one query against documents in any holding, on their device."""
    found = maxsim_reference(queries, documents, dtype=torch.float64)
    assert isinstance(found, Tensor)
    return found.reshape(-1)


def quality(scores: Tensor, truth: Tensor) -> Findings:
    """Error and ranking of `[N]` scores against FP64 ones."""
    scores = scores.detach().reshape(-1).double()
    difference = (scores - truth).abs()
    found: Findings = {
        "max_error": float(difference.max()),
        "max_relative_error": float((difference / truth.abs()).max()),
        "spearman": spearman(scores, truth),
    }
    return found | {f"top{count}": overlap(scores, truth, count) for count in TOPS}


def ranked(queries: Tensor, documents: Any, calls: dict[str, Call]) -> Findings:
    """`quality` of every call against FP64 on the unquantised inputs, as findings of a row."""
    truth = exact(queries, documents)
    return {"quality": {name: quality(call(), truth) for name, call in calls.items()}}


# The table of precisions


def paths(queries: Tensor, documents: Tensor, options: Options) -> dict[str, tuple[Callable[[], Tensor], Any]]:
    """Every row of the paper's protocol table: a call, and the inputs that FP64 gets for it. Tokens come in FP32."""
    half, brief = (queries.half(), documents.half()), (queries.bfloat16(), documents.bfloat16())
    wide = (half[0].float(), half[1].float())
    codes = {kind: quantize_int8(half[1], kind) for kind in ("token", "document", "corpus")}  # type: ignore[arg-type]

    def true_listing() -> Tensor:
        with true_precision():
            return torch_rivals.score_query(*wide)

    def true_ours() -> Tensor:
        with true_precision():
            return maxsim(queries, documents)  # type: ignore[return-value]

    made: dict[str, tuple[Callable[[], Tensor], Any]] = {
        "naive FP32 accumulation": (partial(torch_rivals.score_query, *wide), half),
        "naive FP16": (partial(torch_rivals.score_query, *half), half),
        "naive BF16": (partial(torch_rivals.score_query, *brief), brief),
        "FP32 reference, TF32 off": (true_listing, half),
        "ours FP16": (lambda: maxsim(*half), half),  # type: ignore[dict-item,return-value]
        "ours BF16": (lambda: maxsim(*brief), brief),  # type: ignore[dict-item,return-value]
        "ours FP32, TF32 off": (true_ours, (queries, documents)),
        "ours FP32, TF32 allowed": (lambda: maxsim(queries, documents), (queries, documents)),  # type: ignore[dict-item,return-value]
    }
    for kind, held in codes.items():
        made[f"ours INT8, {kind} scale"] = (partial(maxsim, half[0], held), (half[0], held))  # type: ignore[arg-type]
    if options.compile:
        for method in paper.compiled(*half, modes=(paper.GRAPHS,)).methods:
            made[method.name] = (method.entries[""], half)
    return made


def precision_row(options: Options, shape: str) -> Findings:
    """Errors and rankings of one shape; nothing is timed."""
    held: Sizes = sizes(options, SHAPES[shape], DOCUMENTS)
    torch.manual_seed(0)
    queries = unit(options.device, held.query_tokens, held.dim, dtype=torch.float32)
    documents = unit(options.device, held.documents, held.tokens, held.dim, dtype=torch.float32)
    true = exact(queries, documents)
    found: dict[str, Findings] = {}
    for name, (call, inputs) in paths(queries, documents, options).items():
        try:
            for _ in range(3 if name.startswith("compiled") else 1):
                scores = call().clone()
            found[name] = {"own": quality(scores, exact(*inputs)), "true": quality(scores, true)}
        except RuntimeError as problem:
            found[name] = {"failed": reason(problem)}
    return {"shape": held.about, "paths": found}


def precision(options: Options) -> list[Plan]:
    return [Plan(shape, partial(precision_row, options, shape), 25 if options.compile else 10) for shape in PRECISION]
