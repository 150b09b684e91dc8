"""The forward kernels compiled for sm_80 and sm_90 without a GPU: shared memory, spills, matrix instructions, against `resources.json`.

Every row of `tuning.ROWS` is compiled as calls that choose it would be. `python tests/helpers/record_resources.py` writes the record
anew after a change that is meant; under another Triton than the recorded one only limits, instructions and spills are checked.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("TRITON_INTERPRET is set: kernels are interpreted, not compiled", allow_module_level=True)

import record_resources as recorder  # noqa: E402

RECORD: dict[str, Any] = recorder.read(recorder.RECORD)
SAME_TRITON = triton.__version__ == RECORD["triton"]


def _allowed(case: Any, kernel: str, recorded: int) -> int:
    """Bytes a thread may spill: four registers where the stream kernel holds whole tokens, two where a row caps registers.

    None otherwise where documents are read by descriptors.
    """
    if kernel in ("_tiles_kernel", "_wide_kernel"):
        return min(recorded, 8) if recorder.row_of(case).registers else 0
    return min(recorded, 16) if case.row.startswith("stream") and case.width <= 256 else recorded


def test_every_row_of_the_table_has_a_case() -> None:
    def row(case: Any) -> tuple[str, str]:
        own = (case.row, f"sm_{case.architecture}")
        return own if own in recorder.TABLE else (case.row, "any")

    assert {row(case) for case in recorder.CASES} == set(recorder.TABLE)


def test_names_of_cases_are_unique() -> None:
    keys = [case.key for case in recorder.CASES]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("case", recorder.CASES, ids=lambda case: case.key)
def test_a_call_chooses_the_row_it_is_named_after(case) -> None:
    config, launches = recorder.launches(case)
    assert replace(config, programs=0, bits=False) == replace(recorder.row_of(case), programs=0)
    tiles = [one for one in launches if one.kernel.__name__ in recorder.SCORING]
    assert tiles
    general = [one for one in tiles if one.kernel.__name__ == "_general_kernel"]
    own = bool({"own", "pairs"} & case.options) and "many" not in case.name
    assert [one.arguments["ALONE"] for one in general] == [own or config.programs == 0] * len(general)
    # The general kernel may take fewer rows than its row of the table says; document tiles of short ragged documents are smaller.
    if case.width % 16 and case.width > 128:  # another tile (`unaligned.py`)
        config = replace(config, tokens=32, warps=8)
    for one in tiles:
        assert one.warps == config.warps
        if one.kernel.__name__ == "_tiles_kernel":
            tokens, width = one.arguments["TOKENS"], one.arguments["WIDTH"] * (1 if case.codes else 2)
            capped = tokens == config.tokens and recorder.dense.resident(config, tokens, width) == config.programs
            holes = recorder.dense.hole_registers(config, one.arguments["ARGMAX"])
            assert one.registers == (holes if one.arguments["HOLES"] else config.registers if capped else 0)
        assert one.arguments["STAGES"] == config.stages
        assert one.arguments["ROWS"] <= config.rows
        assert one.arguments["TOKENS"] in (config.tokens, config.short)


@pytest.mark.slow
@pytest.mark.parametrize("case", recorder.CASES, ids=lambda case: case.key)
def test_kernels_compile_within_their_resources(case, tmp_path) -> None:
    for key, (launch, binary, used) in recorder.measured(case, tmp_path).items():
        name, text = launch.kernel.__name__, binary.asm["ptx"]
        assert used["shared"] <= recorder.LIMITS[case.architecture], key
        if name in ("_tiles_kernel", "_wide_kernel"):
            assert "wgmma.mma_async" in text, f"{key}: does not use the matrix instruction of sm_90"
        if name == "_tiles_kernel" and case.codes == "int8 token":
            assert "fma.rn.f32" in text, f"{key}: a token's scale is not one FMA a cell"
        if name == "_tiles_kernel":
            # Documents are dealt to whole waves of so many programs: one more than fits would wait for the others.
            tokens, width = launch.arguments["TOKENS"], launch.arguments["WIDTH"] * (1 if case.codes else 2)
            most = recorder.dense.HOLES_PROGRAMS if launch.arguments["HOLES"] else 64
            expected = recorder.dense.resident(recorder.row_of(case), tokens, width, most)
            assert expected <= recorder.resident(used, launch.warps), f"{key}: {used} leaves no room for {expected} programs"
        if name not in recorder.SCORING:
            assert used["spill_bytes"] == 0, f"{key}: {used}"
            continue
        assert key in RECORD["kernels"], f"{key}: not in {recorder.RECORD.name}; {recorder.__doc__}"
        known = RECORD["kernels"][key]
        allowed = _allowed(case, name, known["spill_bytes"])
        assert used["spill_bytes"] <= allowed, f"{key}: spills {used['spill_bytes']} bytes a thread, {allowed} allowed"
        if SAME_TRITON:
            assert used["shared"] <= known["shared"], f"{key}: more shared memory than recorded"
            # Registers are given out eight at a time, and decide with shared memory how many programs a multiprocessor holds.
            assert -(-used["registers"] // 8) <= -(-known["registers"] // 8), f"{key}: {used}, {known} recorded"


@pytest.mark.slow
@pytest.mark.parametrize("key", ["sm_90 dense int8 token: token", "sm_90 ragged int8 token: one query"])
def test_a_token_scale_is_one_multiply_add_where_the_compiler_fuses_nothing(key) -> None:
    """`tile_ops.MAGIC`: rounded before the subtraction, the product would have lost the integer."""
    case = next(case for case in recorder.CASES if case.key == key)
    for launch in recorder.launches(case)[1]:
        if launch.kernel.__name__ != "_tiles_kernel":
            continue
        text = recorder.compiled(launch, case.architecture, fused=False).asm["ptx"]
        cells = 2 * launch.arguments["ROWS"] * launch.arguments["TOKENS"] // (32 * launch.warps)  # two query tiles
        assert text.count("fma.rn.f32") >= cells


@pytest.mark.slow
@pytest.mark.parametrize("key", ["sm_80 general: int8 token, affine", "sm_90 general: int8 token, affine"])
def test_an_affine_offset_is_one_multiply_add_where_the_compiler_fuses_nothing(key) -> None:
    """Which of two products a compiler rounds before it adds them must not differ between variants of the kernel."""
    case = next(case for case in recorder.CASES if case.key == key)
    launch = next(one for one in recorder.launches(case)[1] if one.kernel.__name__ == "_general_kernel")
    text = recorder.compiled(launch, case.architecture, fused=False).asm["ptx"]
    assert text.count("fma.rn.f32") >= launch.arguments["ROWS"] * launch.arguments["TOKENS"] // (32 * launch.warps)


@pytest.mark.slow
def test_the_record_holds_no_kernel_that_is_gone() -> None:
    expected = set()
    for case in recorder.CASES:
        seen: dict[str, int] = {}
        for launch in recorder.launches(case)[1]:
            name = launch.kernel.__name__
            seen[name] = seen.get(name, 0) + 1
            if name in recorder.SCORING:
                expected.add(f"{case.key}, {name}" + (f" {seen[name]}" if seen[name] > 1 else ""))
    assert set(RECORD["kernels"]) == expected
