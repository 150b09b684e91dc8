"""What an evaluation says of its paths, computed again from the run files and per-query values it wrote."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maxsim_eval.api import evaluate
from maxsim_eval.comparison.assessing import reads_same_inputs
from maxsim_eval.comparison.metrics import DEFAULT_METRICS
from maxsim_eval.comparison.statistics import bootstrap_interval, holm, randomisation_test
from maxsim_eval.comparison.ties import tie_bounds
from maxsim_eval.data.trec import read_trec_run
from maxsim_eval.encoders.lexical import LexicalEncoder
from maxsim_eval.report.result_json import jsonable
from maxsim_eval.scoring.own_functions import find_paths
from maxsim_eval.scoring.paths import our_paths
from maxsim_eval.types import Result, Run, Task

PATHS = ("fp32", "fp16", "int8", "fp8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def result(demo_task: Task, folder: Path) -> Result:
    return evaluate(demo_task, LexicalEncoder(), PATHS, cache_dir=folder / "cache", out_dir=folder, quiet=True)


@pytest.fixture(scope="module")
def runs(result: Result, folder: Path) -> dict[str, Run]:
    return {name: read_trec_run(folder / "runs" / f"{name}.trec") for name in result.paths}


def parity_of(result: Result, name: str) -> dict[str, Any]:
    parity = result.paths[name].parity
    assert parity is not None
    return dict(parity)


def names(run: Run, query: str) -> list[str]:
    return [document for document, _ in run.rankings.get(query, ())]


def test_statistics_are_those_of_the_values_per_query(result: Result) -> None:
    reference = result.paths["fp32"].per_query
    p_values = {}
    for name in PATHS[1:]:
        entries = parity_of(result, name)["statistics"]
        assert list(entries) == list(DEFAULT_METRICS)
        for metric, entry in entries.items():
            values = result.paths[name].per_query[metric]
            differences = np.array([values[query] - value for query, value in reference[metric].items()])
            assert (entry["queries"], entry["changed"]) == (40, np.count_nonzero(differences))
            assert entry["mean"] == pytest.approx(differences.mean(), abs=1e-15)
            assert [entry["low"], entry["high"]] == pytest.approx(bootstrap_interval(differences).tolist(), abs=1e-15)
            assert entry["p_value"] == randomisation_test(differences)
            p_values[name, metric] = entry["p_value"]
            assert entry["mean"] == pytest.approx(parity_of(result, name)["delta"][metric], abs=1e-12)
        assert parity_of(result, name)["statistics_settings"]["comparisons"] == 30
    assert sum(value < 1 for value in p_values.values()) >= 5, "else nothing would be tested here"
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    for (name, metric), value in adjusted.items():
        assert parity_of(result, name)["statistics"][metric]["p_adjusted"] == value


def test_bounds_over_ties_are_those_of_the_run_files(demo_task: Task, folder: Path) -> None:
    # Of every pair of documents with one text only the second is judged relevant: their order matters.
    first: dict[Any, str] = {}
    twins = [
        name
        for name, text in zip(demo_task.document_ids, demo_task.documents, strict=True)
        if first.setdefault(text, name) != name
    ]
    odd = replace(demo_task, qrels={query: dict.fromkeys(twins, 1) for query in demo_task.query_ids})
    result = evaluate(odd, LexicalEncoder(), PATHS, cache_dir=folder / "cache", out_dir=folder / "ties", quiet=True)
    for name, path in result.paths.items():
        run = read_trec_run(folder / "ties" / "runs" / f"{name}.trec")
        assert path.tie_bounds is not None
        for metric, bounds in tie_bounds(run, odd.qrels, DEFAULT_METRICS).items():
            ends = np.array(list(bounds.values()))
            found = path.tie_bounds[metric]
            assert [found["low"], found["high"]] == pytest.approx(ends.mean(axis=0).tolist(), abs=1e-12)
            assert found["queries_affected"] == np.count_nonzero(ends[:, 0] != ends[:, 1])
            assert found["low"] - 1e-12 <= path.metrics[metric] <= found["high"] + 1e-12
        assert path.tie_bounds["nDCG@10"]["queries_affected"] > 5


def test_rankings_are_compared_as_the_run_files_say(result: Result, runs: dict[str, Run], demo_task: Task) -> None:
    for name in PATHS[1:]:
        parity = parity_of(result, name)
        shifts: Counter[tuple[int, int]] = Counter()
        for cutoff in (1, 5, 10, 20, 50, 100):
            pairs = [(names(runs["fp32"], query)[:cutoff], names(runs[name], query)[:cutoff]) for query in demo_task.query_ids]
            same = np.mean([left == right for left, right in pairs])
            shared = np.mean([len({*left} & {*right}) / len(left) for left, right in pairs])
            assert parity["same_order"][f"@{cutoff}"] == pytest.approx(same)
            assert parity["overlap"][f"@{cutoff}"] == pytest.approx(shared)
        for query in demo_task.query_ids:
            left, right = (names(run, query)[:100] for run in (runs["fp32"], runs[name]))
            for document in {*left, *right}:
                ranks = ((*side, document).index(document) + 1 for side in (left, right))
                shifts[tuple(rank if rank <= 100 else 0 for rank in ranks)] += 1  # type: ignore[index]
        assert parity["rank_shifts"] == {"k": 100, "counts": [[*ranks, count] for ranks, count in sorted(shifts.items())]}


def test_moved_documents_have_their_ranks_and_judgements(result: Result, runs: dict[str, Run], demo_task: Task) -> None:
    judged = 0
    for name in PATHS[1:]:
        changed = parity_of(result, name)["most_changed"]
        assert 0 < len(changed) <= 20
        for entry in changed:
            query = entry["query"]
            assert entry["delta"] == entry["value"] - entry["reference"]
            for moved in entry["moved"]:
                for key, run in (("reference_rank", runs["fp32"]), ("rank", runs[name])):
                    ranking = names(run, query)
                    found = ranking.index(moved["document"]) + 1 if moved["document"] in ranking else None
                    assert moved[key] == found
                assert moved["relevance"] == demo_task.qrels[query].get(moved["document"])
                judged += moved["relevance"] is not None
        deltas = [abs(entry["delta"]) for entry in changed]
        assert deltas == sorted(deltas, reverse=True)
    assert judged > 0


def test_lengths_and_memory(result: Result, folder: Path) -> None:
    for role, count in (("queries", 40), ("documents", 300)):
        found = result.task["lengths"][role]
        assert sum(found["counts"]) == count
        assert len(found["edges"]) == len(found["counts"]) + 1
    assert result.task["lengths"]["documents"]["counts"][0] >= 8, "documents without words"
    for path in result.paths.values():
        assert path.memory is not None
        assert path.memory["device_peak_bytes"] is None
        if Path("/proc/self/clear_refs").exists():
            assert path.memory["host_peak_bytes"] > 50 << 20


@pytest.mark.parametrize(
    ("stored", "same"),
    [
        (torch.float32, {"fused-fp32", "exact-int8", "exact-int8-fp32"}),
        (torch.float16, {"fused-fp32", "exact-int8", "exact-int8-fp32", "fp16"}),
        (torch.bfloat16, {"fused-fp32", "exact-int8", "exact-int8-fp32", "bf16"}),
    ],
)
def test_which_paths_read_what_the_reference_reads(stored: torch.dtype, same: set[str]) -> None:
    found = {name for name, path in our_paths().items() if reads_same_inputs(name, path, stored)}
    assert found - {"fp32"} == same
    assert reads_same_inputs("mine", find_paths([("mine", lambda queries, documents: documents)])["mine"], stored)
    assert not reads_same_inputs("rotate+int8", find_paths(["rotate+int8"])["rotate+int8"], stored)


def test_a_scale_of_a_document_is_counted(result: Result) -> None:
    """As by a certified path, which keeps the same copy."""
    sizes = {name: (path.memory or {})["document_bytes"] for name, path in result.paths.items()}
    mean = result.task["document_tokens"] / result.task["documents"]
    need = {"fp32": 4 * 128 * mean, "fp16": 2 * 128 * mean, "int8": 130 * mean, "fp8": 128 * mean + 2}
    assert sizes == pytest.approx(need, abs=1e-3)


def test_error_histograms_hold_every_pair(result: Result) -> None:
    for name in PATHS[1:]:
        found = parity_of(result, name)["error_histogram"]
        pairs = sum(found["counts"]) + found["zeros"] + found["below"] + found["above"]
        assert pairs == 40 * 292, "eight documents are empty"
        edges = np.array(found["edges"])
        largest = edges[1:][np.array(found["counts"]) > 0].max()
        assert largest / 2 <= parity_of(result, name)["max_abs_error"] < largest


def test_a_second_evaluation_says_the_same(result: Result, demo_task: Task, folder: Path) -> None:
    again = evaluate(demo_task, LexicalEncoder(), PATHS, cache_dir=folder / "cache", quiet=True)
    for name, path in again.paths.items():
        assert jsonable(path.parity) == jsonable(result.paths[name].parity)
        assert path.tie_bounds == result.paths[name].tie_bounds
    fewer = evaluate(demo_task, LexicalEncoder(), PATHS[:2], cache_dir=folder / "cache", quiet=True)
    alone, beside = (parity_of(found, "fp16") for found in (fewer, result))
    assert alone["statistics_settings"]["comparisons"] == 10
    assert all(alone["statistics"][metric]["low"] == entry["low"] for metric, entry in beside["statistics"].items())
