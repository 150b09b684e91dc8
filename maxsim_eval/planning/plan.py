"""The plan of an evaluation: seconds of every path (`costs.py`), what is read from where, and whether it all fits.

Pure functions, no I/O: `rates.py` measures, the command `plan` (cli/plan.py) asks and prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from maxsim_eval.planning.costs import (
    FORMS,
    KEY_BYTES,
    PathPlan,
    Rates,
    Sizes,
    corpus_bytes,
    kept_rows,
    passes,
    path_plan,
    scratch_bytes,
    seconds_of,
)

HOST_BYTES = {"cuda": 4 * 10**9, "cpu": 256 * 10**6}  # most that scoring holds beyond inputs, results and the page cache
LEAST_GPU = 512 << 20  # of GPU memory for buffers, scores and temporaries; more (2 GiB by default) is used where there is more


@dataclass(frozen=True)
class Room:
    """What the machine has free, in bytes; None: unknown, or not there."""

    memory: int | None = None  # that the evaluation may take: what is available, and what this process holds
    process: int = 0  # that this process, with the task loaded, holds already
    cache_disk: int | None = None
    output_disk: int | None = None
    one_disk: bool = False  # both folders are on one file system
    gpu: int | None = None
    gpus: int = 0
    in_page_cache: float | None = None  # share of the corpus that is there now


@dataclass(frozen=True)
class Check:
    """Whether something suffices: None where nobody can say."""

    what: str
    needed: int
    available: int | None
    ok: bool | None
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """Everything `evaluate.py plan` prints."""

    sizes: Sizes
    k: int
    processes: int
    kept_rows: int
    bytes: Mapping[str, int]
    paths: tuple[PathPlan, ...]
    compare: float | None
    start: float
    total: float | None  # None where a path's seconds are unknown
    checks: tuple[Check, ...]
    unknown: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """No check says no."""
        return all(check.ok is not False for check in self.checks)


def cold_bytes(sizes: Sizes, room: Room, names: Iterable[str], needed: int = 0) -> dict[str, float]:
    """Bytes each path has to fetch from the disk, in order of the paths.

    A corpus that fits into free memory beside `needed` bytes is read from the disk once, and not where it is in the page cache
    already (or was only just written); a larger one is gone from there whenever it is read again from its beginning.
    """
    found: dict[str, float] = {}
    there = (room.in_page_cache or 0.0) if sizes.encoded else 1.0
    stays = room.memory is not None and sizes.stored <= room.memory - needed
    for name in names:
        if stays:
            found[name] = sizes.stored * (1.0 - there)
            there = 1.0
        else:
            found[name] = float(sizes.stored * passes(name))
    return found


def make_plan(
    sizes: Sizes,
    rates: Rates,
    room: Room,
    names: Iterable[str],
    *,
    k: int = 100,
    processes: int = 1,
    memory_budget: int | None = None,
    start: float = 0.0,
) -> Plan:
    """The whole plan: every path, the comparison after them, and whether it fits.

    Args:
        names: paths in the order they will run (the reference first).
        memory_budget: bytes of GPU memory that blocks in flight may take; None: the default of streaming.
        start: seconds that loading the task and opening the cache took just now; the evaluation does the same first.
    """
    names = list(names)
    rows = kept_rows(sizes.queries, sizes.documents, names)
    needed = memory_needed(sizes, room, rates.device, processes, rows)
    cold = cold_bytes(sizes, room, names, needed)
    paths = tuple(path_plan(name, sizes, rates, cold=cold[name], k=k, processes=processes, rows=rows) for name in names)
    pairs = rows * sizes.documents * (len(names) - 1) if rows else 0
    compared = seconds_of(pairs, rates.compare)
    unknown = list(dict.fromkeys(f"{stage.name}: no rate" for path in paths for stage in path.stages if stage.seconds is None))
    if compared is None:
        unknown.append("comparing full scores: no rate")
    if not sizes.encoded:
        unknown.append("encoding: its rate depends on the model and is not known before it runs")
    known = [path.seconds for path in paths if path.seconds is not None]
    total = start + sum(known) + (compared or 0.0) if len(known) == len(paths) else None
    return Plan(
        sizes=sizes,
        k=k,
        processes=processes,
        kept_rows=rows,
        bytes={form: sizes.bytes_as(form) for form in FORMS},
        paths=paths,
        compare=compared,
        start=start,
        total=total,
        checks=tuple(_checks(sizes, room, rates.device, names, k, processes, rows, needed, memory_budget)),
        unknown=tuple(unknown),
    )


def memory_needed(sizes: Sizes, room: Room, device: str, processes: int, rows: int) -> int:
    """Bytes of RAM that all processes need beyond the page cache: task, buffers, results; one row's ranks for parity."""
    results = sizes.query_tokens * sizes.dim * 4 + 3 * sizes.queries * 100 * KEY_BYTES
    return processes * (room.process + HOST_BYTES[device] + results) + (sizes.documents * 8 * 6 if rows else 0)


def _enough(needed: int, available: int | None) -> bool | None:
    return None if available is None else needed <= available


def _checks(
    sizes: Sizes,
    room: Room,
    device: str,
    names: list[str],
    k: int,
    processes: int,
    rows: int,
    needed: int,
    memory_budget: int | None,
) -> Iterable[Check]:
    yield Check("memory", needed, room.memory, _enough(needed, room.memory), "task, buffers and results of every process")
    if room.memory is not None:
        left = max(room.memory - needed, 0)
        stays = sizes.stored <= left
        note = "stays in memory: read from disk once" if stays else "does not stay in memory: every path reads the disk"
        yield Check("page cache", sizes.stored, left, True if stays else None, note)
    written = 0 if sizes.encoded else sizes.stored + corpus_bytes(sizes.query_tokens, sizes.queries, sizes.dim, sizes.form)
    scratch = scratch_bytes(sizes, rows, k, len(names))
    if room.one_disk:
        both = written + scratch
        yield Check("disk", both, room.cache_disk, _enough(both, room.cache_disk), "cache to be written, and kept scores")
    else:
        yield Check("cache disk", written, room.cache_disk, _enough(written, room.cache_disk), "embeddings to be written")
        yield Check("output disk", scratch, room.output_disk, _enough(scratch, room.output_disk), "kept scores, top-k of units")
    if device == "cuda":
        wanted = gpu_needed(sizes, k, memory_budget)
        note = "the memory budget and the queries" if memory_budget else "what streaming wants at least, and the queries"
        yield Check("GPU memory", wanted, room.gpu, _enough(wanted, room.gpu), note)
        yield Check("GPUs", processes, room.gpus, processes <= room.gpus, "one a process")


def gpu_needed(sizes: Sizes, k: int, memory_budget: int | None) -> int:
    """Bytes of GPU memory: what is in flight (the budget, else what streaming wants at least) and the queries, in FP32."""
    kept = 4 * KEY_BYTES * sizes.queries * min(k, sizes.documents)
    flight = LEAST_GPU + kept if memory_budget is None else memory_budget
    return flight + sizes.query_tokens * sizes.dim * 4
