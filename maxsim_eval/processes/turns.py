"""Work in turns, a shard each: its pieces are made by several threads, and others write what is made."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from typing import TypeVar

import torch

_SWITCH = 2e-4  # seconds: a thread that launches a model's kernels must not wait long for one that reads texts
Turn = TypeVar("Turn")
Piece = TypeVar("Piece")


class _StoppedError(Exception):
    """Not made: something else failed."""


def each_turn(
    turns: Iterable[Turn],
    spans: Callable[[Turn], Iterable[tuple[int, int]]],
    encode: Callable[[int, int], Piece],
    write: Callable[[Turn, Iterable[Piece]], None],
    at_once: int,
) -> None:
    """`write` every turn (a shard) from its pieces, one for each of its `spans`; so many are encoded at a time, each in a thread.

    While the GPU has the texts of one piece, those of the next are read. Pieces are taken in their order, so that shards are done one
    after the other and written meanwhile; the last is not one thread's work. The first error stops the others at their next piece, and
    is raised when they have stopped.
    """
    if at_once == 1:
        for turn in turns:
            write(turn, (encode(*span) for span in spans(turn)))
        return
    stopped = threading.Event()

    def encoded(start: int, stop: int) -> Piece:
        if stopped.is_set():
            raise _StoppedError
        try:
            return encode(start, stop)
        except BaseException:
            stopped.set()
            raise

    def written(turn: Turn, pieces: Sequence[Future[Piece]]) -> None:
        try:
            write(turn, (piece.result() for piece in pieces))
        except _StoppedError:
            pass
        except BaseException:
            stopped.set()
            raise

    most = 2 * at_once  # pieces that are begun or wait to be; and shards that are begun and not on the disk
    switch, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(_SWITCH)
    try:
        # One thread of torch's for each: every one of ours would get a pool of as many as there are cores, all of them waiting.
        with (
            ThreadPoolExecutor(most, "write", torch.set_num_threads, (1,)) as writing,
            ThreadPoolExecutor(at_once, "encode", torch.set_num_threads, (1,)) as encoding,
        ):
            running, asked = set[Future[None]](), deque[Future[Piece]]()
            try:
                for turn in turns:
                    pieces = [encoding.submit(encoded, *span) for span in spans(turn)]
                    running.add(writing.submit(written, turn, pieces))
                    asked.extend(pieces)
                    del pieces  # what is written is not held
                    while len(asked) >= most:
                        wait([asked.popleft()])
                    done, running = wait(running, None if len(running) >= most else 0, FIRST_COMPLETED)
                    for each in done:
                        each.result()
                    if stopped.is_set():
                        break
                for each in as_completed(running):
                    each.result()
            except BaseException:
                stopped.set()
                raise
    finally:
        sys.setswitchinterval(switch)
        torch.set_num_threads(threads)
