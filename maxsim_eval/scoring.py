"""Scoring paths: how token embeddings become scores, and the loop that runs one path over a corpus.

`PATHS` maps a path's name to how it prepares tokens. `fp32` is the independent reference of `maxsim_kernels`; every other path is the
fused operator on cast or quantised tokens. A path sees the corpus block by block and must give the same scores for every cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from maxsim_eval.errors import DataError, UnknownNameError
from maxsim_eval.selection import Documents
from maxsim_eval.types import Run
from maxsim_kernels import Packed, maxsim, maxsim_reference, quantize_fp8, quantize_int8
from maxsim_kernels.topk import TopK

BLOCK_BYTES = 32 << 20
_FP16_MAX = 65504.0


@dataclass
class Corpus:
    """What a path may ask of the whole corpus before the first block: found once, on demand, by one pass."""

    entry: Documents
    quiet: bool = False
    _absmax: float | None = field(default=None, init=False)

    def absmax(self) -> float:
        """Largest magnitude of any token component."""
        if self._absmax is None:
            largest = 0.0
            for block in tqdm(
                self.entry.blocks(BLOCK_BYTES), desc="corpus scale", unit="block", disable=self.quiet, leave=False
            ):
                if block.values.numel():
                    largest = max(largest, float(block.values.abs().max()))
            self._absmax = largest
        return self._absmax


@dataclass(frozen=True)
class ScoringPath:
    """One way to score: `prepare` casts or quantises a block of documents, `queries` the queries, `score` multiplies."""

    description: str
    queries: Callable[[Packed], Packed]
    documents: Callable[[Packed, Corpus], object]
    score: Callable[..., object]


def _cast(dtype: torch.dtype) -> Callable[[Packed], Packed]:
    def cast(tokens: Packed) -> Packed:
        if dtype == torch.float16 and tokens.dtype != dtype and tokens.values.numel():
            largest = float(tokens.values.abs().max())
            if largest > _FP16_MAX:
                raise DataError(f"embeddings: a component of {largest:g} does not fit FP16 (at most {_FP16_MAX:g}); use bf16")
        return tokens.to(dtype)

    return cast


def _fused(dtype: torch.dtype, description: str) -> ScoringPath:
    cast = _cast(dtype)
    return ScoringPath(description, cast, lambda block, _: cast(block), maxsim)


def _int8(granularity: str, description: str) -> ScoringPath:
    def documents(block: Packed, corpus: Corpus) -> object:
        scale = None
        if granularity == "corpus":  # the scale that quantising the whole corpus at once would find
            scale = quantize_int8(torch.tensor([[corpus.absmax()]]), "corpus").scales
        return quantize_int8(block, granularity, scale=scale)  # type: ignore[arg-type]

    return ScoringPath(description, _cast(torch.float32), documents, maxsim)


_CODES = "INT8 queries (one scale a token), exact integer products, scales after the product"
PATHS: dict[str, ScoringPath] = {
    "fp32": ScoringPath(
        "independent reference: plain chunked torch in FP32, TF32 off",
        _cast(torch.float32),
        lambda block, _: block.to(torch.float32),
        maxsim_reference,
    ),
    "fused-fp32": _fused(torch.float32, "fused operator, FP32 inputs"),
    "fp16": _fused(torch.float16, "fused operator, FP16 inputs, FP32 accumulation"),
    "bf16": _fused(torch.bfloat16, "fused operator, BF16 inputs, FP32 accumulation"),
    "int8": _int8("token", f"INT8 documents, one scale a token; {_CODES}"),
    "int8-document": _int8("document", f"INT8 documents, one scale a document; {_CODES}"),
    "int8-corpus": _int8("corpus", f"INT8 documents, one scale for the corpus; {_CODES}"),
    "fp8": ScoringPath(
        "FP8 (e4m3) documents, one scale a document; FP8 queries (one scale a token), FP32 accumulation",
        _cast(torch.float32),
        lambda block, _: quantize_fp8(block),
        maxsim,
    ),
}
REFERENCE = "fp32"


def check_paths(names: Sequence[str]) -> tuple[str, ...]:
    """The named paths without repeats, reference first; unknown names raise `UnknownNameError`."""
    for name in names:
        if name not in PATHS:
            raise UnknownNameError("path", name, PATHS)
    ordered = dict.fromkeys(names)
    return tuple(sorted(ordered, key=lambda name: name != REFERENCE))


@dataclass(frozen=True)
class Scored:
    """One path's outcome: top-k `[Nq, k]` (score descending, index ascending; -1 where short) and where the time went."""

    scores: np.ndarray
    indices: np.ndarray
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """What every path of one evaluation shares.

    `excluded[q]` is the index of the document that query q must not retrieve (-1: none). `kept_rows` are the queries whose full
    score rows are kept for parity, in order.
    """

    query_ids: Sequence[str]
    document_ids: Sequence[str]
    k: int
    excluded: np.ndarray
    kept_rows: np.ndarray
    device: str = "cpu"
    quiet: bool = False


