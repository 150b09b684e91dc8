"""Run under TRITON_INTERPRET=1 in a process of its own (the variable counts before Triton is first imported).

    TRITON_INTERPRET=1 python interpreted_backward.py GROUP

Every gradient path on CPU tensors against sums in FP64. Winners are made, not found, so that they fall where a forward pass seldom puts
them. Memory nobody has written is poisoned, and so is every token without a winner: it must not be read into a result.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import quick_interpreter  # noqa: F401 - kernels run under it
import torch
from torch import Tensor
from triton.runtime import interpreter

from maxsim_kernels import maxsim
from maxsim_kernels.cpu import backward as cpu_backward
from maxsim_kernels.gpu.backward import gradients, inverse_grid

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
PATHS = ("unified", "atomic", "csr")
# Of the norm of a row, the issue's numbers; and FP32's own rounding where a sum cancels, of the sum of its |terms| (tolerances.py).
LIMIT = {SINGLE: 1e-5, HALF: 1e-2, BFLOAT: 1e-2}
COSINE = {SINGLE: 0.99999, HALF: 0.9999, BFLOAT: 0.9999}
ROUNDING = 2e-6
CHECKED: list[str] = []
# Small pieces, so that small shapes have several: winners that are ranked, counted and placed at once, documents listed at once,
# entries of a long list that a program sums.
inverse_grid.PLACE_CHUNK, inverse_grid.COUNT_CHUNK, inverse_grid._BLOCK_WINNERS, gradients.LIST_BYTES = 16, 64, 32, 400
inverse_grid.APART = 8
inverse_grid.TABLE_CHUNK, inverse_grid.WHOLE_CHUNK = 64, 16
inverse_grid._TABLE_WINNERS = 100  # lists of fewer winners are begun by one launch
gradients._RAGGED_LIST_BYTES, gradients._MOST_SORTED = 600, 300  # packed documents and views take several turns too
TURN, TABLES = itertools.count(), itertools.count()
plain, plain_like, plain_new = torch.empty, torch.empty_like, Tensor.new_empty


@dataclass(frozen=True)
class Case:
    """The arguments of one call, and where each query and document begins among the flattened rows."""

    layout: str
    grad: Tensor
    argmax: Tensor
    queries: Tensor
    query_starts: Tensor | None
    documents: Tensor
    document_starts: Tensor | None
    queries_end_to_end: bool
    documents_end_to_end: bool
    query_rows: Tensor  # [Nq]
    document_rows: Tensor  # [Nq or 1, documents of a query]

    def cells(self) -> tuple[Tensor, Tensor]:
        """Winners `[Nq, n, W]` and upstream `[Nq, n]`: pairs have n = 1."""
        one = self.layout == "pairs"
        return (self.argmax.unsqueeze(1), self.grad.unsqueeze(1)) if one else (self.argmax, self.grad)


def poisoned(function: Any) -> Any:
    def call(*size: Any, **options: Any) -> Tensor:
        tensor = function(*size, **options)
        return tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 99)

    return call


@contextmanager
def poison() -> Iterator[None]:
    """Memory nobody has written shows as NaN or as a number no index has: a missed store fails loudly."""
    torch.empty, torch.empty_like, Tensor.new_empty = map(poisoned, (plain, plain_like, plain_new))  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.empty, torch.empty_like, Tensor.new_empty = plain, plain_like, plain_new  # type: ignore[method-assign]


def lengths_of(kind: str, shape: tuple[int, ...], size: int) -> Tensor:
    """Random lengths up to `size`, 0 and `size` among them; padded tokens: `size`, with one empty row of three or more."""
    found = torch.full(shape, size) if kind == "dense" else torch.randint(0, size + 1, shape)
    flat = found.view(-1)
    if flat.numel() >= 3:
        flat[0], flat[1] = size, 0
    return found


def rows_of(kind: str, lengths: Tensor, size: int, index: torch.dtype) -> tuple[int, Tensor | None, Tensor]:
    """Rows of the buffer, starts as the call gets them, and the first row of each query or document."""
    count = lengths.numel()
    if kind == "dense":
        return count * size, None, torch.arange(count).view(lengths.shape) * size
    if kind == "packed":
        ends = lengths.flatten().cumsum(0)
        starts = ends - lengths.flatten()
        total = int(ends[-1]) if count else 0
    else:  # views: in a buffer too small for all of them, so that they overlap, with rows that belong to none at both ends
        total = max(size, int(lengths.sum()) // 2) + 6
        starts = 3 + (torch.rand(count) * (total - 5 - lengths.flatten())).long()
    return total, starts.to(index), starts.view(lengths.shape)


def numbers(shape: tuple[int, ...], values: str) -> Tensor:
    """Small integers, whose FP32 sums are exact in any order ("grid"), or normal values ("gauss")."""
    return torch.randint(-2, 3, shape).float() if values == "grid" else torch.randn(shape)


def build(
    layout: str = "shared", nq: int = 3, lq: int = 7, n: int = 4, ld: int = 20, d: int = 20, *, queries: str = "dense",
    documents: str = "dense", dtype: torch.dtype = HALF, values: str = "grid", index: torch.dtype = torch.int64,
) -> Case:  # fmt: skip
    """A case with random winners: none for empty rows, for masked query tokens and for some cells besides."""
    own = 1 if layout == "pairs" else n
    asked = lengths_of(queries, (nq,), lq)
    held = lengths_of(documents, (1, n) if layout == "shared" else (nq, own), ld)
    query_total, query_starts, query_rows = rows_of(queries, asked, lq, index)
    total, document_starts, document_rows = rows_of(documents, held, ld, index)
    width = lq if queries == "dense" else int(asked.max()) if nq else 0
    argmax = (torch.rand(nq, own, width) * held.unsqueeze(-1)).long()
    nothing = (held.unsqueeze(-1) == 0) | (torch.arange(width) >= asked[:, None, None])
    nothing = nothing | (torch.rand(nq, 1, width) < 0.1) | (torch.rand(nq, own, width) < 0.05)
    argmax = argmax.masked_fill(nothing, -1).to(torch.int32)
    query_tokens, tokens = numbers((query_total, d), values), numbers((total, d), values)
    grad = numbers((nq, own), values).masked_fill(nothing.all(-1), torch.nan)
    case = Case(
        layout, grad, argmax, query_tokens.to(dtype), query_starts, tokens.to(dtype), document_starts,
        queries != "views", documents != "views", query_rows, document_rows,
    )  # fmt: skip
    q, t, _ = chosen(case)
    case.queries[~seen(query_total, q)], case.documents[~seen(total, t)] = torch.nan, torch.nan
    dense = {} if document_starts is not None else {"documents": case.documents.view(*held.squeeze(0).shape, ld, d)}
    if layout == "pairs":
        dense = {name: tensor.squeeze(1) for name, tensor in dense.items()}
        dense |= {"grad": grad[:, 0], "argmax": argmax[:, 0].contiguous()}
    if query_starts is None:
        dense["queries"] = case.queries.view(nq, lq, d)
    return replace(case, **dense)


def chosen(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Query row, document row and upstream gradient of every winner."""
    argmax, grad = (case.argmax, case.grad) if case.argmax.dim() == 3 else case.cells()
    q, n, i = (argmax >= 0).nonzero(as_tuple=True)
    bases = case.document_rows.expand(argmax.shape[:2])
    return case.query_rows[q] + i, bases[q, n] + argmax[q, n, i], grad[q, n]


