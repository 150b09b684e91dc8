"""Gradients of MaxSim from saved winners on the GPU: unified, atomic, csr (paper section 'Inverse-Grid Update').

With winner t*(q, n, i) of query token i in document n: `dQ[q, i] = sum_n g[q, n] D[n, t*]` is a gather, and
`dD[n, t] = sum of g[q, n] Q[q, i] over (q, i) with t* = t` a scatter that many query tokens contend for. The paths differ in dD:

- "csr": lists of each document token's query tokens (`inverse_grid.py`), summed in order: no atomics, the same bits every time.
  Documents that one query owns need no lists: the 0/1 matrix of who chose what, times the query's rows.
- "atomic": FP32 atomic adds into a buffer of dD's shape, rounded at the end. "unified": the same, from the kernel that makes dQ.

Sums are FP32, rounded once to the inputs' dtype. Nothing here waits for the GPU, and nothing of size `[Nq, N, Lq, Ld]` exists.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import triton
from torch import Tensor

from maxsim_kernels.checks import Layout, check_choice
from maxsim_kernels.gpu.backward.contrast import Contrast, slopes
from maxsim_kernels.gpu.backward.inverse_grid import Grid, Lists, divisor, sorted_entries
from maxsim_kernels.gpu.backward.kernels import _lists_kernel, _own_kernel, _pieces_kernel, _rows_kernel, _sum_kernel
from maxsim_kernels.gpu.backward.saved import GATHER, SCATTER, Saved
from maxsim_kernels.gpu.geometry import hardware
from maxsim_kernels.gpu.launch import call, empty, launch, planned, record, signature, unrecorded
from maxsim_kernels.gpu.plans import Inputs

LIST_BYTES = 11 << 20  # of query tokens listed at once: small enough to stay in the cache beside the queries
_RAGGED_LIST_BYTES = 64 << 20  # the same of packed documents (or a quarter of their size): every turn looks at all rows
_MOST_SORTED = 1 << 26  # winners sorted at once, where documents are views that may overlap
_MOST_ROWS = 1 << 30  # document tokens listed at once
_LIST_BYTES, _LIST_WARPS = 8192, 1  # of rows a program reads at once: one warp starts soonest, 1.8 times as fast as four
_OWN_TOKENS, _OWN_ROWS = 64, 32  # document tokens and query tokens a product holds
_SUMMED = 1024  # values whose parts a program of `_sum_kernel` adds
_FEW_PARTS = 16  # parts that one thread adds up; more are left to torch


def backward(
    grad: Tensor,
    argmax: Tensor,
    queries: Tensor,
    query_starts: Tensor | None,
    documents: Tensor,
    document_starts: Tensor | None,
    layout: Layout,
    need_queries: bool,
    need_documents: bool,
    path: str,
    queries_end_to_end: bool = True,
    documents_end_to_end: bool = True,
    contrast: Contrast | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients in the inputs' dtypes and shapes, contiguous (empty tensors where not needed).

    Args:
        grad: `[Nq, N]` (pairs: `[N]`), of the scores' dtype: float32, or what they were rounded to (widened where it is read).
        argmax: grad's shape + `[W]`: int32, -1 where there is no winner; or int16, the low 16 bits of the same.
        path: "unified", "atomic" or "csr".
        queries_end_to_end, documents_end_to_end: packed rows follow each other in their buffer; otherwise they may overlap.
        contrast: what a contrastive loss of the scores was made of; `grad` is then the gradient above that loss, one number.
    """
    check_choice("path", path, ("unified", "atomic", "csr"))
    inputs: Inputs = (grad.contiguous(), argmax.contiguous(), queries, _plain(query_starts), documents, _plain(document_starts))
    flags = (layout != "shared", need_queries, need_documents, path, queries_end_to_end, documents_end_to_end)
    device = queries.device
    temperature = None if contrast is None else contrast.temperature
    if contrast is not None:
        inputs += contrast[:3]
    key = signature(inputs, "backward", *flags, temperature)
    plan = planned(key) if queries.is_cuda else None
    if plan is not None:
        found = plan.run(inputs, device)
    else:
        inputs = tuple(None if one is None else one.detach() for one in inputs)
        run = partial(_run, inputs, *flags, temperature)
        with torch.cuda.device(device) if queries.is_cuda else nullcontext():
            found = record(key, inputs, device, run) if queries.is_cuda else run()
    if need_queries and need_documents:
        return found
    none = torch.empty(0, dtype=queries.dtype, device=device)
    found = found[0] if isinstance(found, tuple) and found else found
    return (found, none) if need_queries else (none, found if need_documents else none)


