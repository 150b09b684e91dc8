"""Run under TRITON_INTERPRET=1 in a process of its own (the variable counts before Triton is first imported).

    TRITON_INTERPRET=1 python interpreted_proving.py GROUP

CRC-32s as a GPU makes them, of ranges of any length anywhere, and streams that are proven by these; on CPU tensors.
"""

from __future__ import annotations

import sys
import tempfile
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import quick_interpreter  # noqa: F401 - kernels run under it
import torch

from maxsim_eval.cache import corpus as corpora
from maxsim_eval.cache import stripes
from maxsim_eval.crc import device_ranges
from maxsim_eval.scoring import stream
from proving_cases import DAMAGES, refused, same, scored, stored

CPU = torch.device("cpu")
CHECKED: list[str] = []


def ranges() -> None:
    """Every start and end within a word, rows and groups of rows cut anywhere, several programs, nothing at all."""
    device_ranges.ROWS = 64
    rng = np.random.default_rng(0)
    row = 4 * device_ranges.LANES
    data = torch.from_numpy(rng.integers(0, 256, 150 * row + 5, dtype=np.uint8))
    base, held = data.data_ptr(), data.numpy().tobytes()
    cuts = [(first, first + size) for first in range(4) for size in (0, 1, 2, 3, 6)]
    cuts += [(row + first, edge * row + last) for edge in (2, 32, 33) for first, last in ((0, 0), (3, 1), (1, 2))]
    cuts += [(0, 64 * row), (7, 71 * row + 7), (2, len(held))]
    cuts += [(first, first + int(rng.integers(0, len(held) - first + 1))) for first in rng.integers(0, len(held), 3).tolist()]
    words = device_ranges.remainders([(base + first, base + last) for first, last in cuts], CPU).numpy()
    for (first, last), word in zip(cuts, words, strict=True):
        assert device_ranges.crc_of(word, base + first, base + last) == zlib.crc32(held[first:last]), (first, last)
        CHECKED.append("range")


def streams() -> None:
    """Blocks and units cut claims anywhere; what is damaged is refused, and nothing after it kept."""
    folder = Path(tempfile.mkdtemp())
    for module, name, value in (
        (stripes, "BYTES", 320),
        (stripes, "_ROWS", 1),
        (stripes, "_SMALL_BYTES", 0),
        (corpora, "BLOCK_BYTES", 1500),
    ):
        setattr(module, name, value)
    entry = stored(folder / "entry", 40, 17, 15)  # rows of no whole words
    units = [(0, 9), (9, 30), (30, 40)]
    plain = {name: scored(entry, name, "cpu", units) for name in ("fp16", "int8", "int8-document", "fp32")}
    with (
        mock.patch.object(stream, "can_prove", return_value=True),
        mock.patch.object(device_ranges, "remainders", wraps=device_ranges.remainders) as launched,
    ):
        for name, expected in plain.items():
            same(scored(entry, name, "cpu", units), expected)
            assert launched.call_count > len(units), name
            launched.reset_mock()
            scored(entry.unchecked(), name, "cpu", units)
            assert not launched.called
            CHECKED.append(name)
        for number, damage in enumerate(DAMAGES):
            refused(folder / "entry", damage, "cpu", units, folder / f"records {number}")
            CHECKED.append("damage")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"ranges": ranges, "streams": streams}[sys.argv[1]]()
    sys.stdout.write(f"{len(CHECKED)} checked\n")
