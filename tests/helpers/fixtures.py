"""Fixtures that several folders of tests share; a conftest.py, or a test file, imports those it wants for every test in it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch

from places import TESTS

SCRIPTS = TESTS / "kernels" / "interpreted"


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """Runs a group of one of the scripts `interpreted_*.py` under Triton's interpreter; it must say how much it has checked.

    Each in a process of its own, forked from one that has imported torch and Triton (`prepared.py`).
    """
    places = (str(TESTS / "helpers"), str(SCRIPTS), os.environ.get("PYTHONPATH"))
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, places))}
    files = [tmp_path_factory.mktemp("interpreted") / name for name in ("output", "errors")]
    prepared: list[subprocess.Popen[str]] = []

    def end() -> None:
        for process in prepared:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a group that hangs too
            process.communicate()
        prepared.clear()

    def run(script: str, group: str, checks: int, folder: str = "kernels/interpreted") -> None:
        if not prepared:
            command, pipe = [sys.executable, str(SCRIPTS / "prepared.py")], subprocess.PIPE
            prepared.append(subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True, start_new_session=True))
        for file in files:
            file.write_text("", encoding="utf-8")
        source, sink = prepared[0].stdout, prepared[0].stdin
        assert source is not None
        assert sink is not None
        sink.write(json.dumps([str(TESTS / folder / f"interpreted_{script}.py"), group, *map(str, files)]) + "\n")
        sink.flush()
        answer = source.readline().strip() if select.select([source], [], [], 280)[0] else "no end in 280 seconds"
        output, errors = (file.read_text(encoding="utf-8") for file in files)
        if answer != "0":
            end()
        assert answer == "0", f"{answer}: {errors[-3000:]}"
        assert output.strip() == f"{checks} checked"

    yield run
    end()


def _fill(tensor: Any) -> Any:
    """NaN where the dtype has one, else an extreme integer: a value nobody stores by accident."""
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.kind in "fc":
            tensor.fill(np.nan)
        elif tensor.dtype.kind in "iu":
            tensor.fill(np.iinfo(tensor.dtype).max)
        return tensor
    if type(tensor) is not torch.Tensor:  # a fake tensor of a tracer
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(float("nan"))
        return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)


def _poisoned(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _fill(function(*args, **kwargs))

    return call


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill "uninitialised" memory with NaN and extreme integers, so a store that was missed fails loudly."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in (
            (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
            (torch.Tensor, ("new_empty", "new_empty_strided")),
            (np, ("empty", "empty_like")),
        ):
            for name in names:
                patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield


@pytest.fixture(autouse=True, scope="module")
def poison(request: pytest.FixtureRequest) -> Iterator[None]:
    """Memory of every test of a file is poisoned; one about memory, tracing or capture turns it off with `POISON = False`."""
    if not getattr(request.module, "POISON", True):
        yield
        return
    with poisoned_memory():
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread, because tiny products on several threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
