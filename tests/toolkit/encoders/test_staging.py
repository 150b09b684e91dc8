"""Memory that tokens from a GPU are brought to: used again, and never while somebody holds it."""

from __future__ import annotations

import threading

import numpy as np
import torch

from maxsim_eval.encoders.staging import Rooms


def test_a_room_is_used_again_when_nobody_holds_it() -> None:
    rooms = Rooms()
    last = rooms.take(1)
    tokens = torch.from_numpy(rooms.take(1000)).view(torch.float16).view(-1, 2)
    place = tokens.data_ptr()
    part = tokens[7:9]
    del tokens
    other = torch.from_numpy(rooms.take(1000))
    assert other.data_ptr() != place, "a part of it is held"
    del part
    assert torch.from_numpy(rooms.take(5000)).data_ptr() == place
    assert len(rooms.take(0)) == 0
    assert rooms._free
    del last, other
    assert not rooms._free, "nobody encodes any more"


def test_a_room_too_small_is_given_up() -> None:
    rooms = Rooms()
    last = rooms.take(1)
    rooms.take(1000)
    assert len(rooms._free) == 1
    large = rooms.take((64 << 20) + 1)
    assert len(large) == (64 << 20) + 1
    assert not rooms._free
    del last


def test_threads_never_share_one() -> None:
    rooms, wrong = Rooms(), list[int]()

    def work(number: int) -> None:
        for turn in range(200):
            room = rooms.take(1 + (number * 37 + turn) % 4096)
            room[:] = number
            if (room != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert np.shares_memory(one := rooms.take(10), one)
