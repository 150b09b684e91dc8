# ruff: noqa
"""Scratch: wide MaxSim and Chamfer as they were on main (`before/`) and as they are, checked, then timed in turns; each a CUDA graph.

    python scratch/compare.py --json FILE [--runs 20] [--only wide,chamfer]

Wide: bits of scores (and winners) are compared with those before, and scores of some documents with FP64. Chamfer: the distance is compared
with FP64 and with the bits before; a point's nearest too. A case that fails is named, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
for place in (HERE.parent / "kernels", HERE.parent / "benchmarks", HERE):
    sys.path.insert(0, str(place))

import before.nearest
import before.wide
import torch
from measure.timing import Flush, measure

from maxsim_kernels import Packed, quantize_int8
from maxsim_kernels.chamfer import nearest
from maxsim_kernels.checks import Options, validate
from maxsim_kernels.gpu.forward import dispatch

BEGAN = time.monotonic()
FAILED: list[str] = []


def graphed(run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """A graph of a call, and what it writes."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, out


def unit(*shape: int) -> torch.Tensor:
    found = torch.empty(shape, dtype=torch.float16, device="cuda")
    for block in found.view(-1, shape[-1]).split(1 << 14):
        block.copy_(torch.nn.functional.normalize(torch.randn(block.shape, device="cuda"), dim=-1))
    return found


def note(name: str, about: str, good: bool) -> None:
    if not good:
        FAILED.append(name)
        print(f"FAILED {name}: {about}", flush=True)


def timed(name: str, calls: dict[str, Any], runs: int, flush: Flush, out: dict[str, Any], **about: Any) -> None:
    times = measure(calls, runs, flush)
    out[name] = {"times": times, **about}
    shown = "  ".join(f"{key} {one['median_ms']:.4f} ({one['iqr_ms']:.4f})" for key, one in times.items())
    ratios = [f"before/now {times['before']['median_ms'] / times['now']['median_ms']:.3f}"]
    ratios += [f"{key}/now {one['median_ms'] / times['now']['median_ms']:.2f}" for key, one in times.items() if key not in ("before", "now")]  # fmt: skip
    print(f"{name:26s} {shown}  {'  '.join(ratios)} {about} [{time.monotonic() - BEGAN:.0f} s]", flush=True)


def wide_case(name: str, queries: Any, documents: Any, runs: int, flush: Flush, out: dict[str, Any], **options: Any) -> None:
    call = validate(queries, documents, Options(**options))
    now, got = graphed(lambda: dispatch.forward(call))
    with mock.patch.object(dispatch.wide, "launch_wide", before.wide.launch_wide):
        old, need = graphed(lambda: dispatch.forward(call))
    bits = all(torch.equal(one, other) for one, other in zip(got, need, strict=True))
    calls, error = {"before": old, "now": now}, None
    if isinstance(documents, torch.Tensor) and not options:
        some = documents[[0, len(documents) // 2, -1]].double()
        truth = torch.einsum("qid,bjd->qbij", queries.double(), some).amax(3).sum(2)
        found = got[0][:, [0, len(documents) // 2, -1]].double()
        error = float(((found - truth).abs() / truth.abs()).max())
        if queries.shape[0] == 1:
            calls["naive"] = graphed(lambda: torch.einsum("qd,bld->bql", queries[0], documents).max(2).values.sum(1))[0]
            flat = documents.view(-1, documents.shape[-1])
            calls["product alone"] = graphed(lambda: queries[0] @ flat.t())[0]
    note(name, f"bits {bits}, error {error}", bits and (error is None or error < 1e-5))
    timed(name, calls, runs, flush, out, bits=bits, error=error)


def wide_cases(runs: int, flush: Flush, out: dict[str, Any]) -> None:
    for d in (768, 1024, 2048, 4096):
        wide_case(f"wide d={d}", unit(1, 1024, d), unit(128, 1024, d), runs, flush, out)
        torch.cuda.empty_cache()
    queries, documents = unit(1, 1024, 768), unit(128, 1024, 768)
    wide_case("wide winners", queries, documents, runs, flush, out, return_argmax=True)
    wide_case("wide int8 document", queries, quantize_int8(documents, "document"), runs, flush, out)
    lengths = torch.randint(300, 1025, (128,), device="cuda")
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    packed = Packed(documents.view(-1, 768)[: int(ends[-1])], ends)
    wide_case("wide ragged", queries, packed, runs, flush, out)
    wide_case("wide ragged winners", queries, packed, runs, flush, out, return_argmax=True)
    many, short = unit(64, 32, 768), unit(1000, 180, 768)
    mask = torch.rand(1000, 180, device="cuda") < 0.9
    wide_case("wide short", many, short, runs, flush, out)
    wide_case("wide short, mask", many, short, runs, flush, out, document_mask=mask)


def exact(p: torch.Tensor, q: torch.Tensor) -> float:
    def one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x.double(), y.double()
        norms = y.square().sum(1)
        return torch.cat([torch.addmm(norms, b, y.t(), alpha=-2.0).amin(1) + b.square().sum(1) for b in x.split(2048)]).mean()

    return float(one(p, q) + one(q, p))


def clouds(points: int, d: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    p, q = (torch.randn(points, d, device="cuda") for _ in range(2))
    if kind == "apart":  # every nearest is far: bound by what a score's error lets through
        q = q * 0.1 + 3.0
    if kind == "surface":
        p, q = (torch.nn.functional.normalize(one, dim=1) for one in (p, q))
    return p, q


def chamfer_cases(runs: int, flush: Flush, out: dict[str, Any]) -> None:
    for points, d, kind in (
        (50_000, 3, "normal"), (50_000, 3, "surface"), (50_000, 3, "apart"), (10_000, 3, "normal"), (100_000, 3, "normal"),
        (50_000, 16, "normal"), (50_000, 128, "normal"), (1_000, 3, "normal"),
    ):  # fmt: skip
        name = f"chamfer {points} d={d} {kind}"
        p, q = clouds(points, d, kind)
        _, got = graphed(lambda p=p, q=q: nearest._run(p, q, True))
        _, need = graphed(lambda p=p, q=q: before.nearest._run(p, q, True))
        bits = all(torch.equal(one, other) for one, other in zip(got, need, strict=True))
        error = abs(got[0].item() - exact(p, q)) / got[0].item()
        note(name, f"bits {bits}, error {error}", bits and error < 1e-5)
        calls = {
            "before": graphed(lambda p=p, q=q: before.nearest._run(p, q, False))[0],
            "now": graphed(lambda p=p, q=q: nearest._run(p, q, False))[0],
        }
        try:
            import flash_maxsim

            flash_maxsim.flash_chamfer(p, q)
            calls["flash-maxsim"] = lambda p=p, q=q: flash_maxsim.flash_chamfer(p, q)
        except Exception as error_:  # named: the ratio to it is then missing
            print(f"no flash-maxsim: {error_!r}"[:160])
        timed(name, calls, runs, flush, out, bits=bits, error=error)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", required=True)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", default="wide,chamfer")
    asked = parser.parse_args()
    torch.manual_seed(0)
    out: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    flush = Flush()
    try:
        if "wide" in asked.only:
            wide_cases(asked.runs, flush, out)
        if "chamfer" in asked.only:
            chamfer_cases(asked.runs, flush, out)
    finally:
        Path(asked.json).write_text(json.dumps(out | {"failed": FAILED}, indent=1) + "\n")
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
