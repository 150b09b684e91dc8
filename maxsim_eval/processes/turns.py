"""Work in turns, a shard each: its pieces are made by several threads, and others write what is made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import torch

_SWITCH = 2e-4  # seconds: a thread that launches a model's kernels must not wait long for one that reads texts
Turn = TypeVar("Turn")
Piece = TypeVar("Piece")


class _StoppedError(Exception):
    """A piece was not made because another one failed."""


def each_turn(
    turns: Iterable[Turn],
    spans: Callable[[Turn], Iterable[tuple[int, int]]],
    encode: Callable[[int, int], Piece],
    write: Callable[[Turn, Iterable[Piece]], None],
    at_once: int,
) -> None:
    """`write` every turn (a shard) from its pieces, one for each of its `spans`; `at_once` are encoded at a time, a thread each.

    While the GPU works on one piece, the texts of the next are tokenized. Pieces are taken in order, so that shards are done one
    after the other and written meanwhile, and all threads share the work on the last one. The first error stops the others at
    their next piece, and is raised when they have stopped.
    """
    if at_once == 1:
        for turn in turns:
            write(turn, (encode(*span) for span in spans(turn)))
        return
    errors: list[BaseException] = []  # the first is raised; while there is one, nothing more is made
    ended: SimpleQueue[str] = SimpleQueue()  # a word for each piece or turn that ended, well or not

    def encoded(start: int, stop: int) -> Piece:
        try:
            if errors:
                raise _StoppedError
            return encode(start, stop)
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            ended.put("piece")

    def written(turn: Turn, pieces: Sequence[Future[Piece]]) -> None:
        try:
            write(turn, (piece.result() for piece in pieces))
        except BaseException as error:  # noqa: BLE001 (raised by the caller)
            errors.append(error)
        finally:
            ended.put("turn")

    most = 2 * at_once  # bound of pieces that are not made yet, and of turns that are not written yet
    switch, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(_SWITCH)
    try:
        # One torch thread in each: otherwise every thread of ours would get its own pool with as many threads as there are cores.
        with (
            ThreadPoolExecutor(most, "write", torch.set_num_threads, (1,)) as writing,
            ThreadPoolExecutor(at_once, "encode", torch.set_num_threads, (1,)) as encoding,
        ):
            # Ctrl-C may interrupt this thread anywhere, so it waits for the queue alone: interrupted with a future's lock just
            # taken, it would never release it, and the thread that ends the future would wait for ever.
            left = {"piece": 0, "turn": 0}
            try:
                for turn in turns:
                    pieces = [encoding.submit(encoded, *span) for span in spans(turn)]
                    writing.submit(written, turn, pieces)
                    left["piece"] += len(pieces)
                    left["turn"] += 1
                    del pieces  # what is written is not held
                    while max(left.values()) >= most:
                        left[ended.get()] -= 1
                    if errors:
                        break
                while left["turn"]:
                    left[ended.get()] -= 1
            except BaseException as error:
                errors.append(error)
                raise
    finally:
        sys.setswitchinterval(switch)
        torch.set_num_threads(threads)
    if errors:
        first = errors[0]
        errors.clear()  # else their tracebacks keep all errors and pieces alive until the garbage collector runs
        try:
            raise first
        finally:
            del first
