"""What the streaming benchmark scores: ragged corpora whose tokens come from seeds, kept one at a time in one large pinned buffer.

Tokens are random unit vectors in FP16, made on the device in chunks of a fixed number of tokens with a seed of their own, so that any
process can make any part of a corpus. Lengths are lognormal (sigma 0.5), clipped, and scaled to the mean that is asked for. Of every
query 8 tokens point weakly to tokens of one document, its judged one, so that rankings have a metric that is neither 0 nor 1.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.filling import fill_entry
from maxsim_eval.cache.shards import ShardSpec, shard_name, write_shard
from maxsim_kernels import Int8Tokens, Packed, quantize_int8
from maxsim_kernels.tokens import Granularity

SHORTEST, SPREAD = 16, 0.5  # tokens of the shortest document; sigma of the logarithm of lengths
NEAR, STRENGTH = 8, 0.37  # query tokens that point to the judged document; how strongly (a cosine of about 0.35)
KEY = "0" * 64  # of the stored entry: made from seeds, not encoded
QUANTIZED_AT_ONCE = 8192  # documents
WRITERS = 8


@dataclass(frozen=True)
class Sizes:
    """How much the rows hold."""

    hotpot: int = 500_000  # documents of the HotpotQA shape
    hotpot_mean: float = 120.0
    nq: tuple[int, ...] = (100_000, 500_000, 2_680_000)  # documents streamed, the last one timed
    nq_part: int = 268_000  # of which this many are kept and cycled
    nq_mean: float = 169.0
    longest: int = 300
    pages: int = 750_000
    pages_part: int = 65_536
    page_tokens: int = 1024
    queries: int = 500
    few: int = 32
    query_tokens: int = 32
    page_query_tokens: int = 1024
    k: int = 100
    dim: int = 128
    judged: int = 20_000  # documents among which the judged ones lie
    chunk: int = 1 << 20  # tokens of one seed
    arena: int = 1 << 34  # bytes of pinned memory; torch rounds such sizes up to a power of two
    block: int = 128 << 20  # the most that the operator moves at once
    blocks: tuple[int, ...] = tuple(size << 20 for size in (32, 64, 128, 256, 512))
    budgets: tuple[int, ...] = tuple(size << 20 for size in (256, 512, 1024, 2048, 4096))
    budget: int = 4 << 30  # GPU memory given to the NQ and ColPali shapes
    read: int = 4 << 30  # bytes of the plain file, and of copies on the host
    side: int = 8192  # of the library product
    shard: int = 8192  # documents of a stored shard
    cpu: tuple[int, ...] = (5_000, 20_000)  # documents streamed without a GPU


TINY = Sizes(
    hotpot=300, nq=(90, 200, 450), nq_part=120, longest=40, hotpot_mean=24.0, nq_mean=28.0, pages=70, pages_part=30,
    page_tokens=24, queries=6, few=3, query_tokens=9, page_query_tokens=20, k=10, dim=16, judged=60, chunk=512, arena=1 << 20,
    block=16 << 10,
    blocks=(8 << 10, 32 << 10), budgets=(200 << 20, 300 << 20), budget=256 << 20, read=1 << 20, side=64, shard=64, cpu=(80, 160),
)  # fmt: skip


def lognormal(count: int, mean: float, longest: int, seed: int) -> Tensor:
    """`[count]` int64 lengths within SHORTEST..longest whose mean is `mean` to a thousandth or so."""
    base = torch.empty(count).log_normal_(0.0, SPREAD, generator=torch.Generator().manual_seed(seed))
    low, high = 0.0, 4.0 * longest
    for _ in range(40):
        middle = (low + high) / 2
        lengths = (base * middle).round_().clamp_(SHORTEST, longest)
        low, high = (middle, high) if float(lengths.mean(dtype=torch.float64)) < mean else (low, middle)
    return lengths.long()


def chunk_of(seed: int, number: int, tokens: int, dim: int, device: torch.device) -> Tensor:
    """`[tokens, dim]` FP16 unit vectors: chunk `number` of a corpus."""
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + number)
    values = torch.randn(tokens, dim, device=device, generator=generator)
    return torch.nn.functional.normalize(values, dim=1).half()


@dataclass(frozen=True)
class Corpus:
    """Documents `start .. start + N` of a seeded corpus."""

    name: str
    lengths: Tensor  # [N] int64
    dim: int
    seed: int
    chunk: int
    first: int = 0  # token of the whole corpus where these begin

    @cached_property
    def offsets(self) -> Tensor:
        """`[N + 1]` int64 within these documents' tokens."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    @property
    def documents(self) -> int:
        """How many documents there are, N."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.offsets[-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in FP16."""
        return 2 * self.dim

    def part(self, start: int, stop: int) -> Corpus:
        """Documents start to stop."""
        return replace(self, lengths=self.lengths[start:stop], first=self.first + int(self.offsets[start]))

    def fill(self, out: Tensor, device: torch.device) -> None:
        """Write these documents' tokens into `out` `[tokens, dim]` on any device."""
        done = 0
        while done < len(out):
            number, skip = divmod(self.first + done, self.chunk)
            made = chunk_of(self.seed, number, self.chunk, self.dim, device)[skip : skip + len(out) - done]
            out[done : done + len(made)].copy_(made)
            done += len(made)


