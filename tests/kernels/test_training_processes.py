"""Training with several processes and as a script: two gloo processes equal one, examples/train_encoder.py learns."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tolerances as tol
from maxsim_kernels.training import contrastive_loss, distillation_loss
from places import ROOT


def close(got, need):
    """Sums of float32 gradients in another order."""
    assert (got - need).abs().max().item() <= 50 * tol.SCORE * need.abs().max().item()


def load(path):
    """A module from a file that is not a test."""
    spec = importlib.util.spec_from_file_location(f"maxsim_test_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(*arguments):
    """A Python process in the repository's root, with one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def finish(*processes, seconds=120):
    """Outputs of processes, all ended whatever happens."""
    try:
        ended = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [output for output, _ in ended]


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """Loss and gradients of two gloo processes, with and without DistributedDataParallel, equal one process on the whole batch."""
    script = Path(__file__).with_name("two_processes.py")
    worker, outs = load(script), [tmp_path / f"{rank}.pt" for rank in range(2)]
    finish(*(run_python("-W", "error", script, rank, tmp_path / "rendezvous", outs[rank]) for rank in range(2)))
    saw, whole = [torch.load(out, weights_only=True) for out in outs], worker.inputs()
    positives = torch.tensor([0, 1, 2, 4, 5, 6])
    for each in saw:
        assert torch.equal(each["gathered"], whole["documents"])
        assert torch.equal(each["gathered_lengths"], whole["lengths"])
        assert torch.equal(each["gathered_mask"], whole["mask"])
        assert torch.equal(each["half"], whole["documents"].bfloat16())
        assert torch.equal(each["half_grad"], torch.full((worker.DOCUMENTS, worker.LENGTH, worker.DIM), 1.5).bfloat16())
        assert each["none"].shape == (0, worker.LENGTH, worker.DIM)

    documents = whole["documents"].clone().requires_grad_()
    loss = contrastive_loss(whole["queries"], documents, document_lengths=whole["lengths"], positives=positives)
    loss.backward()
    close((saw[0]["loss"] + saw[1]["loss"]) / 2, loss.detach())
    close(torch.cat([each["leaf"] for each in saw]) / 2, documents.grad)

    model = worker.Encoder()
    q, d, temperature = model(whole["queries"], whole["documents"])
    contrastive_loss(q, d, document_mask=whole["mask"], positives=positives, temperature=temperature).backward()
    q, d, temperature = (other := worker.Encoder())(whole["queries"], whole["candidates"])
    distillation_loss(q, d, whole["teacher"], temperature=temperature).backward()
    for kind, encoder in (("contrastive", model), ("distillation", other)):
        for name, parameter in encoder.named_parameters():
            assert torch.equal(saw[0][f"{kind} {name}"], saw[1][f"{kind} {name}"])
            close(saw[0][f"{kind} {name}"], parameter.grad)


def reported(output):
    """(step, loss, accuracy) of every line the example prints."""
    found = re.findall(r"step (\d+): loss ([\d.]+), in-batch accuracy ([\d.]+)", output)
    return [(int(step), float(loss), float(accuracy)) for step, loss, accuracy in found]


@pytest.mark.slow
def test_example_learns():
    """Ten steps run; thirty more lower the loss and raise accuracy far above chance (1 / 32)."""
    output = finish(run_python("-W", "error", "examples/train_encoder.py", "--steps", "40"))[0]
    lines = reported(output)
    assert [step for step, _, _ in lines] == [1, 25, 40]
    assert lines[-1][1] < 0.6 * lines[0][1]
    assert lines[-1][2] > lines[0][2] + 0.2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs a C++ compiler")
def test_example_compiled():
    output = finish(run_python("examples/train_encoder.py", "--compile", "--steps", "10"), seconds=250)[0]
    assert reported(output)[-1][0] == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--ddp",), "start with torchrun"), (("--amp", "fp16"), "need --device cuda"), (("--steps", "0"), "need at least 1")],
)
def test_example_refuses(arguments, message, monkeypatch, capsys):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train_encoder.py", *arguments])
    with pytest.raises(SystemExit):
        load(ROOT / "examples" / "train_encoder.py").parse_arguments()
    assert message in capsys.readouterr().err
