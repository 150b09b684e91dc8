"""One of two gloo processes of test_training_processes.py: `python two_processes.py RANK RENDEZVOUS_FILE OUT_FILE`.

Runs every distributed case once and saves what it saw as a dictionary of tensors; the test compares with one process on the whole
batch. The cases' inputs come from `inputs`, which the test calls too.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maxsim_kernels.training import contrastive_loss, distillation_loss, gather_documents

WORLD, BATCH, DOCUMENTS, LENGTH, DIM = 2, 3, 4, 6, 8


def inputs() -> dict[str, Tensor]:
    """The whole batch: WORLD * BATCH queries, WORLD * DOCUMENTS documents, four candidates a query."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    everything = {
        "queries": draw(WORLD * BATCH, 4, DIM),
        "documents": draw(WORLD * DOCUMENTS, LENGTH, DIM),
        "candidates": draw(WORLD * BATCH, 4, LENGTH, DIM),
        "teacher": draw(WORLD * BATCH, 4),
    }
    everything["lengths"] = torch.tensor([6, 1, 3, 2, 0, 5, 6, 4])  # document 4 is empty: the second process's first positive
    everything["mask"] = torch.arange(LENGTH) < everything["lengths"].unsqueeze(1)
    return everything


class Encoder(nn.Module):
    """A linear layer on tokens, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = nn.Linear(DIM, DIM)
        self.log_temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, *tokens: Tensor) -> tuple[Tensor, ...]:
        """Each tensor's tokens through the layer, then the temperature."""
        return *(self.linear(each) for each in tokens), self.log_temperature.exp()


def main(rank: int, rendezvous: str, out: str) -> None:
    """Every case."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    whole, saw = inputs(), {}
    queries, candidates, teacher = (whole[name][rank * BATCH :][:BATCH] for name in ("queries", "candidates", "teacher"))
    documents, lengths, mask = (whole[name][rank * DOCUMENTS :][:DOCUMENTS] for name in ("documents", "lengths", "mask"))
    positives = torch.arange(BATCH) + rank * DOCUMENTS

    leaf = documents.clone().requires_grad_()
    saw["gathered_lengths"], saw["gathered_mask"] = gather_documents(lengths), gather_documents(mask)
    gathered = gather_documents(leaf)
    saw["gathered"] = gathered.detach()
    saw["loss"] = contrastive_loss(queries, gathered, document_lengths=saw["gathered_lengths"], positives=positives)
    saw["loss"].backward()
    saw["leaf"] = leaf.grad

    half = documents.bfloat16().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()  # strided
    saw["half"] = gather_documents(half, check=False)
    (saw["half"].float() * (1.0 if rank else 0.5)).sum().backward()
    saw["half_grad"] = half.grad
    saw["none"] = gather_documents(documents[:0])

    model = DistributedDataParallel(Encoder())
    q, d, temperature = model(queries, documents)
    contrastive_loss(
        q,
        gather_documents(d),
        document_mask=saw["gathered_mask"],
        positives=positives,
        temperature=temperature,
    ).backward()
    saw |= {f"contrastive {name}": each.grad.clone() for name, each in model.module.named_parameters()}

    model.zero_grad(set_to_none=True)
    q, d, temperature = model(queries, candidates)
    distillation_loss(q, d, teacher, temperature=temperature).backward()
    saw |= {f"distillation {name}": each.grad.clone() for name, each in model.module.named_parameters()}

    for unequal in (torch.zeros(2, 3 + rank, DIM), torch.zeros(2, 3, DIM, dtype=(torch.float32, torch.float16)[rank])):
        with pytest.raises(
            ValueError, match=r"^documents: got torch.float32 \[2, 3, 8\] on rank 0, .* on rank 1, need one shape"
        ):
            gather_documents(unequal)
    torch.save({name: each.detach() for name, each in saw.items()}, out)
    dist.barrier()  # see examples/train_encoder.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
