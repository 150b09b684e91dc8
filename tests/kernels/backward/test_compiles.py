"""The backward kernels compiled for sm_80 and sm_90 without a GPU: no spills, and small enough for many programs a multiprocessor.

`resources.json` holds what each took; `python tests/helpers/record_gradients.py` writes it anew after a change that is meant.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("TRITON_INTERPRET is set: kernels are interpreted, not compiled", allow_module_level=True)

import record_gradients as gradients

recorder, RECORD = gradients.recorder, gradients.recorder.read(gradients.RECORD)
LIMITS = {
    "_rows_kernel": 224, "_lists_kernel": 255, "_pieces_kernel": 80, "_own_kernel": 255, "_count_kernel": 64, "_place_kernel": 168,
    "_table_kernel": 128, "_sum_kernel": 96, "_terms_kernel": 64, "_mean_kernel": 64, "_slopes_kernel": 64,
}  # fmt: skip


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("case", gradients.BACKWARDS, ids=lambda case: case.name)
def test_kernels_compile_without_spills(architecture, case, tmp_path) -> None:
    expected = {"_rows_kernel"}
    if case.path == "csr":
        lists = {"_count_kernel", "_place_kernel", "_lists_kernel"} if case.packed else {"_table_kernel", "_lists_kernel"}
        expected |= {"_own_kernel"} if case.layout != "shared" else lists
    _check(case, expected, architecture, tmp_path)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("case", gradients.LONG_LISTS, ids=lambda case: case.name)
def test_lists_that_may_be_long_compile_without_spills(architecture, case, tmp_path) -> None:
    begun = "_count_kernel" if case.packed else "_table_kernel"
    expected = {"_rows_kernel", "_sum_kernel", begun, "_place_kernel", "_lists_kernel", "_pieces_kernel"}
    _check(case, expected, architecture, tmp_path)


@pytest.mark.parametrize("architecture", [80, 90])
def test_lists_of_many_winners_compile_without_spills(architecture, tmp_path) -> None:
    expected = {"_rows_kernel", "_count_kernel", "_place_kernel", "_lists_kernel", "_pieces_kernel"}
    _check(gradients.MANY_WINNERS, expected, architecture, tmp_path)


def _check(case: Any, expected: set[str], architecture: int, tmp_path: Path) -> None:
    launches = gradients.backward_launches(case, architecture)
    assert {launch.kernel.__name__ for launch in launches} == expected
    _compile(case.name, launches, architecture, tmp_path)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("named", [False, True])
def test_the_contrastive_loss_is_three_launches_without_spills(architecture, named, tmp_path) -> None:
    launches = gradients.contrast_launches(named)
    assert [launch.kernel.__name__ for launch in launches] == ["_terms_kernel", "_mean_kernel", "_slopes_kernel"]
    _compile(gradients.contrast_name(named), launches, architecture, tmp_path)


def _compile(name: str, launches: list[Any], architecture: int, tmp_path: Path) -> None:
    for key, launch in gradients.keyed(name, launches, architecture).items():
        used = recorder.resources(recorder.compiled(launch, architecture), tmp_path)
        assert used["spill_bytes"] == 0, (key, used)
        assert used["registers"] <= LIMITS[launch.kernel.__name__], (key, used)
        assert used["shared"] <= 48 << 10, (key, used)
        gradients.compare(key, used, RECORD)


def test_sums_of_parts_keep_their_four_totals() -> None:
    # Triton's front end takes a name that a loop only moves to another, equal one for unchanged: interpreted all is right, compiled not.
    launch = next(
        one for one in gradients.backward_launches(gradients.LONG_LISTS[0], 90) if one.kernel.__name__ == "_sum_kernel"
    )
    loop = next(line for line in recorder.compiled(launch, 90).asm["ttir"].splitlines() if "scf.for" in line)
    assert loop.partition("iter_args(")[2].partition(")")[0].count("=") == 4, loop


def test_the_record_holds_no_kernel_that_is_gone() -> None:
    expected = {key for architecture in recorder.RECORDED for key in gradients.everything(architecture)}
    assert set(RECORD["kernels"]) == expected
