"""Run under TRITON_INTERPRET=1 in a process of its own (the variable counts before Triton is first imported).

    TRITON_INTERPRET=1 python interpreted_rows.py rows

What a GPU says that rows add, of rows of any width and number; on CPU tensors.
"""

from __future__ import annotations

import sys

import numpy as np
import quick_interpreter  # noqa: F401 - kernels run under it
import torch

from crc_cases import sums_of
from maxsim_eval.crc import device_rows

CHECKED: list[str] = []


def rows() -> None:
    """Widths below, at and beyond a program's lanes; rows below, at and beyond a program's, and beyond those of one power."""
    rng = np.random.default_rng(0)
    for count, width, dtype in (
        (1, 2, torch.float16),
        (31, 6, torch.bfloat16),
        (33, 1, torch.float32),
        (64, 64, torch.float16),
        (40, 66, torch.float16),
        (5, 130, torch.float32),
        (1100, 2, torch.float16),
        (2, 768, torch.float16),
    ):
        data = rng.integers(0, 256, count * width * dtype.itemsize, dtype=np.uint8)
        values = torch.from_numpy(data).view(dtype).view(count, width)
        found = device_rows.row_sums(values)
        assert found is not None
        assert found.numpy().view(np.uint32).tolist() == sums_of(values).tolist(), (count, width, dtype)
        CHECKED.append("rows")
    assert device_rows.row_sums(torch.zeros(3, 3, dtype=torch.float16)) is None  # six bytes are no whole words
    assert device_rows.row_sums(torch.empty(device_rows.NEAR * device_rows.FAR + 1, 2, dtype=torch.float16)) is None
    CHECKED.append("refused")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"rows": rows}[sys.argv[1]]()
    sys.stdout.write(f"{len(CHECKED)} checked\n")
