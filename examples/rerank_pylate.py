"""Rerank with PyLate, with its own scores and with this operator: the same ranking, time of both.

    python examples/rerank_pylate.py --model lightonai/GTE-ModernColBERT-v1   # BEIR SciFact
    python examples/rerank_pylate.py --folder my-corpus                       # a folder in BEIR layout, a random model

The candidates of a question are its judged documents and others drawn at random.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import tiny_bert

from maxsim_eval import load_task
from maxsim_kernels import integrations


def main() -> None:
    """Encode once, rerank twice, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a ColBERT of PyLate's, id or path (default: a random one)")
    parser.add_argument("--data-dir", default="datasets", help="of BEIR SciFact (default datasets)")
    parser.add_argument("--folder", help="a folder in BEIR layout instead")
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--candidates", type=int, default=50, help="documents a query (default 50)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--json", type=Path, help="write what was found there")
    arguments = parser.parse_args()

    from pylate import models, rank

    source, name = ("local", arguments.folder) if arguments.folder else ("beir", "scifact")
    task = load_task(source, name, data_dir=arguments.data_dir, quiet=True)
    texts = dict(zip(task.document_ids, task.documents, strict=True))
    draw = random.Random(0)
    queries = list(zip(task.query_ids, task.queries, strict=True))[: arguments.queries]
    candidates: list[list[str]] = []
    for query, _ in queries:
        judged = [one for one in task.qrels[query] if one in texts]
        others = draw.sample(list(task.document_ids), min(arguments.candidates, len(texts)))
        candidates.append(list(dict.fromkeys([*judged, *others]))[: arguments.candidates])

    with tempfile.TemporaryDirectory() as home:
        path = arguments.model or str(tiny_bert.write(Path(home), [*texts.values(), *(text for _, text in queries)]))
        model = models.ColBERT(path, device=arguments.device)
    options: dict[str, Any] = {"show_progress_bar": False}
    asked = model.encode([text for _, text in queries], is_query=True, **options)
    held = model.encode([[texts[one] for one in row] for row in candidates], is_query=False, **options)

    def reranked() -> tuple[list[Any], float]:
        started = time.perf_counter()
        ranked = rank.rerank(candidates, asked, held)
        return ranked, time.perf_counter() - started

    own, own_seconds = min((reranked() for _ in range(3)), key=lambda found: found[1])
    with integrations.enable("pylate"):  # the one line
        ours, seconds = min((reranked() for _ in range(3)), key=lambda found: found[1])
        calls = integrations.status()["pylate"].calls
    same = sum([one["id"] for one in a] == [one["id"] for one in b] for a, b in zip(own, ours, strict=True))
    scores = [{one["id"]: one["score"] for one in row} for row in own]
    apart = max(abs(one["score"] - kept[one["id"]]) for row, kept in zip(ours, scores, strict=True) for one in row)
    print(
        f"{len(queries)} queries x {arguments.candidates} candidates: PyLate {own_seconds:.3f} s, with maxsim-kernels {seconds:.3f} s"
    )
    print(f"scores at most {apart:.1e} apart, {same} of {len(queries)} rankings the same; scored here: {dict(calls)}")
    if arguments.json:
        found = {"queries": len(queries), "candidates": arguments.candidates, "pylate_seconds": own_seconds, "seconds": seconds}
        found |= {"scores_apart": apart, "same_rankings": same, "calls": dict(calls)}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not apart <= 1e-3:  # NaN too
        raise SystemExit("the scores are not the same")


if __name__ == "__main__":
    main()
