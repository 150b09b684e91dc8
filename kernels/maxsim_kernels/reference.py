"""The truth: MaxSim in plain chunked torch, TF32 off, sharing no arithmetic with any fast path.

Matrix products of one shape, maxima, sums: the paper's chunked FP32 einsum (appendix 'Benchmarking Protocol'), differentiable by
autograd alone. `dtype=torch.float64` gives the truth for tests; `torch.float32` is the toolkit's `fp32` path.

Documents of similar length go through a product together, each as a slab of as many rows as its class of lengths has; rows beyond a
document's own repeat its last token, which changes no maximum. How many slabs a product has and how long they are depends on the
document's length and the number of query tokens only, a row of a product does not depend on its place in it, and sums are taken in a
fixed order: so a score does not depend on where the document stands, on its neighbours, or on how the corpus is cut.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxsim_kernels import fallback
from maxsim_kernels.checks import Call, Documents, Options, check_padded, check_rows, validate
from maxsim_kernels.coded import BitTokens, CodedTokens, ResidualTokens, plain_of
from maxsim_kernels.modes import under_autocast
from maxsim_kernels.quantize import quantize_fp8, quantize_int8
from maxsim_kernels.tokens import FLOAT_DTYPES, Fp8Tokens, Int8Tokens, Packed, distinct_rows

_DOCUMENT_ROWS = 4096  # of one product; a longer document takes several
_QUERY_ROWS = 4096
# Both sides of a product take whole runs of rows: libraries give what is left over to other kernels, which add in another order.
_PADDED_ROWS = 64
_SLABS = 8  # documents of a product come in whole eights, of whole eights of rows each
_PRODUCT_ROWS = {"cpu": 1024, "cuda": 16384}  # about what a product has of document rows where it has several documents
_FEW = 128  # query rows, up to which a GPU's time is launches above all: products of _FEW_ROWS tokens of any documents
_FEW_ROWS = 131072
_HELD_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}  # of maxima that wait to be summed
_SUMMED_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}  # of them that are summed at once, which holds three times as much
_MAXIMA = 2  # times as many bytes of maxima one product may have: with very many query tokens it has fewer documents


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64; where it does not, sums are taken on the host."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


@contextmanager
def true_precision() -> Iterator[None]:
    """Run matrix products in the precision of their inputs: no TF32, no BF16 shortcut, no autocast.

    Under `torch.compile` the settings cannot be switched inside the graph: those of the moment it runs hold there.
    """
    if torch.compiler.is_compiling():
        yield
        return
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def maxsim_reference(
    queries: Tensor | Packed,
    documents: Documents | CodedTokens,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    document_lengths: Tensor | None = None,
    return_argmax: bool = False,
    quantize_queries: bool = True,
    backward: str = "auto",
    impl: str = "auto",
    pairs: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """MaxSim scores in `dtype`, computed in `dtype` from the inputs as they are.

    Args: as `maxsim` (`pairs=True`: as `maxsim_pairs`); `backward` and `impl` are checked and change nothing, so that a call can
    be swapped for this one. Quantised and coded documents are dequantised in full, and queries quantised and
    dequantised when `quantize_queries`, so the result is the truth for those codes. Differentiable in float inputs.
    """
    options = Options(
        query_mask, document_mask, query_lengths, document_lengths, return_argmax, quantize_queries, backward, impl, pairs
    )
    if isinstance(documents, ResidualTokens):
        queries = queries.to(torch.float32)  # as the decoded tokens are
    if isinstance(documents, BitTokens | ResidualTokens):
        documents = plain_of(documents)
    return score(*under_autocast(queries, documents), options, dtype)


def score(
    queries: Tensor | Packed, documents: Documents, options: Options, dtype: torch.dtype = torch.float32
) -> Tensor | tuple[Tensor, Tensor]:
    """`maxsim_reference` of options that travel together."""
    if isinstance(documents, Int8Tokens | Fp8Tokens):
        plain: Tensor | Packed = documents.dequantize(torch.float64 if dtype == torch.float64 else torch.float32)
        if options.quantize_queries:
            queries = _requantized(queries, isinstance(documents, Fp8Tokens), options.query_mask, options.query_lengths)
        values = plain.values if isinstance(plain, Packed) else plain
        queries = queries.to(values.dtype)
    else:
        plain = documents
    call = validate(queries, plain, options, dtypes=(*FLOAT_DTYPES, torch.float64))
    if dtype == torch.float64 and not has_float64(call.queries.device):
        raise ValueError(f"dtype: got torch.float64, which {call.queries.device.type} devices do not have, need torch.float32")
    with true_precision():
        scores, argmax = _scores_of(call, dtype)
    if call.queries.requires_grad or call.documents.requires_grad:
        # A sum of nothing ties the scores to the inputs, so that "no valid token anywhere" has a gradient too: zero.
        scores = scores + (call.queries.flatten()[:0].sum() + call.documents.flatten()[:0].sum()).to(dtype)
    if call.single_query:
        scores, argmax = scores[0], argmax[0]
    return (scores, argmax) if call.winners else scores


def _requantized(queries: Tensor | Packed, fp8: bool, mask: Tensor | None, lengths: Tensor | None) -> Tensor | Packed:
    """Queries as the quantised paths see them: one scale a token, whatever the documents' granularity."""
    quantize = quantize_fp8 if fp8 else quantize_int8
    return quantize(queries, "token", mask=mask, lengths=lengths).dequantize()


