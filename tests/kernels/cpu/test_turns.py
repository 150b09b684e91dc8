"""Threads of the CPU path: each item once, one thread a product, errors and Ctrl-C, forks, and the same bits by any number of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from inputs import on_cpu as cases
from maxsim_kernels import maxsim, quantize_int8
from maxsim_kernels.cpu import tiles
from maxsim_kernels.turns import alone, in_turns


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_each_item_is_taken_once_by_threads_of_their_own(threads: int, count: int) -> None:
    taken: list[int] = []
    seen: set[tuple[str, int, bool, bool]] = set()
    all_begun = threading.Barrier(max(1, min(threads, count)), timeout=60)

    def work(items: Iterator[int]) -> None:
        for number, item in enumerate(items):
            if number == 0:
                all_begun.wait()
            taken.append(item)
            told = threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled()
            seen.add((*told, torch.is_autocast_enabled("cpu")))

    with torch.autocast("cpu"):
        in_turns(work, range(count))
    assert sorted(taken) == list(range(count))
    assert {one[1:] for one in seen} <= {(1, False, False)}
    assert len(seen) == min(threads, count)
    assert torch.get_num_threads() == threads
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [threads], "threads of others have torch's number"


def test_no_more_threads_than_asked_for(two_threads: None) -> None:
    seen: set[str] = set()

    def work(items: Iterator[int]) -> None:
        for _ in items:
            time.sleep(0.002)
            seen.add(threading.current_thread().name)

    in_turns(work, range(20), most=1)
    assert len(seen) == 1


def test_who_is_one_of_the_threads_does_it_itself(two_threads: None) -> None:
    """Or every thread could wait for another one."""

    def work(items: Iterator[int]) -> None:
        for _ in items:
            name = threading.current_thread().name
            assert alone(lambda: threading.current_thread().name) == name

    in_turns(work, range(20))


def test_an_error_is_raised_and_stops_the_others(threads: int) -> None:
    taken: list[int] = []

    def work(items: Iterator[int]) -> None:
        for item in items:
            taken.append(item)
            if item == 3:
                raise ValueError("the third")
            time.sleep(0.002)

    with pytest.raises(ValueError, match="the third"):
        in_turns(work, range(1000))
    assert 4 <= len(taken) < 100
    assert alone(int) == 0

    def fails(items: Iterator[int]) -> None:
        raise ValueError("before the first")

    with pytest.raises(ValueError, match="before the first"):
        in_turns(fails, ())


def test_ctrl_c_ends_the_wait(two_threads: None) -> None:
    taken: list[int] = []

    def work(items: Iterator[int]) -> None:
        for item in items:
            taken.append(item)
            if item == 3:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.002)

    with pytest.raises(KeyboardInterrupt):
        in_turns(work, range(1000))
    time.sleep(0.05)
    count = len(taken)
    assert count < 200
    time.sleep(0.05)
    assert len(taken) == count, "the threads have stopped"
    assert alone(int) == 0


def pool_threads() -> int:
    return sum(thread.name.startswith("maxsim-cpu") for thread in threading.enumerate())


def test_threads_of_another_number_end() -> None:
    """After they have taken the turns that they were given."""
    before, taken, pool_begun = torch.get_num_threads(), [], threading.Event()

    def work(items: Iterator[int]) -> None:
        for item in items:
            pool_begun.set()
            time.sleep(0.002)
            taken.append(item)

    def call() -> None:
        torch.set_num_threads(2)
        in_turns(work, range(20))

    caller = threading.Thread(target=call)
    try:
        caller.start()
        assert pool_begun.wait(60)
        for count in (3, 5, 4):
            torch.set_num_threads(count)
            assert alone(int) == 0
    finally:
        caller.join(60)
        torch.set_num_threads(before)
    assert sorted(taken) == list(range(20))
    end = time.monotonic() + 60
    while pool_threads() > 4:
        assert time.monotonic() < end, f"{pool_threads()} threads stayed"
        time.sleep(0.01)


def scores(queries: Tensor) -> list[Tensor]:
    """Of many documents, float and INT8, padded, masked and packed, with and without winners; and of few."""
    dense = cases.gauss(60, 50, queries.shape[-1])
    packed = cases.packed([3, 700, 0, 1100, 64, 1, 256, 255, 257] * 3, queries.shape[-1], make=cases.gauss)
    mask = torch.rand(60, 50, generator=torch.Generator().manual_seed(2)) > 0.3
    found = [
        maxsim(queries, dense),
        maxsim(queries, dense[:2]),
        maxsim(queries, packed),
        maxsim(queries, packed.select(torch.arange(2))),
    ]
    found += [maxsim(queries, dense, document_mask=mask), *maxsim(queries, packed, return_argmax=True)]
    for granularity in ("document", "token"):
        found += [maxsim(queries, quantize_int8(held, granularity)) for held in (dense, packed)]
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("d", [24, pytest.param(600, marks=pytest.mark.slow)])
def test_the_bits_are_the_same_by_any_number_of_threads(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries whose products one thread makes each."""
    monkeypatch.setattr(tiles, "_CELLS", 1 << 17)
    monkeypatch.setattr(tiles, "_INT8_CELLS", 1 << 17)
    queries, before, found = cases.gauss(7, 40, d), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            found.append(scores(queries))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert cases.same_bits(one, two)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_process_that_was_forked_has_threads_of_its_own(two_threads: None) -> None:
    queries, documents = cases.gauss(8, 32, 16), cases.packed([300, 500, 7] * 20, 16, make=cases.gauss)
    need = maxsim(queries, documents)
    assert alone(int) == 0
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(maxsim(queries, documents), need) else 1)  # threads of the parent would never answer
    end = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        assert time.monotonic() < end, "the child waits for threads that it does not have"
        time.sleep(0.01)
    assert ended[1] == 0
