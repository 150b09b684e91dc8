"""What `warmup` launches covers what calls of any number of documents launch: kernels, constants and specialisations alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from maxsim_kernels import Packed, quantize_fp8, quantize_int8, warm
from maxsim_kernels.checks import Call, Options, validate
from maxsim_kernels.gpu import geometry
from maxsim_kernels.gpu.forward import combine, dense, dispatch, general, query_codes, tile_tables, wide

pytestmark = pytest.mark.slow

HOPPER, PROCESSORS, D = (9, 0), 132, 16
CPU = torch.device("cpu")
COUNTS = (1, 2, 3, 7, 8, 9, 40, 66, 67, 100, 528, 600, 1024, 1100, 5000, 8192, 9000)
QUERIES = [(20, 300), (1, 32), (1, 64), (2, 32), (4, 32), (64, 32), (1, 1024), (3, 100)]
FORMS = [
    "dense",
    "packed",
    "lengths",
    "mask",
    "int8 token",
    "int8 document, packed",
    "fp8 token, packed",
    "fp8 document",
    "wide",
    "wide, packed",
]


@contextmanager
def launches() -> Iterator[set[tuple[Any, ...]]]:
    """Every distinct kernel launched on CPU tensors as on a Hopper, without running it."""
    found: set[tuple[Any, ...]] = set()
    backend = CUDABackend(GPUTarget("cuda", 90, 32))

    def catch(kernel: Any, grid: int, *arguments: Any, warps: int, registers: int = 0, **constants: Any) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        parts: list[Any] = [kernel.__name__, warps, registers]
        for parameter in kernel.params:
            value = given[parameter.name]
            if parameter.is_constexpr:
                parts.append(value)
                continue
            aligned = not parameter.do_not_specialize_on_alignment
            parts.append(native_specialize_impl(backend, value, parameter.is_const, not parameter.do_not_specialize, aligned))
        found.add(tuple(parts))

    with ExitStack() as patched:
        for module in (geometry, dense, wide, general, dispatch):
            patched.enter_context(mock.patch.object(module, "hardware", return_value=(HOPPER, PROCESSORS)))
        for module in (dense, wide, general, combine, tile_tables, query_codes):
            patched.enter_context(mock.patch.object(module, "launch", catch))
        yield found


def call_of(queries: tuple[int, int], count: int, form: str, tokens: int, winners: bool) -> Call:
    d = 272 if form.startswith("wide") else D
    documents: Any = torch.zeros(count, tokens, d, dtype=torch.float16)
    if form.endswith("packed"):
        documents = Packed(documents.flatten(0, 1), torch.arange(count + 1) * tokens)
    for name, quantize in (("int8", quantize_int8), ("fp8", quantize_fp8)):
        if form.startswith(name):
            documents = quantize(documents, form.split(",", maxsplit=1)[0].split()[1])
    return validate(
        torch.zeros(*queries, d, dtype=torch.float16), documents, Options(
            document_mask=torch.ones(count, tokens, dtype=torch.bool) if form == "mask" else None,
            document_lengths=torch.full((count,), tokens) if form == "lengths" else None, return_argmax=winners,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("winners", [False, True])
@pytest.mark.parametrize("tokens", [40, 180, 600])
def test_no_number_of_documents_needs_another_kernel(form, queries, winners, tokens) -> None:
    most = 400_000 // tokens // (17 if form.startswith("wide") else 1)
    counts = [count for count in COUNTS if count <= most]
    if form == "wide, packed":  # a buffer of less than a tile is masked: a kernel of its own
        counts = [count for count in counts if count * tokens >= 256]
    with launches() as warmed:
        for count in warm.numbers(CPU):
            size = warm.packed_tokens(count, tokens) if form.endswith("packed") else tokens
            call = call_of(queries, count, form, size, winners)
            dispatch.forward(call)
            warm.other_lengths(call)
            if count == warm.numbers(CPU)[-1]:
                warm.other_numbers(call)
    for count in counts:
        with launches() as needed:
            dispatch.forward(call_of(queries, count, form, tokens, winners))
        missing = needed - warmed
        assert not missing, (count, sorted(str(one)[:200] for one in missing))
