"""Train a small late-interaction encoder with MaxSim and in-batch negatives; seconds on a CPU.

    python examples/train_encoder.py                                        # CPU, bfloat16 autocast
    python examples/train_encoder.py --device cuda --amp fp16 --compile     # one GPU, GradScaler, compiled encoder
    torchrun --nproc-per-node 2 examples/train_encoder.py --ddp             # two processes share every batch's negatives

The task: a document is a sequence of random words of one language, its query a few of them translated into another. Nothing but
training can tell which words belong together, so accuracy among the batch's documents starts at chance and rises as they are learned.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from maxsim_kernels import maxsim
from maxsim_kernels.training import contrastive_loss, gather_documents

WORDS = 150  # of each language: ids 1..WORDS and WORDS + 1..2 * WORDS; id 0 is padding
DOCUMENT_TOKENS = 16
QUERY_TOKENS = 5
AMP = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": torch.float32}


class Encoder(nn.Module):
    """Token ids `[N, L]` -> one unit vector a token, `[N, L, d]`: embedding, one transformer layer, projection."""

    def __init__(self, width: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * WORDS + 1, width, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
        self.projection = nn.Linear(width, dim, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Encode; padding is not attended to, and its own vectors are masked by the loss."""
        hidden = self.layer(self.embedding(ids), src_key_padding_mask=ids == 0)
        return F.normalize(self.projection(hidden), dim=-1)


def text_pairs(count: int, generator: random.Random, translation: list[int]) -> tuple[Tensor, Tensor]:
    """Token ids of `count` queries `[count, QUERY_TOKENS]` and of their documents `[count, DOCUMENT_TOKENS]`, 0 where padded."""
    queries = torch.zeros(count, QUERY_TOKENS, dtype=torch.int64)
    documents = torch.zeros(count, DOCUMENT_TOKENS, dtype=torch.int64)
    for row in range(count):
        words = generator.sample(range(WORDS), generator.randint(DOCUMENT_TOKENS // 2, DOCUMENT_TOKENS))
        asked = generator.sample(words, generator.randint(3, QUERY_TOKENS))
        documents[row, : len(words)] = torch.tensor(words) + 1
        queries[row, : len(asked)] = torch.tensor([translation[word] for word in asked]) + 1 + WORDS
    return queries, documents


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (default 150)")
    parser.add_argument("--batch", type=int, default=32, help="pairs in a micro-batch of one process (default 32)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches an optimizer step (default 2)")
    parser.add_argument("--temperature", type=float, default=0.1, help="of the in-batch softmax (default 0.1)")
    parser.add_argument("--lr", type=float, default=5e-3, help="AdamW's learning rate (default 5e-3)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--amp", choices=AMP, default="bf16", help="autocast dtype; fp16 needs a GPU (default bf16)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the encoder")
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel; start with torchrun")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.ddp and "LOCAL_RANK" not in os.environ:
        parser.error("--ddp: no LOCAL_RANK in the environment; start with torchrun --nproc-per-node 2 ... --ddp")
    if arguments.amp == "fp16" and not arguments.device.startswith("cuda"):
        parser.error(f"--amp: got fp16 on {arguments.device}, need --device cuda (or --amp bf16)")
    for name in ("steps", "batch", "accumulate"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: got {getattr(arguments, name)}, need at least 1")
    return arguments


def batch_loss(
    model: nn.Module, query_ids: Tensor, document_ids: Tensor, arguments: argparse.Namespace
) -> tuple[Tensor, Tensor]:
    """Loss and accuracy of one micro-batch; with several processes, all their documents are candidates."""
    device_type = torch.device(arguments.device).type
    with torch.autocast(device_type, dtype=AMP[arguments.amp], enabled=arguments.amp != "none"):
        # One forward for both sides, as DistributedDataParallel wants: queries padded to the documents' length.
        both = torch.zeros(2, len(query_ids), DOCUMENT_TOKENS, dtype=torch.int64, device=query_ids.device)
        both[0, :, :QUERY_TOKENS], both[1] = query_ids, document_ids
        tokens = model(both.flatten(0, 1)).unflatten(0, (2, -1))
        queries, documents = tokens[0, :, :QUERY_TOKENS], tokens[1]
    query_mask, document_mask = query_ids != 0, document_ids != 0
    positives = torch.arange(len(queries), device=queries.device)
    if arguments.ddp:
        documents, document_mask = gather_documents(documents), gather_documents(document_mask)
        positives += dist.get_rank() * len(queries)
    loss = contrastive_loss(
        queries,
        documents,
        query_mask=query_mask,
        document_mask=document_mask,
        positives=positives,
        temperature=arguments.temperature,
    )
    with torch.no_grad():
        scores = maxsim(queries, documents, query_mask=query_mask, document_mask=document_mask)
        assert isinstance(scores, Tensor)
        accuracy = (scores.argmax(1) == positives).float().mean()
    return loss, accuracy


def train(arguments: argparse.Namespace) -> None:
    """The loop: autocast, accumulated micro-batches, GradScaler for FP16, AdamW."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if arguments.ddp else (0, 1)
    torch.manual_seed(arguments.seed)
    generator = random.Random(arguments.seed)  # the same on every process: each takes its slice of one global batch
    translation = generator.sample(range(WORDS), WORDS)

    encoder = Encoder().to(arguments.device)
    model: nn.Module = torch.compile(encoder) if arguments.compile else encoder  # type: ignore[assignment]
    if arguments.ddp:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=arguments.lr)
    scaler = torch.amp.GradScaler("cuda", enabled=arguments.amp == "fp16")

    bar = tqdm(range(1, arguments.steps + 1), desc="train", unit="step", disable=rank != 0)
    for step in bar:
        totals = torch.zeros(2, device=arguments.device)
        for micro in range(arguments.accumulate):
            queries, documents = (
                ids.to(arguments.device) for ids in text_pairs(arguments.batch * world, generator, translation)
            )
            own = slice(rank * arguments.batch, (rank + 1) * arguments.batch)
            # DDP averages gradients over processes in the last micro-batch only.
            waits = arguments.ddp and micro + 1 < arguments.accumulate
            with model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                loss, accuracy = batch_loss(model, queries[own], documents[own], arguments)
                scaler.scale(loss / arguments.accumulate).backward()
            totals += torch.stack([loss.detach(), accuracy]) / arguments.accumulate
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step in (1, arguments.steps) or step % 25 == 0:  # reading a number waits for the GPU: not every step
            if arguments.ddp:
                dist.all_reduce(totals)
            value, accurate = (totals / world).tolist()
            bar.set_postfix(loss=f"{value:.3f}", accuracy=f"{accurate:.2f}")
            if rank == 0:
                tqdm.write(f"step {step}: loss {value:.4f}, in-batch accuracy {accurate:.3f}")


def main() -> None:
    """Set up the processes, train, take them down."""
    arguments = parse_arguments()
    if not arguments.ddp:
        train(arguments)
        return
    on_gpu = torch.device(arguments.device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(arguments)
    # DDP keeps gloo's threads alive until the interpreter ends: one that still releases a tensor then would abort the process.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