def seen(count: int, rows: Tensor) -> Tensor:
    return torch.zeros(count, dtype=torch.bool).index_fill_(0, rows, True)


def truth(case: Case) -> list[tuple[Tensor, Tensor]]:
    """dQ and dD in FP64 with the same sums of |terms|, winner by winner."""
    q, t, weight = chosen(case)
    width = case.queries.shape[-1]
    queries, documents = case.queries.reshape(-1, width).double(), case.documents.reshape(-1, width).double()
    found = []
    for rows, others, shape in ((q, documents[t], case.queries.shape), (t, queries[q], case.documents.shape)):
        terms = weight.double().unsqueeze(1) * others
        zeros = torch.zeros(shape.numel() // width, width, dtype=torch.float64)
        found.append(tuple(zeros.index_add(0, rows, each).view(shape) for each in (terms, terms.abs())))
    return found  # type: ignore[return-value]


def compare(what: str, got: Tensor, need: Tensor, size: Tensor, exact: bool) -> None:
    assert got.dtype in LIMIT, (what, got.dtype)
    assert got.shape == need.shape, (what, got.shape, need.shape)
    assert got.is_contiguous(), what
    wide, finite = got.double(), need.isfinite()
    assert torch.equal(wide.isfinite(), finite), (what, got[wide.isfinite() != finite])
    if exact:
        rounded = need.to(got.dtype)
        assert torch.equal(got.where(finite, 0), rounded.where(finite, 0)), (what, int((got != rounded)[finite].sum()))
        return
    allowed = LIMIT[got.dtype] * need.norm(dim=-1, keepdim=True) + ROUNDING * size + torch.finfo(got.dtype).tiny
    assert bool((wide - need).abs().le(allowed).all()), (what, float(((wide - need).abs() - allowed).max()))
    norms = wide.norm() * need.norm()
    assert norms == 0 or float((wide * need).sum() / norms) >= COSINE[got.dtype], what


def run(
    case: Case, path: str, argmax: Tensor | None = None, queries: bool = True, documents: bool = True
) -> tuple[Tensor, Tensor]:
    """One call on poisoned memory."""
    with poison():
        return gradients.backward(
            case.grad, case.argmax if argmax is None else argmax, case.queries, case.query_starts, case.documents,
            case.document_starts, case.layout, queries, documents, path, case.queries_end_to_end, case.documents_end_to_end,
        )  # fmt: skip


def check(case: Case, *, exact: bool = True, paths: tuple[str, ...] = PATHS) -> None:
    """Every path, with winners of 32 and of 16 bits in turn, and upstream gradients of float32 and (where sums are exact) bfloat16; where sums have an order, csr also with its programs in reverse and its lists begun otherwise."""
    (need_q, size_q), (need_d, size_d) = truth(case)
    what = (case.layout, tuple(case.queries.shape), tuple(case.documents.shape), case.queries.dtype)
    known = cpu_backward.backward(
        case.grad, case.argmax, case.queries, case.query_starts, case.documents, case.document_starts, case.layout, True, True
    )  # type: ignore[arg-type]
    narrow = next(TURN) % 2 == 0
    results = {"cpu": known}
    for path in paths:
        given = replace(case, grad=case.grad.to(BFLOAT)) if exact and narrow == (path == "atomic") else case
        results[path] = run(given, path, narrow_winners(case) if narrow == (path != "atomic") else case.argmax)
    for path, (dq, dd) in results.items():
        compare(f"dQ {path} {what}", dq, need_q, size_q, exact)
        compare(f"dD {path} {what}", dd, need_d, size_d, exact)
        CHECKED.append(path)
    if not exact:
        with reverse_order():
            again = run(case, "csr", narrow_winners(case))
        for one, other in zip(results["csr"], again, strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16)), f"csr {what} differs from itself"
        if case.layout != "shared" or case.document_starts is not None:
            return
        with other_tables():
            again = run(case, "csr", narrow_winners(case))
        for one, other in zip(results["csr"], again, strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16)), f"csr {what} differs by how its lists are begun"


