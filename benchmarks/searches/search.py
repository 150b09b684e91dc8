"""`exact_topk` on a GPU against brute force in one run: bits and certificate first, then medians.

    python benchmarks/searches/search.py [--json FILE] [--rows resident,colpali,outofcore] [--seconds 150]
    python benchmarks/searches/search.py --rows nq --json FILE                             # on a host with 200 GB of memory

`resident` and `colpali`: documents and codes on the GPU, L2 flushed, the host's work between launches counted. `outofcore`: 16 GiB of
FP16 in pinned host memory (and 8 GiB of codes), wall time. `nq`: the same with NQ's volume, 116 GB and 58.
Beside ColPali: flash-maxsim's own two stages (INT8, then FP16 of some), which have no certificate, and what they miss. A row is
written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from maxsim_kernels import Int8Tokens, Packed, quantize_int8, stream_topk
from maxsim_kernels.search import Residuals, ahead, exact_topk, residuals_of
from measure import installed
from measure.names import FLASH
from measure.session import about
from measure.timing import Flush
from results.file import write

SCHEMA = "maxsim-kernels/search/1"
D = 128
KEPT = (100, 10)
STREAMED = {"outofcore": (1 << 19, 128, (16, 32)), "nq": (2_680_000, 169, (32,))}  # documents, their tokens, queries' tokens
STREAMED_PART = 1 << 14
RUNS = 15
WALL_RUNS = 3


class Rows:
    """What was measured so far, written after every row."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self.path, self.ending, self.flush = path, time.perf_counter() + seconds, Flush()
        self.report: dict[str, Any] = {"schema": SCHEMA, **about(), "rows": []}

    def keep(self, row: dict[str, Any]) -> None:
        """Add a row, and write the file."""
        self.report["rows"].append(row)
        write(self.path, self.report)
        print(row, flush=True)

    def medians(self, *calls: Callable[[], Any]) -> list[float]:
        """Milliseconds between events, of each call; they take turns, so that a clock that falls slows all of them."""
        found: list[list[float]] = [[] for _ in calls]
        for number in range(RUNS + 2):
            for call, taken in zip(calls, found, strict=True):
                self.flush()
                torch.cuda.synchronize()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize()
                if number > 1:
                    taken.append(begin.elapsed_time(end))
        return [statistics.median(taken) for taken in found]


class Corpus:
    """Clustered tokens: a vocabulary of centres, topics that use some of them, documents of a topic."""

    def __init__(self, seed: int, topics: int = 512) -> None:
        self.draw = torch.Generator("cuda").manual_seed(seed)
        self.centres = torch.nn.functional.normalize(torch.randn(4096, D, generator=self.draw, device="cuda"), dim=1)
        self.topics = torch.randint(0, 4096, (topics, 48), generator=self.draw, device="cuda")

    def documents(self, count: int, length: int, noise: float = 0.6) -> Tensor:
        """`[count, length, D]` FP16 of norm 1."""
        topic = torch.randint(0, len(self.topics), (count, 1), generator=self.draw, device="cuda")
        slot = torch.randint(0, 48, (count, length), generator=self.draw, device="cuda")
        centre = self.topics[topic, slot]
        other = torch.randint(0, 4096, (count, length), generator=self.draw, device="cuda")
        stray = torch.rand(count, length, generator=self.draw, device="cuda") < 0.3
        tokens = self.centres[torch.where(stray, other, centre)]
        tokens = tokens + noise * torch.randn(tokens.shape, generator=self.draw, device="cuda") / D**0.5
        return torch.nn.functional.normalize(tokens, dim=2).half()

    def queries(self, documents: Tensor, count: int, length: int) -> Tensor:
        """Tokens of documents, and noise."""
        of = torch.randint(0, len(documents), (count, 1), generator=self.draw, device="cuda")
        token = torch.randint(0, documents.shape[1], (count, length), generator=self.draw, device="cuda")
        chosen = documents[of, token].float()
        chosen = chosen + 0.4 * torch.randn(chosen.shape, generator=self.draw, device="cuda") / D**0.5
        return torch.nn.functional.normalize(chosen, dim=2).half()


def packed(dense: Tensor) -> Packed:
    return Packed(dense.view(-1, D), torch.arange(0, dense.shape[0] * dense.shape[1] + 1, dense.shape[1], device=dense.device))


