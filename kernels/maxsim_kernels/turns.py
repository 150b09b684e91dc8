"""Threads of the CPU paths: each makes products of its own and finds their maxima, and takes the next tile when it is done.

A product that several threads make together is waited for by all of them, and what follows it, a segmented maximum, is the work of one.
Here nobody waits for anybody but at the end, and a product has the bits that one thread gives it, however many threads there are.
The threads stay for the next call, which then costs 50 microseconds; a call that has to start them costs ten times that. A call with
another number of threads starts its own and lets the former ones end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_pooling = threading.RLock()
_pool: dict[int, ThreadPoolExecutor] = {}  # the threads that stay, by their number; one pool at most


class _Items(Iterator[Item]):
    """Items that several threads take, each of them once; none any more after `stop`."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items, self._lock = iter(items), threading.Lock()
        self.stopped = False

    def __next__(self) -> Item:
        with self._lock:
            if self.stopped:
                raise StopIteration
            return next(self._items)


def in_turns(work: Callable[[Iterator[Item]], None], items: Sequence[Item], most: int | None = None) -> None:
    """Call `work` in each of torch's number of threads (`most` at most), all with one iterator: a thread takes what comes next.

    `work` runs without gradients and autocast, and its products are made by its own thread alone. Its first error is raised here; the
    others stop at their next item.
    """
    threads = torch.get_num_threads()
    shared, ended = _Items(items), SimpleQueue[BaseException | None]()

    def turn() -> None:
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                work(shared)
        except BaseException as error:  # noqa: BLE001 (raised by the caller)
            ended.put(error)
        else:
            ended.put(None)

    count = max(1, min(len(items), threads, most or threads))
    if threads == 1:  # also a call from a thread of the pool, which has one torch thread
        turn()
    else:
        _submit(turn, count, threads)
    errors = []
    try:
        for _ in range(count):
            if (error := ended.get()) is not None:
                shared.stopped = True
                errors.append(error)
    finally:
        shared.stopped = True  # after Ctrl-C, which this thread alone sees
    if errors:
        raise errors[0]


def alone(function: Callable[..., Result], *arguments: object) -> Result:
    """Run a function in one of the threads, so that its products have the bits that they have there."""
    found: list[Result] = []
    in_turns(lambda once: found.extend(function(*arguments) for _ in once), (None,))
    return found[0]


def _submit(turn: Callable[[], None], count: int, threads: int) -> None:
    """Have `count` of the pool's `threads` threads take a turn."""
    with _pooling:  # or another call could end the pool before all turns are in it
        if threads not in _pool:
            while _pool:
                _pool.popitem()[1].shutdown(wait=False)  # turns that are in it are taken all the same
            _pool[threads] = _new_pool(threads)
        for _ in range(count):
            _pool[threads].submit(turn)


def _forked() -> None:
    """A forked process has none of the threads: it begins its own."""
    _pool.clear()
    _pooling.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pooling.acquire, after_in_parent=_pooling.release, after_in_child=_forked)


def _new_pool(threads: int) -> ThreadPoolExecutor:
    """A pool of `threads` threads, each limited to one torch thread."""
    begun = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # before setting it: a thread's first question takes torch's number, whatever was set
        torch.set_num_threads(1)
        begun.wait()

    pool = ThreadPoolExecutor(threads, "maxsim-cpu", begin)
    for _ in range(threads):
        pool.submit(int)
    begun.wait()
    torch.set_num_threads(threads)  # threads that begin later take this number, not the pool's 1
    return pool
