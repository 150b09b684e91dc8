"""Masks of shared documents, and FP32 tokens under TF32, on a GPU: bits or tolerance first, then medians with the L2 flushed.

    python benchmarks/alone/masks.py [--json FILE] [--runs 15]

Masks: the plain call, `document_lengths`, masks of the same padding, of padding and holes in every document (a tenth of the tokens) or
in a tenth of the documents, and a query mask. A mask must give the bits of the lengths that say the same; for one query, whose kernel
adds in another order, the same to 2e-6 of what a query could score. FP32: IEEE, TF32, and both peers' calls of the same tokens.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from maxsim_kernels import maxsim
from measure.names import FLASH, LIK
from measure.session import about
from measure.timing import Call, Flush, measure
from results.file import write
from rivals.peers import dense

SCHEMA = "maxsim-kernels/masks/1"
MASKED = {  # queries, tokens of each, documents, tokens of each
    "16 queries x 4096 x 180": (16, 32, 4096, 180),
    "256 queries x 4096 x 180": (256, 32, 4096, 180),
    "ColPali 1K": (1, 1024, 1000, 1024),
    "1 query x 4096 x 180": (1, 32, 4096, 180),
}
SINGLE = {
    "FP32 32 queries x 2000 x 180": (32, 32, 2000, 180),
    "FP32 1 query x 1000 x 180": (1, 32, 1000, 180),
    "FP32 256 queries x 4096 x 128": (256, 32, 4096, 128),
}
STREAM_ROWS = 64  # query rows up to which a mask is read with every tile
TF32_BOUND = 1e-3  # of a score, a token


def unit(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Unit vectors."""
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=random, device="cuda"), dim=-1).to(dtype)


def mask_calls(count: int, size: int, documents: int, length: int) -> dict[str, Call]:
    """Every way to say which tokens count."""
    q, d = unit(count, size, 128, dtype=torch.float16, seed=0), unit(documents, length, 128, dtype=torch.float16, seed=1)
    random = torch.Generator("cuda").manual_seed(5)
    lengths = torch.randint(length // 2, length + 1, (documents,), device="cuda", generator=random)
    padding = torch.arange(length, device="cuda") < lengths[:, None]
    holes = padding & (torch.rand(documents, length, device="cuda", generator=random) > 0.1)
    some = padding & (holes | (torch.rand(documents, 1, device="cuda", generator=random) > 0.1))
    asked = torch.ones(count, size, dtype=torch.bool, device="cuda")
    asked[:, size * 3 // 4 :] = False
    return {
        "plain": lambda: maxsim(q, d),
        "document_lengths": lambda: maxsim(q, d, document_lengths=lengths),
        "mask, nothing hidden": lambda: maxsim(q, d, document_mask=torch.ones_like(padding)),
        "mask of padding": lambda: maxsim(q, d, document_mask=padding),
        "mask, holes in every document": lambda: maxsim(q, d, document_mask=holes),
        "mask, holes in a tenth": lambda: maxsim(q, d, document_mask=some),
        "query mask": lambda: maxsim(q, d, query_mask=asked),
    }


def check_masks(calls: dict[str, Call], count: int, size: int) -> None:
    """End the program where a mask gives other scores than the call without it that means the same."""
    allowed = 2e-6 * size if count * size <= STREAM_ROWS else 0.0
    for name, same in (("mask, nothing hidden", "plain"), ("mask of padding", "document_lengths")):
        apart = float((calls[name]() - calls[same]()).abs().max())
        if not apart <= allowed:
            raise SystemExit(f"{name}: {apart:.3g} from {same}, {allowed:.3g} allowed; nothing written")


@contextmanager
def precision(name: str) -> Any:
    """Multiply FP32 in this precision for a block."""
    setting = torch.backends.cuda.matmul
    before, setting.fp32_precision = setting.fp32_precision, name
    try:
        yield
    finally:
        setting.fp32_precision = before


def single_calls(count: int, size: int, documents: int, length: int) -> dict[str, Call]:
    """FP32 tokens by us and by both peers."""
    q, d = unit(count, size, 128, dtype=torch.float32, seed=0), unit(documents, length, 128, dtype=torch.float32, seed=1)

    def in_precision(name: str) -> Tensor:
        with precision(name):
            return maxsim(q, d)

    lineup = dense((FLASH, LIK), q, d)
    peers = {f"{method.name} {entry}": call for method in lineup.methods for entry, call in method.entries.items()}
    calls: dict[str, Call] = {"IEEE": lambda: in_precision("ieee"), "TF32": lambda: in_precision("tf32"), **peers}
    exact = calls["IEEE"]()
    for name, call in calls.items():
        apart = float((call() - exact).abs().max())
        if not apart <= TF32_BOUND * size:
            raise SystemExit(f"{name}: {apart:.3g} from IEEE, {TF32_BOUND * size:.3g} allowed; nothing written")
    return calls


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args(arguments)
    flush = Flush()
    report: dict[str, Any] = {"schema": SCHEMA, **about(), "ms": {}}
    for name, sizes in (MASKED | SINGLE).items():
        calls = mask_calls(*sizes) if name in MASKED else single_calls(*sizes)
        if name in MASKED:
            check_masks(calls, *sizes[:2])
        found = measure(calls, options.runs, flush)
        report["ms"][name] = {method: one["median_ms"] for method, one in found.items()}
        write(options.json, report)
        print(name, {method: round(ms, 4) for method, ms in report["ms"][name].items()}, flush=True)


if __name__ == "__main__":
    main()
