"""Scratch: candidates of the Chamfer forward at 50,000 points, d = 3 and 128: checked against FP64, then timed in turns.

    python scratch/chamfer_variants.py --json FILE [--runs 10]

"integer" takes chunk maxima on the bits of floats, which is right only for rows whose best score is >= 0: an upper bound on what the
idea brings (its error is printed, and may be large). A candidate that fails is named and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
for place in (HERE.parent / "kernels", HERE.parent / "benchmarks", HERE):
    sys.path.insert(0, str(place))

import torch
import triton
import triton.language as tl

from maxsim_kernels import chamfer_distance
from maxsim_kernels.chamfer import nearest
from maxsim_kernels.chamfer.filter_kernels import _assignment, _source_rows, _target_rows, first_tile
from maxsim_kernels.gpu.tile_ops import larger
from measure.timing import Flush, measure


@triton.jit(
    do_not_specialize=["first_group", "groups_p", "groups_q", "row_q", "tiles_p", "tiles_q", "splits_p", "splits_q", "rows"]
)
def integer_chunks(
    target_desc, feature_ptr, maxima_ptr, best_ptr,
    first_group, groups_p, groups_q, row_q, tiles_p, tiles_q, splits_p, splits_q, rows,
    D: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, DESCRIPTOR: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split, place, begin, end, targets = _assignment(groups_p, groups_q, row_q, tiles_p, tiles_q, splits_p, splits_q)
    lane = tl.arange(0, ROWS)
    sources = _source_rows(feature_ptr, (first_group + place) * ROWS + lane, D, WIDTH, True, PIECES)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    to = maxima_ptr + first_tile(place, groups_p, tiles_p, tiles_q) * (ROWS * PARTS)
    to = to + lane[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    for tile in tl.range(begin, end, num_stages=STAGES):
        cells = tl.dot(sources, _target_rows(target_desc, targets + tile * TILE, WIDTH, DESCRIPTOR, TILE).T)
        bits = tl.reshape(cells.to(tl.int32, bitcast=True), [ROWS, PARTS, TILE // PARTS])
        here = tl.reduce(bits, 2, larger).to(tl.float32, bitcast=True)
        tl.store(to + (tl.full([], 0, tl.int64) + tile) * (ROWS * PARTS), here)
        best = tl.maximum(best, tl.max(here, 1))
    tl.store(best_ptr + split.to(tl.int64) * rows + place * ROWS + lane, best)


def candidates(d: int) -> dict[str, dict]:
    """What of `nearest` each candidate replaces; tiles are never longer than rows are many, as `FILTERS` asks."""
    key = nearest.features_of(d)
    now = nearest.FILTERS[key]

    def config(**changed):
        return {"FILTERS": nearest.FILTERS | {key: replace(now, **changed)}}

    found: dict[str, dict] = {"as it is": {}}
    for megabytes in (64, 256, 512, 1024):
        found[f"{megabytes} MB of maxima"] = {"MAXIMA_BYTES": megabytes << 20}
    if d == 3:
        found |= {
            "128x128 w4, 2 stages": config(stages=2),
            "128x128 w4, 4 stages": config(stages=4),
            "128x64 w4, chunks of 64, 5 programs": config(tokens=64, short=64, programs=5),
            "integer 128x128 (upper bound)": {"chunks_kernel": integer_chunks},
            "integer 128x128, 256 MB (upper bound)": {"chunks_kernel": integer_chunks, "MAXIMA_BYTES": 256 << 20},
            "refine looks at 32": {"REFINES": nearest.REFINES | {True: (8, 32, 1024)}},
            "refine looks at 128": {"REFINES": nearest.REFINES | {True: (8, 128, 1024)}},
            "refine 16 rows": {"REFINES": nearest.REFINES | {True: (16, 64, 1024)}},
        }
    else:
        found |= {
            "256x64 w8, 2 stages": config(stages=2),
            "256x64 w8, 4 stages": config(stages=4),
            "256x128 w8, 1 program": config(tokens=128, programs=1),
            "256x128 w8, 2 stages, 512 MB": config(tokens=128, programs=1, stages=2) | {"MAXIMA_BYTES": 512 << 20},
            "128x64 w4, 3 programs": config(rows=128, warps=4, programs=3),
            "128x128 w4, 2 programs": config(rows=128, tokens=128, warps=4, programs=2, stages=2),
            "refine looks at 32": {"REFINES": nearest.REFINES | {False: (16, 32, 2048)}},
            "refine looks at 128": {"REFINES": nearest.REFINES | {False: (16, 128, 2048)}},
        }
    return found


def changed(p, q, replaced):
    """One call with parts of `nearest` replaced; never while another is in flight."""
    with mock.patch.multiple(nearest, **replaced) if replaced else mock.patch.object(nearest, "SAMPLE", nearest.SAMPLE):
        return nearest._run(p, q, False)


def call_of(name, p, q, replaced):
    """Recorded and replayed as the product's calls are, under a key of its own."""
    run = partial(changed, p, q, replaced)
    return lambda: nearest._replayed((p, q), p.device, run, "chamfer", False, name)


def exact(p, q) -> float:
    def one(x, y):
        x, y = x.double(), y.double()
        norms = y.square().sum(1)
        found = [(torch.addmm(norms, b, y.t(), alpha=-2.0).amin(1) + b.square().sum(1)) for b in x.split(2048)]
        return torch.cat(found).mean()

    return float(one(p, q) + one(q, p))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", required=True)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--points", type=int, default=50_000)
    asked = parser.parse_args()
    began, out = time.monotonic(), {}
    flush = Flush()
    for d in (3, 128):
        generator = torch.Generator("cuda").manual_seed(0)
        p, q = (torch.randn(asked.points, d, device="cuda", generator=generator) for _ in range(2))
        need, calls, about = exact(p, q), {"chamfer_distance": partial(chamfer_distance, p, q)}, {}
        bits = chamfer_distance(p, q).item()
        for name, replaced in candidates(d).items():
            try:
                call = call_of(name, p, q, replaced)
                got = [call().item() for _ in range(3)][-1]
                about[name] = {"error": abs(got - need) / need, "bits": got == bits}
                if not about[name]["error"] < 1e-5 and "upper bound" not in name:
                    raise ValueError(f"wrong: {about[name]}")
                calls[name] = call
            except Exception as error:  # named, and the rest goes on
                about[name] = {"failed": repr(error)[:400]}
                print(f"FAILED d={d} {name}: {repr(error)[:160]}", flush=True)
        try:
            import flash_maxsim

            calls["flash-maxsim"] = partial(flash_maxsim.flash_chamfer, p, q)
            calls["flash-maxsim"]()
        except Exception as error:  # the ratio is then taken from the table
            calls.pop("flash-maxsim", None)
            print(f"no flash-maxsim: {error!r}"[:160])
        times = measure(calls, asked.runs, flush)
        out[f"d={d}"] = {name: {**times.get(name, {}), **about.get(name, {})} for name in (calls | about)}
        Path(asked.json).write_text(json.dumps(out, indent=1) + "\n")
        print(f"-- {asked.points} points, d={d} [{time.monotonic() - began:.0f} s]: ms, relative error, bits as now")
        for name, one in times.items():
            more = about.get(name, {})
            print(f"{name:42s} {one['median_ms']:.4f} {more.get('error', 0):.1e} {more.get('bits', '')}", flush=True)


if __name__ == "__main__":
    main()
