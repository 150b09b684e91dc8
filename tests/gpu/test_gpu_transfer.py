"""The way to a GPU: no buffer is reused too early, memory stays flat, the host runs ahead. tests/kernels/streaming/test_transfer.py has its logic."""

from __future__ import annotations

import gc
import time
from contextlib import closing

import pytest
import torch

from inputs import on_gpu as make
from maxsim_kernels import LazyBlock, device_blocks, stream_topk
from maxsim_kernels.streaming import links
from maxsim_kernels.streaming import streaming as module
from stream_cases import readers_alive

POISON = False  # memory is measured here; buffers are poisoned by `Poisoned`
D = 128
MIB = 2**20
SLOW = 20_000_000  # cycles of a sleeping GPU: about 10 ms


class Poisoned(links.CudaLink):
    """Fills every buffer with 0xFF (NaN in every float format) before its next use, and is as slow as asked."""

    copy_cycles = 0
    without = ""  # the wait that is left out

    def reuse(self, region, copied):
        if self.without != "reuse":
            super().reuse(region, copied)
        if region.numel():
            (region if region.dtype == torch.uint8 else region.view(-1).view(torch.uint8)).fill_(255)

    def copy(self, room, moves, after):
        with torch.cuda.stream(self.stream):
            for event in after if self.without != "copy" else ():
                self.stream.wait_event(event)
            room.fill_(255)
            if self.copy_cycles:
                torch.cuda._sleep(self.copy_cycles)
        return super().copy(room, moves, ())

    def arrive(self, copied):
        if self.without != "arrive":
            super().arrive(copied)


@pytest.fixture
def poisoned(monkeypatch):
    """The link class in use for this test; attributes set on it are undone."""

    class Link(Poisoned):
        pass

    monkeypatch.setattr(module, "CudaLink", Link)
    return Link


def ones(documents, size=128):
    """Documents of `size` tokens without a corpus behind them."""
    return LazyBlock(torch.arange(0, documents * size + 1, size), D, torch.float16, lambda first, out: out.fill_(1))


# --- races -----------------------------------------------------------------------------------------------------------------


def numbered(pieces_, rows=512):
    """A lazy block whose token t is t modulo 1000 in every place, cut into pieces of `rows` documents of one token."""

    def read(first, out):
        out.copy_((torch.arange(first, first + out.shape[0]) % 1000).to(out.dtype)[:, None].expand_as(out))

    return LazyBlock(torch.arange(pieces_ * rows + 1), D, torch.float16, read), (rows * (D * 2 + 8) + 8192, rows)


def seen_by_a_slow_consumer(cycles, block, queries_=1):
    """What work that a consumer queues behind a sleep finds in each piece."""
    found = []
    with closing(device_blocks([block], "cuda", queries=queries_)) as documents:
        for piece in documents:
            if cycles:
                torch.cuda._sleep(cycles)
            found.append((piece.values.clone(), piece.offsets.clone()))
    torch.cuda.synchronize()
    return found


def right(found, rows):
    for number, (values, offsets) in enumerate(found):
        want = (torch.arange(number * rows, (number + 1) * rows, device="cuda") % 1000).half()
        if not torch.equal(values, want[:, None].expand_as(values)) or offsets.tolist() != list(range(rows + 1)):
            return False
    return True


SPEEDS = {"quick": (0, 0), "slow copies": (SLOW, 0), "slow consumer": (0, SLOW)}


@pytest.mark.parametrize("speed", SPEEDS)
def test_no_buffer_is_overwritten_while_it_is_in_use(poisoned, small_pieces, speed):
    """The race of the peers' streamed scorer."""
    block, limits = numbered(40)
    small_pieces(limits)
    poisoned.copy_cycles, cycles = SPEEDS[speed]
    found = seen_by_a_slow_consumer(cycles, block)
    assert len(found) == 40
    assert right(found, 512)


@pytest.mark.parametrize(("without", "speed"), [("reuse", "slow copies"), ("copy", "slow consumer"), ("arrive", "slow copies")])
def test_the_races_would_be_seen(poisoned, small_pieces, without, speed):
    """Leave one wait out, and the test above finds wrong bytes."""
    block, limits = numbered(40)
    small_pieces(limits)
    poisoned.without = without
    poisoned.copy_cycles, cycles = SPEEDS[speed]
    assert not right(seen_by_a_slow_consumer(cycles, block), 512)


