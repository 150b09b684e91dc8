"""The rows of the streaming benchmark on one device: what is streamed, from where, against which floor."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maxsim_eval.cache.entries import Entry
from maxsim_kernels import Packed, maxsim, maxsim_reference, stream_topk
from maxsim_kernels.reference import true_precision
from maxsim_kernels.tokens import Granularity
from measure.session import RefusedError
from out_of_core.corpora import Arena, Codes, Corpus, hotpot, judged, nq, packed, pages, pieces, questions, store
from out_of_core.link_rates import Link, by_threads, filesystem, machine, moves
from out_of_core.measure import Bench, Known, Stream, differs, expected, floored, known, measure, ordered

READERS = (1, 2, 4, 8)
PAGE_PARTS = (4, 10, 20, 30)  # of thirty: 100K, 250K, 500K and 750K pages
READ_BLOCK = 64 << 20  # bytes of a block that is read from the cache or copied plainly
REFERENCE_SECONDS = 12.0  # that the plain FP32 scorer may take
EINSUM_CELLS = 1 << 30  # FP32 similarities held at once by the padded einsum
Lines = Iterator[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Problem:
    """A corpus, queries `[Nq, Lq, dim]` on the device, and what one pass in memory says."""

    corpus: Corpus
    queries: Tensor
    known: Known

    def work(self, documents: int) -> tuple[int, float, float]:
        """Bytes in FP16, operations (2 a multiply-add) and seconds in memory of streaming so many documents."""
        offsets = self.corpus.offsets
        whole, rest = divmod(documents, self.corpus.documents)
        tokens = whole * self.corpus.tokens + int(offsets[rest])
        operations = 2.0 * self.queries[..., 0].numel() * tokens * self.corpus.dim
        return tokens * self.corpus.row_bytes, operations, self.known.seconds["median_s"] * tokens / self.corpus.tokens


def problem(bench: Bench, corpus: Corpus, queries: Tensor, counts: Iterable[int]) -> Problem:
    """Score a corpus in memory; afterwards only the pinned buffer holds it."""
    values = bench.arena.hold(corpus)
    resident = Packed(values.to(bench.device), corpus.offsets.to(bench.device))
    found = known(bench, queries, resident, counts)
    del resident
    bench.clear()
    return Problem(corpus, queries, found)


def hotpotqa_problem(bench: Bench, queries: int) -> Problem:
    """500K documents and some of the queries; made once."""

    def make() -> Problem:
        sizes, corpus = bench.sizes, bench.once("hotpotqa", lambda: hotpot(bench.sizes))
        asked = questions(corpus, queries, sizes.query_tokens, sizes.judged, bench.device)
        return problem(bench, corpus, asked, (corpus.documents,))

    return bench.once(f"hotpotqa, {queries} queries", make)


def about(held: Problem, documents: int) -> dict[str, Any]:
    """What a row works on."""
    lengths = held.corpus.lengths
    said = {"documents": documents, "kept_documents": len(lengths), "mean_tokens": float(lengths.double().mean())}
    return said | {"queries": held.queries.shape[0], "query_tokens": held.queries.shape[1], "dim": held.corpus.dim}


def streamed(bench: Bench, queries: Tensor, made: Callable[[], Iterable[Any]], **options: Any) -> Stream:
    """A call of the operator on fresh blocks."""
    return lambda: stream_topk(queries, made(), bench.sizes.k, **options)


def line(
    bench: Bench, held: Problem, documents: int, made: Callable[[], Iterable[Any]], link: Link, **options: Any
) -> dict[str, Any]:
    """One stream of FP16 documents against its floor, or why it has no figures."""
    size, operations, memory = held.work(documents)
    answer = held.known.answers[documents]
    try:
        data = measure(bench, streamed(bench, held.queries, made, **options), answer, lambda: link(size))
    except RefusedError as reason:
        return {**about(held, documents), "wrong": str(reason)}
    return about(held, documents) | floored(data, size, operations, data["copy"]["median_s"], memory)


def warm(bench: Bench, queries: Tensor, made: Iterator[Any], **options: Any) -> None:
    """Compile what a stream needs, on its first block."""
    bench.timed(streamed(bench, queries, lambda: [next(made)], **options))


# Rows


def rates(bench: Bench) -> Lines:
    """What the machine gives."""
    yield from machine(bench).items()
    bench.clear()


def hotpotqa(bench: Bench) -> Lines:
    """Stream the HotpotQA shape from pinned memory."""
    held = hotpotqa_problem(bench, bench.sizes.queries)
    values, offsets, block = bench.arena.hold(held.corpus), held.corpus.offsets, bench.sizes.block
    warm(bench, held.queries, pieces(values, offsets, block // 4))
    link = Link(bench, values, block)
    yield "pinned", line(bench, held, held.corpus.documents, lambda: pieces(values, offsets, block), link)


def pageable(bench: Bench) -> Lines:
    """Stream the HotpotQA shape from ordinary memory, through the operator's ring of buffers."""
    held = hotpotqa_problem(bench, bench.sizes.queries)
    pinned, offsets, block = bench.arena.hold(held.corpus), held.corpus.offsets, bench.sizes.block
    values = torch.empty_like(pinned, pin_memory=False)
    by_threads(moves(values, pinned), pinned.nbytes, max(READERS))
    warm(bench, held.queries, pieces(values, offsets, block // 4))
    link = Link(bench, pinned, block)
    for readers in READERS:
        found = line(bench, held, held.corpus.documents, lambda: pieces(values, offsets, block), link, readers=readers)
        yield f"{readers} readers", found


def stored(bench: Bench) -> Lines:
    """Stream the HotpotQA shape from HDF5 files in the page cache, through the toolkit's cache and the ring."""
    whole = bench.once("hotpotqa", lambda: hotpot(bench.sizes))
    folder = bench.folder / "entry"
    seconds, entry = bench.timed(lambda: store(folder, bench.arena.hold(whole), whole, bench.sizes.shard, bench.store_seconds))
    try:
        said = {"seconds": seconds, "bytes": entry.tokens * whole.row_bytes, "shards": len(entry.shards)}
        yield "written", {**said, "documents": entry.documents, "filesystem": filesystem(folder)}
        held = hotpotqa_problem(bench, bench.sizes.queries)
        if entry.documents < whole.documents:
            held = problem(bench, whole.part(0, entry.documents), held.queries, (entry.documents,))
        link = Link(bench, bench.arena.hold(held.corpus), bench.sizes.block)

        def made() -> Iterable[Any]:
            return entry.lazy_blocks(bench.sizes.block)

        bench.host(streamed(bench, held.queries, made))  # every page is in memory from here on
        for readers in READERS:
            yield f"{readers} readers", line(bench, held, entry.documents, made, link, readers=readers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def blocks(bench: Bench) -> Lines:
    """The pinned stream by block size of the caller, and by memory budget for one undivided block."""
    held = hotpotqa_problem(bench, bench.sizes.queries)
    values, offsets = bench.arena.hold(held.corpus), held.corpus.offsets
    documents, link = held.corpus.documents, Link(bench, values, bench.sizes.block)
    for size in bench.sizes.blocks:
        yield f"blocks of {size / 2**20:g} MiB", line(bench, held, documents, partial(pieces, values, offsets, size), link)
    for size in bench.sizes.budgets:
        found = line(bench, held, documents, lambda: [Packed(values, offsets)], link, memory_budget=size)
        yield f"one block, budget of {size / 2**20:g} MiB", found


def int8(bench: Bench) -> Lines:
    """INT8 codes beside FP16 in one run, with all queries and with few (which the link bounds)."""
    sizes = bench.sizes
    held = {count: hotpotqa_problem(bench, count) for count in (sizes.queries, sizes.few)}
    corpus = held[sizes.queries].corpus
    values = bench.arena.hold(corpus)
    codes = Codes(Arena(corpus.tokens * corpus.dim, bench.device), corpus, bench.device)
    link = Link(bench, values, sizes.block)
    small = Link(bench, codes.values, sizes.block)
    granularities: tuple[Granularity, ...] = ("token", "document")
    for count, each in held.items():
        half = line(bench, each, corpus.documents, lambda: pieces(values, corpus.offsets, sizes.block), link)
        yield f"{count} queries, FP16", half
    for granularity in granularities:
        codes.hold(values, granularity)
        for count, each in held.items():
            resident = codes.moved()
            truth = known(bench, each.queries, resident, (corpus.documents,))
            del resident
            bench.clear()
            stream = streamed(bench, each.queries, lambda: codes.pieces(sizes.block))
            name = f"{count} queries, INT8, a scale a {granularity}"
            try:
                data = measure(bench, stream, truth.answers[corpus.documents], small)
            except RefusedError as reason:
                yield name, {**about(each, corpus.documents), "wrong": str(reason)}
                continue
            scales = (corpus.tokens if granularity == "token" else corpus.documents) * codes.scales.element_size()
            size = codes.values.nbytes + scales
            copied = data["copy"]["median_s"] * size / codes.values.nbytes
            operations, memory = each.work(corpus.documents)[1], truth.seconds["median_s"]
            yield name, about(each, corpus.documents) | floored(data, size, operations, copied, memory)


def cycled(bench: Bench, held: Problem, counts: Iterable[int]) -> Lines:
    """Stream a buffer again and again under a memory budget; the last count takes all timed runs, the others one."""
    values, offsets, block = bench.arena.hold(held.corpus), held.corpus.offsets, bench.sizes.block
    link, counts, runs = Link(bench, values, block), list(counts), bench.runs
    warm(bench, held.queries, pieces(values, offsets, block // 4), memory_budget=bench.sizes.budget)
    for count in counts:

        def made(count: int = count) -> Iterator[Packed]:
            return pieces(values, offsets, block, count)

        bench.runs = runs if count == counts[-1] else 1
        try:
            found = line(bench, held, count, made, link, memory_budget=bench.sizes.budget)
        finally:
            bench.runs = runs
        yield f"{count} documents", found | {"cycled": count / held.corpus.documents, "memory_budget": bench.sizes.budget}


def nq_volume(bench: Bench) -> Lines:
    """NQ's volume by a buffer cycled ten times, whose memory is not to grow with the volume."""
    corpus, sizes = nq(bench.sizes), bench.sizes
    asked = questions(corpus, sizes.queries, sizes.query_tokens, min(sizes.judged, corpus.documents), bench.device)
    yield from cycled(bench, problem(bench, corpus, asked, sizes.nq), sizes.nq)


def colpali(bench: Bench) -> Lines:
    """One query of 1024 tokens over up to 750K pages of 1024: the paper's four corpora."""
    corpus, sizes = pages(bench.sizes), bench.sizes
    asked = questions(corpus, 1, sizes.page_query_tokens, 1, bench.device)
    counts = [max(sizes.k, sizes.pages * part // PAGE_PARTS[-1]) for part in PAGE_PARTS]
    yield from cycled(bench, problem(bench, corpus, asked, counts), counts)


def reference(bench: Bench) -> Lines:
    """The FP32 truth and a padded FP32 einsum beside the stream, in blocks of pageable memory, copied and awaited one by one."""
    held = hotpotqa_problem(bench, bench.sizes.queries)
    pinned, offsets, block = bench.arena.hold(held.corpus), held.corpus.offsets, bench.sizes.block
    link = Link(bench, pinned, block)
    ours = line(bench, held, held.corpus.documents, lambda: pieces(pinned, offsets, block), link)
    yield "ours, pinned", ours
    most, begin = held.corpus.documents, min(bench.sizes.judged, held.corpus.documents)
    scorers = {"FP32 reference": scored_truly, "padded FP32 einsum": scored_padded}
    for name, score in scorers.items():
        bench.timed(partial(plain, score, held, pageable_part(pinned, offsets, begin // 20)))
        tried, _ = bench.timed(partial(plain, score, held, pageable_part(pinned, offsets, begin // 4)))
        count = min(most, max(begin, int(REFERENCE_SECONDS / tried * (begin // 4))))
        part = pageable_part(pinned, offsets, count)
        seconds, scores = bench.timed(partial(plain, score, held, part))
        data = {**about(held, count), "median_s": seconds, "whole_s": seconds * held.corpus.tokens / part.values.shape[0]}
        yield name, data | compared(bench, held, scores, part)


def pageable_part(values: Tensor, offsets: Tensor, count: int) -> Packed:
    """The first documents in memory that is not pinned."""
    held = packed(values, offsets, 0, count)
    own = torch.empty_like(held.values, pin_memory=False)
    own.copy_(held.values)
    return held.with_values(own)


def plain(score: Callable[[Tensor, Packed], Tensor], held: Problem, part: Packed) -> Tensor:
    """`[Nq, n]` on the host: copy a block, score it, wait for its scores, as a plain loop does."""
    assert part.offsets is not None
    moved = (piece.to(held.queries.device) for piece in pieces(part.values, part.offsets, READ_BLOCK))
    return torch.cat([score(held.queries, piece).cpu() for piece in moved], 1)


def scored_truly(queries: Tensor, documents: Packed) -> Tensor:
    """The project's FP32 truth: one product a document."""
    found = maxsim_reference(queries, documents, dtype=torch.float32)
    assert isinstance(found, Tensor)
    return found


def scored_padded(queries: Tensor, documents: Packed) -> Tensor:
    """The paper's baseline: documents padded on the device, einsum in FP32, masked maximum."""
    longest, device = int(documents.lengths.max()), queries.device
    rows = documents.starts[:, None] + torch.arange(longest, device=device)
    padding = torch.arange(longest, device=device) >= documents.lengths[:, None]
    padded = documents.values.float()[rows.clamp_(max=len(documents.values) - 1)]
    found = []
    step = max(1, EINSUM_CELLS // (queries[..., 0].numel() * longest))
    with true_precision():
        for some, mask in zip(padded.split(step), padding.split(step), strict=True):
            similarities = torch.einsum("qid,bjd->qbij", queries.float(), some)
            found.append(similarities.masked_fill_(mask[None, :, None], -torch.inf).amax(3).sum(2))
    return torch.cat(found, 1)


def compared(bench: Bench, held: Problem, scores: Tensor, part: Packed) -> dict[str, Any]:
    """Scores, rankings and metrics of a plain scorer on a part against ours on the same part."""
    k, queries = bench.sizes.k, held.queries
    mine = maxsim(queries, part.to(bench.device))
    assert isinstance(mine, Tensor)
    theirs = scores.to(bench.device)
    answer = expected(mine, k, mine.shape[1])
    stream = bench.host(streamed(bench, queries, lambda: [part]))
    if wrong := differs(stream, answer):
        return {"wrong": wrong}
    other = ordered(theirs, k)[1].cpu()
    best = answer[1]
    metrics = {"ours": ndcg(best, bench.sizes.judged), "theirs": ndcg(other, bench.sizes.judged)}
    shared = [len(set(one.tolist()) & set(two.tolist())) for one, two in zip(best, other, strict=True)]
    return {
        "max_difference": float((mine - theirs).abs().max()),
        "same_top_10": int((best[:, :10] == other[:, :10]).all(1).sum()),
        f"same_top_{k}": int((best == other).all(1).sum()),
        "overlap": sum(shared) / (k * len(shared)),
        "ndcg_10": sum(metrics["ours"]) / len(best),
        "ndcg_10_theirs": sum(metrics["theirs"]) / len(best),
        "same_ndcg_10": metrics["ours"] == metrics["theirs"],
    }


def ndcg(ranked: Tensor, within: int) -> list[float]:
    """nDCG@10 of every query, one judged document each."""
    chosen = judged(len(ranked), within)
    places = (ranked[:, :10] == chosen[:, None]).double()
    return (places / torch.arange(2, 2 + places.shape[1]).double().log2()).sum(1).tolist()


def cpu(bench: Bench) -> Lines:
    """Without a GPU: files of two sizes through the reader and the operator; what the process grows by beyond results."""
    own = replace(bench, device=torch.device("cpu"), held={}, arena_bytes=0)
    sizes, counts = own.sizes, own.sizes.cpu
    corpus = hotpot(replace(sizes, hotpot=counts[-1]))
    own.arena_bytes = corpus.tokens * corpus.row_bytes
    asked = questions(corpus, sizes.few, sizes.query_tokens, min(sizes.judged, counts[0]), own.device)
    for count in counts:
        part = corpus.part(0, count)
        held = problem(own, part, asked, (count,))
        folder = own.folder / f"entry {count}"
        entry = store(folder, own.arena.hold(part), part, sizes.shard, own.store_seconds)
        try:
            link = Link(own, own.arena.hold(part), sizes.block)

            def made(entry: Entry = entry) -> Iterable[Any]:
                return entry.lazy_blocks(READ_BLOCK)

            yield f"{count} documents", line(own, held, entry.documents, made, link)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


ROWS: dict[str, tuple[Callable[[Bench], Lines], float]] = {  # and seconds that a row may take: it starts only if they are left
    "hotpotqa": (hotpotqa, 50.0),
    "nq": (nq_volume, 50.0),
    "colpali": (colpali, 50.0),
    "int8": (int8, 50.0),
    "reference": (reference, 50.0),
    "stored": (stored, 120.0),
    "pageable": (pageable, 45.0),
    "blocks": (blocks, 40.0),
    "rates": (rates, 35.0),
    "cpu": (cpu, 120.0),
}
DEFAULT = tuple(name for name in ROWS if name != "cpu")  # which needs no GPU and says nothing about one
