"""The kernel for coded tokens without a GPU: under Triton's interpreter (`interpreted_coded.py`), and compiled for sm_80 and sm_90."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import coded_cases as cases
from inputs import on_cpu as make
from maxsim_kernels import api, explain
from maxsim_kernels.checks import Options, validate_coded

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("TRITON_INTERPRET is set: kernels are interpreted, not compiled", allow_module_level=True)

import record_architectures as architectures
import record_resources as recorder
from maxsim_kernels.gpu import geometry
from maxsim_kernels.gpu.coded import choice as coded_choice

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
    ("unit", 1, 96, (4, 32), HALF, False, (32, 0)),
    ("unit", 2, 384, (64, 32), HALF, False, (96, 0)),
    ("free", 4, 128, (64, 32), torch.bfloat16, False, (0, 0)),
    ("free", 2, 768, (1, 32), HALF, False, (32, 16)),
]
KERNELS = ("_coded_kernel", "_once_kernel", "_coded_pairs_kernel")
LOOKUP = re.compile(r"cp\.async\.ca\.shared\.global [^;]*, 0x4,")  # 4 bytes, as one weight has


@pytest.mark.slow
@pytest.mark.every_change
@pytest.mark.parametrize(("group", "checks"), [("sizes", 128), ("layouts", 42), ("broken", 10), ("once", 24)])
def test_the_kernel_agrees_with_float64(interpreted: Run, group: str, checks: int) -> None:
    interpreted("coded", group, checks)


@pytest.mark.slow
@pytest.mark.every_change
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_compile_within_their_resources(case, architecture, pairs, tmp_path) -> None:
    kind, bits, dim, shape, dtype, quantize, spills = case
    documents = cases.coded(kind, bits, dim, (30,) * shape[0])
    queries = make.gauss(*shape, dim, dtype=dtype)
    options = Options(quantize_queries=quantize, pairs=pairs)
    found = architectures.coded_launches(documents, queries, options, recorder.CAPABILITIES[architecture])
    (launch,) = [one for one in found if one.kernel.__name__ in KERNELS]
    once = kind != "bits" and dim <= 128 and shape[0] > 1 and dtype != SINGLE
    assert launch.kernel.__name__ == ("_coded_pairs_kernel" if pairs else "_once_kernel" if once else "_coded_kernel")
    assert launch.arguments["TOKENS"] * launch.arguments["WIDTH"] <= 16384
    binary = recorder.compiled(launch, architecture)
    used = recorder.resources(binary, tmp_path)
    assert used["shared"] <= recorder.LIMITS[architecture], used
    assert used["spill_bytes"] <= max(spills[architecture == 90], 16 if pairs else 0), used
    instruction = "mma" if dtype != SINGLE or quantize else "fma.rn.f32"
    assert instruction in binary.asm["ptx"]
    if kind != "bits":  # loads ahead made every lookup of a weight an asynchronous copy: 2.7 to 8 times slower on an H200
        assert not LOOKUP.search(binary.asm["ptx"])


def test_tiles_follow_from_query_rows() -> None:
    def rows(kind: str, *shape: int, dim: int = 128, dtype: torch.dtype = HALF, **options: Any) -> tuple[str, int]:
        call = validate_coded(
            make.gauss(*shape, dim, dtype=dtype), (documents := cases.coded(kind, 4, dim, (30,) * 4)), Options(**options)
        )
        kernel, config = coded_choice.choose(call, documents, (9, 0))
        return kernel, config.rows

    def bits(*shape: int, **options: Any) -> int:
        kernel, found = rows("bits", *shape, **options)
        assert kernel == "coded"
        return found

    assert [bits(n, 16) for n in (1, 2, 4, 8, 9)] == [16, 32, 64, 128, 256]
    assert bits(9, 16, dtype=SINGLE) == 256
    assert bits(9, 16, dtype=SINGLE, quantize_queries=False) == 32
    assert bits(4, 30, pairs=True) == 32
    assert [rows("unit", n, 16) for n in (1, 2, 4, 5, 70)] == [
        ("coded", 16),
        ("coded", 32),
        ("coded", 64),
        *[("coded once", 64)] * 2,
    ]
    assert rows("unit", 9, 16, dim=144) == ("coded", 128)
    assert rows("unit", 9, 16, dim=129) == ("coded", 64)  # rows that are read number by number (`unaligned.py`)
    assert rows("unit", 4, 100, pairs=True) == ("coded", 128)
    assert rows("unit", 9, 16, dtype=SINGLE) == ("coded", 32)


def test_the_number_of_documents_decides_nothing() -> None:
    """So that a document gets the same bits however a corpus is cut."""
    for kind in ("bits", "unit"):
        for queries in (make.gauss(1, 32, 128), make.gauss(9, 16, 128)):
            found = set()
            for count in (1, 2, 300):
                documents = cases.coded(kind, 2, 128, (3,) * count)
                found.add(coded_choice.choose(validate_coded(queries, documents, Options()), documents, (9, 0)))
            assert len(found) == 1


def test_what_runs_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "implementation", lambda call, impl: api.Implementation("triton", ""))
    documents = cases.coded("unit", 2, 128, (30,) * 4)
    for capability, tuned in (((9, 0), "measured on H200"), ((8, 0), "untuned")):
        monkeypatch.setattr(geometry, "hardware", lambda device, found=capability: geometry.Hardware(found, 132))
        said = explain(make.gauss(9, 32, 128, dtype=HALF), documents)
        assert said.startswith(
            f"triton: coded once kernel, tiles of 64 query rows x 64 document tokens, {tuned}: a token is decoded once"
        )
        assert explain(make.gauss(32, 128, dtype=HALF), documents).startswith(
            "triton: coded kernel, tiles of 32 query rows x 32"
        )
