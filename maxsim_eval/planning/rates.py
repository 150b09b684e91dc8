"""Rates of this machine, each by a short run of the real thing: reading the entry's own shards, copying, the operator itself.

Nothing is changed: files are read at a few places (direct reads do not touch the page cache), and what must be written goes to an
unnamed temporary file that is gone when it is closed. Every measurement is bounded in bytes and time and says how it was done; what
a file system or machine cannot do is None, never a guess.
"""

from __future__ import annotations

import errno
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from maxsim_eval.cache.selection import Documents, Selection
from maxsim_eval.cache.shards import Shard
from maxsim_eval.comparison.parity import spearman
from maxsim_eval.planning.costs import PathRates, Rate, Rates, Sizes, operations
from maxsim_eval.scoring.own_functions import find_paths
from maxsim_kernels import Packed
from maxsim_kernels.topk import TopK

_PAGE = 4096
_CHUNK = 8 << 20  # one sequential read
_READ_BYTES = 512 << 20
_SECONDS = 1.0
_TEMPORARY_BYTES = 128 << 20
_PROBES = 512
_COMPARED = 200_000  # documents whose two score rows are ranked for the rate of the comparison
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Enough work for a rate that more would not change, and the longest call that is waited for, by kind of device.
_QUERIES = 512
_CALL = {"cpu": 0.1, "cuda": 0.01}
_BLOCK = {"cpu": 32 << 20, "cuda": 256 << 20}


@dataclass(frozen=True)
class Extent:
    """A run of bytes of a file, whole pages."""

    path: str
    start: int
    length: int


def measure(
    sizes: Sizes,
    names: Sequence[str],
    *,
    entry: Documents | None,
    lengths: np.ndarray | None = None,
    folder: Path,
    device: str = "cpu",
    k: int = 100,
    readers: int = 4,
) -> tuple[Rates, float | None]:
    """Rates for an evaluation of these sizes, and the share of the corpus in the page cache now (None: cannot be told).

    Args:
        names: scoring paths; each is run on made-up tokens of the evaluation's own lengths.
        entry: the documents in the cache; None: reading is measured on a temporary file in `folder`.
        lengths: tokens of documents (a sample will do); None: all of the mean length.
        folder: where the cache is, or will be.
        readers: threads that read; on a CPU 2 at most, as in streaming.
    """
    kind = torch.device(device).type
    disk, host, output, resident = _file_rates(entry, folder, readers if kind == "cuda" else min(readers, 2))
    paths, topk = path_rates(sizes, names, lengths, device, k)
    rates = Rates(
        device=kind,
        paths=paths,
        disk=disk,
        host=host,
        memory=memory_rate(),
        link=link_rate(device) if kind == "cuda" else None,
        topk=topk,
        output=output,
        compare=_compare_rate(sizes.documents),
    )
    return rates, resident


def _median(call: Callable[[], Any], runs: int = 5) -> float:
    """Seconds of one call, the median of some."""
    found = []
    for _ in range(runs):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return max(statistics.median(found), 1e-9)


# Reading and writing ----------------------------------------------------------------------------------------------------


