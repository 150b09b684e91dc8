"""The plan of an evaluation: seconds of every path (`costs.py`), what is read from where, and whether it all fits.

Pure functions, no I/O: `rates.py` measures, the command `plan` (cli/plan.py) asks and prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from maxsim_eval.planning.costs import (
    KEY_BYTES,
    READ_TWICE,
    PathPlan,
    Rates,
    Sizes,
    kept_rows,
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
    """Whether something suffices; `ok` is None where nobody can say, or where too little only costs time."""

    what: str
    needed: int
    available: int | None
    ok: bool | None


@dataclass(frozen=True)
class Plan:
    """Everything `evaluate.py plan` prints. `phases` in their order: start, encode, every path, compare, finish."""

    sizes: Sizes
    rates: Rates
    room: Room
    k: int
    processes: int
    kept_rows: int
    phases: tuple[PathPlan, ...]
    total: float | None  # seconds of all phases that are known; None where a path's are not
    more: float  # as of a phase
    checks: tuple[Check, ...]
    unknown: tuple[str, ...]  # what is not in the total

    @property
    def fits(self) -> bool:
        """Whether no check failed."""
        return all(check.ok is not False for check in self.checks)


def cold_bytes(sizes: Sizes, room: Room, names: Sequence[str], needed: int = 0) -> dict[str, float]:
    """Bytes each path has to fetch from the disk, in order of the paths.

    A corpus that fits into free memory beside `needed` bytes is read from the disk once, except for what is in the page cache
    already (all of it, if it was just encoded); of a larger one, nothing is there any more when it is read again.
    """
    if room.memory is None or sizes.stored > room.memory - needed:
        return {name: float(sizes.stored * (2 if name in READ_TWICE else 1)) for name in names}
    there = (room.in_page_cache or 0.0) if sizes.encoded else 1.0
    return {name: 0.0 if number else sizes.stored * (1.0 - there) for number, name in enumerate(names)}


def make_plan(
    sizes: Sizes,
    rates: Rates,
    room: Room,
    names: Sequence[str],
    *,
    k: int = 100,
    processes: int = 1,
    memory_budget: int | None = None,
    start: float = 0.0,
) -> Plan:
    """The whole plan: encoding, every path, what comes after them, and whether it fits.

    Args:
        names: paths in the order they will run (the reference first).
        memory_budget: bytes of GPU memory that blocks in flight may take; None: the default of streaming.
        start: seconds that importing and loading took just now; the evaluation does the same first.
    """
    rows = kept_rows(sizes.queries, sizes.documents, names)
    results = sizes.query_tokens * sizes.dim * 4 + 3 * sizes.queries * 100 * KEY_BYTES
    memory = processes * (room.process + HOST_BYTES[rates.device] + results) + (sizes.documents * 8 * 6 if rows else 0)
    cold = cold_bytes(sizes, room, names, memory)
    paths = [path_plan(name, sizes, rates, cold=cold[name], k=k, processes=processes, rows=rows) for name in names]
    phases = [_phase("start", "imports and loading", start), *paths]
    if not sizes.encoded:
        phases.insert(1, _encoding(sizes, rates, processes))
    if rows:
        pairs = rows * sizes.documents * (len(names) - 1)
        phases.append(_phase("compare", f"full scores of {rows:,} queries", seconds_of(pairs, rates.compare)))
    finish = seconds_of(sizes.queries * len(names), rates.finish)
    phases.append(_phase("finish", "metrics, statistics, report", finish))
    unknown = [phase.name for phase in phases if phase.seconds is None]
    unknown += [f"{stage.name} of {path.name}" for path in paths for stage in path.stages if stage.seconds is None]
    return Plan(
        sizes,
        rates,
        room,
        k=k,
        processes=processes,
        kept_rows=rows,
        phases=tuple(phases),
        total=None if any(path.seconds is None for path in paths) else sum(phase.seconds or 0.0 for phase in phases),
        more=sum(phase.more for phase in phases),
        checks=tuple(_checks(sizes, room, rates.device, k, processes, memory, memory_budget, rows, len(names))),
        unknown=tuple(unknown),
    )


def _encoding(sizes: Sizes, rates: Rates, processes: int) -> PathPlan:
    """Encoding and writing: with GPUs both go on at once, and every process encodes on its own GPU."""
    encode, written, gpu = rates.encode, seconds_of(sizes.stored, rates.output), rates.device == "cuda"
    if encode is None or written is None:
        return _phase("encode", "the encoder", None)
    made = encode.seconds(sizes.documents, processes if gpu else 1)
    return _phase("encode", "the encoder", max(made, written) if gpu else made + written, made * encode.rate.spread)


def _phase(name: str, bound: str, seconds: float | None, more: float = 0.0) -> PathPlan:
    return PathPlan(name, (), bound, 0.0, seconds, more)


def _checks(
    sizes: Sizes, room: Room, device: str, k: int, processes: int, memory: int, budget: int | None, rows: int, paths: int
) -> Iterator[Check]:
    def check(what: str, needed: int, available: int | None) -> Check:
        return Check(what, needed, available, None if available is None else needed <= available)

    yield check("memory", memory, room.memory)
    if budget is not None:
        from maxsim_kernels.streaming import least_budget  # torch: the command's help is there without it

        yield check("memory budget", least_budget(device, sizes.queries), budget)
    if room.memory is not None:  # too little: every path reads the disk
        left = max(room.memory - memory, 0)
        yield Check("page cache", sizes.stored, left, True if sizes.stored <= left else None)
    queries = replace(sizes, documents=sizes.queries, document_tokens=sizes.query_tokens)
    written = 0 if sizes.encoded else sizes.stored + queries.stored
    scratch = scratch_bytes(sizes, rows, k, paths)
    if room.one_disk:
        yield check("disk", written + scratch, room.cache_disk)
    else:
        yield check("cache disk", written, room.cache_disk)
        yield check("output disk", scratch, room.output_disk)
    if device == "cuda":  # what is in flight (the budget, else what streaming wants at least) and the queries, in FP32
        flight = LEAST_GPU + 4 * KEY_BYTES * sizes.queries * min(k, sizes.documents) if budget is None else budget
        yield check("GPU memory", flight + sizes.query_tokens * sizes.dim * 4, room.gpu)
        yield check("GPUs", processes, room.gpus)
