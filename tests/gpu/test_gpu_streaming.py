"""`stream_topk` and `device_blocks` on a GPU: the bits of the whole matrix, wherever documents lie and however they are cut."""

from __future__ import annotations

import itertools
from contextlib import closing

import pytest
import torch

from inputs import on_gpu as make
from maxsim_kernels import (
    Int8Tokens,
    LazyBlock,
    Packed,
    device_blocks,
    maxsim,
    merge_topk,
    quantize_fp8,
    quantize_int8,
    stream_topk,
)
from maxsim_kernels.streaming import blocks, links
from maxsim_kernels.streaming import streaming as module
from maxsim_kernels.topk import TopK
from stream_cases import readers_alive

D, K = 128, 37
MIB = 2**20


class Poisoned(links.CudaLink):
    """Fills every device buffer with 0xFF, which is NaN in every float format, before its next use."""

    def copy(self, room, moves, after):
        with torch.cuda.stream(self.stream):
            for event in after:
                self.stream.wait_event(event)
            room.fill_(255)
        return super().copy(room, moves, ())


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """The link that these tests use."""
    monkeypatch.setattr(module, "CudaLink", Poisoned)


def expected(full, k):
    """Scores and indices of a whole score matrix by a stable sort; -inf is not retrieved."""
    scores, indices = torch.sort(full, dim=1, descending=True, stable=True)
    return scores[:, :k], indices[:, :k].masked_fill(scores[:, :k] == -torch.inf, -1)


