"""The ring between host and device: every reuse of a buffer waits for its last use, order is kept, threads end.

No GPU is needed: `Fake` has two streams that are threads working off queues, as late as a test wants, and stale bytes are poisoned. A
wait that is missing therefore shows as wrong bytes; the tests take each wait away in turn to prove that.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maxsim_kernels.streaming.blocks import Block, LazyBlock, Limits, Piece, pieces
from maxsim_kernels.streaming.links import HostLink
from maxsim_kernels.streaming.transfer import Ring
from maxsim_kernels.tokens import Fp8Tokens, Int8Tokens, Packed
from stream_cases import readers_alive

GPU = torch.device("cuda")  # a name only: where the pieces are said to go
WIDTH = 8
LONG = 60  # seconds: a wait that lasts this long is a hang


class Stream:
    """A queue of work and a thread that does it in order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="fake-stream", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def put(self, job: Callable[[], None]) -> None:
        self._queue.put(job)

    def event(self) -> threading.Event:
        event = threading.Event()
        self.put(event.set)
        return event

    def end(self) -> None:
        self._queue.put(None)
        self._thread.join(LONG)
        assert not self._thread.is_alive()


def passed(event: threading.Event) -> None:
    assert event.wait(LONG), "hangs"


# By the wait that is left out: who is held, and by whose step it is overtaken, which then happens for certain.
OVERTAKEN = {"reuse": ("copy", "fill"), "arrive": ("copy", "use"), "copy": ("use", "copy"), "leave": ("use", "copy")}


