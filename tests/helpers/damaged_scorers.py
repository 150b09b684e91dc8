"""Scorers with one defect each, seen in real code, and a sound one: `(queries, documents) -> [Nq, N]` (docs/scorers.md).

The tests of the gate put them in the place of a path, or copy this file beside a collection and name them as a user would, `python:<module>:<function>`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maxsim_kernels import Packed


def maxima(queries: Packed, documents: Packed, row: int) -> Tensor:
    """`[query tokens, N]` float32: the best similarity of each token of one query in every document, -inf in an empty one."""
    similar = queries[row].float() @ documents.values.float().T
    owner = torch.repeat_interleave(torch.arange(len(documents)), documents.lengths)
    start = torch.full((len(similar), len(documents)), -torch.inf)
    return start.scatter_reduce(1, owner.expand(len(similar), -1), similar, "amax")


def sound(queries: Packed, documents: Packed) -> Tensor:
    """MaxSim as it should be."""
    return torch.stack([maxima(queries, documents, row).double().sum(0) for row in range(len(queries))]).float()


def bf16_sums(queries: Packed, documents: Packed) -> Tensor:
    """Accumulates in BF16: inputs, similarities and the running sum are rounded to it."""
    queries, documents = queries.to(torch.bfloat16), documents.to(torch.bfloat16)
    scores = []
    for row in range(len(queries)):
        running = torch.zeros(len(documents), dtype=torch.bfloat16)
        for best in maxima(queries, documents, row).to(torch.bfloat16):
            running = running + best
        scores.append(running.float())
    return torch.stack(scores)


def zero_padding(queries: Packed, documents: Packed) -> Tensor:
    """Pads documents to the longest with zero tokens and forgets the mask: where every similarity is negative, 0 wins."""
    padded = (documents.lengths < documents.lengths.max()) & (documents.lengths > 0)
    scores = []
    for row in range(len(queries)):
        best = maxima(queries, documents, row)
        scores.append(torch.where(padded, best.clamp(min=0), best).double().sum(0))
    return torch.stack(scores).float()


def shuffled_ids(queries: Packed, documents: Packed) -> Tensor:
    """Sound scores under the ids of other documents that have tokens: one with tokens that scores -inf is refused before any gate."""
    scores = sound(queries, documents)
    (held,) = (documents.lengths > 0).nonzero(as_tuple=True)
    scores[:, held] = scores[:, held[torch.randperm(len(held), generator=torch.Generator().manual_seed(0))]]
    return scores
