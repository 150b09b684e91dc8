"""What the forward kernels' launches compile to, without a GPU: registers, shared memory, spills. Written anew by

    python tests/helpers/record_resources.py

after a kernel, a row of `tuning.ROWS` or the pinned Triton has changed, and read in the diff: `tests/kernels/forward/test_compiles.py`
fails where a kernel begins to spill or takes more shared memory than `resources.json` beside it says.

A case is a call on CPU tensors that must choose a given row of the table. Its launches are caught, and compiled with the types and
specialisations that Triton would derive from the same arguments on that GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from maxsim_kernels import Packed, quantize_fp8, quantize_int8
from maxsim_kernels.checks import Call, Options, validate
from maxsim_kernels.gpu import geometry
from maxsim_kernels.gpu.forward import choice, combine, dense, dispatch, empties, general, query_codes, tile_tables, wide
from maxsim_kernels.gpu.forward.tuning import ROWS, Config
from places import TESTS

TABLE = {(row.name, row.architecture): row.config for row in ROWS}
RECORD = TESTS / "kernels" / "forward" / "resources.json"
# What is compiled for, and what `geometry.hardware` says of it: gfx942 is AMD's, whose numbers stand for nothing there.
CAPABILITIES: dict[int | str, tuple[int, int]] = {
    80: (8, 0), 89: (8, 9), 90: (9, 0), 100: (10, 0), 120: (12, 0), "gfx942": geometry.OTHER,
}  # fmt: skip


def shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory (AMD: LDS) that one program may have: 64 KB where nothing else is known, as on AMD's and older GPUs."""
    major, minor = capability
    if major == 8:
        return (163 if minor in (0, 7) else 99) << 10
    return {9: 227, 10: 227, 11: 227, 12: 99}.get(major, 64) << 10


LIMITS = {architecture: shared_bytes(found) for architecture, found in CAPABILITIES.items()}
RECORDED = (80, 90)  # in `resources.json`; the others in `architectures.json` (record_architectures.py)
SCORING = ("_tiles_kernel", "_wide_kernel", "_general_kernel")  # the kernels whose resources are recorded; the rest are small


def architecture_name(architecture: int | str) -> str:
    """ "sm_90", "gfx942"."""
    return f"sm_{architecture}" if isinstance(architecture, int) else architecture


@dataclass(frozen=True)
class Case:
    """A call on an architecture that must choose the row `row` of the table."""

    architecture: int | str
    row: str
    name: str
    queries: tuple[int, int]
    documents: tuple[int, int]
    width: int = 128
    dtype: torch.dtype = torch.float16
    codes: str = ""  # "int8 token", "fp8 document", ...
    options: frozenset[str] = field(default_factory=frozenset)
    processors: int = 1  # one: no document is cut into pieces

    @property
    def key(self) -> str:
        return f"{architecture_name(self.architecture)} {self.row}: {self.name}"

    def call(self) -> Call:
        count, size = self.documents
        queries: Any = torch.ones(*self.queries, self.width, dtype=self.dtype)
        own = (self.queries[0], count) if "own" in self.options else (count,)
        documents: Any = torch.ones(*own, size, self.width, dtype=self.dtype)
        if "packed" in self.options:
            documents = Packed(documents.flatten(0, 1), torch.arange(count + 1) * size)
        if "packed queries" in self.options:
            queries = Packed(queries.flatten(0, 1), torch.arange(self.queries[0] + 1) * self.queries[1])
        if self.codes:
            kind, granularity = self.codes.split()
            affine = {"affine": True} if "affine" in self.options else {}
            documents = (quantize_int8 if kind == "int8" else quantize_fp8)(documents, granularity, **affine)
        options = Options(
            pairs="pairs" in self.options, quantize_queries="float queries" not in self.options,
            return_argmax="winners" in self.options,
            query_mask=torch.ones(self.queries, dtype=torch.bool) if "query mask" in self.options else None,
            document_mask=torch.ones(*own, size, dtype=torch.bool) if "mask" in self.options else None,
            query_lengths=torch.full(self.queries[:1], size) if "query lengths" in self.options else None,
            document_lengths=torch.full(own, size) if "lengths" in self.options else None,
            out=torch.float16 if "asked" in self.options else torch.float32,
            empty_score=-1e9 if "asked" in self.options else None,
        )  # fmt: skip
        return validate(queries, documents, options)


