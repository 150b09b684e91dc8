"""Rows that cannot be read 16 bytes at a time, on a GPU: every tile of the general kernel, and queries that begin at an odd place."""

from __future__ import annotations

import pytest
import torch

import coded_cases
from inputs import dirty
from inputs import on_gpu as make
from maxsim_kernels import maxsim, quantize_fp8, quantize_int8
from truth import agree

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
WIDTHS = [100, 129, 136, 257, 1000]


def documents(dtype, d, mask, stored, count=31, size=64):
    """Documents, as they are or as codes, and their mask."""
    tokens, said = make.gauss(count, size, d, dtype=dtype, seed=1), {}
    if mask == "padding":
        ends = make.lengths(count, high=size, seed=2)
        said = {"document_mask": torch.arange(size, device="cuda") < ends.unsqueeze(-1)}
    elif mask == "holes":
        said = make.masks("mask", "document", count, size, seed=2, mask_dtype=torch.bool)
    tokens = dirty(tokens, said.get("document_mask"))
    if stored == "float":
        return tokens, said
    kind, granularity, *affine = stored.split()
    about = {"mask": said.get("document_mask")} | ({"affine": True} if affine else {})
    return (quantize_int8 if kind == "int8" else quantize_fp8)(tokens, granularity, **about), said


@pytest.mark.parametrize("asked", [(1, 7), (1, 50), (2, 300)], ids=lambda one: f"{one[0]} x {one[1]}")
@pytest.mark.parametrize("mask", ["none", "padding", "holes"])
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE])
def test_every_width(dtype, d, mask, asked):
    """Parts of a long query once all got the first part's rows: bfloat16 queries, INT8 documents with a mask, d = 129."""
    queries = make.gauss(*asked, d, dtype=dtype)
    for stored in ("float", "int8 token", "int8 document affine"):
        tokens, said = documents(dtype, d, mask, stored)
        agree(queries, tokens, return_argmax=asked[0] > 1, **said)
        if stored != "float":
            agree(queries, tokens, quantize_queries=False, **said)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("layout", ["packed", "both packed", "own", "fp8 token"])
@pytest.mark.parametrize("d", WIDTHS)
def test_other_layouts(d, layout, dtype):
    queries = make.gauss(3, 300, d, dtype=dtype)
    if layout == "both packed":
        queries = make.packed([300, 0, 70], d, dtype=dtype, make=make.gauss)
    if layout == "own":
        tokens = make.gauss(3, 7, 64, d, dtype=dtype, seed=1)
    elif layout == "fp8 token":
        tokens, _ = documents(dtype, d, "none", layout)
    else:
        tokens = make.packed([64, 0, 1, 300, 31], d, dtype=dtype, seed=1, make=make.gauss)
    agree(queries, tokens)
    if layout == "fp8 token":
        agree(queries, tokens, quantize_queries=False)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize(("kind", "bits"), [("bits", 1), ("bits", 4), ("unit", 2), ("free", 4)])
@pytest.mark.parametrize("d", [100, 129, 257, 700])
def test_tokens_of_few_bits(d, kind, bits, dtype):
    tokens = coded_cases.coded(kind, bits, d, [64, 0, 300, 31], device="cuda")
    for asked in ((1, 7), (3, 300), (64, 32)):
        queries = make.gauss(*asked, d, dtype=dtype)
        coded_cases.agree(queries, tokens)
        if kind == "bits":
            coded_cases.agree(queries, tokens, quantize_queries=False)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("d", [768, 1000])
def test_queries_that_begin_at_an_odd_place(d, dtype):
    """One after the other in memory, so that `contiguous` makes no copy; a tensor descriptor needs one."""
    queries = make.strided(make.gauss(300, 1, d, dtype=dtype), "unaligned")
    assert queries.is_contiguous()
    assert queries.data_ptr() % 16
    tokens = make.gauss(31, 64, d, dtype=dtype, seed=1)
    scores = agree(queries, tokens)
    assert torch.equal(maxsim(queries.clone(), tokens), scores)