def tokens(dtype, count=1500):
    """Ragged documents on a grid, with empty and duplicated ones."""
    counts = make.sizes(count, 240)
    counts[7] = counts[count // 2] = 0
    rows = make.packed(counts, D, dtype=dtype, make=make.grid)
    order = torch.arange(count)
    order[3::5] = order[2:-1:5]  # every fifth document is its neighbour again
    return rows.select(order.to(rows.device)).compact()


def moved(block, change):
    """The same documents with `change` applied to every large tensor."""
    if isinstance(block, torch.Tensor):
        return change(block)
    if isinstance(block, Packed):
        return Packed(change(block.values), change(block.offsets))
    codes, scales = moved(block.codes, change), change(block.scales)
    if isinstance(block, Int8Tokens):
        return Int8Tokens(codes, scales, None if block.offset is None else change(block.offset), block.granularity)
    return type(block)(codes, scales, block.granularity)


def to_host(block):
    return moved(block, lambda tensor: tensor.cpu())


def to_gpu(block):
    return moved(block, lambda tensor: tensor.cuda())


def pinned(block):
    return moved(block, lambda tensor: tensor.pin_memory())


def lazy(packed):
    def read(first, out):
        out.copy_(packed.values[first : first + out.shape[0]])

    return LazyBlock(packed.offsets, packed.dim, packed.dtype, read)


def parts(block, places):
    """A host block cut at some documents into blocks of their own."""
    edges = [0, *places, len(block)]
    return [blocks.slice_of(block, first, stop) for first, stop in itertools.pairwise(edges)]


KINDS = {
    "fp16": (torch.float16, lambda rows: rows),
    "bf16": (torch.bfloat16, lambda rows: rows),
    "fp32": (torch.float32, lambda rows: rows),
    "int8 token": (torch.float16, lambda rows: quantize_int8(rows, "token")),
    "int8 document": (torch.float16, lambda rows: quantize_int8(rows, "document")),
    "int8 corpus": (torch.float16, lambda rows: quantize_int8(rows, "corpus")),
    "int8 affine": (torch.float16, lambda rows: quantize_int8(rows, "document", affine=True)),
    "fp8": (torch.float16, quantize_fp8),
    "fp8 token": (torch.float16, lambda rows: quantize_fp8(rows, "token")),
}
PIECES = (None, (MIB, 10_000), (300_000, 97), (4 * MIB, 7))


def fits(kind):
    if kind.startswith("fp8") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")


# --- the same bits ---------------------------------------------------------------------------------------------------------


def places_of(host):
    """The same documents where they may lie, and mixtures of that; blocks of no document and of one are among them."""
    several = parts(host, [0, 1, 2, 150, 150])
    places = {
        "pageable": [host],
        "pinned": [pinned(host)],
        "on the device": [to_gpu(host)],
        "blocks": several,
        "mixed": [block if n % 2 else to_gpu(block) for n, block in enumerate(several)],
    }
    if isinstance(host, Packed):
        places["lazy"] = [lazy(host)]
        places["lazy blocks"] = [lazy(block) if n % 3 else pinned(block) for n, block in enumerate(several)]
    if not isinstance(host, torch.Tensor) and not isinstance(getattr(host, "codes", None), torch.Tensor):
        places["view"] = [host.select(torch.arange(len(host)))]
    return places


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries_", [1, 9, 64])
def test_packed_documents_get_the_bits_of_the_whole_matrix(small_pieces, kind, queries_):
    """Every place, cut in many ways, by one reader and by four."""
    fits(kind)
    dtype, quantise = KINDS[kind]
    whole = quantise(tokens(dtype, 240))
    queries = make.grid(queries_, 32, D, dtype=dtype, seed=1)
    scores, indices = expected(maxsim(queries, whole), K)
    for name, given in places_of(to_host(whole)).items():
        for limits in PIECES:
            small_pieces(limits)
            got = stream_topk(queries, given, K, readers=1 if limits == PIECES[1] else 4)
            assert make.same_bits(got[0], scores), (name, limits)
            assert torch.equal(got[1], indices), (name, limits)
    assert readers_alive() == []


@pytest.mark.parametrize("kind", KINDS)
def test_dense_documents_get_the_bits_of_the_whole_matrix(small_pieces, kind):
    fits(kind)
    dtype, quantise = KINDS[kind]
    rows = make.grid(500, 60, D, dtype=dtype, seed=3)
    rows[3::5] = rows[2:-1:5]
    whole, queries = quantise(rows), make.grid(40, 32, D, dtype=dtype, seed=1)
    scores, indices = expected(maxsim(queries, whole), K)
    for name, given in places_of(to_host(whole)).items():
        for limits in PIECES:
            small_pieces(limits)
            got = stream_topk(queries, given, K)
            assert make.same_bits(got[0], scores), (name, limits)
            assert torch.equal(got[1], indices), (name, limits)


def test_real_values_get_the_bits_of_the_whole_matrix(small_pieces):
    """Sums that round: a piece's kernel adds in the same order as the whole's."""
    for dtype in (torch.float16, torch.float32):
        whole = make.packed(make.sizes(700, 240), D, dtype=dtype, make=make.unit)
        queries = make.unit(33, 32, D, dtype=dtype, seed=1)
        scores, indices = expected(maxsim(queries, whole), K)
        for limits in PIECES:
            small_pieces(limits)
            for given in ([to_host(whole)], [lazy(to_host(whole))], [whole]):
                got = stream_topk(queries, given, K)
                assert make.same_bits(got[0], scores), limits
                assert torch.equal(got[1], indices), limits


def test_shards_merge_into_the_whole():
    """Keys of parts, some of them scored on the GPU and some moved through the host."""
    whole, queries = tokens(torch.float16), make.grid(20, 32, D, seed=1)
    full = maxsim(queries, whole)
    keys = []
    for first, stop in ((0, 1), (1, 700), (700, 700), (700, 1500)):
        best = TopK(20, K, full.device, first)
        best.add(full[:, first:stop])
        keys.append(best.pending if first else best.keys.cpu().to(full.device))
    best = TopK(20, K, full.device)
    best.add_keys(merge_topk(keys[::-1]))
    scores, indices = expected(full, K)
    assert make.same_bits(best.scores, scores)
    assert torch.equal(best.indices, indices)


def test_nan_is_named_when_results_are_read():
    rows = to_host(tokens(torch.float16))
    document = int((rows.lengths > 0).nonzero()[700])
    rows.values[int(rows.starts[document]), 5] = float("nan")
    with pytest.raises(ValueError, match=f"NaN for query 0, document {document}"):
        stream_topk(make.grid(3, 32, D), [rows], K)


def test_a_document_larger_than_the_buffers(small_pieces):
    whole = make.packed([3, 9000, 5, 0, 7000, 2], D, make=make.grid)
    queries = make.grid(5, 32, D, seed=1)
    scores, indices = expected(maxsim(queries, whole), 4)
    small_pieces((64 * 1024, 2))
    for given in ([to_host(whole)], [lazy(to_host(whole))], [pinned(to_host(whole))]):
        got = stream_topk(queries, given * 2, 4)
        assert got[1].shape == (5, 4)
        assert torch.equal(got[0][:, 0], scores[:, 0])
        got = stream_topk(queries, given, 4)
        assert make.same_bits(got[0], scores)
        assert torch.equal(got[1], indices)


def test_inference_mode():
    rows, queries = tokens(torch.float16), make.grid(3, 32, D)
    want = stream_topk(queries, [lazy(to_host(rows))], K)
    with torch.inference_mode():
        got = stream_topk(queries, [lazy(to_host(rows))], K)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("place", ["lazy", "pinned", "pageable", "on the device"])
def test_scoring_never_waits_for_the_gpu(place):
    """The loop of `stream_topk`, with torch set to refuse whatever waits."""
    host = to_host(tokens(torch.float16))
    given, queries = places_of(host)[place], make.grid(50, 32, D, seed=1)
    want = stream_topk(queries, given * 3, K)
    best = TopK(50, K, queries.device)
    with closing(device_blocks(given * 3, "cuda", queries=50)) as documents:
        try:
            torch.cuda.set_sync_debug_mode("error")
            for block in documents:
                best.add(maxsim(queries, block))
            keys = best.pending
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(best.indices, want[1])
    assert torch.equal(keys, best.keys)


def test_another_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    rows, queries = to_host(tokens(torch.float16)), make.grid(9, 32, D, seed=1)
    want = stream_topk(queries, [rows], K)
    before = torch.cuda.memory_allocated(0)
    got = stream_topk(queries.to("cuda:1"), [rows, lazy(rows)], K)
    assert got[0].device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before
    assert torch.equal(stream_topk(queries.to("cuda:1"), [lazy(rows)], K)[1].cpu(), want[1].cpu())
    with pytest.raises(ValueError, match="block 0 is on cuda:0, need the host or cuda:1"):
        stream_topk(queries.to("cuda:1"), [rows.to("cuda:0")], K)
