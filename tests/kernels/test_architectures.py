"""Every family of kernels on every architecture, without a GPU: shared memory, spills, and what AMD's GPUs are never given.

`architectures.json` holds what each launch takes; `python tests/helpers/record_architectures.py` writes it anew after a change that is
meant. The tests read it, and compile a few of its kernels again.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("TRITON_INTERPRET is set: kernels are interpreted, not compiled", allow_module_level=True)

import triton

import coded_cases
import record_architectures as architectures
import record_gradients as gradients
import record_resources as recorder
from inputs import on_cpu as make
from maxsim_kernels.checks import Options, validate_coded
from maxsim_kernels.gpu import geometry
from maxsim_kernels.gpu.coded import choice as coded_choice
from maxsim_kernels.gpu.forward import tuning

RECORD: dict[str, Any] = recorder.read(architectures.RECORD)
OTHERS = [one for one in recorder.CAPABILITIES if one not in recorder.RECORDED]
EVERY = pytest.mark.parametrize("architecture", list(recorder.CAPABILITIES), ids=str)
SPILLED = 32  # bytes a thread, at most: a few registers of a prologue
# A representative of each family that holds tiles in shared memory.
SAMPLES = (
    "general: everything: _general_kernel",
    "coded unit, 2 bits, d = 128, 64 x 32, float16: _once_kernel",
    "coded unit, 4 bits, d = 384, 64 x 32, float16: _coded_kernel",
    "Chamfer, d = 256, float16: slots_kernel",
)


def recorded(architecture: int | str) -> dict[str, dict[str, Any]]:
    """The record's kernels of an architecture."""
    name = recorder.architecture_name(architecture)
    return {key: used for key, used in RECORD["kernels"].items() if key.startswith(f"{name} ")}


def test_what_a_program_may_have() -> None:
    kilobytes = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99, "gfx942": 64}
    assert {name: limit >> 10 for name, limit in recorder.LIMITS.items()} == kilobytes
    assert recorder.shared_bytes((8, 6)) == 99 << 10
    assert recorder.shared_bytes((7, 5)) == 64 << 10  # Turing


@EVERY
def test_no_launch_takes_more_than_its_architecture_has(architecture) -> None:
    found = recorded(architecture)
    assert len(found) >= 40
    for key, used in found.items():
        assert used["shared"] <= recorder.LIMITS[architecture], key
        assert used["spill_bytes"] <= SPILLED, key
        assert used["registers"] <= (512 if architecture == "gfx942" else 255), key


def test_no_row_of_the_table_takes_more_than_the_architectures_that_take_it_have() -> None:
    own = recorder.read(recorder.RECORD)["kernels"]
    seen = set()
    for row in tuning.ROWS:
        for architecture, capability in recorder.CAPABILITIES.items():
            if all(tuning.configuration(key, capability) is not row.config for key in row.keys):
                continue
            known = own if architecture in recorder.RECORDED else RECORD["kernels"]
            start = f"{recorder.architecture_name(architecture)} {row.name}: "
            taken = [used["shared"] for key, used in known.items() if key.startswith(start)]
            assert taken, f"{start}no record"
            assert max(taken) <= recorder.LIMITS[architecture], start
            seen.add((row.name, row.architecture))
    assert seen == {(row.name, row.architecture) for row in tuning.ROWS}


@EVERY
def test_the_record_is_of_what_is_launched(architecture) -> None:
    now = {key: architectures.tile(launch) for key, launch in architectures.everything(architecture).items()}
    assert {key: used["tile"] for key, used in recorded(architecture).items()} == now, architectures.__doc__