def _file_rates(
    entry: Documents | None, folder: Path, readers: int
) -> tuple[Rate | None, Rate | None, Rate | None, float | None]:
    """Rates of disk, page cache and writing, and the share of the entry that is in the page cache."""
    shards = [] if entry is None else [shard for shard in _shards(entry) if shard.tokens]
    plain = [shard for shard in shards if shard.position is not None]
    resident = in_page_cache(extents(shards, _PAGE, _PROBES)) if plain else None
    with _temporary(folder) as (path, output):
        if shards and not plain:
            rate = _hdf5_rate(shards)
            return rate, rate, output, resident
        if plain:
            places = extents(plain, _CHUNK, _READ_BYTES // _CHUNK)
            what = f"the entry's own shards, {readers} threads"
        elif path is not None:
            places = [Extent(path, start, _CHUNK) for start in range(0, os.path.getsize(path) - _CHUNK + 1, _CHUNK)]
            what = f"a temporary file in the cache folder, {readers} threads"
        else:
            return None, None, None, resident
        disk = disk_rate(places, readers, what)
        return disk, page_cache_rate(places, readers, what), output, resident


def _shards(entry: Documents) -> Sequence[Shard]:
    return entry.entry.shards if isinstance(entry, Selection) else entry.shards


def extents(shards: Sequence[Shard], length: int, count: int) -> list[Extent]:
    """At most `count` runs of `length` bytes (whole pages, or what there is), spread evenly over the values of shards."""
    sizes = np.array([shard.tokens * shard.spec.row_bytes for shard in shards], np.int64)
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    found = []
    for number in range(min(count, -(-total // length))):
        place = number * total // min(count, -(-total // length))
        shard = int(np.searchsorted(ends, place, side="right"))
        position = shards[shard].position
        if position is None:
            continue
        within = place - int(ends[shard] - sizes[shard])
        begin = (position + within) // _PAGE * _PAGE
        stop = min(begin + length, position + int(sizes[shard]))
        found.append(Extent(str(shards[shard].path), begin, max(stop - begin, 1)))
    return found


def in_page_cache(places: Sequence[Extent]) -> float | None:
    """Share of places whose first page is in memory now, asked without reading it in; None where the system cannot tell."""
    if not places or not hasattr(os, "RWF_NOWAIT"):
        return None
    hits, page = 0, bytearray(_PAGE)
    for path, group in _by_file(places).items():
        with open(path, "rb", buffering=0) as handle:
            for place in group:
                try:
                    hits += os.preadv(handle.fileno(), [page], place.start, os.RWF_NOWAIT) > 0
                except OSError as error:
                    if error.errno != errno.EAGAIN:  # EAGAIN: would have to wait for the disk
                        return None
    return hits / len(places)


def _by_file(places: Sequence[Extent]) -> dict[str, list[Extent]]:
    found: dict[str, list[Extent]] = {}
    for place in places:
        found.setdefault(place.path, []).append(place)
    return found


def disk_rate(places: Sequence[Extent], readers: int, what: str) -> Rate | None:
    """Direct reads, past the page cache; None where the file system has none (a memory file system, some network ones)."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag or not places:
        return None
    try:
        rate, moved = _read_all(places, readers, os.O_RDONLY | flag)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return None
    return Rate(rate, f"direct reads of {moved / 1e6:,.0f} MB of {what}")


def page_cache_rate(places: Sequence[Extent], readers: int, what: str) -> Rate | None:
    """Plain reads of some places that were read just before."""
    some = list(places[:: max(1, len(places) // 8)])[:8]
    if not some:
        return None
    _read_all(some, readers, os.O_RDONLY)
    found = [_read_all(some, readers, os.O_RDONLY) for _ in range(5)]
    return Rate(statistics.median(rate for rate, _ in found), f"plain reads of {found[0][1] / 1e6:,.0f} MB in memory of {what}")


def _read_all(places: Sequence[Extent], readers: int, flags: int) -> tuple[float, int]:
    """Bytes a second and bytes read from places by some threads, which begin nothing new after about a second."""
    files = {path: os.open(path, flags) for path in _by_file(places)}
    # Page-aligned, as direct reads need; filled, so that its pages are there before the clock matters.
    buffers = [mmap.mmap(-1, _CHUNK) for _ in range(readers)]
    for buffer in buffers:
        buffer.write(bytes(_CHUNK))

    def work(number: int) -> int:
        moved = 0
        with memoryview(buffers[number]) as view:
            for place in places[number::readers]:
                if moved and time.perf_counter() > deadline:
                    break
                with view[: min(-(-place.length // _PAGE) * _PAGE, _CHUNK)] as part:
                    moved += os.preadv(files[place.path], [part], place.start)
        return moved

    try:
        with ThreadPoolExecutor(readers) as pool:
            list(pool.map(time.sleep, [0.001] * readers))  # the threads are there
            started = time.perf_counter()
            deadline = started + _SECONDS
            moved = sum(pool.map(work, range(readers)))
            seconds = time.perf_counter() - started
    finally:
        for descriptor in files.values():
            os.close(descriptor)
        for buffer in buffers:
            buffer.close()
    return moved / max(seconds, 1e-9), moved


def _hdf5_rate(shards: Sequence[Shard]) -> Rate:
    """Chunked or compressed shards: what HDF5 reads, whatever is in the page cache."""
    moved, started = 0, time.perf_counter()
    for shard in shards:
        rows = max(1, _CHUNK // shard.spec.row_bytes)
        buffer = torch.empty(min(rows, shard.tokens), shard.spec.dim, dtype=_DTYPES[shard.spec.dtype])
        shard.read(0, buffer)
        moved += buffer.numel() * buffer.element_size()
        if time.perf_counter() - started > _SECONDS:
            break
    return Rate(moved / (time.perf_counter() - started), f"{moved / 1e6:,.0f} MB through HDF5 (chunked or compressed shards)")


@contextmanager
def _temporary(folder: Path) -> Iterator[tuple[str | None, Rate | None]]:
    """An unnamed file of 128 MB in `folder` (or the nearest folder above that exists): its path, the rate of writing it."""
    place = next(path for path in (folder, *folder.resolve().parents) if path.is_dir())
    if not os.access(place, os.W_OK):
        yield None, None
        return
    with tempfile.TemporaryFile(dir=place, buffering=0) as handle:
        rate = _fill(handle)
        path = f"/proc/self/fd/{handle.fileno()}"
        yield (path if os.path.exists(path) else None), rate


def _fill(handle: IO[bytes]) -> Rate | None:
    """Write at most 128 MB or for a second; None on a full disk (what was written is measured all the same)."""
    piece = np.random.default_rng(0).bytes(_CHUNK)  # not zeros: some file systems store those for nothing
    started, size = time.perf_counter(), 0
    try:
        while size < _TEMPORARY_BYTES:
            size += handle.write(piece)
            if time.perf_counter() - started > _SECONDS:
                break
        os.fsync(handle.fileno())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return None
    return Rate(size / (time.perf_counter() - started), f"{size / 1e6:,.0f} MB written and synced in the cache folder")


# Copies -----------------------------------------------------------------------------------------------------------------


def memory_rate(size: int = 128 << 20) -> Rate:
    """Bytes a second that copying moves within host memory."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return Rate(
        size / _median(lambda: target.copy_(source)), f"copy of {size / 1e6:,.0f} MB, {torch.get_num_threads()} threads"
    )


def link_rate(device: str, size: int = 256 << 20) -> Rate:
    """Pinned host memory to the GPU."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    copy()
    return Rate(size / _median(copy), f"copy of {size / 1e6:,.0f} MB from pinned memory")


# The operator -----------------------------------------------------------------------------------------------------------


class _Scale:
    """Stands for a corpus whose largest component is known."""

    def absmax(self) -> float:
        return 1.0


def path_rates(
    sizes: Sizes, names: Sequence[str], lengths: np.ndarray | None, device: str, k: int
) -> tuple[dict[str, PathRates], Rate | None]:
    """Rates of the operator and of the top-k alone; arguments as of `measure`."""
    if not (sizes.document_tokens and sizes.query_tokens):
        return {}, None
    count = min(sizes.queries, _QUERIES)
    each = np.full(count, max(1, round(sizes.query_tokens / sizes.queries)))
    queries = _tokens(each, sizes.dim, _DTYPES[sizes.form], "cpu")
    if lengths is None or not len(lengths):
        lengths = np.full(1024, max(1, round(sizes.document_tokens / sizes.documents)))
    found = {name: _path_rate(name, queries, lengths, sizes, device) for name in names}
    return found, _topk_rate(count, min(sizes.documents, 4096), k, device)


def _tokens(lengths: np.ndarray, dim: int, dtype: torch.dtype, device: str) -> Packed:
    """Random unit vectors: no value makes the operator faster or slower."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn(int(lengths.sum()), dim, generator=generator, device=device)
    offsets = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]))
    return Packed(torch.nn.functional.normalize(values, dim=1).to(dtype), offsets.to(device))