def float_cases(architecture: int | str) -> list[Case]:
    """The kernels of every architecture, for float documents."""
    few, short = (1, 32), (8, 180)
    bf16, fp32 = torch.bfloat16, torch.float32
    large = "stream 64 x 4" if architecture == 90 else "stream"
    plain, wide = (100, 772) if architecture == 90 else (128, 768)  # rows that no descriptor describes
    everything = frozenset({"winners", "mask", "lengths", "query mask", "query lengths"})
    cases = [
        Case(architecture, "stream", "fp16", few, short),
        Case(architecture, "stream 32 x 4" if architecture == 90 else "stream", "bf16, width 256", few, short, 256, bf16),
        Case(architecture, large, "width 768", few, short, 768),
        Case(architecture, large, "pieces", few, (1, 800), processors=132),
        Case(architecture, "general", "mask", (4, 32), short, plain, options=frozenset({"mask"})),
        Case(architecture, "general", "everything", (4, 32), short, plain, options=everything),
        Case(architecture, "general", "few rows with winners", few, short, plain, options=frozenset({"winners", "mask"})),
        Case(
            architecture, "general", "packed, bf16", (4, 40), short, plain, bf16, options=frozenset({"packed queries", "mask"})
        ),
        Case(architecture, "general", "own, 100 rows", (4, 100), (2, 180), options=frozenset({"own", "winners"})),
        Case(architecture, "general", "pairs", (8, 32), short, options=frozenset({"pairs"})),
        Case(architecture, "general", "wide", (4, 32), short, wide, options=frozenset({"mask", "winners"})),
        Case(architecture, "exact", "fp32", (4, 32), short, 128, fp32),
        Case(architecture, "exact", "winners, packed", (4, 32), short, 128, fp32, options=frozenset({"winners", "packed"})),
        Case(architecture, "exact", "pieces", few, (1, 2048), 128, fp32, options=frozenset({"winners"}), processors=132),
        Case(architecture, "exact", "int8", (4, 32), short, 128, fp32, "int8 token", frozenset({"float queries"})),
    ]
    if architecture == 90:
        cases += [
            Case(90, "stream 64 x 4", "fp16", few, (8, 1024)),
            Case(90, "stream 64 x 4", "fp16, 64 rows", (1, 64), (8, 1024)),
            Case(90, "stream 32 x 1", "fp16", few, (20, 300), options=frozenset({"packed"})),
            Case(90, "stream 32 x 2", "fp16", few, (20, 180), options=frozenset({"packed"})),
            Case(90, "stream 32 x 4", "fp16", (1, 64), (8, 128)),
            Case(90, "stream ragged", "fp16", few, (65, 80), options=frozenset({"packed"})),
            Case(90, "stream", "fp16, many short", few, (70, 20)),
            Case(90, "stream ragged", "fp16, many short", few, (70, 20), options=frozenset({"packed"})),
            Case(90, "stream 32 x 4", "fp16, 64 rows, many", (1, 64), (70, 128)),
            Case(90, "general", "own, many short", (70, 32), (2, 20), options=frozenset({"own"})),
        ]
    return cases


def code_cases(architecture: int | str) -> list[Case]:
    """The kernels of every architecture, for quantised documents."""
    few, short = (1, 32), (8, 180)
    affine = frozenset({"affine", "winners"})
    plain = frozenset({"float queries"})
    large = "stream 32 x 1" if architecture == 90 else "stream"
    cases = [
        Case(architecture, large, "int8 token", few, short, codes="int8 token"),
        Case(architecture, "stream", "int8 document", few, short, codes="int8 document"),
        Case(architecture, "general", "int8 token, affine", (4, 32), short, codes="int8 token", options=affine),
        Case(architecture, "general", "int8 document, float queries", (4, 32), short, codes="int8 document", options=plain),
    ]
    if architecture == 90:
        cases += [
            Case(90, "stream", "fp8 document", few, short, codes="fp8 document"),
            Case(90, "stream 32 x 1", "int8 token, packed", few, short, codes="int8 token", options=frozenset({"packed"})),
            Case(90, "stream 64 x 4", "int8 token, width 768", (1, 64), short, 768, codes="int8 token"),
            Case(90, "stream ragged", "int8 token", few, (65, 80), codes="int8 token", options=frozenset({"packed"})),
            Case(90, "general", "fp8 token, float queries", (4, 32), short, codes="fp8 token", options=plain),
            Case(90, "general", "fp8, own", (4, 100), (2, 180), codes="fp8 document", options=frozenset({"own"})),
        ]
    return cases