class Fake:
    """A device whose copies and whose consumer take their time. `without`: the wait that is left out."""

    hosts, rooms = 4, 3

    def __init__(self, copy: float = 0, consume: float = 0, without: str = "", pinned: Sequence[Tensor] = ()) -> None:
        self.copies, self.consumer = Stream(), Stream()
        self.delay, self.consume, self.without = copy, consume, without
        self.pinned = {tensor.untyped_storage().data_ptr() for tensor in pinned}
        self.made: dict[str, list[int]] = {"host": [], "room": []}
        self.most_ahead = self._ahead = self._copies = 0
        self.held, self.overtaker = OVERTAKEN.get(without, ("", ""))
        self.overtaken = threading.Event()

    def begins(self, step: str) -> None:
        if step == self.held:
            passed(self.overtaken)

    def ends(self, step: str) -> None:
        if step == self.overtaker:
            self.overtaken.set()

    def enter(self) -> None:
        assert threading.current_thread() is not threading.main_thread()

    def host(self, size: int) -> Tensor:
        self.made["host"].append(size)
        return torch.full((size,), 0xFF, dtype=torch.uint8)

    def room(self, size: int) -> tuple[Tensor, list[Any]]:
        self.made["room"].append(size)
        return torch.full((size,), 0xFF, dtype=torch.uint8), [self.consumer.event()]

    def direct(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def reuse(self, region: Tensor, copied: Any) -> None:
        if copied is not None and self.without != "reuse":
            passed(copied)
        region.fill_(0xFF) if region.dtype == torch.uint8 else region.view(torch.int8).fill_(-1)
        if copied is not None:
            self.ends("fill")

    def passed(self, event: threading.Event) -> bool:
        return event.is_set()

    def copy(self, room: Tensor, moves: Sequence[tuple[Tensor, Tensor]], after: Sequence[Any]) -> Any:
        self._ahead += 1
        self.most_ahead = max(self.most_ahead, self._ahead)
        self._copies += 1
        again = self._copies == 2 * self.rooms  # for the second time into the last room

        def job() -> None:
            for event in after if self.without != "copy" else ():
                passed(event)
            self.begins("copy")
            room.fill_(0xFF)
            time.sleep(self.delay)
            for to, source in moves:
                to.copy_(source)
            self._ahead -= 1
            if again:
                self.ends("copy")

        self.copies.put(job)
        return self.copies.event()

    def arrive(self, copied: Any) -> None:
        if self.without != "arrive":
            self.consumer.put(lambda: passed(copied))

    def here(self) -> Stream:
        return self.consumer

    def leave(self, room: Tensor, streams: Sequence[Any]) -> list[Any]:
        return [stream.event() for stream in streams] if self.without != "leave" else []

    def end(self) -> None:
        self.copies.end()
        self.consumer.end()


def raw(entries: Iterator[Any]) -> Iterator[Any]:
    """Pieces that hand over their tensors: `Packed` would look at offsets that have not arrived yet."""
    for entry in entries:
        yield replace(entry, build=tuple) if isinstance(entry, Piece) else entry


def run(link: Fake, blocks: Sequence[Block], limits: Limits, readers: int = 4) -> list[tuple[Tensor, ...]]:
    """What a consumer sees that never waits, but queues slow work on its stream."""
    seen: list[tuple[Tensor, ...]] = []

    def use(tensors: tuple[Tensor, ...]) -> None:
        if len(seen) == link.rooms - 1:  # of the last room, when all have been made
            link.begins("use")
        time.sleep(link.consume)
        seen.append(tuple(tensor.clone() for tensor in tensors))
        link.ends("use")

    with closing(Ring(link, limits.size, readers).documents(raw(pieces(blocks, GPU, limits)))) as documents:
        for tensors in documents:
            link.consumer.put(lambda tensors=tensors: use(tensors))  # type: ignore[misc]
    link.end()
    return seen


def lazy(values: Tensor, offsets: Tensor, pause: Callable[[], float] = lambda: 0.0) -> LazyBlock:
    def read(first: int, out: Tensor) -> None:
        time.sleep(pause())
        out.copy_(values[first : first + out.shape[0]])

    return LazyBlock(offsets, values.shape[1], values.dtype, read)


def ragged(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Packed:
    lengths = np.random.default_rng(seed).integers(0, 9, count)
    offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
    values = torch.arange(int(offsets[-1]) * WIDTH, dtype=torch.float32).view(-1, WIDTH) + seed
    return Packed(values.to(dtype), offsets)


def wanted(blocks: Sequence[Block], limits: Limits) -> list[tuple[Tensor, ...]]:
    """The pieces' tensors, made at once."""
    made = []
    for piece in pieces(blocks, GPU, limits):
        assert isinstance(piece, Piece)
        tensors = []
        for part in piece.parts:
            tensor = torch.empty(part.shape, dtype=part.dtype) if part.tensor is None else part.tensor
            if part.read is not None and tensor.numel():
                part.read(0, tensor)
            tensors.append(tensor)
        made.append(tuple(tensors))
    return made


def same(one: Sequence[tuple[Tensor, ...]], other: Sequence[tuple[Tensor, ...]]) -> bool:
    def bits(tensors: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
        return [(t.dtype, t.shape, t.contiguous().view(-1).view(torch.uint8).tolist()) for t in tensors]

    return [bits(tensors) for tensors in one] == [bits(tensors) for tensors in other]


LIMITS = Limits(2048, 11)
SPEEDS = {"quick": (0.0, 0.0), "slow copies": (0.01, 0.0), "slow consumer": (0.0, 0.01)}


def blocks_of(kind: str) -> list[Block]:
    packed = [ragged(37, 1), ragged(0), ragged(1, 2), ragged(60, 3)]
    if kind == "lazy":
        return [lazy(block.values, block.offsets) for block in packed if block.offsets is not None]
    if kind == "mixed":
        dense = torch.arange(25 * 3 * WIDTH, dtype=torch.float32).view(25, 3, WIDTH)
        view = packed[0].select(torch.arange(36, -1, -1))
        assert packed[3].offsets is not None
        return [
            packed[0],
            lazy(packed[3].values, packed[3].offsets),
            dense,
            view,
            dense.transpose(0, 1).contiguous().transpose(0, 1),
        ]
    return list(packed)


@pytest.fixture(params=[0, 1 << 20], ids=["by readers", "inline"])
def inline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Who fills buffers with what is in memory already."""
    monkeypatch.setattr("maxsim_kernels.streaming.transfer._INLINE_BYTES", request.param)
    return int(request.param)


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("kind", ["pageable", "pinned", "lazy", "mixed"])
@pytest.mark.parametrize("readers", [1, 3])
def test_every_byte_arrives_in_order(kind: str, speed: str, readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsim_kernels.streaming.transfer._READ_BYTES", 200)  # several readers a piece
    blocks = blocks_of(kind)
    pinned = [block.values for block in blocks if isinstance(block, Packed)] if kind == "pinned" else []
    copy, consume = SPEEDS[speed]
    link = Fake(copy, consume, pinned=pinned)
    assert same(run(link, blocks, LIMITS, readers), wanted(blocks, LIMITS))
    assert len(link.made["room"]) == 3
    assert max(link.made["room"]) == LIMITS.size


@pytest.mark.parametrize("without", OVERTAKEN)
@pytest.mark.parametrize("kind", ["lazy", "pageable"])  # filled by readers, and by the consuming thread
def test_each_wait_is_needed(kind: str, without: str) -> None:
    """The tests above would notice: leave one wait out, and wrong bytes arrive."""
    blocks = blocks_of(kind)
    link = Fake(without=without)
    assert not same(run(link, blocks, LIMITS), wanted(blocks, LIMITS))
    assert link.overtaken.is_set()


def test_random_delays_everywhere() -> None:
    chance = random.Random(7)
    for seed in range(4):
        packed = ragged(150, seed)
        assert packed.offsets is not None
        block = lazy(packed.values, packed.offsets, lambda: chance.random() * 0.004)
        link = Fake(chance.random() * 0.004, chance.random() * 0.004)
        assert same(run(link, [block], LIMITS, 1 + seed), wanted([lazy(packed.values, packed.offsets)], LIMITS))


@pytest.mark.usefixtures("inline")
def test_the_consumer_never_gets_far_ahead() -> None:
    """Pinned blocks need no reader, and yet only as many pieces are queued as there are buffers: their memory stays in use until then."""
    dense = torch.zeros(400, 2, WIDTH)
    link = Fake(copy=0.001, pinned=[dense])
    seen = run(link, [dense], Limits(2048, 4))
    assert len(seen) == 100
    assert 2 <= link.most_ahead <= Fake.hosts + 1
    assert sum(link.made["host"]) <= 4 << 20


def test_quantised_blocks_arrive() -> None:
    codes = torch.randint(-127, 128, (23, 5, WIDTH), dtype=torch.int8)
    packed = ragged(23, 4)
    packed_codes = packed.with_values(torch.randint(-127, 128, packed.values.shape, dtype=torch.int8))
    backwards = torch.arange(22, -1, -1)
    blocks: list[Block] = [
        Int8Tokens(codes, torch.rand(23, 5).half(), torch.rand(23, 5).half()),
        Int8Tokens(codes, torch.rand(23).half()),
        Int8Tokens(codes, torch.rand(()).half()),
        Int8Tokens(packed_codes, torch.rand(len(packed_codes.values)).half(), granularity="token"),
        Int8Tokens(packed_codes, torch.rand(23).half(), torch.rand(23).half(), "document"),
        Int8Tokens(packed_codes, torch.rand(()).half(), None, "corpus"),
        Int8Tokens(packed_codes, torch.rand(len(packed_codes.values)).half(), None, "token").select(backwards),
        Fp8Tokens(packed.with_values(packed.values.to(torch.float8_e4m3fn)), torch.rand(23).half(), "document"),
        Fp8Tokens(packed.with_values(packed.values.to(torch.float8_e4m3fn)), torch.rand(23).half(), "document").select(
            backwards
        ),
    ]
    assert same(run(Fake(), blocks, Limits(2048, 7)), wanted(blocks, Limits(2048, 7)))


def test_a_document_larger_than_a_buffer_has_one_of_its_own_for_once() -> None:
    sizes = [2, 500, 3, 4, 2, 1, 5]
    offsets = torch.tensor([0, *np.cumsum(sizes).tolist()])
    block = lazy(torch.arange(int(offsets[-1]) * WIDTH).view(-1, WIDTH).half(), offsets)
    limits = Limits(2048, 1)
    link = Fake()
    assert same(run(link, [block] * 3, limits), wanted([block] * 3, limits))
    large = [size for size in link.made["room"] if size > limits.size]
    assert len(large) == 3
    assert max(large) < 500 * WIDTH * 2 + 1024


def test_pieces_keep_to_their_limits() -> None:
    whole = ragged(500, 5)
    for limits in (Limits(2048, 1000), Limits(1 << 20, 7), Limits(3000, 12)):
        cut = [piece for piece in pieces([whole], GPU, limits) if isinstance(piece, Piece)]
        assert sum(piece.parts[1].shape[0] - 1 for piece in cut) == 500
        for piece in cut:
            assert sum(-(-part.size // 256) * 256 for part in piece.parts) <= limits.size
            assert piece.parts[1].shape[0] - 1 <= limits.documents
        assert len(cut) > 3


@pytest.mark.parametrize("kind", ["pageable", "lazy"])
def test_only_what_is_little_and_in_memory_is_filled_by_the_consumer(kind: str, inline: int) -> None:
    """`read` may take its time: it is always called in a reader thread."""
    fillers: set[bool] = set()

    class Watching(Fake):
        def reuse(self, region: Tensor, copied: Any) -> None:
            super().reuse(region, copied)
            fillers.add(threading.current_thread() is threading.main_thread())

    blocks, link = blocks_of(kind), Watching()
    expected = {kind == "pageable" and inline > 0}
    documents = Ring(link, LIMITS.size, 2).documents(raw(pieces(blocks, GPU, LIMITS)))
    for _ in documents:
        assert fillers == expected  # at the end of all, the last copies are waited for here
        link.copies.put(lambda: None)
    link.end()


def test_an_early_end_leaves_no_thread() -> None:
    blocks = blocks_of("lazy")
    link = Fake(copy=0.005)
    documents = Ring(link, LIMITS.size, 4).documents(raw(pieces(blocks, GPU, LIMITS)))
    next(documents)
    next(documents)
    assert readers_alive()
    documents.close()
    assert readers_alive() == []
    link.end()


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("link_of", [Fake, HostLink])
@pytest.mark.parametrize("bad", [0, 1, 6])
@pytest.mark.parametrize("where", ["reader", "iterator"])
def test_an_error_is_raised_when_its_turn_comes(link_of: Callable[[], Any], bad: int, where: str) -> None:
    """The same exception, after every piece before it, although pieces are read ahead; and no thread is left."""

    def block(number: int) -> LazyBlock:
        def read(first: int, out: Tensor) -> None:
            if number == bad and where == "reader":
                raise BrokenError(f"block {number}")
            time.sleep(0.003 if number < bad else 0)
            out.fill_(number)

        return LazyBlock(torch.tensor([0, 2, 3]), WIDTH, torch.float16, read)

    def blocks() -> Iterator[LazyBlock]:
        for number in range(9):
            if number == bad and where == "iterator":
                raise BrokenError(f"block {number}")
            yield block(number)

    link = link_of()
    documents = Ring(link, 4096, 4).documents(raw(pieces(blocks(), GPU, Limits(4096, 10))))
    seen: list[object] = []
    with pytest.raises(BrokenError, match=f"block {bad}"):
        seen.extend(documents)
    assert len(seen) == bad
    assert readers_alive() == []
    if isinstance(link, Fake):
        link.end()


def test_work_is_shared_among_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large piece is read in parts, by several threads at once."""
    monkeypatch.setattr("maxsim_kernels.streaming.transfer._READ_BYTES", 1024)
    together = threading.Barrier(4, timeout=LONG)
    spans: list[tuple[int, int]] = []

    def read(first: int, out: Tensor) -> None:
        together.wait()  # passes only where four threads read this piece at once
        spans.append((first, out.shape[0]))
        out.fill_(first)

    block = LazyBlock(torch.tensor([0, 100, 401]), WIDTH, torch.float32, read)
    link = Fake()
    ((values, _),) = run(link, [block], Limits(1 << 16, 10))
    assert sorted(spans) == [(0, 101), (101, 101), (202, 101), (303, 98)]
    for first, count in spans:
        assert bool((values[first : first + count] == first).all())
