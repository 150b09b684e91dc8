"""`tune` on a GPU: answers change no bit, are said by `explain`, and are found by another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from inputs import on_gpu as make
from maxsim_kernels import Packed, explain, fallback, maxsim, quantize_fp8, quantize_int8, tune
from maxsim_kernels.gpu import launch
from maxsim_kernels.gpu.forward import tuned

QUERIES, DOCUMENTS = ((1, 32), (20, 32)), ((200, 180),)
ABOUT: dict[str, Any] = {"queries": QUERIES, "documents": DOCUMENTS}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MAXSIM_CACHE", str(tmp_path))
    monkeypatch.setattr(tuned, "_held", {})
    launch.forget()
    yield tmp_path
    launch.forget()


def fp8() -> tuple[str, ...]:
    return ("fp8",) if torch.cuda.get_device_capability() >= (8, 9) else ()


def calls() -> dict[str, tuple[Any, Any]]:
    """A call of every form and query, in other numbers of documents than are timed."""
    found = {}
    for count, size in QUERIES:
        queries, dense = make.gauss(count, size, 128), make.gauss(170, 180, 128, seed=1)
        packed = Packed(dense.flatten(0, 1), torch.arange(171, device="cuda") * 180)
        held = {"dense": dense, "packed": packed}
        for granularity in ("token", "document", "corpus"):
            held[f"int8 {granularity}"] = quantize_int8(packed, granularity)
            if fp8():
                held[f"fp8 {granularity}"] = quantize_fp8(dense, granularity)
        found |= {f"{count} {name}": (queries, documents) for name, documents in held.items()}
    return found


@pytest.mark.parametrize("winners", [False, True])
def test_answers_change_no_bit_and_are_kept(folder, winners) -> None:
    before = {name: maxsim(*call, return_argmax=winners) for name, call in calls().items()}
    lines = tune(**ABOUT, forms=("dense", "packed", "int8", *fp8()), return_argmax=winners).splitlines()
    assert lines[-1] == f"kept in {next(folder.iterdir())}"
    assert len(lines) == 1 + len(QUERIES) * (2 + 6 * (1 + len(fp8())))
    after = {name: maxsim(*call, return_argmax=winners) for name, call in calls().items()}
    for name, one in before.items():
        pairs = zip(one, after[name], strict=True) if winners else [(one, after[name])]
        assert all(torch.equal(left, right) for left, right in pairs), name
    again = tune(**ABOUT, forms=("dense", "packed"), return_argmax=winners).splitlines()
    # Where one configuration alone gives the table's bits there is nothing to know.
    assert all(line.endswith(": known") or "nothing else to choose" in line for line in again)


def test_every_answer_is_at_least_as_fast_as_the_tables_own(folder) -> None:
    tune(**ABOUT, forms=("dense",))
    (path,) = folder.iterdir()
    found = json.loads(path.read_text())
    assert found["gpu"] == torch.cuda.get_device_name()
    assert found["answers"]
    for one in found["answers"].values():
        assert 0 < one["ms"] <= one["before"]


def test_another_process_finds_them(folder) -> None:
    tune(**ABOUT, dtype=torch.float32, forms=("dense",))
    code = (
        "import torch; from maxsim_kernels import explain\n"
        "print(explain(torch.ones(20, 32, 128, device='cuda'), torch.ones(170, 180, 128, device='cuda')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, env=os.environ)
    assert f"measured on {torch.cuda.get_device_name()} by tune()" in done.stdout
    assert done.stdout.strip() == explain(torch.ones(20, 32, 128, device="cuda"), torch.ones(170, 180, 128, device="cuda"))


def test_a_damaged_file_is_named_and_calls_go_on(folder, monkeypatch) -> None:
    tune(**ABOUT, forms=("dense",))
    path: Path = next(folder.iterdir())
    path.write_text(path.read_text()[:100])
    monkeypatch.setattr(tuned, "_held", {})
    monkeypatch.setattr(fallback, "_SAID", set())
    launch.forget()
    with pytest.warns(UserWarning, match="^maxsim_kernels: .*tuned-.*: no JSON"):
        maxsim(make.gauss(1, 32, 128), make.gauss(170, 180, 128, seed=1))


def test_calls_are_replayed_as_before(folder) -> None:
    queries, documents = make.gauss(1, 32, 128), make.gauss(170, 180, 128, seed=1)
    tune(**ABOUT, forms=("dense",))
    for _ in range(2):  # the second one is recorded
        maxsim(queries, documents)
    plans = dict(launch._plans)
    assert len(plans) == (launch.VERSION in launch.TRIED)
    maxsim(queries, documents)
    assert launch._plans == plans


def test_a_capture_refuses_to_time() -> None:
    graph, found = torch.cuda.CUDAGraph(), []
    held = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        held += 1
        try:
            tune(**ABOUT)
        except RuntimeError as error:
            found.append(str(error))
    assert found == ["tune: a CUDA graph is being captured: call tune() before the capture"]