@dataclass(frozen=True)
class _Rows:
    """Where the valid tokens of one side lie: row n has `lengths[n]` of them, the rows `index[starts[n] + i]` of `values`."""

    values: Tensor  # [T, d]
    index: Tensor | None  # [V]; None: 0, 1, 2, ...
    starts: Tensor  # [N], on the values' device
    lengths: Tensor  # [N], the same
    size: int  # of the longest row, padding included
    padded: int | None  # rows between two row's beginnings where positions are not 0, 1, 2, ...: masks leave holes
    each: int | None = None  # tokens of every row, where all have as many by their shape
    end_to_end: bool = False  # row n + 1 begins where row n ends, and row 0 at 0
    counts: np.ndarray | None = None  # `lengths` on the host, where they are known there

    def part(self, first: int, last: int) -> _Rows:
        """Rows `first` to `last`, of the same values."""
        if first == 0 and last >= self.lengths.shape[0]:
            return self
        counts = None if self.counts is None else self.counts[first:last]
        return replace(self, starts=self.starts[first:last], lengths=self.lengths[first:last], end_to_end=False, counts=counts)

    def host(self) -> np.ndarray:
        """The lengths `[N]` on the host."""
        return self.lengths.cpu().numpy() if self.counts is None else self.counts

    def place(self, found: Tensor) -> Tensor:
        """Positions in their rows of tokens that are given as numbers of valid tokens (counted over all rows)."""
        assert self.index is not None
        assert self.padded is not None
        return self.index[found] % self.padded


def _rows(
    name: str, values: Tensor, starts: Tensor | None, lengths: Tensor | None, mask: Tensor | None, end_to_end: bool = False
) -> _Rows:
    device = values.device
    if starts is not None:
        assert lengths is not None
        counts = check_rows(name, starts, lengths, values.shape[0])
        longest, rows = int(counts.max(initial=0)), (starts.to(torch.int64), lengths.to(torch.int64))
        return _Rows(values, None, *rows, longest, None, end_to_end=end_to_end, counts=counts)
    check_padded(name, mask, lengths, values.shape[-2])
    count, size = values.shape[:2]
    if mask is None and lengths is None:
        starts = torch.arange(count, device=device) * size
        return _Rows(
            values.reshape(count * size, values.shape[-1]), None, starts, torch.full_like(starts, size), size, None, size, True
        )
    valid = torch.ones(count, size, dtype=torch.bool, device=device) if mask is None else mask != 0
    if lengths is not None:
        valid = valid & (torch.arange(size, device=device) < lengths[:, None])
    each = valid.sum(1)
    flat = values.reshape(count * size, values.shape[-1])
    return _Rows(flat, valid.reshape(-1).nonzero()[:, 0], each.cumsum(0) - each, each, size, max(size, 1))


@dataclass(frozen=True)
class _Asked:
    """Every query's valid tokens, one behind the other, and where their maxima go in a table of queries by positions."""

    tokens: Tensor  # [R, d], in the dtype of the scores
    slots: Tensor | None  # [R], cells of the table; None: 0, 1, 2, ... up to the last
    count: int
    width: int  # columns: the longest query, padding included
    which: Tensor | None = None  # [R]: row of `tokens` of each token, where those that repeat are there once

    @property
    def rows(self) -> int:
        """Query tokens, repeated or not."""
        return len(self.tokens if self.which is None else self.which)


