"""Forward kernels on one NVIDIA GPU against torch and the peers: correctness first, then interleaved medians with the L2 flushed.

    python benchmarks/forward.py [--only dense,many,...] [--json FILE] [--runs 20] [--no-compile] [--peers none]

Groups: dense (the paper's five shapes, one query, 1K and 10K documents, FP16), many (many queries against one corpus), ragged (16 to
240 tokens), int8 and fp8 (over our own FP16, and against dequantise-then-naive), wide (d = 96 to 4096), pairs (tiny independent pairs),
host (calls bound by the host, by its clock). d = 128 where not said.

In the same run, every method's scores on a part of the documents are first compared with `maxsim_reference` in FP64 on the same inputs
(of quantised documents: on their codes), after NaN was left in the memory that its output will get; all scores must be finite. A
method that is wrong, fails or is missing is reported so, and never timed. Then the methods of a row are timed in turn (`timing.py`
says how). The floor is max(document bytes / read rate, operations / library rate of that dtype), both measured in this run.

Compiling takes longer than timing. `--compile-only --only GROUP` in several processes at once fills Triton's cache on disk first; what
the peers' autotuners find there is not kept.

The file is written after every row; a group that ends replaces its predecessor, so a run may be cut into several with `--only`. Only
runs on the same machine, software and kernels (a digest of maxsim_kernels' sources) go into one file.
"""

from __future__ import annotations

from typing import Any

from cases.forward import GROUPS
from results.file import SCHEMA, Figures, row_lines, standing
from run.command import Tool, main
from run.runner import FORWARD
from tables.forward_asked import table, verdicts


def show(report: dict[str, Any], _: bool) -> list[str]:
    """Wins and losses, then what was asked."""
    return [*standing(Figures(report)), *table(verdicts(report))]


TOOL = Tool(
    "forward.py",
    __doc__ or "",
    SCHEMA,
    GROUPS,
    verdicts,
    show,
    FORWARD,
    row_lines,
    "cpu_forward.py measures the CPU",
    compiled=True,
)

if __name__ == "__main__":
    main(TOOL)