def _plain(starts: Tensor | None) -> Tensor | None:
    return None if starts is None else starts.contiguous()


def _run(
    inputs: Inputs,
    owned: bool,
    need_queries: bool,
    need_documents: bool,
    path: str,
    queries_whole: bool,
    documents_whole: bool,
    temperature: float | None,
) -> tuple[Tensor, ...]:
    """The gradients asked for, allocated before anything else (`launch.record`)."""
    grad, argmax, queries, query_starts, documents, document_starts = inputs[:6]
    assert grad is not None
    assert argmax is not None
    assert queries is not None
    assert documents is not None
    wanted = [one for one, need in ((queries, need_queries), (documents, need_documents)) if need]
    results = tuple(empty(tuple(one.shape), one.dtype, one.device) for one in wanted)
    if temperature is not None:
        scores, positives, states = inputs[6:]
        assert scores is not None
        assert states is not None
        above, grad = grad, empty(tuple(scores.shape), torch.float32, scores.device)
        slopes(above, Contrast(scores, positives, states, temperature), grad)
    saved = Saved(
        grad=grad if grad.dim() == 2 else grad[:, None],
        argmax=argmax if argmax.dim() == 3 else argmax[:, None],
        queries=queries,
        query_starts=query_starts,
        documents=documents,
        document_starts=document_starts,
        owned=owned,
    )
    if saved.argmax.numel() == 0 or queries.numel() == 0 or documents.numel() == 0:
        for one in results:
            call(torch.Tensor.zero_, one)
        return results
    sums = None
    if need_documents and path != "csr":
        exact = documents.dtype == torch.float32
        sums = results[-1] if exact else empty(tuple(documents.shape), torch.float32, documents.device)
        call(torch.Tensor.zero_, sums)
    together = need_queries and path == "unified"
    if need_queries:
        _query_gradient(saved, queries_whole, results[0], sums if together else None)
    if sums is not None:
        if not together:
            _launch_rows(saved, None, sums, 1)
        if sums is not results[-1]:
            call(torch.Tensor.copy_, results[-1], sums)
    elif need_documents:
        _listed(saved, documents_whole, results[-1])
    return results


def _query_gradient(saved: Saved, end_to_end: bool, out: Tensor, sums: Tensor | None) -> None:
    """dQ into `out`; with `sums` the same kernel adds dD to it."""
    packed = saved.query_starts is not None
    if packed and not end_to_end:
        _overlapping_queries(saved, out, sums)
        return
    splits = saved.splits()
    if splits == 1:
        if packed:  # rows without a winner are not written
            call(torch.Tensor.zero_, out)
        _launch_rows(saved, out, sums, 1)
        return
    parts = empty((splits, *out.shape), torch.float32, out.device)
    if packed:
        call(torch.Tensor.zero_, parts)
    _launch_rows(saved, parts, sums, splits)
    if splits > _FEW_PARTS:
        call(_sum_into, out, parts)
        return
    size = out.numel()
    launch(_sum_kernel, triton.cdiv(size, _SUMMED), parts, out, size, splits, BLOCK=_SUMMED, warps=4)


def _sum_into(out: Tensor, parts: Tensor) -> None:
    out.copy_(parts.sum(0))


def _overlapping_queries(saved: Saved, out: Tensor, sums: Tensor | None) -> None:
    """dQ of packed queries that may share rows: made for each query by itself, then summed by row, in order."""
    assert saved.query_starts is not None
    unrecorded()
    count, _, size = saved.argmax.shape
    width = saved.queries.shape[-1]
    own = torch.empty((1, count * size, width), dtype=torch.float32, device=out.device)
    _launch_rows(saved, own, sums, 1, apart=True)
    rows = saved.query_starts.long()[:, None] + torch.arange(size, device=out.device)
    total = saved.query_rows
    # Beyond a view's end its rows are zeros, which may be added anywhere; beyond the buffer they have no place.
    grid = sorted_entries(torch.where(rows < total, rows, total).flatten(), total, width)
    held, columns = saved.columns
    marks = _pieces(grid)[-1]
    launch(
        _lists_kernel, (marks + total) * columns,
        own, grid.list, grid.ends, own, own, own, out,
        0, 0, 0, 1, 0, 1, size, 1, 1, columns, 0, 0, width, size * width, width, 1, *_pieces(grid), total, 0,
        FLAT=True, WEIGHTED=False, ADD=False, PACKED_QUERIES=False, RAGGED=False, SPLIT=marks > 0, FIXED=False,
        ENTRIES=_entries(own, held), WIDTH=held, warps=_LIST_WARPS,
    )  # fmt: skip
    _launch_pieces(saved, grid, out, 0, add=False)


