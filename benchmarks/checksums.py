"""What it costs to prove stored values while reading them: in a whole evaluation, a streamed top-k from the cache, reading alone.

    python benchmarks/checksums.py [--gigabytes 2] [--queries 500] [--device auto] [--json FILE] [--seconds 20] [--within 100]
    python benchmarks/checksums.py --ways "stream fp16, stream int8-token"

An entry of random FP16 tokens (d = 128, documents of 180) and its INT8 copy are streamed and read, then a corpus of made-up texts
with HotpotQA's mean length is evaluated. Every way takes turns with and without the checks, from the page cache: a disk is
slower, and hides more. A CUDA device proves its streams itself. Top-k lists and metrics must be the same with and without, or
nothing is written. A way is timed for `--seconds`, three times at least; one that would begin after `--within` is left out.
"""

from __future__ import annotations

import argparse
import functools
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maxsim_eval.api import DEFAULT_PATHS, evaluate
from maxsim_eval.cache.converting import convert_entry
from maxsim_eval.cache.copies import quantised
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.filling import fill_entry
from maxsim_eval.cache.selection import Documents, Selection
from maxsim_eval.data.loading import load_task
from maxsim_eval.environment import resolve_device
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.scoring import score_path
from maxsim_kernels import Packed
from measure.session import kernels
from rehearsal import DIM, TOKENS, make_embeddings, make_texts
from results.file import write

SCHEMA = "maxsim-eval/checksums/3"
LEAST_RUNS = 3
LENGTH, READERS, K = 180, 8, 100  # as many reading threads as an evaluation has
BUDGET = 1 << 30


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


def ways(queries: int, device: str) -> dict[str, Callable[[Entry], Any]]:
    """What is timed, by name: each call gets an entry that is checked, or the same unchecked."""
    tokens = Packed(torch.randn(32 * queries, DIM).half(), torch.arange(0, 32 * queries + 1, 32))

    def searched(path: str, documents: Documents) -> list[list[int]]:
        """The best documents of a stream."""
        names = [str(number) for number in range(queries)]
        asked = Asked(names, range(documents.documents), K, np.full(queries, -1), np.zeros(0, np.int64))  # type: ignore[arg-type]
        copy = quantised(documents, "int8-token") if path == "int8" else None
        copies = {} if copy is None else {path: copy}
        corpus = Corpus(documents, quiet=True, device=device, memory_budget=BUDGET, readers=READERS, copies=copies)
        found = score_path(path, tokens, corpus, asked)
        assert found is not None
        return found.indices.tolist()

    return {
        "stream fp16": lambda entry: searched("fp16", entry),
        "stream int8-token": lambda entry: searched("int8", entry),
        "every seventh document": lambda entry: searched("fp16", Selection(entry, np.arange(0, entry.documents, 7))),
        "read": read_all,
    }


def evaluations(folder: Path, size: float, queries: int, device: str) -> dict[str, Callable[[bool], Any]]:
    """Evaluations of a corpus of about that many bytes, streamed; each gives its metrics."""
    make_texts(folder / "data" / "beir" / "hotpotqa", max(200, int(size / TOKENS / DIM / 2)), queries)
    make_embeddings(folder / "data", folder / "cache", device)
    task = load_task("beir", "hotpotqa", data_dir=folder / "data", quiet=True)

    def run(paths: tuple[str, ...], verify: bool) -> Any:
        result = evaluate(
            task, "colbertv2", paths, cache_dir=folder / "cache", device=device, memory_budget=BUDGET, verify=verify, quiet=True
        )
        return {name: path.metrics for name, path in result.paths.items()}

    return {"evaluate, " + ", ".join(paths): functools.partial(run, paths) for paths in (("fp16",), tuple(DEFAULT_PATHS))}


def in_turns(call: Callable[[bool], Any], name: str, seconds: float) -> dict[str, list[float]]:
    """Seconds with and without the checks; ends the program where the answers differ."""
    if call(True) != call(False):
        raise SystemExit(f"{name}: another answer without the checks; nothing written")
    found: dict[str, list[float]] = {"checked": [], "unchecked": []}
    ending = time.perf_counter() + seconds
    while len(found["checked"]) < LEAST_RUNS or time.perf_counter() < ending:
        for kind, times in found.items():
            began = time.perf_counter()
            call(kind == "checked")
            times.append(time.perf_counter() - began)
    return found


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--seconds", type=float, default=20, help="that every way is timed, three rounds at least (default 20)")
    parser.add_argument("--within", type=float, default=math.inf, help="seconds after which no further way is begun")
    parser.add_argument("--ways", default="", help="comma-separated; default all, the evaluations too")
    parser.add_argument("--folder", type=Path, help="where the entry is written (and removed)")
    options = parser.parse_args(arguments)
    device, ending = resolve_device(options.device), time.perf_counter() + options.within
    size = options.gigabytes * 1e9
    here = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads(), "bytes": int(size), **kernels()}
    if device != "cpu":
        here["device"] = torch.cuda.get_device_name(device)
    seconds: dict[str, dict[str, list[float]]] = {}

    def measured(name: str, call: Callable[[bool], Any]) -> None:
        left = ending - time.perf_counter()
        if left <= 0:
            print(f"{name:28} left out: --within {options.within:g} is over", flush=True)
            return
        found = seconds[name] = in_turns(call, name, min(options.seconds, left))
        with_, without = (statistics.median(found[kind]) for kind in ("checked", "unchecked"))
        print(f"{name:28} {with_:8.3f} s, {without:8.3f} unchecked: {with_ / without - 1:+.1%}", flush=True)
        write(options.json, {"schema": SCHEMA, **here, "queries": options.queries, "seconds": seconds})

    chosen, there = [name.strip() for name in options.ways.split(",") if name.strip()], ways(options.queries, device)
    if unknown := [name for name in chosen if name not in there]:
        parser.error(f"--ways: got {', '.join(unknown)}, need some of {', '.join(there)}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checked = filled(Path(folder) / "entry", size)  # short calls first: three evaluations by all paths take a minute
        entries = {True: checked, False: checked.unchecked()}
        for name, way in there.items():
            if chosen and name not in chosen:
                continue
            if "int8" in name:
                convert_entry(checked, "int8-token", quiet=True)
            measured(name, lambda verify, way=way: way(entries[verify]))  # type: ignore[misc]
        shutil.rmtree(Path(folder) / "entry")
        if chosen:
            return
        began = time.perf_counter()
        ready = evaluations(Path(folder), size, options.queries, device)
        print(f"texts and embeddings made in {time.perf_counter() - began:.1f} s", flush=True)
        for name, call in ready.items():
            measured(name, call)


if __name__ == "__main__":
    sys.exit(main())
