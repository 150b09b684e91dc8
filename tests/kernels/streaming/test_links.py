"""The way to a GPU, where no GPU is needed to see what is asked of the driver (tests/gpu/test_gpu_transfer.py: on one)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from maxsim_kernels.streaming.links import CudaLink


def test_events_are_asked_about_on_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer asks too, and elsewhere the driver would make a context of some 500 MB: the guards, without a GPU."""
    current, asked = [torch.device("cuda", 0)], []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Event:
        def query(self) -> bool:
            asked.append(("query", current[-1].index))
            return True

        def synchronize(self) -> None:
            asked.append(("synchronize", current[-1].index))

    link = CudaLink.__new__(CudaLink)  # its stream would need a GPU
    link.device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device", on)
    assert link.passed(Event())
    link.reuse(torch.empty(0), Event())
    link.reuse(torch.empty(0), None)
    assert (asked, len(current)) == ([("query", 1), ("synchronize", 1)], 1)
