"""`device_blocks` and what `stream_topk` asks of it: budgets, arguments, interruptions, memory on a CPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

from inputs import on_cpu as cases
from maxsim_kernels import (
    Fp8Tokens,
    Int8Tokens,
    LazyBlock,
    Packed,
    device_blocks,
    pack,
    quantize_fp8,
    quantize_int8,
    stream_topk,
)
from maxsim_kernels.streaming import streaming as module
from maxsim_kernels.streaming.blocks import Limits, Piece, pieces
from maxsim_kernels.streaming.links import CudaLink, HostLink
from maxsim_kernels.streaming.transfer import Ring

WIDTH = 16


@pytest.fixture
def documents() -> list[Tensor]:
    return [torch.full((n % 4, WIDTH), float(n)) for n in range(12)]


@pytest.fixture
def queries() -> Packed:
    return pack([torch.ones(3, WIDTH), torch.ones(2, WIDTH)])


def as_lazy(packed: Packed) -> LazyBlock:
    assert packed.offsets is not None
    return LazyBlock(packed.offsets, packed.dim, packed.dtype, lambda first, out: out.copy_(packed.values[first:][: len(out)]))


def tokens_of(block: Any) -> list[Tensor]:
    held = block.dequantize() if isinstance(block, Int8Tokens | Fp8Tokens) else block
    return [held[n] for n in range(len(held))]


def test_the_documents_come_out_as_they_went_in(documents: list[Tensor]) -> None:
    """Every kind of block, in one stream and in order; blocks of no document are left out."""
    packed = pack(documents)
    dense = torch.arange(3 * 2 * WIDTH).view(3, 2, WIDTH) / 8
    codes = quantize_int8(packed.select([5, 6, 7]), "document")
    blocks = [packed, as_lazy(packed), pack([], dim=WIDTH), dense, packed.select([7, 3]), codes]
    want = [*documents, *documents, *dense, documents[7], documents[3], *tokens_of(codes)]
    with closing(device_blocks(blocks, "cpu", queries=1)) as stream:
        got = [tokens.clone() for block in stream for tokens in tokens_of(block)]
    assert len(got) == len(want)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


class Rooms(HostLink):
    """A device that is the host: everything takes the whole way, at once."""

    rooms = 2

    def direct(self, tensor: Tensor) -> bool:
        return False

    def room(self, size: int) -> tuple[Tensor, list[object]]:
        return torch.full((size,), 255, dtype=torch.uint8), []

    def copy(self, room: Tensor, moves: Sequence[tuple[Tensor, Tensor]], after: Sequence[object]) -> None:
        room.fill_(255)
        for to, source in moves:
            to.copy_(source)


@pytest.mark.parametrize("limits", [Limits(1 << 20, 100), Limits(2048, 3), Limits(2048, 1)])
def test_every_kind_of_block_is_rebuilt_where_it_arrives(limits: Limits) -> None:
    packed, dense = cases.packed([4, 0, 7, 1, 300, 2, 2, 5], WIDTH, seed=1), cases.grid(9, 4, WIDTH, seed=2)
    view = packed.select([7, 4, 0, 1, 0])
    kinds: list[Any] = [packed, view, dense, Packed(packed.values, packed.offsets.int())]
    for granularity in ("token", "document", "corpus"):
        for rows in (packed, dense):
            kinds += [quantize_int8(rows, granularity), quantize_int8(rows, granularity, affine=True)]
            kinds.append(quantize_fp8(rows, granularity))
        kinds += [codes.select([3, 4, 0, 0]) for codes in (quantize_int8(packed, granularity, affine=True), kinds[-4])]
    for block in kinds:
        stream = Ring(Rooms(), limits.size, 2).documents(pieces([block], torch.device("cuda"), limits))
        made = []
        for piece in stream:
            assert type(piece) is type(block)
            assert len(piece) <= limits.documents
            assert getattr(piece, "granularity", None) == getattr(block, "granularity", None)
            made += [tokens.clone() for tokens in tokens_of(piece)]
        want = tokens_of(block)
        assert len(made) == len(want)
        assert all(torch.equal(one, other) for one, other in zip(made, want, strict=True))


def test_host_blocks_are_not_copied_on_a_cpu(documents: list[Tensor]) -> None:
    packed = pack(documents)
    for block in device_blocks([packed], "cpu", queries=1):
        assert isinstance(block, Packed)
        assert block.values.data_ptr() == packed.values.data_ptr()


def test_lazy_blocks_are_read_ahead() -> None:
    """While a piece is in use the next two are being read, and no more than that: three buffers."""
    reads: list[int] = []

    def blocks() -> Iterator[LazyBlock]:
        for number in range(8):

            def read(first: int, out: Tensor, number: int = number) -> None:
                reads.append(number)
                out.fill_(number)

            yield LazyBlock(torch.tensor([0, 3]), WIDTH, torch.float32, read)

    with closing(device_blocks(blocks(), "cpu", queries=1)) as stream:
        for number, block in enumerate(stream):
            assert isinstance(block, Packed)
            ahead = min(number + 2, 7)
            patience = time.monotonic() + 30
            while len(reads) < ahead + 1:
                assert time.monotonic() < patience
                time.sleep(0.001)
            assert sorted(reads) == list(range(ahead + 1))
            assert bool((block.values == number).all())


def test_an_interrupted_wait_for_a_reader_ends_the_readers(queries: Packed) -> None:
    """Ctrl-C while the disk is slow."""
    started = threading.Event()

    def read(first: int, out: Tensor) -> None:
        if not started.is_set():
            started.set()
            time.sleep(0.1)  # by now the consumer waits
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.1)
        out.zero_()

    blocks = [LazyBlock(torch.tensor([0, 3]), WIDTH, torch.float32, read)] * 5
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            stream_topk(queries, blocks, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("maxsim-reader")]


def test_what_a_consumer_raises_ends_the_readers(documents: list[Tensor], queries: Packed) -> None:
    blocks = [as_lazy(pack([one.half()])) for one in documents]  # not the queries' dtype
    with pytest.raises(ValueError, match="need the queries' dtype"):
        stream_topk(queries, blocks, 2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("maxsim-reader")]


@pytest.mark.parametrize("link", [HostLink, CudaLink])
@pytest.mark.parametrize("queries_", [1, 500, 10_000])
def test_sizes_follow_from_the_budget(link: Any, queries_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in flight stays within it, from the least that works on; the message names that least."""
    device = torch.device("cuda" if link is CudaLink else "cpu")
    with pytest.raises(ValueError, match="memory_budget: got 1000 bytes, need at least") as error:
        module._limits(device, link, queries_, 1000, 300)
    least = int(str(error.value).split("at least ")[1].split()[0])
    buffers, fixed = (3, 64 << 20) if link is CudaLink else (3, 0)
    before = (0, 0)
    for budget in (least, least + (1 << 20), 3 * least, 1 << 34):
        limits = module._limits(device, link, queries_, budget, 300)
        assert 300 + fixed + buffers * limits.size + limits.documents * queries_ * 40 <= budget
        assert limits.documents >= 64
        assert limits.size >= 1 << 20
        assert before <= (limits.size, limits.documents)
        before = (limits.size, limits.documents)
    assert limits.size == (128 << 20 if link is CudaLink else 33 << 20)
    with pytest.raises(ValueError, match="need at least"):
        module._limits(device, link, queries_, least - 1, 300)
    for free in (0, 1 << 30, 1 << 40):
        monkeypatch.setattr(module, "_free", lambda device, free=free: free)
        default = module._limits(device, link, queries_, None, 300)
        assert 1 << 20 <= default.size <= 128 << 20


