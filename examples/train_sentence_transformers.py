"""Train a tiny ColBERT with sentence-transformers' trainer, with its own scores and with this operator: the same losses, time, memory.

    python examples/train_sentence_transformers.py                          # BEIR SciFact's training pairs, a few minutes on a CPU
    python examples/train_sentence_transformers.py --folder my-corpus       # a folder in BEIR layout

Each training runs in a process of its own, so that its peak of memory is its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import tiny_bert
import torch

from maxsim_eval import load_task

WARM = 2  # first steps, left out of the time


def pairs(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """A question and a document that answers it, for every relevant judgement."""
    source, name = ("local", arguments.folder) if arguments.folder else ("beir", "scifact")
    task = load_task(source, name, data_dir=arguments.data_dir, split=arguments.split, quiet=True)
    queries = dict(zip(task.query_ids, task.queries, strict=True))
    documents = dict(zip(task.document_ids, task.documents, strict=True))
    found = [
        {"query": queries[query], "document": documents[name]}
        for query, row in task.qrels.items()
        for name, value in row.items()
        if value > 0 and name in documents
    ]
    return found


def train(folder: str, rows: list[dict[str, str]], enabled: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """One training: loss of every step, seconds a step, peak of memory in MiB."""
    from sentence_transformers.multi_vector_encoder import (
        MultiVectorEncoder,
        MultiVectorEncoderTrainer,
        MultiVectorEncoderTrainingArguments,
        losses,
    )
    from transformers import TrainerCallback

    from datasets import Dataset
    from maxsim_kernels import integrations

    if enabled:
        integrations.enable("sentence-transformers")  # the one line
    torch.manual_seed(0)
    model = MultiVectorEncoder(folder, device=arguments.device)
    steps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Note the time."""
            steps.append(time.perf_counter())

    trainer = MultiVectorEncoderTrainer(
        model=model,
        args=MultiVectorEncoderTrainingArguments(
            output_dir=str(Path(folder) / "out"),
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch,
            learning_rate=5e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=arguments.device == "cpu",
            dataloader_pin_memory=arguments.device != "cpu",
            seed=0,
        ),
        train_dataset=Dataset.from_list(rows),
        loss=losses.MultiVectorMultipleNegativesRankingLoss(model),
        callbacks=[Clock()],
    )
    if arguments.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    taken = torch.tensor(steps).diff()[WARM:] if len(steps) > WARM + 1 else torch.tensor(steps).diff()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "step_seconds": float(taken.median()) if len(taken) else None,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if arguments.device != "cpu" else peak,
        "calls": dict(integrations.status()["sentence-transformers"].calls),
    }


def main() -> None:
    """Train twice, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="datasets", help="of BEIR SciFact (default datasets)")
    parser.add_argument("--folder", help="train on a folder in BEIR layout instead")
    parser.add_argument("--split", default="train", help="judgements that give the pairs (default train)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--tolerance", type=float, default=2e-3, help="of two losses of one step, relative (default 2e-3)")
    parser.add_argument("--json", type=Path, help="write both trainings there")
    arguments = parser.parse_args()

    rows = pairs(arguments)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as home:
        tiny_bert.write(Path(home), (text for row in rows for text in row.values()))
        for name, enabled in (("sentence-transformers", False), ("with maxsim-kernels", True)):
            # One task a process: spawn, so that nothing is inherited.
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
                found[name] = alone.submit(train, home, rows, enabled, arguments).result()
    for name, one in found.items():
        seconds = f"{one['step_seconds']:.3f} s a step" if one["step_seconds"] is not None else "one step"
        print(f"{name}: loss {one['losses'][0]:.4f} -> {one['losses'][-1]:.4f}, {seconds}, peak {one['peak_mib']:.0f} MiB")
    own, ours = (one["losses"] for one in found.values())
    apart = max(abs(a - b) / max(abs(a), 1e-3) for a, b in zip(own, ours, strict=True))
    print(f"losses of {len(own)} steps: at most {apart:.1e} apart, relative; tolerance {arguments.tolerance:.0e}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not apart <= arguments.tolerance:
        raise SystemExit("the losses are not the same")


if __name__ == "__main__":
    main()