def _launch_rows(saved: Saved, out: Tensor | None, sums: Tensor | None, splits: int, apart: bool = False) -> None:
    """dQ into `out` `[splits, rows, d]`, dD added to `sums` `[rows, d]`, whichever is given. `apart`: each view has rows of its own."""
    held, columns = saved.columns
    count, documents, size = saved.argmax.shape
    tokens, turn, warps = GATHER if sums is None else SCATTER
    blocks = triton.cdiv(size, tokens)
    packed, ragged = saved.query_starts is not None, saved.document_starts is not None
    unused = saved.grad
    if out is None:
        splits = saved.splits()
    launch(
        _rows_kernel, count * blocks * splits * columns,
        saved.grad, saved.argmax, saved.queries, saved.query_starts if packed else unused, saved.documents,
        saved.document_starts if ragged else unused,
        out if out is not None else unused, sums if sums is not None else unused,
        documents, size, saved.rows if ragged else saved.size, blocks, splits, columns, saved.query_rows, saved.queries.shape[-1],
        *saved.query_strides(), *saved.document_strides(),
        OWNED=saved.owned, LEAN=saved.argmax.dtype == torch.int16, PACKED_QUERIES=packed, APART=apart,
        RAGGED=ragged, GATHER=out is not None, SCATTER=sums is not None, TOKENS=tokens,
        TURN=turn, WIDTH=held, warps=warps,
    )  # fmt: skip


