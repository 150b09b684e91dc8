"""Floats compared by their bits on a GPU: large calls, which do it, give the bits of small ones, which do not.

Some documents hold what the order of bits gets wrong: rows that meet nothing but negative products, NaN, infinity, zeros.
"""

from __future__ import annotations

import pytest
import torch

from inputs import on_gpu as make
from inputs import same_bits
from maxsim_kernels import Packed, maxsim, quantize_fp8, quantize_int8
from maxsim_kernels.checks import Options, validate
from maxsim_kernels.gpu.forward.choice import choose
from maxsim_kernels.gpu.geometry import hardware

COUNT, SIZE = 1024, 150  # more than a tile each, with 64 queries of 32 tokens 2^27 cells and more; a slice of 64 has 2^25
FORMS = ["fp16", "bf16", "int8 token", "fp8 token", "fp8 document"]


def awkward(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and documents, the first ones as said above."""
    queries, documents = make.gauss(64, 32, 128, seed=seed), make.gauss(COUNT, SIZE, 128, seed=seed + 1)
    queries[0], documents[1] = queries[0].abs(), -documents[1].abs()
    queries[1, 5] = documents[2] = 0
    documents[3, 40:50] = torch.nan
    documents[4] = -documents[4].abs()
    documents[4, 60] = torch.nan
    documents[700:] = -documents[700:].abs()
    return queries, documents


def stored(documents, form):
    """Documents, padded or packed, as `form` says."""
    if form in ("fp16", "bf16"):
        return documents.to(torch.float16 if form == "fp16" else torch.bfloat16)
    kind, granularity = form.split()
    return (quantize_int8 if kind == "int8" else quantize_fp8)(documents, granularity)


def bits_are_compared(queries, documents, **options) -> bool:
    return choose(validate(queries, documents, Options(**options)), hardware(torch.device("cuda", 0))).config.bits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["dense", "packed", "mask", "one query"])
def test_a_large_call_has_the_bits_of_small_ones(form, layout):
    queries, documents = awkward()
    if form.startswith("fp8"):
        documents = documents.nan_to_num(0.0)
    if form in ("fp16", "bf16"):
        queries = stored(queries, form)
        if form == "fp16":
            documents[5, 7, 3] = torch.inf
    if layout == "one query":  # maxima of rows are stored, and summed by another kernel
        queries = queries.flatten(0, 1)[None]
    mask = torch.ones(COUNT, SIZE, dtype=torch.bool, device="cuda")
    if layout == "mask":  # holes only where nothing is awkward: tokens from a list are compared as floats
        mask[100:600] = make.mask(500, SIZE, keep=0.9)
        mask[100:600, 64:70] = True
        mask[-50:, 140:] = False

    def scores(part: slice, turned: bool = False) -> torch.Tensor:
        held, shown = (documents.flip(0), mask.flip(0)) if turned else (documents, mask)
        found = held[part]
        if layout == "packed":
            values = found.flatten(0, 1)
            found = Packed(values, torch.arange(0, values.shape[0] + 1, SIZE, device="cuda"))
        options = {"document_mask": shown[part]} if layout == "mask" else {}
        assert bits_are_compared(queries, stored(found, form), **options) == (part == slice(None))
        return maxsim(queries, stored(found, form), **options)

    whole = scores(slice(None))
    parts = torch.cat([scores(slice(first, first + 64)) for first in range(0, COUNT, 64)], 1)
    assert same_bits(whole, parts)
    for turned in (True, False, True):  # the second call of a kind is recorded, later ones are replayed, with other documents
        again = scores(slice(None), turned)
        assert same_bits(whole, again.flip(1) if turned else again)
    if not form.startswith("fp8"):
        assert whole[:, 3:5].isnan().all()
    if layout != "one query":
        assert (whole[0, 700:] < 0).all()
        assert (whole[2:, 8:600] > 0).all()
