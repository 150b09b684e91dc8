"""From rankings to what a Result says of each path: metrics, bounds over ties, parity with the reference, statistics over all paths."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from maxsim_eval.comparison.metrics import evaluate_run, means
from maxsim_eval.comparison.parity import compare
from maxsim_eval.comparison.ranks import Ranking, ranks_of
from maxsim_eval.comparison.ties import mean_bounds
from maxsim_eval.comparison.verdicts import with_statistics
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.job import KeptRows, Outcome
from maxsim_eval.scoring.paths import REFERENCE, ScoringPath
from maxsim_eval.types import PathResult, Qrels, Run

_READ = {"fused-fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # what a path multiplies embeddings as


def assess(
    outcomes: Iterable[Outcome],
    asked: Asked,
    paths: Mapping[str, ScoringPath],
    copied: Container[str],
    qrels: Qrels,
    stored: torch.dtype,
    metrics: Sequence[str],
    ranking: Ranking = ranks_of,
) -> tuple[dict[str, PathResult], dict[str, Run]]:
    """What each path gave, by name, and its ranking; a path is compared as soon as it was scored.

    Args:
        outcomes: the reference's, if there is one, first.
        asked: what every path was asked.
        paths: by name.
        copied: those that read a quantised copy in the cache.
        stored: dtype of the stored embeddings.
        metrics: names, see `metrics.parse_metric`.
        ranking: how score rows are ranked (`ranks.ranking_on`).
    """
    results: dict[str, PathResult] = {}
    runs: dict[str, Run] = {}
    reference_rows: KeptRows | None = None
    for outcome in outcomes:
        name = outcome.run.name
        runs[name] = outcome.run
        results[name] = _result(outcome, paths[name], name in copied, qrels, metrics)
        if name == REFERENCE:
            reference_rows = outcome.rows
        elif REFERENCE in results:
            parity = compare(
                results[REFERENCE],
                results[name],
                runs[REFERENCE],
                runs[name],
                reference_scores=reference_rows,
                scores=outcome.rows,
                k=asked.k,
                score_rows=None if len(asked.kept_rows) == len(asked.query_ids) else asked.kept_rows.tolist(),
                listed=None if asked.candidates is None else asked.candidates.of(asked.kept_rows.tolist()),
                qrels=qrels,
                ranking=ranking,
            )
            results[name] = replace(
                results[name], parity={**parity, "reference_reads_same_inputs": reads_same_inputs(name, paths[name], stored)}
            )
    for name, result in results.items():
        if result.search is not None:
            same = {other: runs[other].rankings == runs[name].rankings for other in result.search["certifies"] if other in runs}
            results[name] = replace(result, search={**result.search, "identical_to": same})
    return with_statistics(results, REFERENCE) if REFERENCE in results else results, runs


def _result(outcome: Outcome, path: ScoringPath, copied: bool, qrels: Qrels, metrics: Sequence[str]) -> PathResult:
    per_query = evaluate_run(outcome.run, qrels, metrics) if metrics else {}
    read = f"; documents read from the {path.copy} copy in the cache" if copied else ""
    return PathResult(
        metrics=means(per_query),
        per_query=per_query,
        seconds={part: round(value, 6) for part, value in outcome.seconds.items()},
        description=path.description + read,
        tie_bounds=mean_bounds(outcome.run, qrels, per_query),
        memory=outcome.memory,
        search=outcome.search,
    )


def reads_same_inputs(name: str, path: ScoringPath, stored: torch.dtype) -> bool:
    """Whether only arithmetic differs: the reference widens what is `stored` to FP32, and this path multiplies the same values."""
    read = path.precision or stored if path.certified else _READ.get(name)
    return path.own or read in (stored, torch.float32)
