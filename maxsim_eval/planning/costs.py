"""What scoring costs, by arithmetic: sizes and rates in, seconds and bytes out. Pure functions; `rates.py` measures.

The model of one scoring path:

- every document goes through a chain of stages (disk, host copy, link, prepare, score, top-k, kept scores);
- stages of one resource share it, so their seconds add; resources work at the same time, so the slowest one sets the pace;
- filling the chain (the first block is read, copied and scored before anything overlaps) and the merge of ranks are added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from maxsim_eval.errors import UsageError

ALL_PAIRS = 10**9  # more (query, document) pairs than this: full score rows are kept for a sample of the queries
SAMPLED_QUERIES = 200
REFERENCE, FLOATS = "fp32", "fused-fp32"
READ_TWICE = ("int8-corpus",)  # the first time for its scale
SCANS = dict.fromkeys(("exact-int8", "exact-int8-fp32"), "int8-document")  # certified paths, and the copy that each scans
WIDE = "exact-int8-fp32"  # scores in FP32 whatever is stored
# Certified paths score about 4 k documents a query exactly (1.6 to 4.7 k, docs/search.md), queries taken to be independent. A GPU is
# taken to score all queries against the union of these (it does so with FP32; with FP16 and BF16 it scores the pairs alone, for less),
# beyond 60% of the documents it scores them all. A CPU scores the pairs, in products that are about twice as large for want of common
# shapes; beyond a quarter of the pairs it scores them all.
SURVIVORS, UNION_PAYS = 4, 0.6
PAIRS_PAY, PADDED_PRODUCTS = 0.25, 2.0
FLOAT_PRODUCTS = {"cpu": 3.0, "cuda": 160.0}  # rates of INT8 products to those of our FP32, where the latter were not measured
KEY_BYTES = 8  # of one kept (score, document): `maxsim_kernels.topk` packs both into an int64
BLOCK_BYTES = {"cuda": 128 << 20, "cpu": 33 << 20}  # a piece of the ring, as `maxsim_kernels.streaming` cuts them by default
LEAST_UNIT, MOST_UNIT = 64 << 20, 1 << 30  # bytes of a unit of work (`units.py`); in between a 256th of the corpus
UNIT_DOCUMENTS = 1 << 16
_ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2}
_CODES = {"int8-token": "token", "int8-document": "document", "fp8-document": "document"}  # one byte and an FP16 scale a ...
FORMS = (*_ELEMENT, *_CODES)


@dataclass(frozen=True)
class Sizes:
    """What is to be scored. `source` says how the numbers were found; `exact` is False for estimates."""

    queries: int
    documents: int
    query_tokens: int
    document_tokens: int
    dim: int
    form: str  # how documents lie in the cache: a name of `FORMS`
    source: str = "cache"
    exact: bool = True
    encoded: bool = True  # nothing has to be encoded first

    @property
    def stored(self) -> int:
        """Bytes of all documents' tokens as they lie in the cache: what each path reads, copies and prepares."""
        return corpus_bytes(self.document_tokens, self.documents, self.dim, self.form)


@dataclass(frozen=True)
class Rate:
    """A rate per second, how it was found, and its spread: 0.2 where the fastest measurement was 1.2 times the slowest."""

    value: float
    how: str = ""
    spread: float = 0.0


@dataclass(frozen=True)
class PathRates:
    """Of one scoring path: `prepare` in stored bytes a second (None: costs nothing), `score` in operations a second."""

    score: Rate
    prepare: Rate | None = None


@dataclass(frozen=True)
class Encoding:
    """What encoding takes: `start` seconds once (the model, the queries), then `rate` documents a second."""

    rate: Rate
    start: float = 0.0

    def seconds(self, documents: int, processes: int) -> float:
        """Seconds of encoding `documents`, by `processes` processes with that rate each."""
        return self.start + documents / (self.rate.value * processes)


@dataclass(frozen=True)
class Rates:
    """Rates of a machine: bytes a second, or pairs (`topk`, `compare`), documents (`encode`), rankings (`finish`); None: unknown.

    `link`, `topk`, `paths` and a GPU's `encode` are of one process with a GPU of its own, the others of the machine, however many
    processes share it.
    """

    device: str  # "cpu" or "cuda"
    paths: Mapping[str, PathRates]
    disk: Rate | None = None  # file to memory, past the page cache
    host: Rate | None = None  # page cache to the buffer a block is scored or copied from
    link: Rate | None = None  # pinned host memory to the GPU
    topk: Rate | None = None
    output: Rate | None = None  # kept score rows to the output folder
    encode: Encoding | None = None
    compare: Rate | None = None  # two full score rows
    finish: Rate | None = None  # metrics, statistics, run files and report, of one query by one path
    network: Rate | None = None  # between ranks; None: they share a memory