@pytest.mark.parametrize("speed", SPEEDS)
def test_another_current_stream(poisoned, small_pieces, speed):
    block, limits = numbered(40)
    small_pieces(limits)
    poisoned.copy_cycles, cycles = SPEEDS[speed]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert right(seen_by_a_slow_consumer(cycles, block), 512)


@pytest.mark.parametrize("speed", SPEEDS)
def test_pieces_used_on_streams_in_turn(poisoned, small_pieces, speed):
    """When the next piece is asked for, another stream is current than the one that still uses the last."""
    block, limits = numbered(40)
    small_pieces(limits)
    poisoned.copy_cycles, cycles = SPEEDS[speed]
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
    documents = device_blocks([block], "cuda", queries=1)
    for number in range(40):
        with torch.cuda.stream(streams[number % 2]):
            piece = next(documents)
            torch.cuda._sleep(cycles)
            found.append((piece.values.clone(), piece.offsets.clone()))
    documents.close()
    torch.cuda.synchronize()
    assert right(found, 512)


def test_memory_given_back_early_is_not_written_any_more(poisoned, small_pieces):
    """A generator closed while copies are queued: whoever gets its buffers' memory next keeps what it writes there."""
    block, limits = numbered(40)
    small_pieces(limits)
    poisoned.copy_cycles = 5 * SLOW
    documents = device_blocks([block], "cuda", queries=1)
    next(documents)
    documents.close()
    taken = [torch.full((limits[0],), 3, dtype=torch.uint8, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    assert all(bool((tensor == 3).all()) for tensor in taken)
    assert readers_alive() == []


def test_an_error_in_a_reader_arrives_unchanged():
    queries = make.grid(3, 32, D)

    def fail(first, out):
        raise OSError(f"disk gone at {first}")

    broken = LazyBlock(torch.tensor([0, 7]), D, torch.float16, fail)
    with pytest.raises(OSError, match="disk gone at 0"):
        stream_topk(queries, [ones(9), broken, ones(9)], 5)
    assert readers_alive() == []
    assert stream_topk(queries, [ones(9)], 5)[1].tolist() == [[0, 1, 2, 3, 4]] * 3


# --- memory, waits, devices ------------------------------------------------------------------------------------------------


def peak_of(call):
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("queries_", [1, 500])
@pytest.mark.parametrize("budget", [200 * MIB, 1024 * MIB, None])
def test_memory_is_flat_and_within_the_budget(queries_, budget):
    """50 and 1000 blocks of 4 MiB, and one block of 4 GiB."""
    queries = make.unit(queries_, 32, D)
    stream_topk(queries, [ones(64)], 100, memory_budget=budget)  # kernels
    peaks = [
        peak_of(lambda given=given: stream_topk(queries, given, 100, memory_budget=budget))
        for given in ([ones(128)] * 50, [ones(128)] * 1000, [ones(128_000)])
    ]
    limit = budget or 2048 * MIB
    assert max(peaks) <= limit, [peak / MIB for peak in peaks]
    assert peaks[1] <= 1.05 * peaks[0], [peak / MIB for peak in peaks]


def test_too_small_a_budget_says_what_is_needed():
    with pytest.raises(ValueError, match="memory_budget: got 1000 bytes, need at least"):
        stream_topk(make.unit(2, 32, D), [ones(4)], 3, memory_budget=1000)


def test_the_consumer_runs_ahead_of_the_gpu(small_pieces):
    """Copies overlap scoring: the host hands over several pieces while the GPU still sleeps in front of the first."""
    block, limits = numbered(40)
    small_pieces(limits)
    documents = device_blocks([block], "cuda", queries=1)
    next(documents)
    torch.cuda.synchronize()
    torch.cuda._sleep(50 * SLOW)  # half a second
    started = time.perf_counter()
    next(documents)
    next(documents)
    assert time.perf_counter() - started < 0.2
    documents.close()
