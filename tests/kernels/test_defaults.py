"""Whatever the caller made torch's default dtype or device, the operator's results are the same bits on the same devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from maxsim_kernels import (
    Packed,
    chamfer_distance,
    maxsim,
    maxsim_pairs,
    maxsim_reference,
    pack,
    quantize_fp8,
    quantize_int8,
    stream_topk,
)
from maxsim_kernels.coded import BitTokens
from maxsim_kernels.cpu import batches, few
from maxsim_kernels.search import exact_topk, rescoring, residuals_of
from maxsim_kernels.training import contrastive_loss, distillation_loss

torch.manual_seed(0)
QUERIES, DOCUMENTS = torch.randn(4, 5, 32), torch.randn(300, 7, 32)
LENGTHS = torch.randint(0, 8, (300,))
RAGGED = Packed(
    DOCUMENTS.reshape(-1, 32)[: int(LENGTHS.sum())].clone(), torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
)
INT8, AFFINE = quantize_int8(RAGGED, "document"), quantize_int8(RAGGED, "token", affine=True)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    **{str(dtype): (lambda dtype=dtype: default_dtype(dtype)) for dtype in (torch.float16, torch.bfloat16, torch.float64)},
    "meta": lambda: torch.device("meta"),
}


def trained(loss: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    queries = QUERIES.clone().requires_grad_()
    value = loss(queries)
    value.backward()
    assert queries.grad is not None
    return [value.detach(), queries.grad]


def found(value: object) -> list[torch.Tensor]:
    """Every tensor of a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [one for part in value for one in found(part)]
    if isinstance(value, Packed):
        return [value.values, value.starts, value.lengths]
    return found(list(vars(value).values())) if hasattr(value, "codes") or hasattr(value, "norms") else []


CALLS: dict[str, Callable[[], object]] = {
    "dense": lambda: maxsim(QUERIES, DOCUMENTS, return_argmax=True),
    "large": lambda: maxsim(QUERIES * 400, DOCUMENTS * 400),
    "lengths": lambda: maxsim(QUERIES, DOCUMENTS, document_lengths=LENGTHS, query_lengths=torch.tensor([5, 0, 3, 1], device="cpu")),
    "packed": lambda: maxsim(QUERIES, RAGGED, return_argmax=True),
    "view": lambda: maxsim(QUERIES, RAGGED.select(torch.arange(0, 300, 3, device="cpu"))),
    "half": lambda: maxsim(QUERIES.half(), RAGGED.to(torch.float16)),
    "int8": lambda: maxsim(QUERIES, INT8),
    "affine": lambda: maxsim(QUERIES, AFFINE),
    "float queries": lambda: maxsim(QUERIES, AFFINE, quantize_queries=False),
    "fp8": lambda: maxsim(QUERIES, quantize_fp8(RAGGED)),
    "bits": lambda: maxsim(QUERIES, BitTokens(Packed(torch.ones(6, 4, dtype=torch.uint8, device="cpu"), RAGGED.offsets[:1].new_tensor([0, 2, 6])), torch.ones(6, dtype=torch.float16, device="cpu"), dim=32, bits=1)),
    "pairs": lambda: maxsim_pairs(QUERIES, DOCUMENTS[:4], return_argmax=True),
    "pairs of codes": lambda: maxsim_pairs(QUERIES, quantize_int8(DOCUMENTS[:4])),
    "reference": lambda: maxsim_reference(QUERIES, RAGGED, return_argmax=True),
    "reference of codes": lambda: maxsim_reference(QUERIES, INT8),
    "quantise": lambda: [quantize_int8(DOCUMENTS, kind) for kind in ("token", "document", "corpus")],
    "pack": lambda: [pack(list(DOCUMENTS[:3])), pack([], dim=8)],
    "stream": lambda: stream_topk(QUERIES, [RAGGED, AFFINE], 10),
    "stream, small budget": lambda: stream_topk(QUERIES, [RAGGED], 10, memory_budget=8 << 20),
    "search": lambda: exact_topk(QUERIES, RAGGED, 10, codes=INT8)[:2],
    "search with residuals": lambda: exact_topk(QUERIES, RAGGED, 3, codes=INT8, residuals=residuals_of(RAGGED, INT8), most_rescored=1)[:2],
    "chamfer": lambda: chamfer_distance(QUERIES[0], DOCUMENTS[0]),
    "contrastive": lambda: trained(lambda queries: contrastive_loss(queries, DOCUMENTS[:4])),
    "distillation": lambda: trained(lambda queries: distillation_loss(queries, DOCUMENTS[:8].view(4, 2, 7, 32), torch.ones(4, 2, device="cpu"))),
    "gradients": lambda: trained(lambda queries: maxsim(queries, RAGGED).sum()),
}  # fmt: skip


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("call", CALLS)
def test_defaults_change_nothing(call: str, default: str) -> None:
    for probe in (few.same_bits, batches.same_bits, rescoring.same_order):
        probe.cache_clear()  # what was found out under one default would serve under the other
    with DEFAULTS[default]():
        other = found(CALLS[call]())
    assert other
    for one, two in zip(found(CALLS[call]()), other, strict=True):
        assert (one.dtype, one.device) == (two.dtype, two.device)
        assert torch.equal(one.nan_to_num(7), two.nan_to_num(7)) if one.is_floating_point() else torch.equal(one, two)
