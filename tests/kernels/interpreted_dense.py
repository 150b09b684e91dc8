"""Run under TRITON_INTERPRET=1 in a process of its own (the variable counts before Triton is first imported)."""

import itertools
import sys

import torch

from maxsim_kernels import Packed, dense, maxsim_reference
from maxsim_kernels.checks import Call, validate
from maxsim_kernels.tuning import Config

SMALL = Config(16, 16, 4, 1, 2, "interpreter", "small tiles, so that small shapes cross tile edges")


def call_of(queries: torch.Tensor, documents: torch.Tensor | Packed, **valid: torch.Tensor) -> Call:
    names = ("query_mask", "document_mask", "query_lengths", "document_lengths")
    return validate(queries, documents, pairs=False, quantize_queries=True, **{name: valid.get(name) for name in names})


def same(scores: torch.Tensor, truth: torch.Tensor) -> None:
    assert scores.shape == truth.shape, (scores.shape, truth.shape)
    assert torch.allclose(scores.double(), truth, rtol=2e-6, atol=2e-5, equal_nan=True), (scores, truth)


def check(queries: torch.Tensor, documents: torch.Tensor | Packed, uniform: bool = False, **valid: torch.Tensor) -> None:
    truth = maxsim_reference(queries, documents, dtype=torch.float64, **valid)
    dense.variant = lambda call, capability: ("uniform" if uniform else "blocks", SMALL)
    dense.torch.empty = poisoned
    try:
        scores = dense.forward(call_of(queries, documents, **valid))
    finally:
        dense.torch.empty = plain
    same(scores, truth)


plain = torch.empty


def poisoned(*size: object, **options: object) -> torch.Tensor:
    """Memory nobody has written shows as NaN: a missed store fails loudly."""
    return plain(*size, **options).fill_(torch.nan)


def main() -> None:
    torch.manual_seed(0)
    checked = 0
    shapes = ((1, 5, 7, 19, 8), (3, 17, 4, 33, 20), (2, 40, 3, 16, 16), (5, 3, 6, 1, 1), (1, 70, 2, 63, 31))
    for dtype, (nq, lq, b, ld, d) in itertools.product((torch.float16, torch.float32), shapes):
        queries, documents = torch.randn(nq, lq, d).to(dtype), torch.randn(b, ld, d).to(dtype)
        query_lengths, lengths = torch.randint(0, lq + 1, (nq,)), torch.randint(0, ld + 1, (b,))
        lengths[0] = 0
        query_mask, mask = torch.rand(nq, lq) > 0.3, torch.rand(b, ld) > 0.3
        check(queries, documents)
        check(queries, documents, query_lengths=query_lengths, document_lengths=lengths)
        hidden = documents.clone()
        hidden[~mask] = torch.nan
        check(queries, hidden, query_mask=query_mask, document_mask=mask, document_lengths=lengths)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        packed = Packed(torch.randn(int(offsets[-1]), d).to(dtype), offsets)
        check(queries, packed, query_mask=query_mask)
        check(queries, packed.select(list(range(b - 1, -1, -1))))
        check(queries, documents.transpose(1, 2).contiguous().transpose(1, 2))
        broken = documents.clone()
        broken[-1, -1] = torch.nan
        check(queries, broken)
        checked += 7
        if dtype == torch.float16 and d % 8 == 0:
            check(queries, documents, uniform=True)
            check(queries, broken, uniform=True, query_lengths=query_lengths, query_mask=query_mask)
            checked += 2
    sys.stdout.write(f"{checked} checked\n")


main()
