"""Deliberately damaged scoring paths: each must be caught by the gate, and the sound ones beside them must pass.

Scores come from ragged token embeddings with planted relevant documents; every damage is a bug seen in real scorers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from maxsim_eval.comparison.metrics import evaluate_run, means
from maxsim_eval.comparison.parity import compare
from maxsim_eval.gate.checking import baseline_of, check, passed
from maxsim_eval.types import PathResult, Result, Run

QUERIES, DOCUMENTS, QUERY_TOKENS, DIM, K = 60, 400, 32, 64, 100


@dataclass(frozen=True)
class Collection:
    queries: Tensor  # [60 * 32, 64]
    documents: Tensor  # [tokens, 64], documents of 1 to 12 tokens one after the other: short, so negative maxima occur
    starts: np.ndarray  # [400] first token of every document
    lengths: np.ndarray  # [400]
    qrels: dict[str, dict[str, int]]


def make_collection() -> Collection:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 13, (DOCUMENTS,), generator=random).numpy()
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    documents = torch.randn(int(lengths.sum()), DIM, generator=random)
    # Every query is noisy copies of one document's tokens.
    picks = torch.rand(QUERIES, QUERY_TOKENS, generator=random).numpy()
    tokens = documents[torch.from_numpy((starts[:QUERIES, None] + picks * lengths[:QUERIES, None]).astype(np.int64))]
    queries = (tokens + torch.randn(tokens.shape, generator=random)).reshape(-1, DIM)
    qrels = {f"q{number}": {f"d{number}": 1} for number in range(QUERIES)}
    normalize = torch.nn.functional.normalize
    return Collection(normalize(queries, dim=-1), normalize(documents, dim=-1), starts, lengths, qrels)


def same(tokens: Tensor) -> Tensor:
    return tokens


def rounded(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tokens: tokens.to(dtype).float()


def int8(tokens: Tensor) -> Tensor:
    scale = (tokens.abs().amax(-1, keepdim=True) / 127).half().float()
    return (tokens / scale).round().clamp(-127, 127) * scale


def total(maxima: Tensor) -> Tensor:
    """Sum over query tokens in float64: maxima `[queries, 32, documents]` -> `[queries, documents]`."""
    return maxima.double().sum(1).float()


def bf16_total(maxima: Tensor) -> Tensor:
    """A running sum that is rounded to BF16 after every query token."""
    running = torch.zeros_like(maxima[:, 0], dtype=torch.bfloat16)
    for row in maxima.to(torch.bfloat16).unbind(1):
        running = running + row
    return running.float()


def score(
    collection: Collection,
    change: Callable[[Tensor], Tensor] = same,
    add: Callable[[Tensor], Tensor] = total,
    *,
    zero_padding: bool = False,
    bf16_similarities: bool = False,
) -> np.ndarray:
    """MaxSim scores `[queries, documents]` with inputs changed, sums added and defects switched on as asked."""
    similarities = change(collection.queries) @ change(collection.documents).T
    if bf16_similarities:
        similarities = similarities.to(torch.bfloat16).float()
    maxima = np.maximum.reduceat(similarities.numpy(), collection.starts, axis=1)
    if zero_padding:
        maxima = np.where(collection.lengths < collection.lengths.max(), np.maximum(maxima, 0), maxima)
    return add(torch.from_numpy(maxima).reshape(QUERIES, QUERY_TOKENS, DOCUMENTS)).numpy()


def path_of(collection: Collection, name: str, scores: np.ndarray) -> tuple[PathResult, Run]:
    order = np.argsort(-scores, axis=1, kind="stable")[:, :K]
    run = Run(name, {f"q{row}": [(f"d{c}", float(scores[row, c])) for c in columns] for row, columns in enumerate(order)})
    per_query = evaluate_run(run, collection.qrels)
    return PathResult(means(per_query), per_query, {}), run


@pytest.fixture(scope="module")
def collection() -> Collection:
    return make_collection()


def failures(collection: Collection, name: str, scores: np.ndarray) -> list[str]:
    """What the gate says of one path against the sound reference."""
    truth = score(collection)
    reference, reference_run = path_of(collection, "fp32", truth)
    path, run = path_of(collection, name, scores)
    parity = compare(reference, path, reference_run, run, reference_scores=truth, scores=scores, k=K)
    result = Result(
        task={"source": "test", "dataset": "planted", "split": "test", "queries": QUERIES, "documents": DOCUMENTS},
        encoder={"name": "random", "revision": "0", "dim": DIM},
        k=K,
        paths={"fp32": reference, name: PathResult(path.metrics, path.per_query, {}, parity=parity)},
        environment={},
        command=[],
    )
    findings = check(result, baseline_of(result))
    assert passed(findings) == all(finding.ok for finding in findings)
    return [finding.what for finding in findings if not finding.ok]


def test_sound_paths_pass(collection: Collection) -> None:
    assert failures(collection, "fused-fp32", score(collection)) == []
    assert failures(collection, "fp16", score(collection, rounded(torch.float16))) == []
    assert failures(collection, "bf16", score(collection, rounded(torch.bfloat16))) == []
    assert failures(collection, "int8", score(collection, int8)) == []


def test_bf16_accumulation_is_caught(collection: Collection) -> None:
    damaged = score(collection, rounded(torch.bfloat16), bf16_total, bf16_similarities=True)
    for name in ("bf16", "fp16"):
        found = failures(collection, name, damaged)
        assert f"{name}: top-10 overlap" in found
        assert f"{name}: max rel error" in found


def test_zero_padding_is_caught(collection: Collection) -> None:
    """Padding that acts as a zero token beats negative maxima of short documents."""
    for name in ("fused-fp32", "fp16", "int8"):
        assert f"{name}: max rel error" in failures(collection, name, score(collection, zero_padding=True))


def test_shuffled_ids_are_caught(collection: Collection) -> None:
    for name in ("fp16", "int8"):
        found = failures(collection, name, np.roll(score(collection), 1, axis=1))
        assert f"{name}: |delta nDCG@10|" in found
        assert f"{name}: Spearman, mean" in found


def test_shuffled_queries_are_caught(collection: Collection) -> None:
    assert "fp16: |delta nDCG@10|" in failures(collection, "fp16", np.roll(score(collection), 1, axis=0))


def test_wrong_int8_scale_is_caught_although_the_ranking_is_the_same(collection: Collection) -> None:
    assert failures(collection, "int8", score(collection, int8) * np.float32(127 / 128)) == []  # within INT8's own error
    assert failures(collection, "int8", score(collection, int8) * np.float32(0.95)) == ["int8: max rel error"]


def test_documents_dropped_by_one_path_are_caught(collection: Collection) -> None:
    damaged = score(collection)
    damaged[:, 399] = -np.inf
    assert "fp16: finite in one only" in failures(collection, "fp16", damaged)


def test_constant_scores_are_caught(collection: Collection) -> None:
    damaged = score(collection)
    damaged[7] = 1.0
    assert "fp16: queries with constant scores in one path" in failures(collection, "fp16", damaged)