@dataclass(frozen=True)
class Stage:
    """One stage of a path: the resource it uses, how much goes through it, and for how long (None: rate unknown)."""

    name: str
    resource: str
    amount: float
    seconds: float | None
    more: float = 0.0  # uncertainty of `seconds`, up or down: its rate was not steady


@dataclass(frozen=True)
class PathPlan:
    """One path, what bounds it (`unknown` where the rate of scoring is), its seconds (None: unknown); or a phase without stages."""

    name: str
    stages: tuple[Stage, ...]
    bound: str
    fill: float
    seconds: float | None
    more: float = 0.0  # as of a stage

    def of(self, stage: str) -> float:
        """Seconds of one stage; 0 where the path has none or its rate is unknown."""
        return sum(found.seconds or 0.0 for found in self.stages if found.name == stage)


def corpus_bytes(tokens: int, documents: int, dim: int, form: str) -> int:
    """Bytes of tokens of width `dim` in a form: floats, or one byte a component and an FP16 scale a token or document.

    Raises:
        UsageError: an unknown form.
    """
    if form in _ELEMENT:
        return tokens * dim * _ELEMENT[form]
    if form not in _CODES:
        raise UsageError(f"form: got {form!r}, need one of {', '.join(FORMS)}")
    return tokens * dim + 2 * (tokens if _CODES[form] == "token" else documents)


def operations(query_tokens: int, document_tokens: int, dim: int) -> int:
    """Multiplications and additions of all similarities: `2 * Tq * Td * d`."""
    return 2 * query_tokens * document_tokens * dim


def kept_rows(queries: int, documents: int, paths: Iterable[str]) -> int:
    """Queries whose full score rows are kept for parity: none without the reference, all up to 10^9 pairs, else 200."""
    if REFERENCE not in paths:
        return 0
    return queries if queries * documents <= ALL_PAIRS else min(queries, SAMPLED_QUERIES)


