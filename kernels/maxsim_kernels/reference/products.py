"""Scores of rows against rows, by matrix products of one shape in true precision.

Documents of similar length go through a product together, each as a slab of as many rows as its class of lengths has; rows beyond a
document's own repeat its last token, which changes no maximum. How many slabs a product has and how long they are depends on the
document's length and the number of query tokens only, a row of a product does not depend on its place in it, and sums are taken in a
fixed order: so a score does not depend on where the document stands, on its neighbours, or on how the corpus is cut. On a CPU a
product is made by one thread: libraries divide it among several at any row, and add the rows at the edges in another order.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxsim_kernels import fallback
from maxsim_kernels.checks import is_plain
from maxsim_kernels.reference.rows import Asked, Rows
from maxsim_kernels.turns import alone, in_turns

_DOCUMENT_ROWS = 4096  # of one product; a longer document takes several
_QUERY_ROWS = 4096
# Both sides of a product take whole runs of rows: libraries give what is left over to other kernels, which add in another order.
_PADDED_ROWS = 64
_SLABS = 8  # documents of a product come in whole eights, of whole eights of rows each
_PRODUCT_ROWS = {"cpu": 1024, "cuda": 16384}  # document rows of a product of several documents, about
_FEW = 128  # query rows, up to which launches take most of a GPU's time: products then take _FEW_ROWS tokens of any documents
_FEW_ROWS = 131072
_HELD_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}  # of maxima that wait to be summed
_SUMMED_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}  # of them that are summed at once, which takes three times as much memory
_PRODUCT_BYTES = 128 << 20  # of products that the threads of a CPU may have at once
_MAXIMA = 2  # one product may have _MAXIMA * _HELD_BYTES of maxima: with very many query tokens it has fewer documents
_PRECISIONS: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
_switching = RLock()
_inside: list[int] = []  # the thread of every block that runs in true precision now
_before: list[str] = []  # what torch's settings were when the first of them began


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64; where it does not, sums are taken on the host."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


@contextmanager
def true_precision() -> Iterator[None]:
    """Run matrix products in the precision of their inputs: no TF32, no BF16 shortcut, no autocast.

    torch's settings are one for all threads: the first block that begins keeps them, the last one that ends brings them back.
    Under `torch.compile` the settings cannot be switched inside the graph: those of the moment it runs hold there.
    """
    if torch.compiler.is_compiling():
        yield
        return
    with _switching:
        if not _inside:
            _before[:] = [setting.fp32_precision for setting in _PRECISIONS]
        _inside.append(get_ident())
        for setting in _PRECISIONS:  # every time: somebody else may have set them meanwhile
            setting.fp32_precision = "ieee"
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        with _switching:
            _inside.remove(get_ident())
            _bring_back()


def _bring_back() -> None:
    """Restore torch's settings, unless a block still needs true precision."""
    if not _inside:
        for setting, value in zip(_PRECISIONS, _before, strict=True):
            setting.fp32_precision = value


def _forked() -> None:
    """In a forked child: it has only the thread that forked, so blocks of other threads will never end there."""
    others = [thread for thread in _inside if thread != get_ident()]
    if others:
        _inside[:] = [get_ident()] * (len(_inside) - len(others))
        _bring_back()
    _switching.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_switching.acquire, after_in_parent=_switching.release, after_in_child=_forked)


