"""Rates of this machine, each by short runs of the real thing until they agree: an evaluation's own reading and scoring, of a slice.

Direct reads do not touch the page cache, and what is written goes to a temporary folder beside the cache, removed at the end. What a
file system or machine cannot do is None, never a guess.
"""

from __future__ import annotations

import errno
import mmap
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.filling import fill_entry
from maxsim_eval.cache.selection import Documents, whole
from maxsim_eval.cache.shards import DTYPES
from maxsim_eval.errors import CacheError
from maxsim_eval.files import delete, hidden, remove_leftovers
from maxsim_eval.planning.costs import SCANS, PathRates, Rate, Rates, Sizes, operations
from maxsim_eval.planning.room import nearest
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.own_functions import find_paths
from maxsim_eval.scoring.stream import score_units
from maxsim_kernels import Packed

STEADY = 0.1  # measurements that differ by less agree
BUSY = 0.1  # of all processors: others that take more make a busy machine
SECONDS = 1.2  # after which a measurement is taken although its runs do not agree
_PAGE = 4096
_CHUNK = 8 << 20  # one sequential read
_PROBES = 512
QUERIES = 512  # more would hardly change a rate
Place = tuple[str, int]  # a file, and the byte in it where a page begins
# By kind of device. `_CALL`: seconds of the shortest call that gives a rate, if twice the documents take nearly twice as long;
# `_LONG`: if they need not (a GPU's launches and fixed blocks may take 50 times a small slice's work); `_MADE_UP`: bytes of
# made-up tokens for an empty cache.
_CALL = {"cpu": 0.2, "cuda": 0.01}
_LONG = {"cpu": 0.2, "cuda": 0.3}
_LINEAR = 0.85
_MADE_UP = {"cpu": 32 << 20, "cuda": 128 << 20}


def steady(*calls: Callable[[], float]) -> list[tuple[float, float]]:
    """Make calls that return seconds, in turn, until the last three of each agree: their medians and spreads (`Rate.spread`).

    If they never agree, those of all calls made. If other programs used much of the machine's processors meanwhile, which may
    end, a spread is at least 1.
    """
    found: list[list[float]] = [[] for _ in calls]
    started, others = time.perf_counter(), _others()
    while True:
        for call, seconds in zip(calls, found, strict=True):
            seconds.append(max(call(), 1e-9))
        last, passed = [seconds[-3:] for seconds in found], time.perf_counter() - started
        agree = all(_spread(seconds) <= STEADY for seconds in last)
        if len(found[0]) > 2 and (agree or passed > SECONDS * len(calls)):
            least = 1.0 if (_others() - others) / max(passed, 0.1) > BUSY * (os.cpu_count() or 1) else 0.0
            return [(statistics.median(seconds), max(_spread(seconds), least)) for seconds in (last if agree else found)]


def _spread(seconds: Sequence[float]) -> float:
    return max(seconds) / min(seconds) - 1


