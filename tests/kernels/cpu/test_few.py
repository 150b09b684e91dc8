"""Few documents on a CPU: their smaller tiles (`few.py`) give the bits of whole ones, and are not taken where a library's do not."""

from __future__ import annotations

from typing import Any

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

    assert seen(5, 16) == {(32, 256)}
    assert seen(16, 16) == {(32, 256)}
    assert seen(17, 16) == {(32, 1024)}
    assert seen(500, 16) == {(32, 8192)}
    assert seen(600, 16) == {(32, 16384)}
    padded = torch.randn(5, 30, 16)
    assert shapes_of(lambda: maxsim(queries, padded), monkeypatch) == {(240, 32)}  # whole documents, tokens first


def test_a_library_that_adds_otherwise_in_small_products_keeps_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
        torch.mm(left, right, out=out)
        asked.append(out.shape[1])
        if out.shape[1] < 1000:
            out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(torch.inf))  # one bit of one cell

    given = (32, 16, False, multiply)
    assert few.tile_for(100, 16384, 1, [32], 16, False, multiply) == 16384
    assert few.tile_for(100, 16384, 1, [32], 16, False, multiply) == 16384
    assert asked == [16384, 256], "tried once"
    assert few.tile_for(300, 16384, 1, [32, 64], 16, False, multiply) == 1024
    assert few.same_bits(*given[:2], 1024, 16384, False, torch.get_num_threads(), multiply)


def test_other_numbers_of_threads_are_tried_anew() -> None:
    asked: list[int] = []

    def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
        torch.mm(left, right, out=out)
        asked.append(torch.get_num_threads())

    before = torch.get_num_threads()
    try:
        for count in (1, 2, 1, 2):
            torch.set_num_threads(count)
            few.tile_for(100, 16384, 1, [32], 16, False, multiply)
    finally:
        torch.set_num_threads(before)
    assert asked == [1, 1, 2, 2]
