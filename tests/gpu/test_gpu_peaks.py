"""The peak of device memory while a path runs."""

from __future__ import annotations

import torch

from maxsim_eval.processes import peak_memory


def test_the_devices_peak_is_that_of_the_time_between() -> None:
    torch.cuda.synchronize()
    before = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del before
    watched = peak_memory.start("cuda:0")
    idle = watched()["device_peak_bytes"]
    held = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    del held
    found = watched()["device_peak_bytes"]
    assert idle is not None
    assert found is not None
    assert found - idle == 32 << 20
