"""Run under TRITON_INTERPRET=1 in a process of its own: document tokens that very many query tokens chose, by the path "csr".

    TRITON_INTERPRET=1 python interpreted_lists.py

Lists of `2 * APART` entries or more are summed in pieces. `interpreted_backward.py`, which this builds on, makes APART small.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from interpreted_backward import BFLOAT, CHECKED, HALF, SINGLE, Case, build, check, run
from torch import Tensor

from maxsim_kernels.gpu.backward import gradients, inverse_grid

APART = inverse_grid.APART


@contextmanager
def joined() -> Iterator[list[Tensor]]:
    """The rows that each launch of `_pieces_kernel` made of pieces; -1 for the other marks."""
    found: list[Tensor] = []
    launch = gradients.launch

    def noted(kernel: Any, grid: int, *arguments: Any, **options: Any) -> None:
        launch(kernel, grid, *arguments, **options)
        if kernel is gradients._pieces_kernel:
            found.append(arguments[1].clone())

    gradients.launch = noted  # type: ignore[assignment]
    try:
        yield found
    finally:
        gradients.launch = launch


def hot(case: Case, last: int) -> Case:
    """No winner beyond token `last` of its document: one token is everybody's where `last` is 0."""
    return replace(case, argmax=case.argmax.clamp(max=last), documents=case.documents.nan_to_num(1.0))


def check_layouts() -> None:
    """Every kind of list: dense documents, packed ones in several turns, views sorted in several parts and added up."""
    kinds = itertools.cycle([(0, HALF, 20), (1, SINGLE, 130), (2, BFLOAT, 12), (1, HALF, 130), (0, SINGLE, 20)])
    for documents, queries in (
        ("dense", "dense"), ("dense", "packed"), ("packed", "dense"), ("packed", "views"), ("views", "dense"), ("views", "packed"),
    ):  # fmt: skip
        last, dtype, d = next(kinds)
        count = 9 if documents == "views" else 4  # two parts of views
        case = build("shared", count, 17, 3, 5, d, queries=queries, documents=documents, dtype=dtype, values="gauss")
        with joined() as rows:
            check(hot(case, last), exact=False, paths=("csr",))
        assert any(bool((one >= 0).any()) for one in rows), (documents, queries, last)
        assert len(rows) >= (2 if documents == "dense" else 4), (documents, queries, len(rows))
    views = hot(build("pairs", 9, 17, 1, 6, 20, queries="packed", documents="views", values="gauss"), 0)
    one = torch.zeros_like(views.document_rows)
    assert views.document_starts is not None
    views = replace(views, document_rows=one, document_starts=torch.zeros_like(views.document_starts))
    with joined() as rows:
        check(views, exact=False, paths=("csr",))
    assert any(bool((one >= 0).any()) for one in rows)


def check_queries() -> None:
    """Query rows that many views share: their gradients are lists too."""
    case = build("shared", 40, 2, 3, 5, 20, queries="views", dtype=SINGLE)
    assert case.query_starts is not None
    same = torch.full_like(case.query_starts, 3)
    case = replace(case, query_starts=same, query_rows=same.long(), queries=case.queries.nan_to_num(1.0))
    with joined() as rows:
        check(case)
    assert [int((one >= 0).sum()) for one in rows[:3]] == [2, 2, 2]


def counted(counts: list[int], queries: int, dtype: torch.dtype) -> Case:
    """Three documents, each of whose token r has `counts[r]` query tokens, at random."""
    total = sum(counts)
    assert total % queries == 0
    case = build("shared", queries, total // queries, 3, len(counts), 20, dtype=dtype, values="gauss")
    chosen = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    each = torch.stack([chosen[torch.randperm(total)].view(queries, -1) for _ in range(3)], 1)
    filled = {name: torch.randn(getattr(case, name).shape).to(dtype) for name in ("queries", "documents")}
    return replace(case, argmax=each.to(torch.int32), grad=torch.randn(queries, 3), **filled)  # type: ignore[arg-type]


def check_lengths() -> None:
    """Lists around every length where the number of pieces changes, beginning anywhere between two marks."""
    orders = [[APART * n + more for n in (2, 3, 5) for more in (-1, 0, 1)], [0, 1, 2 * APART, 2 * APART, 0, 7 * APART + 5]]
    orders += [[2 * APART] * 4, [2 * APART - 1] * 4, [1, 2 * APART, 3 * APART - 1], [APART - 1, 2 * APART, 2 * APART - 1, 20]]
    for number, order in enumerate(orders):
        queries = 4
        counts = [*order, -sum(order) % queries]
        long = sum(length >= 2 * APART for length in counts)
        with joined() as rows:
            check(counted(counts, queries, (HALF, SINGLE)[number % 2]), exact=False, paths=("csr",))
        held = [int((one >= 0).sum()) for one in rows]
        assert sum(held) == 3 * 3 * long, (order, held)  # three calls, three documents


def check_place() -> None:
    """A list has the same sum, to the bit, wherever it lies among others; and marks further apart, by the number of entries."""
    case = counted([3, 90, 0, 17, 16, 46], 4, SINGLE)
    _, ahead = run(case, "csr")
    turned = replace(case, argmax=case.argmax.flip(1), grad=case.grad.flip(1), documents=case.documents.flip(0).contiguous())
    _, behind = run(turned, "csr")
    assert torch.equal(ahead.view(torch.int32), behind.flip(0).view(torch.int32))
    most, inverse_grid._MARKS = inverse_grid._MARKS, 3
    try:
        with joined() as rows:
            check(case, exact=False, paths=("csr",))
    finally:
        inverse_grid._MARKS = most
    assert {one.numel() for one in rows} == {3}


def check_bounds() -> None:
    """Every entry lies behind a mark, and what pieces take stays small whatever is listed."""
    for entries, width in itertools.product((1, 15, 16, 17, 4 << 20, 2**31 - 1, 1 << 34), (1, 64, 128, 130, 768, 4096)):
        count, apart = inverse_grid.marks(entries, width)
        assert apart >= APART
        assert (count - 1) * apart < entries <= count * apart
        assert count * width * 4 <= 2 << 20


torch.manual_seed(0)
for group in (check_layouts, check_queries, check_lengths, check_place, check_bounds):
    group()
sys.stdout.write(f"{len(CHECKED)} checked\n")
