"""`TopK` and `stream_topk`: exact top-k over blocks, score descending, then document index ascending, for every cut."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inputs import on_cpu as cases
from maxsim_kernels import (
    Fp8Tokens,
    Int8Tokens,
    LazyBlock,
    LazyCodes,
    Packed,
    maxsim,
    pack,
    quantize_fp8,
    quantize_int8,
    stream_topk,
)
from maxsim_kernels.streaming import streaming as module
from maxsim_kernels.streaming.blocks import Limits
from maxsim_kernels.streaming.links import HostLink
from maxsim_kernels.topk import TopK

DOCUMENTS, WIDTH = 19, 16
Row = tuple[list[float], list[int]]


def brute(scores: Sequence[float], k: int) -> Row:
    """One query's top-k by sorting everything; -inf is not retrieved."""
    found = [n for n in range(len(scores)) if scores[n] != -math.inf]
    best = sorted(found, key=lambda n: (-scores[n], n))[:k]
    short = k - len(best)
    return [scores[n] for n in best] + [-math.inf] * short, best + [-1] * short


def expect(scores: Tensor, indices: Tensor, full: Any, k: int) -> None:
    assert scores.dtype == torch.float32
    assert indices.dtype == torch.int64
    rows = [brute(row, k) for row in full.tolist()]
    assert indices.tolist() == [row[1] for row in rows]
    assert scores.tolist() == [row[0] for row in rows]