def narrow_winners(case: Case) -> Tensor:
    """The 16 bits of an unsigned index; 65,535 where there is no winner."""
    return case.argmax.to(torch.int16)


@contextmanager
def other_tables() -> Iterator[None]:
    """Lists that one launch would begin take two and a cumulative sum, and the other way round."""
    most = inverse_grid._TABLE_WINNERS
    inverse_grid._TABLE_WINNERS = 0 if next(TABLES) % 2 else 1 << 20
    try:
        yield
    finally:
        inverse_grid._TABLE_WINNERS = most


@contextmanager
def reverse_order() -> Iterator[None]:
    """The programs of a launch run from the last to the first."""
    builder = interpreter.interpreter_builder
    forwards = builder.set_grid_idx

    def backwards(*index: int) -> None:
        forwards(*(size - 1 - place for size, place in zip(builder.grid_dim, index, strict=True)))

    builder.set_grid_idx = backwards
    try:
        yield
    finally:
        builder.set_grid_idx = forwards


def check_shared() -> None:
    for dtype, values, shape in (
        (HALF, "grid", (1, 1, 1, 1, 1)), (SINGLE, "grid", (3, 7, 4, 31, 20)), (HALF, "gauss", (2, 31, 3, 31, 64)),
        (SINGLE, "gauss", (2, 63, 1, 100, 128)), (BFLOAT, "gauss", (4, 7, 3, 7, 130)), (HALF, "grid", (1, 100, 1, 31, 300)),
        (SINGLE, "gauss", (7, 1, 35, 1, 20)), (HALF, "grid", (31, 2, 2, 63, 1)), (SINGLE, "gauss", (40, 7, 2, 7, 20)),
    ):  # fmt: skip
        check(build("shared", *shape, dtype=dtype, values=values), exact=values == "grid")


