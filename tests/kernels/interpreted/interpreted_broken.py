"""Run under TRITON_INTERPRET=1 in a process of its own: packed rows whose offsets break their promise.

    TRITON_INTERPRET=1 python interpreted_broken.py GROUP

What comes out is undefined then; that nothing outside the buffers is read or written is not, nor that every score is written: documents
of which the ragged kernel's table has no tiles score NaN. A forward may leave any winner, so the backward's winners here are any too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from interpreted_backward import CHECKED, PATHS, SINGLE, Case, build, narrow_winners, plain
from interpreted_forward import FALSE_PROCESSORS, SMALL, pretend, ragged
from torch import Tensor

from maxsim_kernels import Packed, quantize_int8
from maxsim_kernels.checks import Call, Options, validate
from maxsim_kernels.gpu.backward import gradients, inverse_grid
from maxsim_kernels.gpu.forward import dispatch

FENCE = 4096  # numbers on either side
POISON = 77  # what memory holds that nobody has written,
LARGE = 1e30  # and where it holds FP32: sums of it show too
# Layout, queries, documents.
CASES = (
    ("shared", "dense", "packed"), ("shared", "packed", "dense"), ("shared", "packed", "packed"), ("shared", "views", "views"),
    ("pairs", "dense", "packed"), ("pairs", "packed", "packed"), ("pairs", "packed", "dense"),
)  # fmt: skip


def spoiled(layout: str, queries: str, documents: str) -> Case:
    """A case with any winners and offsets, its tokens amid NaN."""
    case = build(layout, 4, 9, 5, 20, 8, queries=queries, documents=documents, dtype=SINGLE)
    rows = case.documents.numel() // 8
    given: dict[str, Any] = {name: fenced(getattr(case, name).nan_to_num(1.0)) for name in ("queries", "documents")}
    most = rows + FENCE // 8 if documents != "dense" else 20
    given["argmax"] = torch.randint(-1, most, case.argmax.shape, dtype=torch.int32)
    given["grad"] = fenced(torch.ones_like(case.grad))
    if documents != "dense":
        given["document_starts"] = broken(case.document_starts, rows)
    if queries != "dense":
        given["query_starts"] = broken(case.query_starts, case.queries.shape[0])
    return replace(case, **given)


def fenced(tokens: Tensor) -> Tensor:
    """The same tokens amid NaN."""
    held = plain(tokens.numel() + 2 * FENCE, dtype=tokens.dtype).fill_(torch.nan)
    held[FENCE:-FENCE] = tokens.flatten()
    return held[FENCE:-FENCE].view(tokens.shape)


def broken(starts: Tensor | None, rows: int) -> Tensor:
    """Before the buffer, at its end, beyond it, and so far that sums and differences overflow."""
    assert starts is not None
    wild = torch.tensor([rows - 1, -3, 2**32 - 7, -(2**63), rows + 40, 2**40, 2**63 - 1])
    return wild.repeat(starts.numel())[: starts.numel()]


@contextmanager
def unwritten() -> Iterator[None]:
    """Places in the lists that programs of overlapping documents take from each other: nobody writes the last of them."""
    launch = inverse_grid.launch

    def overwritten(kernel: Any, grid: int, *arguments: Any, **options: Any) -> None:
        launch(kernel, grid, *arguments, **options)
        if kernel is inverse_grid._place_kernel and options["RAGGED"]:
            arguments[3].view(-1)[::5] = 2**31 - 1
            arguments[3].view(-1)[1::5] = -7

    inverse_grid.launch = overwritten  # type: ignore[assignment]
    try:
        yield
    finally:
        inverse_grid.launch = launch


def poison(dtype: torch.dtype) -> float:
    """What memory of a dtype holds before anybody writes."""
    return LARGE if dtype == SINGLE else POISON


@contextmanager
def fences() -> Iterator[list[Tensor]]:
    """What is allocated lies amid numbers that must stay."""
    held: list[Tensor] = []

    def between(*shape: Any, **options: Any) -> Tensor:
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        size = torch.Size(shape).numel()
        held.append(plain(size + 2 * FENCE, **options).fill_(poison(options["dtype"])))
        return held[-1][FENCE : FENCE + size].view(shape)

    torch.empty = between  # type: ignore[assignment]
    try:
        yield held
    finally:
        torch.empty = plain


def stayed(allocated: list[Tensor], what: tuple[Any, ...]) -> None:
    """Whether every fence is as it was."""
    assert allocated
    for one in allocated:
        assert bool((torch.cat([one[:FENCE], one[-FENCE:]]) == poison(one.dtype)).all()), (*what, "wrote outside")


def check_backward() -> None:
    for what in CASES:
        case = spoiled(*what)
        for path, winners in itertools.product(PATHS, (case.argmax, narrow_winners(case))):
            with fences() as allocated, unwritten():
                found = gradients.backward(
                    case.grad, winners, case.queries, case.query_starts, case.documents, case.document_starts, case.layout, True,
                    True, path, case.queries_end_to_end, case.documents_end_to_end,
                )  # fmt: skip
            assert all(bool(one.isfinite().all()) for one in found), (*what, path, "read outside")
            stayed(allocated, (*what, path))
            CHECKED.append(path)


def spoiled_calls(quantised: bool) -> Iterator[Call]:
    """Packed documents and queries that were right when they were checked."""
    lengths, few, rows = torch.tensor([5, 0, 20, 1, 14]), torch.randn(3, 9, 32), 40
    values = torch.randn(rows, 32)
    documents, asked = ragged(lengths, 32, SINGLE).with_values(values), ragged(torch.tensor([4, 0, 17]), 32, SINGLE)
    views = Packed.view(values, torch.zeros_like(lengths), lengths)
    falling, wild = torch.tensor([0, rows, 0, rows, 0]), torch.tensor([-5, 0, rows - 1, 2**31 - 1, 2**40])
    for held, starts, sizes in (
        (documents, falling, torch.tensor([rows, -rows, rows, -rows, rows])), (documents, 1000 * falling, 1000 * falling.flip(0)),
        (views, wild, wild.abs()), (views, wild, -wild),
    ):  # fmt: skip
        stored: Any = quantize_int8(held) if quantised else held
        for queries in (few, few[0], asked):
            call = validate(queries, stored, Options())
            given: dict[str, Any] = {"document_starts": starts, "document_lengths": sizes}
            given["queries"] = fenced(call.queries)
            if call.query_starts is not None:
                given |= {"query_starts": torch.tensor([-3, 2**40, 20]), "query_lengths": torch.tensor([9, 5, 2**40])}
            given |= {"scales": fenced(call.scales)} if call.scales is not None else {"documents": fenced(call.documents)}
            yield replace(call, **given)


def check_forward() -> None:
    pretend(FALSE_PROCESSORS)
    unscored_documents = 0
    for quantised, kernel in itertools.product((False, True), ("general", "stream", "ragged", "wide")):
        for call, winners in itertools.product(spoiled_calls(quantised), (False, True)):
            if winners and kernel == "stream":
                continue
            dispatch.choose = lambda *_, kernel=kernel: (kernel, SMALL)
            with fences() as allocated:
                scores, argmax = dispatch.forward(replace(call, winners=winners))
            what = (kernel, quantised, winners)
            assert not bool((scores.abs() >= LARGE / 2).logical_and(scores.isfinite()).any()), (*what, "left a score unwritten")
            assert not bool((argmax == POISON).any()), (*what, "left a winner unwritten")
            unscored = scores.isnan()
            if kernel == "ragged" and call.end_to_end:
                asking = unscored[unscored.any(1)]  # a query without a token scores 0
                assert not len(asking) or torch.equal(asking.all(0), asking.any(0)), (
                    *what,
                    "a document is scored by some queries",
                )
                unscored_documents += int(unscored.any(0).sum())
            else:
                assert not bool(unscored.any()), (*what, "read outside")
            stayed(allocated, what)
            CHECKED.append(kernel)
    assert unscored_documents, "no document was without room: the case tests nothing"


torch.manual_seed(0)
GROUPS = {"backward": check_backward, "forward": check_forward}
GROUPS[sys.argv[1]]()
sys.stdout.write(f"{len(CHECKED)} checked\n")