def hotpot(sizes: Sizes) -> Corpus:
    """500K documents of log-normal lengths, 120 tokens on average as in the paper's HotpotQA subset."""
    lengths = lognormal(sizes.hotpot, sizes.hotpot_mean, sizes.longest, 1)
    return Corpus("hotpotqa", lengths, sizes.dim, 11, sizes.chunk)


def nq(sizes: Sizes) -> Corpus:
    """The tenth of NQ's volume that is kept and cycled."""
    return Corpus("nq", lognormal(sizes.nq_part, sizes.nq_mean, sizes.longest, 2), sizes.dim, 12, sizes.chunk)


def pages(sizes: Sizes) -> Corpus:
    """The part of the ColPali pages that is kept and cycled."""
    lengths = torch.full((sizes.pages_part,), sizes.page_tokens, dtype=torch.int64)
    return Corpus("colpali", lengths, sizes.dim, 13, sizes.chunk)


def judged(count: int, within: int) -> Tensor:
    """`[count]` int64: the judged document of each query, spread over the first `within`."""
    return torch.arange(count) * (within // count)


def questions(corpus: Corpus, count: int, tokens: int, within: int, device: torch.device) -> Tensor:
    """`[count, tokens, dim]` FP16 unit vectors; some of each query's tokens lean towards its judged document's."""
    begin = corpus.part(0, within)
    values = torch.empty(begin.tokens, corpus.dim, dtype=torch.float16, device=device)
    begin.fill(values, device)
    chosen = judged(count, within)
    rows = begin.offsets[chosen][:, None] + torch.arange(min(NEAR, tokens)) % begin.lengths[chosen][:, None]
    generator = torch.Generator(device).manual_seed(corpus.seed * 7 + count)
    made = torch.randn(count, tokens, corpus.dim, device=device, generator=generator)
    made[:, :NEAR] += STRENGTH * corpus.dim**0.5 * values[rows.to(device)].float()
    return torch.nn.functional.normalize(made, dim=-1).half()


class Arena:
    """One buffer in host memory, pinned where there is a GPU, that holds the tokens of one corpus at a time."""

    def __init__(self, size: int, device: torch.device) -> None:
        start = time.perf_counter()
        self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.seconds = time.perf_counter() - start
        self._device, self._held = device, ("", 0, 0)

    def rows(self, count: int, dim: int, dtype: torch.dtype) -> Tensor:
        """The first `count` rows of `dim` values as a tensor."""
        size = count * dim * dtype.itemsize
        if size > self.bytes.numel():
            raise ValueError(f"arena: got {size} bytes to hold, need at most {self.bytes.numel()}")
        return self.bytes[:size].view(dtype).view(count, dim)

    def scratch(self, size: int) -> Tensor:
        """`[size]` bytes that the caller may change."""
        self._held = ("", 0, 0)
        return self.rows(size, 1, torch.uint8).view(-1)

    def hold(self, corpus: Corpus) -> Tensor:
        """`[tokens, dim]` FP16 of a corpus, made unless the buffer holds them (or more, from the same document on)."""
        values = self.rows(corpus.tokens, corpus.dim, torch.float16)
        name, first, tokens = self._held
        if (name, first) != (corpus.name, corpus.first) or tokens < corpus.tokens:
            self._held = ("", 0, 0)
            corpus.fill(values, self._device)
            self._held = (corpus.name, corpus.first, corpus.tokens)
        return values


def cuts(offsets: Tensor, most: int) -> list[tuple[int, int]]:
    """Runs of whole documents of at most `most` tokens each (of one document, where that is longer)."""
    found, start = [], 0
    while start < len(offsets) - 1:
        stop = int(torch.searchsorted(offsets, offsets[start] + most, right=True)) - 1
        found.append((start, max(stop, start + 1)))
        start = found[-1][1]
    return found


def pieces(values: Tensor, offsets: Tensor, block: int, documents: int | None = None) -> Iterator[Packed]:
    """`Packed` views of at most `block` bytes, from the first document again and again until `documents` have gone by."""
    whole = [packed(values, offsets, *cut) for cut in cuts(offsets, max(1, block // (values.shape[1] * values.element_size())))]
    left = len(offsets) - 1 if documents is None else documents
    while left > 0:
        for piece in whole:
            if len(piece) >= left:
                assert piece.offsets is not None
                yield packed(piece.values, piece.offsets, 0, left)
                return
            yield piece
            left -= len(piece)


def packed(values: Tensor, offsets: Tensor, start: int, stop: int) -> Packed:
    """Documents start to stop."""
    first, last = int(offsets[start]), int(offsets[stop])
    return Packed(values[first:last], offsets[start : stop + 1] - first)


class Codes:
    """A corpus in INT8 in host memory: codes in an arena of their own, scales beside them, one granularity at a time."""

    def __init__(self, arena: Arena, corpus: Corpus, device: torch.device) -> None:
        self.values = arena.rows(corpus.tokens, corpus.dim, torch.int8)
        self.scales = torch.empty(corpus.tokens, dtype=torch.float16, pin_memory=device.type == "cuda")
        self.offsets, self.granularity, self._device = corpus.offsets, "", device

    def hold(self, tokens: Tensor, granularity: Granularity) -> None:
        """Quantise FP16 `tokens` `[T, d]` in host memory on the device, a few thousand documents at once."""
        for start in range(0, len(self.offsets) - 1, QUANTIZED_AT_ONCE):
            stop = min(start + QUANTIZED_AT_ONCE, len(self.offsets) - 1)
            made = quantize_int8(packed(tokens, self.offsets, start, stop).to(self._device), granularity)
            self.values[int(self.offsets[start]) : int(self.offsets[stop])].copy_(made.token_values)
            rows = self._rows(start, stop, granularity)
            self.scales[rows].copy_(made.scales)
        self.granularity = granularity

    def _rows(self, start: int, stop: int, granularity: str) -> slice:
        return slice(start, stop) if granularity == "document" else slice(int(self.offsets[start]), int(self.offsets[stop]))

    def piece(self, start: int, stop: int) -> Int8Tokens:
        """Documents start to stop as views."""
        kind: Granularity = "document" if self.granularity == "document" else "token"
        rows = self._rows(start, stop, kind)
        return Int8Tokens(packed(self.values, self.offsets, start, stop), self.scales[rows], granularity=kind)

    def pieces(self, block: int) -> Iterator[Int8Tokens]:
        """All documents in views of at most `block` bytes of codes."""
        for start, stop in cuts(self.offsets, max(1, block // self.values.shape[1])):
            yield self.piece(start, stop)

    def moved(self) -> Int8Tokens:
        """Everything on the device."""
        whole = self.piece(0, len(self.offsets) - 1)
        assert isinstance(whole.codes, Packed)
        return Int8Tokens(whole.codes.to(self._device), whole.scales.to(self._device), granularity=whole.granularity)


def store(folder: Path, values: Tensor, corpus: Corpus, shard: int, seconds: float) -> Entry:
    """Write a corpus as an entry of the embedding cache: as many whole shards as fit into `seconds`, at least one.

    Shards are written by several threads with the cache's own writer (checksums, fsync); the entry is then opened as any other is.
    """
    until = time.perf_counter() + seconds
    ids = [f"{number:08d}" for number in range(corpus.documents)]
    starts = range(0, corpus.documents, shard)

    def write(number: int) -> bool:
        if number and time.perf_counter() > until:
            return False
        start, stop = starts[number], min(starts[number] + shard, corpus.documents)
        spec = ShardSpec(KEY, number, start, stop, corpus.dim, "float16")
        write_shard(folder / shard_name(number), spec, ids[start:stop], [packed(values, corpus.offsets, start, stop)])
        return True

    with ThreadPoolExecutor(WRITERS) as pool:
        written = list(pool.map(write, range(len(starts))))
    whole = written.index(False) if False in written else len(written)
    for number in range(whole, len(written)):
        (folder / shard_name(number)).unlink(missing_ok=True)
    return fill_entry(
        folder,
        ids=ids[: min(whole * shard, corpus.documents)],
        key=KEY,
        dtype=torch.float16,
        dim=corpus.dim,
        provenance={"made": "from seeds, by a benchmark"},
        encode=_never,
        documents_per_shard=shard,
        quiet=True,
    )


def _never(start: int, stop: int) -> Packed:
    raise RuntimeError(f"documents {start} to {stop}: their shard was written a moment ago and is missing")


def ranges(offsets: Tensor, count: int) -> Sequence[tuple[int, int]]:
    """`count` contiguous runs of documents with about as many tokens each; some may be empty."""
    tokens = int(offsets[-1])
    bounds = [int(torch.searchsorted(offsets, tokens * number // count)) for number in range(count)]
    return list(zip(bounds, [*bounds[1:], len(offsets) - 1], strict=True))