def proven(found: Any, expected: tuple[Tensor, Tensor]) -> bool:
    """Whether a search gave brute force's bits, and its certificate holds."""
    bits = torch.equal(found[0].view(torch.int32), expected[0].view(torch.int32)) and torch.equal(found[1], expected[1])
    return bits and bool(found[2].certificate.holds)


def facts(stats: Any) -> dict[str, Any]:
    survivors = stats.survivors.double()
    few = {"survivors_mean": float(survivors.mean()), "survivors_most": int(survivors.max())}
    return {**few, "rescored_bytes": stats.rescored_bytes, "fell_back": stats.fell_back}


def resident_rows(rows: Rows, name: str, queries: Tensor, documents: Packed, codes: Int8Tokens) -> None:
    """Brute force, a search, and the first search of a corpus, of which nobody knows yet whether bounds prune it."""
    residuals = residuals_of(documents, codes)
    for k in KEPT:
        expected = stream_topk(queries, [documents], k)

        def search(k: int = k) -> Any:
            return exact_topk(queries, documents, k, codes=codes, residuals=residuals)

        def first(search: Callable[[], Any] = search) -> Any:
            ahead.pruned_before.clear()
            return search()

        if not (proven(search(), expected) and proven(search(), expected)):
            raise SystemExit(f"{name}, k = {k}: not brute force's answer; nothing written")
        ways: list[Callable[[], Any]] = [search, lambda k=k: stream_topk(queries, [documents], k)]  # type: ignore[misc]
        if bool((documents.lengths == documents.lengths[0]).all()):  # then a dense tensor is brute force's faster way
            dense = documents.values.view(len(documents), -1, D)
            ways.append(lambda k=k, dense=dense: stream_topk(queries, [dense], k))  # type: ignore[misc]
        later, brute, *even = rows.medians(*ways)
        (begun,) = rows.medians(first)
        ratios = {"times_brute": brute / later, "times_brute_first": brute / begun}
        times = {"brute_ms": brute, "exact_ms": later, "first_search_ms": begun, **ratios}
        if even:
            times["brute_dense_ms"] = even[0]
        rows.keep({"row": name, "k": k, "bit_equal": True, "documents": len(documents), **times, **facts(search()[2])})


def resident(rows: Rows) -> None:
    """256 queries, 8192 documents: of 128 tokens, clustered as real ones and random, and clustered ones of 16 to 240."""
    made = Corpus(1)
    clustered, random = made.documents(8192, 128), torch.randn(8192, 128, D, device="cuda")
    asked = made.queries(clustered, 256, 32)
    anything = torch.randn(asked.shape, device="cuda")
    long = made.documents(8192, 240)
    lengths = torch.randint(16, 241, (len(long),), generator=made.draw, device="cuda")
    there = torch.arange(long.shape[1], device="cuda") < lengths[:, None]
    unit = torch.nn.functional.normalize
    for kind, queries, documents in (
        ("clustered, 256 q x 32, 8192 x 128", asked, packed(clustered)),
        ("random, 256 q x 32, 8192 x 128", unit(anything, dim=2).half(), packed(unit(random, dim=2).half())),
        ("clustered, 256 q x 32, 8192 x 16 to 240", made.queries(long[:, :16], 256, 32),
         Packed(long[there], torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))),
    ):  # fmt: skip
        resident_rows(rows, f"resident {kind}", queries, documents, quantize_int8(documents, "document"))


def colpali(rows: Rows) -> None:
    """One query of 1024 tokens, 10,000 pages of 1024."""
    made = Corpus(2)
    dense = torch.cat([made.documents(1000, 1024) for _ in range(10)])
    queries, documents = made.queries(dense, 1, 1024), packed(dense)
    parts = [quantize_int8(packed(dense[n : n + 1000]), "document") for n in range(0, len(dense), 1000)]
    values = torch.cat([one.codes.values for one in parts])  # type: ignore[union-attr]
    codes = Int8Tokens(documents.with_values(values), torch.cat([one.scales for one in parts]), granularity="document")
    resident_rows(rows, "ColPali, 1 q x 1024, 10000 x 1024", queries, documents, codes)
    peer = installed.load(FLASH)
    if isinstance(peer, str):
        print(f"flash-maxsim: {peer}", flush=True)
        return
    theirs = [peer.quantize_int8(dense[n : n + 1000]) for n in range(0, len(dense), 1000)]
    stored = dict(zip(("D_int8", "scales", "mins"), (torch.cat(one) for one in zip(*theirs, strict=True)), strict=True))
    for k in KEPT:
        expected = stream_topk(queries[0], [documents], k)[1]
        found = peer.flash_maxsim_topk(queries[0], dense, k, **stored)[1]
        (took,) = rows.medians(lambda k=k: peer.flash_maxsim_topk(queries[0], dense, k, **stored))  # type: ignore[misc]
        missed = k - int(torch.isin(found, expected).sum())
        rows.keep({"row": "ColPali by flash_maxsim_topk, no certificate", "k": k, "ms": took, "missed": missed})