def test_arguments_that_do_not_fit(documents: list[Tensor], queries: Packed) -> None:
    offsets = torch.tensor([0, 2])
    for blocks, message in (
        ([torch.zeros(2, WIDTH)], r"block 0 is \[2, 8|block 0 is \[2, 16\], need \[b, Ld, d\]"),
        ([pack(documents), "text"], "block 1 is str, need Packed"),
        ([torch.zeros(2, 3, WIDTH, device="meta")], "block 0 is on meta, need the host or cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            stream_topk(queries, blocks, 1)  # type: ignore[arg-type]
    for arguments, message in (
        ((offsets + 1, 4, torch.float16, print), "starting at 0"),
        ((offsets.flip(0), 4, torch.float16, print), "starting at 0"),
        ((offsets[:0], 4, torch.float16, print), r"need n \+ 1 entries"),
        ((offsets.int(), 4, torch.float16, print), "1-D int64"),
        ((offsets, 0, torch.float16, print), "dim: got 0"),
        ((offsets, 4, torch.int8, print), "dtype: got torch.int8"),
    ):
        with pytest.raises(ValueError, match=message):
            LazyBlock(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="readers: got 0"):
        device_blocks([], "cpu", queries=1, readers=0)
    with pytest.raises(ValueError, match="device: got meta, need cpu or cuda"):
        device_blocks([], "meta", queries=1)


@pytest.mark.slow
def test_memory_stays_small_on_a_cpu() -> None:
    """320 MB of documents in one block, 200 queries: well below 256 MB beyond inputs and results, in a process of its own."""
    code = """if True:
        import json, resource, torch
        from maxsim_kernels import LazyBlock, stream_topk
        torch.set_num_threads(1)
        def corpus(documents, tokens):
            offsets = torch.arange(0, documents * tokens + 1, tokens)
            return LazyBlock(offsets, 256, torch.float16, lambda first, out: out.fill_(first % 7))
        queries = torch.ones(200, 1, 256, dtype=torch.float16)
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        stream_topk(queries[:2], [corpus(10, 4)], 100)
        before = peak()
        stream_topk(queries, [corpus(20_000, 32)], 100)
        print(json.dumps(peak() - before))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) < 200 << 20


def test_pieces_of_a_block_are_about_equal():
    """A full piece and a rest of one document would cost the host as much as two full ones."""
    block, limits = torch.zeros(512, 4, WIDTH), Limits(512 * 4 * WIDTH * 4, 1000)
    sizes = [piece.parts[0].shape[0] for piece in pieces([block], torch.device("cuda"), limits) if isinstance(piece, Piece)]
    assert sizes == [256, 256]