def _asked(queries: _Rows, dtype: torch.dtype) -> _Asked:
    """Tokens and places; on a CPU, where nobody asks for gradients, tokens that repeat are taken once."""
    asked = _all_asked(queries, dtype)
    tokens = asked.tokens
    if tokens.device.type != "cpu" or tokens.requires_grad or torch.compiler.is_compiling():
        return asked
    found = distinct_rows(tokens)
    return asked if found is None else replace(asked, tokens=found[0], which=found[1])


def _all_asked(queries: _Rows, dtype: torch.dtype) -> _Asked:
    lengths, width = queries.lengths, queries.size
    if queries.each is not None and queries.each * lengths.shape[0] == queries.values.shape[0]:
        return _Asked(queries.values.to(dtype), None, lengths.shape[0], width)
    if queries.end_to_end and lengths.shape[0] == 1:
        return _Asked(queries.values[:width].to(dtype), None, 1, width)
    if queries.each is None:
        owner = torch.repeat_interleave(lengths)
    else:
        owner = torch.arange(lengths.shape[0], device=lengths.device).repeat_interleave(queries.each)
    within = torch.arange(owner.shape[0], device=owner.device) - (lengths.cumsum(0) - lengths)[owner]
    found = queries.starts[owner] + within
    place = within if queries.padded is None else queries.place(found)
    if queries.end_to_end and queries.values.is_contiguous():
        tokens = queries.values[: len(owner)]
    else:
        tokens = queries.values[found if queries.index is None else queries.index[found]]
    return _Asked(tokens.to(dtype), owner * width + place, lengths.shape[0], width)


