"""Memory that tokens from a GPU are brought to: used again, and never while somebody holds it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from maxsim_eval.encoders.staging import Rooms

SIZE = 40 << 20  # of a window: smaller ones are not kept


@pytest.mark.parametrize(
    "made",
    [
        lambda room: torch.from_numpy(room).view(torch.float16).view(-1, 2)[7:9],
        lambda room: torch.from_numpy(room).view(torch.float16).view(-1, 2).detach()[:5].numpy()[1:],
        lambda room: room[5:90].view(np.int8)[3:],
        lambda room: memoryview(room)[4:8],
    ],
    ids=["tensor", "array of a tensor", "array", "buffer"],
)
def test_a_room_is_used_again_when_nobody_holds_a_part_of_it(made: Callable[[np.ndarray], object]) -> None:
    rooms = Rooms()
    last = rooms.take(SIZE)
    part = [made(rooms.take(SIZE))]
    assert not rooms._free, "a part of it is held"
    part.clear()
    (free,) = rooms._free
    assert rooms.take(SIZE - 100).ctypes.data == free.ctypes.data
    assert rooms._free
    del last
    assert not rooms._free, "nobody encodes any more"


def test_small_ones_are_their_holders_own() -> None:
    rooms = Rooms()
    last = rooms.take(SIZE)
    kept = [rooms.take(size) for size in (0, 1, 1000)]
    assert [len(one) for one in kept] == [0, 1, 1000]
    assert all(one.base is None for one in kept)
    assert not rooms._free
    del last
    assert not rooms._used


def test_a_room_too_small_is_given_up() -> None:
    rooms = Rooms()
    last = rooms.take(SIZE)
    rooms.take(SIZE)
    assert len(rooms._free) == 1
    large = rooms.take(70 << 20)
    assert len(large) == 70 << 20
    assert not rooms._free
    del last


def test_threads_never_share_one() -> None:
    """Six at a time, all of which hold theirs while they are compared."""
    rooms, places = Rooms(), [0] * 6
    compared, together = list[int](), threading.Barrier(6, lambda: compared.append(len(set(places))))

    def work(number: int) -> None:
        for turn in range(40):
            room = torch.from_numpy(rooms.take(SIZE + number + turn))
            places[number] = room.data_ptr()
            together.wait(20)
            del room

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compared == [6] * 40
    assert not rooms._used
