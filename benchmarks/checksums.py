"""What proving stored values while they are read costs: reading alone, and a streamed top-k from the cache, with and without it.

    python benchmarks/checksums.py [--gigabytes 2] [--device auto] [--json FILE] [--runs 7] [--folder DIR]

A cache entry of random FP16 tokens (d = 128, documents of 180) and its INT8 copy are written once; then the ways take turns, from the
page cache. Top-k lists with and without must be the same, or nothing is written.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from maxsim_eval.cache.converting import convert_entry
from maxsim_eval.cache.copies import Quantised
from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.filling import fill_entry
from maxsim_eval.cache.selection import Selection
from maxsim_eval.environment import resolve_device
from maxsim_kernels import Packed
from maxsim_kernels.streaming import stream_topk
from results.file import write

SCHEMA = "maxsim-eval/checksums/1"
DIM, LENGTH, READERS, K = 128, 180, 4, 100


def filled(folder: Path, size: float) -> Entry:
    """An entry of about that many bytes: the same block of random tokens, again and again."""
    documents = max(1, int(size / DIM / 2 / LENGTH))
    tokens = torch.randn(4096 * LENGTH, DIM, generator=torch.Generator().manual_seed(0)).half()

    def encode(start: int, stop: int) -> Packed:
        count = (stop - start) * LENGTH
        values = tokens.repeat(-(-count // len(tokens)), 1)[:count]
        return Packed(values, torch.arange(0, count + 1, LENGTH))

    ids = [f"{number}" for number in range(documents)]
    return fill_entry(folder, key="key", ids=ids, dim=DIM, dtype=torch.float16, provenance={}, encode=encode, quiet=True)


def read_all(entry: Entry) -> None:
    """Read everything by threads, each into a buffer of its own."""

    def one(reader: int) -> None:
        buffer = torch.empty(16 << 20, dtype=torch.float16)
        for shard in entry.shards[reader::READERS]:
            step = len(buffer) // DIM
            for first in range(0, shard.tokens, step):
                count = min(step, shard.tokens - first)
                shard.read(first, buffer[: count * DIM].view(count, DIM))

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(one, range(READERS)))


def searched(blocks: Iterable[Any], queries: Packed) -> torch.Tensor:
    """The best documents of a stream."""
    return stream_topk(queries, blocks, K, readers=READERS)[1].cpu()


def ways(entry: Entry, copy: Quantised, queries: int, device: str) -> dict[str, Callable[[Entry], Any]]:
    """What is timed, of an entry that is checked or not."""
    asked = Packed(torch.randn(32 * queries, DIM).half().to(device), torch.arange(0, 32 * queries + 1, 32).to(device))

    def copied(entry: Entry) -> Any:
        shards = tuple(replace(shard, shard=of) for shard, of in zip(copy.shards, entry.shards, strict=True))
        return searched(Quantised(entry, copy.kind, shards).blocks(readers=READERS), asked)

    some = torch.arange(0, entry.documents, 7).numpy()
    return {
        "read": read_all,
        "stream fp16": lambda entry: searched(entry.lazy_blocks(1 << 30), asked),
        "stream int8-token": copied,
        "every seventh document": lambda entry: searched(Selection(entry, some).lazy_blocks(1 << 30), asked),
    }


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the entry is written (and removed)")
    options = parser.parse_args(arguments)
    device = resolve_device(options.device)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checked = filled(Path(folder) / "entry", options.gigabytes * 1e9)
        copy = convert_entry(checked, "int8-token", quiet=True).copy
        entries = {"checked": checked, "unchecked": checked.unchecked()}
        seconds: dict[str, dict[str, list[float]]] = {}
        for name, way in ways(checked, copy, options.queries, device).items():
            answers = [way(entry) for entry in entries.values()]
            if answers[0] is not None and not torch.equal(*answers):
                raise SystemExit(f"{name}: other documents without the checks; nothing written")
            seconds[name] = {kind: [] for kind in entries}
            for _ in range(options.runs):
                for kind, entry in entries.items():
                    began = time.perf_counter()
                    way(entry)
                    seconds[name][kind].append(time.perf_counter() - began)
        size = sum(shard.stamp.size for shard in checked.shards)
    here = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads(), "bytes": size}
    if device != "cpu":
        here["device"] = torch.cuda.get_device_name(device)
    write(options.json, {"schema": SCHEMA, **here, "queries": options.queries, "seconds": seconds})
    for name, found in seconds.items():
        with_, without = (statistics.median(found[kind]) for kind in entries)
        print(f"{name:24} {size / with_ / 1e9:7.2f} GB/s, {size / without / 1e9:7.2f} unchecked: {with_ / without - 1:+.1%}")


if __name__ == "__main__":
    sys.exit(main())