def _listed(saved: Saved, end_to_end: bool, out: Tensor) -> None:
    """dD into `out` by lists or by products, one write a row and no atomics."""
    starts = saved.document_starts
    if (starts is not None and saved.rows * saved.columns[1] >= 2**31 - 2**16) or saved.argmax.shape[0] * saved.argmax.shape[
        2
    ] >= 2**31:
        raise ValueError(
            f"backward: got 'csr' with {saved.rows} packed document tokens and {saved.argmax.shape[0]} queries of up to "
            f"{saved.argmax.shape[2]} tokens, need fewer than 2^31 of either; 'atomic' has no such limit"
        )
    if starts is not None and not end_to_end:
        _overlapping_documents(saved, out)
        return
    if saved.owned:
        if starts is not None:
            call(torch.Tensor.zero_, out)  # rows before the first document, should offsets not start at 0
        _launch_own(saved, out)
        return
    queries, count, size = saved.argmax.shape
    if starts is not None:
        owners = empty((saved.rows,), torch.int32, out.device)
        call(_owners, owners, starts)
        room = max(_RAGGED_LIST_BYTES, out.numel() * out.element_size() // 4)
        each = min(count, max(1, room // 4 // (queries * size)))
        lists = Lists(saved.argmax, starts, saved.rows, each, room, out.shape[-1])
        for first in range(0, count, each):
            last = min(count, first + each)
            _launch_lists(saved, lists.build(first, last - first), owners, out, 0, saved.rows, (first, last))
        return
    each = min(count, max(1, LIST_BYTES // 4 // (queries * size)), max(1, _MOST_ROWS // saved.size))
    lists = Lists(saved.argmax, None, saved.size, each, LIST_BYTES, out.shape[-1])
    for first in range(0, count, each):
        here = min(each, count - first)
        _launch_lists(saved, lists.build(first, here), None, out, first * saved.size, here * saved.size)


def _owners(owners: Tensor, starts: Tensor) -> None:
    """The document of each row: the last one that starts at or before it."""
    places = torch.arange(owners.shape[0], device=owners.device, dtype=starts.dtype)
    torch.searchsorted(starts, places, right=True, out_int32=True, out=owners)
    owners.sub_(1).clamp_(min=0)


def _overlapping_documents(saved: Saved, out: Tensor) -> None:
    """dD of views that may share rows, by a stable sort of the winners of some queries at a time, added up in order."""
    unrecorded()
    queries, count, size = saved.argmax.shape
    each = max(1, _MOST_SORTED // (count * size))
    sums = out if each >= queries else torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for first in range(0, queries, each):
        part = saved.some(first, min(queries, first + each))
        place = part.argmax.int()
        if place.dtype != part.argmax.dtype:
            place = place & 0xFFFF
            place = torch.where(place == 0xFFFF, -1, place)
        held = part.document_starts
        assert held is not None
        rows = held.clamp(min=0).view(-1 if saved.owned else 1, count, 1) + place
        grid = sorted_entries(torch.where(place >= 0, rows, saved.rows).flatten(), saved.rows, out.shape[-1])
        _launch_lists(part, grid, None, sums, 0, saved.rows, add=sums is not out)
    if sums is not out:
        out.copy_(sums)


def _launch_lists(
    saved: Saved,
    grid: Grid,
    owners: Tensor | None,
    out: Tensor,
    first_row: int,
    rows: int,
    documents_of: tuple[int, int] = (0, 0),
    add: bool = False,
) -> None:
    """Gradients of `rows` document tokens from `first_row` on; with `owners`, of those whose document is in `documents_of`.

    `add`: add them to what `out` holds.
    """
    held, columns = saved.columns
    queries, documents, size = saved.argmax.shape
    packed = saved.query_starts is not None
    marks = _pieces(grid)[-1]
    launch(
        _lists_kernel, (marks + rows) * columns,
        saved.grad, grid.list, grid.ends, saved.queries, saved.query_starts if packed else saved.grad,
        owners if owners is not None else saved.grad, out,
        first_row, *documents_of, queries, saved.query_rows, documents, size, saved.size, grid.blocks, columns, *divisor(size),
        saved.queries.shape[-1], *saved.query_strides(), *_pieces(grid), rows, grid.room,
        FLAT=grid.list.dtype == torch.int64, WEIGHTED=True, ADD=add, PACKED_QUERIES=packed, RAGGED=owners is not None,
        SPLIT=marks > 0, FIXED=grid.room > 0, ENTRIES=_entries(saved.queries, held), WIDTH=held, warps=_LIST_WARPS,
    )  # fmt: skip
    _launch_pieces(saved, grid, out, first_row, add)


def _pieces(grid: Grid) -> tuple[Tensor, Tensor, int, int]:
    """Where the sums of long lists' pieces and their rows go, how many entries lie between marks, and the number of marks."""
    pieces = grid.pieces
    return (pieces.sums, pieces.rows, pieces.apart, pieces.rows.shape[0]) if pieces else (grid.ends, grid.ends, 1, 0)


def _launch_pieces(saved: Saved, grid: Grid, out: Tensor, first_row: int, add: bool) -> None:
    """Write the rows of `out` that have long lists, which `_lists_kernel` left out, from the sums of their pieces."""
    if grid.pieces is not None:
        held, columns = saved.columns
        sums, rows, apart, marks = _pieces(grid)
        launch(
            _pieces_kernel, marks * columns,
            sums, rows, grid.ends, out, first_row, saved.size, grid.blocks, columns, apart, grid.room, out.shape[-1],
            FIXED=grid.room > 0, ADD=add, TURN=16, WIDTH=held, warps=2,
        )  # fmt: skip


def _entries(rows: Tensor, held: int) -> int:
    """How many rows of `held` columns a program of `_lists_kernel` reads at once."""
    return min(64, _LIST_BYTES // (held * rows.element_size()))


def _launch_own(saved: Saved, out: Tensor) -> None:
    held, columns = saved.columns
    queries, documents, size = saved.argmax.shape
    packed, ragged = saved.query_starts is not None, saved.document_starts is not None
    # FP32, and matrix units before Hopper, keep more in registers: half the tokens, or they spill.
    half = out.dtype == torch.float32 or hardware(out.device)[0] < (9, 0)
    held_tokens = _OWN_TOKENS // (2 if half else 1)
    tiles = 1 if ragged else triton.cdiv(saved.size, held_tokens)
    launch(
        _own_kernel, queries * documents * tiles * columns,
        saved.grad, saved.argmax, saved.queries, saved.query_starts if packed else saved.grad,
        saved.document_starts if ragged else saved.grad, out,
        documents, size, saved.size, tiles, columns, saved.rows, saved.query_rows, queries * documents, saved.queries.shape[-1],
        *saved.query_strides(),
        LEAN=saved.argmax.dtype == torch.int16, PACKED_QUERIES=packed, RAGGED=ragged, TOKENS=held_tokens, ROWS=_OWN_ROWS,
        WIDTH=held, warps=4,
    )  # fmt: skip