def check_own() -> None:
    for layout in ("per_query", "pairs"):
        for dtype, values, shape in (
            (HALF, "grid", (1, 1, 1, 1, 1)), (SINGLE, "grid", (3, 7, 4, 31, 20)), (HALF, "gauss", (2, 31, 3, 63, 64)),
            (SINGLE, "gauss", (2, 63, 2, 100, 128)), (HALF, "grid", (3, 31, 2, 7, 130)), (SINGLE, "gauss", (5, 1, 3, 1, 300)),
        ):  # fmt: skip
            check(build(layout, *shape, dtype=dtype, values=values), exact=values == "grid")
        for queries in ("packed", "views"):
            check(build(layout, 4, 31, 3, 63, 20, queries=queries))
    for queries, documents in (("dense", "packed"), ("packed", "packed"), ("views", "views"), ("packed", "dense")):
        check(build("pairs", 5, 31, 1, 63, 20, queries=queries, documents=documents, dtype=SINGLE, index=torch.int32))


def check_packed() -> None:
    kinds = ("dense", "packed", "views")
    for queries, documents in ((one, other) for one in kinds for other in kinds if (one, other) != ("dense", "dense")):
        check(build("shared", 4, 7, 5, 20, 20, queries=queries, documents=documents, dtype=SINGLE))
        check(build("shared", 3, 20, 4, 20, 64, queries=queries, documents=documents, values="gauss"), exact=False)
    check(build("shared", 1, 63, 3, 31, 130, queries="packed", documents="packed", index=torch.int32))
    check(build("shared", 1, 7, 40, 3, 20, documents="packed", dtype=SINGLE, values="gauss"), exact=False)
    check(build("shared", 3, 9, 4, 31, 7, documents="views", dtype=BFLOAT, values="gauss", index=torch.int32), exact=False)
    case = build("shared", 3, 9, 4, 31, 20, queries="packed", documents="packed")
    check(replace(case, queries_end_to_end=False, documents_end_to_end=False))  # rows that follow each other are views too


def check_edges() -> None:
    for layout in ("shared", "per_query", "pairs"):
        for sizes in ((0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)):
            check(build(layout, *sizes, 8))
    for kind in ("packed", "views"):
        check(build("shared", 2, 3, 0, 5, 8, documents=kind))
        check(build("shared", 0, 3, 4, 5, 8, queries=kind))
    for layout, documents in (("shared", "dense"), ("shared", "packed"), ("per_query", "dense"), ("pairs", "dense")):
        case = build(layout, 3, 9, 3, 12, 12, documents=documents)
        check(replace(case, argmax=torch.full_like(case.argmax, -1)))
        check_one_side(case)
        check_upstream(case)
        check_crowds(build(layout, 3, 31, 3, 12, 12, documents=documents))
        check_strides(case)
    check_expanded()
    check_real_winners()
    check_many_tokens()


def check_one_side(case: Case) -> None:
    (need_q, size_q), (need_d, size_d) = truth(case)
    for path in PATHS:
        dq, nothing = run(case, path, documents=False)
        compare(path, dq, need_q, size_q, True)
        assert nothing.shape == (0,)
        assert nothing.dtype == case.documents.dtype
        nothing, dd = run(case, path, queries=False)
        compare(path, dd, need_d, size_d, True)
        assert nothing.shape == (0,)
        CHECKED.append(path)


