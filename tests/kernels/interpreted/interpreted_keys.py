"""Run under TRITON_INTERPRET=1 in a process of its own (the variable counts before Triton is first imported).

    TRITON_INTERPRET=1 python interpreted_keys.py keys

Keys of a running top-k by the kernels, bit for bit those of torch's operators.
"""

from __future__ import annotations

import sys

import numpy as np
import quick_interpreter  # noqa: F401 - kernels run under it
import torch

from maxsim_kernels import topk
from maxsim_kernels.gpu import keys as kernels

CHECKED: list[tuple[int, ...]] = []
ODD = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3.4e38, -1e-45)


def scores(queries: int, count: int, draw: np.random.Generator) -> torch.Tensor:
    """Some that are equal, and every number that is not like the others."""
    found = torch.from_numpy(draw.integers(-9, 10, (queries, count)) / 7).float()
    for odd in ODD:
        found[torch.from_numpy(draw.random((queries, count)) < 0.04)] = odd
    return found


def check_keys() -> None:
    """Odd sizes, rows that lie apart, columns that do, first documents beyond 32 bits."""
    draw = np.random.default_rng(0)
    for queries, count, k, first in (
        (1, 1, 1, 0),
        (3, 7, 9, 5),
        (2, 100, 3, 1 << 31),
        (3, 1000, 10, (1 << 32) - 1000),
        (2, 1031, 1, 0),
    ):
        here = scores(queries, count, draw)
        held = topk.keys_of(scores(queries, k, draw), 0)
        size = topk.group_size(count, k)
        expected = topk._candidates(here, first, k, held).sort(1).values
        apart = torch.full((queries, count + 3), 77.0)
        apart[:, :count] = here
        turned = here.t().contiguous().t()
        for given in (here, apart[:, :count], turned):
            found = kernels.candidates(given, first, k, size, held)
            assert torch.equal(found.sort(1).values, expected), (queries, count, k, first)
        for one in (expected, expected.t(), expected[:, -1], expected[:, :0], topk.TopK(queries, k).pending):
            for found, need in zip(kernels.of_keys(one), topk.of_keys(one), strict=True):
                assert found.dtype == need.dtype
                assert torch.equal(found.nan_to_num(5e5), need.nan_to_num(5e5)), (queries, count, k)
        CHECKED.append((queries, count, k, first))


if __name__ == "__main__":
    {"keys": check_keys}[sys.argv[1]]()
    sys.stdout.write(f"{len(CHECKED)} checked\n")
