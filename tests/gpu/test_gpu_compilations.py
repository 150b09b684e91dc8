"""How often Triton compiles: sizes, strides and addresses are no compile-time constants."""

from __future__ import annotations

import pytest
import torch

from inputs import on_gpu as make
from maxsim_kernels import Int8Tokens, maxsim, maxsim_pairs

D = 128
HALF = torch.float16

# Every size class a kernel may be chosen by, one shape each: 1 and multiples of 16 (which Triton would specialise on its own),
# odd sizes, sizes below and above tiles.
CLASSES = [
    (Nq, Lq, B, Ld)
    for Nq in (1, 2, 3, 7, 40)
    for Lq in (1, 13, 31, 64, 100, 130)
    for B in (1, 16, 301)
    for Ld in (1, 16, 31, 64, 100, 501)
]


def other_sizes(count, longest):
    """Sizes inside the classes above that hardly one of them names."""
    generator, highs = make.random(0, "cpu"), (40, longest, 300, 500)
    return [[int(torch.randint(1, high + 1, (1,), generator=generator, device="cpu")) for high in highs] for _ in range(count)]


def dense_call(Nq, Lq, B, Ld):
    maxsim(make.gauss(Nq, Lq, D), make.gauss(B, Ld, D, seed=1))


def masked_call(Nq, Lq, B, Ld):
    masks = make.masks("both", "query", Nq, Lq) | make.masks("both", "document", B, Ld)
    maxsim(make.gauss(Nq, Lq, D), make.gauss(B, Ld, D, seed=1), **masks)


def packed_call(Nq, Lq, B, Ld):
    maxsim(make.gauss(Nq, Lq, D), make.packed([Ld] * (B // 2) + [Ld // 2] * (B - B // 2), D, seed=1))


def int8_call(Nq, Lq, B, Ld):
    maxsim(
        make.gauss(Nq, Lq, D), Int8Tokens(torch.ones(B, Ld, D, dtype=torch.int8, device=make.device), make.mask(B, Ld).to(HALF))
    )


def pairs_call(Nq, Lq, B, Ld):
    maxsim_pairs(make.gauss(B, Lq, D), make.gauss(B, Ld, D, seed=1))


def winners_call(Nq, Lq, B, Ld):
    maxsim(make.gauss(Nq, Lq, D), make.gauss(B, Ld, D, seed=1), return_argmax=True)


@pytest.mark.parametrize(
    ("call", "longest"),
    [(dense_call, 130), (masked_call, 31), (packed_call, 31), (int8_call, 31), (pairs_call, 31), (winners_call, 31)],
)
def test_sizes_do_not_compile_again(compilations, call, longest):
    """A few size classes may have kernels of their own; counts and lengths may not be compiled in."""
    classes = [sizes for sizes in CLASSES if sizes[1] <= longest]
    for sizes in classes:
        call(*sizes)
    assert len(compilations) <= 40, f"{len(compilations)} kernels for {len(classes)} shapes"
    compilations.clear()
    for sizes in classes:
        call(*sizes)
    assert not compilations, f"second use of a shape compiled {compilations}"
    for sizes in other_sizes(80, longest):
        call(*sizes)
    # Two, for a class that none of the shapes above fell into.
    assert len(compilations) <= 2, f"new sizes compiled {compilations}"


def test_pointers_and_strides_do_not_compile_without_end(compilations):
    """Alignment may have two kernels; the second call with any stride or address compiles nothing new."""
    queries, documents = make.gauss(7, 31, D), make.gauss(40, 63, D, seed=1)
    hows = ("transposed", "batch inside", "every second element", "wider rows", "odd rows", "unaligned")
    for how in hows:
        maxsim(queries, make.strided(documents, how))
    first = len(compilations)
    assert first <= 8
    for how in hows:
        maxsim(make.gauss(9, 30, D), make.strided(make.gauss(33, 60, D), how))
    assert len(compilations) == first, compilations[first:]