@contextmanager
def pinned(tokens: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """`[tokens, D]` in pinned memory: touched by all threads before it is pinned, which alone would take a minute for 100 GB."""
    held = torch.zeros(tokens, D, dtype=dtype)
    runtime = torch.cuda.cudart()
    failed = runtime.cudaHostRegister(held.data_ptr(), held.numel() * held.element_size(), 0)
    if int(failed):
        raise SystemExit(f"pinning {held.numel() * held.element_size() >> 30} GiB failed: CUDA error {int(failed)}")
    try:
        yield held
    finally:  # before the memory is given back
        runtime.cudaHostUnregister(held.data_ptr())


def streamed(values: Tensor, count: int, size: int) -> tuple[Corpus, Tensor, Packed, Int8Tokens, Residuals]:
    """Make a corpus into `values`, part by part: gives its maker, last part and documents, its codes on the GPU, residuals."""
    made, tokens = Corpus(3), count * size
    codes = torch.empty(tokens, D, dtype=torch.int8, device="cuda")
    scales = torch.empty(count, dtype=torch.float16, device="cuda")
    errors, norms = (torch.empty(count, device="cuda") for _ in range(2))
    for first in range(0, count, STREAMED_PART):
        span = slice(first, min(first + STREAMED_PART, count))
        dense = made.documents(span.stop - first, size)
        block = packed(dense)
        part = quantize_int8(block, "document")
        known = residuals_of(block, part)
        rows = slice(first * size, span.stop * size)
        values[rows].copy_(block.values, non_blocking=True)
        codes[rows], scales[span], errors[span], norms[span] = part.codes.values, part.scales, known.errors, known.norms  # type: ignore[union-attr]
    torch.cuda.synchronize()
    documents = Packed(values, torch.arange(0, tokens + 1, size))
    stored = Int8Tokens(Packed(codes, documents.offsets.cuda()), scales, granularity="document")  # type: ignore[union-attr]
    return made, dense, documents, stored, Residuals(errors, norms)


def wall(call: Callable[[], Any]) -> tuple[float, Any]:
    """Median seconds of a call, and its answer."""
    found = []
    for _ in range(WALL_RUNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        answer = call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found), answer


def out_of_core(rows: Rows, kind: str) -> None:
    """500 queries of 16 and of 32 tokens, k = 100; codes on the GPU, or pinned beside the documents."""
    count, size, lengths = STREAMED[kind]
    with pinned(count * size, torch.float16) as values, pinned(count * size, torch.int8) as held:
        made, dense, documents, stored, residuals = streamed(values, count, size)
        held.copy_(stored.token_values)
        host = Int8Tokens(Packed(held, documents.offsets), stored.scales.cpu(), granularity="document")
        for length in lengths:
            queries = made.queries(dense, 500, length)
            brute, expected = wall(lambda q=queries: stream_topk(q, [documents], 100))  # type: ignore[misc]
            for where, codes in (("device", stored), ("pinned host", host)):
                if time.perf_counter() > rows.ending:
                    return
                name = f"out of core, 500 q x {length}, {count} x {size}, codes on the {where}"
                took, found = wall(lambda q=queries, c=codes: exact_topk(q, documents, 100, codes=c, residuals=residuals))  # type: ignore[misc]
                if not proven(found, expected):
                    raise SystemExit(f"{name}: not brute force's answer; nothing written")
                times = {"brute_s": brute, "exact_s": took, "share_of_brute": took / brute}
                rows.keep({"row": name, "k": 100, "bit_equal": True, **times, **facts(found[2])})


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--rows", default="resident,colpali,outofcore", help="comma-separated, also nq (default: the others)")
    parser.add_argument("--seconds", type=float, default=150, help="begin no row out of core after so many (default 150)")
    options = parser.parse_args(arguments)
    rows = Rows(options.json, options.seconds)
    runs = {"resident": resident, "colpali": colpali, **{kind: partial(out_of_core, kind=kind) for kind in STREAMED}}
    for name, run in runs.items():
        if name in options.rows.split(","):
            run(rows)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
