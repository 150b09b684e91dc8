"""What several processes must have in common before they work on one thing: a file system, hardware, versions, threads."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from maxsim_eval.environment import environment
from maxsim_eval.errors import UsageError
from maxsim_eval.processes.world import World

PATIENCE = 10.0  # seconds a network file system gets to show a new file
# What numbers may depend on besides the inputs. Threads change the order of additions on a CPU alone.
_MACHINE = ("cpu", "threads", "torch", "maxsim_eval")
_GPU_MACHINE = ("gpu", "cuda", "torch", "triton", "maxsim_eval")


def blind_ranks(path: Path, world: World, patience: float) -> list[int]:
    """The ranks that do not see a file which the leader has written, after `patience` seconds; every rank gets the answer."""
    end = time.monotonic() + patience
    while not (seen := path.exists()) and time.monotonic() < end:
        world.check()
        time.sleep(0.1)
    return [rank for rank, sees in enumerate(world.collect(seen)) if not sees]


def machine_of(device: str) -> dict[str, Any]:
    """What numbers computed on `device` depend on besides the inputs."""
    facts = environment(device)
    found = {name: facts.get(name) for name in (_GPU_MACHINE if device.startswith("cuda") else _MACHINE)}
    return {**found, "fp32_precision": _precision()}


def _precision() -> list[str]:
    """Whether FP32 products may round to TF32: the user's own settings of torch."""
    places: tuple[Any, ...] = (torch.backends, torch.backends.cuda.matmul)
    return [place.fp32_precision for place in places]


def require_same_machines(machines: Sequence[Mapping[str, Any]], what: str) -> None:
    """Raise `UsageError` where facts of the ranks' machines differ; `what` depends on these (`scores`: for the message)."""
    for rank, machine in enumerate(machines):
        for name, value in machine.items():
            if value != machines[0][name]:
                raise UsageError(
                    f"processes differ: {name} is {value!r} on rank {rank}, {machines[0][name]!r} on rank 0; {what} are the same to "
                    "the last bit only on one kind of hardware, library and thread setting"
                )