def _others() -> float:
    """Seconds that processors have worked for other processes since the machine started; 0 where the system does not say."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=9)
    except OSError:
        return 0.0
    # User, nice, system, idle, waiting for a disk, interrupts (2), stolen by other guests.
    ticks = [int(word) for word in words[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - time.process_time()


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(
    sizes: Sizes,
    names: Sequence[str],
    *,
    entry: Documents | None,
    lengths: np.ndarray | None = None,
    queries: Packed | None = None,
    folder: Path,
    device: str = "cpu",
    k: int = 100,
    readers: int = 4,
) -> tuple[Rates, float | None]:
    """Rates for an evaluation of these sizes, and the share of the corpus in the page cache now (None: cannot be told).

    Args:
        names: scoring paths.
        entry: the documents in the cache; None: made-up ones are written, read and scored instead.
        lengths: tokens of documents (a sample will do); None: all of the mean length.
        queries: as of `path_rates`.
        folder: where the cache is, or will be.
        readers: threads that read; on a CPU 2 at most, as in streaming.
    """
    kind = torch.device(device).type
    with _made_up(sizes, lengths, folder, _MADE_UP[kind] if entry is None else _MADE_UP["cpu"]) as (other, output):
        held = other if entry is None else entry
        asked = [] if held is None else places(held)
        resident = None if entry is None else in_page_cache(asked)
        threads = readers if kind == "cuda" else min(readers, 2)
        disk = read_rate(asked, threads, direct=True)
        paths, topk, host = ({}, None, None) if held is None else path_rates(sizes, names, held, device, k, queries)
        if kind == "cuda":  # there reading goes on beside the scoring
            host = [read_rate(asked[:16], threads, direct=False) for _ in range(4)][-1]
    link = link_rate(device) if kind == "cuda" else None
    return Rates(kind, paths, disk=disk, host=host, link=link, topk=topk, output=output), resident


@contextmanager
def _temporary(place: Path) -> Iterator[Path]:
    """A folder that is deleted afterwards; the next plan deletes that of a process which was killed."""
    place.mkdir()
    try:
        yield place
    finally:
        delete(place)


@contextmanager
def _made_up(
    sizes: Sizes, lengths: np.ndarray | None, folder: Path, size: int
) -> Iterator[tuple[Documents | None, Rate | None]]:
    """Beside the cache, an entry of about `size` bytes of random tokens with the documents' lengths; and the rate of writing it.

    None where the folder (or the nearest one above that exists) cannot be written, as on a full disk, or nothing is to be scored.
    """
    beside = nearest(folder)
    if not sizes.document_tokens or not os.access(beside, os.W_OK):
        yield None, None
        return
    if lengths is None or not lengths.sum():
        lengths = np.full(1, max(1, sizes.document_tokens // sizes.documents))
    dtype = DTYPES[sizes.form]
    count = max(1, min(sizes.documents, int(size / (lengths.mean() * sizes.dim * dtype.itemsize))))
    tokens = _tokens(lengths[np.linspace(0, len(lengths) - 1, count).astype(np.int64)], sizes.dim, dtype)

    def encode(start: int, stop: int) -> Packed:
        return tokens.select(torch.arange(start, stop)).compact()

    manifest: dict[str, Any] = {"key": "plan", "dtype": dtype, "dim": sizes.dim, "provenance": {}}
    remove_leftovers(beside / "plan")
    with _temporary(hidden(beside / "plan", "tmp")) as place:
        started = time.perf_counter()
        try:
            entry = fill_entry(place, ids=list(map(str, range(count))), **manifest, encode=encode, quiet=True)
        except CacheError:
            yield None, None
            return
        written, seconds = tokens.values.numel() * dtype.itemsize, time.perf_counter() - started
        yield entry, Rate(written / seconds, f"an entry of {written / 1e6:,.0f} MB written beside the cache")


def _tokens(lengths: np.ndarray, dim: int, dtype: torch.dtype) -> Packed:
    """Random unit vectors: no value makes the operator faster or slower."""
    values = torch.randn(int(lengths.sum()), dim, generator=torch.Generator().manual_seed(0))
    offsets = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]))
    return Packed(torch.nn.functional.normalize(values, dim=1).to(dtype), offsets)


def places(entry: Documents) -> list[Place]:
    """About 512 places within an entry's values, evenly spread and `_CHUNK` or more apart; none where only HDF5 can read them."""
    shards = whole(entry).shards
    values = [(str(one.path), one.position, one.tokens * one.spec.row_bytes) for one in shards if one.position is not None]
    found = [(path, first + start) for path, first, size in values for start in range(0, size, _CHUNK)]
    return [(path, start // _PAGE * _PAGE) for path, start in found[:: -(-len(found) // _PROBES) or 1]]


def in_page_cache(asked: Sequence[Place]) -> float | None:
    """Share of places whose page is in memory now, asked without reading it in; None where the system cannot tell."""
    if not asked or not hasattr(os, "RWF_NOWAIT"):
        return None
    hits = 0
    for path, start in asked:
        with open(path, "rb", buffering=0) as handle:
            try:
                hits += os.preadv(handle.fileno(), [bytearray(_PAGE)], start, os.RWF_NOWAIT) > 0
            except OSError as error:
                if error.errno != errno.EAGAIN:  # EAGAIN: would have to wait for the disk
                    return None
    return hits / len(asked)


def read_rate(asked: Sequence[Place], readers: int, *, direct: bool) -> Rate | None:
    """Bytes a second that `readers` threads read past the page cache (`direct`), or from it; no read begins after `SECONDS`.

    None without places, and where the file system has no direct reads (a memory file system, some network ones).
    """
    flag = getattr(os, "O_DIRECT", 0) if direct else 0
    if not asked or (direct and not flag):
        return None
    # Page-aligned, as direct reads need; filled, so that its pages are there before the clock matters.
    buffers = deque(mmap.mmap(-1, _CHUNK) for _ in range(readers))
    for buffer in buffers:
        buffer.write(bytes(_CHUNK))
    started = time.perf_counter()

    def read(place: Place) -> int:
        if time.perf_counter() > started + SECONDS:
            return 0
        descriptor, buffer = os.open(place[0], os.O_RDONLY | flag), buffers.pop()
        try:
            return os.preadv(descriptor, [buffer], place[1])
        finally:
            buffers.append(buffer)
            os.close(descriptor)

    with ThreadPoolExecutor(readers) as pool:
        try:
            moved = sum(pool.map(read, asked))
        except OSError as error:
            if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return None
        seconds = time.perf_counter() - started
    what = "past the page cache" if direct else "in memory"
    return Rate(moved / seconds, f"{moved / 1e6:,.0f} MB {what}, {readers} threads")


def link_rate(device: str) -> Rate:
    """Pinned host memory to the GPU."""
    size = 256 << 20
    source, target = torch.empty(size // 4, pin_memory=True), torch.empty(size // 4, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    copy()
    ((seconds, spread),) = steady(lambda: timed(copy))
    return Rate(size / seconds, f"copy of {size / 1e6:,.0f} MB from pinned memory", spread)


def some(count: int, most: int) -> np.ndarray:
    """At most `most` of the numbers 0 to `count` - 1, evenly chosen, ascending, int64."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


def path_rates(
    sizes: Sizes, names: Sequence[str], documents: Documents, device: str, k: int, queries: Packed | None = None
) -> tuple[dict[str, PathRates], Rate | None, Rate | None]:
    """Rates of each path, of the top-k and of reading from memory: by scoring a slice of documents as an evaluation does.

    At most 512 of the queries are used, evenly chosen. Real ones where there are any: a CPU scores a token that occurs again only
    once, so those of a lexical encoder are several times as fast as random ones. Made-up ones all have the mean length.
    """
    if not (sizes.document_tokens and sizes.query_tokens and documents.tokens):
        return {}, None, None
    if queries is None or not queries.values.shape[0]:
        each = np.full(min(sizes.queries, QUERIES), max(1, round(sizes.query_tokens / sizes.queries)))
        queries = _tokens(each, sizes.dim, DTYPES[sizes.form])
    elif len(queries) > QUERIES:
        queries = queries.select(torch.from_numpy(some(len(queries), QUERIES))).compact()
    found = {name: _Slice(name, queries, documents, device, k) for name in names}
    for part, (_, least) in zip(found.values(), steady(*(part.run for part in found.values())), strict=True):
        part.spread = max(least, _spread([run["score"] for run in part.runs]))
    paths = {name: PathRates(part.rate_of("score"), part.rate_of("prepare")) for name, part in found.items()}
    last = found[names[-1]]  # one is as good as another
    return paths, last.rate_of("topk"), last.rate_of("read")


class _Slice:
    """A path over a run of documents in the middle of an entry, enough of them for a rate."""

    def __init__(self, name: str, queries: Packed, documents: Documents, device: str, k: int) -> None:
        self.queries, self.documents = queries, documents
        self.name = SCANS.get(name, name)  # a scan's rate is that of its codes
        ids, searched = [str(number) for number in range(len(queries))], documents.documents
        named: Any = range(searched)  # for the message about a NaN alone
        nothing = np.full(len(queries), -1, np.int64), np.zeros(0, np.int64)
        self.asked = Asked(ids, named, min(k, searched), *nothing, paths=find_paths([self.name]))
        self.spread, self.runs = 0.0, list[Mapping[str, float]]()
        self.corpus = Corpus(documents, quiet=True, device=device)
        kind = torch.device(device).type
        self.lengths, least, before = documents.lengths(), _CALL[kind], 0.0
        count = max(1, min(searched, int(4096 / max(self.lengths.mean(), 1.0))))
        while True:
            first = (searched - count) // 2
            self.units, self.corpus.spans = [(first, first + count)], [(first, first + count)]
            self.run()  # compiles, allocates, looks for the scale
            self.runs.clear()
            # The quicker of two: on a busy machine one slow call would end this with far too little work.
            seconds = min(self.run() for _ in range(2))
            self.tokens = int(self.lengths[first : first + count].sum())
            linear = 0 < before * _LINEAR <= seconds
            if (self.tokens and (seconds >= _LONG[kind] or (seconds >= least and linear))) or count == searched:
                break
            wanted = min(count * (4 if seconds < least / 8 else 2), searched)
            before, count = seconds * wanted / count, wanted

    def run(self) -> float:
        """Score the slice: the seconds of scoring; those of every phase are added to `runs`."""
        for unit in score_units(self.name, self.queries, self.corpus, self.asked, self.units, keep=False):
            self.runs.append(unit.cost)
        return self.runs[-1]["score"]

    def rate_of(self, phase: str) -> Rate:
        """Bytes a second of reading and preparing, operations of scoring, pairs of the top-k: medians of all runs."""
        stored = self.tokens * self.documents.dim * self.documents.dtype.itemsize
        pairs = len(self.queries) * (self.units[0][1] - self.units[0][0])
        work = operations(int(self.queries.values.shape[0]), self.tokens, self.documents.dim)
        amount = {"read": stored, "prepare": stored, "score": work, "topk": pairs}[phase]
        seconds = max(statistics.median(run[phase] for run in self.runs), 1e-9)
        how = f"{len(self.queries)} queries x {pairs // len(self.queries)} documents ({self.tokens:,} tokens), {seconds * 1e3:.3g} ms"
        return Rate(amount / seconds, how, self.spread if phase == "score" else 0.0)