def _tile_cases() -> list[Case]:
    """The kernels of sm_90 that read documents by tensor descriptors."""
    many, long, short, even, page = (64, 32), (8, 320), (8, 180), (8, 256), (8, 1024)
    ragged, winners = frozenset({"packed"}), frozenset({"winners"})
    both = ragged | winners
    cases = [
        Case(90, "dense float", "fp16", many, long),
        Case(90, "dense float", "bf16", many, long, 128, torch.bfloat16),
        Case(90, "dense float", "winners", many, long, options=winners),
        Case(90, "dense float", "rows", (64, 20), long),
        Case(90, "dense float masked", "fp16", many, (8, 48)),
        Case(90, "dense float masked", "width 64", many, (8, 48), 64),
        Case(90, "dense float masked winners", "fp16", many, (8, 48), options=winners),
        Case(90, "dense float", "width 64, winners", many, long, 64, options=winners),
        Case(90, "dense float", "masks", many, long, options=frozenset({"query mask", "query lengths"})),
        Case(90, "dense float narrow", "fp16", (4, 32), long),
        Case(90, "dense float narrow", "pieces", (4, 32), (2, 2048), processors=132),
        Case(90, "ragged float", "fp16", many, long, options=ragged),
        Case(90, "ragged float", "bf16, rows", (64, 20), long, 128, torch.bfloat16, options=ragged),
        Case(90, "ragged float", "packed, winners", many, long, options=both | {"packed queries"}),
        Case(90, "ragged float", "width 64", (64, 20), long, 64, options=ragged),
        Case(90, "ragged float narrow", "fp16", (4, 32), long, options=ragged),
        Case(90, "ragged float", "mask", many, long, options=frozenset({"mask"})),
        Case(90, "ragged float", "mask, as asked", many, long, options=frozenset({"mask", "asked"})),
        Case(90, "ragged float", "mask, winners", many, long, options=frozenset({"mask", "winners"})),
        Case(90, "ragged float narrow", "mask, rows", (4, 20), long, options=frozenset({"mask"})),
        Case(90, "ragged int8 long", "mask", many, (8, 1024), codes="int8 document", options=frozenset({"mask"})),
        Case(90, "ragged int8 token", "mask", many, long, codes="int8 token", options=frozenset({"mask"})),
        Case(90, "ragged fp8 token", "mask", many, long, codes="fp8 token", options=frozenset({"mask"})),
        Case(90, "wide tf32", "fp32", many, long, 128, torch.float32, options=frozenset({"tf32"})),
        Case(90, "wide tf32", "mask, one tile", many, (1000, 180), 128, torch.float32, options=frozenset({"tf32", "mask"})),
        Case(90, "wide tf32", "mask, winners", many, long, 128, torch.float32, options=frozenset({"tf32", "mask", "winners"})),
        Case(90, "wide float", "mask", many, long, 768, options=frozenset({"mask"})),
        Case(90, "wide float", "fp16", many, long, 768),
        Case(90, "wide float", "bf16, ragged", many, long, 768, torch.bfloat16, options=ragged),
        Case(90, "wide float", "ragged, winners", many, long, 768, options=both),
    ]
    for kind in ("int8", "fp8"):
        document, token = f"{kind} document", f"{kind} token"
        cases += [
            Case(90, f"dense {kind}", "document", many, page, codes=document),
            Case(90, f"dense {kind}", "corpus, rows", (64, 20), page, codes=f"{kind} corpus"),
            Case(90, f"dense {kind} winners", "document", many, page, codes=document, options=winners),
            Case(90, f"dense {kind} winners", "one query", (1, 1024), page, codes=document, options=winners),
            Case(90, f"dense {kind} brief", "document", many, even, codes=document),
            Case(90, f"dense {kind} brief", "winners", many, even, codes=document, options=winners),
            Case(90, f"dense {kind} odd", "document", many, short, codes=document),
            Case(90, f"dense {kind} odd", "100 tokens", many, (8, 100), codes=document),
            Case(90, f"dense {kind} tiny", "document", many, (8, 48), codes=document),
            Case(90, f"dense {kind} tiny", "winners, rows", (64, 20), (8, 48), codes=document, options=winners),
            Case(90, f"dense {token}", "width 256", many, long, 256, codes=token),
            Case(90, f"dense {kind} odd", "winners, rows", (64, 20), short, codes=document, options=winners),
            Case(90, f"dense {kind} narrow", "document", (4, 32), page, codes=document),
            Case(90, f"dense {token}", "token", many, long, codes=token),
            Case(90, f"dense {token}", "one query", (1, 1024), page, codes=token),
            Case(90, f"dense {token} short", "token", many, (8, 60), codes=token),
            Case(90, f"dense {token} short", "100 tokens, rows", (64, 20), (8, 100), codes=token),
            Case(90, f"dense {token} short winners", "token", many, (8, 64), codes=token, options=winners),
            Case(
                90, f"dense {token}{' winners' if kind == 'fp8' else ''}", "winners", many, long, codes=token, options=winners
            ),
            Case(90, f"ragged {kind}", "document", many, long, codes=document, options=ragged),
            Case(90, f"ragged {kind} long", "document", many, page, codes=document, options=ragged),
            Case(90, f"ragged {kind} long", "one query, winners", (1, 1024), page, codes=document, options=both),
            Case(90, f"ragged {kind} winners", "document", many, long, codes=document, options=both),
            Case(90, f"ragged {token}", "token", many, long, codes=token, options=ragged),
            Case(90, f"ragged {token}", "one query", (1, 1024), page, codes=token, options=ragged),
            Case(90, f"ragged {token} winners", "token", many, long, codes=token, options=both),
            Case(90, f"ragged {token} winners", "one query", (1, 1024), page, codes=token, options=both),
            Case(90, f"wide {kind}", "document", many, long, 768, codes=document),
            Case(90, f"wide {token}", "token, ragged", many, long, 768, codes=token, options=ragged),
            Case(90, f"wide {token}", "token, ragged, winners", many, long, 768, codes=token, options=both),
        ]
    return cases


