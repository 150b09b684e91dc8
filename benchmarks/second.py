"""A second harness, written apart from the first, that confirms the ratios of the paper's fwd table.

    python benchmarks/second.py [--json FILE] [--repeats 9] [--calls 24] [--peers none] [--smoke]

It shares no timing, input or baseline code with `paper.py`: inputs are other numbers, there are no CUDA events, no flush and no round
robin of single calls. Each method scores several copies of the corpus in turn, together several times the L2, so that every call
finds its documents in memory; the calls are captured in one CUDA graph (or, where a method cannot be captured, queued one after
the other) and the host's clock around a few replays, divided by the number of calls, is the time of one. Methods alternate between
repeats; the median over repeats is reported. Scores are compared with FP64 first.

Where both harnesses are right, ratios between methods agree although absolute times need not: a graph has no launch gaps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from maxsim_kernels import maxsim
from measure.session import kernels
from results.file import write

SCHEMA = "maxsim-kernels/second/1"
SHAPES = {"textual": (32, 300), "long-doc": (32, 1024), "medium": (128, 1024), "visual": (512, 1024), "ColPali": (1024, 1024)}
DOCUMENTS, WIDTH = 1000, 128
COPIES_BYTES = 4 * 50_000_000  # several times the largest L2 there is
REPLAYS = 3
TOLERANCE = 5e-3  # of a score, relative: FP16 sums may lose so much
Scorer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def listing(query: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """The paper's listing."""
    return torch.einsum("qd,bld->bql", query, documents).max(2).values.sum(1)


def peers() -> dict[str, Scorer | str]:
    """Installed peers, or why one is missing."""
    found: dict[str, Scorer | str] = {}
    for name, module, attribute in (
        ("flash-maxsim", "flash_maxsim", "flash_maxsim"),
        ("late-interaction-kernels", "late_interaction_kernels", "maxsim"),
    ):
        try:
            found[name] = getattr(__import__(module), attribute)
        except ImportError as problem:
            found[name] = f"not installed ({problem})"
    return found


def corpora(documents: int, tokens: int, width: int, device: torch.device, copies: int) -> list[torch.Tensor]:
    """Copies of one corpus at different places."""
    generator = torch.Generator(device).manual_seed(99)
    first = (torch.randn(documents, tokens, width, device=device, generator=generator) / width**0.5).half()
    return [first, *(first.clone() for _ in range(copies - 1))]


class Loop:
    """One method over all copies, `calls` times in a row."""

    def __init__(self, score: Scorer, query: torch.Tensor, documents: list[torch.Tensor], calls: int) -> None:
        self.pairs = [documents[n % len(documents)] for n in range(calls)]
        self.score, self.query, self.how = score, query, "queued"
        self.graph: torch.cuda.CUDAGraph | None = None

    def capture(self) -> None:
        """Capture all calls in a CUDA graph, where the method allows it."""
        if not self.query.is_cuda:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for documents in self.pairs[:3]:
                self.score(self.query, documents)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for documents in self.pairs:
                    self.score(self.query, documents)
        except RuntimeError:
            torch.cuda.synchronize()
            return
        self.graph, self.how = graph, "graph"

    def run(self) -> None:
        """Issue all calls once, without waiting for them."""
        if self.graph is not None:
            self.graph.replay()
            return
        for documents in self.pairs:
            self.score(self.query, documents)

    def milliseconds(self) -> float:
        """Milliseconds a call, by the host's clock over several loops."""
        wait(self.query)
        start = time.perf_counter()
        for _ in range(REPLAYS):
            self.run()
        wait(self.query)
        return (time.perf_counter() - start) / (REPLAYS * len(self.pairs)) * 1e3


def wait(tensor: torch.Tensor) -> None:
    """Wait until the tensor's device is idle."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


def truth(query: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """FP64 scores of the first 32 documents."""
    return torch.stack([(query.double() @ document.double().t()).amax(1).sum() for document in documents[:32]])


def measured(shape: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Check and time every method of one shape."""
    rows, tokens = SHAPES[shape]
    documents, width = DOCUMENTS, WIDTH
    if options.smoke:
        rows, tokens, documents, width = min(rows, 16), min(tokens, 24), 12, 32
    copies = 2 if options.smoke else max(2, -(-COPIES_BYTES // (2 * documents * tokens * width)))
    held = corpora(documents, tokens, width, device, copies)
    query = (torch.randn(rows, width, device=device, generator=torch.Generator(device).manual_seed(7)) / width**0.5).half()
    wide_query, wide = query.float(), [one.float() for one in held[:2]]
    need = truth(query, held[0])
    found: dict[str, Any] = {}
    made: dict[str, tuple[Scorer | str, torch.Tensor, list[torch.Tensor]]] = {
        "ours": (maxsim, query, held),  # type: ignore[dict-item]
        "naive FP16": (listing, query, held),
        "naive FP32 accumulation": (listing, wide_query, wide),
    }
    if options.peers != "none" and device.type == "cuda":
        made |= {name: (score, query, held) for name, score in peers().items()}
    loops: dict[str, Loop] = {}
    for name, (score, asked, corpus) in made.items():
        if isinstance(score, str):
            found[name] = {"failed": score}
            continue
        try:
            error = float(((score(asked, corpus[0])[:32].double() - need).abs() / need.abs()).max())
            if not error <= TOLERANCE:
                found[name] = {"failed": f"wrong: relative error {error:.1e}"}
                continue
            loop = Loop(score, asked, corpus, options.calls)
            loop.capture()
            loop.run()
        except (RuntimeError, TypeError, ValueError) as problem:
            found[name] = {"failed": f"{type(problem).__name__}: {problem}"[:200]}
            continue
        loops[name], found[name] = loop, {"error": error, "how": loop.how}
    samples: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(options.repeats):
        for name in list(loops) if turn % 2 else list(loops)[::-1]:
            samples[name].append(loops[name].milliseconds())
    for name, times in samples.items():
        found[name] |= {"median_ms": statistics.median(times), "samples_ms": times}
    return {"documents": documents, "copies": copies, "calls": options.calls, "methods": found}


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--calls", type=int, default=24, help="calls a loop (default 24)")
    parser.add_argument("--peers", default="", help="none: leave them out")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU too: shows mistakes, measures nothing")
    parser.add_argument("--revision", default="", help="what to record as the revision (default: git describe)")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.smoke:
        raise SystemExit("second.py measures a CUDA GPU, and torch sees none here; --smoke runs the flow")
    torch.set_float32_matmul_precision("high")
    report: dict[str, Any] = {
        "schema": f"{SCHEMA}/smoke" if options.smoke else SCHEMA,
        "environment": {
            "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none",
            "torch": torch.__version__,
            **kernels(options.revision),
        },
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "repeats": options.repeats,
        "shapes": {},
    }
    for shape in SHAPES:
        report["shapes"][shape] = measured(shape, options, device)
        methods = report["shapes"][shape]["methods"]
        ours = methods["ours"].get("median_ms")
        for name, data in methods.items():
            ratio = f"{data['median_ms'] / ours:6.2f}x ours" if ours and "median_ms" in data else data.get("failed", "")
            print(
                f"{shape:9} {name:28} {data.get('median_ms', float('nan')):9.4f} ms  {data.get('how', ''):7} {ratio}",
                flush=True,
            )
        write(options.json, report)


if __name__ == "__main__":
    main()