def _path_rate(name: str, queries: Packed, lengths: np.ndarray, sizes: Sizes, device: str) -> PathRates:
    """Prepare and score more and more documents until a call takes long enough to be a rate."""
    path, kind, dtype = find_paths([name])[name], torch.device(device).type, _DTYPES[sizes.form]
    prepared = path.queries(queries).to(device)
    most = max(1, _BLOCK[kind] // (sizes.dim * dtype.itemsize))
    documents = min(16 if kind == "cpu" else 256, sizes.documents)

    def timed(call: Callable[[], object], runs: int) -> float:
        def finished() -> None:
            call()
            if kind == "cuda":
                torch.cuda.synchronize(device)

        return _median(finished, runs)

    while True:
        block = _tokens(np.resize(_spread(lengths, documents), documents), sizes.dim, dtype, device)
        ready = path.documents(block, _Scale())  # type: ignore[arg-type]
        path.score(prepared, ready)  # compiles, allocates
        # The quicker of two: on a busy machine one slow call would end this with far too little work.
        seconds = min(timed(lambda ready=ready: path.score(prepared, ready), 1) for _ in range(2))  # type: ignore[misc]
        if seconds >= _CALL[kind] or block.values.shape[0] * 2 > most or documents >= sizes.documents:
            break
        documents = min(documents * (4 if seconds < _CALL[kind] / 8 else 2), sizes.documents)
    tokens = block.values.shape[0]
    scoring = timed(lambda: path.score(prepared, ready), 5)
    preparing = timed(lambda: path.documents(block, _Scale()), 5)  # type: ignore[arg-type]
    work = operations(int(queries.values.shape[0]), tokens, sizes.dim)
    how = f"{len(queries)} queries x {documents} documents ({tokens:,} tokens), {scoring * 1e3:.1f} ms"
    moved = tokens * sizes.dim * dtype.itemsize
    return PathRates(Rate(work / scoring, how), Rate(moved / preparing, f"{moved / 1e6:,.1f} MB, {preparing * 1e3:.1f} ms"))


def _spread(lengths: np.ndarray, count: int) -> np.ndarray:
    """At most `count` lengths, evenly chosen."""
    return lengths[np.linspace(0, len(lengths) - 1, min(count, len(lengths))).astype(np.int64)]


def _topk_rate(queries: int, documents: int, k: int, device: str) -> Rate:
    scores = torch.rand(queries, documents, generator=torch.Generator(device).manual_seed(0), device=device)
    best = TopK(queries, min(k, documents), device)

    def add() -> None:
        best.add(scores)
        if scores.is_cuda:
            torch.cuda.synchronize(device)

    add()
    return Rate(scores.numel() / _median(add), f"{queries} x {documents} scores, k = {k}")


def _compare_rate(documents: int) -> Rate | None:
    if documents < 2:
        return None
    count = min(documents, _COMPARED)
    rng = np.random.default_rng(0)
    rows: list[Any] = [rng.random(count, np.float32) for _ in range(2)]
    seconds = _median(lambda: spearman(rows[0], rows[1]), 3)
    return Rate(count / seconds, f"rank correlation of two rows of {count:,} scores")