CASES = [*float_cases(80), *code_cases(80), *float_cases(90), *code_cases(90), *_tile_cases()]


@dataclass(frozen=True)
class Launch:
    """One launch as Triton would see it."""

    kernel: Any
    arguments: dict[str, Any]
    warps: int
    registers: int = 0


def launches(case: Case) -> tuple[Config, list[Launch]]:
    """The row that a case's call chooses, and everything it would launch."""
    caught: list[Launch] = []

    def catch(kernel: Any, grid: int, *arguments: Any, warps: int, registers: int = 0, **constants: Any) -> None:
        assert grid > 0
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        caught.append(Launch(kernel, {name: given[name] for name in kernel.arg_names}, warps, registers))

    def hardware(device: torch.device) -> tuple[tuple[int, int], int]:
        return capability, case.processors

    capability, call = CAPABILITIES[case.architecture], case.call()
    with ExitStack() as patched:
        if "tf32" in case.options:
            for module in (choice, general):
                patched.enter_context(mock.patch.object(module, "allows_tf32", return_value=True))
        for module in (geometry, dense, wide, general, dispatch):
            patched.enter_context(mock.patch.object(module, "hardware", hardware))
        for module in (dense, wide, general, combine, tile_tables, query_codes, empties):
            patched.enter_context(mock.patch.object(module, "launch", catch))
        patched.enter_context(mock.patch.object(choice, "_BITS_PAY", 0))  # both ways to compare floats are launched
        config = choice.choose(call, hardware(call.queries.device)).config
        dispatch.forward(call)
    return config, caught


def row_of(case: Case) -> Config:
    """The row of the table that a case is about."""
    return TABLE.get((case.row, architecture_name(case.architecture))) or TABLE[case.row, "any"]


