"""Traffic whose shapes change with every call, as a reranker sends it: how many kernels 200 calls need, counted without a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from maxsim_kernels import Packed
from maxsim_kernels.checks import Call, Options, validate
from maxsim_kernels.gpu import geometry, launch
from maxsim_kernels.gpu.forward import choice, general

H200 = geometry.Hardware((9, 0), 132)
CALLS = 200


@pytest.fixture
def keys(monkeypatch) -> list[Any]:
    """What tells the kernel of every launch apart, in place of launches."""
    found: list[Any] = []

    def note(kernel: Any, grid: int, *arguments: Any, warps: int, registers: int = 0, **constants: Any) -> None:
        found.append(launch.kernel_key(kernel, arguments, constants, warps, registers))

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(general, "launch", note)
    monkeypatch.setattr(general, "hardware", lambda device: H200)
    monkeypatch.setattr(geometry, "hardware", lambda device: H200)
    return found


def dense(count: int, drawn: random.Random) -> Call:
    return validate(QUERY, DOCUMENTS[:count], Options())


def ragged(count: int, drawn: random.Random) -> Call:
    lengths = torch.tensor([drawn.randint(60, 300) for _ in range(count)])
    offsets = torch.zeros(count + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    return validate(QUERY, Packed(TOKENS.expand(int(offsets[-1]), 128), offsets), Options())


QUERY, TOKENS = torch.zeros(32, 128, dtype=torch.float16), torch.zeros(1, 128, dtype=torch.float16)
DOCUMENTS = torch.zeros(1, 1, 128, dtype=torch.float16).expand(2000, 180, 128)


@pytest.mark.parametrize(
    ("call_of", "counts", "most"),
    [(dense, (800, 1200), 1), (dense, (100, 2000), 2), (ragged, (1000, 1000), 1), (ragged, (100, 2000), 4)],
)
def test_changing_shapes_need_few_kernels(keys, call_of, counts, most) -> None:
    """As many as there are tiles for such numbers of documents, whatever the numbers."""
    drawn = random.Random(23)
    for _ in range(CALLS):
        call = call_of(drawn.randint(*counts), drawn)
        kernel, config = choice.choose(call, H200)
        assert kernel == "stream"
        scores = torch.empty(1, call.document_count)
        general.launch_general(call, call.queries, None, config, scores, None, True)
    assert len(keys) == CALLS  # one launch a call
    assert len(set(keys)) <= most
