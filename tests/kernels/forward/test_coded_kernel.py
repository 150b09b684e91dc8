"""The kernel for coded tokens without a GPU: under Triton's interpreter (`interpreted_coded.py`), and compiled for sm_80 and sm_90."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import coded_cases as cases
from inputs import on_cpu as make
from maxsim_kernels.checks import Options, validate_coded

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("TRITON_INTERPRET is set: kernels are interpreted, not compiled", allow_module_level=True)

import record_architectures as architectures
import record_resources as recorder
from maxsim_kernels.gpu.forward import coded

Run = Callable[[str, str, int], None]
HALF, SINGLE = torch.float16, torch.float32
# kind, bits, d, queries, their dtype, whether they are quantised; bytes a thread may spill on sm_80 and sm_90.
CASES = [
    ("bits", 1, 128, (64, 32), HALF, True, (0, 0)),
    ("bits", 2, 128, (4, 32), HALF, True, (0, 0)),
    ("bits", 4, 128, (1, 32), HALF, True, (0, 0)),
    ("bits", 4, 96, (64, 32), HALF, False, (0, 0)),
    ("bits", 2, 128, (4, 32), SINGLE, False, (0, 0)),
    ("bits", 1, 384, (64, 32), HALF, True, (64, 0)),
    ("unit", 1, 128, (1, 32), HALF, False, (16, 16)),
    ("unit", 2, 128, (64, 32), HALF, False, (0, 0)),
    ("unit", 4, 128, (4, 32), SINGLE, False, (16, 16)),
    ("unit", 2, 384, (64, 32), HALF, False, (96, 0)),
    ("free", 4, 128, (64, 32), torch.bfloat16, False, (0, 0)),
    ("free", 2, 768, (1, 32), HALF, False, (32, 16)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "checks"), [("sizes", 96), ("layouts", 39), ("broken", 10), ("once", 18)])
def test_the_kernel_agrees_with_float64(interpreted: Run, group: str, checks: int) -> None:
    interpreted("coded", group, checks)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_compile_within_their_resources(case, architecture, pairs, tmp_path) -> None:
    kind, bits, dim, shape, dtype, quantize, spills = case
    documents = cases.coded(kind, bits, dim, (30,) * shape[0])
    queries = make.gauss(*shape, dim, dtype=dtype)
    options = Options(quantize_queries=quantize, pairs=pairs)
    found = architectures.coded_launches(documents, queries, options, recorder.CAPABILITIES[architecture])
    name = "_coded_pairs_kernel" if pairs else "_coded_kernel"
    (launch,) = [one for one in found if one.kernel.__name__ == name]
    assert launch.arguments["TOKENS"] * launch.arguments["WIDTH"] <= 16384
    binary = recorder.compiled(launch, architecture)
    used = recorder.resources(binary, tmp_path)
    assert used["shared"] <= recorder.LIMITS[architecture], used
    assert used["spill_bytes"] <= max(spills[architecture == 90], 16 if pairs else 0), used
    instruction = "mma" if dtype != SINGLE or quantize else "fma.rn.f32"
    assert instruction in binary.asm["ptx"]


def test_tiles_follow_from_query_rows() -> None:
    documents = cases.coded("bits", 4, 128, (30,) * 4)

    def rows(*shape: int, kind: torch.dtype = HALF, **options: Any) -> int:
        call = validate_coded(make.gauss(*shape, 128, dtype=kind), documents, Options(**options))
        return coded.configuration(call, documents, (9, 0)).rows

    assert [rows(n, 16) for n in (1, 2, 4, 8, 9)] == [16, 32, 64, 128, 256]
    assert rows(9, 16, kind=SINGLE) == 256
    assert rows(9, 16, kind=SINGLE, quantize_queries=False) == coded.EXACT.rows
    assert rows(4, 30, pairs=True) == 32
