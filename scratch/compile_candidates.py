"""What the candidates compile to for sm_90, without a GPU."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import int8_launch as by
import int8_variants
import record_resources as recorder
import triton
from maxsim_kernels.gpu import geometry
from maxsim_kernels.gpu.forward import combine, dense, general, query_codes, tile_tables
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

DONE: dict[Any, str] = {}


def _noted(kernel: Any, grid: int, *arguments: Any, warps: int, registers: int = 0, **constants: Any) -> None:
    if kernel.__name__ == "_tiles_kernel" or by.caught is None:
        by.go(kernel, grid, *arguments, warps=warps, registers=registers, **constants)


def compiled(kernel: Any, arguments: dict[str, Any], warps: int, registers: int) -> Any:
    """The binary that `JITFunction.run` would have made."""
    target = GPUTarget("cuda", 90, 32)
    backend = CUDABackend(target)
    arguments = arguments | {"num_warps": warps}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        kind, special = "constexpr", value
        if not parameter.is_constexpr:
            aligned = not parameter.do_not_specialize_on_alignment
            kind, special = native_specialize_impl(backend, value, parameter.is_const, not parameter.do_not_specialize, aligned)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(place,)] = value
        elif isinstance(special, str):
            attributes[(place,)] = backend.parse_attr(special)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options={"num_warps": warps} | ({"maxnreg": registers} if registers else {}))


def show(groups: Any, families: Any, variants: Any, calls_of: Any, wanted: str) -> None:
    """A line a launch."""
    folder = Path("/tmp/int8work/dump") if Path("/tmp/int8work/dump").is_dir() else Path(tempfile.mkdtemp())
    nvdisasm = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"

    def fake(device: Any) -> Any:
        return geometry.Hardware((9, 0), 1)

    modules = (geometry, dense, general, by, int8_variants, sys.modules["__main__"], *(by.edited(name) for name in by.EDITS))
    for module in modules:
        module.hardware = fake  # type: ignore[attr-defined]
    quiet = lambda *given, **more: None  # noqa: E731
    with mock.patch.object(query_codes, "launch", quiet), mock.patch.object(tile_tables, "launch", quiet), mock.patch.object(
        combine, "launch", quiet
    ):
        for group in groups:
            for family in families(group):
                calls = calls_of(group, family, "cpu", True)
                for name, form in variants(group, family).items():
                    if wanted not in f"{family} {name}":
                        continue
                    by.caught = []
                    for call in list(calls.values())[:1]:
                        try:
                            form(call)
                        except Exception as error:  # noqa: BLE001
                            print(f"{family}: {name}: FAILED {type(error).__name__}: {str(error)[:300]}")
                            raise
                    for number, (kernel, arguments, warps, registers) in enumerate(by.caught):
                        try:
                            binary = compiled(kernel, arguments, warps, registers)
                        except Exception as error:  # noqa: BLE001
                            print(f"{family}: {name}: {kernel.__name__} FAILED {type(error).__name__}: {str(error)[-1500:]}")
                            continue
                        used = recorder.resources(binary, folder)
                        label = f"{family} {name} {number}".replace(" ", "_")
                        (folder / f"{label}.cubin").write_bytes(binary.asm["cubin"])
                        (folder / f"{label}.ptx").write_text(binary.asm["ptx"])
                        (folder / f"{label}.ttgir").write_text(binary.asm["ttgir"])
                        sass = subprocess.run([nvdisasm, "-c", folder / f"{label}.cubin"], capture_output=True, text=True, check=True)
                        (folder / f"{label}.sass").write_text(sass.stdout)
                        print(f"{family}: {name}: {kernel.__name__} {used} resident {recorder.resident(used, warps)}", flush=True)
