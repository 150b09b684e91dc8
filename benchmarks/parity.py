"""The paper's 500-step training-parity run: FP16-in-dtype naive autograd against ours from one seed, loss by loss.

    python benchmarks/parity.py --json FILE [--steps 500] [--batch 64] [--full] [--smoke] [--quiet]
    python benchmarks/parity.py --draw FILE.json PICTURE.png

B queries and B documents of 1024 tokens, d = 128, are FP32 parameters (there is no encoder): tokens are normalised, cast to FP16 and
scored; the loss is in-batch cross-entropy of scores over sqrt(Lq); Adam, one loss scale. Every run starts from the same seed and the
same (empty) Adam state, and sees no other data, so runs differ only in how the scores and their gradients are made. naive holds
similarities and maxima in FP16 and sums them in FP32 (a sum of a thousand in FP16 is rounded to 0.25 or worse). `--full` adds
naive with FP32 accumulation, which shows whose rounding a drift is.

JSON is written after every run, on the machine that measures; drawing needs matplotlib and no GPU (the paper's appendix
'Training-Parity Curve').
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from tqdm import tqdm

from maxsim_kernels import maxsim
from measure.session import surroundings
from results.file import write

SCHEMA = "maxsim-kernels/parity/1"
TOKENS, DIM, RATE, SCALE = 1024, 128, 3e-5, 2.0**14
PAPER = {"max": 1.4e-3, "mean": 1.1e-4, "memory": 34.0}
NAIVE, FULL, OURS = "naive FP16", "naive FP32 accumulation", "ours"
Scorer = Callable[[Tensor, Tensor], Tensor]


def naive(queries: Tensor, documents: Tensor) -> Tensor:
    """Similarities and maxima in FP16, their sum in FP32."""
    return torch.einsum("qid,bjd->qbij", queries, documents).max(3).values.float().sum(2)


def full(queries: Tensor, documents: Tensor) -> Tensor:
    """The same inputs, everything after them in FP32 (products in TF32, which FP16 inputs do not notice)."""
    return torch.einsum("qid,bjd->qbij", queries.float(), documents.float()).max(3).values.sum(2)


def ours(queries: Tensor, documents: Tensor) -> Tensor:
    """Our public call with its default gradient path."""
    scores = maxsim(queries, documents)
    assert isinstance(scores, Tensor)
    return scores


def train(score: Scorer, batch: int, tokens: int, steps: int, device: torch.device, bar: tqdm | None = None) -> dict[str, Any]:
    """Losses of every step, milliseconds a step, peak memory of a step above parameters and Adam state; `bar` counts steps.

    On a GPU the bar counts steps that were queued: waiting for each would slow the run it reports on.
    """
    generator = torch.Generator(device).manual_seed(0)
    parameters = [torch.randn(batch, tokens, DIM, device=device, generator=generator).requires_grad_() for _ in range(2)]
    cuda = device.type == "cuda"
    optimiser = torch.optim.Adam(parameters, lr=RATE * math.sqrt(DIM), fused=cuda)
    targets, losses, before, peak = torch.arange(batch, device=device), [], 0, None

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        queries, documents = (normalize(held, dim=-1).half() for held in parameters)
        loss = cross_entropy(score(queries, documents) / math.sqrt(tokens), targets)
        (loss * SCALE).backward()
        for held in parameters:
            assert held.grad is not None
            held.grad.div_(SCALE)
        optimiser.step()
        return loss.detach()

    start = 0.0
    for number in range(steps):
        if number == min(3, steps - 1):  # warm: from here on time and memory count
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start, first = time.perf_counter(), number
        losses.append(step())
        if bar is not None:
            bar.update()
    if cuda:
        torch.cuda.synchronize()
        peak = int(torch.cuda.max_memory_allocated() - before)
    spent = time.perf_counter() - start
    return {
        "losses": torch.stack(losses).double().tolist(),
        "ms_per_step": spent / (steps - first) * 1e3,
        "peak_bytes": peak,
    }


def drift(one: list[float], other: list[float]) -> dict[str, Any]:
    """|difference| of two runs, step by step."""
    steps = [abs(left - right) for left, right in zip(one, other, strict=True)]
    return {"max": max(steps), "mean": sum(steps) / len(steps), "at": steps.index(max(steps)), "steps": steps}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All runs and how far they drift from each other."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.smoke:
        raise SystemExit("parity.py measures a CUDA GPU, and torch sees none here; --smoke runs the flow on a CPU")
    torch.set_float32_matmul_precision("high")
    batch, tokens, steps = (4, 16, min(options.steps, 6)) if options.smoke else (options.batch, TOKENS, options.steps)
    scorers: dict[str, Scorer] = {OURS: ours, NAIVE: naive}
    if options.full:
        scorers[FULL] = full
    report: dict[str, Any] = {
        "schema": f"{SCHEMA}/smoke" if options.smoke else SCHEMA,
        "environment": surroundings(options.revision, device),
        "settings": {
            "batch": batch,
            "tokens": tokens,
            "dim": DIM,
            "steps": steps,
            "rate": RATE,
            "loss_scale": SCALE,
            "seed": 0,
        },
        "runs": {},
        "drift": {},
        "paper": PAPER,
    }
    runs = report["runs"]
    with tqdm(total=len(scorers) * steps, unit="step", disable=True if options.quiet else None) as bar:
        for name, score in scorers.items():
            bar.set_description(name)
            try:
                runs[name] = train(score, batch, tokens, steps, device, bar)
            except torch.OutOfMemoryError as problem:
                runs[name] = {"failed": str(problem).splitlines()[0]}
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            tqdm.write(f"{name}: {words(runs[name])}")
            sys.stdout.flush()
            fit = [one for one in runs if "losses" in runs[one]]
            pairs = [(one, other) for place, one in enumerate(fit) for other in fit[place + 1 :]]
            report["drift"] = {f"{one} - {other}": drift(runs[one]["losses"], runs[other]["losses"]) for one, other in pairs}
            write(options.json, report)
    return report


def words(run: dict[str, Any]) -> str:
    """One run in a line."""
    if "failed" in run:
        return f"failed: {run['failed']}"
    peak = "" if run["peak_bytes"] is None else f", peak {run['peak_bytes'] / 1e9:.3f} GB above parameters and Adam state"
    return f"loss {run['losses'][0]:.4f} to {run['losses'][-1]:.6f}, {run['ms_per_step']:.2f} ms a step{peak}"


def lines(report: dict[str, Any]) -> list[str]:
    """What docs/training_figures.md says of the run, as Markdown."""
    shown = ["| run | first loss | last loss | ms a step | peak GB |", "|---|---|---|---|---|"]
    for name, run in report["runs"].items():
        if "failed" in run:
            shown.append(f"| {name} | {run['failed']} | | | |")
            continue
        peak = "-" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 1e9:.3g}"
        shown.append(f"| {name} | {run['losses'][0]:.4f} | {run['losses'][-1]:.3g} | {run['ms_per_step']:.3g} | {peak} |")
    shown += ["", "| drift of the loss | largest | at step | mean |", "|---|---|---|---|"]
    for name, held in report["drift"].items():
        shown.append(f"| {name} | {held['max']:.2g} | {held['at']} | {held['mean']:.2g} |")
    shown.append(f"| the paper, naive FP16 - its own | {PAPER['max']:.2g} | | {PAPER['mean']:.2g} |")
    peaks = {name: report["runs"].get(name, {}).get("peak_bytes") for name in (NAIVE, OURS)}
    if all(peaks.values()):
        ratio = peaks[NAIVE] / peaks[OURS]
        shown += ["", f"Peak of a step: {ratio:.0f} times less than naive FP16 (the paper: {PAPER['memory']:.0f})."]
    return shown


def draw(report: dict[str, Any], picture: Path) -> None:
    """Three panels: losses, drift, memory."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    runs = {name: run for name, run in report["runs"].items() if "losses" in run}
    for (name, run), style in zip(runs.items(), ("-", "--", ":"), strict=False):
        left.plot(run["losses"], style, label=name, linewidth=1.6)
    left.set(title="Loss", xlabel="step", ylabel="in-batch cross-entropy")
    left.legend()
    for name, held in report["drift"].items():
        steps = [max(value, 1e-9) for value in held["steps"]]
        middle.semilogy(steps, linewidth=0.9, label=f"{name}: max {held['max']:.1e}, mean {held['mean']:.1e}")
    middle.axhline(report["paper"]["max"], color="grey", linestyle=":", linewidth=1, label="the paper's largest")
    middle.set(title="Drift of the loss", xlabel="step", ylabel="|difference|")
    middle.set_ylim(top=1.0)  # room for the legend
    middle.legend(fontsize=6, loc="upper left")
    sizes = {name: run["peak_bytes"] / 1e9 for name, run in runs.items() if run["peak_bytes"]}
    bars = right.bar([name.replace(" FP32", "\nFP32") for name in sizes], list(sizes.values()))
    right.margins(y=0.2)
    right.bar_label(bars, [f"{size:.3g} GB" for size in sizes.values()])
    right.set(title="Peak memory of a step", ylabel="GB above parameters and Adam state")
    if sizes:
        right.set_yscale("log")
    settings = report["settings"]
    figure.suptitle(
        f"{settings['steps']} steps, B = {settings['batch']}, {settings['tokens']} x {settings['tokens']} tokens, FP16"
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


def load(path: Path) -> dict[str, Any]:
    """A file of `measure`; raises ValueError for another."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not str(found.get("schema", "")).startswith(SCHEMA):
        raise ValueError(f"{path}: schema {found.get('schema')!r}, need {SCHEMA!r}")
    return found


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here, after every run")
    parser.add_argument("--steps", type=int, default=500, help="default 500")
    parser.add_argument("--batch", type=int, default=64, help="default 64; naive FP16 needs about 28 GB there")
    parser.add_argument("--full", action="store_true", help="also naive with FP32 accumulation (56 GB at 64)")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU too: shows mistakes, measures nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--revision", default="", help="what to record as the revision (default: git describe)")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("FILE", "PNG"), help="draw a file; needs matplotlib, no GPU")
    parser.add_argument("--show", type=Path, help="print a file's Markdown and end; needs no GPU")
    options = parser.parse_args(arguments)
    if options.draw is not None:
        draw(load(options.draw[0]), options.draw[1])
        return
    if options.show is not None:
        print("\n".join(lines(load(options.show))))
        return
    if options.steps < 1 or options.batch < 2:
        parser.error(f"--steps, --batch: got {options.steps}, {options.batch}, need at least 1 and 2")
    print("\n".join(lines(measure(options))), flush=True)


if __name__ == "__main__":
    main()
