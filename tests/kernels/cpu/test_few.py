"""Few documents on a CPU: their smaller tiles (`few.py`) give the bits of whole ones, and are not taken where a library's do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maxsim_kernels import maxsim, pack
from maxsim_kernels.cpu import few, tiles

SHAPES = [  # queries, their tokens, documents, their tokens, d
    (3, 8, 5, 16, 32),
    (1, 32, 30, 180, 128),
    (40, 32, 7, 33, 96),
    (2, 300, 3, 700, 320),
    (1, 5, 1, 1, 1),
    (2, 9, 40, 25, 768),
    (4, 32, 2, 2000, 64),
]


def results(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Scores and winners of padded, masked and packed documents."""
    count, length, documents, size, width = shape
    drawn = torch.Generator().manual_seed(1)
    queries = torch.randn(count, length, width, generator=drawn).to(dtype)
    held = torch.randn(documents, size, width, generator=drawn).to(dtype)
    mask = torch.rand(documents, size, generator=drawn) > 0.3
    query_mask = torch.rand(count, length, generator=drawn) > 0.3
    packed = pack([row[: 1 + n % size] for n, row in enumerate(held)])
    found = [maxsim(queries, held), maxsim(queries, packed)]
    for given in ({}, {"document_mask": mask, "query_mask": query_mask}, {"document_mask": mask.int()}):
        found += maxsim(queries, held, return_argmax=True, **given)
        found.append(maxsim(queries, held, **given))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_are_those_of_whole_tiles(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(shape, dtype)
    monkeypatch.setattr(few, "LEVELS", ())
    for one, other in zip(found, results(shape, dtype), strict=True):
        assert torch.equal(one, other)


def shapes_of(call: Any, monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    """The products of a call."""
    seen: set[tuple[int, ...]] = set()
    own = tiles.multiply

    def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
        seen.add(tuple(out.shape))
        own(left, right, out)

    with monkeypatch.context() as patched:
        patched.setattr(few, "same_bits", lambda *_: True)
        patched.setattr(tiles, "multiply", multiply)
        call()
    return seen


def test_a_tile_is_as_large_as_the_documents_need(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = torch.randn(1, 32, 16)

    def seen(count: int, size: int) -> set[tuple[int, ...]]:
        held = pack([torch.randn(size, 16)] * count)
        return shapes_of(lambda: maxsim(queries, held), monkeypatch)

    assert seen(5, 16) == {(36, 240)}
    assert seen(15, 16) == {(36, 240)}
    assert seen(16, 16) == {(36, 1008)}
    assert seen(504, 16) == {(36, 8064)}
    assert seen(600, 16) == {(36, 16128)}
    padded = torch.randn(5, 30, 16)
    assert shapes_of(lambda: maxsim(queries, padded), monkeypatch) == {(240, 32)}  # whole documents, tokens first


def test_tiles_hold_all_documents_or_are_not_taken() -> None:
    assert [few.tile_for(tokens, 4032, 1) for tokens in (1, 240, 241, 4032, 4033)] == [240, 240, 1008, 4032, 0]
    assert [few.tile_for(tokens, 2160, 1) for tokens in (1009, 2016, 2017)] == [2016, 2016, 0]
    assert [few.tile_for(tokens, 4032, 180) for tokens in (180, 360, 1000)] == [240, 1008, 2016]


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float32, {1: 16128, 32: 16128, 48: 16128, 49: 2016, 500: 2016, 8192: 2016}),
        (torch.int8, {1: 8192, 60: 4096, 100: 2048, 500: 1024, 8192: 576}),
        (torch.float64, {1: 16128, 100: 2016, 8192: 2016}),  # wide codes as floats
    ],
)
def test_tiles_of_wide_tokens_hold_fewer(dtype: torch.dtype, sizes: dict[int, int]) -> None:
    """So that a copy of one is a few tens of megabytes, whatever d is; up to 1024 dimensions they are what was measured."""
    empty = np.empty(0, np.int64)
    for tokens, size in sizes.items():
        rows = tiles.padded_rows(tokens, dtype)
        for width in (1, 512, 1024, 1025, 3000, 4096, 16384, 65536, 140000):
            block = tiles.Queries(torch.empty(rows, width, dtype=dtype, device="meta"), [], empty, empty, None, None)
            found, each = tiles._tile_tokens(block), width * dtype.itemsize
            assert found % (32 if dtype == torch.int8 else 48) == 0
            assert found * each <= (67e6 if rows < 96 else 34e6) or found == 48
            assert found == size if each <= 4096 else 0 < found <= size


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_wide_tokens_have_the_same_bits_for_every_cut(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared tiles hold 1,008 of these tokens, and tiles of one thread 480."""
    drawn = torch.Generator().manual_seed(3)
    queries = [torch.randn(n, 16384, generator=drawn).to(dtype) for n in (1, 40, 100)]
    documents = pack([torch.randn(n, 16384, generator=drawn).to(dtype) for n in (3, 500, 1, 70, 490)])
    together = maxsim(pack(queries), documents)
    for number, query in enumerate(queries):
        assert torch.equal(maxsim(query, documents), together[number])
        for first in range(5):
            assert torch.equal(maxsim(query, documents.select(range(first, 5))), together[number, first:])
    assert torch.equal(maxsim(pack(queries), documents, return_argmax=True)[0], together)
    monkeypatch.setattr(few, "LEVELS", ())
    assert torch.equal(maxsim(pack(queries), documents.select([3])), together[:, 3:4])


def test_a_library_that_adds_otherwise_in_small_products_keeps_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
        torch.mm(left, right, out=out)
        asked.append(out.shape[1])
        if out.shape[1] < 1000:
            out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(torch.inf))  # one bit of one cell

    monkeypatch.setattr(tiles, "multiply", multiply)
    queries, documents = torch.randn(1, 32, 16), pack([torch.randn(20, 16)] * 5)
    for need in ([240, 16128, 16128], [16128]):  # tried once
        maxsim(queries, documents)
        assert asked == need
        asked.clear()
    maxsim(queries, pack([torch.randn(20, 16)] * 15))
    assert asked == [1008, 16128, 1008]


@pytest.mark.parametrize("by_one", [False, True])
def test_other_numbers_of_threads_are_tried_anew(by_one: bool) -> None:
    asked: list[int] = []

    def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
        torch.mm(left, right, out=out)
        asked.append(torch.get_num_threads())

    before = torch.get_num_threads()
    try:
        for count in (1, 2, 1, 2):
            torch.set_num_threads(count)
            few.same_bits(32, 16, 256, 16384, False, count, by_one, multiply)
    finally:
        torch.set_num_threads(before)
    assert asked == [1, 1, 2, 1 if by_one else 2]