def units(stored: int, documents: int) -> int:
    """How many units of work (`units.py`) a corpus makes, about."""
    size = min(max(-(-stored // 256), LEAST_UNIT), MOST_UNIT)
    return max(1, -(-stored // size), -(-documents // UNIT_DOCUMENTS))


def largest_share(count: int, processes: int) -> float:
    """The part of `count` equal units that the busiest of the processes scores: a small corpus leaves some idle."""
    return -(-count // processes) / count


def merge_bytes(processes: int, queries: int, k: int) -> int:
    """Bytes of all ranks' top-k keys."""
    return processes * queries * k * KEY_BYTES


def scratch_bytes(sizes: Sizes, rows: int, k: int, paths: int) -> int:
    """Bytes that finished units take below the output folder until the evaluation is whole: kept rows, and keys a unit."""
    scores = rows * sizes.documents * 4
    return paths * (scores + units(sizes.stored, sizes.documents) * sizes.queries * min(k, sizes.documents) * KEY_BYTES)


def rescored_share(sizes: Sizes, k: int, gpu: bool) -> float:
    """The share of documents that a certified path reads in full precision."""
    share = 1 - math.exp(-sizes.queries * SURVIVORS * k / max(1, sizes.documents))
    return share if share <= UNION_PAYS or not gpu else 1.0


def rescored_work(name: str, sizes: Sizes, rates: Rates, k: int) -> float:
    """What a certified path scores exactly, as a share of its scan's work."""
    scan, floats = rates.paths.get(name), rates.paths.get(FLOATS)
    slower = scan.score.value / floats.score.value if scan and floats else FLOAT_PRODUCTS[rates.device]
    if rates.device == "cuda":  # matrix units take as much longer as components are wider; FP32 is not for them
        wide = name == WIDE or sizes.form == "float32"
        return rescored_share(sizes, k, True) * (slower if wide else _ELEMENT.get(sizes.form, 1))
    pairs = SURVIVORS * k / max(1, sizes.documents)
    return slower * (PADDED_PRODUCTS * pairs if pairs <= PAIRS_PAY else 1.0)


def seconds_of(amount: float, rate: Rate | None, share: float = 1.0) -> float | None:
    """Seconds for a share of an amount; None where something is to be done at an unknown rate."""
    if amount == 0:
        return 0.0
    return None if rate is None else amount * share / rate.value


def path_plan(
    name: str, sizes: Sizes, rates: Rates, *, cold: float, k: int = 100, processes: int = 1, rows: int = 0
) -> PathPlan:
    """Seconds of one scoring path.

    Args:
        cold: bytes that come from the disk, not the page cache (all readings of the path together).
        processes: on GPUs each has its own GPU and link, and scores a share; on a CPU they share its cores, so nothing is
            gained.
        rows: queries whose full scores are written.
    """
    share = largest_share(units(sizes.stored, sizes.documents), processes) if rates.device == "cuda" else 1.0
    stages = tuple(_stages(name, sizes, rates, cold, k, processes, rows, share))
    block = min(1.0, BLOCK_BYTES[rates.device] / max(sizes.stored, 1))  # the part of the corpus that fills the chain
    whole = {stage.name: share if stage.resource in ("link", "GPU") else 1.0 for stage in stages}
    busy: dict[str, float] = {}
    first: dict[str, float] = {}
    for stage in stages:
        busy[stage.resource] = busy.get(stage.resource, 0.0) + (stage.seconds or 0.0)
        if stage.resource not in ("alone", "output"):
            first[stage.resource] = first.get(stage.resource, 0.0) + block * (stage.seconds or 0.0) / whole[stage.name]
    alone = busy.pop("alone", 0.0)
    slowest = max(busy, key=lambda resource: busy[resource])
    # Filling is the work of the other resources on that block: the slowest one's is among its own seconds already.
    fill = sum(seconds for resource, seconds in first.items() if resource != slowest)
    if name not in rates.paths:
        return PathPlan(name, stages, "unknown", fill, None)
    bound = max((stage for stage in stages if stage.resource in (slowest, "alone")), key=lambda stage: stage.seconds or 0.0)
    more = sum(stage.more for stage in stages if stage.resource in (slowest, "alone"))
    return PathPlan(name, stages, bound.name, fill, busy[slowest] + fill + alone, more)


def _stage(name: str, resource: str, amount: float, rate: Rate | None, share: float = 1.0) -> Stage:
    seconds = seconds_of(amount, rate, share)
    return Stage(name, resource, amount, seconds, (seconds or 0.0) * (rate.spread if rate else 0.0))


def _stages(
    name: str, sizes: Sizes, rates: Rates, cold: float, k: int, processes: int, rows: int, share: float
) -> Iterator[Stage]:
    """Stages of a path; those of the resource `alone` overlap with nothing."""
    gpu, path, stored = rates.device == "cuda", rates.paths.get(name), sizes.stored
    more = widened = 0.0  # exact scoring, as a share of the scan's work; bytes over the link beyond those stored
    if name in SCANS:
        rescored = rescored_share(sizes, k, gpu)
        widened = (4 / _ELEMENT.get(sizes.form, 4) - 1) * rescored * stored if name == WIDE else 0.0
        part = corpus_bytes(sizes.document_tokens, sizes.documents, sizes.dim, SCANS[name]) / max(1, stored) + rescored
        more = rescored_work(name, sizes, rates, k)
        stored, cold = int(part * stored), part * cold
    unit, host = ("GPU", "host") if gpu else ("CPU", "CPU")
    if name in READ_TWICE:  # the corpus is read for its scale before anything is scored
        read = [_stage("", "", stored, rates.host), _stage("", "", min(cold, stored), rates.disk)]
        read += [_stage("", "", stored, rates.link, share)] if gpu else []
        slowest = max(read, key=lambda stage: float("inf") if stage.seconds is None else stage.seconds)
        yield replace(slowest, name="corpus scale", resource="alone", amount=stored)
        cold -= min(cold, stored)
    yield _stage("disk", "disk", cold, rates.disk)
    yield _stage("host copy", host, stored, rates.host)
    if gpu:
        yield _stage("link", "link", stored + widened, rates.link, share)
    if (path is None or path.prepare is not None) and name not in SCANS:
        yield _stage("prepare", unit, stored, path.prepare if path else None, share)
    work = operations(sizes.query_tokens, sizes.document_tokens, sizes.dim) * (1.0 + more)
    yield _stage("score", unit, work, path.score if path else None, share)
    yield _stage("top-k", unit, sizes.queries * sizes.documents, rates.topk, share)
    if rows:
        yield _stage("kept scores", "output", rows * sizes.documents * 4, rates.output)
    if processes > 1:
        merged = merge_bytes(processes, sizes.queries, min(k, sizes.documents))
        yield _stage("merge", "alone", merged, rates.network or rates.host)
