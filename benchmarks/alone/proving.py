"""How long a GPU takes to prove a block (CRC-32s by `maxsim_eval/crc/`), beside scoring it, and to sum the rows that it encodes.

    python benchmarks/alone/proving.py --json FILE [--runs 30]

Blocks as streams have them: 128 MiB of FP16 tokens and 16 MiB of INT8 codes (d = 128, documents of 180), and 500 queries of 32 tokens.
A window is what an encoder hands over at a time. CRCs must be zlib's, or nothing is written. Several numbers of rows a program (256 is
what is shipped) take turns with the scores.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from maxsim_eval.cache.stripes import add_crcs
from maxsim_eval.crc import device_ranges, device_rows
from maxsim_eval.crc.summed import Summed
from maxsim_kernels import Packed, maxsim, quantize_int8
from measure.session import kernels
from measure.timing import Flush, measure
from results.file import write

SCHEMA = "maxsim-eval/proving/1"
DIM, LENGTH, QUERIES, QUERY_TOKENS = 128, 180, 500, 32
ROWS = (128, 256, 512, 1024)
BLOCKS = {"fp16": 128 << 20, "int8": 16 << 20}
WINDOW = {"d = 768": (229_376, 768), "d = 128": (229_376, 128)}  # tokens of a thousand texts


def block(name: str) -> tuple[Any, Tensor]:
    """Documents of about that many bytes, and their values."""
    documents = BLOCKS[name] // (DIM * LENGTH * (2 if name == "fp16" else 1))
    values = torch.randn(documents * LENGTH, DIM, device="cuda").half()
    tokens = Packed(values, torch.arange(0, len(values) + 1, LENGTH, device="cuda"))
    if name == "fp16":
        return tokens, values
    codes = quantize_int8(tokens)
    return codes, codes.token_values


def prover(values: Tensor, rows: int) -> Callable[[], Tensor]:
    """A call that launches the proof of a block, all that it takes at hand; the CRC is compared with zlib's first."""
    device_ranges.ROWS = rows
    device_ranges._powers.cache_clear()
    start, size = values.data_ptr(), values.numel() * values.element_size()
    (words,) = device_ranges.remainders([(start, start + size)], values.device).cpu().numpy()
    if device_ranges.crc_of(words, start, start + size) != zlib.crc32(values.cpu().view(torch.uint8).numpy()):
        raise SystemExit(f"{rows} rows: another CRC-32 than zlib's; nothing written")
    chunks = size // (4 * device_ranges.LANES * rows) + 1
    powers = device_ranges._powers(values.device, 1 << (chunks - 1).bit_length(), 0)
    addresses = [start, start + size] * device_ranges.RANGES
    parts = torch.empty(1, chunks, dtype=torch.int32, device=values.device)

    def prove() -> Tensor:
        device_ranges.ROWS = rows
        device_ranges._launch(values.device, chunks, parts, powers, chunks, *addresses)
        return parts

    return prove


def window(shape: tuple[int, int]) -> Tensor:
    """Tokens of a window; the CRC-32s that their row sums give are compared with zlib's first."""
    values = torch.randn(shape, device="cuda").half()
    sums, held = device_rows.row_sums(values), values.cpu()
    assert sums is not None
    found, read = (np.zeros(-(-len(held) // 128), np.uint32) for _ in range(2))
    Summed(held, torch.tensor([0, len(held)]), sums.cpu().numpy().view(np.uint32)).enter(found, 0, 128)
    add_crcs(read, held.view(-1).view(torch.uint8).numpy().reshape(len(held), -1), 0, 128)
    if not np.array_equal(found, read):
        raise SystemExit(f"{shape}: other CRC-32s than zlib's; nothing written")
    return values


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="write the raw figures here")
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args(arguments)
    queries = torch.randn(QUERIES, QUERY_TOKENS, DIM, device="cuda").half()
    rows: dict[str, Any] = {}
    for name in BLOCKS:
        documents, values = block(name)
        calls: dict[str, Any] = {"scores": lambda documents=documents: maxsim(queries, documents)}
        calls |= {f"proof, {count} rows": prover(values, count) for count in ROWS}
        size = values.numel() * values.element_size()
        found = rows[name] = {"bytes": size, "ms": measure(calls, options.runs, Flush())}
        for called, times in found["ms"].items():
            print(f"{name:5} {called:18} {times['median_ms']:8.4f} ms, {size / times['median_ms'] / 1e9:6.2f} TB/s", flush=True)
    for name, shape in WINDOW.items():
        values = window(shape)
        found = rows[name] = {
            "bytes": values.nbytes,
            "ms": measure({"sums": lambda values=values: device_rows.row_sums(values)}, options.runs, Flush()),
        }
        print(f"{name:7} sums {found['ms']['sums']['median_ms']:8.4f} ms", flush=True)
    device = torch.cuda.get_device_name()
    write(options.json, {"schema": SCHEMA, "torch": torch.__version__, "device": device, **kernels(), "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