def cuts(total: int) -> list[list[int]]:
    """Block sizes that add up to `total`; blocks of no document are among them."""
    return [[total], [1] * total, [0, total, 0], [7] * (total // 7) + [total % 7]]


@pytest.fixture(scope="module")
def documents() -> list[Tensor]:
    """Token matrices on a grid (ties abound), with empty documents and exact duplicates."""
    sizes = [(n * 5) % 9 for n in range(DOCUMENTS)]
    tokens = [cases.grid(size, WIDTH, seed=n) for n, size in enumerate(sizes)]
    for copy, original in ((3, 2), (11, 2), (18, 2), (5, 17), (14, 13)):
        tokens[copy] = tokens[original]
    tokens[0] = tokens[9]
    return tokens


@pytest.fixture(scope="module")
def queries() -> Packed:
    packed = cases.packed([4, 1, 0, 6], WIDTH, seed=99)
    assert isinstance(packed, Packed)
    return packed


def as_packed(tokens: Sequence[Tensor]) -> Packed:
    return pack(tokens, dim=WIDTH)


def as_view(tokens: Sequence[Tensor]) -> Packed:
    whole = as_packed(list(reversed(tokens)))
    return whole.select(list(range(len(tokens) - 1, -1, -1)))


def as_int8(granularity: str) -> Callable[[Sequence[Tensor]], Int8Tokens]:
    def make(tokens: Sequence[Tensor]) -> Int8Tokens:
        scale = 1 / 127 if granularity == "corpus" else None  # of the whole corpus: the same for every block
        return quantize_int8(as_packed(tokens), granularity, scale=scale)  # type: ignore[arg-type]

    return make


def as_fp8(tokens: Sequence[Tensor]) -> Fp8Tokens:
    return quantize_fp8(as_packed(tokens))


MAKERS: dict[str, Callable[[Sequence[Tensor]], Any]] = {
    "packed": as_packed,
    "view": as_view,
    "int8-token": as_int8("token"),
    "int8-document": as_int8("document"),
    "int8-corpus": as_int8("corpus"),
    "fp8": as_fp8,
}


def split(tokens: Sequence[Any], sizes: Sequence[int]) -> Iterator[Sequence[Any]]:
    start = 0
    for size in sizes:
        yield tokens[start : start + size]
        start += size
    assert start == len(tokens)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("k", [1, 3, DOCUMENTS, DOCUMENTS + 4])
def test_blocks_give_what_everything_at_once_gives(kind: str, k: int, documents: list[Tensor], queries: Packed) -> None:
    make = MAKERS[kind]
    full = maxsim(queries, make(documents))
    assert isinstance(full, Tensor)
    for sizes in cuts(len(documents)):
        expect(*stream_topk(queries, map(make, split(documents, sizes)), k), full, k)


@pytest.mark.parametrize("k", [1, 4, 40])
@pytest.mark.parametrize("quantised", [False, True])
def test_dense_blocks(queries: Packed, k: int, quantised: bool) -> None:
    dense = cases.grid(21, 5, WIDTH, seed=7)
    dense[4] = dense[17]
    dense[9] = dense[17]
    make: Callable[[Any], Any] = quantize_int8 if quantised else lambda block: block
    full = maxsim(queries, make(dense))
    for sizes in cuts(len(dense)):
        expect(*stream_topk(queries, (make(block) for block in split(dense, sizes)), k), full, k)


def test_one_query_gives_one_row(documents: list[Tensor]) -> None:
    query = cases.grid(5, WIDTH, seed=3)
    blocks = [as_packed(documents[:10]), as_packed(documents[10:])]
    scores, indices = stream_topk(query, blocks, 6)
    assert scores.shape == indices.shape == (6,)
    full = maxsim(query, as_packed(documents))
    assert isinstance(full, Tensor)
    expect(scores.unsqueeze(0), indices.unsqueeze(0), full.unsqueeze(0), 6)
    many = stream_topk(query.unsqueeze(0), blocks, 6)
    assert torch.equal(many[0][0], scores)
    assert torch.equal(many[1][0], indices)


def test_masks_lengths_and_the_choice_of_implementation_reach_the_operator(documents: list[Tensor]) -> None:
    dense, mask, lengths = cases.grid(3, 6, WIDTH, seed=5), cases.mask(3, 6, seed=5), torch.tensor([6, 2, 0])
    dense = cases.dirty(dense, cases.valid(6, mask, lengths))
    blocks = [as_packed(documents[:13]), as_packed(documents[13:])]
    for impl in ("auto", "reference"):
        full = maxsim(dense, as_packed(documents), query_mask=mask, query_lengths=lengths, impl=impl)
        expect(*stream_topk(dense, blocks, 7, query_mask=mask, query_lengths=lengths, impl=impl), full, 7)
    codes = [quantize_int8(block) for block in blocks]
    clean = dense.nan_to_num(0, 0, 0).clamp(-1, 1)
    full = maxsim(clean, quantize_int8(as_packed(documents)), query_lengths=lengths, quantize_queries=False)
    expect(*stream_topk(clean, codes, 7, query_lengths=lengths, quantize_queries=False), full, 7)


def test_blocks_are_taken_one_at_a_time(documents: list[Tensor], queries: Packed) -> None:
    alive: list[int] = []

    def blocks() -> Iterator[Packed]:
        for number in range(3):
            alive.append(number)
            yield as_packed(documents[number * 5 : number * 5 + 5])
            alive.remove(number)
            assert not alive, "a block was asked for before the one before it was done"

    stream_topk(queries, blocks(), 2)


def as_lazy(packed: Packed, pause: Callable[[], float] = lambda: 0.0) -> LazyBlock:
    assert packed.offsets is not None

    def read(first: int, out: Tensor) -> None:
        time.sleep(pause())
        assert out.is_contiguous()
        out.copy_(packed.values[first : first + out.shape[0]])

    return LazyBlock(packed.offsets, packed.dim, packed.dtype, read)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Pieces of a few documents, several readers a piece, and stale bytes of a buffer that are NaN."""

    def poisoned(self: HostLink, region: Tensor, copied: object) -> None:
        region.reshape(-1).view(torch.uint8).fill_(255)

    def cut(size: int, documents: int) -> None:
        monkeypatch.setattr(module, "_limits", lambda *args: Limits(size, documents))

    monkeypatch.setattr(HostLink, "reuse", poisoned)
    monkeypatch.setattr("maxsim_kernels.streaming.transfer._READ_BYTES", 256)
    return cut


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lazy_blocks_give_the_same_bits_for_every_cut_and_number_of_readers(
    small_pieces: Callable[[int, int], None], documents: list[Tensor], queries: Packed, dtype: torch.dtype, readers: int
) -> None:
    """Slow readers, blocks of one document and of none; read in pieces of every size."""
    chance, tokens = random.Random(3), [one.to(dtype) for one in documents]
    asked = queries.to(dtype)
    full = maxsim(asked, as_packed(tokens))
    assert isinstance(full, Tensor)
    for size, number in ((1 << 20, 1000), (1 << 20, 1), (2048, 1000), (1500, 4)):
        small_pieces(size, number)
        for sizes in cuts(len(tokens)):
            packed = [pack(block, dim=WIDTH, dtype=dtype) for block in split(tokens, sizes)]
            blocks = [as_lazy(block, lambda: chance.random() * 0.001) for block in packed]
            mixed = [block if n % 3 else packed[n] for n, block in enumerate(blocks)]
            for some in (blocks, mixed):
                expect(*stream_topk(asked, some, 5, readers=readers), full, 5)


def lazy_codes(block: Int8Tokens | Fp8Tokens) -> LazyCodes:
    """Codes, and what single tokens have, are read; the rest is in memory."""
    held = {"codes": block.token_values, "scales": block.scales}
    if isinstance(block, Int8Tokens) and block.offset is not None:
        held["offset"] = block.offset
    single = {"codes"} if block.granularity != "token" else set(held)

    def read(values: Tensor, first: int, out: Tensor) -> None:
        assert out.is_contiguous()
        out.copy_(values[first : first + out.shape[0]])

    columns = {name: partial(read, values) if name in single else values for name, values in held.items()}
    assert isinstance(block.codes, Packed)
    assert block.codes.offsets is not None
    return LazyCodes(block.codes.offsets, WIDTH, block.codes.dtype, block.granularity, columns)


@pytest.mark.parametrize("granularity", ["token", "document", "corpus"])
def test_lazy_codes_give_the_bits_of_codes_in_memory(
    small_pieces: Callable[[int, int], None], documents: list[Tensor], queries: Packed, granularity: Any
) -> None:
    packed = as_packed(documents)
    made = [quantize_int8(packed, granularity), quantize_fp8(packed, granularity)]
    for block in [*made, quantize_int8(packed, granularity, affine=True)]:
        full = maxsim(queries, block)
        assert isinstance(full, Tensor)
        for size, number in ((1 << 20, 1000), (1 << 20, 1), (1500, 4)):
            small_pieces(size, number)
            expect(*stream_topk(queries, [lazy_codes(block)], 5, readers=4), full, 5)


def test_lazy_codes_that_are_none_are_refused() -> None:
    offsets, scales = torch.tensor([0, 2]), torch.ones(1).half()

    def read(first: int, out: Tensor) -> None:
        raise AssertionError

    good = {"codes": read, "scales": scales}
    assert len(LazyCodes(offsets, 4, torch.int8, "document", good)) == 1
    for match, arguments in {
        "dtype: got torch.float16": (offsets, 4, torch.float16, "document", good),
        "columns: got scales, codes": (offsets, 4, torch.int8, "document", dict(reversed(good.items()))),
        "columns: got codes, scales, offset": (offsets, 4, torch.float8_e4m3fn, "document", {**good, "offset": scales}),
        "scales of a corpus are a tensor": (offsets, 4, torch.int8, "corpus", {"codes": read, "scales": read}),
        "offsets: need": (offsets.int(), 4, torch.int8, "document", good),
    }.items():
        with pytest.raises(ValueError, match=match):
            LazyCodes(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", MAKERS)
def test_large_blocks_are_cut(
    small_pieces: Callable[[int, int], None], kind: str, documents: list[Tensor], queries: Packed
) -> None:
    make = MAKERS[kind]
    full = maxsim(queries, make(documents))
    assert isinstance(full, Tensor)
    for number in (1, 2, 7):
        small_pieces(1 << 20, number)
        expect(*stream_topk(queries, [make(documents[:11]), make(documents[11:])], 4), full, 4)


@pytest.mark.parametrize("granularity", ["token", "document", "corpus"])
def test_dense_blocks_are_cut(small_pieces: Callable[[int, int], None], granularity: str) -> None:
    dense, asked = cases.grid(21, 5, WIDTH, seed=7), cases.grid(2, 3, WIDTH, seed=8)
    dense[9] = dense[17] = dense[4]
    for block in (dense, quantize_int8(dense, granularity, affine=True), quantize_fp8(dense, granularity)):
        full = maxsim(asked, block)
        assert isinstance(full, Tensor)
        small_pieces(1 << 20, 4)
        expect(*stream_topk(asked, [block], 6), full, 6)


def test_gradients_are_left_out(documents: list[Tensor], queries: Packed) -> None:
    blocks = [as_packed(documents[:9]), as_lazy(as_packed(documents[9:]))]
    asked = queries.with_values(queries.values.clone().requires_grad_())
    for mode in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with mode:
            scores, indices = stream_topk(asked, blocks, 3)
        assert not scores.requires_grad
        expect(scores, indices, maxsim(queries, as_packed(documents)), 3)


def test_nothing_to_find(queries: Packed) -> None:
    for blocks in ([], [as_packed([])], [as_packed([torch.empty(0, WIDTH)] * 3)]):
        scores, indices = stream_topk(queries.select([0, 1, 3]), blocks, 2)
        assert scores.tolist() == [[-math.inf] * 2] * 3
        assert indices.tolist() == [[-1] * 2] * 3
    scores, indices = stream_topk(pack([], dim=WIDTH), [as_packed([torch.ones(2, WIDTH)])], 2)
    assert scores.shape == indices.shape == (0, 2)


def test_a_query_without_tokens_scores_zero_everywhere_and_takes_the_first_documents(documents: list[Tensor]) -> None:
    empty = pack([torch.empty(0, WIDTH)])
    scores, indices = stream_topk(empty, [as_packed(documents[:4]), as_packed(documents[4:])], 6)
    assert indices.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert scores.tolist() == [[0.0] * 6]


def test_nan_names_query_and_document(documents: list[Tensor], queries: Packed) -> None:
    bad = documents[5].clone()
    bad[0, 0] = math.nan
    blocks = [as_packed(documents[:4]), as_packed([documents[4], bad])]
    with pytest.raises(ValueError, match="NaN for query 0, document 5"):
        stream_topk(queries, blocks, 2)


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one(k: int, queries: Packed) -> None:
    with pytest.raises(ValueError, match=f"k: got {k}, need 1 or more"):
        stream_topk(queries, [], k)


def test_infinite_scores_are_ranked_and_minus_infinity_is_not_retrieved() -> None:
    best = TopK(1, 3)
    best.add(torch.tensor([[-math.inf, 1.0, math.inf, -math.inf]]))
    best.add(torch.tensor([[math.inf, -3.0e38]]))
    assert best.indices.tolist() == [[2, 4, 1]]
    best = TopK(1, 5)
    best.add(torch.tensor([[-math.inf, 1.0, math.inf, -math.inf]]))
    assert best.indices.tolist() == [[2, 1, -1, -1, -1]]
    assert best.seen == 4


# Few different values, so that ties, also across blocks and at the k-th place, are the rule. -0.0 equals 0.0.
values = st.sampled_from([-math.inf, math.inf, -1.5, -0.0, 0.0, 0.25, 0.25 + 2.0**-24, 1.0, 3.0])


@st.composite
def matrices(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    count = draw(st.integers(0, 3))
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    total = sum(sizes)
    rows = draw(st.lists(st.lists(values, min_size=total, max_size=total), min_size=count, max_size=count))
    return rows, sizes


@settings(max_examples=150, deadline=None)
@given(matrices(), st.integers(1, 12))
def test_top_k_is_what_sorting_everything_gives(drawn: tuple[list[list[float]], list[int]], k: int) -> None:
    rows, sizes = drawn
    full = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), sum(sizes))
    best = TopK(len(rows), k)
    for block in full.split(sizes, dim=1):
        best.add(block)
    expect(best.scores, best.indices, full, k)
    assert best.seen == full.shape[1]


def test_every_cut_of_a_small_corpus() -> None:
    full = cases.grid(2, 8, seed=1)
    full[:, [1, 4, 6]] = full[:, :1]
    for k, inner in itertools.product((1, 2, 5), range(1 << 7)):
        ends = [n for n in range(1, 8) if inner >> (n - 1) & 1]
        best = TopK(2, k)
        for start, stop in itertools.pairwise([0, *ends, 8]):
            best.add(full[:, start:stop])
        expect(best.scores, best.indices, full, k)
