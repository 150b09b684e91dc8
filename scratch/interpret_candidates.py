"""The Triton candidates under the interpreter, on small shapes, against FP64 (Gluon has no interpreter)."""

from __future__ import annotations

import int8_launch as by
import int8_variants as it
import torch
from maxsim_kernels import Packed, quantize_int8
from maxsim_kernels.checks import Options, validate
from maxsim_kernels.gpu.forward.dense import launch_tiles
from maxsim_kernels.gpu.forward.tuning import Config


def show(name: str, scores: torch.Tensor, call: object) -> None:
    print(name, float((scores.double() - it.truth(call)).abs().max()), tuple(scores.shape), flush=True)


assert launch_tiles
small: Config = it.config(64, 64, 4, 3, 2)
for count, size in ((3, 32), (1, 150)):
    q, d = it.unit("cpu", count, size, 128), it.unit("cpu", 5, 180, 128, seed=1)
    padding = torch.arange(180) < torch.tensor([180, 130, 91, 100, 180])[:, None]
    holes = padding & ((torch.rand(5, 180) > 0.1) | torch.tensor([0, 1, 0, 0, 0]).bool()[:, None])
    d[~holes] = float("nan")
    call = validate(q, d, Options(document_mask=holes))
    show("index", by.by_index(call, small), call)
    codes = validate(q, quantize_int8(it.unit("cpu", 5, 180, 128, seed=2), "document"), Options())
    offsets = torch.tensor([0, 70, 100, 300])
    packed = validate(q, quantize_int8(Packed(it.unit("cpu", 300, 128, seed=3), offsets), "document"), Options())
    for edit in ("", "raw", "atend"):
        show(f"{edit or 'today'} dense", by.by_text(codes, small, edit), codes)
        show(f"{edit or 'today'} ragged", by.by_text(packed, small, edit), packed)