def compiled(launch: Launch, architecture: int | str, fused: bool = True) -> Any:
    """A launch's binary, specialised on its arguments as `JITFunction.run` would on that GPU.

    `fused`: whether the compiler may turn products that are added into multiply-adds.
    """
    amd = isinstance(architecture, str)
    target = GPUTarget("hip", architecture, 64) if amd else GPUTarget("cuda", architecture, 32)
    backend = (HIPBackend if amd else CUDABackend)(target)
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        kind, special = "constexpr", value
        if not parameter.is_constexpr:
            aligned = not parameter.do_not_specialize_on_alignment
            kind, special = native_specialize_impl(backend, value, parameter.is_const, not parameter.do_not_specialize, aligned)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(place,)] = value
        elif isinstance(special, str):
            attributes[(place,)] = backend.parse_attr(special)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.warps, "enable_fp_fusion": fused} | (
        {"maxnreg": launch.registers} if launch.registers else {}
    )
    return triton.compile(source, target=target, options=options)


def resources(binary: Any, folder: Path) -> dict[str, int]:
    """Registers a thread, shared memory in bytes, and bytes of a thread's stack: what the compiler has spilled."""
    if "amdgcn" in binary.asm:
        numbers = {
            name: int(value) for name, value in re.findall(r"^\s*-?\s+\.(\w+):\s+(\d+)$", binary.asm["amdgcn"], re.MULTILINE)
        }
        registers = numbers["vgpr_count"] + numbers["agpr_count"]
        spilled = 4 * numbers["vgpr_spill_count"]  # spilled scalar registers go to vector registers
        return {"registers": registers, "shared": binary.metadata.shared, "spill_bytes": spilled}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        raise FileNotFoundError(f"{tool}: not found; Triton's wheels for Linux carry it, and spills cannot be seen without it")
    held = folder / "kernel.cubin"
    held.write_bytes(binary.asm["cubin"])
    done = subprocess.run([str(tool), "--dump-resource-usage", str(held)], capture_output=True, text=True, check=True)
    found = re.search(rf"Function {binary.metadata.name}:\s*REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", done.stdout, re.DOTALL)
    if found is None:
        raise ValueError(f"cuobjdump: no usage of {binary.metadata.name} in {done.stdout!r}")
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "shared": binary.metadata.shared, "spill_bytes": stack + local}


def resident(used: dict[str, int], warps: int) -> int:
    """Programs that a multiprocessor of sm_90 holds at once: 64 K registers given out eight a thread, 228 KB shared, 64 warps."""
    registers = -(-used["registers"] // 8) * 8 * 32 * warps
    return min((64 << 10) // registers, (228 << 10) // (used["shared"] + 1024), 64 // warps)  # 1 KB a program is the driver's


def measured(case: Case, folder: Path) -> dict[str, tuple[Launch, Any, dict[str, int]]]:
    """Every launch of a case with its binary and resources, by key; kernels launched a second time have a number."""
    made: dict[str, tuple[Launch, Any, dict[str, int]]] = {}
    for launch in launches(case)[1]:
        binary = compiled(launch, case.architecture)
        name = launch.kernel.__name__
        again = sum(one.kernel.__name__ == name for one, _, _ in made.values())
        key = f"{case.key}, {name}" + (f" {again + 1}" if again else "")
        made[key] = (launch, binary, resources(binary, folder))
    return made


def read(record: Path) -> dict[str, Any]:
    """What was recorded: `triton`, and `kernels` by key."""
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return found


def write(record: Path, kernels: Mapping[str, Mapping[str, Any]]) -> None:
    """Record what kernels take, a line each."""
    lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(used)}" for key, used in kernels.items())
    record.write_text(f'{{\n  "triton": "{triton.__version__}",\n  "kernels": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")
    sys.stdout.write(f"{len(kernels)} kernels written to {record.name}\n")


def main() -> None:
    kernels: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            for key, (launch, _, used) in measured(case, Path(folder)).items():
                if launch.kernel.__name__ in SCORING:
                    kernels[key] = used
    write(RECORD, kernels)


if __name__ == "__main__":
    main()
