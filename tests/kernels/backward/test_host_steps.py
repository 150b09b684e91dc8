"""What a training step of ColBERT's sizes asks of the host once it is known: launches and calls of torch, counted without a GPU."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("TRITON_INTERPRET is set: kernels are interpreted, not launched", allow_module_level=True)

import fake_launches
from maxsim_kernels import maxsim
from maxsim_kernels.training import contrastive_loss

GRADIENTS = {
    "_rows_kernel": 1,
    "_sum_kernel": 1,
    "_table_kernel": 1,
    "_place_kernel": 1,
    "_lists_kernel": 1,
    "_pieces_kernel": 1,
}
# Beside what a step asks for: torch adds gradients up, these tests poison new memory, and positives on a CPU are looked at.
BESIDE = {"aten::detach", "aten::add_", "aten::fill_", "aten::min", "aten::max", "aten::item"}
LOSS = {"_terms_kernel": 1, "_mean_kernel": 1, "_slopes_kernel": 1}


@pytest.fixture
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    q, d = torch.randn(128, 32, 16, generator=drawn), torch.randn(128, 180, 16, generator=drawn)
    return q.half().requires_grad_(), d.half().requires_grad_()


def counts(step) -> tuple[Counter[str], Counter[str]]:
    """Launches and calls of torch of a step that has come before."""
    with fake_launches.counted() as launches:
        for _ in range(3):
            step()
        launches.clear()
        step()
        once = Counter(launches)
        return once, fake_launches.torch_calls(step)


def test_a_step_of_scores_and_torchs_loss(tokens) -> None:
    """Some 18 kernels and 26 calls of torch before lists were begun by one launch and scratch was one buffer."""

    def step() -> None:
        F.cross_entropy(maxsim(*tokens), torch.arange(128)).backward()

    launches, calls = counts(step)
    assert launches == Counter({"_tiles_kernel": 1} | GRADIENTS)
    assert calls["aten::empty"] == 5  # scores, winners, both gradients, scratch
    assert {"aten::zero_", "aten::cumsum", "aten::sum", "aten::copy_"}.isdisjoint(calls)


def test_a_step_of_a_librarys_default_batch() -> None:
    """32 queries of 32 tokens and as many pages, as colpali-engine's losses send them: one launch writes the lists."""
    q = torch.zeros(32, 32, 16, dtype=torch.bfloat16, requires_grad=True)
    d = torch.zeros(32, 1030, 16, dtype=torch.bfloat16, requires_grad=True)
    launches, calls = counts(lambda: maxsim(q, d).backward(torch.ones(32, 32)))
    assert launches == Counter(_tiles_kernel=1, _rows_kernel=1, _table_kernel=1, _lists_kernel=1)
    assert calls["aten::empty"] == 5


@pytest.mark.parametrize("positives", [None, torch.arange(128).flip(0)])
def test_a_step_of_the_contrastive_loss(tokens, positives) -> None:
    """45 calls of torch, most of which launch a kernel, before the loss was a node of its own."""

    def step() -> None:
        contrastive_loss(*tokens, positives=positives, temperature=0.5).backward()

    for leaf in tokens:
        leaf.grad = torch.zeros_like(leaf)
    launches, calls = counts(step)
    assert launches == Counter({"_tiles_kernel": 1} | LOSS | GRADIENTS)
    assert set(calls) - BESIDE == {"aten::empty", "aten::ones_like"}
    assert calls["aten::empty"] == 7


def test_a_loss_with_a_learned_temperature_is_torchs(tokens) -> None:
    temperature = torch.tensor(0.5, requires_grad=True)
    launches, _ = counts(lambda: contrastive_loss(*tokens, temperature=temperature).backward())
    assert launches == Counter({"_tiles_kernel": 1} | GRADIENTS)
