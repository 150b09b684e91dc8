"""The same corpus over several GPUs of one host: every process streams its own share, keys are merged exactly on the first.

    torchrun --nproc-per-node 2 benchmarks/streaming.py --ranks [--json FILE]

Documents are split in contiguous runs of about as many tokens. Before that the first process streams everything alone on its GPU,
in the same run, while the others wait: that is what the shares are compared with, in time and bit for bit. The wall of a shared run
goes from a barrier to the merged results on the first process's host. Every link is measured alone and with all others, since GPUs
of one host may share what leads to its memory. Process groups: NCCL for keys (gloo on CPUs), gloo for waiting, so that no GPU spins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from maxsim_kernels import maxsim
from maxsim_kernels.streaming import device_blocks
from maxsim_kernels.topk import TopK, merge_topk, of_keys
from measure.work import summary
from out_of_core.cases import Lines, hotpotqa_problem, line, warm
from out_of_core.corpora import Corpus, hotpot, pieces, questions, ranges
from out_of_core.link_rates import Link
from out_of_core.measure import Bench, differs


class World:
    """The processes of this run."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ["LOCAL_RANK"])
        cuda = torch.cuda.is_available()
        if cuda and local >= torch.cuda.device_count():
            raise SystemExit(f"process {local} of this host: torch sees {torch.cuda.device_count()} GPUs, need one a process")
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if cuda else "gloo", device_id=self.device if cuda else None)
        self._waiting = dist.new_group(backend="gloo")

    def barrier(self) -> None:
        """Wait for all, GPUs included."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(self._waiting)

    def everybody(self, mine: Any) -> list[Any]:
        """What every process says, in order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, self._waiting)
        return found

    def keys(self, mine: Tensor) -> list[Tensor]:
        """`[Nq, k]` keys of every process."""
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine)
        return found

    def close(self) -> None:
        """Wait for all, and end the process group."""
        self.barrier()
        dist.destroy_process_group()


def shared(bench: Bench, world: World, share: Corpus, first: int, queries: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Stream a share and merge: scores and indices on the host (every process could have them; only the first's are used)."""
    best = TopK(len(queries), bench.sizes.k, bench.device, first=first)
    parts = pieces(values, share.offsets, bench.sizes.block)
    with closing(device_blocks(parts, bench.device, queries=len(queries))) as documents:
        for block in documents:
            scores = maxsim(queries, block)
            assert isinstance(scores, Tensor)
            best.add(scores)
    scores, indices = of_keys(merge_topk(world.keys(best.pending)))
    return scores.cpu(), indices.cpu()


def ranks(bench: Bench, world: World) -> Lines:
    """Links alone and together; the corpus on one GPU, then on all, with all queries and with few."""
    sizes, corpus = bench.sizes, hotpot(bench.sizes)
    bench.held["hotpotqa"] = corpus
    start, stop = ranges(corpus.offsets, world.size)[world.rank]
    share = corpus.part(start, stop)
    if world.rank:  # the first needs room for everything, to be the one GPU of this run
        bench.arena_bytes = share.tokens * share.row_bytes
    values = bench.arena.hold(corpus if world.rank == 0 else share)[: share.tokens]
    link = Link(bench, values, sizes.block)
    link.events()
    yield "links", links(bench, world, link)
    for count in (sizes.queries, sizes.few):
        queries = questions(corpus, count, sizes.query_tokens, sizes.judged, bench.device)
        warm(bench, queries, pieces(values, share.offsets, sizes.block // 4))
        world.barrier()
        alone, answer = one(bench, corpus, count) if world.rank == 0 else ({}, None)
        world.barrier()
        yield f"{count} queries, one GPU", alone

        def call(queries: Tensor = queries) -> tuple[Tensor, Tensor]:
            return shared(bench, world, share, start, queries, values)

        together = turns(bench, world, call, answer)
        if world.rank == 0 and "median_s" in together and "median_s" in alone:
            together["times_faster"] = alone["median_s"] / together["median_s"]
        yield f"{count} queries, {world.size} GPUs", {"shares": world.everybody(share.tokens)} | together


def one(bench: Bench, corpus: Corpus, count: int) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
    """The whole corpus on the first GPU by the operator, and the answer."""
    held = hotpotqa_problem(bench, count)
    values = bench.arena.hold(corpus)
    link = Link(bench, values, bench.sizes.block)
    found = line(bench, held, corpus.documents, lambda: pieces(values, corpus.offsets, bench.sizes.block), link)
    return found, held.known.answers[corpus.documents]


def turns(
    bench: Bench, world: World, call: Callable[[], tuple[Tensor, Tensor]], answer: tuple[Tensor, Tensor] | None
) -> dict[str, Any]:
    """Walls of the first process, from a barrier to merged results; every result checked there."""
    samples, own, wrong = [], [], ""
    for _ in range(bench.runs + 1):
        world.barrier()
        begin = time.perf_counter()
        found = call()
        samples.append(time.perf_counter() - begin)
        own.append(world.everybody(samples[-1]))
        wrong = wrong or ("" if answer is None else differs(found, answer))
    if wrong:
        return {"wrong": wrong}
    return {**summary(samples[1:], "s"), "samples_s": samples[1:], "first_s": samples[0], "ranks_s": own[1:]}


def links(bench: Bench, world: World, link: Link) -> dict[str, Any]:
    """GB/s of every process's pinned copies, one process at a time and all at once."""
    size = bench.sizes.read
    alone = []
    for rank in range(world.size):
        world.barrier()
        if rank == world.rank:
            alone = [link.events(size) for _ in range(bench.runs)]
    together = []
    for _ in range(bench.runs):
        world.barrier()
        together.append(link.events(size))
    found = {}
    for name, samples in (("alone", alone), ("together", together)):
        times = world.everybody(summary(samples, "s")["median_s"])
        found[f"{name}_GB_s"] = [size / seconds / 1e9 for seconds in times]
    return found