def _slab(length: int) -> int:
    """Rows of the slab of a document of `length` tokens: four sizes for each doubling, so that few rows are repeats."""
    step = max(_SLABS, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


def score_rows(
    asked: Asked, documents: Rows, dtype: torch.dtype, return_argmax: bool, together: bool = True
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
    asked: Asked, documents: Rows, dtype: torch.dtype, return_argmax: bool, together: bool
) -> tuple[Tensor, Tensor]:
    """`score_rows` of documents whose scores fit into memory."""
    total, device, rows = documents.lengths.shape[0], documents.values.device, asked.tokens.shape[0]
    if not rows or not total:
        argmax = torch.full(
            (asked.count, total, asked.width) if return_argmax else (asked.count, 0), -1, dtype=torch.int32, device="cpu"
        )
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
        back = torch.empty(total, dtype=torch.int64, device="cpu")
        back[taken] = torch.arange(len(order), device="cpu")  # any of a document's repeats
        taken, back = taken.to(device), back.to(device)
    else:
        height, count = _shape(_slab(documents.each), product, total, most)
        spans = [(0, -(-total // count) * count, height, count)]
        taken, back = torch.arange(spans[0][1], device=device).clamp_max(total - 1), torch.arange(total, device=device)
    starts, last = (places[:, None] for places in (documents.starts[taken], documents.lengths[taken] - 1))
    scores, winners, first = [], [], 0
    held: list[tuple[Tensor, Tensor]] = []  # maxima that wait to be summed, where gradients or places are asked for
    blocks = [_whole(block).t() for block in asked.tokens.split(_QUERY_ROWS)]
    columns = torch.arange(max(slab for *_, slab, _ in spans), device=device)
    room = None if track else _room(spans, blocks, rows, held_bytes)
    filling: list[
        tuple[Tensor, tuple[Tensor, Tensor], Tensor]
    ] = []  # of a table's rows: places of their documents, columns of a slab
    products = [(start, start + count, slab) for begin, end, slab, count in spans for start in range(begin, end, count)]
    for (start, end, slab), (_, after, _) in zip(products, [*products[1:], (0, sys.maxsize, 0)], strict=True):
        those = starts[start:end], last[start:end]
        if room is None:
            held.append(_maxima(blocks, rows, documents, those, columns[:slab]))
        else:
            filling.append((room[0][start - first : end - first], those, columns[:slab]))
        if (after - first) * rows * dtype.itemsize <= held_bytes:
            continue  # there is room for the next product's
        if room is None:
            best, number = (torch.cat(side) if len(held) > 1 else side[0] for side in zip(*held, strict=True))
        else:
            _fill_all(filling, room[1], blocks, documents)
            best, filling = room[0][: end - first], []
        scores.append(_summed(best, asked))
        if return_argmax:
            winners.append(_placed(number, starts[first:end], last[first:end], asked, documents))
        held, first = [], end
    argmax = torch.cat(winners, 1)[:, back] if return_argmax else torch.zeros(asked.count, 0, dtype=torch.int32, device=device)
    return torch.cat(scores, 1)[:, back], argmax


def _few(asked: Asked, documents: Rows, dtype: torch.dtype) -> Tensor:
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
    """Rows of a document and documents of a product, `most` at most (of documents without rows, up to all `total` at once)."""
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
    """A matrix product whose gradients are in true precision too: they are computed later, when torch's settings may be others."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return alone(torch.mm, left, right) if left.device.type == "cpu" and is_plain(left, right) else left @ right

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        with true_precision():
            return (
                upstream @ right.t() if ctx.needs_input_grad[0] else None,
                left.t() @ upstream if ctx.needs_input_grad[1] else None,
            )


def _room(spans: list[tuple[int, int, int, int]], blocks: list[Tensor], rows: int, held_bytes: int) -> tuple[Tensor, int]:
    """Memory for the maxima that wait to be summed `[n, R]`, used again and again, and how many numbers the largest product has."""
    documents = max(held_bytes // (rows * blocks[0].itemsize), *(count for *_, count in spans))
    heights = [count * slab if count > 1 else min(slab, _DOCUMENT_ROWS) for *_, slab, count in spans]
    product = max(heights) * max(block.shape[1] for block in blocks)
    return blocks[0].new_empty(min(documents, spans[-1][1]), rows), product


def _pieces(documents: Rows, held: tuple[Tensor, Tensor], columns: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions in the documents of a product, and the vectors there `[n, tokens, d]`: in one piece, or a long document in several.

    `held`: the documents' beginnings and last tokens, `[n, 1]` each; `columns` 0, 1, ... up to the rows of a slab.
    """
    starts, last = held
    for part in columns.split(_DOCUMENT_ROWS) if len(starts) == 1 else (columns,):
        found = torch.minimum(part, last) + starts
        found = found if documents.index is None else documents.index[found]
        yield part, documents.values[found]


def _fill_all(
    filling: list[tuple[Tensor, tuple[Tensor, Tensor], Tensor]], numbers: int, blocks: list[Tensor], documents: Rows
) -> None:
    """`_fill` tables with documents' maxima, each product in a room of `numbers` numbers: on a CPU by threads, which have one each."""

    def fill(items: Iterable[tuple[Tensor, tuple[Tensor, Tensor], Tensor]]) -> None:
        room = blocks[0].new_empty(numbers)
        for table, held, columns in items:
            _fill(table, room, blocks, documents, held, columns)

    if blocks[0].device.type == "cpu" and is_plain(blocks[0], documents.values):
        in_turns(fill, filling, max(1, _PRODUCT_BYTES // max(1, numbers * blocks[0].itemsize)))
    else:
        fill(filling)


def _fill(
    table: Tensor, room: Tensor, blocks: list[Tensor], documents: Rows, held: tuple[Tensor, Tensor], columns: Tensor
) -> None:
    """Maximum over each document's tokens for each query token, into `table` `[n, R]`; `room` is for the product."""
    if not len(columns):
        table.fill_(-torch.inf)
        return
    tables = table.split(_QUERY_ROWS, 1) if len(blocks) > 1 else (table,)
    for part, (_, tokens) in enumerate(_pieces(documents, held, columns)):
        left = tokens.flatten(0, 1).to(table.dtype)
        for block, best in zip(blocks, tables, strict=True):
            product = room[: len(left) * block.shape[1]].view(len(left), -1)
            torch.mm(left, block, out=product)
            here = product.view(*tokens.shape[:2], -1).amax(1)[:, : best.shape[1]]
            best.copy_(torch.maximum(best, here) if part else here)


def _maxima(
    blocks: list[Tensor], rows: int, documents: Rows, held: tuple[Tensor, Tensor], columns: Tensor
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


def _spread(best: Tensor, asked: Asked, fill: float) -> Tensor:
    """Columns by query, `[n, Nq, width]`, `fill` where a query has no token."""
    best = best if asked.which is None else best[:, asked.which]
    if asked.slots is None:
        return best.reshape(-1, asked.count, asked.width)
    spread = torch.full((best.shape[0], asked.count * asked.width), fill, dtype=best.dtype, device=best.device)
    return spread.index_copy(1, asked.slots, best).view(-1, asked.count, asked.width)


def _summed(best: Tensor, asked: Asked) -> Tensor:
    """Sums over each query's tokens `[Nq, n]`: in float64, by halves, an order that depends on the padded length alone."""
    most = max(1, _of(_SUMMED_BYTES, best.device) // max(1, asked.count * asked.width * best.dtype.itemsize))
    if len(best) > most:
        return torch.cat([_summed(part, asked) for part in best.split(most)], 1)
    terms = _spread(best, asked, 0.0)
    terms = terms.to(torch.float64) if has_float64(best.device) else terms.to("cpu", torch.float64)
    while terms.shape[2] > 1:
        half, odd = terms.shape[2] // 2, terms.shape[2] % 2  # no divmod: traced sizes have none
        paired = terms[..., :half] + terms[..., half : 2 * half]
        terms = torch.cat([paired, terms[..., 2 * half :]], 2) if odd else paired
    sums = terms[..., 0].to(best.dtype).to(best.device).t()
    return sums.masked_fill(sums.isnan(), torch.nan)  # every NaN with one sign


def _placed(number: Tensor, starts: Tensor, last: Tensor, asked: Asked, documents: Rows) -> Tensor:
    """Winners as positions in their documents, `[Nq, n, width]`; -1 where the query has no token or the document is empty."""
    number = torch.minimum(number, last.clamp_min(0))
    if documents.padded is not None and documents.index is not None and documents.index.numel():
        number = documents.place((starts + number).clamp_max(documents.index.shape[0] - 1))
    number = torch.where(last < 0, -1, number).to(torch.int32)
    return _spread(number, asked, -1).transpose(0, 1)


def _whole(rows: Tensor) -> Tensor:
    """Rows with zero rows behind them, up to a multiple of `_PADDED_ROWS`; a copy where they begin at an odd address."""
    if is_plain(rows) and len(rows) % _PADDED_ROWS == 0 and rows.is_contiguous() and rows.data_ptr() % 64 == 0:
        return rows
    return torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % _PADDED_ROWS))