def score_path(name: str, queries: Packed, corpus: Corpus, plan: Plan, kept: np.ndarray | None) -> Scored:
    """Run one path over the corpus.

    Args:
        queries: the queries' tokens, as stored.
        kept: `[len(plan.kept_rows), N]` float32, filled with the kept rows' scores (-inf: not retrieved); None keeps nothing.

    Raises:
        DataError: a NaN score, named by query and document.
    """
    path = PATHS[name]
    prepared_queries = path.queries(queries).to(plan.device)
    best = TopK(len(queries), plan.k, plan.device)
    seconds = {"read": 0.0, "prepare": 0.0, "score": 0.0, "topk": 0.0}
    started = time.perf_counter()
    rows = torch.from_numpy(plan.kept_rows)
    clock = _Clock(seconds)
    with tqdm(total=corpus.entry.documents, desc=name, unit="doc", disable=plan.quiet, leave=False) as bar:
        for block in corpus.entry.blocks(BLOCK_BYTES):
            clock.lap("read")
            documents = _prepared(name, path, block.to(plan.device), corpus)
            clock.lap("prepare")
            scores = path.score(prepared_queries, documents)
            assert isinstance(scores, Tensor)
            clock.lap("score")
            first, stop = best.seen, best.seen + len(block)
            _check(scores, plan, first, name)
            _exclude(scores, plan.excluded, first, stop)
            if kept is not None:
                kept[:, first:stop] = scores[rows].cpu().numpy()
            best.add(scores)
            clock.lap("topk")
            bar.update(len(block))
    seconds["total"] = time.perf_counter() - started
    return Scored(best.scores.cpu().numpy(), best.indices.cpu().numpy(), seconds)


def _prepared(name: str, path: ScoringPath, block: Packed, corpus: Corpus) -> object:
    try:
        return path.documents(block, corpus)
    except ValueError as error:  # values that no scale can hold
        raise DataError(f"path {name}: {corpus.entry.folder}: {error}") from error


class _Clock:
    """Adds the time since the last lap to a named total."""

    def __init__(self, totals: dict[str, float]) -> None:
        self.totals = totals
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.totals[name] += now - self.last
        self.last = now


def _check(scores: Tensor, plan: Plan, first: int, name: str) -> None:
    bad = torch.isnan(scores)
    if bool(bad.any()):
        query, document = bad.nonzero()[0].tolist()
        raise DataError(
            f"path {name}: NaN score for query {plan.query_ids[query]!r} and document "
            f"{plan.document_ids[first + document]!r}; the embeddings must be finite"
        )


def _exclude(scores: Tensor, excluded: np.ndarray, first: int, stop: int) -> None:
    for query in np.flatnonzero((excluded >= first) & (excluded < stop)):
        scores[query, int(excluded[query]) - first] = -torch.inf


def to_run(name: str, scored: Scored, plan: Plan) -> Run:
    """Name the documents of a top-k; -inf entries are not retrieved."""
    rankings = {}
    for row, query in enumerate(plan.query_ids):
        found = scored.indices[row] >= 0
        documents = (plan.document_ids[index] for index in scored.indices[row][found])
        rankings[query] = list(zip(documents, scored.scores[row][found].tolist(), strict=True))
    return Run(name, rankings, ordered=True)