@pytest.mark.slow
@pytest.mark.every_change
@pytest.mark.parametrize("architecture", OTHERS, ids=str)
def test_samples_compile_as_recorded(architecture, tmp_path) -> None:
    capability, seen = recorder.CAPABILITIES[architecture], {}
    for name, launches in (
        *((name, found) for name, found in architectures.forward_launches(architecture) if name == "general: everything"),
        *architectures.coded_calls(capability),
        (gradients.chamfer_name(256, torch.float16), gradients.chamfer_launches(256, torch.float16, (300, 200), architecture)),
    ):
        seen |= gradients.keyed(name, launches, architecture)
    for sample in SAMPLES:
        key = f"{recorder.architecture_name(architecture)} {sample}"
        used, known = recorder.resources(recorder.compiled(seen[key], architecture), tmp_path), RECORD["kernels"][key]
        assert used["shared"] <= recorder.LIMITS[architecture], key
        assert used["spill_bytes"] <= SPILLED, key
        if RECORD["triton"] == triton.__version__:
            assert used["shared"] <= known["shared"], f"{key}: {used}, {known} recorded"
            assert -(-used["registers"] // 8) <= -(-known["registers"] // 8), f"{key}: {used}, {known} recorded"


def test_descriptors_are_of_nvidia_from_hopper_on() -> None:
    assert [geometry.has_descriptors(recorder.CAPABILITIES[one]) for one in (80, 89, 90, 100, 120, "gfx942")] == [
        False, False, True, True, True, False,
    ]  # fmt: skip
    for architecture in OTHERS:
        launches = gradients.chamfer_launches(128, torch.float16, (300, 200), architecture)
        (described,) = [one.arguments["DESCRIPTOR"] for one in launches if one.kernel.__name__ == "slots_kernel"]
        assert described == (architecture in (100, 120))


def test_every_row_of_coded_tokens_is_in_the_record() -> None:
    """So that the limits above hold for each on the architectures that take it."""
    missing = {(row.name, row.architecture) for row in coded_choice.ROWS}
    for architecture, capability in recorder.CAPABILITIES.items():
        for kind, bits, d, shape, dtype, quantize, pairs in architectures.CODED:
            documents, queries = coded_cases.coded(kind, bits, d, (30,) * shape[0]), make.gauss(*shape, d, dtype=dtype)
            call = validate_coded(queries, documents, Options(quantize_queries=quantize, pairs=pairs))
            row = coded_choice.row_of(call, documents, capability)
            assert row.architecture in ("any", recorder.architecture_name(architecture))
            missing.discard((row.name, row.architecture))
    assert not missing


EXACT = (
    "_tiles_kernel",
    "_wide_kernel",
    "_stream_kernel",
    "_general_kernel",
    "_coded_kernel",
    "_combine_kernel",
    "_query_codes_kernel",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "coded", "search"])
def test_nothing_that_must_be_exact_is_left_to_the_compiler_to_fuse(kind: str) -> None:
    """Scores from FP8 and few-bit codes, and survivors, have as many multiply-adds with fusion as without.

    Bounds of a search (`_terms_kernel`, `_lower_kernel`, `_mark_kernel`) hold for either rounding, and compile both ways.
    """
    cases = [
        case for case in recorder.CASES if case.key in ("sm_90 dense fp8 token: token", "sm_90 ragged fp8 token: one query")
    ]
    found = {
        "fp8": lambda: [one for case in cases for one in recorder.launches(case)[1]],
        "coded": lambda: [one for _, calls in itertools.islice(architectures.coded_calls((9, 0)), 0, None, 3) for one in calls],
        "search": lambda: architectures.search_launches(torch.float16, 128, 32, (9, 0)),
    }[kind]()
    exact = (*EXACT, "_survivors_kernel", "_fetch_kernel")
    counted = [
        [recorder.compiled(one, 90, fused=fused).asm["ptx"].count("fma.rn.f32") for fused in (True, False)]
        for one in found
        if one.kernel.__name__ in exact or kind == "search"
    ]
    names = [one.kernel.__name__ for one in found if one.kernel.__name__ in exact or kind == "search"]
    assert counted
    assert [name for name, (with_fusion, without) in zip(names, counted) if with_fusion != without and name in exact] == []
