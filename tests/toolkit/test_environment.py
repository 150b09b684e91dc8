"""The device that is worked on: `auto`, names, and a CUDA device that is there and does not work."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from maxsim_eval import environment
from maxsim_eval.environment import cores, resolve_device
from maxsim_eval.errors import UsageError


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What is found and said once a process is found and said again."""
    for each in (environment._automatic, environment._say):
        each.cache_clear()
    yield
    for each in (environment._automatic, environment._say):
        each.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with a CUDA device, which works or fails with a message."""

    def make(broken: str | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
        monkeypatch.setattr(environment, "_broken", lambda device: broken if device.startswith("cuda") else None)

    return make


def test_auto_takes_a_cuda_device_that_works_and_says_so_once(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gpu(None)
    assert [resolve_device("auto") for _ in range(3)] == ["cuda"] * 3
    assert capsys.readouterr().err == "device: cuda (NVIDIA H200)\n"


def test_auto_passes_over_a_cuda_device_that_does_not_work(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gpu("CUDA error: no kernel image is available for execution on the device")
    with pytest.warns(RuntimeWarning, match="does not work: CUDA error: no kernel image"):
        assert resolve_device("auto") == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert resolve_device("auto") == "cpu"
    assert capsys.readouterr().err == "device: cpu (the CUDA device does not work)\n"


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.DeferredCudaCallError("CUDA call failed lazily at initialization with error: no such device\nmore"),
        RuntimeError("CUDA call failed: out of memory"),
        AssertionError("CUDA call: Torch not compiled with CUDA enabled"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_cuda_raises_at_its_first_number_is_a_device_that_does_not_work(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.ones

    def ones(*size: Any, device: Any = None, **others: Any) -> torch.Tensor:
        if str(device).startswith("cuda"):
            raise error
        return plain(*size, device=device, **others)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", ones)
    with pytest.warns(RuntimeWarning, match="a CUDA device is there and does not work: CUDA call[^\n]*; the CPU is used"):
        assert resolve_device("auto") == "cpu"
    with pytest.raises(UsageError, match="device 'cuda' cannot be used: CUDA call"):
        resolve_device("cuda")


def test_a_cuda_device_that_was_asked_for_and_does_not_work_is_refused(gpu: Any) -> None:
    gpu("CUDA error: out of memory")
    with pytest.raises(UsageError, match="device 'cuda:0' cannot be used: CUDA error: out of memory"):
        resolve_device("cuda:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_auto_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve_device("auto") == "cpu"
    assert capsys.readouterr().err == ""
    with pytest.raises(UsageError, match="device 'cuda' cannot be used: "):
        resolve_device("cuda")


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve_device("auto", quiet=True) in ("cpu", "cuda")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["cpu", "cpu:0"])
def test_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve_device(name) == name
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["meta", "gpu", "", "mps", "Auto"])
def test_names_that_mean_no_device(name: str) -> None:
    with pytest.raises(UsageError, match=f"device '{name}' cannot be used: need auto, cpu, cuda or cuda:<number>"):
        resolve_device(name)


def test_what_auto_meant_is_recorded(tmp_path: Path) -> None:
    from maxsim_eval import evaluate, load_task

    result = evaluate(
        load_task("demo", "small", data_dir=tmp_path),
        "lexical",
        ["fp16"],
        cache_dir=tmp_path / "cache",
        quiet=True,
        limit_queries=3,
    )
    assert result.environment["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="cores are counted on Linux alone")
def test_processes_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    for beside, found in (("", 32), ("1", 32), ("2", 16), ("3", 10), ("64", 1), ("many", 32), ("0", 32)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", beside)
        assert cores() == found
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert cores() == 32