def _scores_of(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores `[Nq, N]` (pairs: `[N]`) and argmax, int32, the same plus `[max Lq]` (meaningless when not asked for)."""
    places = call.query_starts, call.query_lengths, call.query_mask
    queries = _rows("query", call.queries, *places, end_to_end=call.queries_end_to_end)
    width = queries.size
    if call.layout == "shared":
        places = call.document_starts, call.document_lengths, call.document_mask
        documents = _rows("document", call.documents, *places, end_to_end=call.end_to_end)
        return _score_rows(_asked(queries, dtype), documents, dtype, call.winners)
    one_by_one = [queries.part(n, n + 1) for n in range(call.query_count)]
    if call.layout == "per_query":
        parts = []
        for n, query in enumerate(one_by_one):
            mask = None if call.document_mask is None else call.document_mask[n]
            lengths = None if call.document_lengths is None else call.document_lengths[n]
            documents = _rows("document", call.documents[n], None, lengths, mask)
            parts.append(_score_rows(_asked(query, dtype), documents, dtype, call.winners))
        shape: tuple[int, ...] = (0, call.document_count)
    else:
        documents = _rows("document", call.documents, call.document_starts, call.document_lengths, call.document_mask)
        parts = [
            _score_rows(_asked(query, dtype), documents.part(n, n + 1), dtype, call.winners, together=False)
            for n, query in enumerate(one_by_one)
        ]
        parts = [(scores[0], argmax[0]) for scores, argmax in parts]
        shape = (0,)
    if not parts:
        empty = torch.zeros(*shape, width, dtype=torch.int32, device=call.documents.device)
        return call.documents.new_zeros(shape, dtype=dtype), empty
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _slab(length: int) -> int:
    """Rows that a document of so many tokens takes: four steps to a doubling, so that few are repeats."""
    step = max(_SLABS, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


def _score_rows(
    asked: _Asked, documents: _Rows, dtype: torch.dtype, return_argmax: bool, together: bool = True
) -> tuple[Tensor, Tensor]:
    """Every query against every document: `[Nq, N]`, `[Nq, N, width]`. `together`: several documents may share a product.

    Where that does not fit into memory, the documents are taken in blocks of half as many, and half again: no score depends on the cut.
    """
    total, device = documents.lengths.shape[0], documents.values.device
    parts: list[tuple[Tensor, Tensor]] = []
    block, first = total, 0
    while first < total or not parts:
        try:
            parts.append(_score_block(asked, documents.part(first, first + block), dtype, return_argmax, together))
            first += block
            continue
        except RuntimeError as error:  # a CPU's allocator has no class of its own
            exhausted = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if not exhausted or block < 2:
                raise
        block = -(-block // 2)  # out here, where the failed attempt holds no memory any more
        fallback.say_once(f"out of memory on {device}: the reference goes on with fewer documents at once (slower)")
    if len(parts) == 1:
        return parts[0]
    scores, argmax = zip(*parts, strict=True)
    return torch.cat(scores, 1), torch.cat(argmax, 1) if return_argmax else argmax[0]


def _score_block(
    asked: _Asked, documents: _Rows, dtype: torch.dtype, return_argmax: bool, together: bool
) -> tuple[Tensor, Tensor]:
    """`_score_rows` of documents whose scores fit into memory."""
    total, device, rows = documents.lengths.shape[0], documents.values.device, asked.tokens.shape[0]
    if not rows or not total:
        argmax = torch.full((asked.count, total, asked.width) if return_argmax else (asked.count, 0), -1, dtype=torch.int32)
        return torch.zeros(asked.count, total, dtype=dtype, device=device), argmax.to(device)
    track = return_argmax or asked.tokens.requires_grad or documents.values.requires_grad
    if device.type == "cuda" and rows <= _FEW and together and not track:
        return _few(asked, documents, dtype), torch.zeros(asked.count, 0, dtype=torch.int32, device=device)
    product = _of(_PRODUCT_ROWS, device) if together else 0
    held_bytes = _of(_HELD_BYTES, device)
    most = max(_SLABS, _MAXIMA * held_bytes // (rows * dtype.itemsize))  # documents of a product
    if documents.each is None:
        order, spans = _grouped(documents.host(), product, most)
        taken = torch.from_numpy(order)
        back = torch.empty(total, dtype=torch.int64)
        back[taken] = torch.arange(len(order))  # of a document's repeats any
        taken, back = taken.to(device), back.to(device)
    else:
        height, count = _shape(_slab(documents.each), product, total, most)
        spans = [(0, -(-total // count) * count, height, count)]
        taken, back = torch.arange(spans[0][1], device=device).clamp_max(total - 1), torch.arange(total, device=device)
    starts, last = documents.starts[taken], documents.lengths[taken] - 1
    scores, winners, first = [], [], 0
    held: list[tuple[Tensor, Tensor]] = []  # maxima that wait to be summed, where gradients or places are asked for
    blocks = [_whole(block).t() for block in asked.tokens.split(_QUERY_ROWS)]
    columns = torch.arange(max(slab for *_, slab, _ in spans), device=device)
    room = None if track else _room(spans, blocks, rows, held_bytes)
    products = [(start, start + count, slab) for begin, end, slab, count in spans for start in range(begin, end, count)]
    for (start, end, slab), (_, after, _) in zip(products, [*products[1:], (0, sys.maxsize, 0)], strict=True):
        those = starts[start:end], last[start:end]
        if room is None:
            held.append(_maxima(blocks, rows, documents, those, columns[:slab]))
        else:
            _fill(room[0][start - first : end - first], room[1], blocks, documents, those, columns[:slab])
        if (after - first) * rows * dtype.itemsize <= held_bytes:
            continue  # there is room for the next product's
        if room is None:
            best, number = (torch.cat(side) if len(held) > 1 else side[0] for side in zip(*held, strict=True))
        else:
            best = room[0][: end - first]
        scores.append(_summed(best, asked))
        if return_argmax:
            winners.append(_placed(number, starts[first:end], last[first:end], asked, documents))
        held, first = [], end
    argmax = torch.cat(winners, 1)[:, back] if return_argmax else torch.zeros(asked.count, 0, dtype=torch.int32, device=device)
    return torch.cat(scores, 1)[:, back], argmax


def _few(asked: _Asked, documents: _Rows, dtype: torch.dtype) -> Tensor:
    """Few query tokens against every document: `[Nq, N]`. All products have one shape; a maximum is of a document's own rows."""
    lengths = documents.host()
    block = _whole(asked.tokens).t()
    most = _of(_HELD_BYTES, block.device) // (block.shape[1] * dtype.itemsize)
    ends = np.cumsum(lengths)
    scores: list[Tensor] = []
    best: list[Tensor] = []  # maxima that wait to be summed
    begin = waiting = 0
    while begin < len(lengths):
        before = int(ends[begin - 1]) if begin else 0
        end = max(int(np.searchsorted(ends, before + most, "right")), begin + 1)
        rows, sizes = int(ends[end - 1]) - before, documents.lengths[begin:end]
        if documents.end_to_end:
            values = documents.values[before : before + rows]
        else:
            shift = documents.starts[begin:end] - sizes.cumsum(0) + sizes
            found = torch.arange(rows, device=sizes.device) + torch.repeat_interleave(shift, sizes, output_size=rows)
            values = documents.values[found if documents.index is None else documents.index[found]]
        products = block.new_empty(-(-rows // _FEW_ROWS) * _FEW_ROWS, block.shape[1])
        for first in range(0, rows, _FEW_ROWS):
            # A copy in any case: where rows begin in memory must not choose the library's kernel. Zeros fill the last product.
            tokens = values[first : first + _FEW_ROWS].to(dtype, copy=True)
            if len(tokens) < _FEW_ROWS:
                tokens = torch.nn.functional.pad(tokens, (0, 0, 0, _FEW_ROWS - len(tokens)))
            torch.mm(tokens, block, out=products[first : first + _FEW_ROWS])
        best.append(torch.segment_reduce(products[:rows], "max", lengths=sizes, initial=-torch.inf, unsafe=True))
        if end == len(lengths) or end - waiting >= most:
            scores.append(_summed(torch.cat(best)[:, : asked.tokens.shape[0]], asked))
            best, waiting = [], end
        begin = end
    return torch.cat(scores, 1) if len(scores) > 1 else scores[0]


def _of(sizes: dict[str, int], device: torch.device) -> int:
    return sizes.get(device.type, sizes["cuda"])


def _shape(slab: int, product: int, total: int, most: int) -> tuple[int, int]:
    """Rows a document and documents a product, `most` at most; of slabs without a row up to all `total` at once."""
    count = min(product // slab, most) // _SLABS * _SLABS if slab else min(total, most)
    return (slab, count) if count else (-(-slab // _PADDED_ROWS) * _PADDED_ROWS, 1)  # one alone, in whole runs of rows


def _grouped(lengths: np.ndarray, product: int, most: int) -> tuple[np.ndarray, list[tuple[int, int, int, int]]]:
    """Documents in the order in which they are scored, and spans of it (begin, end, rows a slab, documents a product).

    A span's documents fill whole products: the last one is repeated where there are too few. The first span holds documents without
    a token, as slabs of no row.
    """
    slabs = np.array([_slab(length) for length in range(int(lengths.max()) + 1)])[lengths]
    order, spans = [], []
    begin = 0
    for slab in np.unique(slabs).tolist():
        members = np.flatnonzero(slabs == slab)
        height, count = _shape(slab, product, len(members), most)
        members = np.pad(members, (0, -len(members) % count), mode="edge")
        order.append(members)
        spans.append((begin, begin + len(members), height, count))
        begin += len(members)
    return np.concatenate(order), spans


class _Product(torch.autograd.Function):
    """A matrix product whose gradients are in true precision too: they are computed when somebody asks, under other settings."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return left @ right

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        with true_precision():
            return (
                upstream @ right.t() if ctx.needs_input_grad[0] else None,
                left.t() @ upstream if ctx.needs_input_grad[1] else None,
            )


def _room(spans: list[tuple[int, int, int, int]], blocks: list[Tensor], rows: int, held_bytes: int) -> tuple[Tensor, Tensor]:
    """Memory that is used again and again: for the maxima that wait to be summed `[n, R]`, and for one product, flat."""
    documents = max(held_bytes // (rows * blocks[0].itemsize), *(count for *_, count in spans))
    heights = [count * slab if count > 1 else min(slab, _DOCUMENT_ROWS) for *_, slab, count in spans]
    product = max(heights) * max(block.shape[1] for block in blocks)
    return blocks[0].new_empty(min(documents, spans[-1][1]), rows), blocks[0].new_empty(product)


def _pieces(documents: _Rows, held: tuple[Tensor, Tensor], columns: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Which tokens of each document of a product, and their vectors `[n, tokens, d]`: in one piece, or a long document in several.

    `held`: the documents' beginnings and last tokens; `columns` 0, 1, ... up to the rows of a slab.
    """
    starts, last = held
    for part in columns.split(_DOCUMENT_ROWS if len(starts) == 1 else len(columns)):
        found = torch.minimum(part, last[:, None]) + starts[:, None]
        found = found if documents.index is None else documents.index[found]
        yield part, documents.values[found]


def _fill(
    table: Tensor, room: Tensor, blocks: list[Tensor], documents: _Rows, held: tuple[Tensor, Tensor], columns: Tensor
) -> None:
    """Maximum over each document's tokens for each query token, into `table` `[n, R]`; `room` is for the product."""
    if not len(columns):
        table.fill_(-torch.inf)
        return
    for part, (_, tokens) in enumerate(_pieces(documents, held, columns)):
        left = tokens.flatten(0, 1).to(table.dtype)
        for block, best in zip(blocks, table.split(_QUERY_ROWS, 1), strict=True):
            product = room[: len(left) * block.shape[1]].view(len(left), -1)
            torch.mm(left, block, out=product)
            here = product.view(*tokens.shape[:2], -1).amax(1)[:, : best.shape[1]]
            best.copy_(torch.maximum(best, here) if part else here)


def _maxima(
    blocks: list[Tensor], rows: int, documents: _Rows, held: tuple[Tensor, Tensor], columns: Tensor
) -> tuple[Tensor, Tensor]:
    """As `_fill`, differentiable: `[n, R]` values, and which of the valid tokens each is, `[n, R]`."""
    if not len(columns):
        empty = torch.full((len(held[0]), rows), -torch.inf, dtype=blocks[0].dtype, device=columns.device)
        return empty, torch.zeros_like(empty, dtype=torch.int64)
    best: list[Tensor] = []
    index: list[Tensor] = []
    for part, tokens in _pieces(documents, held, columns):
        left = tokens.flatten(0, 1).to(blocks[0].dtype)
        for n, block in enumerate(blocks):
            here, where = _Product.apply(left, block).view(*tokens.shape[:2], -1).max(1)  # the first of equals, NaN before any
            where = where + part[0]
            if n == len(best):
                best.append(here)
                index.append(where)
                continue
            later = (here > best[n]) | (torch.isnan(here) & ~torch.isnan(best[n]))
            best[n], index[n] = torch.where(later, here, best[n]), torch.where(later, where, index[n])
    return _beside(best, rows), _beside(index, rows)


def _beside(blocks: list[Tensor], rows: int) -> Tensor:
    """The columns of all query blocks side by side, without the padding of the last."""
    return (torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0])[:, :rows]


def _spread(best: Tensor, asked: _Asked, fill: float) -> Tensor:
    """Columns by query, `[n, Nq, width]`, `fill` where a query has no token."""
    best = best if asked.which is None else best[:, asked.which]
    if asked.slots is None:
        return best.reshape(-1, asked.count, asked.width)
    spread = torch.full((best.shape[0], asked.count * asked.width), fill, dtype=best.dtype, device=best.device)
    return spread.index_copy(1, asked.slots, best).view(-1, asked.count, asked.width)


def _summed(best: Tensor, asked: _Asked) -> Tensor:
    """Sums over each query's tokens `[Nq, n]`: in float64, by halves, so that their order is one whatever stands beside them."""
    most = max(1, _of(_SUMMED_BYTES, best.device) // max(1, asked.count * asked.width * best.dtype.itemsize))
    if len(best) > most:
        return torch.cat([_summed(part, asked) for part in best.split(most)], 1)
    terms = _spread(best, asked, 0.0)
    terms = terms.to(torch.float64) if has_float64(best.device) else terms.to("cpu", torch.float64)
    while terms.shape[2] > 1:
        half, odd = divmod(terms.shape[2], 2)
        paired = terms[..., :half] + terms[..., half : 2 * half]
        terms = torch.cat([paired, terms[..., 2 * half :]], 2) if odd else paired
    sums = terms[..., 0].to(best.dtype).to(best.device).t()
    return sums.masked_fill(sums.isnan(), torch.nan)  # of one sign


def _placed(number: Tensor, starts: Tensor, last: Tensor, asked: _Asked, documents: _Rows) -> Tensor:
    """Winners as positions in their documents, `[Nq, n, width]`; -1 where the query has no token or the document is empty."""
    number = torch.minimum(number, last.clamp_min(0)[:, None])
    if documents.padded is not None and documents.index is not None and documents.index.numel():
        number = documents.place((starts[:, None] + number).clamp_max(documents.index.shape[0] - 1))
    number = torch.where(last[:, None] < 0, -1, number).to(torch.int32)
    return _spread(number, asked, -1).transpose(0, 1)


def _whole(rows: Tensor) -> Tensor:
    """Rows with zero rows behind them, up to a multiple of `_PADDED_ROWS`; a copy where they begin at an odd address."""
    if (
        not torch.compiler.is_compiling()
        and len(rows) % _PADDED_ROWS == 0
        and rows.is_contiguous()
        and rows.data_ptr() % 64 == 0
    ):
        return rows
    return torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % _PADDED_ROWS))
