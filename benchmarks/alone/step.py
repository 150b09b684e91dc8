"""One training step with its host's part, where the host is slower than the GPU: ColBERT, 128 queries x 128 documents, 32 x 180 tokens.

    python benchmarks/alone/step.py [--json FILE] [--runs 10] [--counts] [--smoke]

Ours (`contrastive_loss`; `maxsim` with torch's cross-entropy, by gradient path), both peers' entry points with the same cross-entropy,
flash-maxsim's fused step, and torch's loss alone on scores that are there. Loss and gradients are compared with float64 first. Then
microseconds by the host's clock: `call`, steps back to back and one wait; `enqueue`, the same without the wait; `idle`, one step and a
wait from an idle GPU. `kernels_ms`: what each launch of a step takes on the GPU, by torch's profiler. `--counts`: ours alone, with the
lists of document tokens begun by counts and a cumulative sum, as where documents have many winners.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from cases.training import shared
from maxsim_kernels.training import contrastive_loss
from measure.clocks import kernel_times
from measure.method import Method, Options
from measure.names import FLASH, LIK
from measure.session import RefusedError, about, failures
from measure.timing import Call, Flush, wall
from results.file import write
from rivals.training import Problem, flash, in_batch, lik, ours

SCHEMA = "maxsim-kernels/step/1"
SHAPE = "ColBERT B=128"
LOSS_BOUND = 2e-3  # of the loss, relative: what FP16 sums may lose


def whole_loss(problem: Problem) -> Method:
    """Our loss as a user calls it."""

    def step() -> Tensor:
        loss = contrastive_loss(problem.queries, problem.documents)
        loss.backward()
        return loss.detach()

    return problem.method("ours contrastive_loss", "ours", {"": step}, alone=True)


def torch_alone(problem: Problem) -> Call:
    """Torch's part of all other steps: cross-entropy of scores that are a leaf, and its backward."""
    count = problem.queries.shape[0]
    scores = torch.zeros(count, problem.documents.shape[0], device=problem.queries.device, requires_grad=True)

    def step() -> Tensor:
        scores.grad = None
        loss = in_batch(scores)
        loss.backward()
        return loss.detach()

    return step


def true_loss(problem: Problem) -> float:
    """The summed cross-entropy in float64, a query at a time."""
    documents = problem.documents.detach().double()
    rows = [(documents @ query.double().T).amax(1).sum(1) for query in problem.queries.detach()]
    return float(in_batch_double(torch.stack(rows)))


def in_batch_double(scores: Tensor) -> Tensor:
    return (scores.logsumexp(1) - scores.diagonal()).sum()


def checked(problem: Problem, methods: list[Method]) -> tuple[dict[str, Call], dict[str, Any]]:
    """Calls of the methods that are right, and what was found of all; a method of ours that is wrong ends the program."""
    truth, calls, found = true_loss(problem), dict[str, Call](), dict[str, Any]()
    for method in methods:
        (entry, call), *_ = method.entries.items()
        try:
            assert method.check is not None
            row = method.check(entry)
            loss = float(call())
            mean = method.name.endswith(("contrastive_loss", "fused step"))
            row["loss_error"] = abs(loss * (problem.queries.shape[0] if mean else 1) / truth - 1)
            if not row["loss_error"] <= LOSS_BOUND:
                raise RefusedError(f"wrong: loss {row['loss_error']:.1e} off")
        except (*failures(), RefusedError) as problem_found:
            if method.kind == "ours":
                raise SystemExit(f"{method.name}: {problem_found}; nothing written") from problem_found
            found[method.name] = {"left_out": " ".join(str(problem_found).split())[:200]}
            continue
        calls[method.name], found[method.name] = call, row
    return calls, found


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--runs", type=int, default=10, help="steps from an idle GPU")
    parser.add_argument("--counts", action="store_true", help="ours alone, lists begun by four launches instead of one")
    parser.add_argument("--smoke", action="store_true", help="a small shape, correctness alone, on a CPU too")
    options = parser.parse_args(arguments)
    device = torch.device("cpu" if options.smoke and not torch.cuda.is_available() else "cuda")
    problem = shared(SHAPE, Options(device, (FLASH, LIK), smoke=options.smoke))
    methods = [whole_loss(problem)]
    skipped: dict[str, str] = {}
    peers = (FLASH, LIK)
    if options.counts:
        from maxsim_kernels.gpu.backward import inverse_grid

        peers, inverse_grid._TABLE_WINNERS = (), 0
    for lineup in (ours(problem, ("auto", "unified")), flash(problem, peers), lik(problem, peers)):
        methods += lineup.methods
        skipped |= lineup.skipped
    calls, found = checked(problem, methods)
    if device.type == "cpu":
        print("checked:", ", ".join(calls))
        return
    calls["torch's loss alone"] = torch_alone(problem)
    for name, times in wall(calls, options.runs, Flush()).items():
        found.setdefault(name, {}).update(times)
        found[name]["kernels_ms"] = kernel_times(calls[name])
        busy = sum(found[name]["kernels_ms"].values())
        print(
            f"{name}: {times['call_median_us']:.0f} us a step back to back, {times['enqueue_median_us']:.0f} to issue, "
            f"{times['idle_median_us']:.0f} from idle; GPU {busy * 1e3:.0f} us in {len(found[name]['kernels_ms'])} kernels",
            flush=True,
        )
    for name in ("ours contrastive_loss", "ours"):
        print(name, {kernel[:40]: round(ms * 1e3, 1) for kernel, ms in found[name]["kernels_ms"].items()})
    print("left out:", {name: row["left_out"] for name, row in found.items() if "left_out" in row} | skipped)
    write(
        options.json,
        {"schema": SCHEMA, "shape": SHAPE, "counts": options.counts, **about(), "skipped": skipped, "methods": found},
    )


if __name__ == "__main__":
    main()
