"""Scratch: candidates of the wide forward (1 query x 1024 tokens, 128 x 1024 tokens, FP16), checked, then timed in turns.

    python scratch/wide_variants.py --json FILE [--dims 768,1024,2048,4096] [--runs 12] [--skip gluon]

Every candidate's row maxima go through the product's `combine`. A candidate that fails, or whose scores are wrong, is named and left out.
Each is compared with FP64 on the timed shape, and with the product's bits. Gluon candidates are tried in a process that ends itself when
the GPU does not answer in time; it is then started again without them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
for place in (ROOT / "kernels", ROOT / "benchmarks", HERE):
    sys.path.insert(0, str(place))

HUNG = 17  # exit status of a process whose GPU work did not end
# name: (LOOP, INTEGER, ROWS, TOKENS, WIDTH, STAGES, warps, programs a multiprocessor)
TRITON = {
    "divisions 128x256 s3 (as the product)": (0, False, 128, 256, 64, 3, 8, 1),
    "divisions 128x256 s4": (0, False, 128, 256, 64, 4, 8, 1),
    "counters 128x256 s3": (1, False, 128, 256, 64, 3, 8, 1),
    "counters 128x256 s4": (1, False, 128, 256, 64, 4, 8, 1),
    "nested 128x256 s3": (2, False, 128, 256, 64, 3, 8, 1),
    "nested 128x256 s4": (2, False, 128, 256, 64, 4, 8, 1),
    "nested 128x256 s4 integer": (2, True, 128, 256, 64, 4, 8, 1),
    "counters 128x256 slices of 128 s2": (1, False, 128, 256, 128, 2, 8, 1),
    "counters 256x128 s4": (1, False, 256, 128, 64, 4, 8, 1),
    "nested 128x128 4 warps s3, 2 programs": (2, False, 128, 128, 64, 3, 4, 2),
}
# name: (TOKENS, STAGES, RESIDENT, INTEGER, order)
GLUON = {
    "gluon s4": (256, 4, 0, False),
    "gluon s3": (256, 3, 0, False),
    "gluon s4 integer": (256, 4, 0, True),
    "gluon s3, 5 slices resident": (256, 3, 5, False),
    "gluon s2, 7 slices resident": (256, 2, 7, False),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", required=True)
    parser.add_argument("--dims", default="768,1024,2048,4096")
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--skip", default="")
    parser.add_argument("--child", action="store_true")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    if asked.child:
        child(asked)
        return
    command = [sys.executable, "-u", __file__, "--child", *sys.argv[1:]]
    status = subprocess.run(command, timeout=240).returncode
    if status == HUNG:
        print("a Gluon candidate hung or broke the context: again without them", flush=True)
        status = subprocess.run([*command, "--skip", "gluon"], timeout=240).returncode
    sys.exit(status)


class Watch:
    """Ends the process where a piece of GPU work does not end in time: a kernel that waits for ever blocks every other way out."""

    def __init__(self) -> None:
        self.deadline, self.what = 0.0, ""
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(0.25)
            if self.deadline and time.monotonic() > self.deadline:
                print(f"HUNG: {self.what}", flush=True)
                os._exit(HUNG)

    def until(self, seconds: float, what: str) -> None:
        self.what, self.deadline = what, time.monotonic() + seconds if seconds else 0.0


def child(asked: argparse.Namespace) -> None:
    import torch

    from maxsim_kernels import maxsim
    from maxsim_kernels.checks import Options, validate
    from maxsim_kernels.gpu.forward.combine import combine, row_maxima
    from measure.timing import Flush, measure
    from triton.tools.tensor_descriptor import TensorDescriptor
    from wide_tiles import tiles_kernel

    try:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        from wide_gluon import specialised_kernel

        gluon = "gluon" not in asked.skip
    except Exception as error:  # reported, and the rest goes on
        print(f"no Gluon: {error!r}")
        gluon = False
    watch, began = Watch(), time.monotonic()
    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def unit(*shape: int):
        found = torch.empty(shape, dtype=torch.float16, device="cuda")
        for block in found.view(-1, shape[-1]).split(1 << 14):
            block.copy_(torch.nn.functional.normalize(torch.randn(block.shape, device="cuda"), dim=-1))
        return found

    def truth(queries, documents):
        """Scores in FP64, and row maxima."""
        flat = documents.reshape(-1, documents.shape[-1])
        step = max(1, 16384 // documents.shape[1]) * documents.shape[1]
        best = [
            (queries.double() @ block.double().t()).view(queries.shape[0], -1, documents.shape[1]).amax(2)
            for block in flat.split(step)
        ]
        return torch.cat(best, 1).sum(0)

    def finished(call, maxima, scores):
        combine(call, maxima, 0, maxima.documents, scores, None)
        return scores.view(-1)

    def prepared(queries, documents):
        call = validate(queries, documents, Options())
        rows, count = call.queries.shape[0] * call.queries.shape[1], documents.shape[0]
        maxima = row_maxima(rows, count, 1, call.queries.shape[1], queries.device, False, 1 << 30)
        scores = torch.empty(call.queries.shape[0], count, device="cuda")
        return call, rows, maxima, scores

    def by_triton(queries, documents, loop, integer, rows_tile, tokens, width, stages, warps, programs):
        call, rows, maxima, scores = prepared(queries, documents)
        count, size, dim = documents.shape
        one = TensorDescriptor(queries, [rows, dim], [dim, 1], [rows_tile, width])
        two = TensorDescriptor(documents, [count * size, dim], [dim, 1], [tokens, width])
        groups = -(-rows // rows_tile)
        chunks = max(1, min(count, processors * programs // groups))

        def run():
            tiles_kernel[(groups * chunks,)](
                one, two, maxima.best, rows, count, size, -(-dim // width), groups, chunks, maxima.best.stride(0),
                LOOP=loop, INTEGER=integer, ROWS=rows_tile, TOKENS=tokens, WIDTH=width, STAGES=stages, num_warps=warps,
            )  # fmt: skip
            return finished(call, maxima, scores)

        return run

    def by_gluon(queries, documents, tokens, stages, resident, integer):
        call, rows, maxima, scores = prepared(queries, documents)
        count, size, dim = documents.shape
        layout = gl.NVMMASharedLayout(128, 16, 2)
        one = GluonDescriptor(queries, [rows, dim], [dim, 1], [64, 64], layout)
        two = GluonDescriptor(documents, [count * size, dim], [dim, 1], [tokens, 64], layout)
        groups = -(-rows // 128)
        chunks = max(1, min(count, processors // groups))

        def run():
            specialised_kernel[(groups * chunks,)](
                one, two, maxima.best, rows, count, size, -(-dim // 64), groups, chunks, maxima.best.stride(0),
                TOKENS=tokens, WIDTH=64, STAGES=stages, CONSUMERS=2, RESIDENT=resident, INTEGER=integer, REGISTERS=240, num_warps=4,
            )  # fmt: skip
            return finished(call, maxima, scores)

        return run

    makers = {name: partial(by_triton, **dict(zip(("loop", "integer", "rows_tile", "tokens", "width", "stages", "warps", "programs"), row, strict=True))) for name, row in TRITON.items()}  # fmt: skip
    if gluon:
        makers |= {name: partial(by_gluon, **dict(zip(("tokens", "stages", "resident", "integer"), row, strict=True))) for name, row in GLUON.items()}  # fmt: skip
    out = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "rows": {}, "failed": {}}

    def save():
        Path(asked.json).write_text(json.dumps(out, indent=1) + "\n")

    torch.manual_seed(0)
    # Small shapes first: odd numbers of documents, d that is no multiple of a slice, rows that fill no tile, documents that fill none.
    alive = {}
    small = [
        (unit(rows, dim), unit(count, size, dim)) for rows, count, size, dim in ((1024, 5, 1024, 768), (200, 19, 300, 776))
    ]
    needs = [truth(*one) for one in small]
    for name, make in makers.items():
        try:
            watch.until(25, name)
            errors = []
            for (queries, documents), need in zip(small, needs, strict=True):
                got = make(queries, documents)()
                torch.cuda.synchronize()
                errors.append(float(((got.double() - need).abs() / need.abs()).max()))
            watch.until(0, "")
            if not max(errors) < 1e-5:
                raise ValueError(f"wrong: relative errors {errors}")
            alive[name] = make
        except Exception as error:  # named, and the rest goes on
            watch.until(0, "")
            out["failed"][name] = repr(error)[:500]
            if name in GLUON and "CUDA error" in repr(error):  # the context is lost
                print(f"{name}: {error!r}", flush=True)
                os._exit(HUNG)
            print(f"FAILED {name}: {repr(error)[:160]}", flush=True)
    print(f"checked small shapes: {len(alive)} of {len(makers)} right, {time.monotonic() - began:.0f} s", flush=True)
    save()
    flush = Flush()
    for dim in [*map(int, asked.dims.split(",")), -1024]:
        if time.monotonic() - began > 75:
            print(f"d={dim}: no time left")
            continue
        zeros, dim = dim < 0, abs(dim)
        queries, documents = unit(1024, dim), unit(128, 1024, dim)
        if zeros:  # what does power hold? zeros take little
            queries.zero_()
            documents.zero_()
        flat = documents.view(-1, dim)
        need, ours = truth(queries, documents), maxsim(queries, documents)
        calls = {
            "ours": partial(maxsim, queries, documents),
            "naive max": lambda q=queries, d=documents: torch.einsum("qd,bld->bql", q, d).max(2).values.sum(1),
            "naive amax": lambda q=queries, d=documents: torch.einsum("qd,bld->bql", q, d).amax(2).sum(1),
            "cuBLAS product alone": lambda q=queries, f=flat: q @ f.t(),
        }
        about = {}
        for name, make in alive.items():
            if zeros and name not in ("nested 128x256 s4", "gluon s4", "divisions 128x256 s4"):
                continue
            try:
                watch.until(15, name)
                run = make(queries, documents)
                got = run().clone()
                torch.cuda.synchronize()
                watch.until(0, "")
                error = float(((got.double() - need).abs() / need.abs().clamp_min(1e-9)).max())
                about[name] = {"error": error, "bits": bool(torch.equal(got, ours.view(-1)))}
                if not error < 1e-5:
                    raise ValueError(f"wrong: {error}")
                calls[name] = run
            except Exception as error:  # named, and the rest goes on
                watch.until(0, "")
                out["failed"][f"{name}, d={dim}"] = repr(error)[:500]
                print(f"FAILED {name}, d={dim}: {repr(error)[:160]}", flush=True)
        watch.until(40, f"timing d={dim}")
        times = measure(calls, asked.runs if not zeros else 6, flush)
        watch.until(0, "")
        work = 2.0 * 1024 * 128 * 1024 * dim
        label = f"d={dim}{' zeros' if zeros else ''}"
        out["rows"][label] = {
            name: {**one, **about.get(name, {}), "tflops": work / one["median_ms"] / 1e9} for name, one in times.items()
        }
        save()
        naive = times["naive max"]["median_ms"], times["naive amax"]["median_ms"]
        clocks = subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()  # fmt: skip
        print(f"-- {label}: ms, TFLOP/s, x naive max, x naive amax [{clocks}; {time.monotonic() - began:.0f} s]")
        for name, one in times.items():
            ms, bits = one["median_ms"], "" if about.get(name, {}).get("bits", True) else "  OTHER BITS"
            print(f"{name:40s} {ms:.4f} {work / ms / 1e9:6.0f} {naive[0] / ms:.3f} {naive[1] / ms:.3f}{bits}", flush=True)
        del calls, queries, documents, flat
        torch.cuda.empty_cache()
    save()


if __name__ == "__main__":
    main()