def check_upstream(case: Case) -> None:
    """NaN and infinity upstream reach the rows whose winners see them, and no others; so do those of a token."""
    for value in (torch.nan, torch.inf):
        grad = case.grad.clone()
        grad.view(-1)[-1] = value
        assert not grad.view(-1)[0].isnan()
        check(replace(case, grad=grad))
        q, t, _ = chosen(case)
        for name, rows in (("queries", q), ("documents", t)):
            tokens = getattr(case, name).clone()
            tokens.view(-1, tokens.shape[-1])[rows[0], 2] = value
            # csr multiplies a query's tokens by 0 and 1 where documents have one query: a NaN among them spreads over what they chose.
            spreads = name == "queries" and case.layout != "shared"
            check(replace(case, **{name: tokens}), paths=("unified", "atomic") if spreads else PATHS)


def check_crowds(case: Case) -> None:
    """All winners one token; and as evenly spread as they can be."""
    hidden = {name: getattr(case, name).nan_to_num(1.0) for name in ("queries", "documents", "grad")}
    case = replace(case, **hidden)
    size = 12
    if case.document_starts is not None:  # the first document is the longest, others may be shorter
        case = replace(
            case, document_starts=case.document_starts * 0, document_rows=case.document_rows * 0, documents_end_to_end=False
        )
    spread = (torch.arange(case.argmax.numel()) % size).view(case.argmax.shape).to(torch.int32)
    check(replace(case, argmax=torch.full_like(case.argmax, 3)))
    check(replace(case, argmax=spread))


def check_strides(case: Case) -> None:
    for how in (
        lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
        lambda x: torch.stack([x, x * torch.nan], -1)[..., 0],
    ):
        check(replace(case, queries=how(case.queries), documents=how(case.documents)))
    expanded = case.grad[..., :1].expand_as(case.grad)
    check(
        replace(case, grad=expanded.nan_to_num(1.0).contiguous(), documents=case.documents[..., :1].expand_as(case.documents))
    )


def check_expanded() -> None:
    """One token in every place: rows that lie nowhere apart."""
    for layout, kinds in (("shared", ("dense", "packed", "views")), ("per_query", ("dense",)), ("pairs", ("dense", "packed"))):
        for kind in kinds:
            case = build(layout, 3, 9, 3, 7, 12, queries=kind, documents=kind)
            one = {"queries": case.queries, "documents": case.documents}
            one = {name: numbers((1,) * (x.dim() - 1) + (12,), "grid").to(HALF).expand(x.shape) for name, x in one.items()}
            check(replace(case, **one))  # type: ignore[arg-type]


def check_real_winners() -> None:
    """Of a forward pass over tokens with many equal products."""
    queries, documents = numbers((3, 9, 4), "grid"), numbers((3, 20, 4), "grid")
    made = build("shared", 3, 9, 3, 20, 4, dtype=SINGLE)
    _, argmax = maxsim(queries, documents, return_argmax=True)
    check(replace(made, queries=queries, documents=documents, argmax=argmax, grad=numbers((3, 3), "grid")))


def check_many_tokens() -> None:
    """Indices that 16 bits hold only without a sign; 65,535 itself means none. (Lists take a program a token: too slow here.)"""
    places = torch.tensor([32_999, 32_768, 0, -1, 32_767], dtype=torch.int32)
    for layout, paths in (("shared", ("unified", "atomic")), ("pairs", ("csr",))):
        made = build(layout, 1, 5, 2, 33_000, 1, dtype=SINGLE)
        filled = {name: numbers(getattr(made, name).shape, "grid") for name in ("queries", "documents", "grad")}
        case = replace(made, argmax=places.expand(made.argmax.shape).contiguous(), **filled)
        (need_q, size_q), (need_d, size_d) = truth(case)
        for path in paths:
            dq, dd = run(case, path, narrow_winners(case))
            compare(f"dQ {path} of many tokens", dq, need_q, size_q, True)
            compare(f"dD {path} of many tokens", dd, need_d, size_d, True)
            CHECKED.append(path)


torch.manual_seed(0)
GROUPS = {"shared": check_shared, "own": check_own, "packed": check_packed, "edges": check_edges}
if __name__ == "__main__":
    GROUPS[sys.argv[1]]()
    sys.stdout.write(f"{len(CHECKED)} checked\n")
