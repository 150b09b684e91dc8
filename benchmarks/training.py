"""Training on one NVIDIA GPU against the peers and torch: correctness first, then interleaved medians with the L2 flushed.

    python benchmarks/training.py [--only steps,memory,...] [--json FILE] [--runs 20] [--peers none] [--smoke]
    python benchmarks/training.py --show FILE [--brief]

Groups: steps (forward + backward of in-batch negatives: ours by path, both peers, naive, checkpointed and chunked torch), memory
(peaks alone, up to batches that only fused methods reach), parts (what a step is made of), ablation (the backward alone on random, hot
and uniform winners; csr must give the same bits 20 times), layouts (distillation, pairs, packed, d = 768, FP32 inputs).

Every method's gradients for one random upstream gradient are compared first with FP64 arithmetic on FP64 winners, for a part of
the queries and documents (`measure/gradient_truth.py`); all must be finite. How rows are prepared and timed:
`run/runner.py`; how they are written: `results/file.py`.

Compiling takes longer than timing. `--compile-only --only GROUP` in several processes at once fills Triton's cache on disk first.
"""

from __future__ import annotations

import os

from cases.training import layouts, memory, steps
from cases.training_parts import ablation, parts
from rivals.training import VARIABLE
from run.command import Tool, main
from tables.training import markdown, verdicts

TOOL = Tool(
    "training.py",
    __doc__ or "",
    "maxsim-kernels/training/1",
    {"steps": steps, "memory": memory, "parts": parts, "ablation": ablation, "layouts": layouts},
    verdicts,
    markdown,
)

if __name__ == "__main__":
    os.environ.pop(VARIABLE, None)  # it would choose our own "auto" too
    main(TOOL)
