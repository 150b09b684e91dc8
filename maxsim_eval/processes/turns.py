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
    """`write` every turn (a shard) from its pieces, one for each of its `spans`; so many are encoded at a time, each in a thread.

    While the GPU has the texts of one piece, those of the next are read. Pieces are taken in their order, so that shards are done one
    after the other and written meanwhile; the last is not one thread's work. The first error stops the others at their next piece, and
    is raised when they have stopped.
    """
    if at_once == 1:
        for turn in turns:
            write(turn, (encode(*span) for span in spans(turn)))
        return
    errors: list[BaseException] = []  # the first is raised; while there is one, nothing more is made
    ended: SimpleQueue[str] = SimpleQueue()  # of pieces and turns that are done, whichever way

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

    most = 2 * at_once  # pieces that are begun or wait to be; and turns that are begun and not written
    switch, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(_SWITCH)
    try:
        # One thread of torch's for each: every one of ours would get a pool of as many as there are cores, all of them waiting.
        with (
            ThreadPoolExecutor(most, "write", torch.set_num_threads, (1,)) as writing,
            ThreadPoolExecutor(at_once, "encode", torch.set_num_threads, (1,)) as encoding,
        ):
            # This thread, which Ctrl-C interrupts anywhere, waits for the queue alone: a future's lock that it had just taken would
            # never be let go, and the thread that ends the future would wait for ever.
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
        errors.clear()  # or each would hold all, and what was made, until the garbage collector comes
        try:
            raise first
        finally:
            del first
