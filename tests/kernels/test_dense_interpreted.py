"""The Triton kernels without a GPU: run by Triton's interpreter on small shapes, and compiled for sm_80 and sm_90."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.slow
def test_kernels_agree_with_the_reference_under_the_interpreter() -> None:
    script = Path(__file__).with_name("interpreted_dense.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "74 checked"


POINTER = "*fp16"
INTEGERS = ("query_count", "query_size", "blocks_per_query", "out_limit", "documents", "document_size", "width")
BLOCKS = {
    "RAGGED": True, "HAS_LENGTHS": False, "HAS_MASK": False, "HAS_QUERY_LENGTHS": False, "HAS_QUERY_MASK": False, "PADDED": 32,
    "WIDTH": 128, "PRECISION": "ieee",
}  # fmt: skip


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], architecture: int, config: Any) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(k),): v for k, v in constants.items()})
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


@pytest.mark.parametrize(("architecture", "limit"), [(80, 163 << 10), (90, 227 << 10)])
@pytest.mark.parametrize("name", ["stream", "blocks"])
def test_ragged_kernel_compiles_within_shared_memory(name: str, architecture: int, limit: int) -> None:
    from maxsim_kernels import dense
    from maxsim_kernels.tuning import configuration

    config = configuration(name, (architecture // 10, architecture % 10))
    assert config is not None
    types = {
        "query_ptr": POINTER, "document_ptr": POINTER, "query_length_ptr": "*i64", "query_mask_ptr": "*u8", "start_ptr": "*i64",
        "length_ptr": "*i64", "mask_ptr": "*u8", "out_ptr": "*fp32",
    }  # fmt: skip
    constants = {**BLOCKS, "ROWS": config.rows, "TOKENS": config.tokens, "STAGES": config.stages}
    binary = compiled(dense._blocks_kernel, types, constants, architecture, config)
    assert 0 < binary.metadata.shared <= limit
    assert "st.local" not in binary.asm["ptx"]


def test_uniform_kernel_compiles_for_hopper_with_its_matrix_instruction() -> None:
    from maxsim_kernels import dense
    from maxsim_kernels.tuning import configuration

    config = configuration("uniform", (9, 0))
    assert config is not None
    types = {
        "query_ptr": POINTER, "query_length_ptr": "*i64", "query_mask_ptr": "*u8", "out_ptr": "*fp32",
        "document_desc": f"tensordesc<fp16[{config.tokens}, 128]>",
    }  # fmt: skip
    constants = {
        "HAS_QUERY_LENGTHS": False, "HAS_QUERY_MASK": False, "PADDED": 32, "ROWS": config.rows, "TOKENS": config.tokens,
        "WIDTH": 128, "STAGES": config.stages, "SHORT": False,
    }  # fmt: skip
    binary = compiled(dense._uniform_kernel, types, constants, 90, config)
    assert 0 < binary.metadata.shared <= 227 << 10
    assert "wgmma" in binary.asm["ptx"]
