"""The backward kernels compiled for sm_80 and sm_90 without a GPU: no spills, and small enough for many programs a multiprocessor."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("TRITON_INTERPRET is set: kernels are interpreted, not compiled", allow_module_level=True)

from maxsim_kernels import backward, inverse_grid


def _recorder() -> ModuleType:
    name = "maxsim_kernels_test_record_resources"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("record_resources.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


recorder = _recorder()
LIMITS = {
    "_rows_kernel": 224, "_lists_kernel": 255, "_pieces_kernel": 80, "_own_kernel": 255, "_count_kernel": 64, "_place_kernel": 168,
}  # fmt: skip


def _launches(
    architecture: int, path: str, layout: str, dtype: torch.dtype, winners: torch.dtype, packed: bool, count: int = 8
) -> list[Any]:
    caught: list[Any] = []

    def catch(kernel: Any, grid: int, *arguments: Any, warps: int, **constants: Any) -> None:
        assert grid > 0
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        caught.append(recorder.Launch(kernel, {name: given[name] for name in kernel.arg_names}, warps))

    size, tokens, width = 32, 180, 128
    own = layout == "per_query"
    documents = torch.ones(*((count, 4) if own else (count,)), tokens, width, dtype=dtype)
    starts = torch.arange(count) * tokens if packed else None
    shape = (count, 4) if own else (count,) if layout == "pairs" else (count, count)
    with ExitStack() as patched:
        for module in (backward, inverse_grid):
            patched.enter_context(mock.patch.object(module, "launch", catch))
            capability = recorder.CAPABILITIES[architecture]
            patched.enter_context(mock.patch.object(module, "hardware", return_value=(capability, 132)))
        patched.enter_context(mock.patch.object(inverse_grid, "_accumulate", return_value=None))
        backward.backward(
            torch.ones(shape), torch.zeros(*shape, size, dtype=winners), torch.ones(count, size, width, dtype=dtype), None,
            documents.flatten(0, 1) if packed else documents, starts, layout, True, True, path,
        )  # fmt: skip
    return caught


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("path", "layout", "dtype", "winners", "packed"),
    [
        ("csr", "shared", torch.float16, torch.int16, False),
        ("csr", "shared", torch.float32, torch.int32, False),
        ("csr", "shared", torch.bfloat16, torch.int32, True),
        ("unified", "shared", torch.float16, torch.int16, False),
        ("atomic", "shared", torch.bfloat16, torch.int32, True),
        ("csr", "per_query", torch.float16, torch.int16, False),
        ("csr", "pairs", torch.float32, torch.int32, True),
    ],
)
def test_kernels_compile_without_spills(architecture, path, layout, dtype, winners, packed, tmp_path) -> None:
    launches = _launches(architecture, path, layout, dtype, winners, packed)
    expected = {"_rows_kernel"}
    if path == "csr":
        expected |= {"_own_kernel"} if layout != "shared" else {"_count_kernel", "_place_kernel", "_lists_kernel"}
    _check(launches, expected, architecture, tmp_path)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "winners", "packed"),
    [(torch.float16, torch.int16, False), (torch.float32, torch.int32, False), (torch.bfloat16, torch.int32, True)],
)
def test_lists_that_may_be_long_compile_without_spills(architecture, dtype, winners, packed, tmp_path) -> None:
    launches = _launches(architecture, "csr", "shared", dtype, winners, packed, count=64)
    expected = {"_rows_kernel", "_count_kernel", "_place_kernel", "_lists_kernel", "_pieces_kernel"}
    _check(launches, expected, architecture, tmp_path)


def _check(launches: list[Any], expected: set[str], architecture: int, tmp_path: Path) -> None:
    assert {launch.kernel.__name__ for launch in launches} == expected
    for launch in launches:
        used = recorder.resources(recorder.compiled(launch, architecture), tmp_path)
        assert used["spill_bytes"] == 0, (launch.kernel.__name__, used)
        assert used["registers"] <= LIMITS[launch.kernel.__name__], (launch.kernel.__name__, used)
        assert used["shared"] <= 48 << 10, (launch.kernel.__name__, used)
