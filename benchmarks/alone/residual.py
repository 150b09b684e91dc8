"""Candidates of the kernel that decodes residual tokens once (`coded._once_kernel`): errors against FP64, then medians in turns.

    python benchmarks/alone/residual.py [--json FILE] [--runs 10]

Beside today's kernel, decoding to FP16 first, FP16 decoded before, and late-interaction-kernels' kernel where that is
installed. Each candidate is captured in a CUDA graph, so that what a candidate switches is fixed when it is timed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from alone import coded as cases
from maxsim_kernels import maxsim
from maxsim_kernels.gpu import launch
from maxsim_kernels.gpu.forward import coded
from maxsim_kernels.gpu.forward.tuning import Config
from measure.session import kernels
from measure.timing import Call, Flush, Graphed, measure
from results.file import write

SCHEMA = "maxsim-kernels/residual/1"
# Rows, tokens, warps, stages, programs a multiprocessor; whether weights are selected. 0 rows: today's kernel with other stages.
TODAY = {
    "today's, one stage": (0, 0, 0, 1, 0, False),
    "today's, selected": (0, 0, 0, 2, 0, True),
    "today's, selected, one stage": (0, 0, 0, 1, 0, True),
}
MANY = TODAY | {
    "128 x 128, selected": (128, 128, 8, 2, 2, True),
    "128 x 128, looked up": (128, 128, 8, 2, 2, False),
    "128 x 64, selected": (128, 64, 8, 2, 2, True),
    "64 x 64, selected": (64, 64, 4, 2, 4, True),
    "64 x 64 x 3, looked up": (64, 64, 4, 3, 3, False),
}
FEW = TODAY | {
    "few, 32, selected": (32, 32, 4, 2, 16, True),
    "few, 64, selected": (32, 64, 4, 2, 12, True),
    "few, 64, looked up": (32, 64, 4, 2, 12, False),
    "few, 64 x 8 warps, selected": (32, 64, 8, 2, 8, True),
}


def switched(call: Call, variant: tuple[int, int, int, int, int, bool]) -> Call:
    """The call, captured with a candidate in place of what calls take."""
    before = coded.ONCE, coded.ONCE_FEW, coded.ONCE_SELECTED, coded.SELECTED, coded.MANY, coded.FEW
    made = Graphed(call)
    rows, _, _, stages, _, selected = variant
    if not rows:
        coded.MANY, coded.FEW = replace(coded.MANY, stages=stages), replace(coded.FEW, stages=stages)
        coded.SELECTED = selected
    else:
        coded.ONCE = coded.ONCE_FEW = Config(*variant[:5], "candidate", "")
        coded.ONCE_SELECTED = selected
    launch._plans.clear()  # a recorded call would replay another candidate
    made()
    coded.ONCE, coded.ONCE_FEW, coded.ONCE_SELECTED, coded.SELECTED, coded.MANY, coded.FEW = before
    launch._plans.clear()
    return made


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args(arguments)
    flush, random = Flush(), torch.Generator("cuda").manual_seed(0)
    rows: list[dict[str, Any]] = []
    for shape, (count, documents, size) in cases.SHAPES.items():
        queries = torch.nn.functional.normalize(torch.randn(count, 32, cases.D, device="cuda", generator=random), dim=-1).half()
        for bits in (2, 4):
            tokens = cases.residual_tokens(bits, documents, size, random)
            calls, errors = cases.calls_of(queries, tokens, size)
            ours = partial(maxsim, queries, tokens, quantize_queries=False)
            for name, variant in (MANY if count > 2 else FEW).items():
                call = switched(ours, variant)
                errors[name] = cases.error(queries, tokens, call(), size, False)
                if not errors[name] <= cases.BOUND:
                    sys.stdout.write(f"WRONG {shape}, {bits} bits, {name}: error {errors[name]:g}\n")
                    continue
                calls[name] = call
            found = {name: one["median_ms"] for name, one in measure(calls, options.runs, flush).items()}
            rows.append({"shape": shape, "bits": bits, "ms": found, "error": errors})
            sys.stdout.write("".join(f"{shape}, {bits} bits: {name:30} {ms:8.3f} ms\n" for name, ms in found.items()))
            about = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), **kernels()}
            write(options.json, {"schema": SCHEMA, **about, "rows": rows})


if __name__ == "__main__":
    main()
